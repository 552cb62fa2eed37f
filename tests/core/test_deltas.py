"""Networks saved on a base: only what differs, put on and taken off in place."""

import keras
import numpy as np
import pytest
import storage_cases
from delta_cases import adapted, assert_same_weights, copy_of, pretrained, weights
from helpers import same_bits, sgd, value_of, values_of
from keras import layers

import keras_freeze as kf
from keras_freeze.storage.container import read_container

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)


@pytest.fixture(name="base")
def base_model():
    return pretrained()


@pytest.mark.cases(1)
@pytest.mark.parametrize("values", ["float32", "float16"])
def test_a_delta_is_small_and_loads_on_its_base(base, values, tmp_path):
    model = adapted(base)
    kf.save(model, tmp_path / "delta.freeze", base=base, values=values)
    kf.save(model, tmp_path / "whole.freeze", include_frozen=True)
    loaded = kf.load(tmp_path / "delta.freeze", base=base)
    if values == "float32":
        assert_same_weights(loaded, model)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    sizes = [(tmp_path / f"{name}.freeze").stat().st_size for name in ("delta", "whole")]
    assert sizes[0] < sizes[1] / 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("ending", ["keras", "freeze"])
def test_the_base_may_be_a_file(base, ending, tmp_path):
    path = tmp_path / f"base.{ending}"
    if ending == "keras":
        base.save(path)
    else:
        kf.save(base, path)
    model = adapted(base)
    kf.save(model, tmp_path / "delta.freeze", base=path)
    assert_same_weights(kf.load(tmp_path / "delta.freeze", base=str(path)), model)
    kf.apply_delta(base, tmp_path / "delta.freeze")
    assert_same_weights(base, model)


def test_deltas_are_swapped_on_one_base(base, tmp_path):
    before = values_of(weights(base))
    models = [adapted(base, seed, rate) for seed, rate in ((1, 0.9), (2, 0.99), (3, 0.5))]
    for i, model in enumerate(models):
        kf.save(model, tmp_path / f"{i}.freeze", base=base)
    x, _ = storage_cases.data_for(base)
    for i in (0, 1, 2, 1, 0):
        kf.apply_delta(base, tmp_path / f"{i}.freeze")
        assert_same_weights(base, models[i])
        expected = storage_cases.outputs_of(models[i], x)
        assert np.array_equal(storage_cases.outputs_of(base, x), expected)
        kf.remove_delta(base, tmp_path / f"{i}.freeze")
        for old, variable in zip(before, weights(base), strict=True):
            assert same_bits(old, value_of(variable)), variable.path


def test_a_delta_of_a_pruned_network_can_be_taken_off(base, tmp_path):
    before = values_of(weights(base))
    model = adapted(base, frozen_weights="zero")
    kf.save(model, tmp_path / "delta.freeze", base=base)
    kf.apply_delta(base, tmp_path / "delta.freeze")
    assert_same_weights(base, model)
    kf.remove_delta(base, tmp_path / "delta.freeze")
    for old, variable in zip(before, weights(base), strict=True):
        assert same_bits(old, value_of(variable))


def test_decayed_weights_of_a_base_are_one_factor_times_it(base, tmp_path):
    model = adapted(base, frozen_weights="decay", l2=0.05)
    kf.save(model, tmp_path / "delta.freeze", base=base)
    assert_same_weights(kf.load(tmp_path / "delta.freeze", base=base), model)


def test_a_fully_trained_copy_needs_the_base_only_for_what_is_equal(base, tmp_path):
    model = copy_of(base)
    model.layers[-1].kernel.assign(model.layers[-1].kernel + 1.0)
    kf.save(model, tmp_path / "delta.freeze", base=base)
    stored = [row.num_stored for row in kf.storage.inspect(tmp_path / "delta.freeze").rows]
    assert [n for n in stored if n > 2] == [60]  # the kernel; two numbers are Dropout's state
    assert_same_weights(kf.load(tmp_path / "delta.freeze", base=base), model)


def test_a_network_with_a_new_head_loads_on_its_base_but_is_not_applied(base, tmp_path):
    body = copy_of(base)
    model = keras.Sequential([keras.Input((8, 6)), *body.layers[:-1], layers.Dense(7)])
    optimizer = kf.FreezeOptimizer(sgd(0.05), 0.9, exclude=model.layers[-1])
    model.compile(optimizer=optimizer, loss="mse")
    x = storage_cases.data_for(base)[0]
    y = np.random.default_rng(0).normal(size=(24, 7)).astype("float32")
    kf.freeze(model, x, y)
    storage_cases.train_on(model, x, y)
    kf.save(model, tmp_path / "head.freeze", base=base)
    assert_same_weights(kf.load(tmp_path / "head.freeze", base=base), model)
    before = values_of(base.variables)
    with pytest.raises(kf.FreezeFileError, match=r"load\(path, base=model\)"):
        kf.apply_delta(base, tmp_path / "head.freeze")
    for old, variable in zip(before, base.variables, strict=True):
        assert same_bits(old, value_of(variable))


def test_another_base_is_an_error(base, tmp_path):
    kf.save(adapted(base), tmp_path / "delta.freeze", base=base)
    other = copy_of(base)
    last = other.layers[-1].kernel
    changed = value_of(last)
    changed[0, 0] = np.nextafter(changed[0, 0], np.float32(9))
    last.assign(changed)
    before = values_of(other.variables)
    for use in (
        lambda: kf.load(tmp_path / "delta.freeze", base=other),
        lambda: kf.apply_delta(other, tmp_path / "delta.freeze"),
    ):
        with pytest.raises(kf.FreezeFileError, match="another base"):
            use()
    for old, variable in zip(before, other.variables, strict=True):
        assert same_bits(old, value_of(variable))


def test_the_random_state_of_a_base_does_not_make_it_another(base, tmp_path):
    kf.save(adapted(base), tmp_path / "delta.freeze", base=base)
    state = next(v for v in base.variables if v.path.endswith("seed_generator_state"))
    state.assign(state + 1)
    moved = value_of(state)
    kf.apply_delta(base, tmp_path / "delta.freeze")
    assert np.array_equal(value_of(state), moved)


def test_a_missing_or_needless_base_is_an_error(base, tmp_path):
    kf.save(adapted(base), tmp_path / "delta.freeze", base=base)
    with pytest.raises(ValueError, match="pass this model, or the path of its file, as `base`"):
        kf.load(tmp_path / "delta.freeze")
    kf.save(base, tmp_path / "whole.freeze")
    with pytest.raises(ValueError, match="without a base"):
        kf.load(tmp_path / "whole.freeze", base=base)
    with pytest.raises(ValueError, match="not a delta"):
        kf.apply_delta(base, tmp_path / "whole.freeze")


def test_only_the_delta_that_is_on_can_be_taken_off(base, tmp_path):
    for seed in (1, 2):
        kf.save(adapted(base, seed), tmp_path / f"{seed}.freeze", base=base)
    with pytest.raises(ValueError, match="not applied to this model"):
        kf.remove_delta(base, tmp_path / "1.freeze")
    kf.apply_delta(base, tmp_path / "1.freeze")
    with pytest.raises(ValueError, match=r"1\.freeze.*remove_delta"):
        kf.apply_delta(base, tmp_path / "2.freeze")
    with pytest.raises(ValueError, match=r"not applied to this model.*1\.freeze"):
        kf.remove_delta(base, tmp_path / "2.freeze")
    kf.remove_delta(base, tmp_path / "1.freeze")
    kf.apply_delta(base, tmp_path / "2.freeze")


def test_a_model_that_was_trained_since_keeps_its_values(base, tmp_path):
    kf.save(adapted(base), tmp_path / "delta.freeze", base=base)
    kf.apply_delta(base, tmp_path / "delta.freeze")
    storage_cases.train_on(base, *storage_cases.data_for(base))
    before = values_of(base.variables)
    with pytest.raises(ValueError, match="has changed since"):
        kf.remove_delta(base, tmp_path / "delta.freeze")
    for old, variable in zip(before, base.variables, strict=True):
        assert same_bits(old, value_of(variable))


def test_the_random_state_never_comes_from_the_base(tmp_path):
    base = pretrained()
    model = adapted(base)
    for one in (base, model):  # as if both had made as many steps
        next(v for v in one.variables if v.path.endswith("seed_generator_state")).assign([1, 5])
    kf.save(model, tmp_path / "delta.freeze", base=base)
    base(storage_cases.data_for(base)[0], training=True)
    base.layers[2].moving_mean.assign(model.layers[2].moving_mean)
    kf.save(model, tmp_path / "delta.freeze", base=base)
    next(v for v in base.variables if v.path.endswith("seed_generator_state")).assign([9, 9])
    assert_same_weights(kf.load(tmp_path / "delta.freeze", base=base), model)


def test_a_base_that_was_loaded_again_takes_deltas_again(base, tmp_path):
    for seed in (1, 2):
        kf.save(adapted(base, seed), tmp_path / f"{seed}.freeze", base=base)
    kept = base.get_weights()
    kf.apply_delta(base, tmp_path / "1.freeze")
    base.set_weights(kept)
    kf.apply_delta(base, tmp_path / "2.freeze")
    kf.remove_delta(base, tmp_path / "2.freeze")
    for old, new in zip(kept, base.get_weights(), strict=True):
        assert same_bits(old, new)


def test_a_delta_does_not_repeat_the_architecture_of_its_base(base, tmp_path):
    model = adapted(base)
    kf.save(model, tmp_path / "delta.freeze", base=base)
    header = read_container(tmp_path / "delta.freeze").header
    assert header["model"].keys() == {"base", "compile_config"}
    base.save(tmp_path / "base.keras")
    loaded = kf.load(tmp_path / "delta.freeze", base=tmp_path / "base.keras")
    assert_same_weights(loaded, model)
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in base.layers]
    assert isinstance(loaded.optimizer, kf.FreezeOptimizer)
    assert loaded.loss == "mse"
    kf.save(model, tmp_path / "plain.freeze", base=base, include_compile=False)
    assert not kf.load(tmp_path / "plain.freeze", base=base).compiled
    assert "architecture of the base" in str(kf.storage.inspect(tmp_path / "plain.freeze"))


def test_a_model_of_another_architecture_keeps_its_own(base, tmp_path):
    body = copy_of(base)
    model = keras.Sequential([keras.Input((8, 6)), *body.layers[:-1], layers.Dense(7)])
    kf.save(model, tmp_path / "delta.freeze", base=base)
    assert "config" in read_container(tmp_path / "delta.freeze").header["model"]
    assert_same_weights(kf.load(tmp_path / "delta.freeze", base=base), model)


@keras.saving.register_keras_serializable(package="test_deltas")
class WithoutTrainable(keras.Model):
    """A model whose configuration does not say which layers are trained, nor how it is compiled."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8)
        self.norm = layers.BatchNormalization()
        self.last = layers.Dense(3)

    def build(self, shape):
        self.first.build(shape)
        self.norm.build((None, 8))
        self.last.build((None, 8))
        self.built = True

    def call(self, x, training=None):
        return self.last(self.norm(self.first(x), training=training))

    def compile(self, *arguments, **keywords):
        super().compile(*arguments, **keywords)

    def get_config(self):
        return {}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["first", "norm", "last"])
def test_untrainable_layers_stay_so_where_the_configuration_does_not_say_it(name, tmp_path):
    model = WithoutTrainable()
    model.build((None, 6))
    kf.reinitialize(model, seed=0)
    getattr(model, name).trainable = False
    model.compile(kf.FreezeOptimizer(sgd(0.1), 0.5), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 3))
    kf.freeze(model, x, y)
    model.fit(x, y, verbose=0)
    kf.save(model, tmp_path / "a.freeze")
    loaded = kf.load(tmp_path / "a.freeze")
    assert_same_weights(loaded, model)
    assert not getattr(loaded, name).trainable
    trained = [[tuple(v.shape) for v in one.trainable_variables] for one in (loaded, model)]
    assert trained[0] == trained[1]
    loaded.compile(kf.FreezeOptimizer(sgd(0.1), 0.5), "mse")
    loaded.fit(x, y, verbose=0)
    assert kf.get_mask(loaded) == kf.get_mask(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("difference", ["activation", "dtype", "trainable"])
def test_a_base_of_the_same_values_and_other_settings_is_refused(difference, tmp_path):
    def network(**settings):
        made = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a", **settings)])
        kf.reinitialize(made, seed=0)
        return made

    base, model = network(), network()
    model.layers[0].bias.assign(model.layers[0].bias + 1.0)
    kf.save(model, tmp_path / "d.freeze", base=base)
    settings = {"activation": {"activation": "tanh"}, "dtype": {"dtype": "mixed_bfloat16"}}
    other = network(**settings.get(difference, {}))
    other.trainable = difference != "trainable"
    with pytest.raises(kf.FreezeFileError, match="of other settings"):
        kf.load(tmp_path / "d.freeze", base=other)
    assert_same_weights(kf.load(tmp_path / "d.freeze", base=base), model)


def test_models_that_scale_their_loss_are_deltas_too(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        base = copy_of(model)
        model.compile("adam", "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    model.layers[0].bias.assign(model.layers[0].bias + 1.0)
    kf.save(model, tmp_path / "d.freeze", base=base)
    loaded = kf.load(tmp_path / "d.freeze", base=base)
    assert_same_weights(loaded, model)
    assert type(loaded.optimizer) is type(model.optimizer)


def test_a_delta_and_its_undo_are_two_deltas_one_on_the_other(base, tmp_path):
    model = adapted(base)
    kf.save(model, tmp_path / "d.freeze", base=base)
    before = copy_of(base)
    for _ in range(3):
        kf.apply_delta(base, tmp_path / "d.freeze", keep_undo=tmp_path / "undo.freeze")
        assert_same_weights(base, model)
        kf.apply_delta(base, tmp_path / "undo.freeze")
        assert_same_weights(base, before)
    for name, expected in (("undo", model), ("d", before)):
        kf.remove_delta(base, tmp_path / f"{name}.freeze")
        assert_same_weights(base, expected)
    with pytest.raises(ValueError, match="Applied is: none"):  # those of before are not kept
        kf.remove_delta(base, tmp_path / "undo.freeze")


def test_deltas_that_undo_each_other_are_removed_one_after_the_other(base, tmp_path):
    model, before = adapted(base), copy_of(base)
    kf.save(model, tmp_path / "there.freeze", base=base)
    kf.save(before, tmp_path / "back.freeze", base=model)
    kf.save(before, tmp_path / "same.freeze", base=base)
    names = ["there", "back", "same", "same", "there"]
    states = [before, model, before, before, before, model]
    for name, state in zip(names, states[1:], strict=True):
        kf.apply_delta(base, tmp_path / f"{name}.freeze")
        assert_same_weights(base, state)
    for name, state in zip(names[::-1], states[-2::-1], strict=True):
        kf.remove_delta(base, tmp_path / f"{name}.freeze")
        assert_same_weights(base, state)


def test_a_delta_is_removed_from_a_model_that_has_lora_since(base, tmp_path):
    before = values_of(weights(base))
    kf.save(adapted(base), tmp_path / "d.freeze", base=base)
    kf.apply_delta(base, tmp_path / "d.freeze")
    variables = weights(base)
    base.layers[1].enable_lora(2)
    kf.remove_delta(base, tmp_path / "d.freeze")
    for value, variable in zip(before, variables, strict=True):
        assert same_bits(value, value_of(variable)), variable.path


@pytest.mark.cases(1)
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_no_file_can_have_are_named(path, base, tmp_path):
    kf.save(base, tmp_path / "d.freeze", base=copy_of(base))
    for name, call in {
        "path": lambda: kf.apply_delta(base, path),
        "keep_undo": lambda: kf.apply_delta(base, tmp_path / "d.freeze", keep_undo=path),
        "folder": lambda: kf.follow(base, path),
    }.items():
        with pytest.raises(ValueError, match=f"Argument `{name}` must be a path that is not empty"):
            call()
    with pytest.raises(IsADirectoryError, match="Argument `keep_undo` must name a file"):
        kf.apply_delta(base, tmp_path / "d.freeze", keep_undo=tmp_path)
    with pytest.raises(ValueError, match="Argument `every` must be a positive number"):
        kf.follow(base, tmp_path, every=10**400)

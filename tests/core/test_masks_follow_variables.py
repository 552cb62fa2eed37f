"""A mask belongs to the variables: whatever happens to the model, what is frozen stays frozen."""

import gc
import weakref

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    crossentropy,
    fit,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)

X, Y = blobs()
WAYS = ("freeze", "first_batch")


def frozen_model(way="freeze", **arguments):
    """A network of two layers, trained for an epoch with three quarters of its weights frozen."""
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.75, **arguments))
    if way == "freeze":
        kf.freeze(model, X, Y)
    fit(model, X, Y)
    return model


def adam(freeze_rate=0.75, **arguments):
    return kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate, **arguments)


def keep_class(kind):
    return keras.saving.register_keras_serializable("masks_follow_variables")(kind)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inner", [keras.optimizers.Adam, keras.optimizers.Lamb])
def test_compiling_again_keeps_the_mask(way, inner):
    model = frozen_model(way)
    mask, before = kf.get_mask(model), values_of(model.trainable_variables)
    compiled(model, kf.FreezeOptimizer(inner(0.01), 0.75))
    assert kf.get_mask(model) == mask
    fit(model, X, Y)
    assert kf.get_mask(model) == mask == model.optimizer.mask
    assert model.optimizer.mask.num_rescued == mask.num_rescued
    assert_frozen_bits_kept(model.trainable_variables, mask, before)
    assert_trained_moved(model.trainable_variables, mask, before)


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"freeze_rate": 0.5}, ("freeze_rate=0.75", "freeze_rate=0.5")),
        ({"criterion": "magnitude"}, ("criterion='snip'", "criterion='magnitude'")),
        ({"criterion": "grasp"}, ("criterion='snip'", "GraSP")),
        ({"frozen_weights": "zero"}, ("frozen_weights='keep'", "frozen_weights='zero'")),
        ({"exclude": "head"}, ("head", "exclude")),
        ({"freeze_rate": 0.0}, ("freeze_rate=0.75", "freeze_rate=0.0")),
    ],
)
def test_other_settings_for_frozen_variables_are_an_error_that_names_both(way, arguments, named):
    model = frozen_model(way)
    before = values_of(model.variables)
    compiled(model, adam(**arguments))
    with pytest.raises(ValueError, match="overwrite=True") as error:
        fit(model, X, Y)
    assert all(name in str(error.value) for name in named)
    assert all(map(same_bits, values_of(model.variables), before))


def test_freezing_a_frozen_model_again_needs_overwrite():
    model = frozen_model("first_batch")
    mask = kf.get_mask(model)
    compiled(model, adam(0.5))
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, X, Y)
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, mask=lambda variable: None)
    new = kf.freeze(model, X, Y, overwrite=True)
    assert new.freeze_rate == 0.5
    assert kf.get_mask(model) == new != mask
    compiled(model, adam())
    with pytest.raises(ValueError, match=r"freeze_rate=0\.5.*freeze_rate=0\.75"):
        fit(model, X, Y)


def test_handing_over_the_same_mask_needs_no_overwrite():
    model = frozen_model()
    mask = kf.get_mask(model)
    compiled(model, adam())
    assert kf.freeze(model, mask=mask) == mask


def test_an_optimizer_whose_mask_was_overruled_trains_no_more():
    model = frozen_model()
    earlier = model.optimizer
    compiled(model, adam(0.5))
    kf.freeze(model, X, Y, overwrite=True)
    mask, before = kf.get_mask(model), values_of(model.variables)
    model.compile(earlier, crossentropy())
    assert kf.get_mask(model) == mask
    with pytest.raises(ValueError, match="decided since"):
        fit(model, X, Y)
    if keras.backend.backend() != "jax":  # where Keras loses the weights at an error within `fit`
        assert all(map(same_bits, values_of(model.variables), before))


def test_two_optimizers_may_share_a_mask():
    model = frozen_model()
    earlier, mask = model.optimizer, kf.get_mask(model)
    compiled(model, adam())
    fit(model, X, Y)
    before = values_of(model.trainable_variables)
    model.compile(earlier, crossentropy())
    fit(model, X, Y)
    assert kf.get_mask(model) == mask
    assert_frozen_bits_kept(model.trainable_variables, mask, before)


def test_a_dense_network_may_be_frozen_after_training():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.0))
    fit(model, X, Y)
    compiled(model, adam())
    assert kf.freeze(model, X, Y).freeze_rate == 0.75


@pytest.mark.cases(1)
@pytest.mark.parametrize("call", [kf.get_mask, kf.report, lambda m: kf.freeze(m, X, Y)])
def test_an_optimizer_of_another_model_is_an_error_that_names_it(call):
    first = compiled(two_dense_layers(name="first"))
    kf.freeze(first, X, Y)
    second = two_dense_layers(name="second")
    second.compile(first.optimizer, crossentropy())
    with pytest.raises(ValueError, match=r"'first'.*'second'"):
        call(second)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_decayed_weights_go_on_decaying_after_compiling_again(way, tmp_path):
    def optimizer():
        return kf.FreezeOptimizer(sgd(), 0.75, frozen_weights="decay", l2=0.01)

    twice, once = (compiled(two_dense_layers(), optimizer()) for _ in range(2))
    for model in (twice, once):
        kf.reinitialize(model)
        if way == "freeze":
            kf.freeze(model, X, Y)
    fit(once, X, Y, epochs=2)
    fit(twice, X, Y)
    compiled(twice, optimizer())
    fit(twice, X, Y)
    assert all(map(np.allclose, values_of(once.variables), values_of(twice.variables)))
    kf.save(twice, tmp_path / "twice.freeze")
    assert all(
        map(
            same_bits,
            values_of(twice.variables),
            values_of(kf.load(tmp_path / "twice.freeze").variables),
        )
    )


def tower():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(64)],
        name="tower",
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_trained_model_has_its_part_of_the_mask(way, tmp_path):
    keras.utils.set_random_seed(0)
    inner = tower()
    outer = compiled(keras.Sequential([inner, keras.layers.Dense(3)]), adam(0.95))
    outer.build((None, 6))
    kf.reinitialize(outer)
    if way == "freeze":
        kf.freeze(outer, X, Y)
    fit(outer, X, Y)
    mask = kf.get_mask(outer)
    part = kf.get_mask(inner)
    assert [np.array_equal(part[v], mask[v]) for v in (inner.weights[0], inner.weights[2])]
    report = kf.report(inner)
    assert report.has_mask
    assert report.num_trained_weights == part.num_trained
    assert report.num_weights == 6 * 64 + 64 * 64
    kf.save(inner, tmp_path / "inner.freeze")
    assert (tmp_path / "inner.freeze").stat().st_size < 4000  # of 18,000 bytes of float32
    loaded = kf.load(tmp_path / "inner.freeze")
    assert same_bits(loaded.predict(X, verbose=0), inner.predict(X, verbose=0))
    assert kf.get_mask(loaded) == part
    before = values_of(loaded.trainable_variables)
    loaded.compile(adam(0.95), "mse")
    fit(loaded, X, np.zeros((len(X), 64), "float32"))
    assert kf.get_mask(loaded) == part
    assert_frozen_bits_kept(loaded.trainable_variables, kf.get_mask(loaded), before)


def test_a_frozen_part_of_a_larger_model_stays_frozen():
    keras.utils.set_random_seed(0)
    inner = tower()
    inner.compile(adam(), "mse")
    mask = kf.freeze(inner, X, np.ones((len(X), 64), "float32"))
    before = values_of(inner.trainable_variables)
    outer = compiled(keras.Sequential([inner, keras.layers.Dense(3, name="new")]), adam())
    with pytest.warns(UserWarning, match="does not cover the weights .*new/kernel"):
        fit(outer, X, Y)
    assert_frozen_bits_kept(inner.trainable_variables, mask, before)
    assert kf.get_mask(inner) == mask


def test_a_part_knows_its_mask_as_soon_as_weights_are_loaded(tmp_path):
    def network():
        inner = tower()
        outer = compiled(keras.Sequential([inner, keras.layers.Dense(3)]), adam())
        outer.build((None, 6))
        return outer, inner

    outer, inner = network()
    kf.freeze(outer, X, Y)
    fit(outer, X, Y)
    outer.save_weights(tmp_path / "outer.weights.h5")
    loaded, part = network()
    loaded.load_weights(tmp_path / "outer.weights.h5")
    assert not loaded.optimizer.built
    assert kf.get_mask(loaded) == kf.get_mask(outer)
    assert kf.get_mask(part) == kf.get_mask(inner)
    assert kf.report(part).num_trained_weights == kf.report(inner).num_trained_weights
    before = values_of(loaded.trainable_variables)
    fit(loaded, X, Y)
    assert kf.get_mask(loaded) == kf.get_mask(outer)
    assert_frozen_bits_kept(loaded.trainable_variables, kf.get_mask(loaded), before)


def test_pruning_a_part_prunes_what_is_frozen_in_it():
    keras.utils.set_random_seed(0)
    inner = tower()
    outer = compiled(keras.Sequential([inner, keras.layers.Dense(3)]), adam())
    kf.freeze(outer, X, Y)
    head = value_of(outer.layers[-1].kernel)
    kf.prune(inner)
    kernel = inner.weights[0]
    assert not value_of(kernel)[~kf.get_mask(outer)[kernel]].any()
    assert same_bits(value_of(outer.layers[-1].kernel), head)


@keep_class
class Compiles(keras.Model):
    """A task that compiles itself in its constructor, and whose `compile` is its own."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dense = keras.layers.Dense(32)
        self.head = keras.layers.Dense(3)
        self.build((None, 6))
        self.compile()

    def build(self, input_shape):
        self.dense.build((None, 6))
        self.head.build((None, 32))
        self.built = True

    def call(self, x):
        return self.head(keras.ops.tanh(self.dense(x)))

    def compile(self, optimizer="adam", loss="auto"):
        super().compile(optimizer=optimizer, loss=crossentropy() if loss == "auto" else loss)


@pytest.mark.cases(1)
@pytest.mark.parametrize("include_optimizer", [False, True])
def test_a_model_that_compiles_itself_gets_its_mask_back(include_optimizer, tmp_path):
    model = Compiles()
    kf.reinitialize(model)
    model.compile(adam())
    kf.freeze(model, X, Y)
    fit(model, X, Y)
    path = tmp_path / "task.freeze"
    kf.save(model, path, include_optimizer=include_optimizer)
    loaded = kf.load(path)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    before = values_of(loaded.trainable_variables)
    for one in (model, loaded):
        fit(one, X, Y)
    assert_frozen_bits_kept(loaded.trainable_variables, kf.get_mask(loaded), before)
    pairs = zip(values_of(model.variables), values_of(loaded.variables), strict=True)
    assert all(np.allclose(*pair) for pair in pairs) == include_optimizer


@keep_class
class Pair(keras.Model):
    """Two networks with an optimizer each, and a `compile` of its own; never called as a whole."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.first = two_dense_layers(name="first")
        self.second = two_dense_layers(name="second")

    def compile(self, first_optimizer, second_optimizer):
        super().compile()
        self.first_optimizer = first_optimizer
        self.second_optimizer = second_optimizer


def frozen_pair():
    model = Pair()
    model.compile(adam(0.5), adam(0.75))
    for part, optimizer in (
        (model.first, model.first_optimizer),
        (model.second, model.second_optimizer),
    ):
        kf.reinitialize(part)
        kf.freeze(part, X, Y, optimizer=optimizer, loss=crossentropy())
    return model


def test_two_optimizers_of_a_model_keep_a_mask_each(tmp_path):
    model = frozen_pair()
    masks = [kf.get_mask(part) for part in (model.first, model.second)]
    assert [mask.freeze_rate for mask in masks] == [0.5, 0.75]
    assert kf.get_mask(model).num_trained == sum(mask.num_trained for mask in masks)
    assert kf.report(model).num_weights == 2 * (6 * 8 + 8 * 3)
    with pytest.raises(ValueError, match="include_optimizer"):
        kf.save(model, tmp_path / "pair.freeze", include_optimizer=True)
    kf.save(model, tmp_path / "pair.freeze")
    with pytest.warns(UserWarning, match="custom"):  # Keras says that `compile` was not called
        loaded = kf.load(tmp_path / "pair.freeze")
    assert [kf.get_mask(part) for part in (loaded.first, loaded.second)] == masks
    for one in (model, loaded):
        one.compile(adam(0.5), adam(0.75))
        one.first_optimizer.build(one.first.trainable_variables)
        assert one.first_optimizer.mask == masks[0]
        one.compile(adam(0.75), adam(0.75))
        with pytest.raises(ValueError, match=r"freeze_rate=0\.5"):
            one.first_optimizer.build(one.first.trainable_variables)


def test_a_model_that_is_never_called_can_be_reported_and_given_its_mask():
    model = frozen_pair()
    assert not model.built
    mask = kf.get_mask(model)
    assert kf.freeze(model, mask=mask, overwrite=True) == mask
    assert model.first_optimizer.mask.freeze_rate == 0.5
    assert model.second_optimizer.mask.freeze_rate == 0.75


def test_a_file_without_compilation_brings_the_mask(tmp_path):
    model = two_dense_layers()
    kf.reinitialize(model)
    kf.freeze(compiled(model, adam()), X, Y)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze", compile=False)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    with pytest.raises(ValueError, match=r"freeze_rate=0\.75.*freeze_rate=0\.5"):
        fit(compiled(loaded, adam(0.5)), X, Y)
    before = values_of(loaded.trainable_variables)
    fit(compiled(loaded, adam()), X, Y)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert_frozen_bits_kept(loaded.trainable_variables, kf.get_mask(loaded), before)


def test_variables_are_held_weakly():
    model = frozen_model()
    reference = weakref.ref(model.trainable_variables[0])
    del model
    keras.backend.clear_session()
    gc.collect()
    assert reference() is None


def test_a_model_trained_whole_since_has_no_mask(tmp_path):
    model = frozen_model()
    compiled(model, keras.optimizers.Adam(0.1))
    fit(model, X, Y)
    assert kf.get_mask(model) is None
    assert not kf.report(model).has_mask
    kf.save(model, tmp_path / "whole.freeze")
    loaded = kf.load(tmp_path / "whole.freeze")
    assert all(map(same_bits, values_of(loaded.variables), values_of(model.variables)))


# What a user may do to a model, one after the other.
STEPS = (
    "compile",
    "first_batch_fit",
    "freeze",
    "overwrite",
    "fit",
    "freeze_file",
    "keras_file",
    "weights_file",
    "checkpoint",
    "clone",
    "part",
)


class Life:
    """A model and what should be frozen in it."""

    def __init__(self, folder):
        self.folder = folder
        self.model = None
        self.mask = None
        self.start(two_dense_layers())

    def start(self, model):
        self.model = model
        kf.reinitialize(model)
        self.mask = None
        self.compile()

    def compile(self):
        compiled(self.model, adam(), run_eagerly=True)

    def first_batch_fit(self):
        self.fit()

    def fit(self):
        fit(self.model, X, Y, batch_size=len(X))
        self.mask = self.mask or kf.get_mask(self.model)

    def freeze(self):
        if self.mask is None:
            self.mask = kf.freeze(self.model, X, Y)
        else:
            with pytest.raises(ValueError, match="frozen already"):
                kf.freeze(self.model, X, Y)

    def overwrite(self):
        self.mask = kf.freeze(self.model, X[::-1][:5], Y[::-1][:5], overwrite=True)

    def freeze_file(self):
        # What `overwrite` has frozen may have been trained before.
        kf.save(self.model, self.folder / "model.freeze", include_frozen=True)
        self.model = kf.load(self.folder / "model.freeze")
        self.model.run_eagerly = True

    def keras_file(self):
        self.model.save(self.folder / "model.keras")
        self.model = keras.models.load_model(self.folder / "model.keras")

    def weights_file(self):
        self.model.save_weights(self.folder / "model.weights.h5")
        fit(self.model, X, Y, batch_size=len(X))
        decided = self.mask is None
        self.model.load_weights(self.folder / "model.weights.h5")
        self.mask = kf.get_mask(self.model) if decided else self.mask

    def checkpoint(self):
        """TensorFlow's own file, restored into a model that has trained on; Keras's elsewhere."""
        if keras.backend.backend() != "tensorflow":
            self.weights_file()
            return
        import tensorflow as tf

        if self.mask is None:
            return  # decided after the checkpoint was written, which cannot be restored then
        checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
        path = checkpoint.write(str(self.folder / "checkpoint"))
        fit(self.model, X, Y, batch_size=len(X))
        checkpoint.read(path).assert_consumed()

    def clone(self):
        self.start(keras.models.clone_model(self.model))

    def part(self):
        """The model is trained as a part of another one."""
        outer = keras.Sequential([keras.Input((6,)), self.model, keras.layers.Rescaling(2.0)])
        compiled(outer, adam(), run_eagerly=True)
        fit(outer, X, Y, batch_size=len(X))
        self.mask = self.mask or kf.get_mask(outer)


@pytest.mark.same_on_all
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=8))
def test_whatever_happens_to_a_model_no_frozen_weight_moves(steps, tmp_path_factory):
    life = Life(tmp_path_factory.mktemp("life"))
    for step in steps:
        before, mask = values_of(life.model.trainable_variables), life.mask
        getattr(life, step)()
        if mask is not None and step not in ("overwrite", "clone"):
            assert kf.get_mask(life.model) == mask
            variables = life.model.trainable_variables
            entries = {e.position: ~e.trained for e in mask.entries}
            for position, frozen in entries.items():
                now = value_of(variables[position])
                assert same_bits(now[frozen], before[position][frozen]), step


def test_a_mask_of_other_settings_is_not_loaded(tmp_path):
    model = frozen_model()
    model.save_weights(tmp_path / "model.weights.h5")
    for way in (adam, lambda rate: kf.FreezeOptimizer(sgd(), rate)):
        other = compiled(two_dense_layers(), way(0.5))
        with pytest.raises(ValueError, match=r"freeze_rate=0\.75.*freeze_rate=0\.5"):
            other.load_weights(tmp_path / "model.weights.h5")
        assert kf.get_mask(other) is None


def test_reinitializing_a_part_keeps_the_newer_mask_of_the_whole():
    inner = frozen_model()
    outer = compiled(keras.Sequential([keras.Input((6,)), inner]), adam())
    mask = kf.freeze(outer, X[::-1][:5], Y[::-1][:5], overwrite=True)
    kf.reinitialize(inner, seed=1)
    kf.prune(inner)
    assert kf.get_mask(outer) == mask
    for variable in inner.trainable_variables:
        if mask.find(variable) is not None:
            assert not value_of(variable)[~mask[variable]].any()
            assert value_of(variable)[mask[variable]].all()
    fit(outer, X, Y)
    assert kf.get_mask(outer) == mask


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's checkpoints")
def test_a_checkpoint_restored_before_compiling_again_brings_its_mask(tmp_path):
    import tensorflow as tf

    model = frozen_model()
    mask = kf.get_mask(model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    other = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.75))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(path)
    compiled(other, adam())
    before = values_of(other.trainable_variables)
    fit(other, X, Y)
    assert kf.get_mask(other) == mask
    assert_frozen_bits_kept(other.trainable_variables, kf.get_mask(other), before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", ["lora", "untrainable"])
def test_a_model_changed_and_compiled_again_comes_back_from_its_file(change, tmp_path):
    model = frozen_model()
    if change == "lora":
        model.get_layer("body").enable_lora(2)
    else:
        model.get_layer("body").trainable = False
    compiled(model, adam())
    fit(model, X, Y)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze")
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert same_bits(loaded.predict(X, verbose=0), model.predict(X, verbose=0))

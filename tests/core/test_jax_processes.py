"""Several processes of JAX that train one model: what they exchange, and that they agree."""

import keras
import numpy as np
import pytest
from helpers import same_bits
from together import assert_all_succeeded, run_together

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution is for JAX"),
]

COMMON = """
import collectives
from keras import layers
import keras_freeze as kf
from keras_freeze import _keras_private

if COUNT > 1:
    parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.distribution.set_distribution(parallel)

rng = np.random.default_rng(3)
x = rng.normal(size=(240, 20)).astype("float32")
y = x[:, :4].argmax(axis=1).astype("int32")
x, y = x[RANK::COUNT], y[RANK::COUNT]
found = {}

def network(seed=5, normalized=False):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((20,)), layers.Dense(32, activation="relu"),
        layers.BatchNormalization() if normalized else layers.Activation("linear"),
        layers.Dense(16, activation="relu"), layers.Dense(4),
    ])

def compiled(model, inner=None, wrap=lambda optimizer: optimizer, **settings):
    optimizer = kf.FreezeOptimizer(
        inner or keras.optimizers.SGD(0.1, momentum=0.9), **{"freeze_rate": 0.8, **settings}
    )
    model.compile(wrap(optimizer), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def frozen(model, number=240):
    kf.freeze(model, x[: number // COUNT], y[: number // COUNT])
    return model

def fit(model, epochs=1, size=60, number=120):
    number, size = number // COUNT, size // COUNT
    model.fit(
        x[:number], y[:number], batch_size=size, epochs=epochs, shuffle=False, verbose=0
    )
    return model

def keep(name, model):
    for number, variable in enumerate(model.variables):
        found[f"{name}_v{number}"] = np.array(variable).astype(variable.dtype)
    mask = kf.get_mask(model)
    if mask is not None:
        found.update({f"{name}_m{entry.position}": entry.trained for entry in mask.entries})
"""

TRAIN = (
    COMMON
    + """
def num_exchanged(model):
    # Of the step that `fit` compiles.
    def of_all(part):
        layout = parallel.get_data_layout(part.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, part)

    step = jax.jit(model.train_step)
    state = _keras_private.state_of(model, is_taken=False)
    return collectives.num_exchanged(
        step.lower(state, (of_all(x[:30]), of_all(y[:30]))).compile().as_text()
    )

def loss_scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=128.0)

start = compiled(network())
keep("start", start)
model = frozen(compiled(network(), keras.optimizers.SGD(1.0)), number=60)
keep("step", fit(model, number=60))
model = fit(frozen(compiled(network())), epochs=5)
keep("early", model)
keep("freeze", fit(model, epochs=45))
keep("odd", fit(frozen(compiled(network())), number=100))
batch = fit(compiled(network()), epochs=5)
keep("batch", batch)
# In `freeze`, each process would have the statistics of its own batch.
keep("norm", fit(compiled(network(normalized=True), l2=1e-3), epochs=5))
keep("ema", fit(compiled(network(), keras.optimizers.SGD(0.1, use_ema=True)), epochs=5))
keep("whole", fit(frozen(compiled(network(), keras.optimizers.Adam(0.01))), epochs=4))
plain = network()
plain.compile(keras.optimizers.SGD(1.0), model.loss)
keep("plain", fit(plain, number=60))
policies = {}
for policy in ("mixed_float16", "mixed_bfloat16"):
    keras.config.set_dtype_policy(policy)
    wrap = {"wrap": loss_scaled} if policy == "mixed_float16" else {}
    policies[policy] = fit(frozen(compiled(network(), **wrap)))
    keep(policy, policies[policy])
keras.config.set_dtype_policy("float32")
if COUNT > 1:
    found["trained"] = kf.report(model).num_trained_parameters
    counted = {"freeze": model, "batch": batch, "plain": plain, **policies}
    found.update({f"{name}_exchanged": num_exchanged(each) for name, each in counted.items()})
    if RANK == 0:
        kf.save(model, os.path.join(FOLDER, "model.freeze"))  # without the others
    kf.freeze(compiled(network()), mask=kf.get_mask(model))  # the others wait here
    keep("loaded", kf.load(os.path.join(FOLDER, "model.freeze")))
give(**found)
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The arrays of two processes, and those of one that has all data."""
    folder = tmp_path_factory.mktemp("trained")
    finished = run_together(TRAIN, folder / "two", timeout=600)
    finished += run_together(TRAIN, folder / "one", 1, timeout=600)
    assert_all_succeeded(finished)
    return [one.arrays for one in finished]


def arrays(found, prefix):
    """The arrays whose names are the prefix and a number, in the order of the numbers."""
    names = [name for name in found if name.removeprefix(prefix).isdigit()]
    return [found[name] for name in sorted(names, key=lambda name: int(name.removeprefix(prefix)))]


def test_all_processes_have_the_same_bits(trained):
    first, second, _ = trained
    assert set(first) == set(second)
    for name, value in first.items():
        assert same_bits(value, second[name]), name
    for name in ("freeze_v", "freeze_m"):
        loaded = arrays(first, name.replace("freeze", "loaded"))
        assert all(map(same_bits, arrays(first, name), loaded))
        assert loaded


def test_no_more_than_the_gradients_of_trained_entries_is_exchanged(trained):
    first = trained[0]
    assert first["trained"] == sum(m.sum() for m in arrays(first, "freeze_m")) + 32 + 16 + 4
    for name in ("freeze", "batch", "mixed_float16", "mixed_bfloat16"):
        assert first[f"{name}_exchanged"] == first["trained"], name
    assert first["plain_exchanged"] == sum(v.size for v in arrays(first, "start_v"))


@pytest.mark.parametrize("name", ["early", "odd", "batch", "norm", "ema", "whole"])
def test_two_processes_train_what_one_does_on_all_data(name, trained):
    first, _, alone = trained
    assert all(map(np.array_equal, arrays(first, f"{name}_m"), arrays(alone, f"{name}_m")))
    variables = arrays(first, f"{name}_v"), arrays(alone, f"{name}_v")
    for one, other in zip(*variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)


def test_a_step_is_one_of_keras_at_trained_entries_and_none_at_frozen_ones(trained):
    first, _, alone = trained
    start, masks = arrays(alone, "start_v"), arrays(first, "step_m")
    # The oracle is Keras without this package: with a learning rate of 1, w - w' is the gradient.
    gradients = [a - b for a, b in zip(start, arrays(alone, "plain_v"), strict=True)]
    scores = [np.abs(w * g) for w, g in zip(start[::2], gradients[::2], strict=True)]
    flat = np.sort(np.concatenate([s.ravel() for s in scores]))
    smallest = flat[-sum(mask.sum() for mask in masks)]
    for mask, score in zip(masks, scores, strict=True):
        assert (score[mask] >= smallest * (1 - 1e-4)).all()
        assert (score[~mask] <= smallest * (1 + 1e-4)).all()
    for position, (before, after) in enumerate(zip(start, arrays(first, "step_v"), strict=True)):
        mask = np.ones(before.shape, bool) if position % 2 else masks[position // 2]
        assert same_bits(before[~mask], after[~mask])
        np.testing.assert_allclose((before - after)[mask], gradients[position][mask], atol=1e-6)
    for position, mask in enumerate(arrays(first, "freeze_m")):  # after 100 steps
        weights = first[f"freeze_v{2 * position}"]
        assert same_bits(weights[~mask], start[2 * position][~mask])
        assert not same_bits(weights[mask], start[2 * position][mask])


DISAGREE = (
    COMMON
    + """
def refused(act):
    try:
        act()
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"

def shifted(v):
    return ~np.eye(*v.shape, k=RANK, dtype=bool)

def restored():
    model = compiled(network())
    kf.freeze(model, mask=lambda v: ~np.eye(*v.shape, dtype=bool))
    other = model.optimizer.state
    kf.freeze(model, mask=lambda v: ~np.eye(*v.shape, k=1, dtype=bool)[::-1], overwrite=True)
    model.optimizer.restore(other if RANK else model.optimizer.state)

def by_itself():
    keras.distribution.set_distribution(None)
    model = compiled(network())
    kf.freeze(model, x, y)
    keep("alone", model)
    try:
        fit(compiled(network()))
    finally:
        keras.distribution.set_distribution(parallel)

def of_other_weights():
    model = compiled(network())
    kernel = model.layers[0].kernel
    own = np.array(kernel) + RANK
    # JAX compares what it is given with that of other processes; a computation can differ.
    kernel.assign(jax.jit(lambda: own, out_shardings=kernel.value.sharding)())
    kf.freeze(model, x, y)

def split(**arguments):
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
        kf.freeze(compiled(network()), **arguments)

give(
    split=refused(lambda: split(x=x, y=y)),
    split_with_mask=refused(lambda: split(mask=lambda v: ~np.eye(*v.shape, dtype=bool))),
    mask=refused(lambda: kf.freeze(compiled(network()), mask=shifted)),
    restored=refused(restored),
    weights=refused(of_other_weights),
    network=refused(lambda: compiled(network(seed=RANK))),
    freeze_rate=refused(lambda: frozen(compiled(network(), freeze_rate=0.5 + 0.1 * RANK))),
    first_batch=refused(lambda: fit(compiled(network(), freeze_rate=0.5 + 0.1 * RANK))),
    seed=refused(lambda: frozen(compiled(network(), seed=RANK))),
    nothing=refused(lambda: fit(frozen(compiled(network())))),
    alone=refused(by_itself),
    **found,
)
"""
)


def test_processes_that_disagree_are_refused_all_of_them_with_the_reason(tmp_path):
    finished = run_together(DISAGREE, tmp_path)
    assert_all_succeeded(finished)
    settings = "settings of the FreezeOptimizer that differ"
    reasons = dict.fromkeys(["freeze_rate", "first_batch", "seed"], settings)
    masks = "masks that differ between the processes 0 / 1"
    reasons |= {"mask": masks, "restored": masks, "weights": "weights that differ"}
    for one in finished:
        assert str(one.arrays["nothing"]) == "trained"
        for name, reason in reasons.items():
            found = str(one.arrays[name])
            assert found.startswith("ValueError: Processes that train a model together"), found
            assert reason in found
        for name in ("split", "split_with_mask"):
            assert "each must have whole variables" in str(one.arrays[name])
        assert "not the same on each process" in str(one.arrays["network"])  # by JAX
        assert "would choose by its own batch" in str(one.arrays["alone"])
    masks = [arrays(one.arrays, "alone_m") for one in finished]
    assert len(masks[0]) == 3
    assert all(map(np.array_equal, *masks))


STOPPED = (
    COMMON
    + """
model = compiled(network(), keras.optimizers.Adam(0.01))
path = os.path.join(ARGUMENTS["checkpoints"], f"{RANK}.weights.h5")
if ARGUMENTS["resume"]:
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path.replace(f"{RANK}.w", "0.w"))
    fit(model, epochs=2)
else:
    model = fit(frozen(model), epochs=2)
    model.save_weights(path)  # by all processes, as Keras demands
    fit(model)
    if RANK == 1:
        os._exit(9)
    fit(model)
keep("whole", model)
give(**found)
"""
)


def test_training_goes_on_from_a_checkpoint_after_a_process_has_died(trained, tmp_path):
    (tmp_path / "kept").mkdir()
    settings = {"checkpoints": str(tmp_path / "kept"), "group_timeout": 10}
    died = run_together(STOPPED, tmp_path / "died", resume=False, timeout=120, **settings)
    assert died[1].returncode == 9
    assert died[0].returncode not in (0, -9)  # and not stopped by the test, after a longer time
    assert "Gloo" in died[0].errors
    assert "Connection" in died[0].errors
    resumed = run_together(STOPPED, tmp_path / "resumed", resume=True, **settings)
    assert_all_succeeded(resumed)
    for one in resumed:
        for name, value in one.arrays.items():
            assert same_bits(value, trained[0][name]), name

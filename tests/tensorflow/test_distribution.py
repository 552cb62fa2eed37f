"""One model on several devices through tf.distribute: the same as on one device.

TensorFlow splits its CPU only before it has used it. So this file also runs as a script, in a
process of its own with three logical CPUs, and prints what it measured; the tests assert on that.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import blobs, crossentropy, is_weight, same_bits, sgd, value_of, values_of
from oracle import DenseByHand, SGDByHand

import keras_freeze as kf
from keras_freeze.restricted import block
from keras_freeze.restricted import layers as sparse_gradients

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BATCH = 12
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@functools.cache  # TensorFlow mixes up the collective operations of two such strategies
def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def mirrored_without_collectives(number):
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(number)], reduction)


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def network(constraint=None, regularizer=None):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_constraint=constraint,
                kernel_regularizer=regularizer,
                name="body",
            ),
            keras.layers.Dense(3, name="head"),
        ]
    )


def compiled(strategy, make_model=network, inner=sgd, outer=lambda o: o, eager=False, **arguments):
    with scope_of(strategy):
        model = make_model()
        optimizer = outer(kf.FreezeOptimizer(inner(), freeze_rate=0.75, **arguments))
        model.compile(optimizer, crossentropy(), run_eagerly=eager)
    return model


def fit(model, x=None, y=None, epochs=2, callback=None):
    """Batches of which each device gets a half; two of them are an epoch."""
    x, y = blobs(2 * BATCH) if x is None else (x, y)
    callbacks = [] if callback is None else [callback(x, y)]
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def first_batch():
    return tuple(array[:BATCH] for array in blobs(2 * BATCH))


def train(strategy, way, data=(), callback=None, **arguments):
    """A model after four steps, and its weights before."""
    model = compiled(strategy, **arguments)
    x, y = data or blobs(2 * BATCH)
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    fit(model, x, y, callback=callback)
    return model, start


def difference(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def copies_are_equal(model):
    """Whether all devices have the same bits in every variable, the optimizer's included."""
    copies = [variable.value.values for variable in [*model.weights, *model.optimizer.variables]]
    return all(
        len(each) > 1 and all(same_bits(each[0].numpy(), c.numpy()) for c in each)
        for each in copies
    )


def frozen_bits_are_kept(model, start):
    """Whether frozen weights are as at the start and trained ones are not, on every device."""
    mask, kept, moved = kf.get_mask(model), [], []
    for variable, old in zip(model.trainable_variables, start, strict=True):
        for copy in variable.value.values if is_weight(variable) else ():
            kept.append(same_bits(copy.numpy()[~mask[variable]], old[~mask[variable]]))
            moved.append((copy.numpy() != old)[mask[variable]].all())
    return all(kept) and all(moved)


def compare(way, **arguments):
    """Two devices against one."""
    (model, start), (other, _) = (train(s, way, **arguments) for s in (mirrored(), None))
    return {
        "difference": difference(model, other),
        "same mask": kf.get_mask(model) == kf.get_mask(other),
        "copies equal": copies_are_equal(model),
        "frozen kept": bool(frozen_bits_are_kept(model, start)),
        "frozen zero": not any(
            value_of(v)[~kf.get_mask(model)[v]].any()
            for v in model.trainable_variables
            if is_weight(v)
        ),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def momentum():
    return sgd(momentum=0.9)


def moving(x, y):
    """Changes the mask after two steps of four: what is trained in the end has moved."""
    return kf.callbacks.RegrowTrained(0.8, 1, x=x, y=y, batch_size=BATCH, begin=1, end=3)


TRAINED = {
    "moving mask, freeze": ("freeze", {"inner": momentum, "callback": moving}),
    "moving mask, first batch": ("first", {"inner": momentum, "callback": moving}),
    "keep, freeze": ("freeze", {"inner": momentum, "l2": 0.1}),
    "keep, first batch": ("first", {"inner": momentum, "l2": 0.1}),
    "zero, freeze": ("freeze", {"inner": momentum, "frozen_weights": "zero"}),
    "zero, first batch": ("first", {"inner": momentum, "frozen_weights": "zero"}),
    "Adam, freeze": ("freeze", {"inner": lambda: keras.optimizers.Adam(0.01)}),
    "grid, freeze": ("freeze", {"inner": momentum, "grid": 1e-4}),
    "grid, first batch": ("first", {"inner": momentum, "grid": 1e-4}),
    "eager, first batch": ("first", {"eager": True}),
    "constraint, first batch": ("first", {"make_model": lambda: network("non_neg")}),
    "loss scaling, first batch": ("first", {"outer": keras.optimizers.LossScaleOptimizer}),
}


for _name, (_way, _arguments) in TRAINED.items():
    CASES[_name] = functools.partial(compare, _way, **_arguments)


@case
def embedding():
    def make_model():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    data = np.arange(6 * BATCH).reshape(-1, 3) % 20, blobs(2 * BATCH)[1]
    return compare("first", data=data, make_model=make_model)


@case
def by_hand():
    """Softmax regression, clipped on each device as Keras does, against NumPy."""

    def make_model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="fc")])

    rate, clip, l2 = 0.1, 0.05, 0.3
    model, start = train(
        mirrored(),
        "freeze",
        make_model=make_model,
        inner=lambda: sgd(rate, momentum=0.9, clipvalue=clip),
        l2=l2,
    )
    network = DenseByHand(start, rate, momentum=0.9)
    network.masks[0], num_clipped = kf.get_mask(model)["fc/kernel"], 0
    x, y = blobs(2 * BATCH)
    for step in range(4):
        first = step % 2 * BATCH
        sums = [0.0, 0.0]
        for half in np.split(np.arange(first, first + BATCH), 2):
            gradients = zip(network.gradients(x[half], y[half]), network.values, strict=True)
            gradients = [(g + l2 * w) / 2 for g, w in gradients]
            num_clipped += int(sum((abs(g) > clip).sum() for g in gradients))
            sums = [s + np.clip(g, -clip, clip) for s, g in zip(sums, gradients, strict=True)]
        network.apply(sums)
    found = model.get_weights()
    return {
        "difference": max(
            float(np.abs(f - w).max()) for f, w in zip(found, network.values, strict=True)
        ),
        "clipped": num_clipped,
    }


@case
def decay():
    """FreezeNet-WD on three and two devices: its scalar against the recurrence in NumPy."""
    results = {}
    for way, strategy in (("freeze", mirrored_without_collectives(3)), ("first", mirrored())):
        arguments = {"inner": momentum, "frozen_weights": "decay", "l2": 0.3}
        model, start = train(strategy, way, **arguments)
        other, _ = train(None, way, **arguments)
        factor, recurrence = 1.0, SGDByHand(momentum=0.9)
        for _ in range(4):
            factor += recurrence.change(0.3 * factor, 0.1)
        mask = kf.get_mask(model)
        ratios = [
            value_of(v)[~mask[v]] / (factor * old[~mask[v]])
            for v, old in zip(model.trainable_variables, start, strict=True)
            if is_weight(v)
        ]
        results[way] = {
            "difference": difference(model, other),
            "same mask": kf.get_mask(other) == mask,
            "copies equal": copies_are_equal(model),
            "ratio": float(max(np.abs(r - 1.0).max() for r in ratios)),
        }
    return results


@case
def one_device():
    """MirroredStrategy on a single device, as on a machine with one GPU."""
    strategies = (mirrored_without_collectives(1), None)
    (model, _), (other, _) = (train(strategy, "first") for strategy in strategies)
    return difference(model, other)


@case
def masks():
    """Frozen in the scope, outside of it, without a strategy; compiled and in a custom loop."""
    strategy = mirrored()
    data, loss = first_batch(), crossentropy()

    def make_model():  # a regulariser that decides as much as the loss
        return network(regularizer=keras.regularizers.L2(0.5))

    other = compiled(None, make_model)
    expected = kf.compute_saliency(other, *data)
    found = {"none": kf.freeze(other, *data)}
    found["outside"] = kf.freeze(compiled(strategy, make_model), *data)
    model = compiled(strategy, make_model)
    with strategy.scope():
        found["inside"] = kf.freeze(model, *data)
        scores = kf.compute_saliency(model, *data)
        optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
        found["loop"] = kf.freeze(make_model(), *data, loss=loss, optimizer=optimizer)
    pairs = zip(scores.values(), expected.values(), strict=True)
    return {
        "masks": {name: mask == found["none"] for name, mask in found.items()},
        "differs without regulariser": kf.freeze(compiled(None), *data) != found["none"],
        "same scores": all(same_bits(a, b) for a, b in pairs),
    }


@case
def unbuilt_model():
    def make_model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)])

    model, other = (compiled(s, make_model) for s in (mirrored(), None))
    for each in (model, other):
        kf.freeze(each, *first_batch())
        fit(each)
    return {"difference": difference(model, other), "copies equal": copies_are_equal(model)}


@case
def custom_loop():
    """`strategy.run`, traced with an optimizer that is built in it, and eager after `freeze`."""
    return [_loop_difference("first", traced=True), _loop_difference("freeze", traced=False)]


def _loop_difference(way, traced):
    results = []
    for strategy in (mirrored(), None):
        with scope_of(strategy):
            model = network()
            optimizer = kf.FreezeOptimizer(momentum(), freeze_rate=0.75, l2=0.1)
        if way == "freeze":
            kf.freeze(model, *first_batch(), loss=crossentropy(), optimizer=optimizer)
        results.append((model, optimizer))
        _loop(strategy, model, optimizer, traced)
    (model, optimizer), (other, other_optimizer) = results
    assert optimizer.mask == other_optimizer.mask
    return difference(model, other)


def _loop(strategy, model, optimizer, traced):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x)) / BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    batches = tf.data.Dataset.from_tensor_slices(blobs(2 * BATCH)).batch(BATCH)
    run = step
    if strategy is not None:
        batches = strategy.experimental_distribute_dataset(batches)

        def run(x, y):
            strategy.run(step, args=(x, y))

    run = tf.function(run) if traced else run
    for x, y in batches:
        run(x, y)
        if not traced:
            break  # collective operations are slow outside of a graph


@case
def apply_outside_of_run():
    model, other = (compiled(s) for s in (mirrored(), None))
    for each in (model, other):
        kf.freeze(each, *first_batch())
        variables = each.trainable_variables
        each.optimizer.apply([tf.ones(v.shape) for v in variables], variables)
    return {"difference": difference(model, other), "copies equal": copies_are_equal(model)}


@case
def looks():
    """What only looks at a model sees one device's worth of it, and leaves it as it is."""
    x, y = blobs(2 * BATCH)
    models = [compiled(s, inner=momentum) for s in (mirrored(), None)]
    flows, checks = [], []
    for model in models:
        kf.freeze(model, x, y)
        history = kf.callbacks.GradientFlowHistory(x, y, batch_size=BATCH)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[history])
        flows.append([*history.history["gradient_flow"], kf.gradient_flow(model, x, y)])
        checks.append(kf.check_pruning(model, x, y, batch_size=BATCH))
    return {
        "difference": difference(*models),
        "flows": flows,
        "largest": [check.largest_frozen_weight for check in checks],
    }


@case
def restricted_gradients():
    """Two devices with restricted weight gradients, and without."""
    blocks, gradient = set(), block.Block.gradient

    def spy(block, *args):
        blocks.add(id(block))
        return gradient(block, *args)

    always = mock.patch.object(sparse_gradients, "cheapest_block", return_value=(True, True))
    with always, mock.patch.object(block.Block, "gradient", spy):
        restricted, _ = train(mirrored(), "freeze")
    ordinary, _ = train(mirrored(), "freeze")
    return {
        "difference": difference(restricted, ordinary),
        "restricted": len(blocks),
        "copies equal": copies_are_equal(restricted),
    }


@case
def later_changes():
    """Another mask of the same lengths, other weights, pruning: one after the other."""
    x, y = blobs(2 * BATCH)
    strategy = mirrored()
    models = [compiled(s, inner=momentum) for s in (strategy, None)]
    for model in models:
        kernels = [v for v in model.trainable_variables if is_weight(v)]
        kf.freeze(model, x, y)
        fit(model)
        mask = kf.get_mask(model)
        rolled = {v.path: np.roll(mask[v], 1, axis=0) for v in kernels}
        kf.freeze(model, mask=rolled, overwrite=True)
        fit(model)
        kf.reinitialize(model, seed=3)
        kf.prune(model)
        fit(model)
    mask = kf.get_mask(models[0])
    kernel = models[0].get_layer("body").kernel
    return {
        "difference": difference(*models),
        "same mask": mask == kf.get_mask(models[1]),
        "copies equal": copies_are_equal(models[0]),
        "pruned": not value_of(kernel)[~mask[kernel]].any(),
        "trained": bool(value_of(kernel)[mask[kernel]].all()),
    }


@case
def stale_function():
    strategy = mirrored()
    model = compiled(strategy)
    mask = kf.freeze(model, *first_batch())
    variables = model.trainable_variables

    def step():
        model.optimizer.apply([tf.ones(v.shape) for v in variables], variables)

    @tf.function
    def run():
        strategy.run(step)

    run()
    rolled = {v.path: np.roll(mask[v], 1, axis=0) for v in variables if is_weight(v)}
    kf.freeze(model, mask=rolled, overwrite=True)
    before = [w for w in values_of(variables) if w.ndim == 2]
    message = None
    try:
        run()
    except tf.errors.InvalidArgumentError as error:
        message = error.message
    after = [w for w in values_of(variables) if w.ndim == 2]
    kept = all(same_bits(a, b) for a, b in zip(after, before, strict=True))
    return {"message": message, "weights kept": kept}


@case
def first_batch_with_nan():
    """On the second device only."""
    model = compiled(mirrored())
    x, y = blobs(2 * BATCH)
    x[BATCH - 1] = np.nan
    before, message = model.get_weights(), None
    try:
        fit(model, x, y)
    except tf.errors.InvalidArgumentError as error:
        message = error.message
    kept = all(same_bits(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    return {"message": message, "weights kept": kept, "mask": kf.get_mask(model)}


@case
def beyond_keras():
    """The kind of error of what Keras cannot do with several devices, ours and a bare optimizer's.

    keras#20582, keras#18666.
    """
    kinds = {}
    for name, inner, steps in (
        ("accumulation", lambda: sgd(gradient_accumulation_steps=2), 1),
        ("steps_per_execution", sgd, 3),
    ):
        for who, wrap in (("ours", kf.FreezeOptimizer), ("plain", lambda optimizer: optimizer)):
            with mirrored().scope():
                model = network()
                model.compile(wrap(inner()), crossentropy(), steps_per_execution=steps)
            try:
                fit(model)
            except Exception as error:
                kinds[f"{name}, {who}"] = type(error).__name__
    return kinds


@case
def files(folder="."):
    """Saved under a strategy; loaded without and with one."""
    strategy = mirrored()
    model = compiled(strategy, inner=momentum)
    kf.reinitialize(model, seed=3)
    kf.freeze(model, *first_batch())
    fit(model)
    kf.save(model, f"{folder}/model.freeze")
    model.save(f"{folder}/model.keras")
    small = kf.load(f"{folder}/model.freeze")
    outside = keras.models.load_model(f"{folder}/model.keras")
    with strategy.scope():
        inside = keras.models.load_model(f"{folder}/model.keras")
    found = {
        "loaded": [difference(model, each) for each in (small, outside, inside)],
        "masks": [kf.get_mask(model) == kf.get_mask(each) for each in (small, outside, inside)],
        "reports": [
            {**kf.report(each).to_dict(), "rows": None, "optimizer_state_bytes": None}
            for each in (model, outside)
        ],
    }
    for each in (model, outside, inside):
        fit(each)
    found["trained on"] = [difference(model, each) for each in (outside, inside)]
    return found


# The others are exhaustive.
FIRST = ("keep, freeze", "moving mask, freeze", "restricted_gradients", "custom_loop")


def main():
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(3)]
    tf.config.set_logical_device_configuration(cpu, parts)
    results = {}
    for name in sys.argv[1:]:
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = traceback.format_exc()
    Path("results.json").write_text(json.dumps(results))


class Results(dict):
    """What the cases found in another process, which runs when the first of them is asked for."""

    def __init__(self, names, folder):
        self._names, self._folder = names, folder

    def __missing__(self, name):
        command = [sys.executable, __file__, *self._names]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.update(json.loads((self._folder / "results.json").read_text()))
        assert not isinstance(self[name], str), self[name]
        return self[name]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(FIRST, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    names = [name for name in CASES if name not in FIRST]
    return Results(names, tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.exhaustive) for n in TRAINED]
)
def test_two_devices_train_as_one_does(results, more, name):
    found = (results if name in FIRST else more)[name]
    zero = name.startswith("zero")
    assert found.pop("difference") < 1e-6
    assert found == {
        "same mask": True,
        "copies equal": True,
        "frozen kept": not zero,
        "frozen zero": zero,
        "iterations": 3 if name == "zero, first batch" else 4,
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["accumulation", "steps_per_execution"])
def test_what_keras_cannot_do_on_two_devices_fails_alike(more, name):
    kinds = more["beyond_keras"]
    assert kinds[f"{name}, ours"] == kinds[f"{name}, plain"]


@pytest.mark.exhaustive
def test_embedding_rows_train_on_two_devices(more):
    found = more["embedding"]
    assert found["difference"] < 1e-6
    assert found["same mask"]
    assert found["copies equal"]
    assert found["frozen kept"]


@pytest.mark.exhaustive
def test_clipping_and_l2_are_those_of_keras_by_hand(more):
    assert more["by_hand"]["difference"] < 1e-6
    assert more["by_hand"]["clipped"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["freeze", "first"])
def test_frozen_weights_decay_by_the_same_factor_on_any_number_of_devices(more, way):
    found = more["decay"][way]
    assert found["difference"] < 1e-6
    assert found["same mask"]
    assert found["copies equal"]
    assert found["ratio"] < 1e-5


@pytest.mark.exhaustive
def test_a_strategy_with_one_device_changes_nothing(more):
    assert more["one_device"] < 1e-6


@pytest.mark.exhaustive
def test_mask_and_scores_do_not_depend_on_the_scope(more):
    found = more["masks"]
    assert found["masks"] == dict.fromkeys(("none", "outside", "inside", "loop"), True)
    assert found["differs without regulariser"]
    assert found["same scores"]


@pytest.mark.exhaustive
def test_freeze_builds_a_model_for_its_strategy(more):
    assert more["unbuilt_model"]["difference"] < 1e-6
    assert more["unbuilt_model"]["copies equal"]


def test_custom_loops_train_as_on_one_device(results):
    assert max(results["custom_loop"]) < 1e-6


@pytest.mark.exhaustive
def test_apply_outside_of_run_changes_every_copy(more):
    assert more["apply_outside_of_run"] == {"difference": 0.0, "copies equal": True}


@pytest.mark.exhaustive
def test_gradient_flow_and_pruning_check_are_those_of_one_device(more):
    found = more["looks"]
    assert found["difference"] < 1e-6
    assert np.allclose(*found["flows"], rtol=1e-5, atol=0)
    assert found["largest"][0] == found["largest"][1] > 0


def test_restricted_gradients_train_two_devices_as_ordinary_ones_do(results):
    found = results["restricted_gradients"]
    assert found["difference"] < 1e-6
    assert found["restricted"] == 2
    assert found["copies equal"]


@pytest.mark.exhaustive
def test_new_masks_weights_and_pruning_reach_every_copy(more):
    found = more["later_changes"]
    assert found.pop("difference") < 1e-6
    assert all(found.values()), found


@pytest.mark.exhaustive
def test_function_traced_for_an_earlier_mask_fails_and_changes_no_weight(more):
    assert "freezing mask was replaced" in more["stale_function"]["message"]
    assert more["stale_function"]["weights kept"]


@pytest.mark.exhaustive
def test_nan_on_one_device_decides_no_mask(more):
    found = more["first_batch_with_nan"]
    assert "is not finite in the first batch" in found["message"]
    assert found["weights kept"]
    assert found["mask"] is None


@pytest.mark.exhaustive
def test_files_of_a_distributed_model_are_ordinary_files(more):
    found = more["files"]
    assert found["loaded"] == [0.0, 0.0, 0.0]
    assert found["masks"] == [True, True, True]
    assert found["reports"][0] == found["reports"][1]
    assert max(found["trained on"]) < 1e-6


@pytest.mark.parametrize("way", ["freeze", "first"])
def test_one_device_strategy_trains_as_none_does(way):
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    (model, _), (other, _) = (train(s, way) for s in (strategy, None))
    assert difference(model, other) == 0.0
    assert kf.get_mask(model) == kf.get_mask(other)


@pytest.mark.parametrize("outside", ["model", "optimizer", "inner optimizer"])
def test_what_was_created_outside_of_the_scope_is_refused(outside):
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")

    def scope(part):
        return contextlib.nullcontext() if part == outside else strategy.scope()

    with scope("model"):
        model = network()
    with scope("inner optimizer"):
        inner = sgd()
    with scope("optimizer"):
        model.compile(kf.FreezeOptimizer(inner), crossentropy())
    with pytest.raises(ValueError, match=r"Received: .*(OneDeviceStrategy|no strategy) and"):
        kf.freeze(model, *first_batch())
    assert kf.get_mask(model) is None


@pytest.mark.exhaustive
def test_the_example_trains_on_two_logical_cpus(tmp_path):
    script = ROOT / "examples" / "train_on_several_devices.py"
    flags = ["--logical_cpus=2", "--epochs=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, str(script), *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Weights: 266,200, trained: 2,662" in done.stdout
    assert "Devices: 2\nCopies of the network are equal: True" in done.stdout
    assert "Frozen weights kept their start: True" in done.stdout
    assert float(done.stdout.split("Test accuracy ")[1].rstrip("%\n")) > 50.0


if __name__ == "__main__":
    main()

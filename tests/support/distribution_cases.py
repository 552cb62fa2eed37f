"""What one model does on several devices, case by case; a script that measures it.

TensorFlow splits its CPU only before it has used it. So this runs in a process of its own with
three logical CPUs, and writes what it measured to results.json in its folder:

    python tests/support/distribution_cases.py CASE ...
"""

import functools
import json
import sys
import traceback
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from helpers import blobs, crossentropy, is_weight, same_bits, sgd, value_of, values_of
from oracle import DenseByHand, SGDByHand
from two_devices import (
    BATCH,
    compare,
    compiled,
    copies_are_equal,
    difference,
    first_batch,
    fit,
    mirrored,
    mirrored_without_collectives,
    network,
    scope_of,
    train,
)

import keras_freeze as kf
from keras_freeze.restricted import block
from keras_freeze.restricted import layers as sparse_gradients

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


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


if __name__ == "__main__":
    main()

"""Several workers of TensorFlow that train one model: what they exchange, and that they agree."""

import keras
import numpy as np
import pytest
from helpers import same_bits
from oracle import DenseByHand, brute_force_mask
from together import assert_all_succeeded, marks_of_processes, run_together

pytestmark = marks_of_processes("tensorflow")
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from workers import BATCH, FREEZE_RATE, compiled, digits, masks, values

    import keras_freeze as kf

EQUAL, UNEQUAL, L2 = (60, 60), (80, 40), 0.01
DECAYED = {"sizes": EQUAL, "steps": 100, "settings": {"l2": L2}}
CASES = {
    "freeze": DECAYED,
    "first batch": {**DECAYED, "decides": "first batch"},
    "unequal": {**DECAYED, "sizes": UNEQUAL, "steps": 10},
    "dense": {**DECAYED, "settings": {"l2": L2, "averaged": True}, "steps": 10},
    "normalized": {"sizes": EQUAL, "steps": 20, "settings": {"normalized": True}},
    "grid": {"sizes": EQUAL, "steps": 10, "settings": {"grid": 2.0**-10}},
    "float16": {"sizes": EQUAL, "steps": 10, "policy": "mixed_float16"},
    "bfloat16": {"sizes": EQUAL, "steps": 10, "policy": "mixed_bfloat16"},
}
BY_HAND = ("freeze", "first batch", "unequal", "dense")
COMPACT = ("freeze", "unequal", "normalized", "grid", "float16", "bfloat16")

TRAIN = """
from workers import *

reductions = listed_reductions()
results = {}
for name, case in ARGUMENTS["cases"].items():
    found = trained(STRATEGY, RANK, case, reductions)
    results.update({f"{name}/{key}": value for key, value in found.items()})

x, y = digits((60, 60), RANK)

def freeze(mask=None, rate=None, **settings):
    data = (x[0], y[0]) if mask is None else ()
    kf.freeze(compiled(STRATEGY, **settings), *data, mask=mask, freeze_rate=rate)

def by_first_batch():
    loop(compiled(STRATEGY, freeze_rate=0.5 + 0.1 * RANK), STRATEGY)(x[0], y[0])

def chosen(num):
    def mask_of(variable):
        rng = np.random.default_rng(10 * RANK + variable.shape[0])
        mask = np.zeros(variable.shape, bool)
        mask.reshape(-1)[rng.permutation(mask.size)[:num]] = True
        return mask
    return mask_of

def with_other_weights():
    model = compiled(STRATEGY)
    kf.freeze(model, x[0], y[0])
    kernel = model.layers[0].kernel
    kernel.assign(kernel * (1.0 + RANK))
    before = values(model)
    try:
        loop(model, STRATEGY)(x[0], y[0])
    finally:
        after = values(model)
        results["refused/weights kept"] = [np.array_equal(before[k], after[k]) for k in before]

def with_nan():
    broken = x[0].copy()
    broken[0] += np.nan if RANK else 0.0
    kf.freeze(compiled(STRATEGY), broken, y[0])

attempts = {
    "rate": lambda: freeze(freeze_rate=0.5 + 0.1 * RANK),
    "rate as argument": lambda: freeze(rate=0.5 + 0.1 * RANK),
    "rate of the first batch": by_first_batch,
    "seed": lambda: freeze(seed=RANK),
    "excluded": lambda: freeze(exclude=["first"] if RANK else []),
    "mask": lambda: freeze(chosen(5)),
    "mask of another size": lambda: freeze(chosen(5 + RANK)),
    "weights": with_other_weights,
    "nan": with_nan,
}
for name, attempt in attempts.items():
    results[f"refused/{name}"] = refusal(attempt)
give(**results)
leave(FOLDER, COUNT)
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """What each of two workers found, by case."""
    folder = tmp_path_factory.mktemp("train")
    finished = run_together(TRAIN, folder, cases=CASES)
    assert_all_succeeded(finished)
    found = [{} for _ in finished]
    for one, cases in zip(finished, found, strict=True):
        for name, value in one.arrays.items():
            case, key = name.split("/")
            cases.setdefault(case, {})[key] = value
    return found


def arrays(found, prefix):
    """The arrays whose names are the prefix and a number, in the order of the numbers."""
    names = [name for name in found if name.removeprefix(prefix).isdigit()]
    return [found[name] for name in sorted(names, key=lambda name: int(name.removeprefix(prefix)))]


def kernels(found, prefix):
    """The kernels among the trainable variables of a network without BatchNormalization."""
    return arrays(found, prefix)[::2]


@pytest.mark.parametrize("name", CASES)
def test_workers_end_with_the_same_bits_and_keep_frozen_ones(workers, name):
    first, second = (found[name] for found in workers)
    for prefix in ("v", "m"):
        assert all(map(same_bits, arrays(first, prefix), arrays(second, prefix)))
    positions = [int(key[1:]) for key in first if key[0] == "m"]
    for position in positions:
        trained = first[f"m{position}"]
        weights, start = first[f"v{position}"], first[f"s{position}"]
        assert same_bits(weights[~trained], start[~trained])
        assert not same_bits(weights[trained], start[trained])


@pytest.mark.parametrize("name", COMPACT)
def test_a_step_sums_as_many_floats_as_are_trained(workers, name):
    for found in workers:
        assert list(found[name]["reductions"]) == [found[name]["num_trained"]]
        assert list(found[name]["collectives"]) == ["CollectiveReduceV2"]


def test_a_step_of_the_dense_update_sums_all_gradients(workers):
    num_weights = sum(weights.size for weights in kernels(workers[0]["dense"], "s"))
    num_others = sum(values.size for values in arrays(workers[0]["dense"], "s")[1::2])
    for found in workers:
        assert list(found["dense"]["reductions"]) == [num_weights + num_others]
        # In the first step, TensorFlow traces a function twice.
        assert set(found["first batch"]["reductions"]) == {num_weights, num_weights + num_others}


def frozen_by_hand(start, gradients, l2=L2):
    """The network in NumPy, with the mask that sorting the scores gives."""
    hand = DenseByHand(start, l2=l2)
    scores = [np.abs(w * g) for w, g in zip(start[::2], gradients[::2], strict=True)]
    num_trained = int((1.0 - FREEZE_RATE) * sum(score.size for score in scores))
    hand.masks[::2] = brute_force_mask(scores, num_trained)
    return hand


@pytest.mark.parametrize("name", BY_HAND)
def test_workers_train_what_one_process_does_on_all_data(workers, name):
    found = workers[0][name]
    start = arrays(found, "s")
    x, y = digits()
    by_worker = np.split(np.arange(BATCH), [CASES[name]["sizes"][0]])
    hand = DenseByHand(start)
    # `freeze` sums the gradients of the means of all workers.
    gradients = [hand.gradients(x[0][rows], y[0][rows]) for rows in by_worker]
    hand = frozen_by_hand(start, [sum(parts) for parts in zip(*gradients, strict=True)])
    assert all(map(np.array_equal, arrays(found, "m"), hand.masks[::2]))
    for step in range(10):
        hand.step(x[step % 2], y[step % 2])
    for values, expected in zip(arrays(found, "e"), hand.values, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_values_on_a_grid_are_points_of_it(workers):
    found = workers[0]["grid"]
    for values, start in zip(arrays(found, "v"), arrays(found, "s"), strict=True):
        steps = (values.astype("float64") - start) * 2.0**10
        assert np.abs(steps - steps.round()).max() < 1e-3
        assert np.abs(steps).max() >= 1.0


def test_each_worker_has_its_own_moving_statistics(workers):
    first, second = (found["normalized"]["statistics"] for found in workers)
    assert first.size == second.size == 64
    assert not same_bits(first, second)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("rate", "settings of the FreezeOptimizer"),
        ("rate as argument", "settings of the FreezeOptimizer"),
        ("rate of the first batch", "settings of the FreezeOptimizer"),
        ("seed", "settings of the FreezeOptimizer"),
        ("excluded", "variables"),
        ("mask", "masks"),
        ("mask of another size", "masks"),
        ("weights", "weights"),
    ],
)
def test_what_differs_between_workers_is_refused_on_all_of_them(workers, name, what):
    for found in workers:
        message = str(found["refused"][name])
        assert message.startswith("ValueError: ")
        assert message.endswith(f"Received: {what} that differ between the processes 0 / 1")
        assert found["refused"]["weights kept"].all()


def test_a_batch_that_is_not_finite_on_one_worker_freezes_none(workers):
    first, second = (str(found["refused"]["nan"]) for found in workers)
    assert first.startswith("ValueError: ")
    assert first.endswith("an error in the processes 1")
    assert second.startswith("ValueError: The loss of batch 0 is nan")


FIT = """
from workers import *
from keras.src.backend.tensorflow.trainer import reduce_per_replica

x, y = digits()
both = {"x": np.concatenate(x), "y": np.concatenate(y)}
with STRATEGY.scope():
    plain = network()
    plain.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
results = {
    "keras build": refusal(lambda: plain.fit(**both, batch_size=BATCH, verbose=0)),
    "keras reduce": refusal(lambda: reduce_per_replica(tf.constant(1.0), STRATEGY, "auto")),
}
reductions = listed_reductions()
for way in ("freeze", "first batch"):
    model = compiled(STRATEGY)
    found = values(model, "s")
    if way == "freeze":
        own = digits((60, 60), RANK)
        kf.freeze(model, own[0][0], own[1][0])
    reductions.clear()
    history = model.fit(**both, batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history
    found.update(
        reductions=list(reductions),
        history=[history["loss"], history["accuracy"]],
        **values(model),
        **masks(model),
    )
    results.update({f"{way}/{key}": value for key, value in found.items()})
moving = compiled(STRATEGY)
own = digits((60, 60), RANK)
kf.freeze(moving, own[0][0], own[1][0])
regrow = kf.callbacks.RegrowTrained(0.3, 2, x=own[0][1], y=own[1][1], end=5)
moving.fit(**both, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[regrow])
found = {**values(moving), **masks(moving)}
results.update({f"moving/{key}": value for key, value in found.items()})
one_more = {"validation_data": (both["x"], both["y"]), "validation_batch_size": 100}
history = model.fit(**both, batch_size=100, verbose=0, **one_more).history
results.update(
    num_trained=kf.report(model).num_trained_parameters,
    validated=[history["val_loss"][0], history["val_accuracy"][0]],
    evaluated=model.evaluate(**both, batch_size=100, verbose=0),
    predicted=model.predict(both["x"], batch_size=100, verbose=0),
    outputs=model(both["x"]),
)
give(**results)
leave(FOLDER, COUNT)
"""


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """What `fit` did on two workers."""
    finished = run_together(FIT, tmp_path_factory.mktemp("fit"))
    assert_all_succeeded(finished)
    return [one.arrays for one in finished]


def test_keras_still_needs_the_adapter_of_fit(fitted):
    """Once this fails, Keras is mended, and `backend/_tensorflow_fit.py` can go."""
    for found in fitted:
        assert "Attempt to convert a value (PerReplica" in str(found["keras build"])
        assert str(found["keras reduce"]).startswith("ValueError: ")


@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_fit_trains_workers_as_one_process_on_all_data(fitted, way):
    first, second = (
        {name.removeprefix(f"{way}/"): value for name, value in found.items()} for found in fitted
    )
    assert np.array_equal(first["history"], second["history"])
    assert all(map(same_bits, arrays(first, "v"), arrays(second, "v")))
    x, y = digits()
    start = arrays(first, "s")
    hand = frozen_by_hand(start, DenseByHand(start).gradients(x[0], y[0]), l2=0.0)
    assert all(map(np.array_equal, arrays(first, "m"), hand.masks[::2]))
    losses = []
    for step in range(6):
        losses.append(hand.loss(x[step % 2], y[step % 2]))
        hand.step(x[step % 2], y[step % 2])
    np.testing.assert_allclose(first["history"][0], np.reshape(losses, (3, 2)).mean(axis=1), 1e-4)
    for values, expected in zip(arrays(first, "v"), hand.values, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_that_moves_is_that_of_one_process_on_all_data(fitted):
    first, second = (
        {name.removeprefix("moving/"): value for name, value in found.items()} for found in fitted
    )
    for prefix in ("v", "m"):
        assert all(map(same_bits, arrays(first, prefix), arrays(second, prefix)))
    x, y = digits()
    model = compiled(tf.distribute.get_strategy())
    start = values(model)
    kf.freeze(model, x[0], y[0])
    before = masks(model)
    regrow = kf.callbacks.RegrowTrained(0.3, 2, x=x[1], y=y[1], end=5)
    both = {"x": np.concatenate(x), "y": np.concatenate(y)}
    model.fit(**both, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[regrow])
    for name, mask in masks(model).items():
        assert np.array_equal(first[name], mask)
        assert (mask != before[name]).any()
        weights = name.replace("m", "v")
        assert same_bits(first[weights][~mask], start[weights][~mask])
    for name, expected in values(model).items():
        np.testing.assert_allclose(first[name], expected, rtol=1e-4, atol=1e-5)


def test_a_step_of_fit_sums_what_is_trained_and_the_metrics(fitted):
    for found in fitted:
        numbers = list(found["freeze/reductions"])
        assert numbers.count(found["num_trained"]) == 1
        assert set(numbers) == {1, int(found["num_trained"])}


def test_workers_evaluate_and_predict_alike(fitted):
    first, second = fitted
    for name in ("validated", "evaluated", "predicted"):
        assert np.array_equal(first[name], second[name])
    np.testing.assert_allclose(first["predicted"], first["outputs"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first["validated"], first["evaluated"], rtol=1e-5)
    labels = np.concatenate(digits()[1])
    np.testing.assert_allclose(first["evaluated"][1], (first["outputs"].argmax(1) == labels).mean())


DIE = """
from workers import *

x, y = digits((60, 60), RANK)

def begun():
    model = compiled(STRATEGY)
    kf.freeze(model, x[0], y[0])
    return model, loop(model, STRATEGY)

model, step = begun()
for number in range(10):
    step(x[number % 2], y[number % 2])
give(**values(model), **masks(model))
model, step = begun()
for number in range(5):
    step(x[number % 2], y[number % 2])
if RANK == 0:
    model.save(f"{FOLDER}/chief.keras")
    model.save_weights(f"{FOLDER}/chief.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{FOLDER}/chief")
step(x[1], y[1])
if RANK == 1:
    os._exit(9)

def go_on():
    while True:
        step(x[0], y[0])

error = refusal(go_on)
with open(f"{FOLDER}/error.txt", "w") as file:
    file.write(error)
os._exit(0)
"""

GO_ON = """
from workers import *

x, y = digits((60, 60), RANK)

def from_keras():
    with STRATEGY.scope():
        return keras.models.load_model(f"{FOLDER}/chief.keras")

def from_weights():
    model = compiled(STRATEGY)
    kf.freeze(model, x[0], y[0])  # so that there are moments to load
    model.load_weights(f"{FOLDER}/chief.weights.h5")
    return model

def from_checkpoint():
    model = compiled(STRATEGY)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(f"{FOLDER}/chief")
    return model

results = {}
for load in (from_keras, from_weights, from_checkpoint):
    model = load()
    step = loop(model, STRATEGY)
    for number in range(5, 10):
        step(x[number % 2], y[number % 2])
    for name, value in {**values(model), **masks(model)}.items():
        results[f"{load.__name__}/{name}"] = value
give(**results)
leave(FOLDER, COUNT)
"""


def test_a_worker_dies_and_training_goes_on_from_the_checkpoint_of_the_chief(tmp_path):
    stopped = run_together(DIE, tmp_path, group_timeout=30)
    assert [one.returncode for one in stopped] == [0, 9], stopped[0].errors[-4000:]
    error = (tmp_path / "error.txt").read_text()
    assert error.split(":")[0] in ("UnavailableError", "DeadlineExceededError", "InternalError")
    assert "Collective ops is aborted" in error
    for path in tmp_path.glob("*.npz"):
        path.unlink()
    finished = run_together(GO_ON, tmp_path)
    assert_all_succeeded(finished)
    for one, before in zip(finished, stopped, strict=True):
        for way in ("from_keras", "from_weights", "from_checkpoint"):
            for name, value in before.arrays.items():
                assert same_bits(one.arrays[f"{way}/{name}"], value), f"{way}: {name}"

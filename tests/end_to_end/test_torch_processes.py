"""Several processes of PyTorch that train one model: what they exchange, and that they agree."""

import keras
import numpy as np
import pytest
from helpers import same_bits
from together import assert_all_succeeded, run_together

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(keras.backend.backend() != "torch", reason="a process group of PyTorch"),
]

COMMON = """
import keras, torch
from keras import layers
import keras_freeze as kf

exchanged = []
reduce_as_before = dist.all_reduce

def counted(tensor, *arguments, **keywords):
    exchanged.append(tensor.numel())
    return reduce_as_before(tensor, *arguments, **keywords)

dist.all_reduce = counted

def digits(part, parts):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(240, 20)).astype("float32")
    y = (x[:, :4].argmax(axis=1)).astype("int32")
    return x[part::parts], y[part::parts]

def network(seed=5):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((20,)), layers.Dense(32, activation="relu"),
        layers.BatchNormalization() if ARGUMENTS.get("normalized") else layers.Activation("linear"),
        layers.Dense(16, activation="relu"), layers.Dense(4),
    ])

def compiled(model, optimizer=None, **settings):
    inner = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        kf.FreezeOptimizer(inner, **{"freeze_rate": 0.8, **settings}),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model

def values(model):
    return {f"v{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.trainable_variables)}

def masks(model):
    return {f"m{e.position}": e.trained for e in kf.get_mask(model).entries}
"""

TRAIN = (
    COMMON
    + """
model = compiled(network(), **ARGUMENTS.get("settings", {}))
start = values(model)
x, y = digits(RANK, COUNT)
if ARGUMENTS["decides"] == "freeze":
    kf.freeze(model, x, y)
exchanged.clear()
size = 120 // COUNT
for step in range(ARGUMENTS["steps"]):
    part = slice(size * (step % 2), size * (step % 2) + size)
    model.train_on_batch(x[part], y[part])
    if step == 9:
        early = {"early_" + k: v.copy() for k, v in values(model).items()}
give(exchanged=exchanged, trained=kf.report(model).num_trained_parameters, **values(model),
     **masks(model), **{"start_" + k: v for k, v in start.items()}, **early)
"""
)


def arrays(found, prefix):
    """The arrays whose names are the prefix and a number, in the order of the numbers."""
    names = [name for name in found if name.removeprefix(prefix).isdigit()]
    return [found[name] for name in sorted(names, key=lambda name: int(name.removeprefix(prefix)))]


@pytest.mark.parametrize("decides", ["freeze", "first batch"])
def test_two_processes_train_what_one_does_on_all_data(decides, tmp_path):
    finished = run_together(TRAIN, tmp_path / "two", decides=decides, steps=100)
    finished += run_together(TRAIN, tmp_path / "one", 1, decides=decides, steps=10)
    assert_all_succeeded(finished)
    first, second, alone = (one.arrays for one in finished)
    for prefix in ("v", "m"):
        assert all(map(same_bits, arrays(first, prefix), arrays(second, prefix)))
    for position, trained in enumerate(arrays(first, "m")):
        weights, start = first[f"v{2 * position}"], first[f"start_v{2 * position}"]
        assert same_bits(weights[~trained], start[~trained])
        assert not same_bits(weights[trained], start[trained])
    first_batch = 0 if decides == "freeze" else 5
    assert (first["exchanged"][first_batch:] == first["trained"]).all()
    assert len(first["exchanged"]) >= 100
    assert alone["exchanged"].size == 0
    assert all(map(np.array_equal, arrays(first, "m"), arrays(alone, "m")))
    for one, other in zip(arrays(first, "early_v"), arrays(alone, "early_v"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

"""Several processes of PyTorch that train one model: what they exchange, and that they agree."""

import numpy as np
import pytest
from group_scripts import TORCH, arrays, assert_only_trained_entries_moved
from helpers import same_bits
from together import assert_all_succeeded, marks_of_processes, run_together

pytestmark = marks_of_processes("torch")

TRAIN = (
    TORCH
    + """
x, y = digits(RANK, COUNT)
size = 120 // COUNT

for decides in ("freeze", "batch"):
    model = compiled(network())
    keep("start", model)
    if decides == "freeze":
        kf.freeze(model, x, y)
    exchanged.clear()
    for step in range(100 if COUNT > 1 else 10):
        part = slice(size * (step % 2), size * (step % 2) + size)
        model.train_on_batch(x[part], y[part])
        if step == 9:
            keep(f"early_{decides}", model)
    keep(decides, model)
    found[f"{decides}_exchanged"] = np.array(exchanged)
found["trained"] = kf.report(model).num_trained_parameters

model = compiled(network(), keras.optimizers.Adam(0.01))
kf.freeze(model, x, y)
for step in range(8):
    model.train_on_batch(x[step : step + 40], y[step : step + 40])
keep("whole", model)

model = compiled(network())
kf.freeze(model, x, y)
keep("moving_from", model)
regrow = kf.callbacks.RegrowTrained(0.3, 2, x=x, y=y, end=7)
model.fit(x, y, batch_size=size, epochs=4, shuffle=False, verbose=0, callbacks=[regrow])
keep("moving", model)
give(**found)
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The arrays of two processes, and those of one that has all data."""
    folder = tmp_path_factory.mktemp("trained")
    finished = run_together(TRAIN, folder / "two") + run_together(TRAIN, folder / "one", 1)
    assert_all_succeeded(finished)
    return [one.arrays for one in finished]


@pytest.mark.parametrize("decides", ["freeze", "batch"])
def test_two_processes_train_what_one_does_on_all_data(decides, trained):
    first, second, alone = trained
    for prefix in (f"{decides}_v", f"{decides}_m"):
        assert all(map(same_bits, arrays(first, prefix), arrays(second, prefix)))
    assert_only_trained_entries_moved(first, decides, arrays(first, "start_v"))
    exchanged = first[f"{decides}_exchanged"]
    first_batch = 0 if decides == "freeze" else 5
    assert (exchanged[first_batch:] == first["trained"]).all()
    assert len(exchanged) >= 100
    assert alone[f"{decides}_exchanged"].size == 0
    masks = [arrays(one, f"{decides}_m") for one in (first, alone)]
    assert len(masks[0]) == 3
    assert all(map(np.array_equal, *masks))
    early = [arrays(one, f"early_{decides}_v") for one in (first, alone)]
    for one, other in zip(*early, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_mask_that_moves_is_that_of_one_process_on_all_data(trained):
    first, second, alone = trained
    for prefix in ("moving_v", "moving_m"):
        assert all(map(same_bits, arrays(first, prefix), arrays(second, prefix)))
    masks = [arrays(one, "moving_m") for one in (first, alone)]
    assert all(map(np.array_equal, *masks))
    for mask, before in zip(masks[0], arrays(first, "moving_from_m"), strict=True):
        assert (mask != before).any()
    assert_only_trained_entries_moved(first, "moving", arrays(first, "start_v"))
    values = [arrays(one, "moving_v") for one in (first, alone)]
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


KINDS = (
    TORCH
    + """
import torch

class Branches(keras.Model):
    # A layer that only some processes use, and one that none uses.
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (layers.Dense(4) for _ in range(3))
        self.unused = layers.Dense(4)

    def build(self, shape):
        for layer in (self.first, self.second, self.third, self.unused):
            layer.build(shape)

    def call(self, x):
        return self.first(x) + (self.second(x) if RANK == 0 else self.third(x))

def trained(model, sizes=(30, 30), steps=6, freeze=True):
    x, y = digits(RANK, COUNT)
    if freeze:
        kf.freeze(model, x, y)
    for _ in range(steps):
        model.train_on_batch(x[: sizes[RANK]], y[: sizes[RANK]])
    return model

ARGUMENTS["normalized"] = True
keep("norm", trained(compiled(network())))
ARGUMENTS["normalized"] = False
keep("adam", trained(compiled(network(), keras.optimizers.Adam(0.01, clipnorm=0.1), l2=1e-3)))
plain = keras.optimizers.SGD(0.1)
keep("decay", trained(compiled(network(), plain, frozen_weights="decay", l2=1e-2)))
keep("zero", trained(compiled(network(), frozen_weights="zero")))
keep("grid", trained(compiled(network(), grid=0.01)))
keep("ema", trained(compiled(network(), keras.optimizers.SGD(0.1, use_ema=True)), freeze=False))
keep("grasp", trained(compiled(network(), criterion="grasp")))
start = network()
keep("unequal", trained(compiled(network(), keras.optimizers.SGD(1.0)), sizes=(60, 20), steps=1))
keep("start", start)
keras.utils.set_random_seed(1)
branches = Branches(); branches.build((None, 20))
keep("branches", trained(compiled(branches)))
for policy in ("mixed_float16", "mixed_bfloat16", "bfloat16"):
    keras.config.set_dtype_policy(policy)
    optimizer = kf.FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), freeze_rate=0.8)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=128.0)
    model = network()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = trained(model)
    found.update({f"{policy}_{k}": v.astype("float32") for k, v in values(model).items()})
keras.config.set_dtype_policy("float32")

# In a DistributedDataParallel, which averages dense gradients, nothing is averaged again.
model = compiled(network(), keras.optimizers.SGD(1.0))
x, y = digits(RANK, COUNT)
kf.freeze(model, x, y)
wrapped = torch.nn.parallel.DistributedDataParallel(model)
exchanged.clear()
loss = model.loss(torch.tensor(y[:30]), wrapped(torch.tensor(x[:30])))
loss.backward()
variables = model.trainable_variables
with torch.no_grad():
    model.optimizer.apply([v.value.grad for v in variables], variables)
keep("ddp", model)
found["ddp_exchanged"] = np.array(exchanged)
model = trained(compiled(network(), keras.optimizers.SGD(1.0)), steps=1)
keep("own", model)
give(**found)
"""
)


def gradient_of_mean_loss(weights, x, y):
    """The gradients of a network of three Dense layers with relu, in NumPy, float64."""
    (w1, b1, w2, b2, w3, b3) = (array.astype("float64") for array in weights)
    h1 = np.maximum(x @ w1 + b1, 0)
    h2 = np.maximum(h1 @ w2 + b2, 0)
    logits = h2 @ w3 + b3
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    delta = (shares / shares.sum(axis=1, keepdims=True) - np.eye(4)[y]) / len(x)
    d2 = (delta @ w3.T) * (h2 > 0)
    d1 = (d2 @ w2.T) * (h1 > 0)
    return [x.T @ d1, d1.sum(0), h1.T @ d2, d2.sum(0), h2.T @ delta, delta.sum(0)]


@pytest.mark.exhaustive
def test_every_kind_of_training_gives_all_processes_the_same_bits(tmp_path):
    finished = run_together(KINDS, tmp_path)
    assert_all_succeeded(finished)
    first, second = (one.arrays for one in finished)
    assert set(first) == set(second)
    for name in first:
        assert same_bits(first[name], second[name]), name
    assert first["ddp_exchanged"].size == 0
    for one, other in zip(arrays(first, "ddp_v"), arrays(first, "own_v"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    # With shards of unequal sizes, each process counts alike: the mean of their gradients.
    rng = np.random.default_rng(3)
    x = rng.normal(size=(240, 20)).astype("float32")
    y = x[:, :4].argmax(axis=1)
    start = arrays(first, "start_v")
    shards = [gradient_of_mean_loss(start, x[r::2][:n], y[r::2][:n]) for r, n in ((0, 60), (1, 20))]
    for before, after, one, other in zip(start, arrays(first, "unequal_v"), *shards, strict=True):
        moved = before != after
        np.testing.assert_allclose((before - after)[moved], ((one + other) / 2)[moved], atol=1e-5)
        assert moved.any()


STOPPED = (
    TORCH
    + """
model = compiled(network(), keras.optimizers.Adam(0.01))
x, y = digits(RANK, COUNT)
path = os.path.join(ARGUMENTS["checkpoints"], "model.weights.h5")
if ARGUMENTS["resume"]:
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
else:
    kf.freeze(model, x, y)
for step in range(model.optimizer.iterations.value.item(), 8):
    if step == 4 and not ARGUMENTS["resume"] and RANK == 0:
        model.save_weights(path)
    if step == 6 and not ARGUMENTS["resume"] and RANK == 1:
        os._exit(9)
    model.train_on_batch(x[step : step + 40], y[step : step + 40])
give(**values(model), **masks(model))
"""
)


@pytest.mark.exhaustive
def test_training_goes_on_from_a_checkpoint_after_a_process_has_died(trained, tmp_path):
    (tmp_path / "kept").mkdir()
    settings = {"checkpoints": str(tmp_path / "kept"), "group_timeout": 20}
    died = run_together(STOPPED, tmp_path / "died", resume=False, **settings)
    assert died[1].returncode == 9
    assert died[0].returncode == 1  # and not stopped by the test, after a longer time
    assert "RuntimeError" in died[0].errors
    resumed = run_together(STOPPED, tmp_path / "resumed", resume=True, **settings)
    assert_all_succeeded(resumed)
    for one in resumed:
        assert one.arrays
        for name, value in one.arrays.items():
            assert same_bits(value, trained[0][f"whole_{name}"]), name

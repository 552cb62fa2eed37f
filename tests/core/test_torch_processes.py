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


DISAGREE = (
    COMMON
    + """
def refused(make, **settings):
    model = compiled(network(7 if make == "weights" and RANK else 5), **settings)
    if make == "mask":
        kf.freeze(model, mask=lambda v: ~np.eye(*v.shape, k=RANK, dtype=bool))
    before = values(model)
    x, y = digits(RANK, COUNT)
    try:
        model.train_on_batch(x[:30], y[:30])
    except ValueError as error:
        same = all(np.array_equal(v, before[k]) for k, v in values(model).items())
        return f"{same} {error}"
    return "trained"

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        x, y = digits(RANK, COUNT)
        return x[10 * number : 10 * number + 10], y[10 * number : 10 * number + 10]

class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = network()

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0]))
        loss.backward()
        variables = self.trainable_variables
        gradients = [v.value.grad for v in variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        return {"loss": loss}

def not_frozen(model, *data, **arguments):
    try:
        kf.freeze(model, *data, **arguments)
    except ValueError as error:
        return f"{kf.get_mask(model) is None} {error}"
    return "frozen"

x, y = digits(RANK, COUNT)
broken = np.where(RANK == 1, np.nan, x).astype("float32")
few = y * 0 if RANK == 1 else y
size = 0 if RANK == 1 else len(y)
give(
    rate=refused("nothing", optimizer=keras.optimizers.SGD(0.1 * (1 + RANK))),
    nan=not_frozen(compiled(network()), broken, y),
    nothing_to_freeze_by=not_frozen(compiled(network()), x[:size], y[:size]),
    nan_of_step=not_frozen(compiled(OwnStep()), broken, y),
    classes=not_frozen(
        compiled(network(), criterion=kf.criteria.GraSP(samples_per_class=1)), x, few
    ),
    batches=not_frozen(compiled(network(), criterion="fisher"), Batches(), steps=1 + RANK % 2),
    mask=refused("mask"), weights=refused("weights"),
    freeze_rate=refused("settings", freeze_rate=0.5 + 0.1 * RANK),
    seed=refused("settings", seed=RANK), l2=refused("settings", l2=0.1 * RANK),
    criterion=refused("settings", criterion=("snip", "magnitude", "random")[RANK]),
    nothing=refused("nothing"),
)
"""
)


def test_processes_that_disagree_are_refused_all_of_them_with_the_reason(tmp_path):
    finished = run_together(DISAGREE, tmp_path, count=3)
    assert_all_succeeded(finished)
    reasons = dict.fromkeys(["freeze_rate", "seed", "l2", "criterion"], "settings of the")
    reasons |= {"mask": "masks that differ", "weights": "weights that differ"}
    reasons |= {"rate": "inner optimizers that differ"}
    for one in finished:
        assert str(one.arrays["nothing"]) == "trained"
        for name, reason in reasons.items():
            assert str(one.arrays[name]).startswith("True Processes that train a model together")
            assert reason in str(one.arrays[name]), one.arrays[name]
        for name in ("nan", "nothing_to_freeze_by", "nan_of_step", "classes", "batches"):
            assert str(one.arrays[name]).startswith("True"), one.arrays[name]
    for name in ("nan", "nothing_to_freeze_by", "nan_of_step", "classes"):
        for one in (finished[0], finished[2]):
            assert "an error in the processes 1" in str(one.arrays[name]), one.arrays[name]
    assert "number of batches in common. Received: 1, 2, 1" in str(finished[0].arrays["batches"])


KINDS = (
    COMMON
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

found = {}
def keep(name, model):
    found.update({f"{name}_{k}": v for k, v in values(model).items()})

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
    COMMON
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
    if step == 6 and ARGUMENTS["dies"] and RANK == 1:
        os._exit(9)
    model.train_on_batch(x[step : step + 40], y[step : step + 40])
give(**values(model), **masks(model))
"""
)


def test_training_goes_on_from_a_checkpoint_after_a_process_has_died(tmp_path):
    (tmp_path / "kept").mkdir()
    settings = {"checkpoints": str(tmp_path / "kept"), "group_timeout": 20}
    whole = run_together(STOPPED, tmp_path / "whole", resume=False, dies=False, **settings)
    died = run_together(STOPPED, tmp_path / "died", resume=False, dies=True, **settings)
    assert died[1].returncode == 9
    assert died[0].returncode == 1  # and not stopped by the test, after a longer time
    assert "RuntimeError" in died[0].errors
    resumed = run_together(STOPPED, tmp_path / "resumed", resume=True, dies=False, **settings)
    assert_all_succeeded([*whole, *resumed])
    for name, expected in whole[0].arrays.items():
        for one in resumed:
            assert same_bits(one.arrays[name], expected), name

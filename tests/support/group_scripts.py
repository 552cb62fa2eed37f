"""What tests of processes that train one model have in common: the scripts' data and networks."""

from helpers import same_bits

TORCH = """
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
    mask = kf.get_mask(model)
    return {} if mask is None else {f"m{e.position}": e.trained for e in mask.entries}

found = {}
def keep(name, model):
    found.update({f"{name}_{k}": v.copy() for k, v in {**values(model), **masks(model)}.items()})
"""

JAX = """
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

def fit(model, epochs=1, size=60, number=120, callbacks=()):
    number, size = number // COUNT, size // COUNT
    model.fit(
        x[:number], y[:number], batch_size=size, epochs=epochs, shuffle=False, verbose=0,
        callbacks=list(callbacks),
    )
    return model

def keep(name, model):
    for number, variable in enumerate(model.variables):
        found[f"{name}_v{number}"] = np.array(variable).astype(variable.dtype)
    mask = kf.get_mask(model)
    if mask is not None:
        found.update({f"{name}_m{entry.position}": entry.trained for entry in mask.entries})
"""


def arrays(found, prefix):
    """The arrays whose names are the prefix and a number, in the order of the numbers."""
    names = [name for name in found if name.removeprefix(prefix).isdigit()]
    return [found[name] for name in sorted(names, key=lambda name: int(name.removeprefix(prefix)))]


def assert_only_trained_entries_moved(found, name, start):
    """Whether the kernels of `keep(name, model)` have their start where they are frozen alone."""
    for position, mask in enumerate(arrays(found, f"{name}_m")):
        weights, before = found[f"{name}_v{2 * position}"], start[2 * position]
        assert same_bits(weights[~mask], before[~mask])
        assert not same_bits(weights[mask], before[mask])

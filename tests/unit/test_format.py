"""docs/file_format.md suffices: a reader written from it alone gives every variable's bits."""

import hashlib
import pathlib
import zlib

import format_reader
import keras
import numpy as np
import pytest
from helpers import compiled, fit, same_bits, sgd, value_of
from numpy.testing import assert_array_equal

import keras_freeze as kf
from keras_freeze.masks.mask import MaskEntry

GOLDEN = sorted((pathlib.Path(__file__).parents[1] / "golden").glob("*.freeze"))
DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
]


@keras.saving.register_keras_serializable("test_format")
class Affine(keras.layers.Layer):
    """Has a scalar and a one-axis variable."""

    def build(self, input_shape):
        self.gain = self.add_weight(name="gain", shape=(), initializer="zeros")
        self.offset = self.add_weight(name="offset", shape=input_shape[-1:], initializer="zeros")

    def call(self, x):
        return x * (1 + self.gain) + self.offset


@keras.saving.register_keras_serializable("test_format")
class Scale(keras.layers.Layer):
    """Has a weight of any shape."""

    def __init__(self, shape, **arguments):
        super().__init__(**arguments)
        self.shape = tuple(shape)
        self.kernel_initializer = keras.initializers.GlorotUniform(seed=0)

    def build(self, input_shape):
        self.kernel = self.add_weight(self.shape, self.kernel_initializer, name="kernel")

    def call(self, x):
        return x * self.kernel

    def get_config(self):
        return {**super().get_config(), "shape": self.shape}


@keras.saving.register_keras_serializable("test_format")
class Collection(keras.layers.Layer):
    """Has a variable of every dtype, none of them trained."""

    def build(self, input_shape):
        def initializer(shape, dtype):
            return keras.ops.cast(keras.random.uniform(shape, -100, 100, "float32", seed=0), dtype)

        for dtype in DTYPES:
            self.add_weight((50,), initializer, dtype, trainable=False, name=dtype)

    def call(self, x):
        return x


def images():
    rng = np.random.default_rng(0)
    return rng.normal(size=(32, 6, 6, 3)).astype("float32"), np.arange(32) % 3


def network(channels=16, dtype="float32"):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            keras.layers.Conv2D(channels, 3, activation="relu", name="conv1", dtype=dtype),
            keras.layers.BatchNormalization(name="norm", dtype=dtype),
            keras.layers.Conv2D(channels, 3, activation="relu", name="conv2", dtype=dtype),
            keras.layers.Dropout(0.2),
            keras.layers.Flatten(),
            Affine(name="affine", dtype=dtype),
            keras.layers.Dense(3, name="head", dtype=dtype),
        ]
    )


def trained(model, mask=None, distribution="xavier_normal", **arguments):
    """The network after a portable start, a mask and a few steps."""
    arguments = {"freeze_rate": 0.9, "l2": 1e-2, **arguments}
    compiled(model, kf.FreezeOptimizer(sgd(), **arguments))
    kf.reinitialize(model, distribution, seed=2**32 - 1)
    kf.freeze(model, *images(), mask=mask)
    fit(model, *images(), batch_size=8)
    return model


def labelled_values(variables):
    return [(v.path, value_of(v)) for v in variables]


def save_and_read(model, path, base_values=None, **arguments):
    """Saves the model; the reader must give every variable, the same bit for bit."""
    kf.save(model, path, **arguments)
    contents = format_reader.read(path, base_values)
    assert_same_values(contents.variables, labelled_values(model.variables))
    return contents


def assert_same_values(found, expected):
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, values), (_, others) in zip(found, expected, strict=True):
        assert values.shape == others.shape, path
        assert values.dtype == others.dtype, path
        assert same_bits(values, others), path


def entries(contents):
    """What the header says of each variable, by the path without its first component."""
    return {entry["path"].partition("/")[2]: entry for entry in contents.header["variables"]}


def sources(contents):
    return {entry["source"][0] for entry in contents.header["variables"] if "source" in entry}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("distribution", "frozen_weights"),
    [
        ("xavier_normal", "keep"),
        ("kaiming_uniform", "keep"),
        ("pm_sigma", "keep"),
        ("standard_normal", "keep"),
        ("xavier_normal", "zero"),
        ("xavier_normal", "decay"),
    ],
)
def test_variables_after_training_are_read_bit_for_bit(tmp_path, distribution, frozen_weights):
    model = trained(network(), distribution=distribution, frozen_weights=frozen_weights)
    contents = save_and_read(model, tmp_path / "a.freeze")
    source = entries(contents)["conv2/kernel"]["source"]
    expected = ["constant", 0] if frozen_weights == "zero" else ["seed", distribution, 2**32 - 1, 1]
    assert source == expected
    assert ("decay_scale" in contents.header) == (frozen_weights == "decay")
    assert "seed_generator_state" in entries(contents)


@pytest.mark.cases(1)
@pytest.mark.parametrize("frozen_weights", ["keep", "decay"])
@pytest.mark.parametrize("name", ["ones", "constant_sigma"])
def test_frozen_weights_that_are_all_equal_are_read_as_a_constant(tmp_path, name, frozen_weights):
    model = trained(network(), distribution=name, frozen_weights=frozen_weights)
    contents = save_and_read(model, tmp_path / "a.freeze")
    kind, pattern = entries(contents)["conv2/kernel"]["source"]
    assert kind == "constant"
    value = np.array(pattern, "uint32").view("float32")
    start = 1.0 if name == "ones" else np.float32(np.sqrt(2 / (9 * 16 + 9 * 16)))
    assert value == start if frozen_weights == "keep" else 0.9 * start < value < start
    assert "generator" not in contents.header


@pytest.mark.parametrize("name", ["standard_normal_2", "ones"])
def test_an_unknown_distribution_is_refused(name):
    with pytest.raises(ValueError, match=f"unknown distribution {name}"):
        format_reader.drawn([2, 3], name, 0, 0)


def test_masks_are_read_in_every_mode_and_both_ways_of_reading_flags(tmp_path):
    rng = np.random.default_rng(0)
    shape = (3, 3, 96, 96)
    rates = np.where(rng.random(96) < 0.1, 0.05, 0.0005)  # a few columns are trained more
    model = network(channels=96)
    scalar, vector = model.get_layer("affine").variables
    masks = {
        "conv1/kernel": rng.random((3, 3, 3, 96)) < 0.4,
        "conv2/kernel": rng.random(shape) < rates,
        "norm/gamma": np.ones(96, bool),
        "head/kernel": rng.random((384, 3)) < 0.004,
        vector.path: np.arange(384) < 100,
        scalar.path: np.array(False),
    }
    contents = save_and_read(trained(model, masks), tmp_path / "a.freeze")
    by_path = {contents.variables[i][0]: mask for i, mask in contents.masks.items()}
    for path, mask in masks.items():
        found = [by_path[p] for p in by_path if p.endswith(path)]
        assert len(found) == 1, path
        assert_array_equal(found[0], mask)
    ways = {"flags one by one", "flags in groups", "tiles"}  # the vector has one tile trained
    assert {f"mode {mode}" for mode in range(4)} | ways == set(contents.reads), contents.reads


@pytest.mark.cases(1)
@pytest.mark.parametrize("freeze_rate", [0.99, 0.999])
def test_computed_masks_of_a_wide_convolution_are_read(tmp_path, freeze_rate):
    model = trained(network(channels=96), freeze_rate=freeze_rate)
    contents = save_and_read(model, tmp_path / "a.freeze")
    assert contents.reads["flags in groups"]
    mask = kf.get_mask(model)
    assert contents.header.get("num_rescued", 0) == mask.num_rescued
    for i, found in contents.masks.items():
        assert_array_equal(found, mask[contents.variables[i][0]])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "chosen",
    [
        lambda weight: np.ones(weight.shape, bool),
        lambda weight: np.zeros(weight.shape, bool),
        lambda weight: np.broadcast_to(np.tri(*weight.shape[-2:], dtype=bool), weight.shape),
    ],
    ids=["all True", "all False", "triangle"],
)
def test_masks_of_ones_own_are_read(tmp_path, chosen):
    # A function is asked for variables of unknown names, too.
    model = trained(network(), lambda v: chosen(v) if v.path.endswith("/kernel") else None)
    contents = save_and_read(model, tmp_path / "a.freeze")
    kernels = [i for i, (path, _) in enumerate(contents.variables) if path.endswith("/kernel")]
    assert list(contents.masks) == kernels
    for i, mask in contents.masks.items():
        assert_array_equal(mask, chosen(model.variables[i]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_rounded_by_request_are_read(tmp_path, dtype):
    model = trained(network())
    kf.save(model, tmp_path / "a.freeze", values=dtype)
    contents = format_reader.read(tmp_path / "a.freeze")
    expected, num_rounded = [], 0
    for i, variable in enumerate(model.variables):
        values = value_of(variable)
        if variable.trainable:
            stored = contents.masks.get(i, np.ones(values.shape, bool))
            rounded = np.where(stored, values.astype(dtype).astype("float32"), values)
            num_rounded += (rounded != values).sum()
            values = rounded
        expected.append((variable.path, values))
    assert_same_values(contents.variables, expected)
    assert num_rounded > 100
    assert entries(contents)["conv2/kernel"]["stored_dtype"] == dtype


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "mixed_bfloat16"])
def test_values_on_a_grid_are_read(tmp_path, dtype):
    model = trained(network(dtype=dtype))
    kf.quantize(model, step=0.01)
    contents = save_and_read(model, tmp_path / "a.freeze")
    found = entries(contents)
    assert {found[f"{name}/kernel"]["grid"] for name in ("conv1", "conv2", "head")} == {0.01}
    assert "source" not in found["conv2/bias"]
    assert found["norm/gamma"]["origin"][0] == "constant"
    assert "grid" not in found["norm/moving_mean"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("step", [1e-6, 0.3])
@pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])
def test_fine_and_coarse_grids_are_read(tmp_path, frozen_weights, step):
    model = trained(network(), frozen_weights=frozen_weights)
    kf.quantize(model, step=step)
    contents = save_and_read(model, tmp_path / "a.freeze")
    is_pruned = frozen_weights == "zero"
    assert ("origin" in entries(contents)["conv2/kernel"]) == is_pruned


@pytest.mark.cases(1)
@pytest.mark.parametrize("rate", [0.5, 0.99])
def test_masks_that_are_drawn_are_read(tmp_path, rate):
    model = compiled(network(), kf.FreezeOptimizer(sgd(), rate, seed=9))
    kf.reinitialize(model, seed=2)
    kf.freeze(model, *images(), drawn=True)
    fit(model, *images(), batch_size=8)
    contents = save_and_read(model, tmp_path / "a.freeze")
    assert contents.reads["drawn"] == 3
    assert entries(contents)["conv2/kernel"]["drawn"] == [9, 2**32 + 4]
    for i, mask in contents.masks.items():
        assert_array_equal(mask, kf.get_mask(model)[model.variables[i]])


def test_a_delta_on_a_grid_is_read(tmp_path):
    base, model = trained(network()), network()
    model.set_weights(base.get_weights())
    compiled(model, kf.FreezeOptimizer(sgd(), 0.9))
    kf.freeze(model, *images())
    fit(model, *images(), batch_size=8)
    kf.quantize(model, step=0.01, base=base)
    expected = labelled_values(base.variables)
    contents = save_and_read(model, tmp_path / "a.freeze", expected, base=base)
    assert entries(contents)["conv2/kernel"]["grid"] == 0.01
    assert entries(contents)["conv2/bias"]["origin"][0] == "base"


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_models_of_other_dtypes_are_read(tmp_path, dtype):
    contents = save_and_read(trained(network(dtype=dtype)), tmp_path / "a.freeze")
    assert entries(contents)["conv2/kernel"]["dtype"] == dtype


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
def test_decayed_weights_of_other_dtypes_are_read(tmp_path, dtype):
    model = trained(network(dtype=dtype), frozen_weights="decay")
    assert "decay_scale" in save_and_read(model, tmp_path / "a.freeze").header


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="PyTorch has not all of them")
def test_variables_of_every_dtype_are_read(tmp_path):
    model = keras.Sequential([keras.Input((3,)), Collection()])
    contents = save_and_read(model, tmp_path / "a.freeze")
    assert [values.dtype.name for _, values in contents.variables] == DTYPES


def test_kernels_of_attention_and_layers_that_are_not_trained_are_read(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((5, 8))
    x = keras.layers.Conv1D(12, 2, name="still")(x)
    x = keras.layers.MultiHeadAttention(2, 6)(x, x)
    model = keras.Model(inputs, keras.layers.LSTM(3)(x))
    kf.reinitialize(model, "xavier_normal", seed=1)
    model.get_layer("still").trainable = False
    compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate=0.8))
    rng = np.random.default_rng(0)
    data = rng.normal(size=(12, 5, 8)).astype("float32"), np.arange(12) % 3
    kf.freeze(model, *data)
    fit(model, *data)
    contents = save_and_read(model, tmp_path / "a.freeze")
    assert len(contents.masks) == 6
    assert {len(values.shape) for _, values in contents.variables} == {1, 2, 3}


@pytest.mark.cases(1)
@pytest.mark.parametrize("distribution", ["xavier_normal", "kaiming_uniform"])
def test_weights_of_one_axis_and_of_none_are_drawn_from_the_seed(tmp_path, distribution):
    layers = [Scale((6, 6, 3)), Scale((3,)), Scale(()), keras.layers.GlobalMaxPooling2D()]
    model = keras.Sequential([keras.Input((6, 6, 3)), *layers])
    trained(model, lambda weight: np.zeros(weight.shape, bool), distribution)
    contents = save_and_read(model, tmp_path / "a.freeze")
    assert sources(contents) == {"seed"}
    assert {values.ndim for _, values in contents.variables} == {3, 1, 0}


@pytest.mark.cases(1)
@pytest.mark.parametrize("frozen_weights", ["keep", "decay"])
def test_a_delta_is_read_on_its_base_and_on_no_other(tmp_path, frozen_weights):
    base = network()
    compiled(base, sgd())
    fit(base, *images(), epochs=2)
    base_values = labelled_values(base.variables)
    model = network()
    model.set_weights(base.get_weights())
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.9, frozen_weights=frozen_weights, l2=1e-2)
    compiled(model, optimizer)
    kf.freeze(model, *images())
    fit(model, *images())
    path = tmp_path / "delta.freeze"
    contents = save_and_read(model, path, base_values, base=base)
    assert "base" in sources(contents)
    assert sources(contents) <= {"base", "constant"}  # Dropout's state is two equal numbers, maybe
    assert ("decay_scale" in contents.header) == (frozen_weights == "decay")

    with pytest.raises(ValueError, match="another base"):
        format_reader.read(path, labelled_values(model.variables))
    reseeded = [(p, v + p.endswith("seed_generator_state")) for p, v in base_values]
    assert_same_values(format_reader.read(path, reseeded).variables, contents.variables)


def test_a_base_may_be_a_file_too(tmp_path):
    model = trained(network(), distribution="pm_sigma")
    base_contents = save_and_read(model, tmp_path / "base.freeze")
    kf.freeze(model, *images(), overwrite=True)
    fit(model, *images())
    path = tmp_path / "delta.freeze"
    save_and_read(model, path, base_contents.variables, base=tmp_path / "base.freeze")


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["compact", "full shape"])
def test_the_state_of_the_optimizer_is_read(tmp_path, way):
    model = network()
    kind = keras.optimizers.Adam if way == "compact" else keras.optimizers.Lamb
    compiled(model, kf.FreezeOptimizer(kind(0.01), freeze_rate=0.9))
    kf.reinitialize(model, seed=1)
    if way == "compact":
        kf.freeze(model, *images())
    fit(model, *images(), batch_size=8)
    contents = save_and_read(model, tmp_path / "a.freeze", include_optimizer=True)
    state = model.optimizer.variables
    assert_same_values(
        contents.optimizer,
        labelled_values(v for v in state if v.dtype == "float32" or v.path.endswith("iteration")),
    )
    assert contents.header["optimizer"]["compact"] == (way == "compact")


def test_frozen_weights_in_the_file_are_read(tmp_path):
    model = network()
    for variable in model.trainable_variables:
        variable.assign(variable + 0.01)  # no initializer gives these
    compiled(model)
    kf.freeze(model, *images())
    fit(model, *images())
    contents = save_and_read(model, tmp_path / "a.freeze", include_frozen=True)
    assert sources(contents) == set()
    assert len(contents.masks) == 3


def test_values_of_a_keras_initializer_are_refused(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)])
    compiled(model)
    kf.freeze(model, np.ones((2, 6)), np.array([0, 1]))
    kf.save(model, tmp_path / "a.freeze")
    with pytest.raises(NotImplementedError, match="initializer"):
        format_reader.read(tmp_path / "a.freeze")


@pytest.mark.parametrize("version", list(format_reader.DICTIONARIES))
def test_the_page_names_the_dictionary_of_the_header(version):
    page = (pathlib.Path(__file__).parents[2] / "docs/file_format.md").read_text(encoding="utf-8")
    path = format_reader.DICTIONARIES[version]
    dictionary = path.read_bytes()
    cells = (version, f"`{path.name}`", f"{len(dictionary):,}", f"`{zlib.adler32(dictionary):08x}`")
    digest = hashlib.sha256(dictionary).hexdigest()
    assert f"| {' | '.join(map(str, cells))} | `{digest}` |" in page


@pytest.mark.parametrize("key", [(0, 0), (7, 3), (2**32 - 1, 2**40), (2**64 - 1, 2**64 - 1)])
def test_philox_is_that_of_numpy(key):
    expected = np.random.Philox(key=np.array(key, np.uint64)).random_raw(1001)
    assert_array_equal(np.array(format_reader.philox4x64(*key, 1001), np.uint64), expected)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_masks_without_a_model_are_read(tmp_path, rate):
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=shape) ** 2 for shape in ((30, 40), (5, 5, 3, 8), (64,), ())]
    mask = kf.FreezeMask.from_scores(scores, rate, positions=[0, 2, 3, 7])
    entries = [*mask.entries, MaskEntry(9, "größe/bias", np.array([True, False]), is_weight=False)]
    path = tmp_path / "mask.freeze"
    kf.FreezeMask(entries, num_rescued=2).save(path)
    assert format_reader.read_layout(path.read_bytes())[0]["num_rescued"] == 2
    found = format_reader.read_mask_only(path)
    assert len(found) == len(entries)
    for (position, label, trained, is_weight), entry in zip(found, entries, strict=True):
        assert (position, label, is_weight) == (entry.position, entry.path, entry.is_weight)
        assert_array_equal(trained, entry.trained)
    with pytest.raises(ValueError, match="no model"):
        format_reader.read(path)


def test_a_golden_mask_is_read():
    folder = pathlib.Path(__file__).parents[1] / "golden"
    found = format_reader.read_mask_only(folder / "version1_mask.freeze")
    mask = kf.FreezeMask.load(folder / "version1_settings.freeze")
    for (position, label, trained, is_weight), entry in zip(found, mask.entries, strict=True):
        assert (position, label, is_weight) == (entry.position, entry.path, entry.is_weight)
        assert_array_equal(trained, entry.trained)


def test_golden_files_are_read():
    if not GOLDEN:
        pytest.skip("tests/golden holds no files yet")
    headers = {path: format_reader.read_layout(path.read_bytes())[0] for path in GOLDEN}
    models = [path for path in GOLDEN if "content" not in headers[path]]
    alone = [format_reader.read(path) for path in models if "base" not in headers[path]]
    bases = {format_reader.fingerprint(c.variables): c.variables for c in alone}
    for path in models:
        contents = format_reader.read(path, bases.get(headers[path].get("base")))
        assert contents.variables, path

"""Files that take more memory than they announce, by layers, lists or depth: refused in time."""

import keras
import numpy as np
import pytest
from file_layout import sealed
from hostile_cases import (
    changed,
    content_of,
    described,
    layer_named,
    node_of,
    sequential,
    spy_on_lookups,
    write,
    write_small,
)
from keras.src.backend.common.variables import Variable

import keras_freeze as kf
from keras_freeze.storage.checks import memory as budget

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return content_of(tmp_path_factory.mktemp("whole") / "model.freeze")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


@pytest.fixture
def resolved(monkeypatch):
    """What Keras has looked up for a configuration, in a list."""
    return spy_on_lookups(monkeypatch)


@pytest.fixture
def largest(monkeypatch):
    """The sizes of the variables that get a value, in a list."""
    sizes = []
    for kind in {Variable, keras.Variable}:
        if "_initialize_with_initializer" in vars(kind):
            original = vars(kind)["_initialize_with_initializer"]

            def spy(variable, initializer, original=original):
                sizes.append(int(np.prod(variable._shape)))
                return original(variable, initializer)

            monkeypatch.setattr(kind, "_initialize_with_initializer", spy)
    return sizes


LARGE = {
    "Dense": sequential(described("Dense", units=20_000), shape=(20_000,)),
    "by its build": described(
        "Sequential",
        name="model",
        layers=[
            {
                **described("Dense", units=20_000),
                "build_config": {"input_shape": [None, 20_000]},
            }
        ],
    ),
    "Embedding": sequential(described("Embedding", input_dim=10**8, output_dim=10)),
    "LSTM": sequential(described("LSTM", units=10_000), shape=(3, 2)),
    "Bidirectional": sequential(
        described("Bidirectional", layer=described("GRU", units=9_000)), shape=(3, 2)
    ),
    "Conv2D": sequential(described("Conv2D", filters=9_000, kernel_size=99), shape=(99, 99, 9)),
    "BatchNormalization": sequential(described("BatchNormalization"), shape=(10**9,)),
    "MultiHeadAttention": sequential(
        described(
            "TimeDistributed", layer=described("Dense", units=10**6, kernel_initializer="ones")
        ),
        shape=(3, 10**4),
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_layers_larger_than_announced_get_no_memory(kind, path, largest):
    write_small(path, LARGE[kind], [("model/dense/kernel", (2, 2))])
    assert path.stat().st_size < 1_000
    with pytest.raises(kf.FreezeFileError, match=r"too large for the memory|takes more than"):
        kf.load(path, max_bytes=1 << 34)
    assert max(largest, default=0) < 1 << 20


def test_variables_that_are_announced_are_within_a_budget(path, largest):
    announced = [("model/dense/kernel", (4, 10**6)), ("model/dense/bias", (10**6,))]
    write_small(path, sequential(described("Dense", units=10**6)), announced)
    with pytest.raises(kf.FreezeFileError, match=r"25,000,000 bytes.*1,000,000.*max_bytes"):
        kf.load(path, max_bytes=1_000_000)
    assert not largest
    assert len(kf.load(path, max_bytes=1 << 30).variables) == 2


def test_without_a_budget_a_quarter_of_the_free_memory_is_meant(path, monkeypatch):
    announced = [("model/dense/kernel", (4, 1000)), ("model/dense/bias", (1000,))]
    write_small(path, sequential(described("Dense", units=1000)), announced)
    monkeypatch.setattr(budget, "free_memory", lambda: 4 * 25_000 - 4)
    for read in (kf.load, kf.storage.inspect, kf.FreezeMask.load):
        with pytest.raises(kf.FreezeFileError, match="25,000 bytes"):
            read(path)
    monkeypatch.setattr(budget, "free_memory", lambda: 4 * 10**8)
    kf.load(path)


def test_free_memory_is_found():
    assert 1 << 20 < budget.free_memory() < 1 << 50


@pytest.mark.parametrize("lines", ["MemTotal: 5 kB", "", "MemAvailable: x kB"])
def test_free_memory_is_found_elsewhere_too(lines, monkeypatch, tmp_path):
    memory = tmp_path / "meminfo"
    memory.write_text(lines)
    monkeypatch.setattr(budget, "_MEMORY", memory)
    monkeypatch.setattr(budget, "_CONTROL_GROUP", tmp_path)
    assert budget.free_memory() == budget._UNKNOWN_MEMORY
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    assert budget.free_memory() == 750
    memory.unlink()
    assert budget.free_memory() == 750


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_budget_is_a_number_of_bytes(value, error, path):
    with pytest.raises(error, match=rf"max_bytes={value}"):
        kf.load(path, max_bytes=value)


def assert_refused_unseen(path, match, resolved):
    """It is refused before Keras has made anything of it."""
    with pytest.raises(kf.FreezeFileError, match=match):
        kf.load(path)
    assert not resolved


def test_very_many_layers_are_refused(path, resolved):
    many = [described("Identity", name=f"layer_{i}") for i in range(20_000)]
    write_small(path, sequential(*many))
    assert path.stat().st_size < 200_000
    assert_refused_unseen(path, "more than 5,000 layers", resolved)


METRICS_WITH_LISTS = {
    "AUC": {"num_thresholds": 2_000_000},
    "PrecisionAtRecall": {"recall": 0.5, "num_thresholds": 2_000_000},
    "MeanIoU": {"num_classes": 2_000_000},
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("kind", METRICS_WITH_LISTS)
def test_metrics_with_very_long_lists_are_refused(kind, count, content, path, resolved):
    config = {
        key: max(1, value // count) if key.startswith("num_") else value
        for key, value in METRICS_WITH_LISTS[kind].items()
    }
    metric = {
        "module": "keras.metrics",
        "class_name": kind,
        "config": config,
        "registered_name": None,
    }
    place = ("model", "compile_config", "metrics")
    write(path, content, changed(content.header, place, [metric] * count))
    assert_refused_unseen(path, "thresholds and classes", resolved)


def test_very_many_calls_are_refused(content, path, resolved):
    (node,) = node_of(content.header, "dropout")
    place = (*layer_named(content.header, "dropout"), "inbound_nodes")
    write(path, content, changed(content.header, place, [node] * 30_000))
    assert_refused_unseen(path, "more than 20,000 calls", resolved)


def test_text_of_which_python_makes_far_more_is_refused(path, resolved):
    path.write_bytes(sealed(b'{"model":[' + b"[]," * 5_000_000 + b"0]}"))
    assert path.stat().st_size < 20_000
    assert_refused_unseen(path, "lists and objects", resolved)


@pytest.mark.parametrize("depth", [300, 5_000])
@pytest.mark.parametrize("opening", [b'{"a":', b"["])
def test_deep_configurations_are_refused(opening, depth, path, resolved):
    closing = {b"{": b"}", b"[": b"]"}[opening[:1]]
    inner = opening * depth + b"0" + closing * depth
    config = b'{"name":"x","layers":' + inner + b"}"
    rest = b'"module":"keras","class_name":"Sequential","registered_name":null,"config":' + config
    path.write_bytes(sealed(b'{"versions":{},"variables":[],"model":{' + rest + b"}}"))
    assert_refused_unseen(path, "deep|recursion", resolved)


def test_deeply_nested_models_are_refused(path, resolved):
    model = sequential()
    for _ in range(70):
        model = described("Sequential", name="model", layers=[model])
    write_small(path, model)
    assert_refused_unseen(path, "deep", resolved)

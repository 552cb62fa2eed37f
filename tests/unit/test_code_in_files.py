"""No code from a file: pickles, lambdas and foreign functions are refused and not run."""

import copy
import pickle
from pathlib import Path

import keras
import pytest
from file_layout import sealed
from helpers import sgd
from keras import layers
from keras.src.utils import python_utils
from whole_files import assert_refused, changed, rebuilt, whole_files

import keras_freeze as kf

# Keras reads every variable with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.cases(2),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return whole_files(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_read(files, path, tmp_path):
    trace = tmp_path / "trace"
    pickled = pickle.dumps(Touch(trace))
    pickle.loads(pickled)
    assert trace.exists()
    trace.unlink()
    for data in (pickled, sealed(pickled), rebuilt(files["seeded"], mask=pickled)):
        path.write_bytes(data)
        assert_refused(path)
    path.write_bytes(files["delta"].data)
    base = tmp_path / "base.keras"
    base.write_bytes(pickled)
    with pytest.raises(ValueError, match=r"base\.keras"):
        kf.load(path, base=base)
    assert not trace.exists()


def lambda_that_touches(path):
    code, defaults, closure = python_utils.func_dump(
        eval(f"lambda x: (__import__('pathlib').Path({str(path)!r}).touch(), x)[1]")
    )
    config = {"code": code, "defaults": defaults, "closure": closure}
    return {"class_name": "__lambda__", "config": config}


def touching(path):
    """Configurations that make a file at a path, were they trusted, by name."""
    code = lambda_that_touches(path)
    call = {"module": "subprocess", "class_name": "run", "config": {"args": ["touch", str(path)]}}
    function = {"module": "os", "class_name": "function", "config": "mkdir"}
    in_layer = {"module": "keras.layers", "class_name": "Lambda", "registered_name": None}
    return {
        "lambda": code,
        "layer with a lambda": {**in_layer, "config": {"name": "a", "function": code}},
        "class": {**call, "registered_name": None},
        "function": {**function, "registered_name": "mkdir"},
        "layer with a function": {
            **in_layer,
            "config": {"name": "a", "function": function, "arguments": {"mode": 0}},
        },
    }


PLACES_FOR_CODE = {
    "model": ("model",),
    "layer": ("model", "config", "layers", 2),
    "activation": ("model", "config", "layers", 1, "config", "activation"),
    "loss": ("model", "compile_config", "loss"),
    "optimizer": ("model", "compile_config", "optimizer"),
    "initializer": ("variables", 0, "source", 1),
}


@pytest.mark.parametrize("kind", touching(""))
@pytest.mark.parametrize("place", PLACES_FOR_CODE)
def test_code_in_a_file_is_refused_and_not_run(place, kind, files, path, tmp_path):
    trace = tmp_path / "trace"
    header = copy.deepcopy(files["seeded"].content.header)
    if place == "initializer":
        header["variables"][0]["source"] = ["initializer", None]
    path.write_bytes(
        rebuilt(
            files["seeded"],
            changed(header, PLACES_FOR_CODE[place], touching(trace)[kind]),
        )
    )
    with pytest.raises(ValueError, match=r"model\.freeze|Keras "):
        kf.load(path)
    kf.storage.inspect(path)
    assert not trace.exists()


def with_lambda(place):
    """A model with a lambda function at a place."""
    function = {place: lambda *arguments: keras.ops.mean(arguments[-1])}
    layer = layers.Dense(3, **(function if place == "activation" else {}))
    between = [layers.Lambda(lambda x: 2 * x)] if place == "layer" else []
    model = keras.Sequential([keras.Input((6,)), *between, layer])
    rate = (lambda: 0.1) if place == "learning_rate" else 0.1
    criterion = (lambda w, g: w * g) if place == "criterion" else "snip"
    optimizer = kf.FreezeOptimizer(sgd(rate), criterion=criterion)
    model.compile(optimizer, function.get("loss", "mse"), metrics=[function.get("metrics", "mse")])
    return model


@pytest.mark.filterwarnings("ignore:The object being serialized includes a")
@pytest.mark.parametrize(
    "place", ["layer", "activation", "loss", "metrics", "learning_rate", "criterion"]
)
def test_saving_a_lambda_is_an_error_that_says_what_to_do(place, path):
    with pytest.raises(ValueError, match="register_keras_serializable"):
        kf.save(with_lambda(place), path)
    assert not list(path.parent.iterdir())

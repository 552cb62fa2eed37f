"""Files that name what they may not, or hold what they should not: refused before Keras acts."""

import copy
import inspect
import pkgutil

import keras
import pytest
from helpers import blobs, compiled, same_bits, sgd, value_of, values_of
from hostile_cases import (
    changed,
    content_of,
    described,
    layer_named,
    network,
    node_of,
    sequential,
    spy_on_lookups,
    write,
    write_small,
)
from keras import layers

import keras_freeze as kf
from keras_freeze.storage import loading, restoring
from keras_freeze.storage.container import read_container, write_container

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


def addition(header):
    listed = header["model"]["config"]["layers"]
    (index,) = (i for i, layer in enumerate(listed) if layer["class_name"] == "Add")
    return ("model", "config", "layers", index)


OPTIMIZER = ("model", "compile_config", "optimizer")
INNER = (*OPTIMIZER, "config", "inner_optimizer")

# Where a configuration has what: places by name, and the kinds of object that each one takes.
PLACES = {
    "activation": lambda h: (*layer_named(h, "body"), "config", "activation"),
    "initializer": lambda h: (*layer_named(h, "body"), "config", "kernel_initializer"),
    "regularizer": lambda h: (*layer_named(h, "body"), "config", "kernel_regularizer"),
    "constraint": lambda h: (*layer_named(h, "body"), "config", "kernel_constraint"),
    "constant": lambda h: (
        *(*layer_named(h, "body"), "config", "bias_initializer", "config", "value"),
    ),
    "dtype": lambda h: (*layer_named(h, "body"), "config", "dtype"),
    "units": lambda h: (*layer_named(h, "body"), "config", "units"),
    "build": lambda h: (*layer_named(h, "body"), "build_config", "input_shape"),
    "seed": lambda h: (*layer_named(h, "dropout"), "config", "seed"),
    "argument": lambda h: (*addition(h), "inbound_nodes", 0, "args", 1),
    "keyword": lambda h: (*addition(h), "inbound_nodes", 0, "kwargs", "y"),
    "loss": lambda h: ("model", "compile_config", "loss"),
    "metric": lambda h: ("model", "compile_config", "metrics", 0),
    "optimizer": lambda h: OPTIMIZER,
    "inner optimizer": lambda h: INNER,
    "rate": lambda h: (*INNER, "config", "learning_rate"),
    "momentum": lambda h: (*INNER, "config", "momentum"),
    "source": lambda h: ("variables", 0, "source", 1),
}

LAYER, OPTIMIZERS = keras.Layer, keras.optimizers.Optimizer
WITH_CODE = ("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper")
CLASSES = {
    "layer": LAYER,
    "activation": LAYER,
    "initializer": keras.initializers.Initializer,
    "source": keras.initializers.Initializer,
    "regularizer": keras.regularizers.Regularizer,
    "constraint": keras.constraints.Constraint,
    "dtype": keras.DTypePolicy,
    "seed": keras.random.SeedGenerator,
    "loss": keras.losses.Loss,
    "metric": (keras.metrics.Metric, keras.losses.Loss),
    "optimizer": OPTIMIZERS,
    "inner optimizer": OPTIMIZERS,
    "rate": keras.optimizers.schedules.LearningRateSchedule,
}
FUNCTIONS = {
    "activation": (keras.activations,),
    "loss": (keras.losses,),
    "metric": (keras.metrics, keras.losses),
}


def may_be(place, gadget):
    """Whether Keras itself expects an object like this one at a place."""
    if inspect.isclass(gadget):
        return issubclass(gadget, CLASSES.get(place, ())) and gadget.__name__ not in WITH_CODE
    return gadget.__name__ not in ("get", "serialize", "deserialize") and any(
        vars(space).get(gadget.__name__) is gadget for space in FUNCTIONS.get(place, ())
    )


def is_name_of_another(form, place):
    """Whether Keras finds a function that belongs there, which has the name of this one."""
    name = form["config"]
    return form["module"] == "builtins" and any(
        may_be(place, vars(space)[name])
        for space in FUNCTIONS.get(place, ())
        if inspect.isfunction(vars(space).get(name))
    )


def exported():
    """Every function and class that Keras exports, by the names under which it does."""
    found = {}
    spaces = [keras]
    for space in spaces:
        for info in pkgutil.iter_modules(getattr(space, "__path__", [])):
            inner = getattr(space, info.name, None)
            is_public = inspect.ismodule(inner) and not info.name.startswith(("_", "src"))
            if is_public and inner not in spaces:
                spaces.append(inner)
        for name, value in vars(space).items():
            if (inspect.isclass(value) or inspect.isfunction(value)) and name[0] != "_":
                found[f"{space.__name__}.{name}"] = value
    return found


def forms(name, gadget):
    """The ways to name a function or class in a configuration."""
    module, _, short = name.rpartition(".")
    inner = {"module": module, "config": short, "registered_name": short}
    yield {**inner, "class_name": "function"}
    if inspect.isclass(gadget):
        yield {"module": module, "class_name": short, "config": {}, "registered_name": None}
        place = gadget.__module__
        yield {"module": place, "class_name": short, "config": {}, "registered_name": short}
    else:
        yield {**inner, "class_name": "function", "module": "builtins"}
        yield {**inner, "class_name": short, "config": {}, "registered_name": None}


GADGETS = exported()


def test_keras_exports_what_is_tried_here():
    for name in (
        "keras.config.set_max_epochs",
        "keras.datasets.cifar10.load_data",
        "keras.ops.map",
    ):
        assert name in GADGETS
    assert len(GADGETS) > 1_000


@pytest.fixture
def resolved(monkeypatch):
    """What Keras has looked up for a configuration, in a list."""
    return spy_on_lookups(monkeypatch)


@pytest.mark.cases(4)
@pytest.mark.parametrize("every", [80, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("place", [*PLACES, "layer"])
def test_nothing_that_keras_exports_is_used_where_it_is_not_expected(
    place, every, content, path, resolved
):
    header = content.header
    if place == "source":
        header = changed(header, ("variables", 0, "source"), ["initializer", None])
    where = layer_named(header, "dropout") if place == "layer" else PLACES[place](header)
    names = sorted(GADGETS)[::every]
    num_refused = 0
    for name in [*names, "keras.config.set_max_epochs", "keras.layers.TFSMLayer"]:
        gadget = GADGETS[name]
        for form in forms(name, gadget):
            if may_be(place, gadget) or is_name_of_another(form, place):
                continue
            if place == "layer":
                form = {**form, "name": "dropout", "inbound_nodes": node_of(header, "dropout")}
            write(path, content, changed(header, where, form))
            with pytest.raises(kf.FreezeFileError, match=r"model\.freeze.*may not"):
                kf.load(path)
            num_refused += 1
    assert num_refused > len(names)
    assert not resolved


NEVER = {
    "a lambda": {"class_name": "__lambda__", "config": {"value": ["4wAAAA==", None, None]}},
    "a type": {
        "class_name": "__typespec__",
        "spec_name": "TensorSpec",
        "module": "keras",
        "registered_name": None,
        "config": [[1], "float32"],
    },
    "bytes": {"class_name": "__bytes__", "config": {"value": "x"}},
    "an array of long texts": {
        "class_name": "__numpy__",
        "config": {"value": ["x"], "dtype": "U1000000000"},
    },
    "an old format": {"class_name": "Dense", "config": {"units": 3}},
    "another module": {
        "module": "os",
        "class_name": "function",
        "config": "mkdir",
        "registered_name": "mkdir",
    },
    "a class by its module": {
        "module": "keras.src.layers.core.lambda_layer",
        "class_name": "Lambda",
        "registered_name": "Lambda",
        "config": {"function": "relu"},
    },
    "a class of code": {
        "module": "keras.layers",
        "class_name": "TFSMLayer",
        "registered_name": None,
        "config": {"filepath": "/nowhere", "name": "x"},
    },
    "an operation that calls": {
        "module": "keras.src.ops.core",
        "class_name": "Switch",
        "registered_name": "Switch",
        "config": {"name": "switch"},
    },
}


@pytest.mark.parametrize("place", [*PLACES, "layer"])
@pytest.mark.parametrize("kind", NEVER)
def test_what_may_be_nowhere_is_refused_everywhere(kind, place, content, path, resolved):
    header = content.header
    if place == "source":
        header = changed(header, ("variables", 0, "source"), ["initializer", None])
    where = layer_named(header, "dropout") if place == "layer" else PLACES[place](header)
    write(path, content, changed(header, where, NEVER[kind]))
    with pytest.raises(kf.FreezeFileError, match="may not"):
        kf.load(path)
    assert not resolved


def calling(header, name, node):
    """The header with another call of a layer."""
    place = layer_named(header, name) if name != "Add" else addition(header)
    return changed(header, (*place, "inbound_nodes", 0), node)


def test_calls_without_a_symbolic_tensor_are_refused(content, path):
    """Keras would compute them at once: an upsampling by a million, say."""
    array = {"class_name": "__numpy__", "config": {"value": [[1.0]], "dtype": "float32"}}
    for node in ({"args": [array], "kwargs": {}}, {"args": [], "kwargs": {}}, {}, []):
        write(path, content, calling(content.header, "dropout", node))
        with pytest.raises(kf.FreezeFileError, match="may not"):
            kf.load(path)


@keras.saving.register_keras_serializable(package="hostile_files")
class Registered(layers.Layer):
    def call(self, x):
        raise AssertionError("it has been called")


@keras.saving.register_keras_serializable(package="hostile_files")
def registered(*arguments):
    raise AssertionError("it has been called")


@pytest.mark.parametrize("place", ["argument", "keyword", "constant", "units", "momentum", "build"])
def test_registered_names_are_no_data(place, content, path):
    for name in ("hostile_files>Registered", "hostile_files>registered"):
        write(path, content, changed(content.header, PLACES[place](content.header), name))
        with pytest.raises(kf.FreezeFileError, match="registered"):
            kf.load(path)


@pytest.mark.parametrize("place", ["initializer", "loss", "optimizer", "rate", "dtype"])
def test_registered_classes_are_refused_where_another_kind_belongs(place, content, path):
    described = {
        "module": __name__,
        "class_name": "Registered",
        "config": {},
        "registered_name": "hostile_files>Registered",
    }
    for value in (described, "hostile_files>Registered"):
        write(path, content, changed(content.header, PLACES[place](content.header), value))
        with pytest.raises(kf.FreezeFileError, match="may not"):
            kf.load(path)


def test_two_classes_under_one_number_are_refused(content, path):
    """Keras would put the first object into the place of the second."""
    header = copy.deepcopy(content.header)
    config = header["model"]["compile_config"]
    config["optimizer"]["shared_object_id"] = 7
    config["loss"]["shared_object_id"] = 7
    write(path, content, header)
    with pytest.raises(kf.FreezeFileError, match="shared_object_id"):
        kf.load(path)


@pytest.mark.parametrize("name", ["TextVectorization", "StringLookup", "IntegerLookup"])
def test_files_of_words_are_not_opened(name, path, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("secret\n")
    layer = described(name, vocabulary=str(words), name="words")
    dtype = "int64" if name == "IntegerLookup" else "string"
    write_small(path, sequential(layer, shape=(1,), dtype=dtype))
    with pytest.raises(kf.FreezeFileError, match=r"a file.*vocabulary"):
        kf.load(path)


def test_state_of_another_optimizer_is_not_decoded(content, path):
    """Its slots are compared with the optimizer first."""
    header = copy.deepcopy(content.header)
    header["optimizer"]["variables"][0][1] = [10**6]
    write(path, content, header)
    with pytest.raises(kf.FreezeFileError, match=r"of the header|not belong to the optimizer"):
        kf.load(path)


# Everything that is wrong in a file is a FreezeFileError.


def test_masks_that_fit_no_variable_are_refused(content, path):
    for position in (0, 1, 7, 2**31 - 1):
        header = copy.deepcopy(content.header)
        (record,) = (r for r in header["variables"] if r["path"].endswith("body/kernel"))
        record["mask"] = [position, 1]
        write(path, content, header)
        if position == 0:
            kf.load(path)
            continue
        with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
            kf.load(path)


@pytest.mark.parametrize("shape", [[], [1], [3], [2, 2]])
def test_random_states_of_another_length_are_refused(shape, content, path):
    header = copy.deepcopy(content.header)
    (record,) = (r for r in header["variables"] if r["path"].endswith("seed_generator_state"))
    record["shape"] = shape
    write(path, content, header)
    with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
        kf.load(path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("error", [MemoryError, RecursionError, RuntimeError, KeyError])
def test_whatever_goes_wrong_is_an_error_of_the_file(error, content, path, monkeypatch):
    def fail(*arguments, **keywords):
        raise error("no")

    write(path, content, content.header)
    for module, name in (
        (restoring, "decode_coded"),
        (restoring, "decode_values"),
        (restoring, "regenerate"),
        (loading, "build_model"),
        (loading, "set_bits"),
    ):
        with monkeypatch.context() as patches:
            patches.setattr(module, name, fail)
            with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
                kf.load(path)
    assert same_bits(value_of(kf.load(path).variables[0]), value_of(kf.load(path).variables[0]))


def test_a_delta_that_is_refused_leaves_the_model_as_it_was(path):
    base = network()
    model = network()
    model.set_weights(base.get_weights())
    kf.save(compiled_with_mask(model), path, base=base)
    content = read_container(path)
    before = values_of(base.variables)
    for section in ("mask", "exponents", "mantissas"):
        parts = {name: getattr(content, name) for name in ("mask", "exponents", "mantissas")}
        parts[section] = parts[section][:-4] or b"\xff" * 8
        write_container(path, content.header, **parts)
        with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
            kf.apply_delta(base, path)
    assert all(same_bits(a, b) for a, b in zip(values_of(base.variables), before, strict=True))


def compiled_with_mask(model):
    compiled(model, kf.FreezeOptimizer(sgd(), 0.75))
    kf.freeze(model, *blobs())
    return model


@pytest.mark.parametrize(
    "data",
    [b"", b"no mask", b"keras_freeze mask 1\n", b"\x89FREEZE\n", b"\x89FREEZE\n" + bytes(90)],
)
def test_files_that_are_no_masks_are_refused(data, path):
    path.write_bytes(data)
    with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
        kf.FreezeMask.load(path)

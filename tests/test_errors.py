"""docs/errors.md has a row for every error and warning of the package, and none besides.

And the errors that no other test of the package meets.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow_datasets as tfds
from helpers import sgd
from keras import ops

import keras_freeze as kf
from keras_freeze.masks.mask import MaskEntry
from keras_freeze.optimizer import update as updates
from keras_freeze.paper import tuning
from keras_freeze.paper.datasets import tiny_imagenet
from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.runs import Results, Run
from keras_freeze.storage import container
from keras_freeze.storage.coding import masks as mask_coding
from keras_freeze.storage.coding.entropy import Decoder, Encoder, Histogram

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "keras_freeze"
PAGE = ROOT / "docs" / "errors.md"

GAP = "…"
"""Stands for what a message fills in."""

ENOUGH = 24
"""So many characters of a message in one piece find it."""

ELSEWHERE = {
    "result.summary()": f"Training stopped in epoch {GAP}: the loss was no longer finite.",
}
"""Messages that are put together too far away from where they are raised to be followed."""

INTERNAL = {
    ("keras_freeze/initializers/seeded.py", ""): "caught by the same function",
    (
        "keras_freeze/restricted/operations.py",
        f"This is no matrix product. Received: equation={GAP}",
    ): "caught: gradients of such a layer are not restricted",
    ("keras_freeze/gradients/recording.py", ""): "caught: the step runs again without compilation",
    ("keras_freeze/backend/torch.py", GAP): "caught, and said in words of `loss.py`",
    ("keras_freeze/backend/jax.py", GAP): "warns, in `fit`, with the words of an error",
    (
        "keras_freeze/_utils/files.py",
        GAP,
    ): "the system's error, with the name of the file to be written",
    ("keras_freeze/storage/errors.py", f"{GAP}: {GAP}"): "puts a file's name before another error",
}
"""Errors that nobody meets in these words, by file and text, and why."""


@dataclass(frozen=True)
class Message:
    """An error or a warning in the source, with `GAP` for the parts of its text that vary."""

    file: str
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.kind}: {self.text}"


class Source:
    """The package's syntax trees, and the messages in them."""

    def __init__(self, folder):
        self.trees = {path: ast.parse(path.read_text("utf-8")) for path in folder.rglob("*.py")}
        self.functions, self.calls = defaultdict(list), defaultdict(list)
        self._function_around = {}
        for path, tree in sorted(self.trees.items()):
            self._index(tree, None, path.relative_to(folder.parent).as_posix())

    def _index(self, node, function, file):
        self._function_around[node] = function
        node.file = file
        if isinstance(node, ast.FunctionDef):
            self.functions[node.name].append(node)
            function = node
        if isinstance(node, ast.Call):
            self.calls[name_of(node.func)].append(node)
        for child in ast.iter_child_nodes(node):
            self._index(child, function, file)

    def messages(self):
        """All of them; an error that is raised from several places with one text once for each."""
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        raised = [n.exc for n in nodes if isinstance(n, ast.Raise) and n.exc is not None]
        warned = [n for n in nodes if isinstance(n, ast.Call) and name_of(n.func) == "warn"]
        found = [message for exception in raised for message in self._of_exception(exception)]
        found += [self._of_warning(call) for call in warned]
        return [message for message in found if (message.file, message.text) not in INTERNAL]

    def _of_exception(self, exception):
        function = self._function_around[exception]
        kind = name_of(exception)
        if kind == "NotImplementedError":
            return []
        makers = sorted(self.functions[kind], key=lambda maker: maker.file != exception.file)
        if makers:
            return self._made_by(makers[0], exception)
        if not (isinstance(exception, ast.Call) and exception.args):
            return [self._message(exception, kind, "")]
        argument = exception.args[0]
        if isinstance(argument, ast.Name) and argument.id in names_of_arguments(function):
            return self._handed_in(function, argument.id, kind)
        return [self._message(exception, kind, self._text(argument, function))]

    def _made_by(self, maker, call):
        """The error that a function returns, with the arguments of this call."""
        bound = {
            name: self._text(value, self._function_around[call])
            for name, value in arguments_of(maker, call).items()
        }
        returned = [n.value for n in ast.walk(maker) if isinstance(n, ast.Return)]
        return [
            self._message(call, name_of(error), self._text(error.args[0], maker, bound))
            for error in returned
        ]

    def _handed_in(self, function, name, kind):
        """The errors whose message is an argument of the function that raises them."""
        return [
            self._message(call, kind, self._text(text, self._function_around[call]))
            for call in self.calls[function.name]
            if (text := arguments_of(function, call).get(name)) is not None
        ]

    def _of_warning(self, call):
        kind = name_of(call.args[1]) if len(call.args) > 1 else "UserWarning"
        return self._message(call, kind, self._text(call.args[0], self._function_around[call]))

    def _message(self, node, kind, text):
        return Message(node.file, node.lineno, kind, text)

    def _text(self, node, function, bound=()):
        return normalized(self._raw_text(node, function, dict(bound)))

    def _raw_text(self, node, function, bound):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(self._raw_text(part, function, bound) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._raw_text(node.value, function, bound)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = (node.left, node.right)
            return "".join(self._raw_text(part, function, bound) for part in parts)
        if isinstance(node, ast.Name):
            if node.id in bound:
                return bound[node.id]
            value = last_assigned(node, function)
            return GAP if value is None else self._raw_text(value, function, bound)
        return ELSEWHERE.get(ast.unparse(node), GAP)


def name_of(node):
    """The name of a class or function, without what it belongs to."""
    if isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def names_of_arguments(function):
    if function is None:
        return []
    return [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]


def arguments_of(function, call):
    """The expressions of a call by the names that the function gives them."""
    by_position = dict(zip(names_of_arguments(function), call.args, strict=False))
    return by_position | {keyword.arg: keyword.value for keyword in call.keywords}


def last_assigned(name, function):
    """What a local name of a function was given last before it is used; None if nothing."""
    if function is None:
        return None
    assigned = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and node.lineno < name.lineno
        and any(isinstance(t, ast.Name) and t.id == name.id for t in node.targets)
    ]
    return max(assigned, key=lambda node: node.lineno).value if assigned else None


def normalized(text):
    """Without backticks, with single spaces, and with `GAP` for all that is open."""
    text = re.sub(r"\s+", " ", text.replace("`", "").replace("...", GAP)).strip()
    return re.sub(f"{GAP}+", GAP, text)


@dataclass(frozen=True)
class Row:
    """A row of a table: its types, and the messages it is about."""

    line: int
    kinds: tuple[str, ...]
    texts: tuple[str, ...]


def rows_of(page):
    rows = []
    for number, line in enumerate(page.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "| Type":
            kinds = tuple(cells[0].removeprefix("| ").split(", "))
            rows.append(Row(number, kinds, tuple(map(normalized, cells[1].split("<br>")))))
    return rows


def longest_piece(text):
    return max(len(piece.strip()) for piece in text.split(GAP))


def finds(text, message):
    """Whether a row's words are in a message, and enough of them to find it."""
    enough = min(ENOUGH, longest_piece(message.text))
    pattern = ".*".join(re.escape(piece.strip()) for piece in text.split(GAP))
    return longest_piece(text) >= enough and re.search(pattern, message.text) is not None


MESSAGES = Source(PACKAGE).messages()
ROWS = rows_of(PAGE.read_text("utf-8"))


def test_every_error_of_the_package_has_a_row():
    missing = [
        str(message)
        for message in MESSAGES
        if not any(
            message.kind in r.kinds and any(finds(t, message) for t in r.texts) for r in ROWS
        )
    ]
    assert not missing, "docs/errors.md has no row with the words of:\n" + "\n".join(missing)


def test_every_row_is_about_errors_of_the_package():
    unknown = []
    for row in ROWS:
        found = {t: [m for m in MESSAGES if m.kind in row.kinds and finds(t, m)] for t in row.texts}
        raised = {message.kind for messages in found.values() for message in messages}
        unknown += [f"{row.line}: {text}" for text, messages in found.items() if not messages]
        unknown += [f"{row.line}: {kind}" for kind in row.kinds if kind not in raised]
    assert not unknown, "docs/errors.md, lines without an error:\n" + "\n".join(unknown)


def test_messages_are_followed_to_where_they_are_put_together(tmp_path):
    (tmp_path / "module.py").write_text(
        """
def check(x):
    if x < 0:
        raise ValueError(f"`x` must be at least 0. " "Received: " + f"x={x}")
    message = "No such x."
    if x == 1:
        raise TypeError(message)
    if x == 2:
        raise _missing("x")
    if x == 3:
        raise RuntimeError
    require(x > 4, f"{x} is small.")
    warnings.warn("x is large.", RuntimeWarning)


def require(condition, text):
    if not condition:
        raise KeyError(text)


def _missing(name):
    return LookupError(f"There is no {name}.")
""",
        "utf-8",
    )
    messages = sorted((m.line, m.kind, m.text) for m in Source(tmp_path).messages())
    assert messages == [
        (4, "ValueError", f"x must be at least 0. Received: x={GAP}"),
        (7, "TypeError", "No such x."),
        (9, "LookupError", "There is no x."),
        (11, "RuntimeError", ""),
        (12, "KeyError", f"{GAP} is small."),
        (13, "RuntimeWarning", "x is large."),
    ]


CHOSEN = np.eye(4, 3, dtype=bool)
X, Y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")


def network(*layers):
    return keras.Sequential([keras.Input((4,)), *(layers or [keras.layers.Dense(3, name="fc")])])


def compiled(model=None, **arguments):
    model = model or network()
    model.compile(kf.FreezeOptimizer(sgd(momentum=0.9), 0.75, **arguments), "mse")
    return model


def frozen(model=None):
    model = compiled(model)
    kf.freeze(model, mask={"fc/kernel": CHOSEN})
    return model


def with_a_shared_path():
    def part(name):
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(4, name="fc")(inputs), name=name)

    return network(part("first"), part("second"))


def of_another_model():
    model = network()
    model.compile(frozen().optimizer, "mse")
    return model


def of_one_gradient_too_few():
    model = frozen()
    model.optimizer.apply([ops.ones((4, 3))], model.trainable_variables)


def of_a_gradient_in_another_shape():
    model = frozen()
    model.optimizer.apply([ops.ones((3, 4)), ops.ones(3)], model.trainable_variables)


def with_a_mask_of_more_variables():
    mask = kf.FreezeMask([MaskEntry(7, "other/kernel", CHOSEN)])
    kf.freeze(compiled(), mask=mask)


def with_one_variable_twice():
    model = compiled()
    path = model.layers[0].kernel.path
    kf.freeze(model, mask={path: CHOSEN, "fc/kernel": CHOSEN})


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        (
            lambda: kf.compute_saliency(with_a_shared_path(), X, np.ones((6, 4)), loss="mse"),
            ValueError,
            "Several weights share a path: 'fc/kernel', 'fc/kernel'",
        ),
        (
            lambda: kf.reinitialize(network(keras.layers.ReLU())),
            ValueError,
            "Argument `model` has no trainable weights; is it built?",
        ),
        (
            with_a_mask_of_more_variables,
            ValueError,
            "covers variables that this model does not have: 'other/kernel'",
        ),
        (with_one_variable_twice, ValueError, "Argument `mask` names a variable twice"),
        (
            lambda: kf.freeze(compiled(criterion=lambda w, g: ops.sum(w)), X, Y),
            ValueError,
            "Argument `criterion` must return one score per weight",
        ),
        (
            lambda: kf.gradient_flow(of_another_model(), X, Y),
            ValueError,
            "This FreezeOptimizer trains the model",
        ),
        (
            of_one_gradient_too_few,
            ValueError,
            "Received: 1 gradients for 2 variables",
        ),
        (
            of_a_gradient_in_another_shape,
            ValueError,
            "Received: a gradient of shape (3, 4)",
        ),
        (
            lambda: kf.FreezeOptimizer("sgd").set_weights([]),
            ValueError,
            "`set_weights` needs an optimizer that is built",
        ),
        (
            lambda: setattr(kf.FreezeOptimizer("sgd"), "use_ema", True),
            ValueError,
            "Give `use_ema` to the inner optimizer",
        ),
        (
            lambda: EXPERIMENTS["lenet5_extreme_rates"].changed(seeds="2"),
            TypeError,
            "seeds must be an integer. Received: seeds='2'",
        ),
        (
            lambda: EXPERIMENTS["lenet5_extreme_rates"].changed(steps_per_epoch=0),
            ValueError,
            "steps_per_epoch must be at least 1. Received: steps_per_epoch=0",
        ),
        (
            lambda: EXPERIMENTS["lenet5_extreme_rates"].changed(rates=0.9),
            TypeError,
            "rates must be a sequence of freezing rates. Received: rates=0.9",
        ),
        (
            lambda: EXPERIMENTS["lenet5_extreme_rates"].changed(rates=()),
            ValueError,
            "rates must be one freezing rate at least. Received: rates=()",
        ),
    ],
)
def test_errors_that_no_other_test_meets(cause, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        cause()


def test_another_backend_is_refused():
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    command = [sys.executable, "-c", "import keras_freeze"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "KERAS_BACKEND=numpy" in done.stderr.splitlines()[-1]


def test_loading_a_state_without_a_mask_into_a_built_optimizer_warns():
    optimizer = frozen().optimizer
    with pytest.warns(UserWarning, match="No mask was loaded into"):
        optimizer.load_own_variables({})
    assert np.array_equal(optimizer.mask["fc/kernel"], CHOSEN)


def test_a_variable_of_too_many_entries_is_refused(monkeypatch):
    monkeypatch.setattr(updates, "_MOST_ENTRIES", 11)
    with pytest.raises(ValueError, match=r"may have at most 11 entries.*of shape \(4, 3\)"):
        frozen()


def test_tiny_imagenet_is_not_prepared_from_an_empty_folder(tmp_path):
    builder = tiny_imagenet.TinyImagenet(data_dir=tmp_path)
    where = tfds.download.DownloadConfig(manual_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds neither tiny-imagenet-200\.zip nor"):
        builder.download_and_prepare(download_config=where)


def test_a_part_of_kerastuners_environment_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("KERASTUNER_TUNER_ID", "worker")
    for name in ("KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError, match="Received: no KERASTUNER_ORACLE_IP, KERASTUNER_ORACLE_PORT"
    ):
        tuning.sweep([], tmp_path)


def test_a_result_without_its_numbers_is_left_out(tmp_path, capsys):
    run = Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, seed=0)
    record = {"run": vars(run), "result": {"report": {}, "test_accuracy": 0.5}}
    (tmp_path / "results.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
    assert run not in Results(tmp_path / "results.jsonl")
    assert "its result lacks a number: validation_accuracy" in capsys.readouterr().err


def written(write):
    """The bytes of an entropy-coded stream."""
    encoder = Encoder()
    write(encoder)
    return encoder.finish()


def write_unordered_histogram(encoder):
    encoder.number(1)  # two symbols: 250 and the one 101 further
    encoder.bits(250, 8)
    encoder.number(100)


def write_levels(symbols, axes):
    def write(encoder):
        histogram = Histogram(np.array(symbols, "uint8"), np.zeros(len(symbols), int))
        encoder.bits(3, 2)  # the mode in which each line has a level
        for _ in range(axes):
            encoder.histogram(histogram)
            encoder.symbols(np.array(symbols, "uint8"), histogram)

    return write


@pytest.mark.parametrize(
    ("write", "read", "words"),
    [
        (lambda e: e.number(1000), lambda d: d.number(3), "a number is larger than 3"),
        (lambda e: e.number(6), lambda d: d.number(4), "a number is larger than 4"),
        (write_unordered_histogram, lambda d: d.histogram(), "a histogram has a symbol above 255"),
        (lambda e: e.bits(2**90 - 1, 90), lambda d: d.finish(), "there is more than was announced"),
    ],
)
def test_streams_that_no_encoder_writes_are_refused(write, read, words):
    with pytest.raises(kf.FreezeFileError, match=f"The mask cannot be decoded: {words}"):
        read(Decoder(written(write), "mask"))


def test_what_the_range_coder_refuses_names_the_stream():
    histogram = Histogram(np.array([1, 2, 3], "uint8"), np.zeros(3, int))
    with pytest.raises(
        kf.FreezeFileError, match="The exponents cannot be decoded: the range coder"
    ):
        Decoder(b"\xff" * 64, "exponents").symbols(100, histogram)


@pytest.mark.parametrize(
    ("shape", "symbols", "words"),
    [((1, 1), [255], "no such level"), ((41, 41, 41), range(50, 91), "too many levels")],
)
def test_levels_that_no_mask_has_are_refused(shape, symbols, words):
    stream = written(write_levels(symbols, len(shape)))
    with pytest.raises(kf.FreezeFileError, match=words):
        mask_coding.decode_masks(stream, [shape])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A `.freeze` file with two variables, a mask of the first, and the optimizer's state."""
    model = network()
    kf.reinitialize(model, seed=5)
    path = tmp_path_factory.mktemp("errors") / "saved.freeze"
    kf.save(frozen(model), path, include_optimizer=True)
    return path


def rewritten(saved, change, folder):
    """The file with another header, as a program of someone else might write it."""
    parts = container.read_container(saved)
    header = json.loads(json.dumps(parts.header))
    change(header)
    path = folder / "rewritten.freeze"
    container.write_container(path, header, parts.mask, parts.exponents, parts.mantissas)
    return path


def setting(name, value, index=0):
    def change(header):
        header["variables"][index][name] = value

    return change


def put_both_at_one_position(header):
    header["variables"][1]["mask"] = header["variables"][0]["mask"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header.update(variables=3), "variables is 3"),
        (setting("crc32", -1), "crc32 is -1"),
        (setting("dtype", "int3"), "there is no dtype 'int3'"),
        (setting("source", ["guess"]), "there is no source ['guess']"),
        (put_both_at_one_position, "two variables have the same position in the mask"),
        (setting("source", ["constant", 2**40]), "has a constant of too many bits"),
        (setting("source", ["base", 0]), "comes from a base, and there is none"),
        (setting("stored_dtype", "int32"), "is stored as int32"),
    ],
)
def test_headers_that_make_no_sense_are_refused(saved, tmp_path, change, words):
    path = rewritten(saved, change, tmp_path)
    with pytest.raises(kf.FreezeFileError, match=re.escape(words)) as raised:
        kf.FreezeMask.load(path)
    assert "The header makes no sense: " in str(raised.value)


def initializer(class_name, **config):
    described = {"module": "keras.initializers", "class_name": class_name, "config": config}
    return setting("source", ["initializer", {**described, "registered_name": None}])


def become_a_layer(header):
    header["model"] = keras.saving.serialize_keras_object(keras.layers.Dense(3))


def reshape_a_slot(header):
    slot = header["optimizer"]["variables"][-1]
    slot[1] = [1, *slot[1]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (become_a_layer, "The configuration is that of a Dense, no model"),
        (initializer("RandomNormal", width=2), "Keras cannot make the initializer"),
        (initializer("Constant", value=[[[1.0]]]), "they are float32 of shape (1, "),
        (reshape_a_slot, "It holds the state of another optimizer than the one it describes"),
    ],
)
def test_files_that_contradict_themselves_are_refused(saved, tmp_path, change, words):
    with pytest.raises(kf.FreezeFileError, match=re.escape(words)):
        kf.load(rewritten(saved, change, tmp_path))


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (kf.apply_delta, "The delta does not fit the model: 'fc/kernel' is another variable"),
        (lambda base, path: kf.load(path, base=base), "The base has no variable 1 of shape (4, 3)"),
    ],
)
def test_deltas_of_another_variable_of_the_base_are_refused(tmp_path, read, words):
    base = network()
    model = keras.models.clone_model(base)
    model.set_weights(base.get_weights())
    kf.save(frozen(model), tmp_path / "delta.freeze", base=base)
    path = rewritten(tmp_path / "delta.freeze", setting("source", ["base", 1]), tmp_path)
    with pytest.raises(kf.FreezeFileError) as raised:
        read(base, path)
    assert words in re.sub(r"sequential\w*/", "", str(raised.value))


def test_deltas_are_for_built_models(saved):
    with pytest.raises(TypeError, match=r"must be a keras\.Model\. Received: model='model'"):
        kf.apply_delta("model", saved)
    with pytest.raises(ValueError, match="Argument `model` is not built"):
        kf.apply_delta(keras.Sequential([keras.layers.Dense(3)]), saved)


def test_a_file_that_grows_while_it_is_read_is_refused(saved, tmp_path, monkeypatch):
    size = os.stat(saved)
    path = tmp_path / "growing.freeze"
    path.write_bytes(saved.read_bytes() + b"more")
    with monkeypatch.context() as patched:
        patched.setattr(container.os, "fstat", lambda _: size)
        with pytest.raises(kf.FreezeFileError, match="its size changed while it was read"):
            kf.FreezeMask.load(path)


def test_a_description_that_is_too_long_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(container, "_LARGEST_HEADER", 100)
    with pytest.raises(ValueError, match=r"takes \d+ bytes; a `\.freeze` file allows 100"):
        kf.save(frozen(), tmp_path / "long.freeze")
    assert not list(tmp_path.iterdir())


def test_variables_of_other_dtypes_are_not_saved(tmp_path):
    class Phase(keras.layers.Layer):
        def build(self, input_shape):
            self.phase = self.add_weight(shape=(2,), dtype="complex64", trainable=False)

        def call(self, inputs):
            return inputs

    model = frozen(network(keras.layers.Dense(3, name="fc"), Phase()))
    with pytest.raises(ValueError, match="has dtype complex64"):
        kf.save(model, tmp_path / "complex.freeze")

"""Which trainable variables are weights, biases or normalization, and which may be frozen.

FreezeNet freezes weights only: "we split the model's parameters into weights W and biases B, only
freeze parts of the weights W and keep all biases trainable" (the paper's general setup). Batch
normalization stays trained too. An optimizer sees a plain list of variables and no layers, so the
kind of a variable follows from its name alone, as Keras's layers give it. Its rank says nothing:
the biases of `MultiHeadAttention` are matrices, the alphas of `PReLU` may be cubes.
"""

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_freeze._utils.validation import type_error, value_error

WEIGHT = "weight"
BIAS = "bias"
NORMALIZATION = "normalization"
UNKNOWN = "unknown"

_KIND_BY_NAME = {
    # What multiplies a layer's input or state, or is looked up by the input.
    "kernel": WEIGHT,  # Dense, EinsumDense, convolutions, SimpleRNN, LSTM, GRU, ConvLSTM
    "recurrent_kernel": WEIGHT,  # the same recurrent layers
    "depthwise_kernel": WEIGHT,  # SeparableConv
    "pointwise_kernel": WEIGHT,  # SeparableConv
    "embeddings": WEIGHT,  # Embedding, ReversibleEmbedding
    "reverse_embeddings": WEIGHT,  # ReversibleEmbedding with tie_weights=False
    "real_kernel": WEIGHT,  # STFTSpectrogram: a convolution that starts as a Fourier transform
    "imag_kernel": WEIGHT,  # STFTSpectrogram
    "bias": BIAS,
    # Scales, shifts and slopes: one value for a channel or a layer, nearly always from a constant.
    "gamma": NORMALIZATION,  # Batch-, Layer- and GroupNormalization
    "beta": NORMALIZATION,  # the same
    "scale": NORMALIZATION,  # RMSNormalization, Attention, AdditiveAttention
    "concat_score_weight": NORMALIZATION,  # Attention: a scalar factor, despite its name
    "alpha": NORMALIZATION,  # PReLU
    # KerasHub: mixtures of experts (Mixtral and Qwen; GPT-OSS and Gemma), masked language models.
    "expert_feedforward_gate_dense": WEIGHT,
    "expert_feedforward_intermediate_dense": WEIGHT,
    "expert_feedforward_output_dense": WEIGHT,
    "gate_proj": WEIGHT,
    "up_proj": WEIGHT,
    "gate_up_proj": WEIGHT,
    "gate_up_proj_bias": BIAS,
    "down_proj": WEIGHT,
    "down_proj_bias": BIAS,
    "output_kernel": WEIGHT,
    "output_bias": BIAS,
}

# Unknown on purpose. Low-rank factors are themselves the few trained values beside a fixed kernel,
# and b starts at zero, where a score made of gradient times weight says nothing. The scales and
# histories of float8 layers are state that Keras updates by passing new values off as gradients.
_NO_WEIGHTS = {
    *("lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b"),
    *("inputs_scale", "kernel_scale", "outputs_grad_scale"),
    *("inputs_amax_history", "kernel_amax_history", "outputs_grad_amax_history"),
}


@dataclass(frozen=True)
class Parameter:
    """One trainable variable and what it is.

    Attributes:
        position: Its index among the variables that were classified.
        variable: The variable itself.
        path: Its path, such as `"model/fc1/kernel"`. A label: not always unique.
        kind: `WEIGHT`, `BIAS`, `NORMALIZATION` or `UNKNOWN`.
        excluded: Whether an `exclude` entry names it, so that it is always trained.
        first_path: The path that it had when its optimizer was first built, which `exclude` and
            patterns go by. Keras loads and clones layers such as `Bidirectional` without the name
            of the layer in the paths of those inside.
    """

    position: int
    variable: Any
    path: str
    kind: str
    excluded: bool
    first_path: str

    @property
    def size(self) -> int:
        """How many entries the variable has."""
        return math.prod(self.variable.shape)

    @property
    def is_frozen_candidate(self) -> bool:
        """Whether entries of this variable may be frozen: a weight that is not excluded."""
        return self.kind == WEIGHT and not self.excluded

    @property
    def may_be_weight(self) -> bool:
        """Whether this may be a weight under another name, such as a custom layer's `"w"`."""
        name = self.path.rsplit("/", 1)[-1]
        return self.kind == UNKNOWN and not self.excluded and name not in _NO_WEIGHTS


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a `tf.Variable` without its `":0"`."""
    path = getattr(variable, "path", None)
    if isinstance(path, str):
        return path
    name = getattr(variable, "name", None)
    if isinstance(name, str):
        return re.sub(r":\d+$", "", name)
    raise type_error("variable", variable, "a Keras variable or a tf.Variable")


def same_path(first: str, second: str) -> bool:
    """Return whether two paths agree, except for the model's name and automatic numbers."""
    a, b = (_unnumbered(path).split("/") for path in (first, second))
    shorter = min(len(a), len(b))
    if len(a) == len(b) and shorter > 2:
        shorter -= 1
    return a[-shorter:] == b[-shorter:]


def kind_of(variable: Any) -> str:
    """Return what a trainable variable is, by the last component of its path.

    Args:
        variable: A Keras variable, or a `tf.Variable`.

    Returns:
        `WEIGHT`, `BIAS`, `NORMALIZATION`, or `UNKNOWN` for a name that no Keras layer gives to
        one of these (a custom layer's `"w"`, LoRA factors). Unknown variables are frozen
        only by a mask that the user passes.

    Example:
        >>> layer = keras.layers.Dense(3)
        >>> layer.build((None, 2))
        >>> [kind_of(variable) for variable in layer.trainable_variables]
        ['weight', 'bias']
    """
    return _KIND_BY_NAME.get(path_of(variable).rsplit("/", 1)[-1], UNKNOWN)


def normalize_exclude(exclude: Any) -> tuple[str, ...]:
    """Convert what a user may pass as `exclude` into names and paths that a config can hold.

    Args:
        exclude: A layer's name, a path or part of one (`"fc2"`, `"fc2/kernel"`), a Keras layer,
            or an iterable of these. A layer stands for its name, a functional or sequential model
            for the names of the layers in it.

    Returns:
        The names and paths, without repetitions, in the given order.

    Raises:
        TypeError: If an entry is neither a string nor a layer.
        ValueError: If a string is empty or has an empty path component.

    Example:
        >>> normalize_exclude([keras.layers.Dense(10, name="head"), "fc1/kernel"])
        ('head', 'fc1/kernel')
    """
    accepted = "a layer's name, a path, a Keras layer, or an iterable of these"
    if isinstance(exclude, (str, keras.layers.Layer)):
        exclude = [exclude]
    if not isinstance(exclude, Iterable) or isinstance(exclude, Mapping):
        raise type_error("exclude", exclude, accepted)
    entries = list(exclude)
    names: list[str] = []
    for entry in entries:
        if isinstance(entry, keras.layers.Layer):
            names.extend(_names_of_layer(entry))
        elif isinstance(entry, str):
            if not all(entry.split("/")):
                parts = "names or paths such as 'fc2' or 'fc2/kernel', without empty components"
                raise value_error("exclude", entries, parts)
            names.append(entry)
        else:
            raise type_error("exclude", entries, accepted)
    return tuple(dict.fromkeys(names))


def classify(
    variables: Sequence[Any], exclude: Any = (), first_paths: Sequence[str] | None = None
) -> list[Parameter]:
    """Classify trainable variables as weights, biases, normalization or unknown.

    Args:
        variables: Trainable variables, in the order in which an optimizer is built with them.
        exclude: What is always trained; see `normalize_exclude`. An entry matches a variable if
            its components, as split at `"/"`, occur one after the other in the variable's path:
            `"fc2"`, `"fc2/kernel"` and `"model/fc2/kernel"` all match `"model/fc2/kernel"`.
        first_paths: Paths that variables had before the model was loaded, which entries are matched
            with where it is clear whose they are. Variables may have come or gone since.

    Returns:
        One `Parameter` for each variable, in order.

    Raises:
        TypeError: If `exclude` holds something that is neither a string nor a layer.
        ValueError: If an entry of `exclude` matches no variable, and did not before.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="fc")])
        >>> [(p.kind, p.is_frozen_candidate) for p in classify(model.trainable_variables)]
        [('weight', True), ('bias', False)]
    """
    paths = [path_of(variable) for variable in variables]
    own_paths = paths if first_paths is None else _found_again(paths, first_paths)
    matched: set[int] = set()
    for entry in normalize_exclude(exclude):
        matches = {i for i, path in enumerate(own_paths) if _names(entry, path)}
        if not matches and not any(_names(entry, path) for path in first_paths or ()):
            raise ValueError(
                "Every entry of `exclude` must name a layer or a path of a trainable variable; "
                "models that Keras has loaded or cloned may lack the names of layers around others."
                f" The trainable variables are {shorten(paths)}. Received: exclude entry {entry!r}"
            )
        matched |= matches
    return [
        Parameter(i, variable, path, kind_of(variable), i in matched, first_path)
        for i, (variable, path, first_path) in enumerate(
            zip(variables, paths, own_paths, strict=True)
        )
    ]


def _found_again(paths: Sequence[str], first_paths: Sequence[str]) -> Sequence[str]:
    """Return the first path of each variable, or its path where it is not clear which that is.

    Since then, components may be missing and automatic numbers be others.
    """
    if list(paths) == list(first_paths):
        return paths
    candidates = [[one for one in first_paths if _is_part(path, one)] for path in paths]
    if len(paths) == len(first_paths) and all(
        first in of_path if of_path else _is_part(_unnumbered(path), _unnumbered(first))
        for path, first, of_path in zip(paths, first_paths, candidates, strict=True)
    ):
        return first_paths
    return [
        of_path[0] if len(of_path) == 1 else path
        for path, of_path in zip(paths, candidates, strict=True)
    ]


def _is_part(path: str, first_path: str) -> bool:
    """Return whether a path is another one of which components may be missing."""
    left = iter(first_path.split("/"))
    return all(component in left for component in path.split("/"))


def _unnumbered(path: str) -> str:
    """Return a path without the numbers that Keras appends to names."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def exclude_without_name(entry: str, name: str, paths: Sequence[str]) -> str:
    """Return an entry of `exclude` without the model's name, if it matches nothing else with it.

    Args:
        entry: one that matches some of `paths`; see `classify`.
        name: the first component of all paths.
        paths: those of the variables.

    Example:
        >>> exclude_without_name("net/fc2", "net", ["net/fc1/kernel", "net/fc2/kernel"])
        'fc2'
    """
    if any(_names(entry, path.partition("/")[2]) for path in paths):
        return entry
    return entry.removeprefix(f"{name}/")


def _names(entry: str, path: str) -> bool:
    """Return whether the components of an entry occur one after the other in a path."""
    return f"/{entry}/" in f"/{path}/"


def frozen_candidates(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters whose entries may be frozen; raise ValueError if there are none."""
    candidates = [p for p in parameters if p.is_frozen_candidate]
    if not candidates:
        raise ValueError(
            "The model has no weights that could be frozen. Its trainable variables are "
            f"{shorten([p.path for p in parameters])}."
        )
    return candidates


def warn_of_unknown(parameters: Sequence[Parameter], stacklevel: int) -> None:
    """Warn of arrays of unknown names with more than 1 % of all parameters, which stay trained.

    Vectors say nothing: they may be biases or scales.
    """
    total = sum(p.size for p in parameters)
    missed = [
        p.path
        for p in parameters
        if p.may_be_weight
        and 100 * p.size > total
        and sum(length > 1 for length in p.variable.shape) > 1
    ]
    if missed:
        warnings.warn(
            f"The variables {shorten(missed)} have names that no layer of Keras gives to weights, "
            "so that all of them are trained and the freezing rate applies to the other weights. "
            'If they are weights, name them "kernel" in `add_weight`, or pass `freeze` a `mask`: a '
            "mapping from paths or a function. If they are not, name them in the optimizer's "
            "`exclude`.",
            stacklevel=stacklevel + 1,
        )


def shorten(names: Sequence[str], limit: int = 12) -> str:
    """List names for an error message, only the first `limit` of them."""
    shown = ", ".join(repr(name) for name in names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def _names_of_layer(layer: Any) -> list[str]:
    # A functional model inside another is missing from its variables' paths; a Sequential is
    # missing after a model has been saved and loaded. Both stand for the layers in them.
    missing = not all(layer.name in path_of(v).split("/") for v in layer.trainable_variables)
    names = []
    if layer.built and (missing or isinstance(layer, keras.Sequential)):
        inner_layers = [inner for inner in layer.layers if inner.trainable_variables]
        names = [name for inner in inner_layers for name in _names_of_layer(inner)]
    return names or [layer.name]

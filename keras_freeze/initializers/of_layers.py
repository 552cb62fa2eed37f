"""Which initializer each variable of a model has, and the values that it draws."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze._utils.bits import as_bits, checksum, numpy_dtype
from keras_freeze._version import __version__
from keras_freeze.initializers.portable import SEEDED
from keras_freeze.initializers.seeded import ConstantSigma, SeededInitializer
from keras_freeze.parameters import Parameter, path_of
from keras_freeze.starts import CONSTANT, INITIALIZER, SEED, Source, Start

# What layers of Keras give to variables without keeping it in an attribute.
_WITHOUT_ATTRIBUTE: dict[tuple[type, str], Callable[[Any], Any]] = {
    (keras.layers.AdditiveAttention, "scale"): lambda _: keras.initializers.GlorotUniform(),
    (keras.layers.Attention, "scale"): lambda _: keras.initializers.Ones(),
    (keras.layers.Attention, "concat_score_weight"): lambda _: keras.initializers.Ones(),
    (keras.layers.RMSNormalization, "scale"): lambda _: keras.initializers.Ones(),
    (keras.layers.ReversibleEmbedding, "reverse_embeddings"): (
        lambda layer: layer.embeddings_initializer
    ),
    (keras.layers.STFTSpectrogram, "real_kernel"): lambda layer: _stft("real", layer),
    (keras.layers.STFTSpectrogram, "imag_kernel"): lambda layer: _stft("imag", layer),
}

# Initializers of Keras that draw nothing, with the same values in every version.
_EXACT = ("Zeros", "Ones", "Constant", "Identity", "ConstantSigma")


def initializers_of(model: keras.Model) -> dict[int, tuple[Any, str]]:
    """Return, by each variable's id, the layer and the attribute that hold its initializer.

    A custom layer need not have the attribute; `reinitialize` and `load` set it.
    """
    return {
        id(variable): (layer, attribute_of(layer, variable))
        for layer in _keras_private.all_layers(model)
        for variable in _keras_private.own_variables(layer)
    }


def attribute_of(layer: Any, variable: Any) -> str:
    """Return under which name a layer keeps, or would keep, the initializer of a variable."""
    name = path_of(variable).rsplit("/", 1)[-1]
    usual = f"{name}_initializer"
    names = [usual, f"{name.removesuffix('_kernel')}_initializer"]  # LSTM's recurrent_initializer
    if name == "kernel":
        names.append("depthwise_initializer")  # DepthwiseConv
    return next((one for one in names if callable(getattr(layer, one, None))), usual)


def initializer_in(layer: Any, attribute: str) -> Any:
    """Return the initializer of a layer's variable; None if the layer does not keep it."""
    initializer = getattr(layer, attribute, None)
    if callable(initializer):
        return initializer
    name = attribute.removesuffix("_initializer")
    known = (_WITHOUT_ATTRIBUTE.get((base, name)) for base in type(layer).__mro__)
    return next((make(layer) for make in known if make is not None), None)


def kernel_axes(layer: Any, initializer: Any) -> dict[str, list[int]]:
    """Return the axes that an EinsumDense passes to its initializer, on which the fans depend."""
    is_scaling = isinstance(initializer, keras.initializers.VarianceScaling)
    if not is_scaling or not isinstance(layer, keras.layers.EinsumDense):
        return {}
    if initializer.input_axes is not None and initializer.output_axes is not None:
        return {}
    kernel, outputs = layer.equation.split(",")[1].split("->")
    return {
        "input_axes": [i for i, axis in enumerate(kernel) if axis not in outputs],
        "output_axes": [i for i, axis in enumerate(kernel) if axis in outputs],
    }


def source_of(layer: Any, attribute: str) -> Source | None:
    """Return a layer's initializer as a source, or None if its values cannot be reproduced."""
    initializer = initializer_in(layer, attribute)
    for name, distribution in SEEDED.items():
        if type(initializer) is distribution:
            parameters = getattr(initializer, "parameters", {})
            return Source(SEED, name, initializer.seed, initializer.stream, parameters)
    if not _is_of_keras(type(initializer)):
        return None
    config = {**initializer.get_config(), **kernel_axes(layer, initializer)}
    if "seed" in config:
        # One that was made without a seed has drawn one, which its config leaves out.
        config["seed"] = _drawn_seed(initializer)
        if config["seed"] is None:
            return None
    described = _described(type(initializer).from_config(config))
    if isinstance(initializer, keras.initializers.Identity):  # whose config leaves its gain out
        described["config"] = {"gain": initializer.gain}
    return Source(INITIALIZER, config=described)


def _described(initializer: Any) -> dict[str, Any]:
    """Return what `keras.initializers.serialize` does.

    That imports TensorFlow wherever it is installed, which takes seconds and half a gigabyte.
    """
    config, kind = initializer.get_config(), type(initializer)
    simple = (bool, int, float, str, type(None))
    if kind is not ConstantSigma and all(isinstance(value, simple) for value in config.values()):
        described = {"module": "keras.initializers", "class_name": kind.__name__}
        return {**described, "config": config, "registered_name": None}
    serialized: dict[str, Any] = keras.initializers.serialize(initializer)
    return serialized


def initializer_of(source: Source) -> keras.initializers.Initializer:
    """Return the initializer that a source of kind `SEED` or `INITIALIZER` describes.

    Nothing but an initializer is ever made: sources come from files.

    Raises:
        ValueError: if there is none.
    """
    if source.kind == SEED:
        if source.distribution not in SEEDED:
            raise ValueError(f"There is no distribution {source.distribution!r:.100}.")
        try:
            return SEEDED[source.distribution](
                seed=source.seed, stream=source.stream, **source.parameters
            )
        except TypeError as error:
            raise ValueError(
                f"The distribution {source.distribution!r} has other parameters: {error}"
            ) from error
    described = source.config or {}
    named = described.get("class_name")
    made: Any = getattr(keras.initializers, str(named), None)
    made = ConstantSigma if named == "ConstantSigma" else made
    config = described.get("config")
    if not _is_of_keras(made) or not isinstance(config, dict) or not _is_plain(config):
        raise ValueError(f"Keras makes no initializer of {described!r:.200}.")
    try:
        return made.from_config(config)
    except Exception as error:  # Keras raises anything for a config that is not one
        raise ValueError(f"Keras cannot make the initializer {described!r:.200}.") from error


def draw(source: Source, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw the values of a source of kind `SEED` or `INITIALIZER`.

    Raises:
        ValueError: if it cannot draw such values.
    """
    initializer = initializer_of(source)
    expected = numpy_dtype(dtype)
    if isinstance(initializer, SeededInitializer):
        return initializer.values(shape).astype(expected)
    try:
        values: np.ndarray = keras.ops.convert_to_numpy(initializer(shape, dtype=dtype))
        if (values.shape, values.dtype) != (shape, backend.held_dtype(expected)):
            raise ValueError(f"they are {values.dtype} of shape {values.shape}")
    except Exception as error:  # as above
        raise ValueError(
            f"Keras's initializer {source.config} gives no {dtype} values of shape {shape}: {error}"
        ) from error
    return values.astype(expected, copy=False)


def drawn_like(source: Source, values: np.ndarray) -> np.ndarray | None:
    """Return what a source gives for a variable with these values; None if it gives none."""
    if source.kind == CONSTANT:
        bits = as_bits(values)
        return np.full_like(bits, source.pattern).view(values.dtype).reshape(values.shape)
    try:
        return draw(source, values.shape, values.dtype.name)
    except ValueError:  # a base, which is not at hand, or an initializer of another version
        return None


def is_portable(source: Source) -> bool:
    """Return whether a source has the same values with every backend and version."""
    return source.kind != INITIALIZER or (source.config or {}).get("class_name") in _EXACT


def is_describable(initializer: Any) -> bool:
    """Return whether a `.freeze` file can hold an initializer in place of its values."""
    return isinstance(initializer, SeededInitializer) or _is_of_keras(type(initializer))


def starts_of(
    model: keras.Model, parameters: Sequence[Parameter], known: Mapping[int, Start] | None = None
) -> dict[int, Start]:
    """Return what variables were drawn from, by their positions, if they still have these values.

    One whose initializer is not known or gives other values, because others were loaded, say, has
    no start.

    Args:
        model: the model, whose layers keep the initializers.
        parameters: some of its variables.
        known: starts that are known already, for layers that have lost their initializers since.
    """
    holders = initializers_of(model)
    held = [p for p in parameters if id(p.variable) in holders]
    sources = [source_of(*holders[id(p.variable)]) for p in held]
    with ThreadPoolExecutor() as executor:
        starts = list(executor.map(_start, held, sources))
    found = {p.position: s for p, s in zip(held, starts, strict=True) if s is not None}
    for p in parameters:
        start = (known or {}).get(p.position)
        if start is not None and _checksum_of(p.variable) == start.checksum:
            found.setdefault(p.position, start)
    return found


def model_in_use(variables: Sequence[Any]) -> keras.Model | None:
    """Return the model that these variables belong to, if a running function has it.

    An optimizer is given variables and no layers; but whoever trains has the model at hand: `fit`,
    or a custom training loop.
    """
    wanted = {id(variable) for variable in variables}
    models = models_in_use()
    return next((m for m in models if wanted <= set(map(id, m.trainable_variables))), None)


def models_in_use() -> Iterator[keras.Model]:
    """Yield the models that running functions have, the innermost function's first."""
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            # What `tf.train.Checkpoint` restores is an attribute of its.
            values = vars(value).values() if type(value).__name__ == "Checkpoint" else ()
            yield from (one for one in (value, *values) if isinstance(one, keras.Model))
        frame = frame.f_back  # type: ignore[assignment]


def versions() -> dict[str, str]:
    """Return the versions of keras_freeze, Keras and its backend, by name."""
    return {
        "keras_freeze": __version__,
        "keras": keras.__version__,
        keras.backend.backend(): backend.VERSION,
    }


def in_words(found: Mapping[str, str]) -> str:
    """Return the versions that decide which numbers an initializer of Keras draws."""
    backends = [f"{name} {found[name]}" for name in found if name not in ("keras", "keras_freeze")]
    return f"Keras {found.get('keras')} on {', '.join(backends)}"


def start_of(source: Source, bits: np.ndarray, drawn_with: Mapping[str, str]) -> Start:
    """Return the start of values, as bit patterns, that a source gives with these versions."""
    return Start(source, checksum(bits), "" if is_portable(source) else in_words(drawn_with))


def _start(parameter: Parameter, source: Source | None) -> Start | None:
    if source is None:
        return None
    variable = parameter.variable
    dtype = str(keras.backend.standardize_dtype(variable.dtype))
    try:
        drawn = draw(source, tuple(variable.shape), dtype)
    except ValueError:
        return None
    start = start_of(source, as_bits(drawn), versions())
    del drawn  # before the variable's values are copied
    return start if start.checksum == _checksum_of(variable) else None


def _checksum_of(variable: Any) -> int:
    return checksum(as_bits(backend.to_numpy(variable)))


def _drawn_seed(initializer: Any) -> int | None:
    """Return the seed of an initializer as an integer; of a generator its initial state."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        return int(backend.to_numpy(seed.state)[0])
    return seed if isinstance(seed, int) else None


def _is_of_keras(kind: Any) -> bool:
    if kind is ConstantSigma:
        return True
    is_initializer = isinstance(kind, type) and issubclass(kind, keras.initializers.Initializer)
    return is_initializer and kind.__module__.startswith("keras.")


def _is_plain(config: Any) -> bool:
    """Return whether a configuration names nothing that Keras would look up, except arrays."""
    if isinstance(config, (list, tuple)):
        return all(map(_is_plain, config))
    if not isinstance(config, dict):
        return True
    if "class_name" in config:
        return config["class_name"] in ("__numpy__", "__tensor__")
    return all(map(_is_plain, config.values()))


def _stft(side: str, layer: Any) -> Any:
    return keras.initializers.STFT(side, layer.window, layer.scaling, layer.periodic)

"""Save a network as a seed, a mask and a few values."""

import dataclasses
import difflib
import functools
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import initializers
from keras_freeze._utils.files import check_replaceable, is_same_file
from keras_freeze.initializers.of_layers import (
    initializers_of,
    is_portable,
    present_versions,
    source_of,
)
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.settings import Settings
from keras_freeze.model_state import (
    freeze_optimizer_of,
    freeze_optimizers_of,
    get_mask,
    optimizer_of,
)
from keras_freeze.optimizer.checkpoint import State
from keras_freeze.parameters import BIAS, NORMALIZATION, kind_of, path_of, shorten
from keras_freeze.starts import BASE, CONSTANT, Source, Start
from keras_freeze.storage.allowed import check_configuration
from keras_freeze._utils.bits import as_bits, checksum, from_bits, numpy_dtype
from keras_freeze.storage.coding.masks import encode_masks
from keras_freeze.storage.coding.values import encode_values
from keras_freeze.storage.container import write_container
from keras_freeze.storage.creation import only_announced
from keras_freeze.storage.errors import FreezeFileError, check_path
from keras_freeze.storage.header import Entry, Header, OptimizerState, Record, Slot
from keras_freeze.storage.keras_model import (
    bits_of,
    build_model,
    config_of,
    dtype_of,
    fingerprint,
    is_random_state,
    optimizer_variables,
    set_bits,
    variables_of,
    versions,
)
from keras_freeze.storage.loading import check_variables, open_base
from keras_freeze.storage.origin import guess, scaled
from keras_freeze.storage.vocabularies import set_vocabularies, vocabularies_of

_VALUES = ("float32", "float16", "bfloat16")

# FreezeNet-WD multiplies its frozen weights in every step and so rounds them in every step; they
# stay this near to the one factor times their start.
_DRIFT = 1e-2
_TINY = 1e-30  # below it, they may have become denormal or zero


def save(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    base: keras.Model | str | os.PathLike[str] | None = None,
    values: str = "float32",
    include_optimizer: bool = False,
    include_frozen: bool = False,
) -> None:
    """Saves a network as a seed, an entropy-coded mask and the trained values (section 3.3).

    The file holds all that `load` needs to give the same model back, bit for bit: architecture and
    compile configuration, mask, trained weights, biases, normalisation and its statistics. Frozen
    weights are not in it but where they come from: a seed, one constant such as zero, or a base.
    It is written beside its place and renamed, so that an interrupted save leaves an older file.

    Args:
        model: a built model. Without a FreezeOptimizer in it, or before it has a mask, the file
            holds all values that no source gives.
        path: where to write, `"digits.freeze"` for instance.
        base: a model, or the path of a `.keras` or `.freeze` file, that the receiver has: what is
            equal to it is left out, and `load` and `apply_delta` need it.
        values: the dtype in which values of float32 parameters are stored: "float32" exactly, or
            rounded to "float16" or "bfloat16".
        include_optimizer: whether training on from the file is to be the same as training on from
            the model. Otherwise its optimizer starts with fresh moments.
        include_frozen: whether frozen weights that come from no base and no portable seed are put
            into the file. Biases and normalization parameters are in any case.

    Raises:
        ValueError: if frozen weights come from nowhere; the message names the variable and what to
            do. Also for a model that is not built, or has lambda functions in it or layers that
            keep files of their own, and for values that are too large for float16.
        TypeError: for arguments of a wrong type.

    Warns where the file names initializers of Keras, which draw other numbers with another backend
    or version: it can then be loaded with those of this machine only.

    `frozen_weights="decay"` (FreezeNet-WD) rounds frozen weights in every step: `save` first sets
    those of the model to one factor times their start, rounded once.

    Example:

    ```python
    keras_freeze.save(model, "digits.freeze")
    model = keras_freeze.load("digits.freeze")
    ```
    """
    _check_arguments(model, path, base, values, include_optimizer, include_frozen)
    config = config_of(model)
    state, mask = _state_of(model), get_mask(model)
    base_variables = None if base is None else variables_of(open_base(base))
    settings, numbers = _settings_of(model)
    plans = _plan(model, _entries_of(mask, model), numbers, values)
    _give_starts(plans, state)
    holders = initializers_of(model)
    _find_sources(plans, state.decay_scale, base_variables, holders, portable_only=include_frozen)
    if not include_frozen:
        _check_explained(plans)
    header = Header(
        versions=versions(),
        generator=initializers.GENERATOR,
        model=config,
        records=tuple(plan.record() for plan in plans),
        settings=settings,
        num_rescued=0 if mask is None else mask.num_rescued,
        decay_scale=None if state.decay_scale is None else float(state.decay_scale),
        base=None if base_variables is None else fingerprint(base_variables),
        optimizer=_optimizer_state(model, state) if include_optimizer else None,
        vocabularies=vocabularies_of(model, all_of_them=base is not None),
    )
    optimizer_values = [] if header.optimizer is None else optimizer_variables(model)
    exponents, mantissas = encode_values(
        [plan.stored() for plan in plans] + [bits_of(v) for v in optimizer_values]
    )
    masks = encode_masks([plan.entry.trained for plan in plans if plan.entry is not None])
    _check_allowed(config)
    _check_loads_again(model, header, include_optimizer)
    _warn_if_bound(plans)
    write_container(path, header.to_json(), masks, exponents, mantissas)
    for plan in plans:
        if plan.is_settled:
            set_bits(plan.variable, plan.bits, dtype_of(plan.variable))


@dataclass
class _Plan:
    """What of a variable goes into the file.

    Attributes:
        variable: the variable.
        entry: its entry in the mask; None if it has none.
        settings: the number of the settings that decided it.
        trainable: whether it is a parameter.
        dtype, stored_dtype: of the variable, and of its values in the file.
        bits: its values as bit patterns.
        start: what its values were drawn from before it was frozen, if the optimizer knows.
        source: where values that are not stored come from; None while all are stored.
        is_settled: whether `bits` are no longer the variable's own (FreezeNet-WD).
    """

    variable: Any
    entry: MaskEntry | None
    settings: int
    trainable: bool
    dtype: str
    stored_dtype: str
    bits: np.ndarray
    start: Start | None = None
    source: Source | None = None
    is_settled: bool = False

    @property
    def path(self) -> str:
        return path_of(self.variable)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape)

    @functools.cached_property
    def sourced(self) -> np.ndarray:
        """Which values a source would have to give: all, or all that are frozen."""
        if self.entry is None:
            return np.ones(self.bits.size, bool)
        return ~self.entry.trained.reshape(-1)

    def equals(self, bits: Any) -> bool:
        """Whether the values that a source would have to give are these."""
        return bool(((self.bits == bits) | ~self.sourced).all())

    @property
    def _is_stored(self) -> np.ndarray:
        return np.ones(self.bits.size, bool) if self.source is None else ~self.sourced

    def stored(self) -> np.ndarray:
        """The values that go into the file, as bit patterns of `stored_dtype`."""
        bits = self.bits[self._is_stored]
        if self.stored_dtype == self.dtype:
            return bits
        exact = from_bits(bits, self.dtype)
        with np.errstate(over="ignore"):
            rounded = exact.astype(numpy_dtype(self.stored_dtype))
        if not np.isfinite(rounded[np.isfinite(exact)]).all():
            raise ValueError(
                f"The variable {self.path!r} has values up to {np.abs(exact).max():g}, too large "
                f"for {self.stored_dtype}. Received: values={self.stored_dtype!r}; use 'bfloat16' "
                "or 'float32'."
            )
        return as_bits(rounded, self.stored_dtype)

    def record(self) -> Record:
        """What the header says of the variable."""
        loaded = self.bits
        if self.stored_dtype != self.dtype:
            values = from_bits(self.stored(), self.stored_dtype)
            loaded = loaded.copy()
            loaded[self._is_stored] = as_bits(values.astype(numpy_dtype(self.dtype)), self.dtype)
        entry = self.entry
        return Record(
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            source=self.source,
            entry=None if entry is None else Entry(entry.position, entry.is_weight, self.settings),
            stored_dtype=self.stored_dtype,
            trainable=self.trainable,
            checksum=checksum(loaded),
        )


def _plan(
    model: keras.Model,
    entries: Mapping[int, MaskEntry],
    settings: Mapping[int, int],
    values: str,
) -> list[_Plan]:
    """One plan for each variable, which stores everything so far."""
    trainable = {id(variable) for variable in model.trainable_variables}
    plans = []
    for variable in variables_of(model):
        dtype, is_parameter = dtype_of(variable), id(variable) in trainable
        stored_dtype = values if dtype == "float32" and is_parameter else dtype
        entry = entries.get(id(variable))
        bits = bits_of(variable)
        number = settings.get(id(variable), 0)
        plans.append(_Plan(variable, entry, number, is_parameter, dtype, stored_dtype, bits))
    return plans


def _state_of(model: keras.Model) -> State:
    """The state of a model's FreezeOptimizer, with the scalar that belongs to its variables."""
    optimizer = freeze_optimizer_of(model)
    state = State(None, compact=False) if optimizer is None else optimizer.state
    if state.decay_scale is None:
        scale = frozen_variables.decay_scale_of(variables_of(model))
        state = dataclasses.replace(state, decay_scale=scale)
    return state


def _entries_of(mask: FreezeMask | None, model: keras.Model) -> dict[int, MaskEntry]:
    """The mask's entries by the ids of their variables."""
    if mask is None:
        return {}
    return {id(v): entry for v in model.variables if (entry := mask.find(v)) is not None}


def _settings_of(model: keras.Model) -> tuple[tuple[Settings, ...], dict[int, int]]:
    """What decided the masks of a model's variables: all settings, and their numbers by id."""
    settings = {
        id(v): decision.settings
        for v in variables_of(model)
        for decision in frozen_variables.decisions_about([v])
        if decision.settings is not None
    }
    distinct = list(dict.fromkeys(settings.values()))
    return tuple(distinct), {key: distinct.index(one) for key, one in settings.items()}


def _give_starts(plans: Sequence[_Plan], state: State) -> None:
    starts = frozen_variables.starts_of([plan.variable for plan in plans])
    for number, plan in enumerate(plans):
        if plan.entry is not None:
            # An optimizer that has read its state, but is not built yet, does not know variables.
            plan.start = starts.get(number) or state.starts.get(plan.entry.position)


def _find_sources(
    plans: Sequence[_Plan],
    decay_scale: Any,
    base: Sequence[Any] | None,
    layer_initializers: Mapping[int, tuple[Any, str]],
    portable_only: bool,
) -> None:
    """Gives each plan the first source that has its values.

    In this order: the base, one constant, the initializer of its layer, and what the optimizer
    remembers, which is still right where the layer has another initializer since it was loaded.
    """
    in_base = {} if base is None else _align([plan.variable for plan in plans], base)
    from_base = [
        # A base is the same whatever the state of its generators.
        Source(BASE, index=in_base[i])
        if i in in_base and not is_random_state(plan.variable)
        else None
        for i, plan in enumerate(plans)
    ]
    _try_sources(plans, from_base, decay_scale, base)
    for plan in plans:
        if plan.source is not None or not plan.sourced.any():
            continue
        first = plan.bits[plan.sourced.argmax()]
        # One value alone is shorter as it is, unless a mask has it: then it may be a pruned weight.
        is_worth_it = np.count_nonzero(plan.sourced) > 1 or (plan.entry is not None and first == 0)
        if is_worth_it and plan.equals(first):
            plan.source = Source(CONSTANT, pattern=int(first))
    seeded = []
    for plan in plans:
        layer, attribute = layer_initializers.get(id(plan.variable), (None, ""))
        seeded.append(None if layer is None else source_of(layer, attribute))
    remembered = [None if plan.start is None else plan.start.source for plan in plans]
    for sources in (seeded, remembered):
        if portable_only:
            sources = [None if s is None or not is_portable(s) else s for s in sources]
        _try_sources(plans, sources, decay_scale, base)


def _try_sources(
    plans: Sequence[_Plan],
    sources: Sequence[Source | None],
    decay_scale: Any,
    base: Sequence[Any] | None,
) -> None:
    tried = [
        (plan, source)
        for plan, source in zip(plans, sources, strict=True)
        if plan.source is None and source is not None and plan.sourced.any()
    ]
    wanted = [(source, plan.shape, plan.dtype) for plan, source in tried]
    for (plan, source), bits in zip(tried, guess(wanted, base), strict=True):
        if bits is None:
            continue
        sourced = plan.sourced
        if decay_scale is not None and plan.entry is not None:
            bits = scaled(bits, plan.dtype, decay_scale)
            drifted = from_bits(plan.bits, plan.dtype)[sourced]
            if np.allclose(drifted, from_bits(bits, plan.dtype)[sourced], _DRIFT, _TINY):
                plan.is_settled = not np.array_equal(plan.bits[sourced], bits[sourced])
                plan.bits = np.where(sourced, bits, plan.bits)
        if plan.equals(bits):
            plan.source = source


def _align(variables: Sequence[Any], base: Sequence[Any]) -> dict[int, int]:
    """Which variable of the base each one is: equal names, shapes and dtypes in equal order."""
    matcher = difflib.SequenceMatcher(None, _labels(variables), _labels(base), autojunk=False)
    return {
        block.a + i: block.b + i
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }


def _labels(variables: Sequence[Any]) -> list[tuple[Any, ...]]:
    # Names of models, and the numbers of automatic names, change when a model is loaded.
    return [(path_of(v).rsplit("/", 1)[-1], tuple(v.shape), dtype_of(v)) for v in variables]


def _check_explained(plans: Sequence[_Plan]) -> None:
    """Refuses frozen weights that nothing gives again."""
    lost = [
        plan
        for plan in plans
        if plan.entry is not None
        and plan.source is None
        and plan.sourced.any()
        # Biases and the like, such as an LSTM's of zeros and ones, are few values: they are stored.
        and kind_of(plan.variable) not in (BIAS, NORMALIZATION)
    ]
    elsewhere = [plan for plan in lost if plan.start is not None and not _gives(plan.start, plan)]
    if elsewhere:
        drawn_with = {plan.start.drawn_with for plan in elsewhere if plan.start is not None}
        raise ValueError(
            f"The frozen weights of {shorten([plan.path for plan in elsewhere])} were drawn by "
            f"initializers of Keras with {', '.join(sorted(drawn_with))}, and {present_versions()} "
            "draws other numbers from their seeds. Save the model where they were drawn; or pass "
            "base=, the model or file that they come from; or include_frozen=True, which puts them "
            "into the file."
        )
    if lost:
        raise ValueError(
            f"The frozen weights of {shorten([plan.path for plan in lost])} come from no seed that "
            "is known, nor from a base, and they are not all equal. Call "
            "keras_freeze.reinitialize(model, seed=...) before you freeze a model, so that one "
            "seed gives them again; or pass base=, the model or file that they come from; or "
            "include_frozen=True, which puts them into the file."
        )


def _gives(start: Start, plan: _Plan) -> bool:
    """Whether what a start was drawn from gives its values here."""
    (bits,) = guess([(start.source, plan.shape, plan.dtype)], None)
    return bits is not None and checksum(bits) == start.checksum


def _warn_if_bound(plans: Sequence[_Plan]) -> None:
    """Warns where the file will only load with this backend and these versions."""
    bound = [
        plan.path for plan in plans if plan.source is not None and not is_portable(plan.source)
    ]
    if bound:
        warnings.warn(
            f"The file has no values of {shorten(bound)} but the seeds from which Keras drew them, "
            f"and another backend or version draws other numbers: it can be loaded with "
            f"{present_versions()} only. For a file that can be loaded everywhere, call "
            "keras_freeze.reinitialize(model, seed=...) before `freeze`, or pass "
            "include_frozen=True.",
            stacklevel=3,
        )


def _check_allowed(config: Any) -> None:
    """Refuses before anything is written what `load` would refuse.

    Raises:
        ValueError: if the configuration names what a file may not.
    """
    try:
        check_configuration(config)
    except FreezeFileError as error:
        raise ValueError(f"A `.freeze` file of this model could not be loaded: {error}.") from error


def _check_loads_again(model: keras.Model, header: Header, include_optimizer: bool) -> None:
    """Builds the model once from its configuration: a file that cannot be loaded is a loss.

    Raises:
        ValueError: if what comes out has other variables, or no optimizer for its state.
    """
    random_state = random.getstate()  # Keras draws default seeds from it
    try:
        with only_announced([(r.shape, r.dtype) for r in header.records]):
            built = build_model(header.model, compile=True)
            set_vocabularies(built, header.vocabularies)
        check_variables(header, variables_of(built))
    except FreezeFileError as error:
        raise ValueError(
            "Keras does not build this model again from its configuration, so that a file of it "
            "could not be loaded. Usual reasons are classes and functions that are not registered "
            "(keras.saving.register_keras_serializable), layers that two submodels share, and a "
            f"change of `trainable` or a `quantize` since `freeze`. {error}"
        ) from error
    finally:
        random.setstate(random_state)
    has_optimizer = bool(optimizer_of(model) or freeze_optimizers_of(model))
    if include_optimizer and has_optimizer and optimizer_of(built) is None:
        raise ValueError(
            "Argument `include_optimizer` must be False for this model: its `compile` is its own, "
            "which `load` cannot call, so that there would be no optimizer to take the state. Let "
            "it override `get_compile_config` and `compile_from_config`, or leave the state out: "
            f"the mask is in the file all the same. Received: model={model!r}"
        )


def _optimizer_state(model: keras.Model, state: State) -> OptimizerState | None:
    slots = [Slot(path_of(v), tuple(v.shape), dtype_of(v)) for v in optimizer_variables(model)]
    return OptimizerState(state.compact, state.by_first_batch, tuple(slots)) if slots else None


def _check_arguments(
    model: Any, path: Any, base: Any, values: Any, include_optimizer: Any, include_frozen: Any
) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Argument `model` must be a keras.Model. Received: model={model!r}")
    check_path(path)
    check_replaceable(path)
    if isinstance(base, (str, os.PathLike)) and is_same_file(base, path):
        raise ValueError(
            "Argument `path` must not be the file of the base, which is needed to load what is "
            f"saved on it. Received: path={os.fspath(path)!r}, base={os.fspath(base)!r}"
        )
    if not isinstance(values, str) or values not in _VALUES:
        raise ValueError(
            f"Argument `values` must be one of {', '.join(map(repr, _VALUES))}. "
            f"Received: values={values!r}"
        )
    for name, value in (
        ("include_optimizer", include_optimizer),
        ("include_frozen", include_frozen),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"Argument `{name}` must be True or False. Received: {name}={value!r}")

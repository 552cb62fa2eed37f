"""Decide which values of a variable a `.freeze` file stores, and where the others come from."""

import difflib
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.bits import as_bits, checksum, from_bits, numpy_dtype
from keras_freeze.grids import DTYPES, OnGrid, default_origin
from keras_freeze.initializers.of_layers import in_words, is_portable, source_of, versions
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.drawn import Draw, draw_of
from keras_freeze.masks.mask import MaskEntry
from keras_freeze.masks.ranked import Ranked, Ranking
from keras_freeze.masks.settings import Settings
from keras_freeze.optimizer.state import State
from keras_freeze.parameters import BIAS, NORMALIZATION, kind_of, path_of, shorten
from keras_freeze.starts import BASE, CONSTANT, SEED, Source, Start
from keras_freeze.storage.header import EntryRecord, VariableRecord
from keras_freeze.storage.keras_model import bits_of, dtype_of, is_random_state, variables_of
from keras_freeze.storage.origin import guess, scaled

# FreezeNet-WD multiplies and rounds its frozen weights in every step; the relative difference to
# one factor times their initial values stays below this.
_DRIFT = 1e-2
_TINY = 1e-30  # below it, they may have become denormal or zero


@dataclass(eq=False)
class SavedVariable:
    """A variable of the model, and what of it the file stores.

    Attributes:
        variable: The variable.
        entry: Its entry in the mask; None for a variable without a mask.
        settings: The index of the settings that decided the entry.
        trainable: Whether it is a parameter.
        dtype, stored_dtype: The dtypes of the variable, and of its values in the file.
        bits: Its values as bit patterns.
        start: What its initial values were drawn from, if the optimizer knows.
        source: Where the values come from that are not stored; None if all are stored.
        on_grid: The stored values as integers; None if they are stored as they are.
        ranked: What its mask follows from; None where the file has to say it.
        is_settled: Whether `bits` differ from the variable's values (FreezeNet-WD).
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
    on_grid: OnGrid | None = None
    ranked: Ranked | None = None
    is_settled: bool = False

    @property
    def path(self) -> str:
        return path_of(self.variable)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape)

    @functools.cached_property
    def sourced(self) -> np.ndarray:
        """Which values can come from a source: all, or those that are frozen."""
        if self.entry is None:
            return np.ones(self.bits.size, bool)
        return ~self.entry.trained.reshape(-1)

    @functools.cached_property
    def draw(self) -> Draw | None:
        """What its mask was drawn by; None for other masks."""
        draw = draw_of(self.variable)
        if draw is None or self.entry is None:
            return None
        # It may have another mask since.
        return draw if np.array_equal(draw.mask(self.shape), self.entry.trained) else None

    @property
    def coded_mask(self) -> Any:
        """Its mask as `encode_masks` takes it."""
        return self.draw or self.ranked or (self.entry and self.entry.trained)

    @property
    def mask_key(self) -> Any:
        """What the header says of its mask if it is not coded entry by entry."""
        if self.draw is not None:
            return self.draw.seed, self.draw.stream
        return None if self.ranked is None else self.ranked.ranking

    def values(self) -> np.ndarray:
        """Return its values as a vector."""
        return from_bits(self.bits, self.dtype)

    def equals(self, bits: Any) -> bool:
        """Return whether the values that can come from a source are these."""
        return bool(((self.bits == bits) | ~self.sourced).all())

    @property
    def is_stored(self) -> np.ndarray:
        """Which values the file stores."""
        return np.ones(self.bits.size, bool) if self.source is None else ~self.sourced

    def stored(self) -> np.ndarray:
        """Return the values that the file stores: integers, or bit patterns of `stored_dtype`."""
        if self.on_grid is not None:
            return self.on_grid.integers
        bits = self.bits[self.is_stored]
        if self.stored_dtype == self.dtype:
            return bits
        exact = from_bits(bits, self.dtype)
        with np.errstate(over="ignore"):
            rounded = exact.astype(numpy_dtype(self.stored_dtype))
        if not np.isfinite(rounded[np.isfinite(exact)]).all():
            raise ValueError(
                f"Argument `values` must be 'bfloat16' or 'float32' for this model: the variable "
                f"{self.path!r} has values up to {np.abs(exact).max():g}. "
                f"Received: values={self.stored_dtype!r}"
            )
        return as_bits(rounded)

    def record(self) -> VariableRecord:
        """Return the record of the variable in the header."""
        loaded, on_grid, rounded = self.bits, self.on_grid, None
        if on_grid is not None:
            rounded = on_grid.bits
        elif self.stored_dtype != self.dtype:
            values = from_bits(self.stored(), self.stored_dtype)
            rounded = as_bits(values.astype(numpy_dtype(self.dtype)))
        if rounded is not None:
            loaded = loaded.copy()
            loaded[self.is_stored] = rounded
        entry = None
        if self.entry is not None:
            position, is_weight = self.entry.position, self.entry.is_weight
            entry = EntryRecord(position, is_weight, self.settings, self.mask_key)
        is_default = on_grid is None or on_grid.origin == default_origin(self.source)
        return VariableRecord(
            path=self.path,
            shape=self.shape,
            dtype=self.dtype,
            source=self.source,
            entry=entry,
            stored_dtype=self.stored_dtype if on_grid is None else self.dtype,
            trainable=self.trainable,
            checksum=checksum(loaded),
            grid=None if on_grid is None else on_grid.grid,
            origin=None if on_grid is None or is_default else on_grid.origin,
        )


def saved_variables(
    model: keras.Model,
    entries: Mapping[int, MaskEntry | None],
    settings: Mapping[int, int],
    values: str,
) -> list[SavedVariable]:
    """Return a `SavedVariable` without a source for each variable of a model.

    `entries` and `settings`, the indices of the settings that decided them, are by the ids of
    variables; `values` is the dtype in which values of float32 parameters are stored.
    """
    trainable = {id(variable) for variable in model.trainable_variables}
    found = []
    for variable in variables_of(model):
        key, dtype = id(variable), dtype_of(variable)
        found.append(
            SavedVariable(
                variable,
                entry=entries.get(key),
                settings=settings.get(key, 0),
                trainable=key in trainable,
                dtype=dtype,
                stored_dtype=values if dtype == "float32" and key in trainable else dtype,
                bits=bits_of(variable),
            )
        )
    return found


def set_starts(variables: Sequence[SavedVariable], state: State) -> None:
    """Set what the initial values of variables with a mask were drawn from."""
    starts = frozen_variables.starts_of([saved.variable for saved in variables])
    for number, saved in enumerate(variables):
        if saved.entry is not None:
            # An optimizer that has loaded its state, but is not built, has no variables yet.
            saved.start = starts.get(number) or state.starts.get(saved.entry.position)


def find_sources(
    variables: Sequence[SavedVariable],
    decay_scale: Any,
    base: Sequence[Any] | None,
    layer_initializers: Mapping[int, tuple[Any, str]],
    portable_only: bool,
) -> None:
    """Set the source of each variable to the first one that provides its values.

    In this order: the base, one constant, the initializer of its layer, and what the optimizer
    remembers, which is still right if the layer has another initializer since it was loaded.

    Args:
        variables: The variables, whose `source` is set.
        decay_scale: The factor of FreezeNet-WD, or None.
        base: The variables of the base, or None.
        layer_initializers: What `initializers_of` returns.
        portable_only: Whether to leave out initializers of Keras, which are not portable.
    """
    from_base: list[Source | None] = [None] * len(variables)
    for i, index in align([saved.variable for saved in variables], base or ()).items():
        if not is_random_state(variables[i].variable):  # those of the base do not matter
            from_base[i] = Source(BASE, index=index)
    _try_sources(variables, from_base, decay_scale, base)
    for saved in variables:
        if saved.source is not None or not saved.sourced.any():
            continue
        first = saved.bits[saved.sourced.argmax()]
        # A single value takes less space when it is stored, unless it may be a pruned weight.
        may_be_pruned = saved.entry is not None and first == 0
        if (np.count_nonzero(saved.sourced) > 1 or may_be_pruned) and saved.equals(first):
            saved.source = Source(CONSTANT, pattern=int(first))
    held = [layer_initializers.get(id(saved.variable)) for saved in variables]
    seeded = [None if one is None else source_of(*one) for one in held]
    remembered = [None if saved.start is None else saved.start.source for saved in variables]
    for sources in (seeded, remembered):
        if portable_only:
            sources = [None if s is None or not is_portable(s) else s for s in sources]
        _try_sources(variables, sources, decay_scale, base)


def _try_sources(
    variables: Sequence[SavedVariable],
    sources: Sequence[Source | None],
    decay_scale: Any,
    base: Sequence[Any] | None,
) -> None:
    tried = [
        (saved, source)
        for saved, source in zip(variables, sources, strict=True)
        if saved.source is None and source is not None and saved.sourced.any()
    ]
    wanted = [(source, saved.shape, saved.dtype) for saved, source in tried]
    for (saved, source), bits in zip(tried, guess(wanted, base), strict=True):
        if bits is None:
            continue
        sourced = saved.sourced
        if decay_scale is not None and saved.entry is not None:
            bits = scaled(bits, saved.dtype, decay_scale)
            drifted = from_bits(saved.bits, saved.dtype)[sourced]
            if np.allclose(drifted, from_bits(bits, saved.dtype)[sourced], _DRIFT, _TINY):
                saved.is_settled = not np.array_equal(saved.bits[sourced], bits[sourced])
                saved.bits = np.where(sourced, bits, saved.bits)
        if saved.equals(bits):
            saved.source = source


def find_rankings(
    variables: Sequence[SavedVariable], settings: Sequence[Settings], base: Sequence[Any] | None
) -> None:
    """Set `ranked` of variables whose mask follows from a seed, or from their source.

    Args:
        variables: The variables, whose sources are known.
        settings: What decided their masks.
        base: The variables of the base, or None.
    """
    for saved in variables:
        if saved.entry is None or not settings:
            continue
        trained = saved.entry.trained
        num_trained = int(np.count_nonzero(trained))
        if num_trained in (0, trained.size):  # which takes two bits
            continue
        decided = settings[saved.settings]
        key, start = None, None
        if decided.criterion == "random":
            key = decided.seed, saved.entry.position
        elif decided.criterion == "magnitude" and saved.source is not None:
            start = _magnitudes_from(saved, base)
        if key is None and start is None:
            continue
        ranked = Ranked(num_trained, Ranking(key))
        if np.array_equal(ranked.mask(saved.shape, start), trained):
            saved.ranked = ranked


def _magnitudes_from(saved: SavedVariable, base: Sequence[Any] | None) -> np.ndarray | None:
    """Return the values of a variable's source; None if they do not order its entries."""
    assert saved.source is not None
    # Where Keras may draw other numbers one day, the mask should not be lost with them.
    is_kept = saved.source.kind in (SEED, BASE)
    (bits,) = guess([(saved.source, saved.shape, saved.dtype)], base) if is_kept else [None]
    if bits is None or saved.dtype not in DTYPES:
        return None
    start = from_bits(bits, saved.dtype)
    with np.errstate(over="ignore"):
        return start if np.isfinite(start.astype(np.float32)).all() else None


def align(variables: Sequence[Any], base: Sequence[Any]) -> dict[int, int]:
    """Return which variable of the base each one is: equal names, shapes and dtypes in order."""
    matcher = difflib.SequenceMatcher(None, _labels(variables), _labels(base), autojunk=False)
    return {
        block.a + i: block.b + i
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }


def _labels(variables: Sequence[Any]) -> list[tuple[Any, ...]]:
    # Names of models and the numbers of automatic names change when a model is loaded.
    return [(path_of(v).rsplit("/", 1)[-1], tuple(v.shape), dtype_of(v)) for v in variables]


def unexplained(variables: Sequence[SavedVariable]) -> list[SavedVariable]:
    """Return those with frozen weights that no source provides."""
    return [
        saved
        for saved in variables
        if saved.entry is not None
        and saved.source is None
        and saved.sourced.any()
        # Biases, such as those of an LSTM with zeros and ones, are few values: they are stored.
        and kind_of(saved.variable) not in (BIAS, NORMALIZATION)
    ]


def check_explained(variables: Sequence[SavedVariable]) -> None:
    """Raise ValueError if there are frozen weights that no source provides."""
    lost = unexplained(variables)
    elsewhere = [saved for saved in lost if saved.start and not _gives(saved.start, saved)]
    if elsewhere:
        drawn_with = sorted({saved.start.drawn_with for saved in elsewhere if saved.start})
        raise ValueError(
            f"The frozen weights of {paths_of(elsewhere)} were drawn by initializers of Keras with "
            f"{', '.join(drawn_with)}, and {in_words(versions())} draws other numbers from the "
            "same seeds. Save the model where they were drawn; or pass the model or file that they "
            "come from as `base`; or pass `include_frozen=True` to put them into the file."
        )
    if lost:
        raise ValueError(
            f"The frozen weights of {paths_of(lost)} come neither from a known seed nor from a "
            "base, and they are not all equal. Call `keras_freeze.reinitialize(model, seed=...)` "
            "before you freeze a model, so that a seed is enough to draw them again; or pass the "
            "model or file that they come from as `base`; or pass `include_frozen=True` to put "
            "them into the file."
        )


def _gives(start: Start, saved: SavedVariable) -> bool:
    """Return whether the initial values of a variable can be drawn on this machine."""
    (bits,) = guess([(start.source, saved.shape, saved.dtype)], None)
    return bits is not None and checksum(bits) == start.checksum


def warn_if_not_portable(variables: Sequence[SavedVariable]) -> None:
    """Warn if the file can be loaded with this backend and these versions only."""
    bound = [saved for saved in variables if saved.source and not is_portable(saved.source)]
    if bound:
        warnings.warn(
            f"The file stores the seeds of Keras initializers instead of the values of "
            f"{paths_of(bound)}. Other backends and versions draw other numbers from them: the "
            f"file can be loaded with {in_words(versions())} only. For a file that can be loaded "
            "everywhere, call `keras_freeze.reinitialize(model, seed=...)` before `freeze`, or "
            "pass `include_frozen=True`.",
            stacklevel=3,
        )


def paths_of(variables: Sequence[SavedVariable]) -> str:
    return shorten([saved.path for saved in variables])

"""A variable of a model that is saved, and what of it the file stores."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.bits import checksum, from_bits, rounded_to
from keras_freeze.grids import OnGrid, default_origin
from keras_freeze.masks.drawn import Draw, draw_of
from keras_freeze.masks.mask import MaskEntry
from keras_freeze.masks.ranked import Ranked
from keras_freeze.parameters import path_of, shorten
from keras_freeze.starts import Source, Start
from keras_freeze.storage.coding.integers import Integers
from keras_freeze.storage.coding.masks import Key, tile_of
from keras_freeze.storage.coding.tiles import Tile
from keras_freeze.storage.keras_model import bits_of, dtype_of, variables_of
from keras_freeze.storage.records import EntryRecord, VariableRecord


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
        changed: Which values the file stores beside a base that has the others; None where its mask
            says so.
        on_grid: The stored values as integers; None if they are stored as they are.
        differences: How many representable numbers the stored values are above those of the base;
            None if they are stored otherwise.
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
    changed: np.ndarray | None = None
    on_grid: OnGrid | None = None
    differences: Integers | None = None
    ranked: Ranked | None = None
    is_settled: bool = False

    @property
    def path(self) -> str:
        return path_of(self.variable)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape)

    @property
    def sourced(self) -> np.ndarray:
        """Which values can come from a source: all, or those that are frozen."""
        return self._frozen if self.changed is None else ~self.changed

    @functools.cached_property
    def _frozen(self) -> np.ndarray:
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

    @functools.cached_property
    def _tile(self) -> Tile | None:
        return None if self.entry is None else tile_of(self.entry.trained)

    @property
    def coded_mask(self) -> Any:
        """Its mask as `encode_masks` takes it."""
        computed = self.draw or self.ranked
        if computed is not None or self.entry is None:
            return computed
        trained = self.entry.trained
        return trained if self._tile is None else self._tile.tiles(trained)

    @property
    def mask_key(self) -> Key:
        """What the header says of its mask if it is not coded entry by entry."""
        if self.draw is not None:
            return self.draw.seed, self.draw.stream
        return self._tile if self.ranked is None else self.ranked.ranking

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

    def stored(self) -> np.ndarray | Integers:
        """Return the values that the file stores: integers, or bit patterns of `stored_dtype`."""
        if self.on_grid is not None:
            return self.on_grid.integers
        return self.rounded() if self.differences is None else self.differences

    def rounded(self) -> np.ndarray:
        """Return the values that the file stores as bit patterns of `stored_dtype`."""
        bits = self.bits[self.is_stored]
        if self.stored_dtype == self.dtype:
            return bits
        rounded = rounded_to(bits, self.dtype, self.stored_dtype)
        if self.stored_dtype == "float16":
            check_not_too_large(bits, rounded, self.path)
        return rounded

    def loaded_bits(self) -> np.ndarray:
        """Return all values as they are once the file is loaded, as bit patterns."""
        if self.on_grid is not None:
            stored = self.on_grid.bits
        elif self.stored_dtype != self.dtype:
            stored = rounded_to(self.rounded(), self.stored_dtype, self.dtype)
        else:
            return self.bits
        loaded = self.bits.copy()
        loaded[self.is_stored] = stored
        return loaded

    def record(self) -> VariableRecord:
        """Return the record of the variable in the header."""
        on_grid, entry = self.on_grid, None
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
            checksum=checksum(self.loaded_bits()),
            is_changed=self.changed is not None,
            has_differences=self.differences is not None,
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


def check_not_too_large(bits: np.ndarray, rounded: np.ndarray, path: str) -> None:
    """Refuse float32 values that float16 does not have; both are bit patterns."""
    exact = from_bits(bits, "float32")
    if not np.isfinite(from_bits(rounded, "float16")[np.isfinite(exact)]).all():
        raise ValueError(
            f"Argument `values` must be 'bfloat16' or 'float32' for this model: the variable "
            f"{path!r} has values up to {np.abs(exact).max():g}. Received: values='float16'"
        )


def paths_of(variables: Sequence[SavedVariable]) -> str:
    return shorten([saved.path for saved in variables])

"""Decide which values of a variable a `.freeze` file stores, and where the others come from."""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_freeze._utils.bits import as_bits, checksum, from_bits
from keras_freeze.grids import DTYPES
from keras_freeze.initializers.of_layers import in_words, is_portable, source_of, versions
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.ranked import Ranked, Ranking
from keras_freeze.masks.settings import Settings
from keras_freeze.optimizer.state import State
from keras_freeze.parameters import BIAS, NORMALIZATION, kind_of, path_of
from keras_freeze.starts import BASE, CONSTANT, SEED, Source, Start
from keras_freeze.storage.keras_model import dtype_of, is_random_state
from keras_freeze.storage.origin import guess, scaled
from keras_freeze.storage.saved_variable import SavedVariable, paths_of

# FreezeNet-WD multiplies and rounds its frozen weights in every step; the relative difference to
# one factor times their initial values stays below this.
_DRIFT = 1e-2
_TINY = 1e-30  # below it, they may have become denormal or zero


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


def find_starts_of_whole(
    variables: Sequence[SavedVariable],
    state: State,
    base: Sequence[Any] | None,
    layer_initializers: Mapping[int, tuple[Any, str]],
) -> None:
    """Set the source of weights that are trained whole to what they were before training.

    Nothing is taken from it. `load` then knows their values before training, as it does of others,
    which callbacks need that freeze them again.

    Args:
        variables: The variables, whose other sources are known.
        state: The state of the model's FreezeOptimizer.
        base, layer_initializers: As of `find_sources`.
    """
    aligned = align([saved.variable for saved in variables], base or ())
    for number, saved in enumerate(variables):
        if saved.entry is None or not saved.entry.is_weight or saved.sourced.any():
            continue
        known = state.trained_starts.values.get(saved.entry.position)
        held = layer_initializers.get(id(saved.variable))
        candidates = [
            Source(BASE, index=aligned[number]) if number in aligned else None,
            None if saved.start is None else saved.start.source,
            # Without values to compare with, an initializer may not be what it started from.
            None if held is None or known is None else source_of(*held),
        ]
        for source in candidates:
            if source is None or not (source.kind == BASE or is_portable(source)):
                continue
            (bits,) = guess([(source, saved.shape, saved.dtype)], base)
            if bits is not None and (known is None or np.array_equal(bits, as_bits(known))):
                saved.source = source
                break


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

"""A second reader of the `.freeze` file, written from docs/file_format.md alone.

It shows that the page is enough to read the format, and is the oracle of test_format.py. Only the
standard library, NumPy, and ml_dtypes for the dtypes that NumPy lacks; clear rather than fast.
"""

import bisect
import collections
import hashlib
import itertools
import json
import math
import pathlib
import zlib
from typing import NamedTuple

import ml_dtypes  # noqa: F401 (NumPy then knows bfloat16 and float8 by name)
import numpy as np

FOLDER = pathlib.Path(__file__).parents[2] / "keras_freeze/storage"
DICTIONARIES = {1: FOLDER / "header_dictionary.txt", 2: FOLDER / "header_dictionary_2.txt"}
GENERATOR = "philox4x64-sign-fraction52-v1"
SOURCES = ("source", "origin")
TOTAL = 2**24  # the probabilities of a model sum up to it


class Contents(NamedTuple):
    """What a file holds; `variables` and `optimizer` are lists of (path, array)."""

    header: dict
    variables: list
    masks: dict  # of the variables that have one, by their place in `variables`
    optimizer: list
    reads: collections.Counter  # how often each mode of masks and each way of reading flags occurs


def read(path, base=None):
    """Read a file; `base` is the list of (path, array) of the network that the file builds on."""
    header, mask, exponents, mantissas = read_layout(pathlib.Path(path).read_bytes())
    _require("content" not in header, "the file holds no model")
    described = [entry.get(name, [None]) for entry in header["variables"] for name in SOURCES]
    if any(kind == "seed" for kind, *_ in described):
        _require(header["generator"] == GENERATOR, "unknown generator")
    if "base" in header:
        _require(base is not None, "the file needs its base")
        _require(fingerprint(base) == header["base"], "this is another base")
    masks, changed, reads = read_masks(header["variables"], mask, base)
    optimizer = header.get("optimizer", {"variables": []})["variables"]
    places = {**masks, **changed}  # of the values that are in the file
    kinds = [_stored(entry, places.get(i)) for i, entry in enumerate(header["variables"])]
    kinds += [(math.prod(shape), dtype) for _, shape, dtype in optimizer]
    stored = read_values(kinds, exponents, mantissas)
    variables = [
        (entry["path"], put_together(entry, stored[i], places.get(i), base, header))
        for i, entry in enumerate(header["variables"])
    ]
    state = [
        (path, values.reshape(shape))
        for (path, shape, _), values in zip(optimizer, stored[len(variables) :], strict=True)
    ]
    return Contents(header, variables, masks, state, reads)


def read_mask_only(path):
    """Read a file that holds a mask only: a list of (position, path, array, is_weight)."""
    header, mask, exponents, mantissas = read_layout(pathlib.Path(path).read_bytes())
    _require(header["content"] == "mask", "the file holds a model")
    _require(not exponents and not mantissas, "bytes are left over")
    masks, _, _ = read_masks(header["variables"], mask)
    return [
        (entry["mask"][0], entry["path"], masks[i], entry["mask"][1] == 1)
        for i, entry in enumerate(header["variables"])
    ]


def read_stream(names, base):
    """What a follower of these files has: the first is complete, each next one an update."""
    contents = read(names[0], base)
    name, number, state, runs = contents.header["stream"]
    parts = []
    for place, entry in enumerate(contents.header["variables"]):
        if not entry["path"].endswith("seed_generator_state"):
            parts.append((place, contents.masks.get(place, np.ones(entry["shape"], bool))))
    kinds = [(dtype, step) for count, dtype, step in runs for _ in range(count)]
    values = [values.copy() for _, values in contents.variables]
    _require(_state(values, parts) == state, "another state")
    for path in names[1:]:
        header, mask, exponents, mantissas = read_layout(pathlib.Path(path).read_bytes())
        _require(header["content"] == "update", "not an update")
        stream, following, before, after, modes = header["update"]
        _require((stream, following, before) == (name, number + 1, state), "another place")
        masks = Stream(mask) if mask else None
        held = []
        for mode, (place, chosen) in zip(modes, parts, strict=True):
            if mode in "ce":
                is_part = place in contents.masks
                shape = (int(chosen.sum()),) if is_part else chosen.shape
                changed = np.zeros(chosen.shape, bool)
                changed[chosen] = read_mask(masks, shape).reshape(-1)
                chosen = changed
            held.append((place, chosen))
        counts = [
            (int(chosen.sum()), kind[0] if mode in "vc" else None)
            for mode, (_, chosen), kind in zip(modes, held, kinds, strict=True)
            if mode != "s"
        ]
        stored = iter(read_values(counts, exponents, mantissas))
        for mode, (place, chosen), (dtype, step) in zip(modes, held, kinds, strict=True):
            if mode != "s":
                start = base[place][1][chosen]
                moved = _moved(mode, next(stored), values[place][chosen], start, dtype, step)
                values[place][chosen] = moved.astype(values[place].dtype)
        number, state = following, after
        _require(_state(values, parts) == state, "another state")
    return [(path, value) for (path, _), value in zip(contents.variables, values, strict=True)]


def _moved(mode, stored, before, start, dtype, step):
    if mode in "vc":
        return stored
    if mode in "de":
        return above(before, stored, {"stored_dtype": dtype})
    if mode == "t":
        stored = stored + np.rint((before.astype("float64") - start.astype("float64")) / step)
    return on_grid(start, stored, step)


def _state(values, parts):
    content = b"".join(values[place][chosen].tobytes() for place, chosen in parts)
    return hashlib.sha256(content).hexdigest()[:32]


def _require(condition, message):
    if not condition:
        raise ValueError(message)


# Layout and header


def read_layout(data):
    """The header and the three other sections, once every length and checksum is right."""
    _require(data[:8] == b"\x89FREEZE\n", "not a .freeze file")
    _require(_integer(data[8:12]) in (1, 2), "another version")
    _require(_integer(data[64:68]) == zlib.crc32(data[:64]), "damaged")
    lengths = [_integer(data[start : start + 8]) for start in range(16, 48, 8)]
    checksums = [_integer(data[start : start + 4]) for start in range(48, 64, 4)]
    _require(len(data) == 68 + sum(lengths) + 32, "damaged")
    _require(hashlib.sha256(data[:-32]).digest() == data[-32:], "damaged")
    ends = list(itertools.accumulate(lengths, initial=68))
    sections = [data[start:end] for start, end in itertools.pairwise(ends)]
    _require([zlib.crc32(section) for section in sections] == checksums, "damaged")
    version, length = _integer(data[8:12]), _integer(data[12:16])
    return read_header(sections[0], length, version), *sections[1:]


def read_header(section, length, version):
    _require(length <= 2**28, "damaged")
    stream = zlib.decompressobj(zdict=DICTIONARIES[version].read_bytes())
    text = stream.decompress(section, length + 1)
    _require(len(text) == length and stream.eof and not stream.unused_data, "damaged")
    return json.loads(text.decode("utf-8"))


def vocabularies(header):
    """(tokens, weights or None) of each layer that has a vocabulary of its own, else None."""
    return [
        None if described is None else (described["tokens"], described.get("idf_weights"))
        for described in header.get("vocabularies", [])
    ]


def settings_of(header):
    """What decided the masks, in the order of the page; the structure is None if there is none."""
    defaults = ["global", None]
    return [(*one, *defaults[len(one) - 4 :]) for one in header.get("settings", [])]


def _integer(data):
    return int.from_bytes(data, "little")


# Entropy coding


class Stream:
    """A section that is a stream of the range coder."""

    def __init__(self, section):
        _require(len(section) % 4 == 0, "damaged")
        words = [_integer(section[i : i + 4]) for i in range(0, len(section), 4)]
        self.words = itertools.chain(words, itertools.repeat(0))
        self.lower, self.range = 0, 2**64 - 1
        self.point = next(self.words) << 32 | next(self.words)
        self.reads = collections.Counter()

    def symbol(self, cumulative):
        """One symbol of the model with the cumulative probabilities c[0], c[1], ..., 2^24."""
        scale = self.range >> 24
        quantile = (self.point - self.lower) % 2**64 // scale
        _require(quantile < TOTAL, "damaged")
        symbol = bisect.bisect_right(cumulative, quantile) - 1
        self.lower = (self.lower + scale * cumulative[symbol]) % 2**64
        self.range = scale * (cumulative[symbol + 1] - cumulative[symbol])
        if self.range < 2**32:
            self.lower = (self.lower << 32) % 2**64
            self.range <<= 32
            self.point = (self.point << 32) % 2**64 + next(self.words)
        return symbol

    def bits(self, width):
        value = 0
        for _ in range(width):
            value = 2 * value + self.symbol([0, 2**23, TOTAL])
        return value

    def number(self):
        n = 0
        while not self.bits(1):
            n += 1
            _require(n < 64, "damaged")  # not on the page: keeps a damaged stream from going on
        return 2**n + self.bits(n) - 1

    def flags(self, count, p):
        flag = [0, TOTAL - p, TOTAL]
        if p >= 2**18:
            self.reads["flags one by one"] += count
            return [self.symbol(flag) for _ in range(count)]
        self.reads["flags in groups"] += count // 64
        powers = [TOTAL]
        for _ in range(64):
            powers.append(powers[-1] * (TOTAL - p) >> 24)
        place = frequency_model([max(power * p >> 24, 1) for power in powers[:64]])
        none = min(max(powers[64], 1), TOTAL - 1)
        hits = [self.symbol([0, none, TOTAL]) for _ in range(count // 64)]
        groups = [[0] * 64 for _ in hits]
        hit_groups = [group for group, hit in zip(groups, hits, strict=True) if hit]
        firsts = [self.symbol(place) for _ in hit_groups]
        for group, first in zip(hit_groups, firsts, strict=True):
            group[first:] = [1, *(self.symbol(flag) for _ in range(first + 1, 64))]
        rest = [self.symbol(flag) for _ in range(count % 64)]
        return [*itertools.chain(*groups), *rest]

    def histogram(self):
        """The bytes that occur and, unless there is one only, the model of their frequencies."""
        n = self.number() + 1
        occurring = [self.bits(8)]
        while len(occurring) < n:
            occurring.append(occurring[-1] + 1 + self.number())
        _require(occurring[-1] < 256, "damaged")
        model = frequency_model([2 ** self.bits(4) for _ in occurring]) if n > 1 else None
        return occurring, model

    def symbols(self, count, histogram):
        occurring, model = histogram
        if model is None:
            return occurring * count
        return [occurring[self.symbol(model)] for _ in range(count)]

    def integers(self, count):
        if not count:
            return []
        low_bits, decay = self.bits(5), self.bits(5)
        falling = [max(2**16 * decay**k // 32**k, 1) for k in range(21)]
        frequencies = [*reversed(falling[1:]), *falling, falling[20]]
        symbols = []
        while len(symbols) < count:
            model = frequency_model(frequencies)
            piece = min(max(8, len(symbols) // 8), count - len(symbols))
            new = [self.symbol(model) for _ in range(piece)]
            for symbol in new:
                frequencies[symbol] += 2**13
            symbols += new
        integers = [symbol - 20 for symbol in symbols]
        for place, symbol in enumerate(symbols):
            if symbol == 41:
                size = 21 + self.number()
                integers[place] = -size if self.bits(1) else size
        integers = [integer << low_bits for integer in integers]
        for place in range(low_bits):
            flags = self.flags(count, 2**23)
            integers = [i + (flag << place) for i, flag in zip(integers, flags, strict=True)]
        _require(max(map(abs, integers)) < 2**31, "damaged")
        return integers


def frequency_model(frequencies):
    """The cumulative probabilities of a model with these frequencies."""
    n, total = len(frequencies), sum(frequencies)
    sums = itertools.accumulate(frequencies, initial=0)
    return [c * (TOTAL - n) // total + i for i, c in enumerate(sums)]


# Mask


def read_masks(entries, section, base=None):
    stream, masks = Stream(section), {}
    for i, entry in enumerate(entries):
        if "mask" not in entry:
            continue
        if "drawn" in entry:
            masks[i] = read_drawn(stream, entry["shape"], *entry["drawn"])
        elif "ranked" in entry:
            masks[i] = read_ranked(stream, entry, base)
        elif len(entry["mask"]) > 3:
            masks[i] = read_tiles(stream, entry["shape"], *entry["mask"][3])
        else:
            masks[i] = read_mask(stream, entry["shape"])
    changed = {
        i: read_mask(stream, entry["shape"])
        for i, entry in enumerate(entries)
        if entry.get("changed")
    }
    return masks, changed, +stream.reads  # without what occurred no times


def read_ranked(stream, entry, base):
    stream.reads["ranked"] += 1
    k, size = stream.number(), math.prod(entry["shape"])
    if entry["ranked"]:
        scores = [word >> 40 for word in philox4x64(*entry["ranked"], size)]
    else:
        start = from_source(entry, np.dtype(entry.get("dtype", "float32")), base)
        scores = np.abs(start.astype("float32")).reshape(-1).tolist()
    largest = sorted(range(size), key=lambda j: (-scores[j], j))[:k]
    return np.isin(np.arange(size), largest).reshape(entry["shape"])


def read_tiles(stream, shape, height, width):
    stream.reads["tiles"] += 1
    _require(width * height > 1 and len(shape) > 0, "damaged")
    _require(1 <= height <= [1, 1, *shape][-2] and 1 <= width <= shape[-1], "damaged")
    tile = [1] * (len(shape) - 2) + [height, width][-len(shape) :]
    tiles = read_mask(stream, [-(-n // step) for n, step in zip(shape, tile, strict=True)])
    places = [np.arange(n) // step for n, step in zip(shape, tile, strict=True)]
    return tiles[np.ix_(*places)]


def axes_of(shape):
    *before, last_but_one, last = [1, 1, *shape]
    return {0: (1,), 1: (last,), 2: (last_but_one, last)}.get(
        len(shape), (math.prod(before), last_but_one, last)
    )


def read_mask(stream, shape):
    axes = axes_of(shape)
    size = math.prod(axes)
    mode = stream.bits(2)
    stream.reads[f"mode {mode}"] += 1
    if mode < 2:
        return np.full(shape, mode == 1)
    if mode == 2:
        k = stream.number() + 1
        flags = stream.flags(size, min(max(2**24 * k // size, 1), TOTAL - 1))
        return np.array(flags, bool).reshape(shape)
    return read_levels(stream, axes).reshape(shape)


def read_drawn(stream, shape, seed, key):
    stream.reads["drawn"] += 1
    k = stream.number() + 1
    lines = read_lines(stream, axes_of(shape))
    words = philox4x64(seed, key, math.prod(shape))
    times = []
    for place, word in zip(itertools.product(*lines), words, strict=True):
        if 0 in place:
            continue
        level = int(min(max(sum(int(s) - 97 for s in place), -96), 96))
        rate = -natural_log((TOTAL - level_rate(level)) / TOTAL)
        f = ((word >> 11) % 2**52 + 0.5) * 2.0**-52
        times.append((-natural_log(f) / rate, len(times)))
    _require(k <= len(times), "damaged")
    earliest = {number for _, number in sorted(times)[:k]}
    numbers = itertools.count()
    mask = [0 not in place and next(numbers) in earliest for place in itertools.product(*lines)]
    return np.reshape(mask, shape)


def read_lines(stream, axes):
    lines = [np.array(stream.symbols(n, stream.histogram())) for n in axes]
    _require(all(symbols.max() <= 193 for symbols in lines), "damaged")
    return lines


def read_levels(stream, axes):
    lines = read_lines(stream, axes)
    mask = np.zeros(axes, bool)
    for block in itertools.product(*([s for s in np.unique(ls) if s > 0] for ls in lines)):
        level = int(min(max(sum(int(s) - 97 for s in block), -96), 96))
        entries = np.ix_(*(np.flatnonzero(ls == s) for ls, s in zip(lines, block, strict=True)))
        part = mask[entries]
        mask[entries] = np.reshape(stream.flags(part.size, level_rate(level)), part.shape)
    return mask


def level_rate(level):
    ratio = [4294967296, 5107605667, 6074001000, 7223245222][(level + 96) % 4]
    odds = ratio * 2 ** ((level + 96) // 4)
    return min(max(2**24 * odds // (odds + 2**56), 1), TOTAL - 1)


# Values


def _stored(entry, mask):
    """How many values of a variable are in the file, and their dtype; None for integers."""
    dtype = None
    if "grid" not in entry and not entry.get("differences"):
        dtype = entry.get("stored_dtype", entry.get("dtype", "float32"))
    if "source" not in entry:
        return math.prod(entry["shape"]), dtype
    return (0 if mask is None else int(mask.sum())), dtype


def read_values(kinds, exponents, mantissas):
    """The values in the file for each (count, dtype)."""
    stream, histograms, position, values = Stream(exponents), [], 0, []
    for count, dtype in kinds:
        if dtype is None:
            values.append(np.array(stream.integers(count), np.int64))
            continue
        size = np.dtype(dtype).itemsize
        tops = []
        if count:
            g = stream.number()
            if g == len(histograms):
                histograms.append(stream.histogram())
            tops = stream.symbols(count, histograms[g])
        bits = []
        for top in tops:
            rest = mantissas[position : position + size - 1]
            _require(len(rest) == size - 1, "damaged")
            position += size - 1
            rotated = _integer(rest) | top << 8 * (size - 1)
            bits.append(rotated >> 1 | (rotated & 1) << (8 * size - 1))
        values.append(np.array(bits, f"<u{size}").view(dtype))
    _require(position == len(mantissas), "damaged")
    return values


# Putting it together


def put_together(entry, stored, mask, base, header):
    dtype = np.dtype(entry.get("dtype", "float32"))
    if "grid" in entry:
        chosen = mask if "source" in entry else np.ones(entry["shape"], bool)
        stored = on_grid(starts(entry, dtype, base)[chosen], stored, entry["grid"])
    if entry.get("differences"):
        stored = above(from_source(entry, dtype, base)[mask], stored, entry)
    stored = stored.astype(dtype)
    if "source" not in entry:
        values = stored.reshape(entry["shape"])
    else:
        values = from_source(entry, dtype, base)
        if mask is not None:
            is_scaled = entry["source"][0] != "constant" and not entry.get("changed")
            if "decay_scale" in header and is_scaled:
                values *= dtype.type(header["decay_scale"])
            values[mask] = stored
    _require(zlib.crc32(values.tobytes()) == entry["crc32"], f"{entry['path']} differs")
    return values


def starts(entry, dtype, base):
    """What the differences on a grid are added to."""
    described = entry.get("origin", entry.get("source", ["constant", 0]))
    return from_source({**entry, "source": described}, dtype, base)


def above(start, integers, entry):
    """The values so many representable numbers above their starts."""
    dtype = np.dtype(entry.get("stored_dtype", start.dtype.name))
    bits = 8 * dtype.itemsize
    half, whole = 2 ** (bits - 1), 2**bits
    patterns = []
    for u, d in zip(start.astype(dtype).view(f"<u{bits // 8}").tolist(), integers, strict=True):
        rank = u + half if u < half else whole - 1 - u
        rank = (rank + int(d)) % whole
        patterns.append(rank - half if rank >= half else whole - 1 - rank)
    return np.array(patterns, f"<u{bits // 8}").view(dtype)


def on_grid(start, integers, step):
    values = start.astype(np.float64) + integers * step
    return values if start.dtype == np.float64 else values.astype(np.float32)


def from_source(entry, dtype, base):
    shape = tuple(entry["shape"])
    kind, *arguments = entry["source"]
    if kind == "constant":
        return np.full(shape, arguments[0], f"<u{dtype.itemsize}").view(dtype)
    if kind == "seed":
        return drawn(shape, *arguments).astype(dtype)
    if kind == "base":
        values = base[arguments[0]][1]
        _require(values.shape == shape and values.dtype == dtype, "this is another base")
        return values.copy()
    raise NotImplementedError(f"{entry['path']}: values of the source {kind} are not portable")


def fingerprint(variables):
    digest = hashlib.sha256()
    for path, values in variables:
        if not path.endswith("seed_generator_state"):
            digest.update(f"{values.shape} {values.dtype.name}\n".encode())
            digest.update(values.tobytes())
    return digest.hexdigest()


# Seeds


def philox4x64(seed, stream, count):
    """The first `count` outputs of Philox4x64-10 with the key (seed, stream)."""
    outputs = []
    for block in range(1, -(-count // 4) + 1):
        x0, x1, x2, x3 = block, 0, 0, 0
        key0, key1 = seed, stream
        for _ in range(10):
            high0, low0 = divmod(0xD2E7470EE14C6C93 * x0, 2**64)
            high1, low1 = divmod(0xCA5A826395121157 * x2, 2**64)
            x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
            key0 = (key0 + 0x9E3779B97F4A7C15) % 2**64
            key1 = (key1 + 0xBB67AE8584CAA73B) % 2**64
        outputs += [x0, x1, x2, x3]
    return outputs[:count]


def drawn(shape, distribution, seed, stream, parameters=None):
    """The float32 values of a variable that comes from a seed."""
    if distribution == "variance_scaling":
        distribution, parameters = variance_scaling(shape, **parameters)
    numbers = sign_and_fractions(seed, stream, math.prod(shape))
    if distribution == "orthogonal":
        return orthogonal(shape, numbers, **parameters)
    if parameters is not None:
        values = with_parameters(distribution, numbers, **parameters)
    else:
        values = without_parameters(shape, distribution, numbers)
    return np.array(values, np.float64).astype(np.float32).reshape(shape)


def sign_and_fractions(seed, stream, count):
    return [
        (-1.0 if word >> 63 else 1.0, ((word >> 11) % 2**52 + 0.5) * 2.0**-52)
        for word in philox4x64(seed, stream, count)
    ]


def without_parameters(shape, distribution, numbers):
    fan_in, fan_out = fans(shape)
    known = {
        "xavier_normal": (lambda f: upper_quantile(f * 0.5), 2 / (fan_in + fan_out)),
        "kaiming_uniform": (lambda f: f, 6 / fan_in),
        "pm_sigma": (lambda f: 1.0, 2 / (fan_in + fan_out)),
        "standard_normal": (lambda f: upper_quantile(f * 0.5), 1),
    }
    _require(distribution in known, f"unknown distribution {distribution}")
    magnitude, variance = known[distribution]
    scale = math.sqrt(variance)
    return [(sign * magnitude(f)) * scale for sign, f in numbers]


def with_parameters(distribution, numbers, **parameters):
    if distribution == "uniform":
        low, high = parameters["minval"], parameters["maxval"]
        middle, half = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
        lowest = float32_at_least(min(low, high))
        highest = 0.0 - float32_above(-max(low, high))
        values = [(sign * f) * half + middle for sign, f in numbers]
        return [max(min(value, highest), lowest) for value in values]
    mean, stddev = parameters["mean"], parameters["stddev"]
    if distribution == "normal":
        return [sign * upper_quantile(f * 0.5) * stddev + mean for sign, f in numbers]
    _require(distribution == "truncated_normal", f"unknown distribution {distribution}")
    t = 0.022750131948179208
    lowest = float32_at_least(mean - 2 * abs(stddev))
    highest = 0.0 - float32_at_least(-(mean + 2 * abs(stddev)))
    values = [sign * upper_quantile(t + f * (0.5 - t)) * stddev + mean for sign, f in numbers]
    return [max(min(value, highest), lowest) for value in values]


def float32_at_least(bound):
    candidates = np.nextafter(np.float32(bound), np.float32([-np.inf, np.inf]))
    return min(float(c) for c in [*candidates, np.float32(bound)] if float(c) >= bound) + 0.0


def float32_above(bound):
    candidates = np.nextafter(np.float32(bound), np.float32([-np.inf, np.inf]))
    return min(float(c) for c in [*candidates, np.float32(bound)] if float(c) > bound) + 0.0


def variance_scaling(shape, scale, mode, distribution, input_axes=None, output_axes=None):
    fan_in, fan_out = fans(shape)
    if input_axes is not None and output_axes is not None:
        fan_in = math.prod(shape[axis] for axis in input_axes)
        fan_out = math.prod(shape[axis] for axis in output_axes)
    n = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
    v = scale / max(1, n)
    if distribution == "uniform":
        return "uniform", {"minval": -math.sqrt(3 * v), "maxval": math.sqrt(3 * v)}
    if distribution == "truncated_normal":
        return distribution, {"mean": 0.0, "stddev": math.sqrt(v) / 0.87962566103423978}
    _require(distribution == "untruncated_normal", f"unknown distribution {distribution}")
    return "normal", {"mean": 0.0, "stddev": math.sqrt(v)}


def orthogonal(shape, numbers, gain):
    """With Python's integers and floats, one at a time."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    m, n = max(rows, columns), min(rows, columns)
    a = np.array([sign * upper_quantile(f * 0.5) for sign, f in numbers]).reshape(m, n).tolist()
    signs = [-1 if a[k][k] < 0 else 1 for k in range(n)]
    v = [[round(a[i][k] * 2**16) if i >= k else 0 for k in range(n)] for i in range(m)]
    lengths = [round(math.sqrt(sum(v[i][k] ** 2 for i in range(m)))) for k in range(n)]
    for k in range(n):
        v[k][k] += signs[k] * max(lengths[k], 1)
    u = [[float(sum(v[i][j] * v[i][k] for i in range(m))) for k in range(n)] for j in range(n)]
    x = [[float(v[j][i]) for j in range(n)] for i in range(n)]
    for k in reversed(range(n)):
        for j in range(k, n):
            x[k][j] /= u[k][k] * 0.5
            for i in range(k):
                x[i][j] -= u[i][k] * x[k][j]
    b = min(21, 31 - n.bit_length())
    e = math.frexp(max(abs(value) for row in x for value in row))[1]
    high = [[round(value * 2.0 ** (b - e)) for value in row] for row in x]
    low = [
        [round((x[i][j] * 2.0 ** (b - e) - high[i][j]) * 2**b) for j in range(n)] for i in range(n)
    ]
    q = np.empty((m, n))
    for i in range(m):
        for k in range(n):
            sums = [sum(v[i][j] * part[j][k] for j in range(n)) for part in (high, low)]
            p = sums[0] * 2.0 ** (e - b) + sums[1] * 2.0 ** (e - 2 * b)
            q[i, k] = ((1.0 if i == k else 0.0) - p) * -signs[k]
    q = q if rows >= columns else q.T
    return (q * gain).astype(np.float32).reshape(shape)


def fans(shape):
    if len(shape) < 2:
        return (shape * 2) if shape else (1, 1)
    *before, last_but_one, last = shape
    return last_but_one * math.prod(before), last * math.prod(before)


def upper_quantile(p):
    """About the z that a standard normal variable exceeds with probability p."""
    if p >= 0.125:
        q = 0.5 - p
        return q * poly(CENTER, q * q)
    return poly(TAIL, 3.3276543708102597 - 23.55121144186526 / (math.sqrt(-natural_log(p)) + 4))


def natural_log(p):
    m, e = math.frexp(p)
    s = (m - 0.7071067811865476) / (m + 0.7071067811865476)
    return (e - 0.5) * 0.6931471805599453 + s * poly(LOG, s * s)


def poly(coefficients, x):
    *others, value = coefficients
    for coefficient in reversed(others):
        value = value * x + coefficient
    return value


CENTER = (
    2.5066282746170607,
    2.624935029752419,
    5.7725157270284955,
    15.67081077484963,
    46.73739005321429,
    166.36441324695426,
    -91.99135190835148,
    15737.055696117528,
    -224453.7898338477,
    2627106.942583356,
    -19997812.160714827,
    101221590.82795665,
    -300648809.29873127,
    417952195.4029503,
)
LOG = (
    1.9999999999999993,
    0.6666666666680505,
    0.3999999995464538,
    0.28571433645630606,
    0.22222031288526592,
    0.18179712537940082,
    0.15655154720003522,
    0.09496189194396737,
)
TAIL = (
    3.7842343864015167,
    3.2560460317490905,
    0.8520327950458199,
    0.28654916767634686,
    0.07743957480735476,
    0.02582486508716629,
    0.006966640889856989,
    0.002348254901935576,
    0.0006229837901352244,
    0.00021611158919248352,
    5.23674981585438e-05,
    1.8775434260273204e-05,
    6.479589891179265e-06,
    2.6412464129472416e-06,
)

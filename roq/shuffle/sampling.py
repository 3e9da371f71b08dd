"""How the bytes of a shuffle are spread over the total order of its rows: a weighted sample, merged from regular samples of
sorted runs. Samples are kept per run, so that attempts that are not committed can be left out; many become few that say nearly
the same (`reduced`). Not covered: who samples, and when.

Error. A run's sample tells exactly how many of its bytes lie before each of its sampled rows. Between two of them a run's bytes
are unknown by at most the gap's weight, and half of it is assumed (the sampled row itself is known to be there). With s keys
per run, at even bytes, every gap of a run of b bytes weighs b / s, so over all runs together the weight before any position is
off by at most total / 2s, *however many runs there are*, and a range's by at most total / s. With s = 16 · ranges that is 1/16
of a mean range, and splitting at sampled rows only adds another 1/16 at most: largest / mean <= 1.125, for any keys whatsoever.
(Other than a sketch's, the bound is certain, and an attempt can be taken out again.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from itertools import accumulate, chain, groupby

import msgspec

from roq.wire.shuffle import SAMPLE_KEYS_MAX, Interval, Position, RunSample

SAMPLES_PER_RANGE = 16  # of a run, for each range: see the bound above
SAMPLES_MIN = 64  # of a run, whatever the ranges
KEYS_MAX = 400_000  # of one distribution: a second's work, 100 MB, and even enough for 1,000 ranges of 1,000 runs
KEY_BYTES_ALL_MAX = 64 * 1024 * 1024  # of these keys together
SORTED_AT_ONCE = 20_000  # points: some 10 ms in which no other thread of the process runs

_Point = tuple[bytes, int, int, int, int, int]  # position; bytes surely or likely before it, since the point before; after it


def samples_wanted(ranges: int) -> int:
    """How many keys to take of one run that is to be cut into so many ranges (at even bytes, the first row one of them)."""
    return max(SAMPLES_MIN, min(SAMPLE_KEYS_MAX, SAMPLES_PER_RANGE * ranges))


def is_sound(sample: RunSample) -> bool:
    """Whether a sample that came from elsewhere can be used."""
    count = len(sample.keys)
    return len(sample.rows_at) == len(sample.weights) == count <= max(0, sample.rows) and all(
        each >= 0 for each in sample.weights
    )


class Gathered:
    """Samples, not more than can be kept: when they are many all become coarser, and when that is not enough no others are
    taken. size: bytes of all runs that were told."""

    def __init__(self, keys_max: int = KEYS_MAX, bytes_max: int = KEY_BYTES_ALL_MAX) -> None:
        self.size = 0
        self._keys_max, self._bytes_max = keys_max, bytes_max
        self._samples: dict[tuple[int, str, int, tuple[int, ...]], RunSample] = {}
        self._keys = self._bytes = 0
        self._step = 1  # samples are coarser by this, those to come too
        self._coarsest = False  # each has one key

    def add(self, sample: RunSample) -> None:
        """Once, however often it is told."""
        id = (sample.partition, sample.attempt, sample.run, sample.rows_at[:1])
        if id in self._samples:
            return
        self.size += sample.size
        kept = coarser(sample, self._step)
        while not self._coarsest and not self._fits(kept):
            self._thin()
            kept = coarser(sample, self._step)
        if self._fits(kept):
            self._samples[id] = kept
            self._count(kept)

    def taken(self) -> tuple[RunSample, ...]:
        """As they are kept."""
        return tuple(self._samples.values())

    def _fits(self, sample: RunSample) -> bool:
        return self._keys + len(sample.keys) <= self._keys_max and self._bytes + _key_bytes(sample) <= self._bytes_max

    def _thin(self) -> None:
        self._step *= 2
        self._keys = self._bytes = 0
        for id, sample in self._samples.items():
            self._samples[id] = coarser(sample, 2)
            self._count(self._samples[id])
        self._coarsest = self._keys <= len(self._samples)

    def _count(self, sample: RunSample) -> None:
        self._keys += len(sample.keys)
        self._bytes += _key_bytes(sample)


def thinned(samples: Iterable[RunSample], keys_max: int = KEYS_MAX, bytes_max: int = KEY_BYTES_ALL_MAX) -> list[RunSample]:
    """All of these samples, as coarse as one distribution demands; each keeps one key."""
    found = list(samples)
    while any(len(each.keys) > 1 for each in found) and (
        sum(len(each.keys) for each in found) > keys_max or sum(map(_key_bytes, found)) > bytes_max
    ):
        found = [coarser(each, 2) for each in found]
    return found


def coarser(sample: RunSample, step: int) -> RunSample:
    """Every so many keys of it; the first is one of them."""
    if step <= 1:
        return sample
    weights = tuple(sum(sample.weights[at : at + step]) for at in range(0, len(sample.weights), step))
    return msgspec.structs.replace(sample, keys=sample.keys[::step], rows_at=sample.rows_at[::step], weights=weights)


def _key_bytes(sample: RunSample) -> int:
    return sum(map(len, sample.keys))


class Distribution:
    """Estimate of the bytes before any position. Immutable."""

    __slots__ = ("_before", "_points", "rows", "total")

    def __init__(self, points: list[_Point], rest: int, rows: int) -> None:
        """points: sorted. rest: bytes behind the last one. Use `of`."""
        self._points = points
        self._before = list(accumulate(chain.from_iterable((point[4], point[5]) for point in points), initial=0))
        self.total = self._before[-1] + rest
        self.rows = rows

    @classmethod
    def of(cls, samples: Iterable[RunSample]) -> Distribution:
        """From samples of whole runs, or of pieces of them that don't overlap; the same sample told twice counts once."""
        known = {(sample.partition, sample.attempt, sample.run, sample.rows_at[:1]): sample for sample in samples}
        points: list[_Point] = []
        rest = 0
        for _, pieces in groupby(sorted(known.items()), lambda item: item[0][:3]):
            found, left = _points([sample for _, sample in pieces])
            points += found
            rest += left
        return cls(_sorted(points), rest, sum(sample.rows for sample in known.values()))

    def __len__(self) -> int:
        return len(self._points)

    def before(self, position: Position | None) -> int:
        """Bytes before the position; None: nothing is before it."""
        if position is None:
            return 0
        index = bisect_left(self._points, position)
        exact = index < len(self._points) and self._points[index][:4] == position
        return self._before[2 * index + 1] if exact else self._before[2 * index]

    def weight(self, interval: Interval) -> int:
        """Estimated bytes within the interval."""
        upper = self.total if interval.upper is None else self.before(interval.upper)
        return max(0, upper - self.before(interval.lower))

    def candidates(self) -> tuple[Sequence[int], Sequence[_Point]]:
        """Where ranges can be cut: bytes before each sampled position (never falling), and the positions, in order."""
        return self._before[1::2], self._points


def _sorted(points: list[_Point]) -> list[_Point]:
    """In slices, so that other threads run in between."""
    slices = [sorted(points[at : at + SORTED_AT_ONCE]) for at in range(0, len(points), SORTED_AT_ONCE)]
    return slices[0] if len(slices) == 1 else list(merge(*slices))


def _points(pieces: Iterable[RunSample]) -> tuple[list[_Point], int]:
    """The points of one run's pieces, in order, and the bytes behind the last one. Of a gap of g rows, one is at its first
    position and the rest somewhere behind it: (g + 1) / 2g of its weight is taken to be there, what is left at the next one."""
    points: list[_Point] = []
    left = 0
    for sample in pieces:
        if not sample.keys:
            continue
        ends = (*sample.rows_at[1:], sample.rows_at[0] + sample.rows)
        for key, row, end, weight in zip(sample.keys, sample.rows_at, ends, sample.weights, strict=True):
            gap = max(1, end - row)
            right = weight * (gap + 1) // (2 * gap)
            points.append((key, sample.partition, sample.run, row, left, right))
            left = weight - right
    return points, left


def message_bytes(sample: RunSample) -> int:
    """What it adds to a message, about."""
    return sum(map(len, sample.keys)) + 20 * len(sample.keys) + 100


def key_count(samples: Sequence[RunSample]) -> int:
    """Of all of them."""
    return sum(len(sample.keys) for sample in samples)


def reduced(samples: Sequence[RunSample], keys: int, size: int, committed: Mapping[int, str]) -> list[RunSample]:
    """At most `keys` rows (one at least) that stand for all, each for as many bytes as any other: samples of one row. They are
    the middles of equal shares, so the bytes before any position are off by half a share, beside what they were off before.
    size: bytes of a message that they must fit. committed: attempts of all partitions. 50,000 keys take some 0.3 s."""
    distribution = Distribution.of(samples)
    before, points = distribution.candidates()
    if not points:
        return []
    while True:
        found = _shares(before, points, distribution.total, max(1, keys), committed)
        if keys <= 1 or sum(map(message_bytes, found)) <= size:
            return found
        keys //= 2


def _shares(
    before: Sequence[int],
    points: Sequence[tuple[bytes, int, int, int, int, int]],
    total: int,
    keys: int,
    committed: Mapping[int, str],
) -> list[RunSample]:
    weights: dict[int, int] = {}  # by index of the point
    for number in range(keys):
        begin, end = total * number // keys, total * (number + 1) // keys
        index = min(bisect_left(before, (begin + end) // 2), len(points) - 1)
        weights[index] = weights.get(index, 0) + end - begin
    return [
        RunSample(partition, committed.get(partition, ""), run, 1, weight, (key,), (row,), (weight,))
        for index, weight in weights.items()
        for key, partition, run, row, _, _ in [points[index]]
    ]

"""Many samples become few that say nearly the same. Not covered: what they are used for (sampling.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from roq.shuffle.sampling import Distribution
from roq.wire.shuffle import RunSample


def message_bytes(sample: RunSample) -> int:
    """What it adds to a message, about."""
    return sum(map(len, sample.keys)) + 20 * len(sample.keys) + 100


def key_count(samples: Sequence[RunSample]) -> int:
    """Of all of them."""
    return sum(len(sample.keys) for sample in samples)


def reduced(samples: Sequence[RunSample], keys: int, size: int, winners: Mapping[int, str]) -> list[RunSample]:
    """At most `keys` rows (one at least) that stand for all, each for as many bytes as any other: samples of one row. They are
    the middles of equal shares, so the bytes before any position are off by half a share, beside what they were off before.
    size: bytes of a message that they must fit. winners: attempts of all partitions. 50,000 keys take some 0.3 s."""
    distribution = Distribution.of(samples)
    before, points = distribution.candidates()
    if not points:
        return []
    while True:
        found = _shares(before, points, distribution.total, max(1, keys), winners)
        if keys <= 1 or sum(map(message_bytes, found)) <= size:
            return found
        keys //= 2


def _shares(
    before: Sequence[int],
    points: Sequence[tuple[bytes, int, int, int, int, int]],
    total: int,
    keys: int,
    winners: Mapping[int, str],
) -> list[RunSample]:
    weights: dict[int, int] = {}  # by index of the point
    for number in range(keys):
        begin, end = total * number // keys, total * (number + 1) // keys
        index = min(bisect_left(before, (begin + end) // 2), len(points) - 1)
        weights[index] = weights.get(index, 0) + end - begin
    return [
        RunSample(partition, winners.get(partition, ""), run, 1, weight, (key,), (row,), (weight,))
        for index, weight in weights.items()
        for key, partition, run, row, _, _ in [points[index]]
    ]

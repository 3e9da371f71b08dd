"""Ranges: intervals of the total order that together cover all of it, split so that each has about as many bytes as any other.
A border is the position of a row, so a key with many rows is split too, and only a single row can be too large for its range.

Rebalancing goes from an old table of ranges to a new one with as little data moved as can be. New ranges take over the identity
(and with it the holders) of old ones, in order of the bytes they share; what is left gets new identities. The greedy rule keeps
at least half of what the best assignment of identities keeps. As both tables are in key order, the best is known too, in one
sweep: it is the lower bound that is reported beside what was moved.

Placement is consistent hashing with several probes. Hosts have points on a ring, ranges have probes, and the hosts rank by the
distance from any of a range's probes to the next of their points. So each host gets its even share, a host that leaves gives
away only what it held (to the others evenly), and a host that joins takes only its share (from the others evenly): as with
rendezvous hashing, where every host gets a score for every range, but a range costs the same however many hosts there are. All
hosts weigh the same. Not covered: where the bytes are (sampling.py), who sends what when (plan.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple, Protocol

from roq.shuffle.sampling import Distribution
from roq.wire.shuffle import RANGES_MAX, Interval, Position, Range

TABLES_KEPT = 16  # whose holders were asked for last: they are again at each step, range by range; 1.3 MB each at most
RINGS_KEPT = 4  # of as many sets of hosts; one of a thousand has 4 MB
DIGEST = Struct(">8Q")  # eight places on the ring
POINT_DIGESTS = 8  # of each host: 64 points. With the 8 probes of a thing shares are as even as if hosts were drawn for each
RING = 1 << 64
RANGE_BYTES = 64 * 1024 * 1024  # what a range should have, if nobody says how many there should be
RANGES_PER_HOST = (10, 100)  # an order of magnitude more ranges than hosts spreads the load; more than two is only overhead


def range_count(size: int, hosts: int, wanted: int) -> int:
    """How many ranges to cut. size: bytes of all data, as far as is known. wanted: 0 for as many as fit hosts and data."""
    if wanted:
        return min(wanted, RANGES_MAX)
    fewest, most = (each * max(1, hosts) for each in RANGES_PER_HOST)
    return min(RANGES_MAX, most, max(fewest, -(-size // RANGE_BYTES)))


def even_borders(distribution: Distribution, count: int) -> list[Position]:
    """Borders of `count` ranges of about the same bytes: at most count - 1, fewer when a sampled row (or gap) is larger than a
    range should be. Each border is the sampled position nearest to where it should be, so with exact samples no range has
    more than the mean and the largest row."""
    before, points = distribution.candidates()
    borders: list[Position] = []
    last = 0  # index of the point that was cut at last; a cut at the first point would leave an empty range
    for number in range(1, count):
        target = distribution.total * number // count
        index = bisect_left(before, target, lo=last)
        if index == len(before) or (index > 0 and target - before[index - 1] <= before[index] - target):
            index -= 1
        if index > last:
            borders.append(Position(*points[index][:4]))
            last = index
    return borders


def intervals(borders: Sequence[Position]) -> list[Interval]:
    """The intervals between the borders, the unbounded ones at both ends included."""
    return [Interval(lower, upper) for lower, upper in zip([None, *borders], [*borders, None], strict=True)]


def table_of(borders: Sequence[Position], identities: Sequence[int] | None = None) -> tuple[Range, ...]:
    """The table with these borders. identities: one per range; 1, 2, … if there are none."""
    parts = intervals(borders)
    numbers = range(1, len(parts) + 1) if identities is None else identities
    return tuple(Range(at, identity, part) for at, (identity, part) in enumerate(zip(numbers, parts, strict=True)))


def borders_of(table: Sequence[Range]) -> list[Position]:
    """The borders a table was made of."""
    return [each.interval.lower for each in table[1:] if each.interval.lower is not None]


def imbalance(sizes: Sequence[int]) -> float:
    """Largest / mean; 1.0 when there is nothing."""
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0


class KeyList(Protocol):
    """Encoded keys of rows in order, looked at one by one."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, row: int, /) -> bytes:
        """The key of one row."""


def rows_before(keys: KeyList, first: int, place: tuple[int, int], border: Position) -> int:
    """How many of these rows lie before the border. first: number of the first one in its run. place: (partition, run)."""
    before, other = bisect_left(keys, border.key), (border.partition, border.run)
    if place > other:
        return before
    upper = bisect_right(keys, border.key, lo=before)
    return upper if place < other else min(max(border.row - first, before), upper)


def intersection(one: Interval, other: Interval) -> Interval | None:
    """What both cover; None if that is nothing."""
    lower = one.lower if other.lower is None else other.lower if one.lower is None else max(one.lower, other.lower)
    upper = one.upper if other.upper is None else other.upper if one.upper is None else min(one.upper, other.upper)
    return None if lower is not None and upper is not None and lower >= upper else Interval(lower, upper)


class Overlap(NamedTuple):
    """Indices of an old and a new range that overlap, what both cover, and its bytes (estimated)."""

    old: int
    new: int
    interval: Interval
    size: int


class IntervalMove(NamedTuple):
    """One holder must get one interval, which each of the sources holds whole. No sources: nobody has it any more."""

    number: int  # of the new range
    holder: str
    interval: Interval
    sources: tuple[str, ...]
    size: int


class Moves(NamedTuple):
    """moves: all that must be sent. size: their bytes. least: what had to be sent with the best identities, and because hosts
    came or went."""

    moves: tuple[IntervalMove, ...]
    size: int
    least: int


def overlaps(old: Sequence[Interval], new: Sequence[Interval], distribution: Distribution) -> list[Overlap]:
    """Pairs that overlap, in order; both lists are in order and cover the same. At most len(old) + len(new) - 1."""
    pairs: list[Overlap] = []
    left = right = 0
    while left < len(old) and right < len(new):
        shared = intersection(old[left], new[right])
        if shared is not None:
            pairs.append(Overlap(left, right, shared, distribution.weight(shared)))
        of_old, of_new = old[left].upper, new[right].upper
        left += of_old == of_new or of_new is None or (of_old is not None and of_old < of_new)
        right += of_old == of_new or of_old is None or (of_new is not None and of_new < of_old)
    return pairs


def propagate(pairs: Iterable[tuple[int, int, float]]) -> dict[int, int]:
    """new → old, greedily by what they share: (old, new, shared), each used once; the same share: the lower numbers first.
    What shares nothing is not paired."""
    taken: dict[int, int] = {}
    used: set[int] = set()
    for old, new, shared in sorted(pairs, key=lambda pair: (-pair[2], pair[0], pair[1])):
        if shared > 0 and old not in used and new not in taken:
            taken[new] = old
            used.add(old)
    return taken


def most_kept(pairs: Sequence[Overlap]) -> int:
    """The most bytes that any pairing of old with new ranges can keep. pairs: from `overlaps`, so those that exclude a pair and
    come before it share the same range with it, and come right before it."""
    best = [0]  # best[n]: of the first n pairs
    first_of_old: dict[int, int] = {}
    first_of_new: dict[int, int] = {}
    for index, pair in enumerate(pairs):
        free = min(first_of_old.setdefault(pair.old, index), first_of_new.setdefault(pair.new, index))
        best.append(max(best[index], best[free] + pair.size))
    return best[-1]


def identities(old: Sequence[Range], new: Sequence[Interval], pairs: Iterable[Overlap], fresh: int) -> list[int]:
    """An identity for each new range: an old one's, or fresh, fresh + 1, …"""
    kept = propagate((pair.old, pair.new, pair.size) for pair in pairs)
    found: list[int] = []
    for index in range(len(new)):
        if index in kept:
            found.append(old[kept[index]].identity)
        else:
            found.append(fresh)
            fresh += 1
    return found


def moves(old: Sequence[Range], new: Sequence[Range], pairs: Sequence[Overlap], alive: Collection[str] | None = None) -> Moves:
    """What the holders of the new ranges lack. pairs: overlaps of both. alive: hosts that can be sources (None:
    all)."""
    found: list[IntervalMove] = []
    placed = 0
    for pair in pairs:
        before, after = old[pair.old], new[pair.new]
        sources = tuple(host for host in before.holders if alive is None or host in alive)
        lacking = [host for host in after.holders if host not in before.holders]
        found += [IntervalMove(after.number, host, pair.interval, sources, pair.size) for host in lacking]
        placed += len(lacking) * pair.size if before.identity == after.identity else 0
    size = sum(move.size for move in found)
    replicas = max((len(each.holders) for each in new), default=0)
    total = sum(pair.size for pair in pairs)
    return Moves(tuple(found), size, min(size, placed + replicas * (total - most_kept(pairs))))


class Placement(StrEnum):
    """How holders are found, for the whole life of a shuffle: another way would move all of it."""

    SCORES = "scores"  # as until version 0.2
    RING = "ring"


class HolderTable:
    """Which hosts hold each range of a shuffle, remembered as it is asked for."""

    def __init__(self, shuffle: str, hosts: frozenset[str], replicas: int, placement: Placement) -> None:
        self._shuffle, self._hosts, self._replicas = shuffle, hosts, replicas
        self._find = _nearest if placement is Placement.RING else _best
        self._known: dict[int, tuple[str, ...]] = {}

    def holders(self, identity: int) -> tuple[str, ...]:
        """Of the range with this identity, best first; fewer when there are fewer hosts."""
        found = self._known.get(identity)
        if found is None:
            thing = f"range\0{self._shuffle}\0{identity}"
            found = self._known[identity] = self._find(thing, self._hosts, self._replicas)
        return found


@lru_cache(TABLES_KEPT)
def _holder_table(shuffle: str, hosts: frozenset[str], replicas: int, placement: Placement) -> HolderTable:
    return HolderTable(shuffle, hosts, replicas, placement)


def holder_table(shuffle: str, hosts: Iterable[str], replicas: int, placement: Placement = Placement.RING) -> HolderTable:
    """The one of these."""
    return _holder_table(shuffle, frozenset(hosts), replicas, placement)


def holders(
    shuffle: str, identity: int, hosts: Iterable[str], replicas: int, placement: Placement = Placement.RING
) -> tuple[str, ...]:
    """Of one range, as HolderTable.holders."""
    return holder_table(shuffle, hosts, replicas, placement).holders(identity)


def buffer_of(shuffle: str, partition: int, attempt: str, hosts: Iterable[str]) -> str:
    """The host whose buffer role takes the attempt. Raises IndexError without hosts."""
    return _best(f"attempt\0{shuffle}\0{partition}\0{attempt}", hosts, 1)[0]


def replica_order(reader: str, shuffle: str, number: int, hosts: Iterable[str]) -> tuple[str, ...]:
    """In which order a reader asks a range's holders: round robin over all readers, without state."""
    return _best(f"read\0{shuffle}\0{number}\0{reader}", hosts, None)


def _best(thing: str, hosts: Iterable[str], count: int | None) -> tuple[str, ...]:
    base = blake2b(thing.encode(), digest_size=8)
    scores = []
    for host in hosts:
        score = base.copy()
        score.update(b"\0" + host.encode())
        scores.append((score.digest(), host))
    scores.sort(reverse=True)
    return tuple(host for _, host in scores[:count])


def _nearest(thing: str, hosts: frozenset[str], count: int) -> tuple[str, ...]:
    """A host that is among the `count` nearest to any probe is among the first `count` that follow that probe."""
    places, owners = _ring(hosts)
    count = min(count, len(hosts))
    nearest: dict[str, int] = {}
    for probe in _places(thing):
        at = bisect_left(places, probe)
        seen: set[str] = set()
        while len(seen) < count:
            if at == len(places):
                at = 0
            host = owners[at]
            if host not in seen:
                seen.add(host)
                nearest[host] = min(nearest.get(host, RING), (places[at] - probe) % RING)
            at += 1
    return tuple(sorted(nearest, key=lambda host: (nearest[host], host))[:count])


@lru_cache(RINGS_KEPT)
def _ring(hosts: frozenset[str]) -> tuple[list[int], list[str]]:
    """Points in order, and whose each is."""
    points = [(place, host) for host in hosts for part in range(POINT_DIGESTS) for place in _places(f"host\0{host}\0{part}")]
    points.sort()
    return [place for place, _ in points], [host for _, host in points]


def _places(thing: str) -> tuple[int, ...]:
    return DIGEST.unpack(blake2b(thing.encode()).digest())

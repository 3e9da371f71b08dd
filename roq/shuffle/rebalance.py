"""Rebalancing: from an old table of ranges to a new one with as little data moved as can be. New ranges take over the identity
(and with it the holders) of old ones, in order of the bytes they share; what is left gets new identities. Not covered: cutting
the new ranges (ranges.py), and who sends the data and when (plan.py).

The greedy rule keeps at least half of what the best assignment of identities keeps. As both tables are in key order, the best
is known too, in one sweep: it is the lower bound that is told beside what was moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from roq.shuffle.ranges import intersection
from roq.shuffle.sampling import Distribution
from roq.wire.shuffle import Interval, Range


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

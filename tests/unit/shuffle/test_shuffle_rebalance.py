"""From one table to another: overlaps, identities, what must move and the least that had to."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from roq.shuffle.ranges import (
    Overlap,
    even_borders,
    holders,
    identities,
    intervals,
    most_kept,
    moves,
    overlaps,
    propagate,
    table_of,
)
from roq.shuffle.sampling import Distribution
from roq.wire.shuffle import Interval, Position, Range, RunSample

HOSTS = ("a", "b", "c", "d", "e")


def at(number: int) -> Position:
    return Position(number.to_bytes(2, "big"), 0, 0, number)


def evenly(rows: int, weight: int = 10) -> Distribution:
    keys = tuple(at(number).key for number in range(rows))
    return Distribution.of([RunSample(0, "x", 0, rows, rows * weight, keys, tuple(range(rows)), (weight,) * rows)])


def placed(borders: list[int], identities: list[int] | None = None, replicas: int = 2) -> tuple[Range, ...]:
    table = table_of([at(border) for border in borders], identities)
    return tuple(
        Range(each.number, each.identity, each.interval, holders=holders("s", each.identity, HOSTS, replicas)) for each in table
    )


def test_the_worked_example_of_the_greedy_step() -> None:
    """Old ranges 1 2 3, new ranges 4 5 6 7 8, from the Shuffler's proposal."""
    shared = [(1, 4, 0.2), (1, 5, 0.15), (3, 4, 0.1), (3, 5, 0.09), (2, 6, 0.08)]
    assert propagate(shared) == {4: 1, 6: 2, 5: 3}
    assert propagate(reversed(shared)) == {4: 1, 6: 2, 5: 3}


def test_what_shares_nothing_keeps_nothing_and_ties_go_to_the_first() -> None:
    assert propagate([(1, 1, 0), (1, 2, 5), (2, 2, 5), (2, 3, 5)]) == {2: 1, 3: 2}


borders = st.lists(st.integers(1, 99), max_size=12, unique=True).map(sorted)


@given(borders, borders)
def test_overlaps_are_all_pairs_that_overlap(old: list[int], new: list[int]) -> None:
    distribution = evenly(100)
    one, other = (intervals([at(border) for border in each]) for each in (old, new))
    pairs = overlaps(one, other, distribution)
    assert len(pairs) <= len(one) + len(other) - 1
    sets = [[set(range(a, b)) for a, b in zip([0, *each], [*each, 100], strict=True)] for each in (old, new)]
    expected = [(i, j, 10 * len(a & b)) for i, a in enumerate(sets[0]) for j, b in enumerate(sets[1]) if a & b]
    assert [(pair.old, pair.new, pair.size) for pair in pairs] == expected


def best_by_trying(pairs: list[Overlap]) -> int:
    best = 0
    for count in range(1, len(pairs) + 1):
        for chosen in combinations(pairs, count):
            if len({pair.old for pair in chosen}) == len({pair.new for pair in chosen}) == count:
                best = max(best, sum(pair.size for pair in chosen))
    return best


few_borders = st.lists(st.integers(1, 99), max_size=5, unique=True).map(sorted)


@given(few_borders, few_borders)
def test_the_bound_is_the_best_pairing_and_greedy_keeps_half_of_it_at_least(old: list[int], new: list[int]) -> None:
    one, other = (intervals([at(border) for border in each]) for each in (old, new))
    pairs = overlaps(one, other, evenly(100))
    best = best_by_trying(pairs)
    assert most_kept(pairs) == best
    kept = propagate((pair.old, pair.new, pair.size) for pair in pairs)
    assert 2 * sum(pair.size for pair in pairs if kept.get(pair.new) == pair.old) >= best


@given(borders, borders)
def test_who_kept_its_identity_fetches_only_what_it_lacks(old_borders: list[int], new_borders: list[int]) -> None:
    distribution = evenly(100)
    old = placed(old_borders)
    parts = intervals([at(border) for border in new_borders])
    pairs = overlaps([each.interval for each in old], parts, distribution)
    names = identities(old, parts, pairs, fresh=100)
    assert len(set(names)) == len(parts)
    new = placed(new_borders, names)
    plan = moves(old, new, pairs)
    held = {(host, row) for each in old for host in each.holders for row in rows_of(each.interval)}
    wanted = {(host, row) for each in new for host in each.holders for row in rows_of(each.interval)}
    sent = [(move.holder, row) for move in plan.moves for row in rows_of(move.interval)]
    assert len(sent) == len(set(sent))
    assert set(sent) == wanted - held, "all that is missing is sent, and nothing else"
    assert plan.size == 10 * len(sent)
    assert plan.least <= plan.size
    for move in plan.moves:
        assert all((source, row) in held for source in move.sources for row in rows_of(move.interval))
    best = most_kept(pairs)
    kept = sum(pair.size for pair in pairs if names[pair.new] == old[pair.old].identity)
    assert plan.size <= 2 * (distribution.total - kept), "only what did not keep its identity may move"
    assert plan.least <= 2 * (distribution.total - best)


def rows_of(interval: Interval) -> range:
    return range(interval.lower.row if interval.lower else 0, interval.upper.row if interval.upper else 100)


def test_the_same_again_moves_nothing_and_the_dead_are_no_sources() -> None:
    distribution = evenly(100)
    old = placed([25, 50, 75])
    pairs = overlaps([each.interval for each in old], [each.interval for each in old], distribution)
    assert moves(old, old, pairs).moves == ()
    left = [host for host in HOSTS if host != old[0].holders[0]]
    new = tuple(Range(each.number, each.identity, each.interval, holders=holders("s", each.identity, left, 2)) for each in old)
    plan = moves(old, new, pairs, left)
    assert {move.number for move in plan.moves} == {each.number for each in old if old[0].holders[0] in each.holders}
    assert all(move.sources and old[0].holders[0] not in move.sources for move in plan.moves)


def test_balanced_again_after_a_bad_first_guess() -> None:
    distribution = evenly(1000)
    old = placed([10, 20, 30])
    borders = even_borders(distribution, 4)
    pairs = overlaps([each.interval for each in old], intervals(borders), distribution)
    names = identities(old, intervals(borders), pairs, 9)
    assert names[0] in {1, 2, 3, 4}
    assert 4 in names, "the one that has nearly everything keeps its identity where it has most"

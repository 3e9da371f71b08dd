"""Sampling, cutting and placing: how even the ranges are, for which keys, and what a change of hosts moves."""

from __future__ import annotations

import random
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.shuffle.ranges import (
    RANGE_BYTES,
    TABLES_KEPT,
    borders_of,
    buffer_of,
    even_borders,
    holder_table,
    holders,
    imbalance,
    intersection,
    intervals,
    range_count,
    replica_order,
    table_of,
)
from roq.shuffle.sampling import Distribution, samples_wanted
from roq.wire.shuffle import RANGES_MAX, Interval, Position, RunSample
from tests.harness.intervals import within

Rows = Sequence[tuple[bytes, int]]  # key and size of one run's rows, sorted by key


def sample_of(rows: Rows, partition: int, run: int = 0, wanted: int = 1024, attempt: str = "a") -> RunSample:
    """A regular sample as a writer takes it: a row as often as its share of the run's bytes is full."""
    total = sum(size for _, size in rows)
    at: list[int] = []
    seen = 0
    for number, (_, size) in enumerate(rows):
        if seen * wanted >= len(at) * total:
            at.append(number)
        seen += size
    weights = tuple(sum(size for _, size in rows[a:b]) for a, b in zip(at, [*at[1:], len(rows)], strict=True))
    return RunSample(partition, attempt, run, len(rows), total, tuple(rows[a][0] for a in at), tuple(at), weights)


def sizes_of(borders: list[Position], runs: dict[int, Rows]) -> list[int]:
    """Real bytes of each range."""
    sizes = [0] * (len(borders) + 1)
    ends = [0] * len(sizes)
    for partition, rows in runs.items():
        positions = [(key, partition, 0, number) for number, (key, _) in enumerate(rows)]
        ends = [bisect_left(positions, tuple(border)) for border in borders] + [len(rows)]
        for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            sizes[number] += sum(size for _, size in rows[first:end])
    return sizes


def uniform(chance: random.Random, _number: int) -> bytes:
    return chance.randbytes(16)


def zipf(chance: random.Random, _number: int) -> bytes:
    """Zipf(1.1) over unlimited ranks, by inversion of its tail: the first key has a tenth of all rows."""
    return min(int(chance.paretovariate(0.1)), 1 << 62).to_bytes(8, "big")


def ascending(_chance: random.Random, number: int) -> bytes:
    return number.to_bytes(8, "big")


def equal(_chance: random.Random, _number: int) -> bytes:
    return b"the same"


@pytest.mark.parametrize("keys", [uniform, zipf, ascending, equal])
@pytest.mark.parametrize(("rows", "runs"), [(640, 4), (5_000, 1), (60_000, 25)])
def test_ranges_are_even_whatever_the_keys(keys: Callable[[random.Random, int], bytes], rows: int, runs: int) -> None:
    chance = random.Random(7)
    drawn: dict[int, Rows] = {}
    for partition in range(runs):
        begin, end = partition * rows // runs, (partition + 1) * rows // runs
        drawn[partition] = sorted((keys(chance, number), 116) for number in range(begin, end))
    wanted = samples_wanted(64)
    distribution = Distribution.of(sample_of(each, partition, wanted=wanted) for partition, each in drawn.items())
    borders = even_borders(distribution, 64)
    sizes = sizes_of(borders, drawn)
    assert len(sizes) == 64
    assert sum(sizes) == distribution.total == rows * 116
    assert distribution.rows == rows
    assert imbalance(sizes) <= 1.15


rows_of_a_run = st.lists(st.tuples(st.binary(max_size=2), st.integers(1, 300)), min_size=1, max_size=60).map(sorted)


@given(st.lists(rows_of_a_run, min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 30))
def test_the_bound_holds_for_any_runs(rows: list[Rows], wanted: int, count: int) -> None:
    """Every estimate is off by at most the largest gap of each run; a cut adds the largest step between two sampled rows."""
    runs = dict(enumerate(rows))
    samples = [sample_of(each, partition, wanted=wanted) for partition, each in runs.items()]
    distribution = Distribution.of(samples)
    borders = even_borders(distribution, count)
    assert borders == sorted(set(borders))
    assert len(borders) < count
    error = sum(max(sample.weights) for sample in samples)
    for part, real in zip(intervals(borders), sizes_of(borders, runs), strict=True):
        assert real > 0
        assert abs(distribution.weight(part) - real) <= error
    for border in borders:
        own = Distribution.of([samples[border.partition]]).before(border)
        assert own == sum(size for _, size in runs[border.partition][: border.row]), "a run's own sample is exact"


@given(st.lists(rows_of_a_run, min_size=1, max_size=5), st.integers(1, 30))
def test_if_every_row_is_sampled_no_range_exceeds_the_mean_by_more_than_the_largest_row(rows: list[Rows], count: int) -> None:
    runs = dict(enumerate(rows))
    distribution = Distribution.of(sample_of(each, partition, wanted=10**6) for partition, each in runs.items())
    sizes = sizes_of(even_borders(distribution, count), runs)
    assert max(sizes) <= distribution.total / count + max(size for each in rows for _, size in each)


def test_pieces_of_a_run_tell_as_much_as_the_run() -> None:
    chance = random.Random(3)
    rows = sorted((chance.randbytes(4), 100) for _ in range(1000))
    whole = Distribution.of([sample_of(rows, 1, wanted=10)])
    halves = []
    for first, end in ((0, 400), (400, 1000)):
        part = sample_of(rows[first:end], 1, wanted=(end - first) // 100)
        halves.append(
            RunSample(1, "a", 0, part.rows, part.size, part.keys, tuple(row + first for row in part.rows_at), part.weights)
        )
    pieces = Distribution.of([*reversed(halves), halves[0]])  # told in any order, and twice
    assert pieces.total == whole.total == 100_000
    for key in (b"", b"\x20", b"\x80", b"\xf0", b"\xff\xff\xff\xff\xff"):
        position = Position(key, 0, 0, 0)
        assert pieces.before(position) == whole.before(position)


def test_nothing_is_one_range() -> None:
    empty = Distribution.of([RunSample(0, "a", 0, 0, 0, (), (), ())])
    assert empty.total == len(empty) == 0
    assert even_borders(empty, 64) == []
    assert table_of([])[0].interval == Interval(None, None)
    assert imbalance([0]) == imbalance([]) == 1.0


def test_a_row_larger_than_a_range_is_a_range() -> None:
    rows = [(b"a", 10), (b"b", 1000), (b"c", 10), (b"d", 10)]
    sizes = sizes_of(even_borders(Distribution.of([sample_of(rows, 0)]), 10), {0: rows})
    assert 1000 in sizes
    assert sum(sizes) == 1030


def test_how_many_ranges() -> None:
    assert range_count(10**12, 5, 64) == 64
    assert range_count(0, 1, 10**6) == RANGES_MAX
    assert range_count(0, 3, 0) == 30
    assert range_count(200 * RANGE_BYTES, 3, 0) == 200
    assert range_count(10**15, 3, 0) == 300
    assert range_count(10**15, 1000, 0) == RANGES_MAX


@given(
    st.lists(st.tuples(st.binary(max_size=1), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), min_size=3, max_size=9)
)
def test_every_position_is_in_exactly_one_range(found: list[tuple[bytes, int, int, int]]) -> None:
    positions = [Position(*each) for each in found]
    borders = sorted(set(positions[::2]))
    table = table_of(borders)
    assert borders_of(table) == borders
    for position in positions:
        assert sum(within(each.interval, position) for each in table) == 1
    one, other = (Interval(*sorted(pair)) for pair in (positions[:2], positions[1:3]))
    both = intersection(one, other)
    for position in positions:
        assert (within(one, position) and within(other, position)) == (both is not None and within(both, position))


HOSTS = [f"host{number}" for number in range(20)]


def test_a_host_that_leaves_moves_only_what_it_held() -> None:
    before = {each: holders("s", each, HOSTS, 3) for each in range(2000)}
    after = {each: holders("s", each, HOSTS[1:], 3) for each in range(2000)}
    for identity, held in before.items():
        kept = tuple(host for host in held if host != HOSTS[0])
        assert after[identity][: len(kept)] == kept
        assert len(set(after[identity])) == 3
    share = Counter(host for held in before.values() for host in held)
    assert max(share.values()) < 1.2 * 2000 * 3 / 20
    assert min(share.values()) > 0.8 * 2000 * 3 / 20


def test_a_host_that_joins_takes_only_what_it_then_holds() -> None:
    before = {each: holders("s", each, HOSTS[1:], 3) for each in range(2000)}
    after = {each: holders("s", each, HOSTS, 3) for each in range(2000)}
    for identity, held in after.items():
        stays = tuple(host for host in held if host != HOSTS[0])
        assert before[identity][: len(stays)] == stays
        assert HOSTS[0] in held or held == before[identity]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_the_ranks_are_those_by_the_distances_to_all_hosts(count: int) -> None:
    for identity in range(300):
        everybody = holders("s", identity, HOSTS, len(HOSTS))
        assert sorted(everybody) == sorted(HOSTS)
        assert holders("s", identity, HOSTS, count) == everybody[:count]
        alone = [host for host in everybody if host in HOSTS[3:9]]
        assert list(holders("s", identity, HOSTS[3:9], count)) == alone[:count]


def test_placement_needs_no_order_of_hosts_and_copes_with_few() -> None:
    assert holders("s", 5, HOSTS, 3) == holders("s", 5, reversed(HOSTS), 3)
    assert set(holders("s", 5, ["a"], 3)) == {"a"}
    assert holders("s", 5, [], 3) == ()
    assert buffer_of("s", 1, "x", HOSTS) == buffer_of("s", 1, "x", reversed(HOSTS))
    with pytest.raises(IndexError):
        buffer_of("s", 1, "x", [])
    asked_first = Counter(replica_order(f"reader{number}", "s", 1, HOSTS[:3])[0] for number in range(300))
    assert min(asked_first.values()) > 70, "readers spread over the replicas"


def test_a_large_cluster_is_placed_and_cut_within_seconds() -> None:
    begin = time.process_time()
    hosts = [f"host{number}" for number in range(100)]
    assert all(len(holders("s", each, hosts, 3)) == 3 for each in range(RANGES_MAX))
    chance = random.Random(1)
    samples = []
    for partition in range(100):
        keys = tuple(sorted(chance.randbytes(8) for _ in range(4096)))
        samples.append(RunSample(partition, "a", 0, 4096, 4096, keys, tuple(range(4096)), (1,) * 4096))
    assert len(even_borders(Distribution.of(samples), RANGES_MAX)) == RANGES_MAX - 1
    assert time.process_time() - begin < 10


def test_what_is_remembered_of_holders_is_that_of_a_few_tables() -> None:
    """A leader of many shuffles, one after the other, does not grow by them."""
    first = weakref.ref(holder_table("shuffle-0", HOSTS, 3))
    known = holders("shuffle-0", 7, HOSTS, 3)
    assert holder_table("shuffle-0", reversed(HOSTS), 3) is first(), "asked for again, it is the same one"
    for number in range(1, TABLES_KEPT + 1):
        holders(f"shuffle-{number}", 7, HOSTS, 3)
    assert first() is None
    assert holders("shuffle-0", 7, HOSTS, 3) == known

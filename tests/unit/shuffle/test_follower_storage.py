"""The storage role on a real folder: what is stored once is found exactly, through damage, full disks, and new starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roq.errors import CallError, DataLost, FrameError, Overloaded, ShuffleNotFound, StaleEpoch, StorageFull, TemporaryError
from roq.runtime.observe import Counters
from roq.shuffle.committed import CommittedAttempts
from roq.shuffle.node.memory import Budget
from roq.shuffle.node.queries import FencedCommands, RangeQueries
from roq.shuffle.node.storage import RangeStorage
from roq.wire.shuffle import Block, CutBlocks, Interval, Position, ReadBlocks
from tests.harness.shuffle_answers import count, keep, samples, slices
from tests.harness.shuffle_rows import SPEC, key_of, piece, positions, rows_in, run_of

MEMORY = 64 * 1024 * 1024
EVERYTHING = Interval(None, None)
Open = Callable[..., Awaitable[RangeStorage]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the storage of one folder, again and again."""
    made: list[RangeStorage] = []

    async def open_again(memory: int = MEMORY, free_bytes_min: int = 0) -> RangeStorage:
        for one in made:
            await one.close()
        made.append(await RangeStorage.open(tmp_path / "s", Budget(memory), Counters(), free_bytes_min))
        return made[-1]

    yield open_again
    for one in made:
        await one.close()


async def read_all(storage: RangeStorage, interval: Interval = EVERYTHING, winners: dict[int, str] | None = None) -> list[int]:
    """Ids of the rows in the interval, through slices and exact reads."""
    found: list[int] = []
    for one in await slices(storage, interval, winners):
        row, last = one.first, one.first + one.rows - 1
        while row <= last:
            blocks = await storage.read(CutBlocks("s", one.partition, one.attempt, one.run, row, last))
            assert blocks[0].first == row
            found += [id for _, id in rows_in(blocks)]
            row = blocks[-1].first + blocks[-1].rows
        assert row == last + 1, "cut exactly"
    return found


async def test_pieces_are_stored_once(opened: Open) -> None:
    storage, blocks = await opened(), run_of(range(100), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks[:6])])
    await asyncio.gather(*(storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks[3:])]) for _ in range(3)))
    assert await read_all(storage) == [*range(100)]
    assert storage.shuffles["s"].live == sum(len(block.data) for block in blocks)


async def test_pieces_cut_otherwise_are_stored_once(opened: Open) -> None:
    """The table changed between two times they were sent."""
    storage = await opened()
    for rows in (10, 7, 33):
        blocks = run_of(range(100), rows)
        await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks[2:4]), piece(0, "a", 0, blocks[1:2])])
    here = sorted({*range(10, 40), *range(7, 28), *range(33, 100)})
    assert await read_all(storage) == here
    assert (await count(storage, [EVERYTHING], {0: "a"}))[0] == [len(here)]
    storage = await opened()
    assert await read_all(storage) == here, "after a new start"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.tuples(st.integers(0, 10), st.integers(0, 2), st.integers(0, 1), st.integers(0, 60)),
    st.integers(1, 9),
)
def test_slices_are_exact(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], border: tuple[int, int, int, int], rows: int
) -> None:
    """A border cuts three runs of two partitions as the total order says; both sides together are everything."""

    async def check() -> None:
        storage = await RangeStorage.open(tmp_path_factory.mktemp("s"), Budget(MEMORY), Counters(), 0)
        at = Position(key_of(border[0]), *border[1:])
        runs = {(0, 0): run_of(keys, rows), (1, 0): run_of(keys[::2], rows), (1, 1): run_of(keys[1:], rows + 1)}
        for (partition, run), blocks in runs.items():
            await storage.store("s", "visits", SPEC, [piece(partition, "a", run, blocks)])
        winners = {0: "a", 1: "a"}
        found = [await slices(storage, part, winners) for part in (Interval(None, at), Interval(at, None))]
        for (partition, run), blocks in runs.items():
            every = positions(partition, run, blocks)
            expected = [[row.row for row in every if row < at], [row.row for row in every if row >= at]]
            seen = [
                [row for one in told if (one.partition, one.run) == (partition, run)
                 for row in range(one.first, one.first + one.rows)]
                for told in found
            ]  # fmt: skip
            assert seen == expected
        counts = await count(storage, [Interval(None, at), Interval(at, None)], winners)
        assert sum(counts[0]) == sum(block.rows for blocks in runs.values() for block in blocks)
        sampled = await samples(storage, [Interval(None, at), Interval(at, None)], winners)
        assert sum(sample.rows for sample in sampled) == sum(counts[0])
        for sample in sampled:
            order = positions(sample.partition, sample.run, runs[sample.partition, sample.run])
            assert list(sample.keys) == [order[row].key for row in sample.rows_at]
        await storage.close()

    asyncio.run(check())


async def test_losers_are_told_apart(opened: Open) -> None:
    storage = await opened()
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, run_of(range(10), 5)), piece(0, "b", 0, run_of(range(20), 5))])
    assert (await count(storage, [EVERYTHING], {0: "b"}))[0] == [20]
    assert (await count(storage, [EVERYTHING], {}))[0] == [0]
    assert await slices(storage, EVERYTHING, {0: "a"}, "unknown") == []


async def test_reading_goes_on_at_any_row(opened: Open) -> None:
    storage, blocks = await opened(), run_of(range(100), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks[:3] + blocks[5:])])
    read = await storage.read(ReadBlocks("s", 0, "a", 0, 14, 99))
    assert [block.first for block in read] == [10, 20], "up to the gap"
    assert await storage.read(ReadBlocks("s", 0, "a", 0, 30, 99)) == []
    assert [one.first for one in await storage.read(ReadBlocks("s", 0, "a", 0, 55, 70, 1))] == [50], "one at least"
    with pytest.raises(ShuffleNotFound):
        await storage.read(ReadBlocks("other", 0, "a", 0, 0, 9))


# --- what goes wrong ----------------------------------------------------------------------------------------------------


def data_file(tmp_path: Path) -> Path:
    return tmp_path / "s" / "s" / "data-000001"


def harm(path: Path, block: Block) -> None:
    """One bit of the block's data."""
    data = bytearray(path.read_bytes())
    at = data.find(block.data)
    data[at + len(block.data) // 2] ^= 4
    path.write_bytes(data)


async def test_a_damaged_block_is_missing_and_can_be_stored_again(opened: Open, tmp_path: Path) -> None:
    storage, blocks = await opened(), run_of(range(100), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    harm(data_file(tmp_path), blocks[4])
    assert [one.first for one in await storage.read(ReadBlocks("s", 0, "a", 0, 0, 99))] == [0, 10, 20, 30]
    assert await storage.read(ReadBlocks("s", 0, "a", 0, 40, 99)) == [], "dropped"
    assert storage.counters["damaged"] == 1
    storage = await opened()
    assert (await count(storage, [EVERYTHING], {0: "a"}))[0] == [90], "for good"
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    assert await read_all(storage) == [*range(100)]


async def test_damage_in_the_first_block_that_is_read_is_told(opened: Open, tmp_path: Path) -> None:
    storage, blocks = await opened(), run_of(range(30), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    harm(data_file(tmp_path), blocks[0])
    with pytest.raises(DataLost):
        await storage.read(ReadBlocks("s", 0, "a", 0, 0, 29))


async def test_a_power_cut_leaves_a_torn_tail(opened: Open, tmp_path: Path) -> None:
    storage, blocks = await opened(), run_of(range(50), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    whole = data_file(tmp_path).read_bytes()
    for size in (len(whole) - 1, len(whole) - 40, len(whole) // 2):
        data_file(tmp_path).write_bytes(whole[:size])
        storage = await opened()
        rows = (await count(storage, [EVERYTHING], {0: "a"}))[0][0]
        assert 0 < rows < 50
        await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
        assert await read_all(storage) == [*range(50)]


async def test_zeros_where_the_disk_did_not_get_to_are_no_rows(opened: Open, tmp_path: Path) -> None:
    storage, blocks = await opened(), run_of(range(50), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    data = bytearray(data_file(tmp_path).read_bytes())
    at = data.find(blocks[3].data)
    data[at : at + len(blocks[3].data)] = bytes(len(blocks[3].data))
    data_file(tmp_path).write_bytes(data)
    storage = await opened()
    assert await read_all(storage) == [*range(30), *range(40, 50)]
    assert storage.counters["damaged_at_start"] == 1


async def test_a_full_disk_is_told_and_recovered_from(opened: Open) -> None:
    storage, blocks = await opened(free_bytes_min=1 << 60), run_of(range(50), 10)
    for _ in range(2):
        with pytest.raises(StorageFull):
            await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    storage = await opened(free_bytes_min=0)  # somebody made room
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks)])
    assert await read_all(storage) == [*range(50)]


async def test_a_block_damaged_on_its_way_is_refused_and_the_others_are_stored(opened: Open) -> None:
    storage, blocks = await opened(), run_of(range(20), 10)
    wrong = Block(*(*[getattr(blocks[1], name) for name in Block.__struct_fields__][:-1], blocks[1].data[:-1] + b"?"))
    bad, good = await asyncio.gather(
        storage.store("s", "visits", SPEC, [piece(0, "a", 0, [wrong])]),
        storage.store("s", "visits", SPEC, [piece(0, "a", 0, blocks[:1])]),
        return_exceptions=True,
    )
    assert isinstance(bad, FrameError)
    assert good is None
    assert await read_all(storage) == [*range(10)]


async def test_more_than_memory_has_room_for_is_refused_for_now(opened: Open) -> None:
    storage, blocks = await opened(memory=4000), run_of(range(40), 10, pad=50)
    answers = await asyncio.gather(
        *(storage.store("s", "visits", SPEC, [piece(0, "a", 0, [block])]) for block in blocks), return_exceptions=True
    )
    assert any(isinstance(answer, Overloaded) for answer in answers)
    for block in blocks:
        await storage.store("s", "visits", SPEC, [piece(0, "a", 0, [block])])
    assert await read_all(storage) == [*range(40)]


async def test_an_id_can_not_leave_the_folder(opened: Open) -> None:
    storage = await opened()
    for id in ("../x", "", "a/b", ".", "x" * 101):
        with pytest.raises(CallError):
            await storage.store(id, "visits", SPEC, [])


# --- the leader's orders --------------------------------------------------------------------------------------------------


async def test_an_older_leader_is_refused_also_after_a_new_start(opened: Open) -> None:
    storage = await opened()
    await storage.obey(7)
    await storage.obey(7)
    storage = await opened()
    with pytest.raises(StaleEpoch):
        await storage.obey(6)


async def test_of_two_leaders_at_once_the_later_one_is_remembered(opened: Open) -> None:
    storage = await opened()
    await storage.obey(4)
    answers = await asyncio.gather(storage.obey(6), storage.obey(5), return_exceptions=True)
    assert answers[0] is None
    assert isinstance(answers[1], StaleEpoch)
    storage = await opened()
    assert storage.epoch == 6


async def test_an_order_to_forget_of_an_older_table_is_refused(opened: Open) -> None:
    """The same leader gave it before it ordered this follower to fetch: it was late on its way."""
    storage, everything = await opened(), run_of(range(100), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, everything)])
    orders = FencedCommands(storage, RangeQueries(storage))
    orders.note("s", 3)
    with pytest.raises(TemporaryError):
        await orders.keep(1, "s", 2, [], CommittedAttempts({0: "a"}))
    assert await read_all(storage) == [*range(100)]
    await orders.keep(1, "s", 3, [], CommittedAttempts({0: "a"}))
    assert await read_all(storage) == []


@pytest.mark.parametrize(
    "late", [lambda storage, orders: setattr(storage, "epoch", 2), lambda storage, orders: orders.note("s", 3)]
)
async def test_an_order_to_forget_ends_when_it_becomes_late(
    opened: Open, late: Callable[[RangeStorage, FencedCommands], None]
) -> None:
    """It looks into a block; meanwhile another order comes."""
    storage = await opened()
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, run_of(range(100), 50))])
    orders = FencedCommands(storage, RangeQueries(storage))
    inside = Interval(Position(key_of(10), 0, 0, 0), Position(key_of(20), 0, 0, 0))
    going = asyncio.create_task(orders.keep(1, "s", 2, [inside], CommittedAttempts({0: "a"})))
    await asyncio.sleep(0)
    late(storage, orders)
    with pytest.raises((StaleEpoch, TemporaryError)):
        await going
    assert await read_all(storage) == [*range(100)]


async def test_what_is_outside_is_forgotten_and_its_space_given_back(opened: Open, tmp_path: Path) -> None:
    storage = await opened()
    for run in range(4):
        await storage.store("s", "visits", SPEC, [piece(0, "a", run, run_of(range(1000), 50, pad=100))])
    await storage.store("s", "visits", SPEC, [piece(0, "loser", 0, run_of(range(1000), 50, pad=100))])
    before = data_file(tmp_path).stat().st_size
    kept = Interval(Position(key_of(500), 0, 0, 0), Position(key_of(520), 0, 0, 0))
    rows = (await count(storage, [kept], {0: "a"}))[0]
    await keep(storage, [kept], None)
    assert (await count(storage, [kept], {0: "loser"}))[0] != [0], "it may still win"
    await keep(storage, [kept], {0: "a"})
    assert (await count(storage, [kept], {0: "loser"}))[0] == [0]
    assert (await count(storage, [kept], {0: "a"}))[0] == rows
    await storage.store(
        "s", "visits", SPEC, [piece(0, "a", 9, run_of(range(1000), 50, pad=100))]
    )  # the file that grew is closed now
    await keep(storage, [kept], {0: "a"})
    storage.shuffles["s"].current = None
    await keep(storage, [kept], {0: "a"})
    assert sum(path.stat().st_size for path in (tmp_path / "s" / "s").glob("data-*")) < before / 4
    assert (await count(storage, [kept], {0: "a"}))[0][0] > rows[0]
    storage = await opened()
    assert (await count(storage, [kept], {0: "a"}))[0][0] > rows[0]


async def test_what_came_again_counts_after_a_new_start_and_not_what_was_forgotten_before(opened: Open) -> None:
    """The simulation found this one: a forgotten block lies in its file as long as others live there."""
    storage, blocks = await opened(), run_of(range(100), 10)
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, [*blocks[:2], blocks[5]])])
    await keep(storage, [Interval(None, Position(key_of(20), 0, 0, 0))], {0: "a"})
    assert await read_all(storage) == [*range(20)]
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, run_of(range(100), 55)[1:])])
    storage = await opened()
    assert await read_all(storage) == [*range(20), *range(55, 100)]


async def test_all_outside_leaves_no_data(opened: Open, tmp_path: Path) -> None:
    storage = await opened()
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, run_of(range(100), 10))])
    await keep(storage, [], {0: "a"})
    assert not list((tmp_path / "s" / "s").glob("data-*"))
    await storage.store("s", "visits", SPEC, [piece(0, "a", 0, run_of(range(100), 10))])
    assert await read_all(storage) == [*range(100)], "and it may come back"


async def test_a_forgotten_shuffle_does_not_come_back_with_late_pieces(opened: Open, tmp_path: Path) -> None:
    storage = await opened()
    late = [piece(0, "a", 0, run_of(range(100), 10))]
    await storage.store("s", "visits", SPEC, late)
    await asyncio.gather(storage.store("s", "visits", SPEC, [piece(0, "a", 1, run_of(range(9), 3))]), storage.forget("s"))
    with pytest.raises(ShuffleNotFound):
        await storage.store("s", "visits", SPEC, late)
    assert not (tmp_path / "s" / "s").exists()
    await storage.forget("neverseen")

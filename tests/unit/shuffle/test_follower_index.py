"""Which rows a follower has (stored.py), its files (datafile.py), its memory (memory.py), against plain models."""

from __future__ import annotations

import asyncio
import itertools
import resource
import signal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.shuffle.blocks import divide
from roq.shuffle.node.datafile import DataFile, encode
from roq.shuffle.node.memory import PAUSE, RESUME, Budget
from roq.shuffle.node.stored import BlockEntry, RunIndex
from roq.shuffle.ranges import rows_before
from roq.wire.shuffle import Block, Position
from tests.harness.shuffle_rows import SPEC, key_of, positions, rows_in, run_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> DataFile:
    return DataFile(tmp_path_factory.mktemp("index") / "data-000001", 1)


def entry(file: DataFile, block: Block) -> BlockEntry:
    return BlockEntry(block.first, block.rows, block.first_key, block.last_key, block.crc, file, 0, len(block.data))


def stretch(first: int, end: int) -> Block:
    return Block(first, end - first, b"", b"", 0, b"x" * (end - first))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=12), st.integers(0, 35), st.integers(1, 10))
def test_rows_here_and_rows_missing(file: DataFile, adds: list[tuple[int, int]], first: int, rows: int) -> None:
    run = RunIndex((0, 0))
    here: set[int] = set()
    for begin, count in adds:
        mine = set(range(begin, begin + count))
        assert run.add(entry(file, stretch(begin, begin + count))) is not bool(mine & here)
        here |= mine if not mine & here else set()
    wanted = set(range(first, first + rows))
    missing = [row for begin, end in run.missing(first, first + rows) for row in range(begin, end)]
    assert missing == sorted(wanted - here)
    found = run.stretches(first, first + rows)
    assert [row for begin, end, _ in found for row in range(begin, end)] == sorted(wanted & here)
    assert sum(size for _, _, size in found) == len(wanted & here)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found)), "neighbours are one"


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=40),
    st.integers(1, 7),
    st.tuples(st.integers(-1, 7), st.integers(0, 2), st.integers(0, 2), st.integers(0, 41)),
    st.sets(st.integers(0, 40)),
)
def test_a_border_is_a_row_number(
    file: DataFile, keys: list[int], rows: int, border: tuple[int, int, int, int], lost: set[int]
) -> None:
    """Also with blocks missing, and with keys of any number of rows."""
    blocks = [block for at, block in enumerate(run_of(keys, rows)) if at not in lost]
    place = Position(key_of(border[0]), *border[1:])
    run = RunIndex((1, 1))
    for block in blocks:
        assert run.add(entry(file, block))
    found = run.row_of(place)
    if isinstance(found, BlockEntry):
        block = next(block for block in blocks if block.first == found.first)
        keys_of = [position.key for position in positions(1, 1, [block])]
        row = block.first + rows_before(keys_of, block.first, (1, 1), place)
        run.learn(place, found, row)
        assert run.row_of(place) == row, "asked once"
        found = row
    before = [position.row for position in positions(1, 1, blocks) if position < place]
    after = [position.row for position in positions(1, 1, blocks) if position >= place]
    assert all(row < found for row in before)
    assert all(row >= found for row in after)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(-1, 7), st.integers(0, 2), st.integers(0, 2), st.integers(0, 31)), max_size=5),
)
def test_a_block_is_divided_at_borders(keys: list[int], borders: list[tuple[int, int, int, int]]) -> None:
    (block,) = run_of(keys, 100)
    places = sorted(Position(key_of(key), *rest) for key, *rest in borders)
    parts = divide(SPEC, block, (1, 1), places)
    every = positions(1, 1, [block])
    expected = [sum(place <= row for place in places) for row in every]
    assert [number for number, part in parts for _ in range(part.rows)] == expected
    assert [position for _, part in parts for position in positions(1, 1, [part])] == every
    for _, part in parts:
        assert (part.first_key, part.last_key) == (every[part.first].key, every[part.first + part.rows - 1].key)
    assert rows_in(part for _, part in parts) == rows_in([block])


def test_an_index_forgets_and_moves_blocks(file: DataFile) -> None:
    run = RunIndex((0, 0))
    first, second = entry(file, stretch(0, 5)), entry(file, stretch(5, 9))
    assert run.add(first)
    assert run.add(second)
    moved = msgspec.structs.replace(second, offset=77)
    assert run.replace(second, moved)
    assert not run.replace(second, moved)
    assert run.remove(first)
    assert not run.remove(first)
    assert [one.offset for one in run.between(0, 100)] == [77]
    assert (run.begin, run.end) == (5, 9)


# --- files ------------------------------------------------------------------------------------------------------------


def records(path: Path) -> list[int]:
    """First rows of what can be read."""
    return [found.head.first for found in DataFile(path, 1).scan()]


def written(path: Path, blocks: list[Block]) -> list[int]:
    """Appended; where each begins."""
    file = DataFile(path, 1)
    return [file.append(list(encode(3, "attempt", 0, block))) for block in blocks]


def test_a_torn_record_is_the_end(tmp_path: Path) -> None:
    path = tmp_path / "data"
    places = written(path, run_of(range(30), 10))
    for size in range(places[2] + 1, path.stat().st_size, 7):
        data = path.read_bytes()
        (tmp_path / "torn").write_bytes(data[:size])
        assert records(tmp_path / "torn") == [0, 10]


def test_what_is_damaged_is_skipped_and_the_next_record_found(tmp_path: Path) -> None:
    path = tmp_path / "data"
    places = written(path, run_of(range(50), 10))
    with path.open("r+b") as file:
        file.seek(places[1] + 20)  # in the head of the second one
        file.write(b"\xff\xff\xff")
        file.seek(places[3])  # the mark of the fourth
        file.write(b"\0\0\0\0")
    assert records(path) == [0, 20, 40]


def test_a_block_found_damaged_is_not_told_of_again(tmp_path: Path) -> None:
    path = tmp_path / "data"
    written(path, run_of(range(30), 10))
    file = DataFile(path, 1)
    file.void([found.offset for found in file.scan()][1])
    assert records(path) == [0, 20]


def test_an_append_that_fails_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data"
    written(path, run_of(range(10), 10))
    file = DataFile(path, 1)
    before = file.size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python has it
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 50, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            file.append([b"x" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == before


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_budget_pauses_and_resumes_at_its_marks() -> None:
    budget = Budget(10_000)
    most = budget.held_max
    budget.held = int(most * PAUSE)
    assert not budget.paused
    budget.held += 1
    assert budget.paused
    budget.held = int(most * RESUME) + 1
    assert budget.paused, "above the lower mark"
    budget.held -= 1
    assert not budget.paused
    budget.held += 100
    assert not budget.paused, "below the upper mark"


def test_storage_always_takes_one_request() -> None:
    budget = Budget(1000)
    assert budget.room_to_store(5000)
    budget.pending = 60
    assert budget.room_to_store(40)
    assert not budget.room_to_store(41)


@given(st.lists(st.tuples(st.sampled_from(["hold", "store", "read"]), st.integers(1, 100)), max_size=60))
def test_all_that_is_let_in_is_within_the_budget(wishes: list[tuple[str, int]]) -> None:
    budget = Budget(1000)
    for kind, size in wishes:
        if kind == "hold" and budget.room_to_hold(size):
            budget.held += size
        elif kind == "store" and budget.room_to_store(size):
            budget.pending += size
        elif kind == "read" and budget.room_to_read(size):
            budget.reading += size
        assert budget.used <= budget.size


async def test_what_is_borrowed_waits_until_something_is_given_back() -> None:
    budget = Budget(1000)
    await budget.borrow(500)  # one always fits
    waiting = [asyncio.ensure_future(budget.borrow(60)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    budget.give_back(500)
    await waiting[0]
    await asyncio.sleep(0)
    assert not waiting[1].done(), "no room for both"
    budget.give_back(60)
    await waiting[1]
    assert budget.borrowed == 60

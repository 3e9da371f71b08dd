"""Merging slices of sorted runs: the order and the rows are right whatever the keys and however little memory there is."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from roq.errors import DataLost, StorageFull
from roq.shuffle import blocks, merge
from roq.shuffle.blocks import SortedRun
from roq.shuffle.keys import KeyEncoder, order
from roq.shuffle.writer import PLANNED
from roq.wire.shuffle import Block, RunSlice

SCHEMA = pa.schema([("k", pa.binary()), ("partition", pa.int32()), ("run", pa.int32()), ("row", pa.int32())])
ENCODER = KeyEncoder(SCHEMA, ["k"])
# runs, rows of each, memory: sorted at once, block by block, through a file, through a file more than once
WAYS = [(6, 3000, 1 << 24), (6, 9000, 1 << 20), (40, 2000, 1 << 20), (60, 4000, 1 << 19)]


def memory(loaded: int) -> int:
    """What a reader is given so that it plans with this much for its slices."""
    much = (loaded + merge.OUT_COPIES * merge.OUT_BYTES) / PLANNED
    little = loaded / (PLANNED - merge.OUT_COPIES / merge.OUT_PART)
    return int(much if much > merge.OUT_PART * merge.OUT_BYTES else little) + 1


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, merge):
        monkeypatch.setattr(module, "BLOCK_ROWS", 512)


class Runs:
    """A SliceSource in memory, over whole runs of which a part is wanted."""

    def __init__(self, runs: dict[tuple[int, int], list[Block]], slices: Sequence[RunSlice]) -> None:
        self.runs, self.slices = runs, slices
        self.given = 0

    def blocks(self, slice: RunSlice) -> Iterator[Block]:
        for block in self.runs[slice.partition, slice.run]:
            if block.first + block.rows > slice.first and block.first < slice.first + slice.rows:
                self.given += 1
                yield block

    def close(self) -> None:
        pass


def runs_of(keys: list[list[bytes]], draw: random.Random) -> tuple[Runs, list[tuple[bytes, int, int, int]]]:
    """A run per list, two per partition, and a random part of each; and the rows in order."""
    runs, slices, rows = {}, [], []
    for number, plain in enumerate(keys):
        partition, run = divmod(number, 2)
        plain = sorted(plain)
        columns = [plain, [partition] * len(plain), [run] * len(plain), range(len(plain))]
        arrays = [pa.array(each, kind) for each, kind in zip(columns, SCHEMA.types, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
        found = ENCODER.encode(batch)
        runs[partition, run] = list(SortedRun(batch, found, order(found)).blocks())
        first = draw.randrange(len(plain) + 1)
        count = draw.randrange(len(plain) - first + 1)
        slices.append(RunSlice(partition, "x", run, first, count))
        rows += [(plain[row], partition, run, row) for row in range(first, first + count)]
    draw.shuffle(slices)
    return Runs(runs, slices), sorted(rows)


def keys_of(shape: str, runs: int, rows: int, draw: random.Random) -> list[list[bytes]]:
    match shape:
        case "random":
            return [[draw.randbytes(16) for _ in range(rows)] for _ in range(runs)]
        case "skewed":
            return [
                [b"hot" if draw.random() < 0.3 else draw.randbytes(draw.randrange(20)) for _ in range(rows)]
                for _ in range(runs)
            ]
        case "equal":
            return [[b"one"] * rows for _ in range(runs)]
        case "disjoint":
            return [[f"{run:03}{draw.randrange(10**6)}".encode() for _ in range(rows)] for run in range(runs)]
        case "few":
            return [[bytes([draw.randrange(4)]) for _ in range(rows)] for _ in range(runs)]
        case "uneven":
            return [[draw.randbytes(8) for _ in range(rows if run % 5 == 0 else draw.randrange(3))] for run in range(runs)]
        case _:
            return [[] for _ in range(runs)]


@pytest.mark.parametrize("shape", ["random", "skewed", "equal", "disjoint", "few", "uneven", "empty"])
@pytest.mark.parametrize(("runs", "rows", "budget"), WAYS)
def test_rows_leave_in_the_order_of_their_positions(shape: str, runs: int, rows: int, budget: int) -> None:
    draw = random.Random(f"{shape}{runs}{rows}")
    source, expected = runs_of(keys_of(shape, runs, rows, draw), draw)
    found: list[tuple[bytes, int, int, int]] = []
    for batch in merge.merged(source, ENCODER, memory(budget)):
        assert 0 < batch.num_rows <= merge.OUT_ROWS
        found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
    assert found == expected


def test_every_way_of_merging_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, block by block, through a file, through a file more than once: the cases above reach all four."""
    taken: list[str] = []

    def noting(name: str, plain: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            taken.append(name)
            return plain(*arguments)

        return noted

    for name in ("_merge", "_gather", "_merged_once"):
        monkeypatch.setattr(merge, name, noting(name, getattr(merge, name)))
    ways = []
    for runs, rows, budget in WAYS:
        taken.clear()
        draw = random.Random(1)
        source, expected = runs_of(keys_of("random", runs, rows, draw), draw)
        assert sum(batch.num_rows for batch in merge.merged(source, ENCODER, memory(budget))) == len(expected)
        ways.append(set(taken))
    assert ways == [{"_gather"}, {"_merge"}, {"_gather", "_merge"}, {"_gather", "_merge", "_merged_once"}]


@pytest.mark.parametrize("small", ["first", "last"])
def test_large_rows_are_merged_few_at_a_time(monkeypatch: pytest.MonkeyPatch, small: str) -> None:
    """However small those of the first or of the last slice are."""
    together: list[int] = []
    plain = merge._merge

    def noting(cursors: list[merge._Cursor], encoder: KeyEncoder, room: merge._Room) -> Iterator[pa.RecordBatch]:
        together.append(len(cursors))
        return plain(cursors, encoder, room)

    monkeypatch.setattr(merge, "_merge", noting)
    draw = random.Random(6)
    large = [[draw.randbytes(60_000) for _ in range(12)] for _ in range(10)]
    keys = [[b"x"] * 40_000, *large] if small == "first" else [*large, [b"x"] * 9]
    source, _ = runs_of(keys, draw)
    source.slices = [RunSlice(number // 2, "x", number % 2, 0, len(each)) for number, each in enumerate(keys)]
    budget = 1 << 21
    rows = [key for batch in merge.merged(source, ENCODER, memory(budget)) for key in batch["k"].to_pylist()]
    assert rows == sorted(key for each in keys for key in each)
    assert together
    assert max(together) == merge.FAN_IN_MIN, "two blocks of each of two are a good part of this memory"


def test_rows_are_put_together_in_pieces_that_arrow_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much memory there is."""
    assert merge.LOADED_BYTES_MAX // 2 < 1 << 31, "offsets of strings are 32-bit"
    monkeypatch.setattr(merge, "LOADED_BYTES_MAX", 1 << 21)
    sizes: list[int] = []
    plain = merge._sorted

    def noting(batches: list[pa.RecordBatch], encoder: KeyEncoder) -> SortedRun:
        sizes.append(sum(batch.nbytes for batch in batches))
        return plain(batches, encoder)

    monkeypatch.setattr(merge, "_sorted", noting)
    draw = random.Random(7)
    for runs in (4, 60):
        source, expected = runs_of([[draw.randbytes(200) for _ in range(3000)] for _ in range(runs)], draw)
        assert sum(batch.num_rows for batch in merge.merged(source, ENCODER, 1 << 50)) == len(expected)
    assert 0 < max(sizes) <= 1 << 20


@pytest.mark.parametrize("budget", [1 << 26, 1 << 19])
def test_missing_blocks_are_told(budget: int) -> None:
    draw = random.Random(3)
    for missing in range(3):
        source, _ = runs_of(keys_of("random", 4, 2000, draw), draw)
        source.slices = [RunSlice(number // 2, "x", number % 2, 0, 2000) for number in range(4)]
        whole = source.runs[1, 0]
        assert len(whole) >= 3
        source.runs[1, 0] = whole[:missing] + whole[missing + 1 :]
        with pytest.raises(DataLost, match="rows are missing"):
            for _ in merge.merged(source, ENCODER, memory(budget)):
                pass


def test_a_reader_that_stops_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    draw = random.Random(4)
    source, _ = runs_of(keys_of("random", 60, 3000, draw), draw)
    rows = merge.merged(source, ENCODER, memory(1 << 19))
    assert isinstance(rows, Generator)
    next(rows)
    rows.close()
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_temporary_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: open("/dev/full", "w+b"))  # noqa: SIM115 (closed by merged)
    draw = random.Random(5)
    source, _ = runs_of(keys_of("random", 60, 3000, draw), draw)
    with pytest.raises(StorageFull, match="temporary file"):
        list(merge.merged(source, ENCODER, memory(1 << 19)))

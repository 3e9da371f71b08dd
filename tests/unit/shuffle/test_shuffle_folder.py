"""Shuffles in a folder, through what programs use: every row once and in order, and clear errors for what can't be."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import roq.shuffle
from roq.errors import (
    AttemptConflict,
    AttemptNotFound,
    CallError,
    Closed,
    InvalidName,
    PayloadTooLarge,
    SchemaMismatch,
    ShuffleConflict,
    ShuffleNotFound,
    ShuffleNotSealed,
    ShuffleSealed,
)
from roq.shuffle.ranges import imbalance
from roq.shuffle.writer import MEMORY_BYTES_MIN
from roq.wire.shuffle import Receipt, ShuffleState

SCHEMA = pa.schema([("k", pa.string()), ("id", pa.int64())])
Rows = list[tuple[str | None, int]]


@pytest.fixture
def shuffles(tmp_path: Path) -> Iterator[roq.shuffle.Shuffles]:
    with roq.shuffle.open(f"file://{tmp_path}/s") as opened:
        yield opened


def table(rows: Sequence[tuple[str | None, int]]) -> pa.Table:
    return pa.table([[key for key, _ in rows], [number for _, number in rows]], schema=SCHEMA)


def write(shuffles: roq.shuffle.Shuffles, name: str, partition: int, rows: Rows, attempt: str | None = None) -> Receipt:
    with shuffles.writer(name, partition, attempt, memory_bytes=MEMORY_BYTES_MIN) as writer:
        for begin in range(0, len(rows), 10_000):
            writer.write(table(rows[begin : begin + 10_000]))
        return writer.finish()


def read(shuffles: roq.shuffle.Shuffles, name: str) -> Rows:
    found: Rows = []
    for each in shuffles.describe(name).ranges:
        rows: Rows = []
        for batch in shuffles.read(name, each.number, memory_bytes=MEMORY_BYTES_MIN):
            assert batch.schema.equals(SCHEMA)
            rows += zip(batch["k"].to_pylist(), batch["id"].to_pylist(), strict=True)
        assert len(rows) == each.rows
        found += rows
    return found


def filled(shuffles: roq.shuffle.Shuffles, name: str = "s", count: int = 3, ranges: int = 8) -> list[Receipt]:
    shuffles.create(name, ["k"], SCHEMA, ranges=ranges)
    draw = random.Random(7)
    return [
        write(shuffles, name, partition, [(f"{draw.random()}", partition * 1000 + at) for at in range(1000)])
        for partition in range(count)
    ]


def keys_of(shape: str, draw: random.Random) -> list[list[str | None]]:
    """What each partition writes."""
    count = 30_000
    match shape:
        case "uniform":
            return [[f"{draw.getrandbits(64):016x}" for _ in range(count)] for _ in range(3)]
        case "skewed":
            return [["hot" if draw.random() < 0.3 else f"{draw.random()}" for _ in range(count)] for _ in range(3)]
        case "sorted":
            return [[f"{partition * count + at:09}" for at in range(count)] for partition in range(3)]
        case "equal":
            return [["same"] * count for _ in range(3)]
        case "nulls":
            return [[None if draw.random() < 0.5 else f"{draw.random()}" for _ in range(count)] for _ in range(3)]
        case "wide":
            return [["x" * 300 + f"{draw.random()}" * 20 for _ in range(2000)] for _ in range(3)]
        case "empty partitions":
            return [[], ["b", "a"], []]
        case _:
            return []


@pytest.mark.parametrize("shape", ["uniform", "skewed", "sorted", "equal", "nulls", "wide", "empty partitions", "nothing"])
def test_every_row_once_and_in_order(shuffles: roq.shuffle.Shuffles, shape: str) -> None:
    draw = random.Random(shape)
    shuffles.create("s", ["k"], SCHEMA, ranges=16)
    written, receipts = [], []
    for partition, keys in enumerate(keys_of(shape, draw)):
        rows = [(key, partition * 1_000_000 + at) for at, key in enumerate(keys)]
        receipts.append(write(shuffles, "s", partition, rows))
        written += rows
    description = shuffles.commit("s", receipts)
    found = read(shuffles, "s")
    assert [key for key, _ in found] == sorted((key for key, _ in written), key=lambda key: (key is not None, key or ""))
    assert sorted(number for _, number in found) == sorted(number for _, number in written)
    assert (description.state, description.rows) == (ShuffleState.SEALED, len(written))
    assert description.size == sum(receipt.size for receipt in receipts) == sum(each.size for each in description.ranges)
    if len(written) > 5000:
        assert len(description.ranges) == 16
        assert imbalance([each.size for each in description.ranges]) <= 1.15
    same = [
        row for batch in shuffles.read_all("s") for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    ]
    assert same == found


def test_several_key_columns(shuffles: roq.shuffle.Shuffles) -> None:
    draw = random.Random(2)
    schema = pa.schema([("v", pa.binary()), ("a", pa.int32()), ("b", pa.float64()), ("c", pa.list_(pa.int8()))])
    rows = [(draw.randbytes(5), draw.choice([None, -1, 3]), draw.choice([None, -0.5, 2.0]), [at % 100]) for at in range(5000)]
    shuffles.create("s", ["a", "b", "v"], schema, ranges=4)
    with shuffles.writer("s", 0) as writer:
        writer.write(pa.table([list(column) for column in zip(*rows, strict=True)], schema=schema))
        shuffles.commit("s", [writer.finish()])
    found = [tuple(row.values()) for batch in shuffles.read_all("s") for row in batch.to_pylist()]

    def key(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple((value is not None, value or 0) for value in row[1:3]) + row[:1]

    assert found == sorted(rows, key=key)


def test_ranges_are_balanced(shuffles: roq.shuffle.Shuffles) -> None:
    for kind in ("uniform", "zipf"):
        draw = random.Random(kind)
        shuffles.create(kind, ["k"], SCHEMA, ranges=64)
        weights = [1 / rank**1.1 for rank in range(1, 2001)]
        receipts = []
        for partition in range(4):
            numbers = (
                draw.choices(range(2000), weights, k=50_000)
                if kind == "zipf"
                else [draw.getrandbits(60) for _ in range(50_000)]
            )
            receipts.append(write(shuffles, kind, partition, [(f"{number:016x}", partition) for number in numbers]))
        description = shuffles.commit(kind, receipts)
        assert len(description.ranges) == 64
        for values in ([each.rows for each in description.ranges], [each.size for each in description.ranges]):
            assert imbalance(values) <= 1.15, kind


def test_only_winners_count_and_the_rest_goes(shuffles: roq.shuffle.Shuffles, tmp_path: Path) -> None:
    shuffles.create("s", ["k"], SCHEMA)
    loser = write(shuffles, "s", 0, [("a", 1)] * 10)
    winner = write(shuffles, "s", 0, [("b", 2)] * 5)
    unreported = write(shuffles, "s", 1, [("c", 3)] * 7)
    under_way = shuffles.writer("s", 2)
    under_way.write(table([("d", 4)]))
    assert shuffles.describe("s").stored == 3
    assert shuffles.commit("s", [winner]).winners == {0: winner.attempt}
    assert read(shuffles, "s") == [("b", 2)] * 5
    assert [path.name for path in (tmp_path / "s/s.shuffle/attempts").iterdir()] == [f"0-{winner.attempt}.run"]
    with pytest.raises(ShuffleSealed, match="while attempt"):
        under_way.finish()
    under_way.abandon()
    with pytest.raises(ShuffleSealed, match="nothing can be written"):
        shuffles.writer("s", 3)
    for others in ([loser], [unreported], [winner, unreported], []):
        with pytest.raises(ShuffleSealed, match="other attempts"):
            shuffles.commit("s", others)
    assert shuffles.commit("s", [winner]) == shuffles.describe("s")


def test_commits_that_can_not_be(shuffles: roq.shuffle.Shuffles) -> None:
    receipts = filled(shuffles)
    with pytest.raises(AttemptConflict, match=r"\[0\]"):
        shuffles.commit("s", [*receipts, write(shuffles, "s", 0, [])])
    with pytest.raises(AttemptConflict, match="reported twice"):
        shuffles.commit("s", [*receipts, receipts[0]])
    with pytest.raises(AttemptNotFound, match="'none' of partition 9"):
        shuffles.commit("s", [*receipts, Receipt(9, "none", 0, 0, 0)])
    with pytest.raises(AttemptNotFound, match="rows=1000"):
        shuffles.commit("s", [Receipt(0, receipts[0].attempt, 999, receipts[0].size, 1)])
    with pytest.raises(ShuffleNotFound):
        shuffles.commit("none", receipts)
    assert shuffles.describe("s").state is ShuffleState.FILLING
    shuffles.commit("s", receipts)


def test_attempts_that_can_not_be(shuffles: roq.shuffle.Shuffles) -> None:
    (receipt,) = filled(shuffles, count=1)
    with pytest.raises(AttemptConflict, match="begun before"):
        shuffles.writer("s", 0, receipt.attempt)
    with shuffles.writer("s", 0, "mine"), pytest.raises(AttemptConflict, match="begun before"):
        shuffles.writer("s", 0, "mine")
    assert write(shuffles, "s", 0, [("a", 1)], "mine").attempt == "mine", "abandoned, it may begin again"
    for partition in (-1, 1_000_000):
        with pytest.raises(CallError, match="partition is"):
            shuffles.writer("s", partition)
    with pytest.raises(InvalidName):
        shuffles.writer("s", 0, "a/b")
    with pytest.raises(CallError, match="memory_bytes"):
        shuffles.writer("s", 0, memory_bytes=1000)
    with pytest.raises(ShuffleNotFound, match="no shuffle 'none'"):
        shuffles.writer("none", 0)


def test_a_writer_is_left(shuffles: roq.shuffle.Shuffles, tmp_path: Path) -> None:
    shuffles.create("s", ["k"], SCHEMA)
    attempts = tmp_path / "s/s.shuffle/attempts"
    with shuffles.writer("s", 0) as writer:
        writer.write(table([("a", 1)]))
    assert not list(attempts.iterdir()), "not finished"
    with pytest.raises(ZeroDivisionError), shuffles.writer("s", 0) as writer:
        writer.write(table([("a", 1)] * (1 // 0)))
    assert not list(attempts.iterdir()), "an exception"
    with pytest.raises(Closed, match="abandoned"):
        writer.write(table([]))
    with shuffles.writer("s", 0) as writer:
        receipt = writer.finish()
        assert writer.finish() == receipt
    with pytest.raises(Closed, match="finished"):
        writer.write(table([]))
    assert receipt.runs == receipt.rows == 0
    shuffles.commit("s", [receipt])
    assert read(shuffles, "s") == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pa.table({"k": ["a"]}), "the columns are"),
        (pa.table({"k": ["a"], "x": [1]}), "the columns are"),
        (pa.table({"k": ["a"], "id": ["1"]}), "column 'id' is of type string"),
        (pa.table({"k": pa.array(["a"], pa.large_string()), "id": [1]}), "column 'k' is of type large_string"),
        ([("a", 1)], "got list"),
    ],
)
def test_other_columns_are_refused(shuffles: roq.shuffle.Shuffles, data: object, says: str) -> None:
    shuffles.create("s", ["k"], SCHEMA)
    with shuffles.writer("s", 0) as writer, pytest.raises(SchemaMismatch, match=says):
        writer.write(data)


def test_columns_in_another_order_and_slices_are_taken(shuffles: roq.shuffle.Shuffles) -> None:
    shuffles.create("s", ["k"], SCHEMA)
    with shuffles.writer("s", 0) as writer:
        writer.write(pa.record_batch({"id": [0, 1, 2, 3], "k": ["d", "c", "b", "a"]}).slice(1, 2))
        writer.write(table([("x", 9)]))
        shuffles.commit("s", [writer.finish()])
    assert read(shuffles, "s") == [("b", 2), ("c", 1), ("x", 9)]


def test_a_row_has_a_limit(shuffles: roq.shuffle.Shuffles) -> None:
    shuffles.create("s", ["k"], SCHEMA)
    with shuffles.writer("s", 0) as writer, pytest.raises(PayloadTooLarge):
        writer.write(table([("x" * 9_000_000, 1)]))


def test_creating(shuffles: roq.shuffle.Shuffles) -> None:
    first = shuffles.create("a b.,%é", ["k"], SCHEMA, ranges=3)
    assert shuffles.create("a b.,%é", ["k"], SCHEMA, ranges=3) == first
    assert (first.state, first.ranges, first.stored) == (ShuffleState.FILLING, (), 0)
    for keys, schema, ranges in ((["id"], SCHEMA, 3), (["k"], SCHEMA.remove(1), 3), (["k"], SCHEMA, 4)):
        with pytest.raises(ShuffleConflict):
            shuffles.create("a b.,%é", keys, schema, ranges=ranges)
    shuffles.create("0", ["k"], SCHEMA)
    assert [each.name for each in shuffles.list()] == ["0", "a b.,%é"]
    with pytest.raises(SchemaMismatch):
        shuffles.create("x", ["none"], SCHEMA)
    for name in ("", "a/b", "..", "é" * 60):
        with pytest.raises(InvalidName):
            shuffles.create(name, ["k"], SCHEMA)
    for bad in ({"ranges": -1}, {"ranges": 10_001}, {"replicas": 0}):
        with pytest.raises(CallError):
            shuffles.create("x", ["k"], SCHEMA, **bad)


def test_removing(shuffles: roq.shuffle.Shuffles, tmp_path: Path) -> None:
    receipts = filled(shuffles)
    writer = shuffles.writer("s", 5)
    shuffles.remove("s")
    with pytest.raises(ShuffleNotFound):
        shuffles.remove("s")
    with pytest.raises(ShuffleNotFound):
        writer.finish()
    writer.abandon()
    assert not list((tmp_path / "s").iterdir())
    assert filled(shuffles)[0].attempt != receipts[0].attempt
    with pytest.raises(AttemptNotFound):
        shuffles.commit("s", receipts)


def test_reading_what_is_not_there(shuffles: roq.shuffle.Shuffles) -> None:
    with pytest.raises(ShuffleNotFound):
        shuffles.read("s", 0)
    receipts = filled(shuffles)
    with pytest.raises(ShuffleNotSealed):
        shuffles.read("s", 0)
    with pytest.raises(ShuffleNotSealed):
        shuffles.rebalance("s")
    shuffles.commit("s", receipts)
    for number in (-1, 8):
        with pytest.raises(CallError, match="ranges 0 to 7"):
            shuffles.read("s", number)


def test_rebalancing_moves_no_data(shuffles: roq.shuffle.Shuffles, tmp_path: Path) -> None:
    before = shuffles.commit("s", filled(shuffles))
    rows = read(shuffles, "s")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "s/s.shuffle/attempts").iterdir()}
    after = shuffles.rebalance("s", 5)
    assert (len(after.ranges), after.epoch, after.rows) == (5, 2, before.rows)
    assert imbalance([each.size for each in after.ranges]) <= 1.15
    old = {each.identity for each in before.ranges}
    assert len({each.identity for each in after.ranges} & old) == 5, "identities of ranges that share the most"
    assert read(shuffles, "s") == rows
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert shuffles.rebalance("s") == after, "the same number again: nothing changes"


def test_a_range_that_was_cut_anew_is_told(shuffles: roq.shuffle.Shuffles) -> None:
    shuffles.commit("s", filled(shuffles))
    rows = shuffles.read("s", 3)
    shuffles.rebalance("s", 5)
    with pytest.raises(CallError, match="cut anew"):
        next(rows)


def test_a_range_that_has_as_many_rows_as_before_is_told_too(shuffles: roq.shuffle.Shuffles) -> None:
    """Rows that get smaller: cuts into more ranges have ranges of the same number and rows, that are other ones."""
    shuffles.create("s", ["k"], SCHEMA)
    rows: Rows = [(f"{row:04}" + "x" * int(20_000 / (1 + row / 12)), row) for row in range(400)]
    shuffles.commit("s", [write(shuffles, "s", 0, rows)])
    cuts = {wanted: [each.rows for each in shuffles.rebalance("s", wanted).ranges] for wanted in range(2, 40)}
    few, many, same = next(
        (few, many, number)
        for few, many in combinations(cuts, 2)
        for number in range(1, len(cuts[few]))
        if cuts[few][number] == cuts[many][number] and sum(cuts[few][:number]) != sum(cuts[many][:number])
    )
    planned = shuffles.rebalance("s", few)
    every = shuffles.read_all("s")
    before = sum(cuts[few][:same])
    found: list[int] = []
    while len(found) < before:
        found += next(every)["id"].to_pylist()
    assert found == list(range(before))
    shuffles.rebalance("s", many)
    for late in (every, shuffles.read("s", same, planned=planned)):
        with pytest.raises(CallError, match="cut anew"):
            next(late)
    shuffles.rebalance("s", few)
    again = [number for batch in shuffles.read("s", same, planned=planned) for number in batch["id"].to_pylist()]
    assert again == list(range(before, before + cuts[few][same])), "the same rows in whatever table"


def test_a_range_of_a_shuffle_that_was_made_anew_is_told(shuffles: roq.shuffle.Shuffles) -> None:
    shuffles.commit("s", filled(shuffles, ranges=1))
    planned, rows = shuffles.describe("s"), shuffles.read("s", 0)
    shuffles.remove("s")
    shuffles.commit("s", filled(shuffles, ranges=1))
    for late in (rows, shuffles.read("s", 0, planned=planned)):
        with pytest.raises(CallError, match="made or cut anew"):
            next(late)
    shuffles.create("t", ["k"], SCHEMA)
    for name, plan in (("t", planned), ("t", shuffles.describe("t"))):
        with pytest.raises(CallError):
            shuffles.read(name, 0, planned=plan)


def test_a_closed_service(shuffles: roq.shuffle.Shuffles) -> None:
    shuffles.close()
    for call in (shuffles.list, lambda: shuffles.describe("s"), lambda: shuffles.create("s", ["k"], SCHEMA)):
        with pytest.raises(Closed):
            call()

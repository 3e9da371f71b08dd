"""The job sort against Spark's own: order, nothing lost, one row per key wherever ranges are cut, wrong calls."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from roq.errors import CallError
from roq.spark.pipeline import sort
from roq.spark.pipeline.last_of_each import differs

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
Rows = list[dict[str, Any]]


def some_rows(count: int) -> Rows:
    """Few keys, one of them a third of all, some null; a serial number, a time that goes up and down, rows that come twice."""
    source = random.Random(count)
    rows: Rows = []
    for number in range(count):
        user = None if number % 50 == 0 else "hot" if number % 3 == 0 else f"user-{source.randrange(count // 8)}"
        at = NOON + timedelta(seconds=source.randrange(10**6), microseconds=number)
        score = source.choice([None, float("nan"), source.random()])
        rows.append({"user": user, "at": at, "score": score, "serial": number})
    return rows


def run(spark: SparkSession, *given: str) -> sort.SortResult:
    return sort.work(spark, sort.parser().parse_args(given))


def files(folder: Path) -> Rows:
    """Rows in the order of the files."""
    parts = sorted(folder.glob("part-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def write(rows: Rows, folder: Path, parts: int = 3) -> str:
    folder.mkdir(parents=True)
    for part in range(parts):
        pq.write_table(pa.Table.from_pylist(rows[part::parts]), folder / f"{part}.parquet")
    return str(folder)


def files_of(folder: Path) -> list[str]:
    """All files, without Hadoop's checksums of them."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc")
    return sorted(str(path) for path in found)


def by_user(row: dict[str, Any]) -> tuple[bool, str]:
    return row["user"] is not None, row["user"] or ""


def text(rows: Rows) -> Counter[str]:
    return Counter(repr(row) for row in rows)


@pytest.mark.quick
def test_all_rows_in_key_order(spark: SparkSession, tmp_path: Path) -> None:
    rows = some_rows(3000)
    data = write(rows, tmp_path / "data")
    result = run(spark, data, "--out", f"{tmp_path}/100% out", "--keys", "user,serial", "--ranges", "5")
    assert (result.rows_in, result.rows_out, result.ranges) == (3000, 3000, 5)
    assert result.imbalance <= 1.15
    found, expected = files(tmp_path / "100% out"), sorted(rows, key=lambda row: (by_user(row), row["serial"]))
    assert [(row["serial"], repr(row["score"])) for row in found] == [(row["serial"], repr(row["score"])) for row in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100% out", "data"]  # the shuffle is gone


def best(rows: Rows, value: Callable[[dict[str, Any]], tuple[Any, ...]]) -> dict[str | None, dict[str, Any]]:
    found: dict[str | None, dict[str, Any]] = {}
    for row in rows:
        user = row["user"]
        if user not in found or value(row) > value(found[user]):
            found[user] = row
    return found


@pytest.mark.parametrize(
    ("keep", "order", "value"),
    [
        ("last", "at", lambda row: (row["at"],)),
        ("first", "at", lambda row: (-row["at"].timestamp(),)),
        ("first", "serial", lambda row: (-row["serial"],)),
    ],
)
def test_one_row_of_each_key_wherever_ranges_are_cut(
    spark: SparkSession, tmp_path: Path, keep: str, order: str, value: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> None:
    rows = some_rows(1200)
    data = write(rows, tmp_path / "data")
    given = ("--keys", "user", "--keep", keep, "--order", order, "--ranges", "16")  # "hot" alone fills five
    result = run(spark, data, "--out", f"{tmp_path}/out", *given)
    expected = best(rows, value)
    found = files(tmp_path / "out")
    assert [row["user"] for row in found] == [row["user"] for row in sorted(expected.values(), key=by_user)]
    assert {row["user"]: row["serial"] for row in found} == {user: row["serial"] for user, row in expected.items()}
    assert (result.rows_in, result.rows_out) == (1200, len(expected))


@pytest.mark.parametrize(("keep", "best_of"), [("first", min), ("last", max)])
def test_rows_without_a_value_are_taken_only_if_there_is_no_other(
    spark: SparkSession, tmp_path: Path, keep: str, best_of: Callable[[list[float]], float]
) -> None:
    rows = some_rows(600)
    data = write(rows, tmp_path / "data")
    run(spark, data, "--out", f"{tmp_path}/out", "--keys", "user", "--keep", keep, "--order", "score", "--ranges", "4")
    values: dict[str | None, list[float]] = {}
    for row in rows:
        score = row["score"]
        values.setdefault(row["user"], []).extend([] if score is None or math.isnan(score) else [score])
    for row in files(tmp_path / "out"):
        known = values[row["user"]]
        assert row["score"] == best_of(known) if known else row["score"] is None or math.isnan(row["score"])


def test_rows_wholly_alike_stay_once(spark: SparkSession, tmp_path: Path) -> None:
    rows = [{"key": number % 4, "a": a, "b": b} for number in range(300) for a, b in ((None, number % 3), (number % 3, None))]
    data = write(rows, tmp_path / "data")
    result = run(spark, data, "--out", f"{tmp_path}/out", "--keys", "key", "--distinct", "--ranges", "9")
    found = files(tmp_path / "out")
    assert text(found) == Counter(set(text(rows)))
    assert (result.rows_in, result.rows_out) == (600, 24)
    assert [row["key"] for row in found] == sorted(row["key"] for row in found)


def test_csv_and_an_empty_data_set(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("name,count\nb,2\na,10\na,9\n")
    result = run(spark, f"{tmp_path}/in.csv", "--out", f"{tmp_path}/out", "--keys", "name,count")
    assert [(row["name"], row["count"]) for row in files(tmp_path / "out")] == [("a", 9), ("a", 10), ("b", 2)]
    (tmp_path / "in.csv").write_text("name,count\n")
    again = ("--overwrite", "--schema", "name STRING, count INT", "--keep", "last", "--order", "count")
    result = run(spark, f"{tmp_path}/in.csv", "--out", f"{tmp_path}/out", "--keys", "name", *again)
    assert (result.rows_in, result.rows_out, result.imbalance) == (0, 0, 1.0)
    assert spark.read.parquet(f"{tmp_path}/out").columns == ["name", "count"]


def test_wrong_calls(spark: SparkSession, tmp_path: Path) -> None:
    data, out = write(some_rows(10), tmp_path / "data"), ("--out", f"{tmp_path}/out")
    other, mixed = write(some_rows(10), tmp_path / "other"), write(some_rows(10), tmp_path / "mixed", 2)
    (tmp_path / "mixed/1.parquet").rename(tmp_path / "mixed/1.csv")
    odd = str(tmp_path / "a.txt")
    Path(odd).write_text("one\n")
    for given, told in (
        ((data, *out, "--keys", "usr"), "there is no column 'usr'; there are user, at"),
        ((data, *out, "--keys", "user", "--keep", "last"), "--keep and --order go together"),
        ((data, *out, "--keys", "user", "--distinct", "--keep", "last", "--order", "at"), "give one of them"),
        ((data, *out, "--keys", "serial", "--keep", "first", "--order", "user"), "needs a number, a date or a time"),
        ((data, *out, "--keys", "user", "--keep", "last", "--order", "user"), "is a key"),
        ((odd, *out, "--keys", "user"), r"\(.*/a.txt\) do not show one format .* end in one of .parquet, .csv, .json, .jsonl"),
        ((mixed, *out, "--keys", "user"), r"\(.*/mixed/\d\.\w+, .*/mixed/\d\.\w+\) .* give --format"),
        ((str(tmp_path / "nothing"), *out, "--keys", "user"), "there is no file in .*/nothing"),
        ((data, "--out", other, "--keys", "user"), "--overwrite replaces it"),
        ((data, "--out", "s3a://bucket/out", "--keys", "user"), "give --shuffles"),
    ):
        with pytest.raises(CallError, match=told):
            run(spark, *given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "data", "mixed", "other"]


def test_a_result_never_lies_in_its_data_nor_holds_it(spark: SparkSession, tmp_path: Path) -> None:
    rows = some_rows(10)
    data = write(rows, tmp_path / "all" / "data")
    (tmp_path / "link").symlink_to(data)
    patterns = (
        data,
        f"file://{data}",
        f"{tmp_path}/link",
        f"{tmp_path}/all/d*",
        f"{tmp_path}/all/{{data}}",
        f"{data}/*.parquet",
    )
    for given in patterns:
        for out in (data, f"{data}/", f"file:{data}", f"{tmp_path}/all", f"{tmp_path}/other/../link"):
            with pytest.raises(CallError, match="lie in each other"):
                run(spark, given, "--format", "parquet", "--out", out, "--overwrite", "--keys", "user")
    with pytest.raises(CallError, match="lie in each other"):
        run(spark, data, "--out", f"{data}/sorted", "--keys", "user")
    assert files_of(tmp_path) == ["all/data/0.parquet", "all/data/1.parquet", "all/data/2.parquet"]


def test_a_write_that_fails_leaves_what_was_there(spark: SparkSession, tmp_path: Path) -> None:
    data, out = write(some_rows(50), tmp_path / "data"), f"{tmp_path}/out"
    run(spark, data, "--out", out, "--keys", "user")
    before = files_of(tmp_path)
    settings = spark._jsc.hadoopConfiguration()
    settings.set("parquet.writer.version", "bogus")
    try:
        with pytest.raises(Exception, match="bogus"):
            run(spark, data, "--out", out, "--overwrite", "--keys", "serial")
    finally:
        settings.unset("parquet.writer.version")
    assert files_of(tmp_path) == before
    users = [row["user"] for row in files(Path(out))]
    run(spark, data, "--out", f"file://{out}", "--overwrite", "--keys", "serial")
    found = files(Path(out))
    assert [row["serial"] for row in found] == list(range(50))
    assert sorted(map(str, users)) == sorted(str(row["user"]) for row in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


def test_keys_differ_as_the_shuffle_orders_them() -> None:
    nan = float("nan")
    values = [None, None, nan, nan, 0.0, -0.0, 1.0]
    batch = pa.RecordBatch.from_pydict({"key": pa.array(values, pa.float64()), "other": ["x"] * 7})
    found = differs(batch.slice(0, 6), batch.slice(1), ["other", "key"]).to_pylist()
    assert found == [False, True, False, True, False, True]
    text = pa.RecordBatch.from_pydict({"key": pa.array(["", "", None, "a"])})
    assert differs(text.slice(0, 3), text.slice(1), ["key"]).to_pylist() == [False, True, True]

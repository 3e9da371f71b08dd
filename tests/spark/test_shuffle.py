"""Key order, completeness and no duplicates of format("roq-shuffle"), beside Spark's own range sort of the same data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession, functions

import roq.shuffle
from roq.wire.shuffle import ShuffleState
from tests.spark.comparing import load, rows_of, same_as_spark, save, sizes

ROWS = 20_000
RANGES = 6
HASH = "xxhash64(id)"
SHAPES = {
    "uniform": (f"{HASH} as k",),
    "skewed": (f"if(id % 10 < 3, 7, {HASH}) as k",),  # one key has 30 % of the rows
    "sorted": ("id as k",),
    "reversed": (f"{ROWS} - id as k",),
    "all-equal": ("5 as k",),
    "few": ("id % 3 as k",),
    "nulls": (f"if(id % 4 = 0, null, {HASH}) as k",),
    "only-nulls": ("cast(null as string) as k",),
    "strings": ("concat_ws('é', hex(xxhash64(id % 5000)), cast(id % 7 as string)) as k",),
    "prefixes": ("repeat('a', cast(id % 40 as int)) as k",),
    "binary": ("unhex(substr(hex(xxhash64(id)), 1, 2 * cast(id % 8 as int))) as k",),
    "zero-bytes": (
        "cast(concat(unhex('00'), unhex(lpad(hex(id % 300), 4, '0')), repeat('\\0', cast(id % 5 as int))) as binary) as k",
    ),
    "booleans": ("if(id % 3 = 0, null, id % 2 = 0) as k",),
    "floats": (
        "case id % 6 when 0 then double('NaN') when 1 then double('-0.0') when 2 then 0.0D when 3 then double('-Infinity')"
        f" when 4 then null else {HASH} / 1e300 end as k",
    ),
    "halves": ("cast((id - 10000) / 8 as float) as k",),
    "decimals": (f"cast({HASH} / 1e6 as decimal(28, 5)) as k",),
    "dates": ("date_add(date'1969-06-01', cast(id % 4000 as int)) as k",),
    "timestamps": (f"timestamp_micros({HASH} % 100000000000000) as k",),
    "small-numbers": ("cast(id % 256 - 128 as tinyint) as k", "cast(-id as smallint) as l"),
    "mixed": (
        "if(id % 11 = 0, null, cast(id % 13 as string)) as k",
        "cast(xxhash64(id) % 1000 / 7 as double) as l",
        "if(id % 5 = 0, null, date_add(date'2020-01-01', cast(id % 40 as int))) as m",
        "cast(id % 3 as boolean) as n",
    ),
}


def shaped(spark: SparkSession, keys: tuple[str, ...], rows: int = ROWS, partitions: int = 5) -> DataFrame:
    """Rows with these keys first, then what makes each one different."""
    return spark.range(0, rows, 1, partitions).selectExpr(*keys, "id", "concat('value of ', id) as text")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shuffles"


@pytest.mark.parametrize("shape", SHAPES)
def test_is_in_key_order_complete_and_without_duplicates(spark: SparkSession, address: str, shape: str) -> None:
    frame = shaped(spark, SHAPES[shape])
    keys = [name for name in frame.columns if name not in ("id", "text")]
    save(frame, address, shape, keys, RANGES)
    ours = same_as_spark(frame, load(spark, address, shape), keys, RANGES)
    assert len(ours) == ROWS


@pytest.mark.parametrize("shape", ["uniform", "skewed", "all-equal"])
def test_ranges_are_spark_s_partitions_and_hot_keys_are_cut(spark: SparkSession, address: str, shape: str) -> None:
    save(shaped(spark, SHAPES[shape]), address, shape, ["k"], RANGES)
    counts = sizes(load(spark, address, shape))
    assert len(counts) == RANGES
    assert max(counts) / (ROWS / RANGES) <= 1.15
    with roq.shuffle.open(address) as shuffles:
        assert [one.rows for one in shuffles.describe(shape).ranges] == counts


@pytest.mark.quick
def test_wide_keys(spark: SparkSession, address: str) -> None:
    """Keys of 4 to 20 KB that differ only at their end."""
    frame = shaped(spark, ("concat(repeat('x', 4000 + 4000 * cast(id % 5 as int)), hex(xxhash64(id % 300))) as k",), 1_500)
    save(frame, address, "wide", ["k"], RANGES)
    assert len(same_as_spark(frame, load(spark, address, "wide"), ["k"], RANGES)) == 1_500


def test_tasks_with_more_rows_than_memory(spark: SparkSession, address: str) -> None:
    """Each sorts several times, and each range is merged from all the runs: 14 MB through two tasks with 8 MiB."""
    frame = spark.range(0, 30_000, 1, 2).selectExpr("xxhash64(id) as k", "id", "repeat(hex(id), 100) as text")
    writer = frame.write.format("roq-shuffle").option("address", address).option("keys", "k").option("memoryMiB", 8)
    writer.option("ranges", RANGES).mode("append").save("large")
    found = spark.read.format("roq-shuffle").option("address", address).option("memoryMiB", 8).load("large")
    assert len(same_as_spark(frame, found, ["k"], RANGES)) == 30_000


def test_rows_of_one_key_keep_the_order_of_their_partitions(spark: SparkSession, address: str) -> None:
    save(shaped(spark, SHAPES["few"]), address, "few", ["k"], RANGES)
    assert [row[1] for row in rows_of(load(spark, address, "few"))] == [n for key in range(3) for n in range(key, ROWS, 3)]


@pytest.mark.parametrize("partitions", [1, 3])
def test_nothing_is_a_data_set_too(spark: SparkSession, address: str, partitions: int) -> None:
    frame = shaped(spark, SHAPES["uniform"], ROWS, partitions).where("id < 0")
    save(frame, address, "nothing", ["k"])
    found = load(spark, address, "nothing")
    assert rows_of(found) == []
    assert found.schema == frame.schema


def test_no_partition_at_all(spark: SparkSession, address: str) -> None:
    frame = spark.createDataFrame(spark.sparkContext.emptyRDD(), "k int, v string")
    save(frame, address, "nothing", ["k"])
    assert rows_of(load(spark, address, "nothing")) == []


def test_empty_partitions_between_others(spark: SparkSession, address: str) -> None:
    frame = shaped(spark, SHAPES["uniform"], ROWS, 8).where("id % 10000 < 300")
    save(frame, address, "gaps", ["k"])
    assert len(same_as_spark(frame, load(spark, address, "gaps"), ["k"], 2)) == 600


def test_each_range_comes_in_order_to_functions_on_partitions(spark: SparkSession, address: str) -> None:
    """What users do with it: Spark sees the order through mapInArrow, without a sort of its own."""
    save(shaped(spark, SHAPES["uniform"]), address, "visits", ["k"], RANGES)

    def first_and_last(batches):  # type: ignore[no-untyped-def]
        import pyarrow as pa  # noqa: PLC0415 - runs in a worker

        keys = [key for batch in batches for key in batch["k"].to_pylist()]
        yield pa.RecordBatch.from_pydict({"first": [keys[0]], "last": [keys[-1]], "sorted": [keys == sorted(keys)]})

    found = load(spark, address, "visits").mapInArrow(first_and_last, "first long, last long, sorted boolean").collect()
    assert len(found) == RANGES
    assert all(row["sorted"] for row in found)
    assert all(one["last"] < two["first"] for one, two in pairwise(found))


def test_several_shuffles_side_by_side_and_a_join_of_them(spark: SparkSession, address: str) -> None:
    left, right = shaped(spark, ("id % 100 as k",), 1_000), shaped(spark, ("id % 100 as k",), 500)
    save(left, address, "left", ["k"])
    save(right, address, "right", ["k"])
    joined = load(spark, address, "left").join(load(spark, address, "right"), "k")
    assert joined.count() == 100 * 10 * 5
    with roq.shuffle.open(address) as shuffles:
        assert [(one.name, one.state, one.rows) for one in shuffles.list()] == [
            ("left", ShuffleState.SEALED, 1_000),
            ("right", ShuffleState.SEALED, 500),
        ]


def test_what_python_wrote_spark_reads(spark: SparkSession, address: str) -> None:
    import pyarrow as pa  # noqa: PLC0415

    table = pa.table({"k": pa.array([3, 1, 2], pa.int32()), "s": pa.array(["c", "a", None], pa.string())})
    with roq.shuffle.open(address) as shuffles:
        shuffles.create("plain", keys=["k"], schema=table.schema)
        with shuffles.writer("plain", partition=0) as writer:
            writer.write(table)
            receipt = writer.finish()
        shuffles.commit("plain", [receipt])
    assert rows_of(load(spark, address, "plain")) == [(1, "a"), (2, None), (3, "c")]


@pytest.mark.quick
def test_what_spark_wrote_python_reads(spark: SparkSession, address: str) -> None:
    save(shaped(spark, SHAPES["uniform"], 3_000), address, "from-spark", ["k"], 3)
    with roq.shuffle.open(address) as shuffles:
        ranges = shuffles.describe("from-spark").ranges
        keys = [key for one in ranges for batch in shuffles.read("from-spark", one.number) for key in batch["k"].to_pylist()]
    assert len(keys) == 3_000
    assert keys == sorted(keys)


def test_a_range_more_than_once(spark: SparkSession, address: str) -> None:
    """Nothing is used up by reading."""
    frame = shaped(spark, SHAPES["uniform"], 2_000)
    save(frame, address, "again", ["k"], 2)
    found = load(spark, address, "again")
    assert rows_of(found) == rows_of(found)
    assert found.where(functions.col("id") < 100).count() == 100
    assert [row["k"] for row in found.take(5)] == [row[0] for row in rows_of(found)[:5]]  # and left before its end

"""What a shuffle gave beside what Spark's own range sort gives for the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions


def plain(value: Any) -> Any:
    """Comparable by ==: NaN is NaN, minus zero is zero."""
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0  # noqa: PLR0124
    if isinstance(value, list | tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, dict):
        return tuple((key, plain(one)) for key, one in value.items())
    return value


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    """All rows in the order of the partitions."""
    table = frame.toArrow()
    columns = [table[name].to_pylist() for name in table.column_names]
    return [plain(row) for row in zip(*columns, strict=True)]


def save(frame: DataFrame, address: str, name: str, keys: Sequence[str], ranges: int = 0, mode: str = "append") -> None:
    """Through the public API, as users write it."""
    writer = frame.write.format("roq-shuffle").option("address", address).option("keys", ",".join(keys))
    writer.option("ranges", ranges).mode(mode).save(name)


def load(spark: SparkSession, address: str, name: str) -> DataFrame:
    """The sorted data set."""
    return spark.read.format("roq-shuffle").option("address", address).load(name)


def sizes(frame: DataFrame) -> list[int]:
    """Rows of each partition that has any, in order."""
    counted = frame.groupBy(functions.spark_partition_id().alias("partition")).count().orderBy("partition").collect()
    return [row["count"] for row in counted]


def same_as_spark(frame: DataFrame, sorted_one: DataFrame, keys: Sequence[str], ranges: int) -> list[tuple[Any, ...]]:
    """Fails unless `sorted_one` has exactly the rows of `frame`, in an order Spark's own sort could have given."""
    ours = rows_of(sorted_one)
    theirs = rows_of(frame.repartitionByRange(ranges, *keys).sortWithinPartitions(*keys))
    at = [frame.columns.index(key) for key in keys]
    assert [[row[i] for i in at] for row in ours] == [[row[i] for i in at] for row in theirs]
    assert Counter(ours) == Counter(theirs)
    assert sorted_one.schema == frame.schema
    return ours

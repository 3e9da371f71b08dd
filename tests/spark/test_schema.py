"""Spark's types through Arrow and back: what was written is what is read, to the type and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from roq.errors import SchemaMismatch
from roq.spark.schema import arrow_schema, exact, same_types, spark_schema
from tests.spark.comparing import load, plain, rows_of, save

EVERY_TYPE = """select
    id, cast(id as tinyint) as b, cast(id as smallint) as s, cast(id as int) as i, cast(id as float) / 3 as f, id / 7D as d,
    cast(id as decimal(38, 18)) as big, cast(id as decimal(5, 2)) as money, 'é' || id as text, cast('x' as char(3)) as padded,
    'A' collate utf8_lcase as loose, unhex('00ff') as raw, id = 3 as flag, date'2020-02-29' as day,
    time'01:02:03.123456' as time, timestamp'2020-03-29 02:30:00' as at,
    timestamp_ntz'2020-03-29 02:30:00' as local, interval '1 02:03:04' day to second as span,
    array(id, null) as list, map('k', array(timestamp'1900-01-01 00:00:00')) as map,
    named_struct('x', id, 'y', named_struct('z', date'1969-12-31', 't', timestamp'2020-01-01 00:00:00')) as struct,
    parse_json('{"a": [1, 2]}') as variant, cast(null as void) as nothing, cast(null as array<struct<a: int>>) as null_list
    from range(5)"""


def nullable(schema: StructType) -> Any:
    """The schema as JSON, with every column nullable."""
    told = json.loads(schema.json())
    return [field | {"nullable": True} for field in told["fields"]]


@pytest.mark.quick
def test_every_type_comes_back(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql(EVERY_TYPE)
    address = f"file://{tmp_path}"
    save(frame, address, "types", ["id"])
    found = load(spark, address, "types")
    assert nullable(found.schema) == nullable(frame.schema)  # Spark's planner finds out that constants are never null
    assert sorted(map(repr, map(plain, found.collect()))) == sorted(map(repr, map(plain, frame.collect())))


def test_large_strings_of_spark_s_writer_come_back_as_strings(spark: SparkSession, tmp_path: Path) -> None:
    address, option = f"file://{tmp_path}", "spark.sql.execution.arrow.useLargeVarTypes"
    frame = spark.sql("select cast(id as string) as k, unhex('00') as raw, array('a') as list from range(5)")
    spark.conf.set(option, "true")
    try:
        save(frame, address, "large", ["k"])
    finally:
        spark.conf.unset(option)
    assert rows_of(load(spark, address, "large")) == [(str(n), b"\0", ("a",)) for n in range(5)]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (pa.large_string(), "string"),
        (pa.large_binary(), "binary"),
        (pa.timestamp("ms", tz="Asia/Tokyo"), "timestamp"),
        (pa.timestamp("s"), "timestamp_ntz"),
    ],
)
def test_what_other_programs_wrote_is_turned_into_spark_s_types(given: pa.DataType, wanted: str) -> None:
    schema = spark_schema(pa.schema([pa.field("k", given)]))
    assert schema["k"].dataType.simpleString() == wanted
    values: Any = {"string": ["a", None], "binary": [b"a", None]}.get(wanted, [0, None])
    batch = pa.RecordBatch.from_arrays([pa.array(values, given)], schema=pa.schema([pa.field("k", given)]))
    assert exact(batch, arrow_schema(schema)).schema.equals(arrow_schema(schema))


@pytest.mark.parametrize("ddl", ["k interval year to month", "k struct<a: interval year>"])
def test_a_type_arrow_has_not_is_refused(ddl: str, spark: SparkSession) -> None:
    with pytest.raises(SchemaMismatch, match="can't be exchanged as Arrow"):
        arrow_schema(spark.createDataFrame([], ddl).schema)


def test_a_type_spark_has_not_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="none of Spark's"):
        spark_schema(pa.schema([pa.field("k", pa.float16())]))


def test_two_columns_of_one_name_are_refused(spark: SparkSession) -> None:
    schema = spark.createDataFrame([], "k int").schema
    with pytest.raises(SchemaMismatch, match="two columns are named 'k'"):
        arrow_schema(StructType([*schema, *schema]))


def test_a_value_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="does not fit"):
        exact(pa.RecordBatch.from_pydict({"k": [2**40]}), pa.schema([pa.field("k", pa.int32())]))
    with pytest.raises(SchemaMismatch, match="has the columns j, not k"):
        exact(pa.RecordBatch.from_pydict({"j": [1]}), pa.schema([pa.field("k", pa.int64())]))


def test_columns_are_compared_with_their_types() -> None:
    one = pa.schema([pa.field("k", pa.int64(), nullable=False), pa.field("v", pa.string())])
    same_types(one, pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string())]))
    with pytest.raises(SchemaMismatch, match="column 'k' is int32, not int64"):
        same_types(one, pa.schema([pa.field("k", pa.int32()), pa.field("v", pa.string())]))
    with pytest.raises(SchemaMismatch, match="the columns are v, not k, v"):
        same_types(one, pa.schema([pa.field("v", pa.string())]))

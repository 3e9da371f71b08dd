"""Sort a large data set, and drop what is in it twice, through a RoQ shuffle. Parquet, CSV or JSON in, Parquet out.

    roq pipeline run sort visits/*.csv --out sorted --keys country,time
    roq pipeline run sort visits --out latest --keys user --keep last --order time      # one row per user, the latest
    roq pipeline run sort visits --out clean --keys user,time --distinct                # rows that are wholly alike, once

Files of the result follow each other in key order, and so do the rows in each. Keys go up, nulls first. --order takes the row
with the lowest (--keep first) or highest value of a column; a row without that value (null, NaN) only counts if there is no
other. The result is written beside --out and takes its place when it is complete, so --out can't lie in the data or hold it.
Rows are alike for --distinct if two 64-bit hashes of them are, besides the keys; columns are plain values then.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

import roq.shuffle
from roq.errors import CallError, ShuffleNotFound
from roq.spark.pipeline.job import (
    arguments,
    file_names,
    is_local,
    is_there,
    local_path,
    names,
    overlapping,
    run_job,
    say,
    whole,
    written_atomically,
)
from roq.spark.pipeline.last_of_each import last_of_each

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
ORDER, HASHES = "_roq_order", ("_roq_hash_1", "_roq_hash_2")


class SortResult(msgspec.Struct, frozen=True):
    """What the job did. ranges: of the shuffle, each a file of the result. imbalance: bytes of the largest by their mean."""

    out: str
    rows_in: int
    rows_out: int
    ranges: int
    imbalance: float


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = arguments("sort", __doc__ or "")
    found.add_argument("data", nargs="+", help="files or folders to sort")
    found.add_argument("--out", required=True, help="folder for the result (Parquet)")
    found.add_argument("--overwrite", action="store_true", help="replace what is in the folder")
    found.add_argument("--keys", required=True, type=names, help="columns to sort by, with commas between them")
    found.add_argument(
        "--format",
        choices=sorted(set(FORMATS.values())),
        help="of the data; default: as the names of the files end, also in folders",
    )
    found.add_argument(
        "--schema", help="columns of the data, as in `name STRING, time TIMESTAMP`; default: as the data say, or guessed"
    )
    found.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for Spark's reader; may be repeated")
    twice = found.add_argument_group("what is there twice")
    twice.add_argument("--keep", choices=("first", "last"), help="one row per key: the first or the last in --order")
    twice.add_argument("--order", help="a column; with --keep first a number, a date or a time")
    twice.add_argument("--distinct", action="store_true", help="rows that are alike in all columns once")
    shuffle = found.add_argument_group("shuffle")
    shuffle.add_argument("--shuffles", help="address: file:///dir or roq://zk1:2181; default: a folder beside the result")
    shuffle.add_argument("--ranges", type=whole(0), default=0, help="how many; 0 (default): as many as fit")
    shuffle.add_argument("--replicas", type=whole(1), default=2, help="copies in a cluster (default 2)")
    return found


def work(spark: SparkSession, given: argparse.Namespace) -> SortResult:
    """Read, shuffle, write. Raises CallError, and what Spark and the shuffle meet with."""
    if given.distinct and given.keep:
        raise CallError("--keep is about keys, --distinct about whole rows: give one of them")
    if bool(given.keep) != bool(given.order):
        raise CallError("--keep and --order go together: which row of a key is the first one?")
    if not given.shuffles and not is_local(given.out):
        raise CallError(f"the shuffle can't be beside {given.out}: give --shuffles, a cluster or a folder all executors see")
    beside = None if given.shuffles else local_path(f"{given.out.rstrip('/')}.shuffles", "--out").absolute()
    address = given.shuffles if beside is None else beside.as_uri()
    if (place := overlapping(given.out, given.data)) is not None:
        raise CallError(f"--out {given.out} and the data ({place}) lie in each other: give another folder for the result")
    if not given.overwrite and is_there(spark, given.out):
        raise CallError(f"{given.out} exists; --overwrite replaces it")
    data = read_data(spark, given.data, given.format, given.schema, given.option)
    columns = data.columns
    prepared, alike, keys = prepare(data, given.keys, given.keep, given.order, distinct=given.distinct)
    name = f"sort-{secrets.token_hex(8)}"
    try:
        writer = prepared.write.format("roq-shuffle").option("address", address).option("keys", ",".join(keys))
        writer.option("ranges", given.ranges).option("replicas", given.replicas).mode("append").save(name)
        with roq.shuffle.open(address) as shuffles:
            made = shuffles.describe(name)
        say(f"{made.rows:,} rows in {len(made.ranges)} ranges")
        rows = spark.read.format("roq-shuffle").option("address", address).load(name)
        written = Observation()
        if alike:
            once = partial(last_of_each, address=address, name=name, keys=alike, columns=columns)
            rows = rows.mapInArrow(once, data.schema).observe(written, sf.count("*").alias("rows"))
        with written_atomically(spark, given.out) as folder:
            rows.write.parquet(folder)
    finally:
        with roq.shuffle.open(address) as shuffles, suppress(ShuffleNotFound):
            shuffles.remove(name)
        if beside is not None and beside.is_dir() and not any(beside.iterdir()):
            beside.rmdir()
    sizes = [each.size for each in made.ranges]
    imbalance = round(max(sizes) * len(sizes) / sum(sizes), 3) if sum(sizes) else 1.0
    return SortResult(given.out, made.rows, written.get["rows"] if alike else made.rows, len(made.ranges), imbalance)


def read_data(
    spark: SparkSession, paths: Sequence[str], form: str | None, schema: str | None, options: Sequence[str]
) -> DataFrame:
    """The data set. Raises CallError: a format that is not known from the names."""
    form = form or format_of(spark, paths)
    reader = spark.read.format(form)
    if schema:
        reader = reader.schema(schema)
    defaults = {"header": "true", "inferSchema": str(not schema).lower()} if form == "csv" else {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise CallError(f"--option takes KEY=VALUE, got {option!r}")
        defaults[key] = value
    return reader.options(**defaults).load(list(paths))


def format_of(spark: SparkSession, paths: Sequence[str]) -> str:
    """By the ends of the files' names, those in folders too. Raises CallError."""
    found: dict[str, str] = {}  # format -> the first file of it
    for path in paths:
        for name in [path] if Path(path).suffix in FORMATS else file_names(spark, path):
            form = next((FORMATS[end] for end in Path(name).suffixes[::-1] if end in FORMATS), "")
            found.setdefault(form, name)
    if not found:
        raise CallError(f"there is no file in {', '.join(paths)}: give a path to data")
    if len(found) != 1 or "" in found:
        seen, ends = ", ".join(found.values()), ", ".join(FORMATS)
        raise CallError(
            f"names of files ({seen}) do not show one format for all: give --format, or files that all end in one of {ends}"
        )
    return next(iter(found))


def prepare(
    data: DataFrame, keys: Sequence[str], keep: str | None, order: str | None, *, distinct: bool
) -> tuple[DataFrame, list[str], list[str]]:
    """(data with the columns that are needed in addition, columns to compare, columns to sort by). Of rows that are alike in
    the columns to compare the last one is to be kept; no columns: keep all. Raises CallError."""
    for column in (*keys, *([order] if order else [])):
        if column not in data.columns:
            raise CallError(f"there is no column {column!r}; there are {', '.join(data.columns)}")
    for column in (ORDER, *HASHES):
        if column in data.columns:
            raise CallError(f"a column of the data is named {column!r}: give it another name")
    if distinct:
        nested = [
            field.name for field in data.schema if isinstance(field.dataType, (ArrayType, MapType, StructType, VariantType))
        ]
        if nested:
            raise CallError(f"--distinct compares plain values; {', '.join(nested)} has parts: use --keep")
        values = [part for name in data.columns for part in (data[name].isNull(), data[name])]
        hashed = {name: sf.xxhash64(sf.lit(seed), *values) for seed, name in enumerate(HASHES)}
        return data.withColumns(hashed), [*keys, *HASHES], [*keys, *HASHES]
    if order is None:
        return data, [], list(keys)
    if order in keys:
        raise CallError(f"{order!r} is a key: rows of one key do not differ in it")
    kind, value = data.schema[order].dataType, data[order]
    if isinstance(kind, (FloatType, DoubleType)):
        value = sf.when(sf.isnan(value), None).otherwise(value)  # else it would be the highest of all
    value = _reversed(value, kind) if keep == "first" else value
    return data.withColumn(ORDER, value), list(keys), [*keys, ORDER]


def _reversed(column: Column, kind: DataType) -> Column:
    """A value that goes down where the column goes up; null for null."""
    match kind:
        case IntegralType():
            return sf.bitwise_not(column)
        case DecimalType() | FloatType() | DoubleType():
            return -column
        case DateType():
            return -sf.unix_date(column)
        case TimestampType():
            return -sf.unix_micros(column)
        case TimestampNTZType():
            return -sf.unix_micros(column.cast("timestamp"))  # the session is in UTC
        case _:
            raise CallError(f"--keep first needs a number, a date or a time to order by, not {kind.simpleString()}")


def main() -> None:
    """Run the job."""
    run_job("sort", parser(), work)


if __name__ == "__main__":
    main()

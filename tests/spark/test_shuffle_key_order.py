"""The order of keys is Spark's own, for every type that can be a key and every pair of them: beside ORDER BY, to the row.

Rows are numbered, partitions hold them by number, and a shuffle keeps rows of equal keys in the order of their partitions; so
its rows are those of `ORDER BY keys, id`, one by one, with every bit of every value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import roq.shuffle
from roq.shuffle.service import Shuffles
from tests.spark.comparing import load, save
from tests.spark.keys_of_types import BY_NAME, KEY_TYPES, KeyType, comparable, stored

SEED = int(os.environ.get("KEY_ORDER_SEED", "1"))  # another one: other random values
ROWS = 2_400
PAIR_ROWS = 40
RANGES = 3
PAIRS = list(product(KEY_TYPES, repeat=2))
TIMES = ("date", "timestamp", "timestamp_ntz", "time", "interval")


@dataclass(frozen=True)
class Pairs:
    """Rows with a key of two columns, for each pair of types. table: pair, id, and the columns a_<type>, b_<type>, null but for
    two of them. keys: of all rows. frame: of the table. order: rows of the table in Spark's order of pair, keys, id."""

    table: pa.Table
    keys: list[str]
    frame: DataFrame
    order: list[int]


def same_rows(ours: pa.Table, theirs: pa.Table, keys: list[str]) -> None:
    """Fails unless both have the same rows in the same order. Tells a wrong order of keys from other differences."""
    assert ours.column_names == theirs.column_names
    for key in keys:
        assert comparable(ours[key]) == comparable(theirs[key]), f"column {key!r}, seed {SEED}"
    for name in ours.column_names:
        assert stored(ours[name]) == stored(theirs[name]), f"column {name!r}, seed {SEED}"


def put(shuffles: Shuffles, name: str, table: pa.Table, keys: list[str], partitions: int) -> pa.Table:
    """What a shuffle gives for this table, without Spark."""
    shuffles.create(name, keys=keys, schema=table.schema, ranges=RANGES)
    receipts = []
    for partition in range(partitions):
        first, end = (table.num_rows * each // partitions for each in (partition, partition + 1))
        with shuffles.writer(name, partition) as writer:
            for batch in table.slice(first, end - first).to_batches(max_chunksize=500):
                writer.write(batch)
            receipts.append(writer.finish())
    shuffles.commit(name, receipts)
    return pa.Table.from_batches(shuffles.read_all(name), table.schema)


@contextmanager
def settings(spark: SparkSession, **values: str) -> Iterator[None]:
    """Settings of the session for a while; `__` stands for a dot."""
    names = {name.replace("__", "."): value for name, value in values.items()}
    before = {name: spark.conf.get(name) for name in names}
    try:
        for name, value in names.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, former in before.items():
            assert former is not None
            spark.conf.set(name, former)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shuffles"


@pytest.fixture(scope="module")
def singles(spark: SparkSession) -> tuple[pa.Table, DataFrame]:
    """A column of each type."""
    chance = Random(SEED)
    table = pa.table({"id": range(ROWS)} | {each.name: each.column(each.many(ROWS, chance)) for each in KEY_TYPES})
    ddl = ", ".join(["id long", *(f"{each.name} {each.spark}" for each in KEY_TYPES)])
    return table, spark.createDataFrame(table, ddl)


@pytest.fixture(scope="module")
def pairs(spark: SparkSession) -> Pairs:
    chance = Random(SEED)
    parts = []
    for number, (one, other) in enumerate(PAIRS):
        columns = {
            "pair": pa.array([number] * PAIR_ROWS, pa.int32()),
            "id": pa.array(range(number * PAIR_ROWS, (number + 1) * PAIR_ROWS)),
            f"a_{one.name}": one.column(one.few(PAIR_ROWS, chance)),
            f"b_{other.name}": other.column(other.few(PAIR_ROWS, chance)),
        }
        parts.append(pa.table(columns))
    both = [f"{side}_{each.name}" for side in "ab" for each in KEY_TYPES]
    table = pa.concat_tables(parts, promote_options="default").select(["pair", "id", *both]).combine_chunks()
    ddl = ", ".join(["pair int", "id long", *(f"{name} {BY_NAME[name[2:]].spark}" for name in both)])
    frame = spark.createDataFrame(table, ddl)
    order = frame.orderBy("pair", *both, "id").select("id").toArrow()["id"].to_pylist()
    assert sorted(order) == list(range(len(PAIRS) * PAIR_ROWS))
    return Pairs(table, ["pair", *both], frame, order)


def test_the_values_are_those_that_were_meant(singles: tuple[pa.Table, DataFrame], pairs: Pairs) -> None:
    """Through Spark no edge gets lost and no NaN loses its payload: else the other tests would show less than they seem to."""
    table, frame = singles
    same_rows(frame.toArrow(), table, [])
    for kind in KEY_TYPES:
        edges = pa.chunked_array([kind.column(kind.edges)])
        assert {*stored(edges)} <= {*stored(table[kind.name])}, kind.name
        if kind.alike:
            for one, other in ((0, 1), (2, 3)):
                both = pa.chunked_array([kind.column(kind.alike)]).take(pa.array([one, other]))
                assert len({*stored(both)}) == 2
                assert len({*comparable(both)}) == 1
                assert {*stored(both)} <= {*stored(pairs.table[f"a_{kind.name}"])}


@pytest.mark.parametrize("kind", KEY_TYPES, ids=lambda kind: kind.name)
def test_a_key_of_each_type(spark: SparkSession, singles: tuple[pa.Table, DataFrame], address: str, kind: KeyType) -> None:
    frame = singles[1].select(kind.name, "id")
    theirs = frame.coalesce(1).sortWithinPartitions(kind.name, "id").toArrow()
    save(frame, address, "one", [kind.name], RANGES)
    same_rows(load(spark, address, "one").toArrow(), theirs, [kind.name])
    with roq.shuffle.open(address) as shuffles:
        same_rows(put(shuffles, "plain", singles[0].select([kind.name, "id"]), [kind.name], 3), theirs, [kind.name])


@pytest.mark.parametrize("first", range(len(KEY_TYPES)), ids=[kind.name for kind in KEY_TYPES])
def test_keys_of_two_columns(pairs: Pairs, address: str, first: int) -> None:
    with roq.shuffle.open(address) as shuffles:
        for number in range(first * len(KEY_TYPES), (first + 1) * len(KEY_TYPES)):
            one, other = PAIRS[number]
            keys = [f"a_{one.name}", f"b_{other.name}"]
            begin, end = number * PAIR_ROWS, (number + 1) * PAIR_ROWS
            rows = pairs.table.select([*keys, "id"])
            ours = put(shuffles, f"pair-{number}", rows.slice(begin, PAIR_ROWS), keys, 2)
            same_rows(ours, rows.take(pa.array(pairs.order[begin:end])), keys)


@pytest.mark.quick
def test_a_key_of_all_the_columns(spark: SparkSession, pairs: Pairs, address: str) -> None:
    """Each pair of types through Spark's writer and reader, with nulls before, between and behind."""
    save(pairs.frame, address, "pairs", pairs.keys, RANGES)
    same_rows(load(spark, address, "pairs").toArrow(), pairs.table.take(pa.array(pairs.order)), pairs.keys)


@pytest.mark.parametrize(
    ("written", "read", "ansi"),
    [("America/St_Johns", "Asia/Kathmandu", "false"), ("UTC", "Pacific/Apia", "true")],
)
def test_neither_time_zone_nor_ansi_matter(
    spark: SparkSession, pairs: Pairs, address: str, written: str, read: str, ansi: str
) -> None:
    numbers = [number for number, (one, other) in enumerate(PAIRS) if {one.name, other.name} & {*TIMES}]
    chosen = {*numbers}
    with settings(spark, spark__sql__session__timeZone=written, spark__sql__ansi__enabled=ansi):
        save(pairs.frame.where(pairs.frame["pair"].isin(numbers)), address, "times", pairs.keys, RANGES)
    with settings(spark, spark__sql__session__timeZone=read):
        ours = load(spark, address, "times").toArrow()
    expected = [row for row in pairs.order if row // PAIR_ROWS in chosen]
    same_rows(ours, pairs.table.take(pa.array(expected)), pairs.keys)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("array<int>", "[ROQ_SCHEMA_MISMATCH] key column 'k' is of type list<"),
        ("map<string, int>", "[ROQ_SCHEMA_MISMATCH] key column 'k' is of type map<"),
        ("struct<a: int>", "[ROQ_SCHEMA_MISMATCH] key column 'k' is of type struct<"),
        ("variant", "[ROQ_SCHEMA_MISMATCH] key column 'k' is of type variant,"),
        ("geometry(4326)", "[ROQ_SCHEMA_MISMATCH] key column 'k' is of type geometry(4326),"),
        ("string collate utf8_lcase", "[ROQ_SCHEMA_MISMATCH] key column 'k' has a collation"),
        ("interval year to month", "[ROQ_SCHEMA_MISMATCH] column 'k' can't be exchanged as Arrow"),
        ("interval", 'Cannot use "INTERVAL" type in the table schema'),  # Spark's own word, for any format
    ],
)
def test_types_that_can_t_be_keys(spark: SparkSession, address: str, kind: str, words: str) -> None:
    frame = spark.sql(f"select id, cast(null as {kind}) as k from range(3)")
    with pytest.raises(PySparkException) as raised:
        save(frame, address, "none", ["k"])
    assert words in str(raised.value)
    with roq.shuffle.open(address) as shuffles:
        assert shuffles.list() == []


@pytest.mark.parametrize("key", ["k desc", "-k"])
def test_keys_only_ascend(spark: SparkSession, address: str, key: str) -> None:
    with pytest.raises(PySparkException, match=f"no column '{key}' to sort by; there are k"):
        save(spark.range(3).withColumnRenamed("id", "k"), address, "none", [key])

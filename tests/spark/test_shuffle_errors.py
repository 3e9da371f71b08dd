"""Bad input and the modes of format("roq-shuffle"): what is refused, and that it is told in Spark's own error style."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException, PySparkTypeError, PySparkValueError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict

import roq.shuffle
import roq.spark
from roq.errors import DataLost, SchemaMismatch, ShuffleNotFound, ShuffleSealed
from roq.spark.errors import in_spark_style, spark_errors
from roq.spark.shuffle_source import PartitionWritten, RoqShuffleDataSource, ShuffleWriter
from roq.wire.shuffle import ShuffleState
from tests.spark.comparing import load, rows_of, save


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shuffles"


@pytest.fixture
def frame(spark: SparkSession) -> DataFrame:
    return spark.sql(
        "select id as k, cast(id as string) as Text, array(id) as list, 'x' collate unicode_ci as loose from range(10)"
    )


@contextmanager
def told(condition: str, *words: str) -> Iterator[None]:
    """Spark shows our error as its last line, with condition and text."""
    with pytest.raises(PySparkException) as raised:
        yield
    text = str(raised.value)
    assert f"[{condition}]" in text
    for word in words:
        assert word in text
    assert "During handling of the above" not in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("missing", "no column 'missing' to sort by; there are k, Text, list, loose"),
        ("k,,Text", "no column '' to sort by"),
        ("list", "'list'"),
        ("loose", "'loose' has a collation"),
        ("k,k", "named twice"),
    ],
)
def test_columns_that_can_t_be_keys(frame: DataFrame, address: str, keys: str, words: str) -> None:
    with told("ROQ_SCHEMA_MISMATCH", "PySparkTypeError", words):
        save(frame, address, "bad", [keys])
    with roq.shuffle.open(address) as shuffles:
        assert shuffles.list() == []


def test_a_refused_overwrite_removes_nothing(frame: DataFrame, address: str) -> None:
    save(frame, address, "visits", ["k"])
    with told("ROQ_SCHEMA_MISMATCH"):
        save(frame, address, "visits", ["list"], mode="overwrite")
    with roq.shuffle.open(address) as shuffles:
        assert shuffles.describe("visits").rows == 10


def test_names_of_columns_know_no_case(frame: DataFrame, address: str, spark: SparkSession) -> None:
    save(frame, address, "visits", ["TEXT", " K "])
    with roq.shuffle.open(address) as shuffles:
        assert shuffles.describe("visits").spec.keys == ("Text", "k")
    assert load(spark, address, "visits").columns == frame.columns


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"address": ""}, "is missing; for instance file:///"),
        ({"cluster": "zk1:2181"}, "give address or cluster, not both"),
        ({"keys": " "}, "name the columns to sort by"),
        ({"ranges": "-1"}, "'-1' is not a whole number from 0 to 10000"),
        ({"ranges": "many"}, "'many' is not a whole number"),
        ({"replicas": "0"}, "'0' is not a whole number from 1"),
        ({"memoryMiB": "1"}, "'1' is not a whole number from 8"),
        ({"rangs": "3"}, "is unknown; there are address, cluster, keys, memoryMiB, ranges, replicas"),
        ({"path": ""}, "name the shuffle in .load"),
    ],
)
def test_options(frame: DataFrame, address: str, options: dict[str, str], words: str) -> None:
    good = {"address": address, "keys": "k", "path": "visits"}
    with told("ROQ_INVALID_CONFIGURATION", words):
        frame.write.format("roq-shuffle").options(**good | options).mode("append").save()


@pytest.mark.parametrize("address", ["http://somewhere", "somewhere", "file://"])
def test_an_address_that_is_none(frame: DataFrame, address: str, spark: SparkSession) -> None:
    with told("ROQ_INVALID_ADDRESS", address):
        save(frame, address, "visits", ["k"])
    with told("ROQ_INVALID_ADDRESS", address):
        load(spark, address, "visits")


def test_a_name_that_is_none(frame: DataFrame, address: str) -> None:
    with told("ROQ_INVALID_NAME"):
        save(frame, address, "../visits", ["k"])


def test_append_refuses_what_is_sealed_and_overwrite_replaces_it(frame: DataFrame, address: str, spark: SparkSession) -> None:
    save(frame, address, "visits", ["k"])
    with told("ROQ_SHUFFLE_SEALED", 'save another one, or with mode("overwrite")'):
        save(frame, address, "visits", ["k"])
    assert load(spark, address, "visits").count() == 10
    save(frame.select("k").limit(3), address, "visits", ["k"], mode="overwrite")
    assert rows_of(load(spark, address, "visits")) == [(0,), (1,), (2,)]


def test_a_query_that_overwrites_what_it_reads_is_told_why_that_fails(
    frame: DataFrame, address: str, spark: SparkSession
) -> None:
    save(frame, address, "visits", ["k"])
    with told("ROQ_SHUFFLE_CONFLICT", "A query that overwrites the shuffle it reads destroys it: save under another name"):
        save(load(spark, address, "visits"), address, "visits", ["Text"], mode="overwrite")
    save(frame, address, "visits", ["k"])  # the name is free: nothing was left in part
    assert load(spark, address, "visits").count() == 10


@pytest.mark.parametrize("mode", ["errorifexists", "ignore"])
def test_spark_itself_refuses_the_other_modes(frame: DataFrame, address: str, mode: str) -> None:
    with pytest.raises(AnalysisException) as raised:
        save(frame, address, "visits", ["k"], mode=mode)
    assert raised.value.getCondition() == "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"


def test_append_fills_what_was_created_before_if_it_is_alike(frame: DataFrame, address: str, spark: SparkSession) -> None:
    with roq.shuffle.open(address) as shuffles:
        shuffles.create("other", keys=["k"], schema=pa.schema([("k", pa.int64())]))
    with told("ROQ_SHUFFLE_CONFLICT", "other"):
        save(frame, address, "other", ["k"])
    save(frame, address, "other", ["k"], mode="overwrite")
    assert load(spark, address, "other").count() == 10


def test_reading_what_is_not_there_or_not_sealed(frame: DataFrame, address: str, spark: SparkSession) -> None:
    with told("ROQ_SHUFFLE_NOT_FOUND", "visits"):
        load(spark, address, "visits")
    with roq.shuffle.open(address) as shuffles:
        shuffles.create("visits", keys=["k"], schema=pa.schema([("k", pa.int64())]))
    with told("ROQ_SHUFFLE_NOT_SEALED", "it can be read when its writers committed"):
        load(spark, address, "visits")


def test_a_schema_of_one_s_own_must_be_the_shuffle_s(frame: DataFrame, address: str, spark: SparkSession) -> None:
    save(frame.select("k", "Text"), address, "visits", ["k"])
    reader = spark.read.format("roq-shuffle").option("address", address)
    assert reader.schema("k long, Text string").load("visits").count() == 10
    with told("ROQ_SCHEMA_MISMATCH", "column 'k' is int64, not string"):
        reader.schema("k string, Text string").load("visits").count()
    with told("ROQ_SCHEMA_MISMATCH", "the columns are k, Text, not k"):
        reader.schema("k long").load("visits").count()


def test_one_shuffle_at_a_time(address: str, spark: SparkSession) -> None:
    with told("ROQ_INVALID_CONFIGURATION", "one shuffle at a time"):
        spark.read.format("roq-shuffle").option("address", address).load(["a", "b"])


def test_a_key_that_is_too_wide(address: str, spark: SparkSession) -> None:
    with told("ROQ_PAYLOAD_TOO_LARGE", "a key of"):
        save(spark.sql("select repeat('x', 70000) as k"), address, "wide", ["k"])


@pytest.mark.parametrize("change", ["overwrite", "rebalance"])
def test_a_reader_planned_before_the_shuffle_was_cut_anew(
    frame: DataFrame, address: str, spark: SparkSession, change: str
) -> None:
    save(frame, address, "visits", ["k"], 3)
    planned = RoqShuffleDataSource(CaseInsensitiveDict({"address": address, "path": "visits"}))
    reader = planned.reader(planned.schema())
    parts = reader.partitions()
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 10
    if change == "overwrite":
        save(frame, address, "visits", ["k"], 3, mode="overwrite")
    else:
        with roq.shuffle.open(address) as shuffles:
            shuffles.rebalance("visits", 2)
    with pytest.raises(PySparkValueError) as raised:
        list(reader.read(parts[-1]))
    assert raised.value.getCondition() == "ROQ_SHUFFLE_CONFLICT"
    assert raised.value.getMessageParameters()["shuffle"] == "visits"
    assert load(spark, address, "visits").count() == 10


def writer_of(address: str, frame: DataFrame, name: str = "visits") -> ShuffleWriter:
    options = CaseInsensitiveDict({"address": address, "path": name, "keys": "k"})
    return RoqShuffleDataSource(options).writer(frame.schema, overwrite=False)


def written(address: str, name: str, partition: int, attempt: str, frame: DataFrame) -> PartitionWritten:
    with roq.shuffle.open(address) as shuffles, shuffles.writer(name, partition=partition, attempt=attempt) as writer:
        writer.write(frame.toArrow())
        receipt = writer.finish()
    return PartitionWritten(receipt.partition, receipt.attempt, receipt.rows, receipt.size, receipt.runs)


def test_an_attempt_reported_twice_and_two_of_one_partition(spark: SparkSession, address: str) -> None:
    frame = spark.range(5).withColumnRenamed("id", "k")
    writer = writer_of(address, frame)
    one, two = (written(address, "visits", 0, attempt, frame) for attempt in ("one", "two"))
    for receipts in ([one, one], [one, two]):
        with told("ROQ_ATTEMPT_CONFLICT", "visits"):
            writer.commit(receipts)
    with told("ROQ_ATTEMPT_NOT_FOUND", "visits"):
        writer.commit([PartitionWritten(0, "never", 5, 100, 1)])
    writer.commit([two])
    writer.commit([two])  # Spark may ask again: the same answer
    with told("ROQ_SHUFFLE_SEALED", "visits"):
        writer.commit([one])
    assert load(spark, address, "visits").count() == 5


def test_abort_removes_only_what_this_save_made_and_did_not_seal(spark: SparkSession, address: str) -> None:
    frame = spark.range(5).withColumnRenamed("id", "k")
    first, second = writer_of(address, frame), writer_of(address, frame)
    assert (first.created, second.created) == (True, False)
    with roq.shuffle.open(address) as shuffles:
        second.abort([None])
        assert shuffles.describe("visits").state is ShuffleState.FILLING
        first.abort([None])
        with pytest.raises(ShuffleNotFound):
            shuffles.describe("visits")
        first.abort([None])  # nothing to do
        third = writer_of(address, frame)
        third.commit([written(address, "visits", 0, "one", frame)])
        third.abort([None])  # a commit that failed after it had worked
        assert shuffles.describe("visits").state is ShuffleState.SEALED


def test_a_commit_after_the_shuffle_was_replaced(spark: SparkSession, address: str) -> None:
    frame = spark.range(5).withColumnRenamed("id", "k")
    writer = writer_of(address, frame)
    save(frame, address, "visits", ["k"], mode="overwrite")
    with told("ROQ_SHUFFLE_CONFLICT", "made anew"):
        writer.commit([])
    writer.abort([])
    assert load(spark, address, "visits").count() == 5


def test_registering_twice_does_no_harm(spark: SparkSession, address: str) -> None:
    roq.spark.register(spark)
    save(spark.range(5), address, "visits", ["id"])
    assert load(spark, address, "visits").count() == 5


def test_errors_have_conditions_and_parameters() -> None:
    sealed = in_spark_style(ShuffleSealed("it is sealed"), shuffle="visits")
    assert isinstance(sealed, PySparkValueError)
    assert sealed.getCondition() == "ROQ_SHUFFLE_SEALED"
    assert sealed.getMessageParameters() == {"reason": "it is sealed", "shuffle": "visits"}
    assert str(sealed) == "[ROQ_SHUFFLE_SEALED] it is sealed (shuffle 'visits')"
    with pytest.raises(PySparkTypeError), spark_errors():
        raise SchemaMismatch
    with pytest.raises(PySparkException) as raised, spark_errors(shuffle="visits"):
        raise DataLost
    assert raised.value.getCondition() == "ROQ_DATA_LOST"
    assert isinstance(raised.value.__cause__, DataLost)

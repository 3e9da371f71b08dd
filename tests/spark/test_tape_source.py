"""format("roq") reads recorded queues of a real cluster: batches, and streams that are run again from their offsets.

Not covered: what is stored, and how often (tests/integration, tests/failure).
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import roq.blocking
from roq.errors import NotRecorded
from roq.log.replicated.metadata import LogMeta
from roq.wire.assignment import ProcessKind, from_json
from roq.wire.tape_index import INDEX_EVERY
from tests.harness.documented import block
from tests.integration.running import RunningCluster

DOCUMENT = "docs/arrow-and-spark.md"
START_SECONDS, WAIT_SECONDS = 60.0, 100.0
SPACE_SECONDS = 0.1  # entries are dated to the millisecond
Row = tuple[int, int, str, bytes]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    found = RunningCluster(tmp_path_factory.mktemp("cluster"), zookeeper=None, hosts=2)
    try:
        found.call(found.local.settled(START_SECONDS))
        yield found
    finally:
        left = found.stop()
    assert left == []


@pytest.fixture(scope="module")
def connected(cluster: RunningCluster) -> Iterator[roq.blocking.Cluster]:
    with roq.blocking.connect(cluster.zookeeper) as found:
        yield found


def signed(number: int) -> int:
    """As Spark has it."""
    return number - (1 << 64) if number >= 1 << 63 else number


def publish(connected: roq.blocking.Cluster, queue: str, count: int, per_entry: int = 50) -> tuple[list[Row], roq.TapePosition]:
    """A publisher's messages, all stored, and a place behind them."""
    told: list[Row] = []
    receipt = None
    with connected.publisher(queue) as publisher:
        for number in range(count):
            topic, payload, last = f"t.{number % 3}", b"%d" % number, number % per_entry == per_entry - 1 or number == count - 1
            headers: dict[str, str | bytes] | None = {"n": str(number)} if number % 10 == 0 else None
            receipt = publisher.publish(topic, payload, headers, confirm="stored" if last else None)
            told.append((signed(publisher.id), number + 1, topic, payload))
        assert receipt is not None
        assert receipt.position is not None
        return told, receipt.position


def source(spark: SparkSession, cluster: RunningCluster, queue: str, **options: object) -> DataFrame:
    reader = spark.read.format("roq").option("cluster", cluster.zookeeper).option("queue", queue)
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def rows(frame: DataFrame) -> list[Row]:
    found = frame.select("publisher", "sequence", "topic", "payload").collect()
    return [(row.publisher, row.sequence, row.topic, bytes(row.payload)) for row in found]


@pytest.mark.quick
def test_a_batch_read_has_what_is_kept(spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster) -> None:
    connected.create_queue("kept", record=roq.Record(days=1))
    first, position = publish(connected, "kept", 300)
    time.sleep(SPACE_SECONDS)
    between = datetime.now().astimezone().isoformat()
    time.sleep(SPACE_SECONDS)
    second, _ = publish(connected, "kept", 100)
    frame = source(spark, cluster, "kept", entriesPerPartition=4)
    found = frame.selectExpr("*", "current_timestamp() as now", "spark_partition_id() as part").collect()
    assert [(row.publisher, row.sequence, row.topic, bytes(row.payload)) for row in found] == [*first, *second]
    assert len({row.part for row in found}) > 1, "a tape is read by several tasks"
    assert all(row.headers == ({"n": bytes(row.payload)} if int(row.payload) % 10 == 0 else {}) for row in found)
    assert all(0 <= (row.now - row.timestamp).total_seconds() < 600 for row in found)
    for start, end, wanted in ((position, "latest", second), ("earliest", between, first), ("latest", "latest", [])):
        assert rows(source(spark, cluster, "kept", startingPosition=start, endingPosition=end)) == wanted, (start, end)
    named = spark.read.format("roq").option("cluster", cluster.zookeeper).option("kind", "queue").option("topics", "t.1, t.2")
    assert rows(named.load("kept")) == [row for row in [*first, *second] if row[2] in ("t.1", "t.2")]


def test_what_has_none_of_the_topics_is_passed_over(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster
) -> None:
    """By the indexes of the tape, of which there is one here: partitions begin and end anywhere before it and behind it."""
    connected.create_queue("rare", record=roq.Record(days=1))
    rare = (5, 700, 701, INDEX_EVERY + 10)
    with connected.publisher("rare") as publisher:
        for number in range(1, INDEX_EVERY + 20):
            publisher.publish("t.rare" if number in rare else f"t.{number % 3}", b"%d" % number, confirm="stored")
        wanted = [(signed(publisher.id), number, "t.rare", b"%d" % number) for number in rare]
    for most in (100, 5_000):
        assert rows(source(spark, cluster, "rare", topics="t.rare", entriesPerPartition=most)) == wanted


def kept_batches(into: list[tuple[int, list[Row]]]) -> Callable[[DataFrame, int], None]:
    def keep(frame: DataFrame, number: int) -> None:
        into.append((number, rows(frame)))

    return keep


def test_a_stream_goes_on_from_its_checkpoint_and_repeats_a_batch_exactly(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.create_queue("streamed", record=roq.Record(days=1))
    first, _ = publish(connected, "streamed", 500)
    seen: list[tuple[int, list[Row]]] = []
    reader = spark.readStream.format("roq").option("cluster", cluster.zookeeper).option("queue", "streamed")
    frame = reader.option("startingPosition", "earliest").option("maxEntriesPerTrigger", 5).load()

    def run(keep: Callable[[DataFrame, int], None]) -> None:
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", f"{tmp_path}/c")
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_SECONDS)
        progress = query.recentProgress[-1]["sources"][0]
        reported, reached = (json.loads(progress[name])["done"] for name in ("latestOffset", "endOffset"))
        assert all(reported[exchange] >= entry for exchange, entry in reached.items())

    run(kept_batches(seen))
    assert len(seen) > 3, "no batch has more than 5 entries"
    assert [row for _, found in seen for row in found] == first
    second, _ = publish(connected, "streamed", 300)
    tried: list[list[Row]] = []

    def fails(batch: DataFrame, number: int) -> None:
        tried.append(rows(batch))
        raise RuntimeError("the sink fails")

    with pytest.raises(PySparkException, match="the sink fails"):
        run(fails)
    third, _ = publish(connected, "streamed", 300)
    seen.clear()
    run(kept_batches(seen))
    assert seen[0][1] == tried[0], "what was planned is what is read, whatever came meanwhile"
    assert [row for _, found in seen for row in found] == [*second, *third]
    offsets = (tmp_path / "c" / "offsets" / "0").read_text().splitlines()[-1]
    assert sorted(json.loads(offsets)) == ["done", "ended", "tapes"]


def processes(connected: roq.blocking.Cluster, kind: ProcessKind) -> list[roq.RunningProcess]:
    reports = [host.report for host in connected.view().hosts if host.report is not None]
    return [one for report in reports for one in report.processes if one.kind is kind]


def process_of(connected: roq.blocking.Cluster, queue: str, exchange: str) -> int:
    """Its pid."""
    found = processes(connected, ProcessKind.EXCHANGE)
    return next(one.pid for one in found if (one.queue, one.exchange) == (queue, exchange))


class Load:
    """A publisher that goes on in a thread of its own; a context manager. told: what it published."""

    def __init__(self, connected: roq.blocking.Cluster, queue: str) -> None:
        self.told: list[Row] = []
        self.publisher = connected.publisher(queue, confirm="stored")
        self._over, self._thread = threading.Event(), threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(0.001):
            number = len(self.told)
            self.publisher.publish("t", b"%d" % number)
            self.told.append((signed(self.publisher.id), number + 1, "t", b"%d" % number))

    def more(self, count: int = 200) -> None:
        """Return when it has published so many more."""
        wanted = len(self.told) + count
        wait_for(lambda: len(self.told) >= wanted)

    def __enter__(self) -> Load:
        self.publisher.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(WAIT_SECONDS)
        self.publisher.close(WAIT_SECONDS)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # what another thread or process does has no event here


def test_exchanges_and_stores_die_and_nothing_is_missing(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.create_queue("churned", overflow="block", record=roq.Record(days=1))
    seen: list[tuple[int, list[Row]]] = []
    reader = spark.readStream.format("roq").option("cluster", cluster.zookeeper).option("queue", "churned")
    frame = reader.option("startingPosition", "earliest").load()
    query = frame.writeStream.foreachBatch(kept_batches(seen)).option("checkpointLocation", f"{tmp_path}/c").start()
    try:
        with Load(connected, "churned") as load:
            load.more()
            added = connected.create_exchange("churned").exchange
            connected.exchange_active("churned", added)
            assert connected.move("churned", [(load.publisher.id, added)]).moved == 1
            load.more()
            os.kill(process_of(connected, "churned", added), signal.SIGKILL)
            load.more()
            connected.remove_exchange("churned", added)
            load.more()
            for one in processes(connected, ProcessKind.STORE):
                os.kill(one.pid, signal.SIGKILL)
            load.more()

        def arrived() -> bool:
            assert query.isActive, query.exception()
            return len({row for _, found in list(seen) for row in found}) >= len(load.told)

        wait_for(arrived)
    finally:
        query.stop()
    found = [row for _, batch in seen for row in batch]
    assert Counter(set(found)) == Counter(load.told), "at least once"
    assert load.publisher.replays > 0, "or it says nothing of repeats"
    distinct = source(spark, cluster, "churned").dropDuplicates(["publisher", "sequence"])
    assert sorted(rows(distinct)) == sorted(load.told)


def test_what_has_expired_is_told_or_left_out(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.create_queue("short", record=roq.Record(days=1))
    publish(connected, "short", 100)
    seen: list[tuple[int, list[Row]]] = []

    def run(**options: object) -> None:
        reader = spark.readStream.format("roq").option("cluster", cluster.zookeeper).option("queue", "short")
        frame = reader.options(startingPosition="earliest", **{name: str(value) for name, value in options.items()}).load()
        writer = frame.writeStream.foreachBatch(kept_batches(seen)).option("checkpointLocation", f"{tmp_path}/c")
        assert writer.trigger(availableNow=True).start().awaitTermination(WAIT_SECONDS)

    run()
    seen.clear()
    publish(connected, "short", 100)
    (tape,) = connected.tapes("short").views
    os.kill(process_of(connected, "short", tape.exchange), signal.SIGKILL)  # the next life of it begins a new segment
    after, _ = publish(connected, "short", 100)
    connected.record_queue("short", roq.Record(days=1, max_bytes=1))
    beginning = roq.TapePosition(connected.tapes("short").tapes, {})
    wait_for(lambda: from_json(connected.tapes("short").views[0].meta, LogMeta).trimmed > 0)
    with pytest.raises(PySparkException, match=r"\[ROQ_DATA_LOST\] entries .* have expired before they were read: record"):
        run()
    run(failOnDataLoss=False)
    assert [row for _, found in seen for row in found] == after
    assert rows(source(spark, cluster, "short")) == after, "earliest is what there is"
    with pytest.raises(PySparkException, match=r"\[ROQ_DATA_LOST\]"):
        source(spark, cluster, "short", startingPosition=beginning).count()
    assert rows(source(spark, cluster, "short", startingPosition=beginning, failOnDataLoss="false")) == after


def test_the_document(spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path) -> None:
    connected.create_queue("orders", record=roq.Record(days=1))
    with connected.publisher("orders") as publisher:
        for number in range(10):
            publisher.publish(f"{'eu' if number % 2 else 'us'}.paris", b'{"price": %d}' % number)
        publisher.publish("eu.paris", b"no json", confirm="stored")

    def run(heading: str, names: dict[str, Any]) -> dict[str, Any]:
        text = block(DOCUMENT, heading).replace("zk1:2181", cluster.zookeeper).replace("/data/", f"{tmp_path}/")
        exec(text.replace("2026-11-26T00:00+01:00", "2020-01-01T00:00+01:00"), names)
        return names

    prices = run("Spark: a batch", {"spark": spark})["prices"]
    assert sorted(row.price or "" for row in prices.collect()) == ["", "1", "3", "5", "7", "9"]
    assert run("Spark: a stream", {"spark": spark})["query"].awaitTermination(WAIT_SECONDS)
    assert spark.read.parquet(f"{tmp_path}/orders").count() == 11


def test_rows_are_published_and_stored(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.create_queue("written", record=roq.Record(days=1))
    connected.create_queue("forgetful")
    frame = spark.range(0, 300, 1, 3).selectExpr("concat('t.', id % 3) as topic", "cast(id as string) as payload")
    writer = frame.write.format("roq").option("cluster", cluster.zookeeper).option("staging", str(tmp_path)).mode("append")
    writer.option("queue", "written").option("confirm", "stored").save()
    found = source(spark, cluster, "written").selectExpr("topic", "cast(payload as string) as payload").collect()
    assert [(row.topic, row.payload) for row in found] == [(f"t.{number % 3}", str(number)) for number in range(300)]
    for _ in range(2):  # the second time it is done
        writer.option("publication", "daily").save()
    (producer,) = connected.producers("written")
    assert (producer.name, producer.number) == ("spark-publication-daily", 300)
    writer.option("publication", "")
    with pytest.raises(PySparkException, match=r"\[ROQ_NOT_RECORDED\]"):
        writer.option("queue", "forgetful").save()
    with pytest.raises(PySparkException, match="are of publish/subscribe queues"):
        writer.option("kind", "work-queue").save()


def test_what_can_not_be_is_told(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.create_queue("unrecorded")
    connected.create_queue("again", record=roq.Record(days=1))
    with pytest.raises(NotRecorded):
        connected.tapes("unrecorded")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"queue": "unrecorded"}, r"\[ROQ_NOT_RECORDED\]"),
        ({"queue": "no-such"}, r"\[ROQ_QUEUE_NOT_FOUND\]"),
        ({"queue": "again", "maxRowsPerBatch": 5}, "is unknown; there are"),
        ({"queue": "again", "startingPosition": roq.TapePosition("0" * 16, {})}, r"\[ROQ_INVALID_POSITION\]"),
    ]
    for options, text in wrong:
        with pytest.raises(PySparkException, match=text):
            source(spark, cluster, options.pop("queue"), **options).count()
    reader = spark.readStream.format("roq").option("cluster", cluster.zookeeper).option("queue", "again")
    with pytest.raises(PySparkException, match="is for batch reads"):
        reader.option("endingPosition", "latest").load().writeStream.format("noop").option(
            "checkpointLocation", f"{tmp_path}/e"
        ).start().awaitTermination(WAIT_SECONDS)
    publish(connected, "again", 10)
    reader = spark.readStream.format("roq").option("cluster", cluster.zookeeper).option("queue", "again")
    writer = reader.option("startingPosition", "earliest").load().writeStream.format("noop")
    writer = writer.option("checkpointLocation", f"{tmp_path}/c").trigger(availableNow=True)
    assert writer.start().awaitTermination(WAIT_SECONDS)
    connected.remove_queue("again")
    connected.create_queue("again", record=roq.Record(days=1))
    publish(connected, "again", 10)
    with pytest.raises(PySparkException, match=r"\[ROQ_INVALID_POSITION\].*removed and created anew: begin with a new"):
        writer.start().awaitTermination(WAIT_SECONDS)

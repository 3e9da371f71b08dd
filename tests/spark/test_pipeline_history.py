"""The jobs over recorded queues: the cluster's own KPI history, and messages into an archive; and conditions of the source."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import roq.blocking
from roq.errors import CallError, QueueNotFound
from roq.spark.pipeline import archive, kpi
from roq.spark.pipeline.capacity import QueueReport
from roq.spark.pipeline.job import read_kept
from roq.spark.pipeline.kpi_records import HISTORY
from roq.wire.kpi import HISTORY_KPIS
from tests.harness.documented import block
from tests.integration.running import RunningCluster

START_SECONDS, WAIT_SECONDS, LOOK_SECONDS = 60.0, 30.0, 0.5

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    found = RunningCluster(tmp_path_factory.mktemp("cluster"), zookeeper=None, hosts=1)
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


def kept(connected: roq.blocking.Cluster, *queues: str) -> int:
    """Records in the cluster's history, once there are three of each of these queues."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        with connected.subscriber(HISTORY_KPIS, start="earliest", follow=False) as past:
            topics = [message.topic for message in past]
        if all(topics.count(queue) >= 3 for queue in queues):
            return len(topics)
        time.sleep(LOOK_SECONDS)  # nobody tells when it is stored
    raise AssertionError(f"the history has no three records each of {queues}: {topics}")


def words(job: str, changed: dict[str, str]) -> list[str]:
    """The arguments of the second command that the document shows for a job, with some things changed."""
    shown = block("docs/spark.md", job, 2)
    for before, after in changed.items():
        shown = shown.replace(before, after)
    return shlex.split(shown)[4:]


def test_the_history_of_a_cluster_becomes_a_report_and_the_next_run_goes_on(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.record_history(roq.Record(days=1))
    for queue in ("orders", "visits"):
        connected.create_queue(queue)
    least = kept(connected, "orders", "visits")
    shown = words("kpi", {"/data": str(tmp_path), "zk1:2181": cluster.zookeeper})
    given = shown[: shown.index("--report")]
    first = kpi.work(spark, kpi.parser().parse_args(given))
    assert first.added >= least
    assert (first.known, first.unreadable) == (0, 0)
    (tmp_path / "strict.toml").write_text("[exchange]\nmax_messages_per_second = 500\n")
    more = ("--queue", "orders", "--report", f"{tmp_path}/report", "--policy", f"{tmp_path}/strict.toml")
    second = kpi.work(spark, kpi.parser().parse_args([*given, *more]))
    assert second.known == 0
    rows = read_kept(spark, f"{tmp_path}/kpis", HISTORY).select("queue", "time").collect()
    assert len(rows) == len(set(rows)) == first.added + second.added
    reports = msgspec.json.decode(Path(second.report).read_bytes(), type=list[QueueReport])
    assert [one.queue for one in reports] == ["orders", "visits"]
    assert sum(one.records for one in reports) == len(rows)
    connected.record_history(None)
    with pytest.raises(QueueNotFound):
        connected.queue(HISTORY_KPIS)
    for wrong in (("--since", "1h"), ("--cluster", "zk", "--every", "5"), ("--records", "x", "--checkpoint", "/c")):
        with pytest.raises(CallError, match="--since, --every and --checkpoint"):
            kpi.work(spark, kpi.parser().parse_args(["--history", f"{tmp_path}/other", *wrong]))


def test_messages_are_archived_once_and_where_leaves_out_the_others(
    spark: SparkSession, cluster: RunningCluster, connected: roq.blocking.Cluster, tmp_path: Path
) -> None:
    connected.create_queue("prices", record=roq.Record(days=1))
    told = [b'{"price": %d}' % number for number in range(200)]
    with connected.publisher("prices", confirm="stored") as publisher:
        publisher.publish_many("eu.paris", told[:100])
        publisher.publish_many("us", told[100:], headers={"kind": "late"})
    reader = spark.read.format("roq").option("cluster", cluster.zookeeper).option("queue", "prices")
    found = reader.option("where", "price >= 50 and price < 150 and topic != 'us'").load()
    assert [json.loads(bytes(row.payload))["price"] for row in found.collect()] == list(range(50, 100))
    late = reader.option("where", "headers.kind == 'late' and price > 197").load().select("payload", "sequence").collect()
    assert [(bytes(row.payload), row.sequence) for row in late] == [(told[198], 199), (told[199], 200)]

    arguments = words("archive", {"/data": str(tmp_path), "zk1:2181/orders": f"{cluster.zookeeper}/prices", "> 100": ">= 20"})
    address, into = f"roq://{cluster.zookeeper}/prices", f"{tmp_path}/orders"
    assert address in arguments
    run = archive.work(spark, archive.parser().parse_args([*arguments, "--batch-entries", "1"]))
    assert (run.archived, run.repeated) == (180, 0)
    with connected.publisher("prices", confirm="stored") as publisher:
        publisher.publish("eu.rome", b'{"price": 1000}')
    assert archive.work(spark, archive.parser().parse_args(arguments)).archived == 1
    lost = archive.work(spark, archive.parser().parse_args([*arguments, "--checkpoint", f"{tmp_path}/another"]))
    assert (lost.archived, lost.repeated) == (0, 181), "who lost the checkpoint archives nothing twice"
    rows = read_kept(spark, into, archive.MESSAGES).collect()
    assert sorted(bytes(row.payload) for row in rows) == sorted([*told[20:], b'{"price": 1000}'])
    assert {row.headers.get("kind") and bytes(row.headers["kind"]) for row in rows if row.topic == "us"} == {b"late"}
    for wrong in (("--topics", "eu.>"), ("--since", "1h", "--batch-rows", "5")):
        with pytest.raises(CallError, match="queues"):
            archive.work(spark, archive.parser().parse_args([address, "--into", into, *wrong]))

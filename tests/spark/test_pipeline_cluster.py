"""Jobs on a cluster: KPIs as the queues' monitors tell them, more dead letters than a master shows, a shuffle of followers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import roq.blocking
import roq.shuffle
from roq.errors import CallError, QueueNotFound
from roq.spark.pipeline import dead_letters, kpi, sort
from roq.spark.pipeline.capacity import QueueReport
from tests.integration.running import RunningCluster
from tests.spark.test_documented import commands, do

pytestmark = pytest.mark.timeout(240)
SECONDS = "5"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), hosts=1)
    yield running
    running.stop()


def run(spark: SparkSession, *given: str) -> kpi.KpiResult:
    return kpi.work(spark, kpi.parser().parse_args(given))


def test_what_a_cluster_tells_becomes_a_history_and_a_report(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    given = ("--history", f"{tmp_path}/history", "--cluster", cluster.zookeeper, "--seconds", SECONDS)
    with pytest.raises(CallError, match="the cluster has no queues"):
        run(spark, *given)
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("orders")
        connected.create_queue("visits")
        with pytest.raises(QueueNotFound):
            run(spark, *given, "--queue", "nothing")
        with connected.publisher("orders") as publisher:
            publisher.publish("eu", b"x" * 100)
            result = run(spark, *given, "--report", f"{tmp_path}/report")
            publisher.publish("eu", b"y")
    assert result.added >= 4
    assert not list((tmp_path / "history" / kpi.COLLECTED).iterdir())
    orders, visits = msgspec.json.decode(Path(result.report).read_bytes(), type=list[QueueReport])
    assert (orders.queue, visits.queue, orders.publishers_most, visits.publishers_most) == ("orders", "visits", 1, 0)
    assert (orders.exchanges_least, orders.exchanges_most, orders.latency_p99_seconds) == (1, 1, None)


def test_dead_letters_that_no_reply_holds_are_told(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    address = f"roq://{cluster.zookeeper}/jobs"
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_work_queue("jobs")
    with roq.blocking.open_queue(address) as tasks:
        tasks.put_many([bytes(50_000)] * 100)  # 4 MiB pass in one reply
        while leased := tasks.lease(60, 100):
            for task in leased:
                task.reject("ValueError: 1")
    result = dead_letters.work(spark, dead_letters.parser().parse_args([address, "--out", f"{tmp_path}/out"]))
    assert (result.dead, result.patterns) == (100, 1)
    assert 50 < result.analysed < 100


def test_sorting_through_the_cluster(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    spark.range(0, 3000, 1, 3).selectExpr("id % 7 as key", "id").write.parquet(f"{tmp_path}/data")
    shuffle = ("--shuffles", f"roq://{cluster.zookeeper}", "--replicas", "1", "--ranges", "4")
    given = (f"{tmp_path}/data", "--out", f"{tmp_path}/out", "--keys", "key", "--keep", "last", "--order", "id", *shuffle)
    result = sort.work(spark, sort.parser().parse_args(given))
    assert (result.rows_in, result.rows_out, result.ranges) == (3000, 7, 4)
    found = spark.read.parquet(f"{tmp_path}/out").orderBy("key").collect()
    assert [(row["key"], row["id"]) for row in found] == [(key, max(range(key, 3000, 7))) for key in range(7)]
    with roq.shuffle.open(f"roq://{cluster.zookeeper}") as shuffles:
        assert shuffles.list() == []


def test_what_the_documents_do_on_a_cluster(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    with roq.blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("orders")
    with roq.blocking.open_queue(f"roq://{cluster.zookeeper}/orders") as tasks:
        tasks.put(b"bad")
        tasks.lease(60)[0].reject("ValueError: no")
        tasks.put_many([b"one", b"two"])
    (letters,) = commands("dead_letters", tmp_path, cluster.zookeeper)
    assert do(spark, "dead_letters", letters).dead == 1
    words = commands("kpi", tmp_path, cluster.zookeeper)[0]
    assert words[-1] == "3600"
    assert do(spark, "kpi", [*words[:-1], "2"]).added >= 1
    for_ever = commands("archive", tmp_path, cluster.zookeeper)[1]
    stopper = threading.Thread(target=stop_when_archived, args=(tmp_path / "archive",))
    stopper.start()
    assert do(spark, "archive", for_ever).archived == 2
    stopper.join()


def stop_when_archived(folder: Path) -> None:
    """As a person who presses Ctrl-C then: there are rows, and no batch is under way. (The first batch may be empty.)"""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        begun, ended = ({path.name for path in folder.glob(f"_checkpoint/{kind}/*")} for kind in ("offsets", "commits"))
        if begun == ended and list(folder.glob("day=*/part-*.parquet")):
            break
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

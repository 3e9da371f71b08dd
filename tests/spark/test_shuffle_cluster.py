"""format("roq-shuffle") over a real cluster of this machine: what the folder does, and hosts that are lost meanwhile."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from pyspark.sql import DataFrame, SparkSession

import roq
import roq.shuffle
from roq.errors import ShuffleNotFound
from roq.wire.shuffle import ShuffleState
from tests.integration.running import RunningCluster
from tests.spark.comparing import load, rows_of, same_as_spark, save, sizes
from tests.spark.trouble import Function, dying, kills, raising, slowly

ROWS, RANGES = 20_000, 6
SAVE_SECONDS = 100.0
KEYS = {
    "skewed": "if(id % 10 < 3, 7, xxhash64(id)) as k",
    "nulls": "if(id % 4 = 0, null, concat('é', hex(xxhash64(id % 3000)))) as k",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    running = RunningCluster(tmp_path_factory.mktemp("cluster"), gcms=2, hosts=4, session_seconds=2.0)
    yield running
    running.stop()


@pytest.fixture
def address(cluster: RunningCluster) -> str:
    return f"roq://{cluster.zookeeper}"


@pytest.fixture
def name(address: str) -> Iterator[str]:
    """A shuffle of this test alone, removed after it."""
    chosen = f"visits-{uuid.uuid4().hex[:8]}"
    yield chosen
    with roq.shuffle.open(address) as shuffles:
        if chosen in [one.name for one in shuffles.list()]:
            shuffles.remove(chosen)


def rows(spark: SparkSession, keys: str = "skewed") -> DataFrame:
    return spark.range(0, ROWS, 1, 4).selectExpr(KEYS[keys], "id", "repeat('v', 50) as text")


@pytest.mark.parametrize("keys", KEYS)
def test_like_spark_s_own_sort(spark: SparkSession, address: str, name: str, keys: str) -> None:
    frame = rows(spark, keys)
    save(frame, address, name, ["k"], RANGES)
    found = load(spark, address, name)
    same_as_spark(frame, found, ["k"], RANGES)
    counts = sizes(found)
    assert len(counts) == RANGES
    if keys == "skewed":  # rows of one size: balanced by bytes is balanced by rows
        assert max(counts) / (ROWS / RANGES) <= 1.15


def test_the_option_cluster_is_the_same_and_overwrite_replaces(spark: SparkSession, cluster: RunningCluster, name: str) -> None:
    for count in (3_000, 1_000):
        writer = spark.range(count).write.format("roq-shuffle").option("cluster", cluster.zookeeper).option("keys", "id")
        writer.mode("overwrite").save(name)
    reader = spark.read.format("roq-shuffle").option("cluster", cluster.zookeeper)
    assert rows_of(reader.load(name)) == [(number,) for number in range(1_000)]


@pytest.mark.parametrize("trouble", [raising(2), dying(1)], ids=["raise twice", "die once"])
def test_attempts_that_fail_leave_no_rows(spark: SparkSession, address: str, name: str, trouble: Function) -> None:
    frame = rows(spark)
    save(frame.mapInArrow(trouble, frame.schema), address, name, ["k"], RANGES)
    same_as_spark(frame, load(spark, address, name), ["k"], RANGES)


def test_workers_killed_at_random_while_writing(spark: SparkSession, address: str, name: str) -> None:
    frame = rows(spark)
    with kills(spark, 3, 0.2, seed=1) as killed:
        save(frame.mapInArrow(slowly(0.05), frame.schema), address, name, ["k"], RANGES)
    assert killed
    same_as_spark(frame, load(spark, address, name), ["k"], RANGES)


def test_a_host_lost_between_write_and_read(spark: SparkSession, cluster: RunningCluster, address: str, name: str) -> None:
    """Every range has another replica."""
    frame = rows(spark)
    save(frame, address, name, ["k"], RANGES)
    with roq.shuffle.open(address) as shuffles:
        lost = shuffles.describe(name).ranges[0].holders[0]
    found = load(spark, address, name)
    cluster.call(cluster.local.lose_host(lost))
    same_as_spark(frame, found, ["k"], RANGES)


@pytest.mark.parametrize("lost", ["leader", "host"])
def test_lost_while_writing(spark: SparkSession, cluster: RunningCluster, address: str, name: str, lost: str) -> None:
    """Another leader takes over. Attempts a host had not passed on yet are tried again, with other buffers."""
    frame = rows(spark)

    def lose_it() -> ShuffleState:
        state = until_written(address, name)
        if lost == "leader":
            cluster.call(kill_leader(cluster))
        else:
            cluster.call(cluster.local.lose_host(max(host for host, daemon in cluster.local.hosts.items() if daemon.running)))
        return state

    with ThreadPoolExecutor(1) as thread:  # the save is this thread's: Spark knows formats by the thread's session
        losing = thread.submit(lose_it)
        save(frame.mapInArrow(slowly(0.4), frame.schema), address, name, ["k"], RANGES)
        assert losing.result() is ShuffleState.FILLING, "it was too late to hurt"
    same_as_spark(frame, load(spark, address, name), ["k"], RANGES)


async def kill_leader(cluster: RunningCluster) -> None:
    """kill -9 the GCM that leads; it is not started again."""
    async with roq.connect(cluster.zookeeper) as client:
        address = (await client.view()).leader.partition(":")[0]
    leader = next(name for name, gcm in cluster.local.gcms.items() if gcm.option("--address") == address)
    await cluster.local.kill_gcm(leader)


def until_written(address: str, name: str) -> ShuffleState:
    """Wait until an attempt is stored; what the shuffle is then."""
    end = time.monotonic() + SAVE_SECONDS
    with roq.shuffle.open(address) as shuffles:
        while time.monotonic() < end:
            with suppress(ShuffleNotFound):
                now = shuffles.describe(name)
                if now.stored:
                    return now.state
            time.sleep(0.05)
    raise TimeoutError("nothing was written")

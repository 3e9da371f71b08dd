"""Shuffles of a real cluster of processes: written, sealed and read while followers and leaders are killed and join.

Every row is counted by its id (tests/harness/shuffle_load.py). The same in containers: tests/failure/test_shuffle.py.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import roq
from roq.errors import AttemptNotFound, CallError, ShuffleConflict, ShuffleNotFound, ShuffleNotSealed, ShuffleSealed
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.wire import shuffle as wire
from roq.wire.assignment import ProcessKind, ProcessState
from roq.wire.shuffle import Receipt
from tests.harness.shuffle_load import SCHEMA, ShuffleLoad
from tests.integration.running import RunningCluster

Load = Callable[..., ShuffleLoad]
MEMORY_BYTES = 32 * 1024 * 1024  # of each follower: data sets here are larger
SECONDS = 30.0


class Cluster:
    """Three hosts, two GCMs, and the ways to hurt them."""

    def __init__(self, directory: Path) -> None:
        os.environ["ROQ_SHUFFLE_MEMORY_BYTES"] = str(MEMORY_BYTES)
        try:
            self.running = RunningCluster(directory, gcms=2, hosts=3, session_seconds=2.0)
        finally:
            del os.environ["ROQ_SHUFFLE_MEMORY_BYTES"]
        self.address = f"roq://{self.running.zookeeper}"

    async def _stores(self) -> dict[str, tuple[int, str]]:
        async with roq.connect(self.running.zookeeper) as client:
            hosts = (await client.view()).hosts
        return {
            host.host: (process.pid, f"tcp://{host.address}:{process.ports['shuffle']}")
            for host in hosts
            if host.alive and host.report is not None
            for process in host.report.processes
            if process.kind is ProcessKind.STORE and process.state is ProcessState.RUNNING
        }

    def stores(self) -> dict[str, tuple[int, str]]:
        """Running stores: (pid, endpoint of the follower) by host."""
        return self.running.call(self._stores())

    def kill_store(self, host: str) -> None:
        """kill -9; its HCM starts it again."""
        os.kill(self.stores()[host][0], signal.SIGKILL)

    async def _describe(self, endpoint: str) -> wire.FollowerView:
        client = RpcClient(endpoint, wire.Reply, on_disconnect=OnDisconnect.FAIL)
        try:
            return await client.request(wire.DescribeFollower(), wire.FollowerView, 5.0)
        finally:
            client.close()

    def views(self) -> dict[str, wire.FollowerView]:
        """All followers."""
        return {host: self.running.call(self._describe(endpoint)) for host, (_, endpoint) in self.stores().items()}

    async def _leader(self) -> str:
        async with roq.connect(self.running.zookeeper) as client:
            return (await client.view()).leader

    def leader(self) -> str:
        """Name of the GCM that leads."""
        address = self.running.call(self._leader()).partition(":")[0]
        return next(name for name, daemon in self.running.local.gcms.items() if daemon.option("--address") == address)

    def whole(self, hosts: int = 3) -> None:
        """Until so many stores run."""
        until(lambda: len(self.stores()) >= hosts)


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait for something outside of this process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("shuffle"))
    yield made
    made.running.stop()


@pytest.fixture
def load(cluster: Cluster) -> Iterator[Load]:
    made: list[ShuffleLoad] = []

    def new(ranges: int = 8, **options: int) -> ShuffleLoad:
        made.append(ShuffleLoad(cluster.address, f"s-{secrets.token_hex(4)}", **options))
        made[-1].create(ranges=ranges)
        return made[-1]

    yield new
    for one in made:
        one.remove()
        one.close()
    cluster.whole()


def written(load: ShuffleLoad, rows: int) -> None:
    """Until so many rows were given to writers."""
    until(lambda: load.written >= rows)


# --- nothing is hurt ----------------------------------------------------------------------------------------------------


def test_a_shuffle_from_create_to_remove(cluster: Cluster, load: Load) -> None:
    shuffle = load()
    shuffles, name = shuffle.shuffles, shuffle.name
    with pytest.raises(ShuffleNotSealed):
        shuffles.read(name, 0)
    with pytest.raises(ShuffleConflict):
        shuffles.create(name, ["id"], SCHEMA)
    shuffle.start()
    receipts = shuffle.finished()
    assert shuffles.describe(name).stored == len(receipts)
    with pytest.raises(AttemptNotFound):
        shuffles.commit(name, [*receipts, Receipt(99, "never written", 5, 100, 1)])
    sealed = shuffle.commit()
    assert shuffle.commit() == sealed, "the same again"
    assert {partition: receipt.attempt for partition, receipt in enumerate(receipts)} == sealed.winners
    assert len(sealed.ranges) == 8
    assert sum(one.rows for one in sealed.ranges) == sealed.rows == 120_000
    assert all(len(one.holders) == 2 for one in sealed.ranges)
    with pytest.raises(ShuffleSealed):
        shuffles.writer(name, 0)
    shuffle.read().check()
    with pytest.raises(ShuffleNotFound):
        shuffles.describe("no such")
    until(lambda: all(view.attempts == view.memory_bytes == 0 for view in cluster.views().values()))


def test_more_than_memory(cluster: Cluster, load: Load) -> None:
    """Three followers with 32 MiB each, 200 MB of rows."""
    shuffle = load(partitions=6, rows=50_000, pad=600)
    shuffle.start()
    most = 0
    while shuffle.writing:
        most = max(most, *(view.memory_bytes for view in cluster.views().values()))
        time.sleep(0.1)
    shuffle.finished()
    shuffle.commit()
    shuffle.read().check()
    assert 0 < most <= MEMORY_BYTES


def test_a_rebalanced_shuffle(load: Load) -> None:
    shuffle = load()
    shuffle.start()
    shuffle.finished()
    shuffle.commit()
    before = shuffle.shuffles.describe(shuffle.name)
    after = shuffle.shuffles.rebalance(shuffle.name, 13)
    assert len(after.ranges) == 13
    assert after.epoch > before.epoch
    assert after.moved_least <= after.moved <= 1.2 * after.moved_least + 500_000, (after.moved, after.moved_least)
    for one in before.ranges:
        with pytest.raises(CallError):  # there is a range of this number, of other rows
            next(shuffle.shuffles.read(shuffle.name, one.number, planned=before))
    shuffle.read().check()


# --- kills --------------------------------------------------------------------------------------------------------------


def test_stores_are_killed_during_writes(cluster: Cluster, load: Load) -> None:
    """Each is a buffer of some attempts and holds some ranges."""
    shuffle = load(rows=40_000)
    shuffle.start(0.02)
    for number, host in enumerate(cluster.stores()):
        written(shuffle, 30_000 * (number + 1))
        cluster.kill_store(host)
        until(lambda: len(cluster.stores()) == 3)
    shuffle.finished()
    assert shuffle.errors["AttemptLost"] > 0, "a buffer forgets"
    shuffle.commit()
    shuffle.read().check()


def test_stores_are_killed_during_reads(cluster: Cluster, load: Load) -> None:
    shuffle = load()
    shuffle.start()
    shuffle.finished()
    shuffle.commit()
    shuffle.pause_seconds = 0.2
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(shuffle.read)
        for host in cluster.stores():
            time.sleep(0.5)  # somewhere in the middle
            cluster.kill_store(host)
            until(lambda: len(cluster.stores()) == 3)
        reading.result(60).check()


def test_a_host_is_lost_and_its_ranges_are_copied(cluster: Cluster, load: Load) -> None:
    """… while others write; it comes back afterwards."""
    sealed = load()
    sealed.start()
    sealed.finished()
    sealed.commit()
    shuffle = load(rows=40_000)
    shuffle.start(0.02)
    written(shuffle, 40_000)
    cluster.running.call(cluster.running.local.lose_host("host-2"))
    try:
        shuffle.finished()
        shuffle.commit()
        shuffle.read().check()

        def moved() -> bool:
            table = sealed.shuffles.describe(sealed.name)
            return not table.former and all("host-2" not in one.holders and len(one.holders) == 2 for one in table.ranges)

        until(moved)
        sealed.read().check()
    finally:
        cluster.running.call(cluster.running.local.start_hcm("host-2"))
        cluster.whole()
    sealed.read().check()


def test_a_follower_joins_while_a_shuffle_runs(cluster: Cluster, load: Load) -> None:
    shuffle = load(rows=40_000)
    shuffle.start(0.02)
    written(shuffle, 40_000)
    host = cluster.running.call(cluster.running.local.add_host())
    cluster.whole(4)
    shuffle.finished()
    shuffle.commit()
    shuffle.read().check()
    another = load(ranges=32)  # each is placed there with one half
    another.start()
    another.finished()
    until(lambda: any(host in one.holders for one in another.commit().ranges), 5)
    another.read().check()


def test_the_leader_is_killed(cluster: Cluster, load: Load) -> None:
    """While attempts are written, and while it seals."""
    shuffle = load(rows=40_000)
    shuffle.start(0.02)
    written(shuffle, 40_000)
    local = cluster.running.local
    first = cluster.leader()
    cluster.running.call(local.kill_gcm(first))
    try:
        shuffle.finished()
    finally:
        cluster.running.call(local.start_gcm(first))
    second = next(name for name in local.gcms if name != first)
    with ThreadPoolExecutor(1) as thread:
        sealing = thread.submit(shuffle.commit)
        cluster.running.call(local.kill_gcm(second))
        try:
            sealing.result(60)
        finally:
            cluster.running.call(local.start_gcm(second))
    shuffle.read().check()

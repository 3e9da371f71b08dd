"""Work queues of several shards on a real cluster: split and merged while processes put and lease and masters are killed; what
closes gives everything; keys hold; a leader dies at every step. The verbs are in test_shards_contract.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

import roq
from gcm.crash import VARIABLE
from roq import blocking
from roq.errors import (
    IncompatibleVersion,
    InvalidConfiguration,
    InvalidName,
    ShardClosed,
    WorkQueueNotFound,
)
from roq.tools.local.cluster import LocalCluster
from roq.wire import gcm as wire
from roq.wire.assignment import ProcessKind
from roq.wire.shards import SHARDED_NAME_MAX, SHARDS_MAX, SetShards, ShardList, shard_name
from roq.wire.task import NewTask
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli
from tests.integration.test_gcm_crash_points import ANSWER_SECONDS, Scene, points, read_assignment
from tests.integration.workqueue_rig import program

pytestmark = pytest.mark.timeout(120)
KEPT_SECONDS = 2.0
LONG = 60.0
TASKS = 600  # of each producer
PROCESSES = 4  # of each kind
CHANGES = ((6, 1, 50), (2, 0, 500), (3, 0, 900))  # shards then; before it a master is killed: its shard, once so much was put

PUT = """
import sys
import roq
from roq import blocking
address, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with blocking.open_queue(address) as queue:
    for start in range(0, count, 5):
        tasks = [f"{name}-{number}" for number in range(start, start + 5)]
        queue.put_many(roq.NewTask(one.encode(), dedup_key=one if start % 10 else "") for one in tasks)
"""
WORK = """
import json, sys
from roq import blocking
from roq.errors import LeaseLost
done, unsure = [], []
with blocking.open_queue(sys.argv[1]) as queue:
    for task in queue.leases(60, count=3, wait_seconds=None):
        if task.payload == b"end":
            task.ack()
            break
        try:
            task.ack()
        except LeaseLost:  # sent again to a master that began with a snapshot: it may count
            unsure.append(task.payload.decode())
        else:
            done.append(task.payload.decode())
print(json.dumps([done, unsure]))
"""


class HastyCluster(LocalCluster):
    """It keeps a closed shard for a short time."""

    def environment(self, process: str) -> dict[str, str]:
        return {**super().environment(process), "ROQ_SHARD_KEPT_SECONDS": str(KEPT_SECONDS)}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster of three hosts whose closed shards are kept for a short time."""
    running = RunningCluster(tmp_path_factory.mktemp("shards"), zookeeper=None, kind=HastyCluster, hosts=3, session_seconds=4.0)
    yield running
    assert running.stop() == []


@pytest.fixture
def name() -> str:
    return f"w-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def admin(several: RunningCluster, name: str) -> Iterator[blocking.Cluster]:
    """Of that cluster; the work queue is removed at the end."""
    with blocking.connect(several.zookeeper) as connected:
        yield connected
        with contextlib.suppress(WorkQueueNotFound):
            connected.remove_work_queue(name)


def shards_of(admin: blocking.Cluster, name: str) -> ShardList:
    return unversioned(admin.work_queue(name).record.shards)


def unversioned(listed: ShardList | None) -> ShardList:
    """Its version is of the time at which it changed."""
    return ShardList() if listed is None else msgspec.structs.replace(listed, version=0)


def until(done: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_merged(admin: blocking.Cluster, name: str) -> ShardList:
    """No shard is closing any more."""
    until(lambda: not shards_of(admin, name).closing)
    return shards_of(admin, name)


def _inserted(queue: blocking.WorkQueue, count: int) -> bool:
    return queue.status().inserted > count


def kill_master(admin: blocking.Cluster, name: str, number: int) -> None:
    """The active one of a shard, as its host reports it."""
    record = admin.work_queue(shard_name(name, number)).record
    process = f"{ProcessKind.MASTER}/{record.name}"

    def pid() -> int:
        reports = [info.report for info in admin.hosts() if info.host == record.master_host]
        return next((one.pid for report in reports if report for one in report.processes if one.name == process), 0)

    until(pid)
    os.kill(pid(), signal.SIGKILL)


# --- split and merge ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_queue_is_split_and_merged_and_is_a_plain_one_again(
    several: RunningCluster, admin: blocking.Cluster, name: str
) -> None:
    address = f"roq://{several.zookeeper}/{name}"
    with blocking.open_queue(address) as queue, blocking.open_queue(address) as stale:
        first = queue.put(b"0")
        assert unversioned(admin.set_shards(name, 3).record.shards) == ShardList(0, (0, 1, 2), (0,), (), 3)
        ids = [first, *(queue.put(str(number).encode()) for number in range(1, 12))]
        assert {one.partition(":")[0] for one in ids if ":" in one} == {"1", "2"}
        until(lambda: sorted(view.id for view in stale.peek(count=20)) == sorted(ids))
        assert admin.set_shards(name, 3).record.shards == admin.set_shards(name, 3).record.shards
        admin.set_shards(name, 1)
        ids += [stale.put(b"late") for _ in range(6)]
        assert stale.status().ready == 18
        tasks = [task for _ in range(3) for task in stale.lease(LONG, 10)]
        assert sorted(task.id for task in tasks) == sorted(ids)
        assert stale.ack_many([task.token for task in tasks]) == []
        assert until_merged(admin, name) == ShardList(0, (0,), (0,), (), 3)
        assert queue.status().ready == 0, "and so it hears that shards were removed, which here come sooner than it looks"
        assert not queue.put(b"last").startswith(("1:", "2:"))
        assert [task.payload for task in stale.lease(LONG, 10, 2.0)] == [b"last"]
        assert [info.shards for info in admin.work_queues() if info.record.name == name] == [()]
        with pytest.raises(WorkQueueNotFound):
            admin.work_queue(shard_name(name, 1))


def refuses(shard: blocking.WorkQueue) -> None:
    """Once its master has heard that it is closed; what it took before is done."""
    for _ in range(200):
        try:
            shard.put(b"too early")
        except ShardClosed:
            return
        assert shard.ack_many(shard.lease(LONG, 1)) == []
        time.sleep(0.05)
    pytest.fail("a closed shard still takes tasks")


def test_a_closed_shard_stays_until_nothing_is_left_in_it(several: RunningCluster, admin: blocking.Cluster, name: str) -> None:
    with blocking.open_queue(f"roq://{several.zookeeper}/{name}?shards=2&dedup_seconds=0") as queue:
        for _ in range(2):  # one of each at both
            queue.put(b"delayed", delay_seconds=15.0)
            queue.put(b"leased")
        queue.put_many([b"dead"])
        queue.put_many([b"dead"])
        tasks = [task for _ in range(4) for task in queue.lease(LONG, 10)]
        dead = [task for task in tasks if task.payload == b"dead"]
        assert (len(dead), len(tasks)) == (2, 4)
        queue.reject_many(dead, "no")
        admin.set_shards(name, 1)
        with blocking.open_queue(f"roq://{several.zookeeper}/{shard_name(name, 1)}") as shard:
            refuses(shard)
        time.sleep(2 * KEPT_SECONDS)
        assert len(shards_of(admin, name).closing) == 1
        assert queue.ack_many(task for task in tasks if task.payload == b"leased") == []
        late = [task for _ in range(2) for task in queue.lease(LONG, 1, 30.0)]
        assert [task.payload for task in late] == [b"delayed"] * 2
        assert queue.ack_many(late) == []
        time.sleep(2 * KEPT_SECONDS)
        assert len(shards_of(admin, name).closing) == 1
        assert queue.requeue_dead([view.id for view in queue.dead()]) == 2
        assert queue.ack_many(task for _ in range(2) for task in queue.lease(LONG, 10, 2.0)) == []
        until_merged(admin, name)
        status = queue.status()
        assert (status.ready, status.delayed, status.leased, status.dead) == (0, 0, 0, 0)


def test_a_dedup_key_holds_across_splits_and_merges(several: RunningCluster, admin: blocking.Cluster, name: str) -> None:
    keys = [f"key {number}" for number in range(40)]
    tasks = [NewTask(b"", dedup_key=key) for key in keys]
    big = [NewTask(bytes(100_000), dedup_key=key) for key in keys[:4]]
    address = f"roq://{several.zookeeper}/{name}?shards=4&dedup_seconds=12"
    with blocking.open_queue(address) as queue, blocking.open_queue(address) as stale:
        ids = queue.put_many(tasks)
        assert len({one.partition(":")[0] for one in ids if ":" in one}) == 3
        for shards in (6, 2, 3, 1):
            admin.set_shards(name, shards)
            assert stale.put_many(tasks) == ids
            assert queue.put_many(big) == ids[:4]
            assert queue.put_many(tasks) == ids
        with blocking.open_queue(address) as fresh:
            assert fresh.put_many(tasks) == ids
        assert queue.purge() == len(keys)
        assert until_merged(admin, name).open == (0,)
        assert not {*queue.put_many(tasks)} & {*ids}


def test_it_is_split_and_merged_while_eight_processes_use_it_and_masters_die(
    several: RunningCluster, admin: blocking.Cluster, name: str
) -> None:
    """Every task is acked, and by one worker only: none of their leases ends. (Of an ack that met a death, perhaps unknown.)"""
    address = f"roq://{several.zookeeper}/{name}?shards=4&dedup_seconds=2"
    with ExitStack() as stack, blocking.open_queue(address) as queue:
        workers = [stack.enter_context(program(WORK, address)) for _ in range(PROCESSES)]
        producers = [stack.enter_context(program(PUT, address, f"p{n}", str(TASKS))) for n in range(PROCESSES)]
        for shards, killed, inserted in CHANGES:
            until(partial(_inserted, queue, inserted))
            kill_master(admin, name, killed)
            assert len(admin.set_shards(name, shards).record.shards.open) == shards  # type: ignore[union-attr]
        assert [one.wait(60) for one in producers] == [0] * PROCESSES
        until(lambda: sum(getattr(queue.status(), state) for state in ("ready", "leased")) == 0)
        queue.put_many([b"end"] * PROCESSES)
        said = [json.loads(one.communicate(timeout=60)[0]) for one in workers]
        done = Counter(task for acked, _ in said for task in acked)
        unsure = [task for _, lost in said for task in lost]
        assert set(done.values()) == {1}
        assert {*done, *unsure} == {f"p{n}-{task}" for n in range(PROCESSES) for task in range(TASKS)}
        assert len(unsure) <= len(CHANGES) * PROCESSES, "one ack of each worker is on its way when a master dies"
        assert len(until_merged(admin, name).open) == 3


# --- who can't have them --------------------------------------------------------------------------------------------------


def test_what_is_refused_says_why(several: RunningCluster, admin: blocking.Cluster, name: str) -> None:
    address = f"roq://{several.zookeeper}/{name}"
    with pytest.raises(WorkQueueNotFound):
        admin.set_shards(name, 2)
    with pytest.raises(InvalidConfiguration, match=f"1 to {SHARDS_MAX}"), blocking.open_queue(f"{address}?shards=0"):
        pass
    with pytest.raises(InvalidName, match=str(SHARDED_NAME_MAX)):
        admin.create_work_queue("n" * (SHARDED_NAME_MAX + 1), shards=2)
    with pytest.raises(InvalidConfiguration, match="group"), blocking.open_queue(f"{address}@g?shards=2"):
        pass
    admin.create_work_queue(name, shards=2)
    with pytest.raises(InvalidConfiguration, match="1 to"):
        admin.set_shards(name, SHARDS_MAX + 1)
    with blocking.open_queue(f"{address}?shards=5") as queue:  # an existing one keeps its own
        queue.put(b"")
        assert len(shards_of(admin, name).open) == 2
        [task] = queue.lease(LONG)
        with pytest.raises(InvalidConfiguration, match="a transaction is of one"), admin.transaction() as transaction:
            transaction.ack(task)
        task.ack()


async def test_a_program_that_knows_no_shards_gets_no_queue_of_several(several: RunningCluster, name: str) -> None:
    """As version 0.1 asks: without a word about shards."""
    async with roq.connect(several.zookeeper) as connected:
        await connected.create_work_queue(name, shards=2)
        with pytest.raises(IncompatibleVersion, match="2 shards"):
            await connected._ask(wire.CreateWorkQueue(name, "t"), wire.WorkQueueInfo, ANSWER_SECONDS)
        await connected.remove_work_queue(name)
        await connected._ask(wire.CreateWorkQueue(name, "t2"), wire.WorkQueueInfo, ANSWER_SECONDS)
        await connected.remove_work_queue(name)


# --- a leader that dies ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def scene(chroot: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        yield Scene(chroot, stack)


@pytest.mark.parametrize("point", points("set_shards"))
async def test_a_split_survives_a_leader_killed_at(scene: Scene, point: str) -> None:
    await scene.start(point)
    await scene.client.request(wire.CreateWorkQueue("w", "t", shards=2), wire.WorkQueueInfo, ANSWER_SECONDS)
    info = await scene.client.request(SetShards("w", 4, "s"), wire.WorkQueueInfo, ANSWER_SECONDS)
    await scene.leader_died()
    assert unversioned(info.record.shards) == ShardList(0, (0, 1, 2, 3), (0, 1), (), 4)
    again = await scene.client.request(SetShards("w", 4, "s"), wire.WorkQueueInfo, ANSWER_SECONDS)
    assert again.record == info.record
    assert [one.record.name for one in again.shards] == [shard_name("w", number) for number in (1, 2, 3)]
    assert again.ready
    await scene.client.request(wire.RemoveWorkQueue("w", "r"), wire.Done, ANSWER_SECONDS)
    left = [spec.name for name in scene.hosts for spec in (await read_assignment(scene.session, name)).processes]
    assert {*left} == {"store"}


@pytest.mark.parametrize("point", points("remove_shard"))
def test_a_merge_survives_a_leader_killed_at(point: str, tmp_path: Path) -> None:
    class ArmedCluster(HastyCluster):
        def environment(self, process: str) -> dict[str, str]:
            return {**super().environment(process), VARIABLE: point}

    running = RunningCluster(tmp_path, zookeeper=None, kind=ArmedCluster, hosts=1, session_seconds=2.0)
    leader = running.local.gcms["gcm-1"]
    try:
        with (
            blocking.connect(running.zookeeper) as admin,
            blocking.open_queue(f"roq://{running.zookeeper}/w?shards=3") as queue,
        ):
            ids = [queue.put(b"") for _ in range(6)]
            admin.set_shards("w", 1)
            tasks = list[blocking.Task]()
            for _ in ids:
                tasks += queue.lease(LONG, 10, 10.0) if len(tasks) < len(ids) else []
            assert sorted(task.id for task in tasks) == sorted(ids)
            assert queue.ack_many(tasks) == []
            until(lambda: not leader.running)
            del leader._environment[VARIABLE]
            running.call(running.local.start_gcm("gcm-1"))
            assert until_merged(admin, "w").numbers == (0,)
            with blocking.open_queue(f"roq://{running.zookeeper}/w") as fresh:  # the other has missed that a shard went
                last = fresh.put(b"last")
                assert [task.id for task in fresh.lease(LONG, 10)] == [last]
            admin.remove_work_queue("w")
    finally:
        running.stop()


# --- from the shell -------------------------------------------------------------------------------------------------------


def test_shards_are_made_shown_and_changed_from_the_shell(several: RunningCluster, admin: blocking.Cluster, name: str) -> None:
    cli, address = Cli(several.zookeeper), f"roq://{several.zookeeper}/{name}"
    cli.run("task", "create", address, "--shards", "2")
    with blocking.open_queue(address) as queue:
        for payload in (b"a", b"b", b"c", b"d"):  # by turns
            queue.put(payload)
    rows = cli.json("task", "shards", address)
    assert [(row["number"], row["state"]) for row in rows] == [(0, "open"), (1, "open")]
    assert sum(row["ready"] for row in rows) == 4
    assert "roq task dead" not in cli.run("task", "shards", address, "4").stderr.decode()
    [row] = [row for row in cli.json("task", "ls", several.zookeeper) if row["name"] == name]
    assert row["shards"] == 4
    leased = cli.json("task", "lease", address, "--count", "4")
    cli.run("task", "reject", address, *(one["token"] for one in leased))
    merged = cli.run("task", "shards", address, "1")
    assert "closing" in merged.stdout.decode()
    assert "dead letters keep closing shards: `roq task dead requeue`" in merged.stderr.decode()
    cli.run("task", "dead", "rm", address, "--all")
    assert until_merged(admin, name).numbers == (0,)
    assert "only work queues of a cluster have shards" in cli.run("task", "shards", "log:///x", code=1).stderr.decode()

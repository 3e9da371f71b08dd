"""One simulated run, from its seed to its verdict."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

import roq
import roq.workqueue.master.dump
import roq.workqueue.master.term
from roq.errors import RoqError
from roq.runtime.installation import brought_by
from roq.tools.simulation.clocks import APART_SECONDS, Wall
from roq.tools.simulation.cluster import COORDINATOR, QUEUE, SimulatedCluster
from roq.tools.simulation.coordination import SimulatedCoordinator
from roq.tools.simulation.dumps import DIRECT_MAX
from roq.tools.simulation.durables import DurableCluster
from roq.tools.simulation.faults import LOSSLESS, Fault, plan, plan_recorded, plan_shuffles, plan_tasks
from roq.tools.simulation.invariants import Inspector, LogInspector
from roq.tools.simulation.load import TrafficPattern, judge
from roq.tools.simulation.loop import BOOTED_SECONDS, SimulatedLoop, Standstill
from roq.tools.simulation.network import Network
from roq.tools.simulation.producers import ProducerCluster
from roq.tools.simulation.recording_cluster import CLOCKS_SECONDS, GROUP, GroupCluster, RecordingCluster, recording_replacements
from roq.tools.simulation.recordings import RecordPace
from roq.tools.simulation.replacements import replaced
from roq.tools.simulation.task_cluster import WORK_QUEUE, TaskCluster
from roq.tools.simulation.tasks import INLINE_BYTES, TaskPace
from roq.tools.simulation.transactions import TransactionCluster

SESSION_SECONDS, FAULT_SECONDS = 4.0, 37.0
BACK_SECONDS = 8.0  # after everything was healed: sessions end, hosts come back, everybody joins again
BURST_KEPT = 8  # messages at once that no Exchange drops for
LOOK_SECONDS = 0.1
SNAPSHOT_BYTES = 5_000, 1 << 25  # of a log, until a master's state is written beside it: several in a run, or none
WRONG_MAX = 5  # of one kind; the first tell it
SETTLE_SECONDS, CLOSE_SECONDS, DRAIN_SECONDS = 18.0, 21.0, 6.0
TASKS_CLOSE_SECONDS, DONE_SECONDS = 40.0, 60.0  # a put waits for 30 s at most
SHUFFLE_CALM_SECONDS = 22.0
RECORDED_DRAIN_SECONDS = 45.0  # a tape that was left open is waited for 30 s
WINDOWS_SHARE = 0.3  # of the seeds with a recorded queue
CALM_SECONDS = 22.0  # after everything was healed: masters come back, disks are copied, and puts go on


class What(StrEnum):
    """What a run is about."""

    MESSAGES = "messages"  # a queue, its publishers and subscribers
    TASKS = "tasks"  # a work queue, its stores and masters, producers and workers
    SHUFFLE = "shuffle"  # shuffles, their leader and followers, drivers, writers and readers
    RECORDED = "recorded"  # a recorded queue, its tapes and stores, publishers and readers
    GROUPS = "groups"  # the same with a group of it, its master and members
    DURABLES = "durables"  # as recorded, with subscribers that have names, over many lives
    PRODUCERS = "producers"  # as recorded, with publishers that have names, over many lives
    TRANSACTIONS = "transactions"  # the same, whose members move messages to two other recorded queues by transactions


PLANS = {
    What.MESSAGES: plan,
    What.TASKS: plan_tasks,
    What.SHUFFLE: plan_shuffles,
    What.RECORDED: plan_recorded,
    What.DURABLES: plan_recorded,
    What.PRODUCERS: plan_recorded,
    What.GROUPS: plan_recorded,
    What.TRANSACTIONS: plan_recorded,
}
CLUSTERS = {  # a shuffle's needs more than is installed everywhere
    What.MESSAGES: SimulatedCluster,
    What.TASKS: TaskCluster,
    What.RECORDED: RecordingCluster,
    What.DURABLES: DurableCluster,
    What.PRODUCERS: ProducerCluster,
    What.GROUPS: GroupCluster,
    What.TRANSACTIONS: TransactionCluster,
}
WORDS = {  # for what was given, got and settled
    What.MESSAGES: ("published", "delivered", "reported as lost"),
    What.TASKS: ("put", "deliveries", "acked"),
    What.SHUFFLE: ("attempts", "rows read", "sealed"),
    What.RECORDED: ("stored", "delivered", "reported as lost"),
    What.DURABLES: ("stored", "delivered", "reported as lost"),
    What.PRODUCERS: ("stored", "delivered", "reported as lost"),
    What.GROUPS: ("stored", "leases", "acked"),
    What.TRANSACTIONS: ("stored", "leases", "committed"),
}
HOSTS = {  # of a shuffle one joins late
    What.MESSAGES: (3,),
    What.TASKS: (3,),
    What.SHUFFLE: (4,),
    What.RECORDED: (3, 4),
    What.DURABLES: (3, 4),
    What.PRODUCERS: (3, 4),
    What.GROUPS: (3, 4),
    What.TRANSACTIONS: (3, 4),
}
RECORDS = What.RECORDED, What.DURABLES, What.PRODUCERS, What.GROUPS, What.TRANSACTIONS


@dataclass(frozen=True)
class Run:
    """What a run was like. wrong: empty if all promises were kept. hash: equal for equal runs. given: messages published, tasks
    put, attempts written with a receipt; got: messages and tasks delivered, rows read; settled: messages reported as lost,
    tasks acked, shuffles sealed."""

    seed: int
    what: What
    faults: list[Fault]
    trace: list[str]
    wrong: list[str]
    hash: int
    given: int
    got: int
    settled: int
    steps: int
    seconds: float  # virtual
    real_seconds: float


def simulate(
    seed: int,
    seconds: float = FAULT_SECONDS,
    *,
    faults: Sequence[Fault] | None = None,
    hosts: int = 0,
    what: What = What.MESSAGES,
) -> Run:
    """faults: instead of those of the seed."""
    began, random = time.monotonic(), Random(seed)
    chosen = list(faults) if faults is not None else PLANS[what](Random(f"{seed} faults"), seconds)
    loop = SimulatedLoop(Random(random.getrandbits(64)))
    network = Network(loop, Random(random.getrandbits(64)))
    wall = Wall(loop, seed, CLOCKS_SECONDS if what in RECORDS else APART_SECONDS)
    coordinator = SimulatedCoordinator(network, COORDINATOR, wall)
    inspector, chance = Inspector(loop), Random(random.getrandbits(64))
    log = LogInspector()
    table = [*inspector.replacements(), *log.replacements(), *_snapshots(seed)]
    kind: Any = CLUSTERS.get(what)
    if what in RECORDS:
        table += recording_replacements(seed)
    hosts = hosts or Random(f"{seed} hosts").choice(HOSTS[what])
    if kind is None:
        room = _shuffle_room()
        kind, table = room.ShuffleCluster, [*table, *room.replacements(loop)]
    with _quiet(), _folder() as folder, replaced(loop, network, coordinator, wall, chance, table):
        drawn = Random(random.getrandbits(64))
        cluster = kind(loop, network, coordinator, wall, folder, drawn, hosts=hosts, gcms=2, session_seconds=SESSION_SECONDS)
        if what in RECORDS:
            cluster.writers = log.writers
        wrong = _runs(loop, COURSES[what](cluster, chosen, seconds, random))
        virtual, wrong = (
            loop.time() - BOOTED_SECONDS,
            wrong + cluster.defects() + inspector.wrong[:WRONG_MAX] + log.wrong[:WRONG_MAX],
        )
        cluster.end()
        loop.dispose()
        wrong += loop.threads.failures
        if what is What.SHUFFLE:
            gc.collect()  # whoever forgets a file of a follower closes it: here, where it is a simulated one
    judged, counts = _verdict(cluster, chosen)
    wrong += judged
    figures = (*counts, loop.steps, virtual, time.monotonic() - began)
    return Run(seed, what, chosen, cluster.trace, wrong, loop.trace, *figures)


def _snapshots(seed: int) -> list[tuple[Any, str, Any]]:
    """How often a master makes them, and whether in a fork of it."""
    often, direct = Random(f"{seed} snapshots").choice(SNAPSHOT_BYTES), Random(f"{seed} forks").choice(DIRECT_MAX)
    return [
        (roq.workqueue.master.term, "SNAPSHOT_BYTES_MIN", often),
        (roq.workqueue.master.dump.Dump.__init__, "__defaults__", (direct,)),
    ]


def _shuffle_room() -> Any:
    """Imported when it is needed: messages and tasks are simulated without pyarrow, too."""
    with brought_by("shuffle", "a simulated shuffle"):
        return importlib.import_module("roq.tools.simulation.shuffle_cluster")


def _runs(loop: SimulatedLoop, course: Coroutine[Any, Any, None]) -> list[str]:
    """To its end; what kept it from that."""
    try:
        loop.run_until_complete(course)
    except Standstill as error:
        return [f"standstill: {error}"]
    except (TimeoutError, RoqError) as error:
        return [f"the cluster did not come up: {error!r}"]
    return []


def _verdict(cluster: Any, faults: Sequence[Fault]) -> tuple[list[str], tuple[int, int, int]]:
    if isinstance(cluster, RecordingCluster):
        return cluster.judged(list(faults))
    if type(cluster) is not SimulatedCluster:
        verdict: tuple[list[str], tuple[int, int, int]] = cluster.verdict()
        return verdict
    lossless = all(fault.kind in LOSSLESS for fault in faults) and cluster.traffic.burst <= BURST_KEPT
    return judge(cluster.books, lossless=lossless), cluster.books.counts()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What programs log in a world of faults tells nothing; what they do is judged."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For what hosts write down, in memory where there is a file system for that."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="roq-simulation-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_unevenly(cluster: SimulatedCluster, random: Random, far: Sequence[float]) -> None:
    """Hosts are not equally far, nor are their disks equally quick. far: seconds, one of them for each host."""
    cluster.network.far = {host.address: random.choice(far) for host in cluster.hosts}
    for host in cluster.hosts:
        host.disk.sync_seconds = random.choice((0.0002, 0.003, 0.03))
    cluster.start()


async def _messages(cluster: SimulatedCluster, faults: Sequence[Fault], seconds: float, random: Random) -> None:
    overflow = random.choice(("block", "drop"))
    topics = random.choice((1, 3, 3))
    cluster.traffic = TrafficPattern(*random.choice(((5.0, 1), (20.0, 1), (5.0, 8), (0.7, 150), (0.7, 150))), topics)
    cluster.network.far = {host.address: random.choice((0.0, 0.0, 0.01, 0.05)) for host in cluster.hosts}
    cluster.start()
    exchanges = random.choice((1, 1, 2))

    async def prepare(admin: roq.Cluster) -> None:
        await _all_hosts(cluster, admin)
        await admin.create_queue(QUEUE, replication=2, overflow=overflow, timeout_seconds=60.0)
        for _ in range(exchanges - 1):
            await admin.create_exchange(QUEUE, timeout_seconds=60.0)

    await cluster.administer(prepare)
    began = cluster.loop.time()
    cluster.told(f"a queue, overflow {overflow}, {exchanges} Exchanges; {topics} topics, bursts of {cluster.traffic.burst}")
    for what in ("subscriber", "publisher", "subscriber", "publisher"):
        cluster.client(what)
    await _suffer(cluster, faults, began, seconds)
    cluster.books.healed = cluster.loop.time() + BACK_SECONDS
    await asyncio.sleep(SETTLE_SECONDS)
    cluster.books.ending = cluster.loop.time()
    await cluster.stop_clients("publisher", CLOSE_SECONDS)
    await asyncio.sleep(DRAIN_SECONDS)
    await cluster.stop_clients("subscriber", CLOSE_SECONDS)


async def _tasks(cluster: TaskCluster, faults: Sequence[Fault], seconds: float, random: Random) -> None:
    cluster.pace = TaskPace(*random.choice(((5.0, 3, 0.1, 0.3), (1.0, 20, 0.0, 0.1), (10.0, 1, 0.3, 0.3))))
    _start_unevenly(cluster, random, (0.0, 0.0, 0.01))

    async def prepare(admin: roq.Cluster) -> None:
        await _all_hosts(cluster, admin)
        await admin.create_work_queue(WORK_QUEUE, inline_bytes=INLINE_BYTES, timeout_seconds=60.0)

    await cluster.administer(prepare)
    began = cluster.loop.time()
    cluster.told(f"a work queue; syncs of {', '.join(f'{host.disk.sync_seconds * 1000:g}' for host in cluster.hosts)} ms")
    for what in ("worker", "producer", "worker", "producer", "worker"):
        cluster.client(what)
    await _suffer(cluster, faults, began, seconds)
    await asyncio.sleep(CALM_SECONDS)
    await cluster.stop_clients("producer", TASKS_CLOSE_SECONDS)
    await cluster.look(DONE_SECONDS)
    await cluster.stop_clients("worker", TASKS_CLOSE_SECONDS)


async def _shuffles(cluster: Any, faults: Sequence[Fault], seconds: float, random: Random) -> None:
    """cluster: a ShuffleCluster."""
    _start_unevenly(cluster, random, (0.0, 0.0, 0.01))

    async def prepare(admin: roq.Cluster) -> None:
        await _all_hosts(cluster, admin)

    await cluster.administer(prepare)
    began = cluster.loop.time()
    cluster.told(f"shuffles; syncs of {', '.join(f'{host.disk.sync_seconds * 1000:g}' for host in cluster.hosts)} ms")
    for what in ("driver", "writer", "reader", "writer", "writer"):
        cluster.client(what)
    await _suffer(cluster, faults, began, seconds)
    cluster.shuffles.ending = True
    await asyncio.sleep(SHUFFLE_CALM_SECONDS)
    await cluster.look(DONE_SECONDS)
    for what in ("reader", "writer", "driver"):
        await cluster.stop_clients(what, TASKS_CLOSE_SECONDS)


async def _recorded(cluster: RecordingCluster, faults: Sequence[Fault], seconds: float, random: Random) -> None:
    pace = RecordPace(*random.choice(((10.0, 1), (4.0, 5), (1.0, 60))), random.choice((1, 3)), random.choice((0, 200)))
    await _record(cluster, pace, random)
    began = cluster.loop.time()
    for what in ("early", "publisher", "publisher", *cluster.READERS, *random.choice(((), ("publisher",)))):
        cluster.client(what)
    if random.random() < WINDOWS_SHARE:
        cluster.client("windows")
    await _suffer(cluster, faults, began, seconds)
    await _end_recorded(cluster, ("early", "reader", "windows"))


async def _groups(cluster: GroupCluster, faults: Sequence[Fault], seconds: float, random: Random) -> None:
    pace = RecordPace(*random.choice(((4.0, 1), (1.0, 5), (0.2, 30))), random.choice((5, 20)), random.choice((0, 200)))
    await _record(cluster, pace, random)
    order, start = random.choice(("topic", "topic", "none")), random.choice(("earliest", "now"))
    cluster.group.ordered, cluster.group.work_seconds = order == "topic", random.choice((0.0, 0.02))

    async def prepare(admin: roq.Cluster) -> None:
        for queue in cluster.RECORDED[1:]:
            await admin.create_queue(queue, replication=2, overflow="block", record=cluster.record, timeout_seconds=60.0)
        await admin.create_group(QUEUE, GROUP, order=order, start=start, timeout_seconds=60.0)

    await cluster.administer(prepare)
    cluster.told(f"a group, order {order}, from {start}")
    began = cluster.loop.time()
    for what in ("member", "publisher", "member", "early", "publisher", "member"):
        cluster.client(what)
    await _suffer(cluster, faults, began, seconds)
    await _end_recorded(cluster, ("early", "member"))


async def _record(cluster: RecordingCluster, pace: RecordPace, random: Random) -> None:
    """A recorded queue, and the pace of its publishers."""
    cluster.pace = pace
    overflow, exchanges = random.choice(("block", "drop")), random.choice((1, 2, 2))
    copies, ack = random.choice(((3, 2), (3, 2), (3, 2), (2, 1), (1, 1), (2, 2)))
    cluster.record = roq.Record(copies=copies, ack=ack)
    _start_unevenly(cluster, random, (0.0, 0.0, 0.01, 0.05))

    async def prepare(admin: roq.Cluster) -> None:
        await _all_hosts(cluster, admin)
        await admin.create_queue(QUEUE, replication=2, overflow=overflow, record=cluster.record, timeout_seconds=60.0)
        for _ in range(exchanges - 1):
            await admin.create_exchange(QUEUE, timeout_seconds=60.0)

    await cluster.administer(prepare)
    cluster.told(f"a recorded queue, {copies} copies, ack {ack}, overflow {overflow}, {exchanges} Exchanges; {cluster.pace}")


async def _end_recorded(cluster: RecordingCluster, readers: Sequence[str]) -> None:
    await asyncio.sleep(SETTLE_SECONDS)
    await cluster.stop_clients("publisher", TASKS_CLOSE_SECONDS)
    cluster.books.ending = cluster.loop.time()
    await asyncio.sleep(RECORDED_DRAIN_SECONDS)
    await cluster.look(DONE_SECONDS)
    for what in readers:
        await cluster.stop_clients(what, CLOSE_SECONDS)


async def _all_hosts(cluster: SimulatedCluster, admin: roq.Cluster) -> None:
    while sum(host.alive for host in (await admin.view()).hosts) < len(cluster.hosts) - cluster.LATE:  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(LOOK_SECONDS)


async def _suffer(cluster: SimulatedCluster, faults: Sequence[Fault], began: float, seconds: float) -> None:
    for fault in faults:
        await asyncio.sleep(max(0.0, began + fault.at - cluster.loop.time()))
        cluster.do(fault)
    await asyncio.sleep(max(0.0, began + seconds - cluster.loop.time()))
    cluster.heal()


COURSES: dict[What, Callable[..., Coroutine[Any, Any, None]]] = {
    What.MESSAGES: _messages,
    What.TASKS: _tasks,
    What.SHUFFLE: _shuffles,
    What.RECORDED: _recorded,
    What.DURABLES: _recorded,
    What.PRODUCERS: _recorded,
    What.GROUPS: _groups,
    What.TRANSACTIONS: _groups,
}

"""What watches a run: the resource watch and the witness.

The resource watch reads every few seconds what each process of a cluster under test takes, this one included. Linux only
(/proc). A process that can't be read (it ends just now) has no reading; a ZooKeeper that is frozen tells no count.

The witness reads ZooKeeper once a second and keeps every state of the metadata it saw, with its zxid. It misses what is written
and overwritten between two looks; what it did see is enough to show a write of an epoch that was over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import msgspec

from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import RoqError, ZooKeeperUnavailable
from roq.testing import TestedCluster
from roq.testing.cluster import CLIENT, HostProcess
from roq.tools.chaos.invariants import EpochWritten, HostReported, Order, Seen, Term
from roq.tools.chaos.resources import CLIENT_FLOOR, MEMORY_FLOOR, STORE_FLOOR, ResourceSample, Series, ZnodeCount
from roq.tools.local.zookeeper import server_status
from roq.wire.assignment import Assignment, HostReport, ProcessKind, QueueRecord, from_json
from roq.wire.recording import is_tape
from roq.wire.work_queue import WorkQueueRecord

EVERY_SECONDS = 5.0
ZOOKEEPER_SECONDS = 2.0
WITNESS_SECONDS = 1.0
REMOVAL_KEPT_SECONDS = 75.0  # a GCM keeps it for 60 s
ZOOKEEPER_COUNTS = "Node count:"


class ResourceWatch:
    """`await watch.run(started)` until it is cancelled; then `series` and `znodes` tell it all. witness: entered; loads: that
    the client is."""

    def __init__(self, cluster: TestedCluster, witness: Witness, loads: int = 1, every_seconds: float = EVERY_SECONDS) -> None:
        self._cluster, self._witness, self._every, self._client_floor = cluster, witness, every_seconds, CLIENT_FLOOR * loads
        self._lives: dict[tuple[int, str], Series] = {}
        self.znodes: list[ZnodeCount] = []

    @property
    def series(self) -> list[Series]:
        """All lives so far, in the order they were first seen."""
        return list(self._lives.values())

    async def run(self, started: float) -> None:
        """started: monotonic seconds."""
        while True:
            begun = time.monotonic()
            machines = (*self._cluster.gcms, *self._cluster.hosts)
            await asyncio.gather(self._count_znodes(started), *(self._look(name, started) for name in machines))
            self._read(CLIENT, HostProcess(CLIENT, os.getpid()), started, self._client_floor)
            await asyncio.sleep(begun + self._every - time.monotonic())

    async def _look(self, machine: str, started: float) -> None:
        try:
            processes = await self._cluster.system_processes(machine)
        except RoqError:
            return  # down
        for process in processes:
            kind = process.name.removeprefix("roq-").partition("/")[0]
            self._read(machine, process, started, STORE_FLOOR if kind == ProcessKind.STORE else MEMORY_FLOOR)

    def _read(self, machine: str, process: HostProcess, started: float, floor: int = MEMORY_FLOOR) -> None:
        begun, reading = read(process.pid)
        if reading is None:
            return
        series = self._lives.setdefault((process.pid, begun), Series(machine, process.name, process.pid, floor))
        if "/" in process.name:  # as its HCM names it; the HCM may have been mute before
            series.name = process.name
        series.add(round(time.monotonic() - started, 1), reading)

    async def _count_znodes(self, started: float) -> None:
        if (count := await znodes(self._cluster.zookeeper)) is None:
            return
        with contextlib.suppress(ZooKeeperUnavailable, TimeoutError):
            async with asyncio.timeout(ZOOKEEPER_SECONDS):
                tapes, shuffles = await self._witness.passing()
            self.znodes.append(ZnodeCount(round(time.monotonic() - started, 1), count, tapes, shuffles))


def read(pid: int) -> tuple[str, ResourceSample | None]:
    """When a process began (in the kernel's ticks), and what it takes; None if it is gone."""
    process = Path(f"/proc/{pid}")
    try:
        stat = (process / "stat").read_text().rpartition(")")[2].split()
        rollup = (process / "smaps_rollup").read_text()
        descriptors = len(os.listdir(process / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return "", None
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in rollup.splitlines()[1:]}
    if not sizes:  # a zombie
        return "", None
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return stat[19], ResourceSample(sizes["Anonymous"], private, descriptors, int(stat[17]))


async def znodes(zookeeper: str) -> int | None:
    """How many znodes the first server of this address that answers has; None if none does."""
    for server in zookeeper.partition("/")[0].split(","):
        host, _, port = server.rpartition(":")
        with contextlib.suppress(OSError, TimeoutError):
            for line in (await server_status(host, int(port), ZOOKEEPER_SECONDS)).splitlines():
                if line.startswith(ZOOKEEPER_COUNTS):
                    return int(line[len(ZOOKEEPER_COUNTS) :])
    return None


class _TransactionEntry(msgspec.Struct):
    """What transactions of all kinds have in common."""

    action: str = ""
    created: float = 0.0


class Witness:
    """`async with Witness(zookeeper) as witness`; `await witness.run()` until it is cancelled; `seen` holds it all."""

    def __init__(self, zookeeper: str) -> None:
        self._zookeeper = zookeeper
        self._session: Session | None = None
        self.seen: set[Seen] = set()

    async def __aenter__(self) -> Witness:
        self._session = await Session.connect(self._zookeeper)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.close()

    @property
    def _open(self) -> Session:
        assert self._session is not None
        return self._session

    async def run(self) -> None:
        """Look again and again; while ZooKeeper is away there is nothing to see."""
        while True:
            try:
                await self.look()
            except ZooKeeperUnavailable:
                await self._open.wait_connected()
            await asyncio.sleep(WITNESS_SECONDS)

    async def look(self) -> set[Seen]:
        """Everything as it is now. Raises ZooKeeperUnavailable."""
        session, now = self._open, set[Seen]()
        if (node := await session.get(paths.EPOCH)) is not None:
            now.add(EpochWritten(node.mzxid, node.version))
        for host in await session.children(paths.HOST_STATES):
            if (node := await session.get(paths.assignment(host))) is not None:
                order = from_json(node.data, Assignment)
                now.add(Order(node.mzxid, host, order.epoch, order.revision))
            if (node := await session.get(paths.running(host))) is not None:
                report = from_json(node.data, HostReport)
                now.add(HostReported(node.mzxid, host, report.epoch, report.revision))
        for queue in await session.children(paths.QUEUES):
            if (node := await session.get(paths.queue(queue))) is not None:
                record = from_json(node.data, QueueRecord)
                now.add(Term(node.mzxid, f"{queue} made at {node.czxid}", record.term, record.monitor_host))
        for queue in await session.children(paths.WORK_QUEUES):
            if (node := await session.get(paths.work_queue(queue))) is not None:
                served = from_json(node.data, WorkQueueRecord)
                now.add(Term(node.mzxid, f"{queue} (its masters) made at {node.czxid}", served.term, served.master_host))
        self.seen |= now
        return now

    async def passing(self) -> tuple[int, int]:
        """How many znodes of tapes and of shuffles there are, which go when it is time. Raises ZooKeeperUnavailable."""
        tapes = sum(map(is_tape, await self._open.children(paths.logs())))
        shuffles = await self._open.children(paths.SHUFFLES)
        return tapes, sum(await asyncio.gather(*(self._count(paths.shuffle(id)) for id in shuffles)))

    async def _count(self, path: str) -> int:
        """This node and all below it."""
        below = [self._count(f"{path}/{name}") for name in await self._open.children(path)]
        return 1 + sum(await asyncio.gather(*below))

    async def transactions(self) -> list[str]:
        """Paths of what is under way. Raises ZooKeeperUnavailable."""
        found = []
        for kind in paths.TransactionKind:
            for name in await self._open.children(paths.transactions(kind)):
                path = paths.transaction(kind, name)
                node = await self._open.get(path)
                if node is not None and not _kept(node.data):
                    found.append(path)
        return found


def _kept(data: bytes) -> bool:
    """Whether this is a removal that may have been done and stays for a minute, so that its repetition gets the same answer."""
    entry = from_json(data, _TransactionEntry)
    return entry.action.startswith("remove-") and time.time() - entry.created < REMOVAL_KEPT_SECONDS

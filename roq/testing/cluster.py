"""TestedCluster: what can be done to a cluster under test, and the waits every kind of it shares.

Names: "zookeeper-1"…, "gcm-1"…, "host-1"…; CLIENT is the machine the test itself runs on. A cluster may be used from any
event loop, also from several one after the other, so that a session-wide fixture serves tests with loops of their own.
Every wait is bounded and fails with DeadlineExceeded that tells what was last seen.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, TypeVar

from roq.client.cluster import Cluster, connect
from roq.coordination.locate import read_leader
from roq.errors import CallError, DeadlineExceeded, HostNotFound, RoqError
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcClient
from roq.wire import gcm
from roq.wire import hcm as hcm_wire
from roq.wire.assignment import ProcessState, RunningProcess

CLIENT = "client"
WAIT_SECONDS = 30.0  # default bound of a wait
ANSWER_SECONDS = 2.0  # one question inside a wait
HCM, GCM, FORK_SERVER = "roq-hcm", "roq-gcm", "roq-fork-server"  # process names beside those of ProcessSpec.name

CHILDREN = ("roq-monitor", "roq-exchange", "roq-scaling")  # what an HCM runs and must know
log = logger(__name__)
T = TypeVar("T")


class Cut(StrEnum):
    """What becomes of a packet on a way that is cut. DROP: nothing, as behind a pulled cable. REJECT: its sender is told at
    once (TCP reset, ICMP port unreachable), as by a firewall or a machine without that service."""

    DROP = "drop"
    REJECT = "reject"


class NotPossible(CallError):
    """This kind of test cluster, or this machine's kernel, can't do that."""


class HostProcess(NamedTuple):
    """One process on a host or GCM machine. name: of the cluster's process ("monitor/orders"), of the program otherwise.
    pid: as the machine itself numbers it. orphan: a Monitor, Exchange or ScalingProcess its HCM doesn't know."""

    name: str
    pid: int
    orphan: bool = False


class TestedCluster(ABC):
    """`async with …Cluster(…) as cluster: cluster.connect()`. Closing it ends everything it began."""

    __test__ = False  # pytest: not a test
    gcms: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    zookeepers: tuple[str, ...] = ()

    @property
    @abstractmethod
    def zookeeper(self) -> str:
        """What `roq.connect` takes."""

    @abstractmethod
    def address(self, name: str) -> str:
        """IP address of a machine."""

    @abstractmethod
    async def open(self) -> None:
        """Start everything and wait until a leader sees every host. What was begun is ended if that fails."""

    @abstractmethod
    async def close(self) -> None:
        """End everything, leave nothing behind."""

    # --- faults -------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def kill(self, name: str) -> None:
        """Power cut: every process of the machine is gone at once."""

    @abstractmethod
    async def stop(self, name: str) -> None:
        """Clean stop of a machine."""

    @abstractmethod
    async def start(self, name: str) -> None:
        """Start a machine again that was killed or stopped. What it stored is as it was."""

    @abstractmethod
    async def pause(self, name: str) -> None:
        """Freeze every process of a machine."""

    @abstractmethod
    async def unpause(self, name: str) -> None:
        """Let it go on."""

    @abstractmethod
    async def kill_process(self, name: str, process: str) -> int:
        """SIGKILL one process of a machine by its name; its pid. A killed roq-hcm or roq-gcm is started again at once.
        Raises ProcessFailed if there is none."""

    @abstractmethod
    async def pause_process(self, name: str, process: str) -> int:
        """SIGSTOP one process of a machine by its name; its pid. Raises ProcessFailed if there is none."""

    @abstractmethod
    async def unpause_process(self, name: str, pid: int) -> None:
        """SIGCONT, if the process still lives."""

    async def partition_one_way(self, source: str | Iterable[str], target: str | Iterable[str], *, how: Cut = Cut.DROP) -> None:
        """Let nothing through that `source` sends to `target`; names or groups of names."""
        raise NotPossible

    async def partition(self, one: str | Iterable[str], other: str | Iterable[str], *, how: Cut = Cut.DROP) -> None:
        """Let nothing through between the two, in either direction."""
        await self.partition_one_way(one, other, how=how)
        await self.partition_one_way(other, one, how=how)

    async def partition_halves(self, half: Iterable[str], *, how: Cut = Cut.DROP) -> None:
        """Cut these machines off from all other ones; the test's own machine reaches both sides."""
        inside = set(half)
        await self.partition(inside, set(self.machines()) - inside, how=how)

    async def partition_from_zookeeper(self, *names: str, how: Cut = Cut.DROP) -> None:
        """Cut machines off from ZooKeeper only."""
        await self.partition(names, self.zookeepers, how=how)

    async def delay(self, name: str, milliseconds: float, jitter_milliseconds: float = 0.0) -> None:
        """Hold back every packet a machine sends by so much."""
        raise NotPossible

    @abstractmethod
    async def heal(self) -> None:
        """End all partitions, delays and full disks."""

    async def clock(self, name: str, offset_seconds: float) -> None:
        """Start a machine again with its wall clock moved (its monotonic clock goes on as ever)."""
        raise NotPossible

    async def disk_full(self, name: str) -> None:
        """Fill a host's state directory to the last byte."""
        raise NotPossible

    async def disk_free(self, name: str) -> None:
        """Give the space back."""
        raise NotPossible

    # --- views ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def processes(self, name: str) -> list[HostProcess]:
        """Every RoQ process of a running machine, as its operating system sees them; names as the HCM reports them, if it
        answers."""

    async def _named_processes(self, name: str, programs: Mapping[int, str]) -> list[HostProcess]:
        """programs: what RoQ's processes of a machine call themselves, by pid."""
        known: dict[int, str] = {}
        if name in self.hosts:
            try:
                known = {process.pid: process.name for process in await self.reported(name)}
            except RoqError as error:
                log.info("HCM does not answer", extra={"fields": {"host": name, "reason": str(error)}})
        return [
            HostProcess(known.get(pid, program), pid, program in CHILDREN and pid not in known)
            for pid, program in programs.items()
        ]

    @abstractmethod
    async def system_processes(self, name: str) -> list[HostProcess]:
        """The same with pids as the machine of the test numbers them, for /proc. Raises RoqError if the machine is down."""

    async def __aenter__(self) -> TestedCluster:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def machines(self) -> tuple[str, ...]:
        """All names."""
        return (*self.zookeepers, *self.gcms, *self.hosts)

    def connect(self, *, connect_seconds: float = WAIT_SECONDS) -> Cluster:
        """`roq.connect` to this cluster."""
        return connect(self.zookeeper, connect_seconds=connect_seconds, zookeeper_seconds=connect_seconds)

    async def leader(self, timeout_seconds: float = WAIT_SECONDS) -> str:
        """Name of the GCM that leads and answers."""
        return await self.wait_leader(self.gcms, timeout_seconds=timeout_seconds)

    async def reported(self, host: str) -> tuple[RunningProcess, ...]:
        """The processes a host's HCM says it runs."""
        rpc = RpcClient(f"tcp://{self.address(host)}:{self.hcm_port(host)}", hcm_wire.Reply)
        try:
            answer = await rpc.request(hcm_wire.GetProcesses(), hcm_wire.Processes, ANSWER_SECONDS)
        finally:
            rpc.close()
        return answer.report.processes

    @abstractmethod
    def hcm_port(self, host: str) -> int:
        """Port of a host's own interface."""

    # --- waits ----------------------------------------------------------------------------------------------------------

    async def wait_leader(self, among: Iterable[str] = (), *, timeout_seconds: float = WAIT_SECONDS) -> str:
        """Until one of these GCMs (none: any) leads and answers; its name."""
        wanted = {self.address(name): name for name in (among or self.gcms)}

        async def found() -> str | None:
            leader = await read_leader(self.zookeeper, ANSWER_SECONDS)
            if leader.host not in wanted:
                return None
            rpc = RpcClient(f"tcp://{leader.host}:{leader.port}", gcm.Reply)
            try:
                await rpc.request(gcm.QueueExists("?"), gcm.Exists, ANSWER_SECONDS)
            finally:
                rpc.close()
            return wanted[leader.host]

        return await self.wait_for(found, f"one of {', '.join(wanted.values())} leads", timeout_seconds)

    async def wait_hosts(self, count: int, *, timeout_seconds: float = WAIT_SECONDS) -> gcm.ClusterView:
        """Until the leader sees exactly so many hosts alive."""
        async with self.connect(connect_seconds=timeout_seconds) as cluster:

            async def seen() -> gcm.ClusterView | None:
                view = await cluster.view()
                return view if sum(host.alive for host in view.hosts) == count else None

            return await self.wait_for(seen, f"{count} hosts are alive", timeout_seconds)

    async def wait_queue_ready(self, queue: str, *, exchanges: int = 1, timeout_seconds: float = WAIT_SECONDS) -> gcm.QueueInfo:
        """Until every process of a queue runs, and its Monitor knows that many active Exchanges at least."""
        async with self.connect(connect_seconds=timeout_seconds) as cluster:

            async def ready() -> gcm.QueueInfo | None:
                info = await cluster.queue(queue)
                if not info.ready:
                    return None
                async with asyncio.timeout(ANSWER_SECONDS):
                    view = await cluster.inspect(queue)
                return info if sum(exchange.state == "active" for exchange in view.exchanges) >= exchanges else None

            return await self.wait_for(ready, f"queue {queue} is ready", timeout_seconds)

    async def wait_process(
        self, host: str, process: str, *, not_pid: int = 0, timeout_seconds: float = WAIT_SECONDS
    ) -> RunningProcess:
        """Until the HCM of `host` reports this process running, with another pid than `not_pid`."""

        async def running() -> RunningProcess | None:
            for found in await self.reported(host):
                if found.name == process and found.state is ProcessState.RUNNING and found.pid != not_pid:
                    return found
            return None

        return await self.wait_for(running, f"{process} runs on {host}", timeout_seconds)

    @staticmethod
    async def wait_for(look: Callable[[], Awaitable[T | None]], what: str, timeout_seconds: float = WAIT_SECONDS) -> T:
        """Until `look` gives something true; what it raises as RoqError or TimeoutError counts as "not yet"."""
        until = time.monotonic() + timeout_seconds
        seen = ""
        for delay in delays(0.02, 0.25):
            looking = asyncio.timeout(max(0.1, until - time.monotonic()))
            try:
                async with looking:
                    found = await look()
                if found:
                    return found
                seen = "no"
            except (RoqError, TimeoutError) as error:
                if not seen or not looking.expired():  # else what the look before saw tells more
                    seen = f"{type(error).__name__}: {error}"
            if time.monotonic() + delay > until:
                raise DeadlineExceeded(f"waited {timeout_seconds:g} s until {what}; at last: {seen}")
            await asyncio.sleep(delay)
        raise AssertionError("delays() never ends")

    def _check_names(self, *names: str) -> None:
        for name in names:
            if name not in (*self.machines(), CLIENT):
                raise HostNotFound(f"this cluster has {', '.join(self.machines())}, not {name}")


def names(group: str | Iterable[str]) -> set[str]:
    """A name, or several."""
    return {group} if isinstance(group, str) else set(group)

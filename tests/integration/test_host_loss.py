"""Hosts lost, killed, slow and back again, on a real cluster: who runs what afterwards.

Thesis §10.4.2 and §10.5. Not covered: whether messages flow meanwhile (test_fail_over.py), GCM crash points
(test_gcm_crash_points.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.locate import GcmClient
from roq.coordination.session import Session
from roq.testing.freezing import freeze
from roq.tools.local.cluster import JAVA, LocalCluster
from roq.wire import gcm as wire
from roq.wire.assignment import (
    Assignment,
    HostReport,
    MonitorAddress,
    MonitorRole,
    ProcessKind,
    ProcessState,
    QueueRecord,
    QueueSettings,
    from_json,
)

SESSION_SECONDS = 2.0
TICK_SECONDS = 0.5  # ZooKeeper ends sessions at ticks
ASSIGNED_SECONDS = 0.9  # from the end of the session to the new assignments; at the GCM's next look it would be a second
WATCHER_SECONDS = 6.0  # session of a test's own look at ZooKeeper: on a busy machine it shall not be lost
LONG_SESSION_SECONDS = 6.0  # where an HCM must be back within it: two Pythons start one after the other
WAIT_SECONDS = 20.0
REMOVAL = "removal"  # transaction id of a removal: its record stays for a while
DAEMONS = 2  # processes of a host beside those assigned: the HCM and its template


class Rig:
    """A cluster, a client of its GCM, and a session that looks at ZooKeeper."""

    def __init__(self, cluster: LocalCluster, session: Session) -> None:
        self.cluster, self.session = cluster, session
        self.client = GcmClient(cluster.zookeeper)

    async def create(self, queue: str, replication: int, host: str = "") -> wire.QueueInfo:
        request = wire.CreateQueue(queue, f"t-{queue}", QueueSettings(replication), host)
        return await self.client.request(request, wire.QueueInfo, WAIT_SECONDS)

    async def add_exchange(self, queue: str, host: str) -> str:
        request = wire.CreateExchange(queue, f"x-{queue}-{host}", host)
        return (await self.client.request(request, wire.ExchangeCreated, WAIT_SECONDS)).exchange

    async def describe(self, queue: str) -> wire.QueueInfo:
        return await self.client.request(wire.DescribeQueue(queue), wire.QueueInfo, WAIT_SECONDS)

    async def view(self) -> wire.ClusterView:
        return await self.client.request(wire.GetCluster(), wire.ClusterView, WAIT_SECONDS)

    async def leader(self) -> str:
        address = (await self.view()).leader.partition(":")[0]
        return next(name for name, gcm in self.cluster.gcms.items() if gcm.option("--address") == address)

    async def gone(self, host: str) -> float:
        """Until ZooKeeper has ended the host's session; when that was."""
        over: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def look(node: Node | None) -> None:
            if node is None and not over.done():
                over.set_result(time.monotonic())

        watch = self.session.watch_data(paths.host(host), look)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await over
        finally:
            watch.close()

    async def recorded(self, queue: str, good: Callable[[QueueRecord], bool]) -> float:
        """Until the queue's record satisfies `good`; when that was."""
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def look(node: Node | None) -> None:
            if node is not None and good(from_json(node.data, QueueRecord)) and not done.done():
                done.set_result(time.monotonic())

        watch = self.session.watch_data(paths.queue(queue), look)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await done
        finally:
            watch.close()

    async def whole(self, **replicas: int) -> wire.ClusterView:
        """The first view in which everything is as it should be, with this many Monitors per queue."""
        problem = "nothing was seen"
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    view = await self.view()
                    problem = await self.problem(view, replicas)
                    if not problem:
                        return view
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(problem) from None

    async def problem(self, view: wire.ClusterView, replicas: dict[str, int]) -> str:
        """Invariants C3 and C4: records, assignments, reports and processes agree, and nothing is under way."""
        for kind in paths.TransactionKind:
            if left := {*await self.session.children(paths.transactions(kind))} - {REMOVAL}:
                return f"under way: {left}"
        if {info.record.name for info in view.queues} != {*replicas}:
            return f"queues: {view.queues}"
        wanted: Counter[tuple[str, str]] = Counter()
        for info in view.queues:
            record = info.record
            if len({*record.monitor_hosts}) != replicas[record.name] or not info.ready:
                return f"{replicas[record.name]} Monitors are wanted: {info}"
            if [monitor.host for monitor in info.monitors] != [*record.monitor_hosts]:
                return f"not all Monitors run: {info}"
            wanted.update((host, f"{ProcessKind.MONITOR}/{record.name}") for host in record.monitor_hosts)
            wanted[(record.monitor_host, f"{ProcessKind.SCALING}/{record.name}")] += 1
            wanted.update((host, f"{ProcessKind.EXCHANGE}/{record.name}/{id}") for id, host in record.exchanges.items())
        alive = {host.host: host.report for host in view.hosts if host.alive}
        assigned = Counter[tuple[str, str]]()
        for host in self.cluster.hosts:
            node = await self.session.get(paths.assignment(host))
            for spec in from_json(node.data, Assignment).processes if node is not None else ():
                assigned[(host, spec.name)] += 1
                if problem := await self._misinformed(view, host, spec.queue, spec.monitors):
                    return problem
        running = Counter(
            (host, process.name)
            for host, report in alive.items()
            for process in (report.processes if report is not None else ())
            if process.state is ProcessState.RUNNING
        )
        if not wanted == assigned == running:
            return f"wanted {wanted}, assigned {assigned}, running {running}"
        return self._real_processes(alive)

    async def _misinformed(self, view: wire.ClusterView, host: str, queue: str, told: tuple[MonitorAddress, ...]) -> str:
        monitors = next(info.monitors for info in view.queues if info.record.name == queue)
        return f"{queue} on {host} was told of {told}, not {monitors}" if told and told != monitors else ""

    def _real_processes(self, alive: dict[str, HostReport | None]) -> str:
        found = self.cluster.processes()
        for host, report in alive.items():
            told = {process.pid for process in (report.processes if report is not None else ())}
            real = {process.pid for process in found if process.owner == host}
            if not told <= real or len(real) != len(told) + DAEMONS:
                return f"{host} reports {told} and runs {real}"
        return ""


@asynccontextmanager
async def running(
    directory: Path, hosts: int, gcms: int = 1, exchanges_max: int = 8, session_seconds: float = SESSION_SECONDS
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        cluster = LocalCluster(
            directory,
            hosts=hosts,
            gcms=gcms,
            exchanges_max=exchanges_max,
            session_seconds=session_seconds,
            zookeeper=JAVA,
        )
        await stack.enter_async_context(cluster)
        session = await Session.connect(cluster.zookeeper, WATCHER_SECONDS)
        stack.push_async_callback(session.close)
        rig = Rig(cluster, session)
        stack.callback(rig.client.close)
        yield rig


async def test_two_queues_of_three_replicas_on_four_hosts(tmp_path: Path) -> None:
    """Thesis §10.4.2: the replication factor of both holds, the Monitors and Exchanges of the lost host run elsewhere."""
    async with running(tmp_path, hosts=4) as rig:
        await rig.create("queue1", 3, "host-1")
        await rig.create("queue2", 3, "host-2")
        kept = await rig.add_exchange("queue1", "host-3")
        lost = await rig.add_exchange("queue2", "host-1")
        before = await rig.whole(queue1=3, queue2=3)
        waiting = asyncio.ensure_future(rig.gone("host-1"))
        killed = time.monotonic()
        await rig.cluster.lose_host("host-1")
        assigned = await rig.recorded("queue1", lambda record: record.monitor_host != "host-1")
        ended = await waiting
        assert assigned - ended < ASSIGNED_SECONDS
        assert assigned - killed < SESSION_SECONDS + 2 * TICK_SECONDS + ASSIGNED_SECONDS
        after = await rig.whole(queue1=3, queue2=3)
        one, two = after.queues
        assert one.record.monitor_host in before.queues[0].record.backups
        assert (one.record.term, two.record.term) == (2, 1)
        assert kept in one.record.exchanges
        assert len(one.record.exchanges) == len(two.record.exchanges) == 2
        assert lost not in two.record.exchanges
        assert [monitor.role for monitor in one.monitors] == [MonitorRole.ACTIVE, MonitorRole.BACKUP, MonitorRole.BACKUP]
        assert "host-1" not in {*one.record.monitor_hosts, *two.record.monitor_hosts}
    assert rig.cluster.leftovers == []


@pytest.mark.quick
async def test_replicas_that_have_no_host_are_made_when_one_joins(tmp_path: Path) -> None:
    """Thesis §10.5.3, at the creation and after a loss; without any other host everything waits for the lost one."""
    async with running(tmp_path, hosts=2) as rig:
        await rig.create("q", 3, "host-1")
        await rig.whole(q=2)
        await rig.cluster.add_host()
        await rig.whole(q=3)
        await rig.cluster.lose_host("host-1")
        await rig.gone("host-1")
        await rig.whole(q=2)
        await rig.cluster.add_host()
        await rig.whole(q=3)


async def test_the_only_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, hosts=1) as rig:
        first = await rig.create("q", 1)
        await rig.cluster.lose_host("host-1")
        await rig.gone("host-1")
        await rig.cluster.start_hcm("host-1")
        view = await rig.whole(q=1)
        assert view.queues[0].record == first.record


async def test_leader_and_host_die_together(tmp_path: Path) -> None:
    """Thesis §10.5.4."""
    async with running(tmp_path, hosts=3, gcms=2) as rig:
        await rig.create("q", 2, "host-1")
        await rig.whole(q=2)
        leader = await rig.leader()
        await asyncio.gather(rig.cluster.kill_gcm(leader), rig.cluster.lose_host("host-1"))
        await rig.recorded("q", lambda record: record.monitor_host != "host-1")
        view = await rig.whole(q=2)
        assert view.queues[0].record.term == 2


async def test_revived_host_runs_nothing_old(tmp_path: Path) -> None:
    """Its HCM is killed for good, its processes live on; what was not fenced ends before the host is seen again."""
    async with running(tmp_path, hosts=3) as rig:
        await rig.create("q", 2, "host-1")
        await rig.add_exchange("q", "host-1")
        await rig.whole(q=2)
        await rig.cluster.kill_hcm("host-1")
        await rig.gone("host-1")
        await rig.whole(q=2)
        old = {process.pid for process in rig.cluster.processes() if process.owner == "host-1"}
        assert old  # the ScalingProcess: nobody is there to stop it. Monitor and Exchanges obeyed the higher term.
        await rig.cluster.start_hcm("host-1")
        assert not old & {process.pid for process in rig.cluster.processes()}
        await rig.whole(q=2)
    assert rig.cluster.leftovers == []


async def test_host_that_was_paused_for_too_long_runs_nothing_old(tmp_path: Path) -> None:
    """SIGSTOP for longer than the session: the same HCM goes on, and takes the news in before it registers again."""
    async with running(tmp_path, hosts=3) as rig:
        await rig.create("q", 2, "host-1")
        await rig.whole(q=2)
        old = {process.pid for process in rig.cluster.processes() if process.owner == "host-1"}
        pid = rig.cluster.hosts["host-1"].pid
        freeze(pid)
        await rig.gone("host-1")
        await rig.recorded("q", lambda record: record.monitor_host != "host-1")
        os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(WAIT_SECONDS):
            while await rig.session.get(paths.host("host-1")) is None:
                await asyncio.sleep(0.02)
        left = old & {process.pid for process in rig.cluster.processes()}
        assert len(left) == DAEMONS
        await rig.whole(q=2)


async def test_slow_host_is_left_alone(tmp_path: Path) -> None:
    """SIGSTOP for less than the session, and an HCM killed and restarted within it: nothing moves, no process restarts."""
    async with running(tmp_path, hosts=3, session_seconds=LONG_SESSION_SECONDS) as rig:
        await rig.create("q", 2, "host-1")
        before = await rig.whole(q=2)
        pids = {process.pid for process in rig.cluster.processes() if process.owner == "host-1"}
        pid = rig.cluster.hosts["host-1"].pid
        freeze(pid)
        await asyncio.sleep(0.5 * LONG_SESSION_SECONDS)
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(LONG_SESSION_SECONDS)
        assert (await rig.whole(q=2)).queues == before.queues
        assert pids == {process.pid for process in rig.cluster.processes() if process.owner == "host-1"}
        await rig.cluster.kill_hcm("host-1")
        await rig.cluster.start_hcm("host-1")
        await asyncio.sleep(LONG_SESSION_SECONDS)
        after = await rig.whole(q=2)
        assert after.queues == before.queues
        assert len(pids & {process.pid for process in rig.cluster.processes()}) == len(pids) - DAEMONS


async def test_lost_exchange_waits_for_a_slot(tmp_path: Path) -> None:
    async with running(tmp_path, hosts=2, exchanges_max=1) as rig:
        await rig.create("q", 2, "host-1")
        await rig.create("other", 1, "host-2")
        await rig.cluster.lose_host("host-1")
        await rig.recorded("q", lambda record: record.monitor_host == "host-2")
        assert [*(await rig.describe("q")).record.exchanges.values()] == ["host-1"]
        assert await rig.session.children(paths.transactions(paths.TransactionKind.HOST)) == ["host-1"]
        await rig.client.request(wire.RemoveQueue("other", REMOVAL), wire.Done, WAIT_SECONDS)
        view = await rig.whole(q=1)
        assert [*view.queues[0].record.exchanges.values()] == ["host-2"]

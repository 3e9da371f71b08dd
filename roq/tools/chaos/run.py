"""One run of `roq chaos`: cluster up, load on, faults, everything healed, drain, verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType

from msgspec import structs

from roq.client.cluster import Cluster
from roq.errors import RoqError
from roq.pubsub.replay_buffer import KEPT_SECONDS
from roq.testing import DockerCluster, LoopbackCluster, TestedCluster
from roq.testing.docker_cluster import IMAGE
from roq.tools.chaos import invariants, resources
from roq.tools.chaos.administration import Administration
from roq.tools.chaos.history import FaultDone
from roq.tools.chaos.load import ChaosLoad
from roq.tools.chaos.nemesis import NOTHING, Nemesis, Spared, possible_in
from roq.tools.chaos.result import ChaosOptions, ChaosRun, result
from roq.tools.chaos.schedule import Role, gentle, schedule
from roq.tools.chaos.verdict import gaps, judge, together
from roq.tools.chaos.watch import ResourceWatch, Witness

QUEUE, SECOND = "chaos", "second"  # a soak has both
SESSION_SECONDS = 4.0
HOSTS, GCMS, EXCHANGES, REPLICATION = 3, 2, 2, 2
HEALED_SECONDS = 60.0  # after the last fault everything serves again within this
CALM_SECONDS = 2.0  # of load with everything healed, before the end
IDLE_SECONDS = 12.0  # with nothing more coming, what is missing is lost; longer than a held path plus a watermark's period
DRAIN_SECONDS = 60.0
FLUSH_LAST_SECONDS = 30.0


class Observers:
    """What goes on beside load and nemesis: the resource watch, the witness and the administration; at the end, what they
    found.

    `async with Observers(cluster, started, every) as observers`: goes on until `stop()`; then `violations`.

    started: monotonic seconds; every: seconds between two rounds of administration.
    """

    def __init__(self, cluster: TestedCluster, started: float, every_seconds: float) -> None:
        self._cluster, self._started, self._every = cluster, started, every_seconds
        self.watch = ResourceWatch(cluster)
        self.administration = Administration(cluster.zookeeper)
        self._witness = Witness(cluster.zookeeper)
        self._tasks: list[asyncio.Task[None]] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Observers:
        await self._open.enter_async_context(self._witness)
        self._open.callback(self.administration.close)
        works = (self.watch.run(self._started), self._witness.run(), self.administration.run(self._every))
        self._tasks = [asyncio.create_task(work) for work in works]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._open.aclose()

    async def stop(self) -> None:
        """End the three. What one of them failed with is raised here."""
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def violations(self, client: Cluster, within_seconds: float) -> list[str]:
        """Everything that is wrong: with the history, with administration, and with the quiet cluster when it had its time."""
        try:
            found = list(await self.administration.check())
        except RoqError as error:
            found = [*self.administration.violations, f"C5: {type(error).__name__}: {error}"]
        found += await self._unsettled(client, within_seconds)
        try:
            await self.administration.clear()
        except RoqError as error:
            found.append(f"C6: {type(error).__name__}: {error}")
        return found + invariants.history_violations(self._witness.seen)

    async def _unsettled(self, client: Cluster, within_seconds: float) -> list[str]:
        found: list[str] = []

        async def right() -> bool:
            view = await client.view()
            processes = {host: await self._cluster.processes(host) for host in self._cluster.hosts}
            now, transactions = await self._witness.look(), await self._witness.transactions()
            found[:] = [*invariants.violations(view, processes), *invariants.unsettled(now, transactions)]
            return not found

        try:
            await self._cluster.wait_for(right, "the invariants hold", within_seconds)
        except RoqError as error:
            return found or [str(error)]
        return []


def local_cluster() -> TestedCluster:
    """Three hosts and two GCMs on loopback addresses, with a real ZooKeeper: what is proved is what clusters run on."""
    return LoopbackCluster(zookeeper="java", gcms=GCMS, hcms=HOSTS, session_seconds=SESSION_SECONDS)


def docker_cluster(image: str) -> TestedCluster:
    """The same in containers. image: "" for the default."""
    return DockerCluster(gcms=GCMS, hcms=HOSTS, session_seconds=SESSION_SECONDS, image=image or IMAGE)


async def bring_up_and_run(where: str, image: str, options: ChaosOptions, tell: Callable[[str], None]) -> ChaosRun:
    """Run against a cluster of its own. where: "local" or "docker"."""
    cluster = docker_cluster(image) if where == "docker" else local_cluster()
    await cluster.open()
    try:
        found = await run(cluster, options, tell)
    except BaseException:
        with contextlib.suppress(RoqError):  # what went wrong first is what is reported
            await cluster.close()
        raise
    try:
        await cluster.close()
    except RoqError as error:
        violations = [*found.result.violations, f"C4: {error}"]
        found = structs.replace(found, result=structs.replace(found.result, violations=violations, passed=False))
    return found


async def run(cluster: TestedCluster, options: ChaosOptions, tell: Callable[[str], None] = lambda _: None) -> ChaosRun:
    """Run against this open cluster. tell: gets a line per event."""
    options.check()
    faults = schedule(
        possible_in(cluster),
        seed=options.seed,
        seconds=options.seconds,
        every=options.every,
        session_seconds=SESSION_SECONDS,
        longest=options.longest,
    )
    queues = (QUEUE, SECOND) if options.soak else (QUEUE,)
    spared = Spared(frozenset({cluster.hosts[0], cluster.gcms[0]}), QUEUE) if options.soak else NOTHING
    if options.soak:
        faults = [gentle(fault) if fault.role is Role.ZOOKEEPER else fault for fault in faults]
    nemesis = Nemesis(cluster, faults, spared)
    async with cluster.connect() as client, AsyncExitStack() as exits:
        for at, queue in enumerate(queues):
            await _queue(cluster, client, queue, at)
        counts = {"publishers": options.publishers, "subscribers": options.subscribers, "size": options.size}
        loads = [await exits.enter_async_context(ChaosLoad(client, queue, rate=options.rate, **counts)) for queue in queues]
        started = loads[0].started
        observers = await exits.enter_async_context(Observers(cluster, started, options.every))
        tell(f"load: {options.publishers} publishers, {options.rate:g} messages/s each; {len(faults)} faults to come")
        await nemesis.run(started, lambda done: tell(_line(done)))
        await asyncio.sleep(started + options.seconds - time.monotonic())
        await observers.stop()
        healed, missing = await _settle(cluster, nemesis, loads, queues)
        tell(f"healed after {healed:.1f} s" + (f", except: {missing}" if missing else ""))
        await asyncio.sleep(CALM_SECONDS)
        for load in loads:
            await load.stop_publishing(FLUSH_LAST_SECONDS)
        for load in loads:
            await load.drain(IDLE_SECONDS, DRAIN_SECONDS)
        found = await observers.violations(client, HEALED_SECONDS / 2)
        seconds = time.monotonic() - started
        verdict = together([judge(load.sent(), load.heard) for load in loads])
        await exits.aclose()
        for queue in queues:
            with contextlib.suppress(RoqError):
                await client.remove_queue(queue)
    failures = [failure for load in loads for failure in load.failures]
    heard = [one for load in loads for one in load.heard]
    reported, unexcused = gaps(heard, nemesis.log, ring_seconds=KEPT_SECONDS)
    problems = [*verdict.problems(), *unexcused, *failures, *([f"not healed: {missing}"] if missing else [])]
    kind = "docker" if isinstance(cluster, DockerCluster) else "local"
    watch, requests = observers.watch, observers.administration.counts
    taken = resources.judge(watch.series, watch.znodes, options.seconds)
    answer = result(options, kind, verdict, nemesis.log, problems, found, healed, taken, requests, reported)
    return ChaosRun(answer, heard, seconds, watch.series, watch.znodes)


async def _queue(cluster: TestedCluster, client: Cluster, queue: str, first: int) -> None:
    """A queue whose processes begin on the host with this number, from 0."""
    hosts = [*cluster.hosts[first:], *cluster.hosts[:first]]
    await client.create_queue(queue, replication=min(REPLICATION, len(hosts)), overflow="block", host=hosts[0])
    for number in range(1, EXCHANGES):
        await client.create_exchange(queue, host=hosts[number % len(hosts)])
    await cluster.wait_queue_ready(queue, exchanges=EXCHANGES)


async def _settle(
    cluster: TestedCluster, nemesis: Nemesis, loads: list[ChaosLoad], queues: tuple[str, ...]
) -> tuple[float, str]:
    """Heal everything and wait until all serves; how long that took, and what does not."""
    begun = time.monotonic()

    def unhealthy() -> list[str]:
        return [text for load in loads for text in load.unhealthy()]

    async def serves() -> bool:
        return not unhealthy()

    try:
        await nemesis.heal()
        await cluster.wait_hosts(len(cluster.hosts), timeout_seconds=HEALED_SECONDS)
        for queue in queues:
            await cluster.wait_queue_ready(queue, timeout_seconds=HEALED_SECONDS)
        await cluster.wait_for(serves, "every client is ready", HEALED_SECONDS)
    except RoqError as error:
        return time.monotonic() - begun, "; ".join([str(error), *unhealthy()])
    return time.monotonic() - begun, ""


def _line(done: FaultDone) -> str:
    lasting = f" for {done.seconds:.1f} s" if done.seconds else ""
    return f"{done.t:7.1f} s  {done.kind} {done.target}{lasting}{' — ' + done.error if done.error else ''}"

"""One run of `roq chaos`: cluster up, load on, faults, everything healed, drain, verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from msgspec import structs

from roq.client.cluster import Cluster
from roq.errors import RoqError
from roq.pubsub.replay_buffer import KEPT_SECONDS
from roq.testing import DockerCluster, LoopbackCluster, TestedCluster
from roq.testing.docker_cluster import IMAGE
from roq.tools.chaos import resources
from roq.tools.chaos.beside import Beside
from roq.tools.chaos.history import FaultDone
from roq.tools.chaos.load import ChaosLoad
from roq.tools.chaos.nemesis import NOTHING, Nemesis, Spared, possible_in
from roq.tools.chaos.result import ChaosOptions, ChaosRun, result
from roq.tools.chaos.schedule import Role, gentle, schedule
from roq.tools.chaos.verdict import gaps, judge, together

QUEUE, SECOND = "chaos", "second"  # a soak has both
SESSION_SECONDS = 4.0
HOSTS, GCMS, EXCHANGES, REPLICATION = 3, 2, 2, 2
HEALED_SECONDS = 60.0  # after the last fault everything serves again within this
CALM_SECONDS = 2.0  # of load with everything healed, before the end
IDLE_SECONDS = 12.0  # with nothing more coming, what is missing is lost; longer than a held path plus a watermark's period
DRAIN_SECONDS = 60.0
FLUSH_LAST_SECONDS = 30.0


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
        with contextlib.suppress(RoqError):  # what went wrong first is what is told
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
        beside = await exits.enter_async_context(Beside(cluster, started, options.every))
        tell(f"load: {options.publishers} publishers, {options.rate:g} messages/s each; {len(faults)} faults to come")
        await nemesis.run(started, lambda done: tell(_line(done)))
        await asyncio.sleep(started + options.seconds - time.monotonic())
        await beside.stop()
        healed, missing = await _settle(cluster, nemesis, loads, queues)
        tell(f"healed after {healed:.1f} s" + (f", except: {missing}" if missing else ""))
        await asyncio.sleep(CALM_SECONDS)
        for load in loads:
            await load.stop_publishing(FLUSH_LAST_SECONDS)
        for load in loads:
            await load.drain(IDLE_SECONDS, DRAIN_SECONDS)
        found = await beside.violations(client, HEALED_SECONDS / 2)
        seconds = time.monotonic() - started
        verdict = together([judge(load.sent(), load.heard) for load in loads])
        await exits.aclose()
        for queue in queues:
            with contextlib.suppress(RoqError):
                await client.remove_queue(queue)
    failures = [failure for load in loads for failure in load.failures]
    heard = [one for load in loads for one in load.heard]
    told, unexcused = gaps(heard, nemesis.log, ring_seconds=KEPT_SECONDS)
    problems = [*verdict.problems(), *unexcused, *failures, *([f"not healed: {missing}"] if missing else [])]
    kind = "docker" if isinstance(cluster, DockerCluster) else "local"
    taken = resources.judge(beside.watch.series, beside.watch.znodes, options.seconds)
    answer = result(options, kind, verdict, nemesis.log, problems, found, healed, taken, beside.administration.counts, told)
    return ChaosRun(answer, heard, seconds, beside.watch.series, beside.watch.znodes)


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
        await nemesis.mend()
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

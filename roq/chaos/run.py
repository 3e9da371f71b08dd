"""One run of `roq chaos`: cluster up, load on, faults, everything healed, drain, verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from msgspec import structs

from roq.chaos import invariants
from roq.chaos.history import Done
from roq.chaos.load import Load
from roq.chaos.nemesis import Nemesis, possible_in
from roq.chaos.result import Options, Run, result
from roq.chaos.schedule import schedule
from roq.chaos.verdict import judge
from roq.client.cluster import Cluster
from roq.errors import RoqError
from roq.testing import DockerCluster, LoopbackCluster, TestedCluster
from roq.testing.docker_cluster import IMAGE

QUEUE = "chaos"
SESSION_SECONDS = 4.0
HOSTS, GCMS, EXCHANGES, REPLICATION = 3, 2, 2, 2
HEALED_SECONDS = 60.0  # after the last fault everything serves again within this
CALM_SECONDS = 2.0  # of load with everything healed, before the end
IDLE_SECONDS = 12.0  # with nothing more coming, what is missing is lost; longer than a held path plus a beacon's period
DRAIN_SECONDS = 60.0
FLUSH_LAST_SECONDS = 30.0


def local_cluster() -> TestedCluster:
    """Three hosts and two GCMs on loopback addresses."""
    return LoopbackCluster(gcms=GCMS, hcms=HOSTS, session_seconds=SESSION_SECONDS)


def docker_cluster(image: str) -> TestedCluster:
    """The same in containers. image: "" for the default."""
    return DockerCluster(gcms=GCMS, hcms=HOSTS, session_seconds=SESSION_SECONDS, image=image or IMAGE)


async def bring_up_and_run(where: str, image: str, options: Options, tell: Callable[[str], None]) -> Run:
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


async def run(cluster: TestedCluster, options: Options, tell: Callable[[str], None] = lambda _: None) -> Run:
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
    nemesis = Nemesis(cluster, faults)
    async with cluster.connect() as client:
        await _queue(cluster, client)
        counts = {"publishers": options.publishers, "subscribers": options.subscribers, "size": options.size}
        async with Load(client, QUEUE, rate=options.rate, **counts) as load:
            tell(f"load: {options.publishers} publishers, {options.rate:g} messages/s each; {len(faults)} faults to come")
            await nemesis.run(load.started, lambda done: tell(_line(done)))
            await asyncio.sleep(load.started + options.seconds - time.monotonic())
            healed, missing = await _settle(cluster, nemesis, load)
            tell(f"healed after {healed:.1f} s" + (f", except: {missing}" if missing else ""))
            await asyncio.sleep(CALM_SECONDS)
            await load.stop_publishing(FLUSH_LAST_SECONDS)
            await load.drain(IDLE_SECONDS, DRAIN_SECONDS)
            found = await _violations(cluster, client)
            seconds = time.monotonic() - load.started
            verdict, failures = judge(load.sent(), load.heard), list(load.failures)
        failures += [one for one in load.failures if one not in failures]
        with contextlib.suppress(RoqError):
            await client.remove_queue(QUEUE)
    problems = [*verdict.problems(), *failures, *([f"not healed: {missing}"] if missing else [])]
    kind = "docker" if isinstance(cluster, DockerCluster) else "local"
    return Run(result(options, kind, verdict, nemesis.log, problems, found, healed), load.heard, seconds)


async def _queue(cluster: TestedCluster, client: Cluster) -> None:
    await client.create_queue(QUEUE, replication=min(REPLICATION, len(cluster.hosts)), overflow="block")
    for number in range(1, EXCHANGES):
        await client.create_exchange(QUEUE, host=cluster.hosts[number % len(cluster.hosts)])
    await cluster.wait_queue_ready(QUEUE, exchanges=EXCHANGES)


async def _settle(cluster: TestedCluster, nemesis: Nemesis, load: Load) -> tuple[float, str]:
    """Heal everything and wait until all serves; how long that took, and what does not."""
    begun = time.monotonic()

    async def serves() -> bool:
        return not load.unhealthy()

    try:
        await nemesis.mend()
        await cluster.wait_hosts(len(cluster.hosts), timeout_seconds=HEALED_SECONDS)
        await cluster.wait_queue_ready(QUEUE, timeout_seconds=HEALED_SECONDS)
        await cluster.wait_for(serves, "every client is ready", HEALED_SECONDS)
    except RoqError as error:
        return time.monotonic() - begun, "; ".join([str(error), *load.unhealthy()])
    return time.monotonic() - begun, ""


async def _violations(cluster: TestedCluster, client: Cluster) -> list[str]:
    """What is still wrong with the cluster when it had its time to become right."""
    found: list[str] = []

    async def right() -> bool:
        view = await client.view()
        processes = {host: await cluster.processes(host) for host in cluster.hosts}
        found[:] = invariants.violations(view, processes)
        return not found

    try:
        await cluster.wait_for(right, "the invariants hold", HEALED_SECONDS / 2)
    except RoqError as error:
        return found or [str(error)]
    return []


def _line(done: Done) -> str:
    lasting = f" for {done.seconds:.1f} s" if done.seconds else ""
    return f"{done.t:7.1f} s  {done.kind} {done.target}{lasting}{' — ' + done.error if done.error else ''}"

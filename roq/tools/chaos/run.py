"""One run of `roq chaos`: cluster up, load on, faults, everything healed, drain, verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from msgspec import structs

from roq.client.cluster import Cluster
from roq.errors import RoqError
from roq.pubsub.replay_buffer import KEPT_SECONDS
from roq.testing import DockerCluster, LoopbackCluster, TestedCluster
from roq.testing.docker_cluster import IMAGE
from roq.tools.chaos import invariants, resources
from roq.tools.chaos.administration import Administration
from roq.tools.chaos.edn import EdnHistory
from roq.tools.chaos.history import FaultDone
from roq.tools.chaos.load_set import QUEUE, LoadSet, check_extras
from roq.tools.chaos.loads import LoadContext
from roq.tools.chaos.nemesis import NOTHING, Nemesis, Spared
from roq.tools.chaos.recorded_load import RECORDED
from roq.tools.chaos.result import ChaosOptions, ChaosRun, result, with_problem, with_violation
from roq.tools.chaos.schedule import (
    ChaosFault,
    ChaosKind,
    FaultPair,
    LoadKind,
    Role,
    choose_faults,
    gentle,
    needs_small_disks,
    schedule,
)
from roq.tools.chaos.verdict import COUNTS, decide, gaps
from roq.tools.chaos.watch import ResourceWatch, Witness
from roq.tools.chaos.workers import WorkerProcesses

SESSION_SECONDS = 4.0
HOSTS, GCMS = 3, 2
SMALL_DISK_MEGABYTES = 700  # of memory; a store has some 100 MB at hand before it needs more
HEALED_SECONDS = 60.0  # after the last fault everything serves again within this
CALM_SECONDS = 2.0  # of load with everything healed, before the end


class Observers:
    """What goes on beside load and nemesis: the resource watch, the witness and the administration; at the end, what they
    found.

    `async with Observers(cluster, started, every, loads) as observers`: goes on until `stop()`; then `violations`.

    started: monotonic seconds; every: seconds between two rounds of administration; loads: that there are.
    """

    def __init__(self, cluster: TestedCluster, started: float, every_seconds: float, loads: int) -> None:
        self._cluster, self._started, self._every = cluster, started, every_seconds
        self._witness = Witness(cluster.zookeeper)
        self.watch = ResourceWatch(cluster, self._witness, loads)
        self.administration = Administration(cluster.zookeeper)
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


def docker_cluster(image: str, *, small_disks: bool = False) -> TestedCluster:
    """The same in containers. image: "" for the default. small_disks: that can be filled."""
    megabytes = SMALL_DISK_MEGABYTES if small_disks else 0
    return DockerCluster(
        gcms=GCMS, hcms=HOSTS, session_seconds=SESSION_SECONDS, state_megabytes=megabytes, image=image or IMAGE
    )


async def bring_up_and_run(where: str, image: str, options: ChaosOptions, tell: Callable[[str], None]) -> ChaosRun:
    """Run against a cluster of its own. where: "local" or "docker"."""
    possible = choose_faults(options.check().faults, frozenset(options.loads), containers=where == "docker")
    check_extras(options)
    small_disks = needs_small_disks(possible)
    cluster = docker_cluster(image, small_disks=small_disks) if where == "docker" else local_cluster()
    with contextlib.closing(EdnHistory(Path(options.history) if options.history else None)) as history:
        await cluster.open()
        try:
            found = await run(cluster, options, possible, history, tell)
        except BaseException:
            with contextlib.suppress(RoqError):  # what went wrong first is what is reported
                await cluster.close()
            raise
        try:
            await cluster.close()
        except RoqError as error:
            found = structs.replace(found, result=with_violation(found.result, f"C4: {error}"))
    if history.failure:  # known only now that it is closed
        found = structs.replace(found, result=with_problem(found.result, history.failure))
    return found


async def run(
    cluster: TestedCluster,
    options: ChaosOptions,
    possible: Sequence[FaultPair],
    history: EdnHistory,
    tell: Callable[[str], None] = lambda _: None,
) -> ChaosRun:
    """Run against this open cluster. tell: gets a line per event."""
    faults = _schedule(options, possible)
    spared = Spared(frozenset({cluster.hosts[0], cluster.gcms[0]}), QUEUE) if options.soak else NOTHING
    async with cluster.connect() as client, AsyncExitStack() as exits:
        history.begin(time.monotonic())
        pool = await exits.enter_async_context(WorkerProcesses())
        clocks_move = any(fault.kind is ChaosKind.MOVE_CLOCK for fault in faults)
        context = LoadContext(client, cluster.zookeeper, pool, history, options.seed, clocks_move)
        loads = await exits.enter_async_context(LoadSet(cluster, context, options))
        started = loads.pubsub[0].started if loads.pubsub else time.monotonic()
        nemesis = Nemesis(cluster, faults, pool, spared, (RECORDED,))
        observers = await exits.enter_async_context(Observers(cluster, started, options.every, len(options.loads)))
        tell(f"load: {', '.join(options.loads)}; {len(faults)} faults to come")
        await nemesis.run(started, partial(_note_begun, history), lambda done: _note(done, history, tell))
        await asyncio.sleep(started + options.seconds - time.monotonic())
        await observers.stop()
        healed, missing = await _settle(cluster, nemesis, loads)
        tell(f"healed after {healed:.1f} s" + (f", except: {missing}" if missing else ""))
        await asyncio.sleep(CALM_SECONDS)
        await loads.end()
        tell("drained")
        violations = await observers.violations(client, HEALED_SECONDS / 2)
        seconds = time.monotonic() - started
        await exits.aclose()
        for queue in loads.queues:
            with contextlib.suppress(RoqError):
                await client.remove_queue(queue)
    heard = [one for load in loads.pubsub for one in load.heard]
    problems = [*loads.failures(), *([f"not healed: {missing}"] if missing else [])]
    verdict, verdicts = loads.pubsub_verdict(), loads.verdicts()
    reported, unexcused = gaps(heard, nemesis.log, ring_seconds=KEPT_SECONDS)
    if loads.pubsub:
        undecided = [text for load in loads.pubsub for text in load.undecided()]
        counts = {name.replace("_", " "): getattr(verdict, name) for name in COUNTS}
        verdicts.insert(0, decide(LoadKind.PUBSUB, counts, [*verdict.problems(), *unexcused], undecided))
    kind = "docker" if isinstance(cluster, DockerCluster) else "local"
    watch, requests = observers.watch, observers.administration.counts
    taken = resources.judge(watch.series, watch.znodes, options.seconds)
    wrong = problems, violations
    found = result(options, kind, verdict, verdicts, nemesis.log, wrong, healed, taken, requests, reported)
    return ChaosRun(found, heard, seconds, watch.series, watch.znodes)


def _schedule(options: ChaosOptions, possible: Sequence[FaultPair]) -> list[ChaosFault]:
    faults = schedule(
        possible,
        seed=options.seed,
        seconds=options.seconds,
        every=options.every,
        session_seconds=SESSION_SECONDS,
        longest=options.longest,
    )
    if options.soak:
        return [gentle(fault) if fault.role is Role.ZOOKEEPER else fault for fault in faults]
    return faults


async def _settle(cluster: TestedCluster, nemesis: Nemesis, loads: LoadSet) -> tuple[float, str]:
    """Heal everything and wait until all serves; how long that took, and what does not."""
    begun = time.monotonic()
    try:
        await nemesis.heal()
        await cluster.wait_hosts(len(cluster.hosts), timeout_seconds=HEALED_SECONDS)
        await loads.serve(HEALED_SECONDS)
    except RoqError as error:
        return time.monotonic() - begun, "; ".join([str(error), *loads.unhealthy()])
    return time.monotonic() - begun, ""


def _note_begun(history: EdnHistory, done: FaultDone) -> None:
    history.fault(f"{done.kind}-begins", done.target, time.monotonic())


def _note(done: FaultDone, history: EdnHistory, tell: Callable[[str], None]) -> None:
    """A fault is over."""
    tell(_line(done))
    error = [done.error] if done.error else []
    history.fault(f"{done.kind}-ends" if done.seconds else done.kind, [done.target, *error], time.monotonic())


def _line(done: FaultDone) -> str:
    lasting = f" for {done.seconds:.1f} s" if done.seconds else ""
    return f"{done.t:7.1f} s  {done.kind} {done.target}{lasting}{' — ' + done.error if done.error else ''}"

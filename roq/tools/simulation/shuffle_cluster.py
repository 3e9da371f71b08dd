"""A simulated cluster with shuffles: stores with followers, drivers, writers and readers; hosts that join and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import hcm.machine
import roq
import roq.shuffle.blocks  # followers import it when they need it
import roq.shuffle.cluster
import roq.shuffle.writer
from roq.coordination.locate import GcmClient
from roq.errors import DataLost, TemporaryError
from roq.runtime.rpc import RpcClient
from roq.shuffle.node.stored import BAD
from roq.tools.chaos.shuffle_work import ShuffleAccount, ShuffleBooks, drive, judge_shuffles, read, read_one, write
from roq.tools.simulation.blocking import LoopBeside, SimulatedStopEvent
from roq.tools.simulation.cluster import ZOOKEEPER
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.loop import SimulatedLoop
from roq.tools.simulation.store_cluster import StoreCluster
from roq.tools.simulation.threads import sleep
from roq.wire.assignment import ProcessKind
from roq.wire.gcm import DescribeShuffle, ListShuffles, ShuffleInfo, ShuffleList
from roq.wire.shuffle import CountRows, Counts, Reply

ADDRESS = f"roq://{ZOOKEEPER}"
LOOK_SECONDS, ASK_SECONDS = 1.0, 5.0
RUN_ROWS, BLOCK_ROWS = 60, 12  # few enough for several runs and blocks
ROLES = {**hcm.machine.ROLES, ProcessKind.STORE: ("clients", "control", "shuffle")}


def replacements(loop: SimulatedLoop) -> list[tuple[Any, str, Any]]:
    """Below writers and readers, beside replacements.py: (owner, name, what stands in its place)."""
    return [
        (hcm.machine, "ROLES", ROLES),
        (roq.shuffle.blocks, "BLOCK_ROWS", BLOCK_ROWS),
        (roq.shuffle.writer, "RUN_ROWS_MAX", RUN_ROWS),
        (roq.shuffle.cluster, "StopEvent", SimulatedStopEvent),
        (roq.shuffle.cluster, "LoopThread", lambda name: LoopBeside(loop, name)),
    ]


class ShuffleCluster(StoreCluster):
    """As a SimulatedCluster, with other clients. The last host joins later."""

    NEWCOMERS = ("reader", "writer")
    LATE = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shuffles = ShuffleBooks(self._put_aside, sleep, self.loop.note)
        self._draining = False

    def _put_aside(self, id: str) -> bool:
        return any((host.disk.folder / "shuffles" / (id + BAD)).exists() for host in self.hosts)

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        program = {"driver": drive, "writer": write, "reader": read}[what]
        return self._told(label, program(self.shuffles, ADDRESS, label, random, stop))

    def do(self, fault: Fault) -> None:
        """See SimulatedCluster."""
        match fault.kind:
            case FaultKind.JOIN_HOST:
                self._join()
            case FaultKind.REBALANCE:
                self._cut_anew(fault)
            case _:
                super().do(fault)

    def _join(self) -> None:
        late = self.hosts[-1]
        if late.powered and not late.named("hcm"):
            self.told(f"{late.name} joins")
            late.start_hcm()
            return
        draining = self._draining = not self._draining
        self.told(f"{late.name} is {'cordoned' if draining else 'taken back'}")

        async def program(stop: asyncio.Event) -> None:
            async with roq.connect(ZOOKEEPER) as cluster:
                await cluster.cordon_host(late.name, draining)

        self.admin.run("admin", program)

    def _cut_anew(self, fault: Fault) -> None:
        sealed = [job for job in self.shuffles.living() if job.sealed]
        if not sealed:
            return
        job = sealed[int(fault.choice * len(sealed))]
        self.told(f"{job.name} is to be cut anew")
        job.cuts += 1

        def cut() -> None:
            with roq.shuffle.open(ADDRESS) as shuffles:
                shuffles.rebalance(job.name, int(fault.second * 10) + 1)

        async def program(stop: asyncio.Event) -> None:
            await asyncio.to_thread(cut)

        self.admin.run("admin", program)

    def _hurt_client(self, fault: Fault) -> None:
        super()._hurt_client(fault)
        living = {machine.name for machine in self.clients if machine.processes}
        for job in self.shuffles.jobs:
            for attempt in job.attempts:
                attempt.over = attempt.over or attempt.label not in living

    def verdict(self) -> tuple[list[str], tuple[int, int, int]]:
        """What is wrong, and what was given, got and settled."""
        return self.books.errors + judge_shuffles(self.shuffles), self.shuffles.counts()

    # --- the end --------------------------------------------------------------------------------------------------------

    async def look(self, seconds: float) -> None:
        """Wait until every shuffle is sealed, for so long at most; read each, and count what its holders have."""
        done: asyncio.Future[None] = self.loop.create_future()

        async def program(stop: asyncio.Event) -> None:
            until = self.loop.time() + seconds
            while not all(job.sealed for job in self.shuffles.living()) and self.loop.time() < until:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
            await self._told("admin", asyncio.to_thread(self._read_all, until))
            await self._told("admin", self._count_all(until))
            done.set_result(None)

        self.admin.run("admin", program)
        await done

    def _read_all(self, until: float) -> None:
        random = Random(0)
        with roq.shuffle.open(ADDRESS) as shuffles:
            for job in self.shuffles.living():
                while job.sealed:
                    try:
                        read_one(self.shuffles, shuffles, job, random)
                        break
                    except DataLost as error:
                        self.shuffles.refused(f"reading {job.name}", job, error)
                        break
                    except TemporaryError:
                        if self.loop.time() > until:
                            raise
                        sleep(LOOK_SECONDS)

    async def _count_all(self, until: float) -> None:
        """Every range is where it should be, as often as it should be, whole; nothing is left of what was removed."""
        gcm = GcmClient(ZOOKEEPER)
        try:
            while (problem := await self._problem(gcm)) and self.loop.time() < until:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            gcm.close()
        if problem:
            self.shuffles.wrong.append(f"in the end {problem}")

    async def _problem(self, gcm: GcmClient) -> str:
        try:
            for job in self.shuffles.living():
                if job.sealed and not self._put_aside(job.id) and (found := await self._lacking(gcm, job)):
                    return found
            known = {one.id for one in (await gcm.request(ListShuffles(), ShuffleList, ASK_SECONDS)).shuffles}
        except TemporaryError as error:
            return f"{type(error).__name__}: {error}"
        folders = [(path.name, host.name) for host in self.hosts for path in sorted(host.disk.folder.glob("shuffles/*/"))]
        left = [(name, host) for name, host in folders if name not in known and not name.endswith(BAD)]
        return next((f"{name} on {host} is left of what was removed" for name, host in left), "")

    async def _lacking(self, gcm: GcmClient, job: ShuffleAccount) -> str:
        info = await gcm.request(DescribeShuffle(job.name), ShuffleInfo, ASK_SECONDS)
        shuffle = info.description
        if shuffle.former:
            return f"{job.name} still moves"
        for host in sorted({host for each in shuffle.ranges for host in each.holders}):
            ranges = [each for each in shuffle.ranges if host in each.holders]
            asked = CountRows(shuffle.id, [each.interval for each in ranges], shuffle.winners)
            client = RpcClient(info.followers[host], Reply)
            try:
                counted = await client.request(asked, Counts, ASK_SECONDS)
            finally:
                client.close()
            if counted.rows != [each.rows for each in ranges]:
                return f"{host} has {counted.rows} rows of {job.name}, and should have {[each.rows for each in ranges]}"
        copies = min(job.replicas, len(info.members))
        return next(
            (
                f"range {each.number} of {job.name} has holders {each.holders}"
                for each in shuffle.ranges
                if len(each.holders) != copies
            ),
            "",
        )

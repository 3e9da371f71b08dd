"""A simulated cluster with a recorded queue: stores, tapes, publishers that ask whether their messages are stored, readers of
the past.

A disk is replaced only when every tape has all its copies, none is before they are all there again, and none at all where an
entry counts with one copy. Clocks are wrong by no more than CLOCKS_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import msgspec

import roq
import roq.pubsub.exchange.recorder
import roq.pubsub.exchange.tapes
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import RoqError, TemporaryError
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.log.replicated.repair import holdings, under_replicated
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.log.replicated.writer import LogWriter
from roq.log.store.server import StoreServer
from roq.tools.simulation.cluster import QUEUE, ZOOKEEPER
from roq.tools.simulation.faults import LOSSLESS_RECORDED, Fault, FaultKind
from roq.tools.simulation.groups import GroupBooks, await_done, judge_group, take_part
from roq.tools.simulation.loop import Fate
from roq.tools.simulation.recordings import (
    RecordingBooks,
    RecordPace,
    judge_recording,
    publish_stored,
    read_early,
    read_late,
    read_to_the_end,
    read_windows,
)
from roq.tools.simulation.store_cluster import StoreCluster
from roq.wire import tape_index
from roq.wire.assignment import ProcessState, from_json
from roq.wire.gcm import Tapes, TapeView

GROUP = "members"
GROUP_SECONDS = 240.0  # of a topic one message after the other, over a slow network to slow disks
GROUP_ADDRESS = f"roq://{ZOOKEEPER}/{QUEUE}@{GROUP}"
DAY_SECONDS = 86_400.0
CLOCKS_SECONDS = 0.0, 1.0  # at most, of a machine's clock and the right time
ENTRY_BYTES, HELD_BYTES = (1_000_000, 1_500), (1 << 25, 6_000)  # few enough for several entries, and for publishers to wait
ROLL_SECONDS = 21_600.0, 6.0  # several segments of a tape, or one
JOURNAL_BYTES = (
    1024 * 1024
)  # of a store's journal file: it takes entries of half of it, and what is sent again comes in big ones
RUNS = 5  # one of so many has an index every few entries; in the others tapes are too short for one
BURST_KEPT = 8  # messages at once that no Exchange drops for


def recording_replacements(seed: int) -> list[tuple[Any, str, Any]]:
    """Sizes and times of tapes in this run: (owner, name, what stands in its place)."""
    random = Random(f"{seed} tapes")
    recorder, tapes, roll = roq.pubsub.exchange.recorder, roq.pubsub.exchange.tapes, random.choice(ROLL_SECONDS)
    sizes = {**(StoreServer.__init__.__kwdefaults__ or {}), "file_bytes": JOURNAL_BYTES}
    indexes = [(tape_index, "INDEX_EVERY", 16), (tape_index, "GROUP_ENTRIES", 2)] if seed % RUNS == RUNS - 1 else []
    return [
        *indexes,
        (StoreServer.__init__, "__kwdefaults__", sizes),
        (recorder, "ENTRY_BYTES", random.choice(ENTRY_BYTES)),
        (recorder, "HELD_BYTES", random.choice(HELD_BYTES)),
        (tapes, "ROLL_SECONDS_MIN", min(roll, tapes.ROLL_SECONDS_MIN)),
        (tapes, "ROLL_SECONDS_MAX", roll),
    ]


class RecordingCluster(StoreCluster):
    """As a SimulatedCluster, with other clients."""

    NEWCOMERS = ("reader", "publisher")
    READERS: tuple[str, ...] = ("reader",)
    RECORDED: tuple[str, ...] = (QUEUE,)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recording = RecordingBooks(self.loop)
        self.books = self.recording
        self.pace = RecordPace(5.0, 3, 1, 0)
        self.record = roq.Record(copies=3, ack=2)
        self.writers: dict[tuple[str, int], LogWriter] = {}  # by log and epoch
        self._switching = False

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        books = self.recording
        if what == "publisher":
            return self._told(label, publish_stored(books, ZOOKEEPER, QUEUE, label, self.pace, random, stop))
        if what == "early":
            return self._told(label, read_early(books, ZOOKEEPER, QUEUE, label, stop))
        if what == "windows":
            return self._told(label, read_windows(books, ZOOKEEPER, QUEUE, label, random, stop))
        return self._told(label, read_late(books, ZOOKEEPER, QUEUE, label, random, stop))

    def judged(self, faults: list[Fault]) -> tuple[list[str], tuple[int, int, int]]:
        """What is wrong, and what was stored, delivered and reported as lost."""
        lossless = all(fault.kind in LOSSLESS_RECORDED for fault in faults) and self.pace.burst <= BURST_KEPT
        return judge_recording(self.recording, lossless=lossless), self.recording.counts()

    async def look(self, seconds: float) -> None:
        """Read everything once more, for so long at most; no process may have been given up."""
        done: asyncio.Future[None] = self.loop.create_future()

        async def program(stop: asyncio.Event) -> None:
            await self._told("fresh", read_to_the_end(self.recording, ZOOKEEPER, QUEUE, stop))
            async with roq.connect(ZOOKEEPER) as cluster:
                view = await cluster.view()
            for host in view.hosts:
                running = () if host.report is None else host.report.processes
                failed = [one.name for one in running if one.state is ProcessState.FAILED]
                self.books.errors += [f"{name} on {host.host} was given up" for name in failed]
            done.set_result(None)

        self.admin.run("admin", program)
        try:
            async with asyncio.timeout(seconds):
                await done
        except TimeoutError:
            self.books.errors.append(f"the tapes were not read to their end in {seconds:g} s")

    # --- faults -------------------------------------------------------------------------------------------------------

    def do(self, fault: Fault) -> None:
        """See SimulatedCluster."""
        match fault.kind:
            case FaultKind.SWITCH_RECORDING:
                self._switch(fault.seconds)
            case FaultKind.LEAP_CLOCK:
                host = self.hosts[int(fault.choice * len(self.hosts))]
                self.told(f"the wall clock of {host.name} is a day ahead for {fault.seconds:.2f} s")
                self.wall.step(host.address, DAY_SECONDS)
                self._later(fault.seconds, lambda: self.wall.step(host.address, -DAY_SECONDS))
            case FaultKind.SWAP_DISK:
                if self.record.ack > 1:
                    self._swap(self.hosts[int(fault.choice * len(self.hosts))], fault.seconds)
            case _:
                super().do(fault)

    def _step_clock(self, fault: Fault) -> None:
        """Of one machine that records, or reads."""
        machines = [*self.hosts, *self.clients]
        machine, right = machines[int(fault.choice * len(machines))], (fault.second - 0.5) * 2 * CLOCKS_SECONDS[-1]
        self.told(f"the wall clock of {machine.name} is set {right:+.2f} s wrong")
        self.wall.step(machine.address, right - self.wall.ahead(machine.address))

    def _hurt_client(self, fault: Fault) -> None:
        """The early reader is not killed."""
        living = [one for one in self.clients for process in one.processes.values() if process.fate is Fate.ALIVE]
        chosen = living[int(fault.choice * len(living))] if living else None
        if fault.kind is FaultKind.KILL_CLIENT and chosen is not None and self._client_of[chosen.name] == "early":
            return
        super()._hurt_client(fault)
        gone = {machine.name for machine in self.clients if not machine.processes}
        for reading in self.recording.readings:
            reading.over = reading.over or (reading.label in gone and not reading.complete)

    def _switch(self, seconds: float) -> None:
        if self._switching:
            return
        self._switching = True
        self.told(f"recording is switched off, and on again after {seconds:.2f} s")
        window = [self.loop.time(), float("inf")]
        self.recording.off.append(window)

        async def program(stop: asyncio.Event) -> None:
            try:
                async with roq.connect(ZOOKEEPER, connect_seconds=60.0) as cluster:
                    await cluster.record_queue(QUEUE, None)
            except RoqError:
                pass  # it may be done or not
            await asyncio.sleep(seconds)
            while True:
                try:
                    async with roq.connect(ZOOKEEPER, connect_seconds=60.0) as cluster:
                        await cluster.record_queue(QUEUE, self.record)
                    break
                except RoqError:
                    await asyncio.sleep(1.0)
            window[1] = self.loop.time()
            self._switching = False
            self.told("recording is on again")

        self.admin.run("admin", program)

    async def _is_complete(self, cluster: roq.Cluster) -> bool:
        """Whether one disk may be lost now."""
        try:
            for queue in self.RECORDED:
                found = await cluster.tapes(queue)
                stores = Stores(StaticDirectory(found.stores))
                try:
                    if not await self._has_all_copies(found, stores, self.record.copies):
                        return False
                finally:
                    stores.close()
        except TemporaryError:
            return False
        return True

    async def _has_all_copies(self, found: Tapes, stores: Stores, copies: int) -> bool:
        for view in found.views:
            meta = from_json(view.meta, LogMeta)
            what, parts, behind = list(holdings(meta)), [], frozenset[str]()
            if meta.segments and meta.segments[-1].state is not SegmentState.CLOSED:
                writer = self.writers.get((view.log, meta.epoch))
                if writer is None or writer.error is not None or not (parts := writer.open_parts()):
                    return False
                behind = writer.behind()
            compared = await stores.compare(what, parts, found.stores)
            if under_replicated(what, parts, copies, behind, compared):
                return False
        return True


class GroupCluster(RecordingCluster):
    """As a RecordingCluster, with the members of a group besides."""

    NEWCOMERS = ("member", "publisher")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.group = GroupBooks(ordered=True)

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        if what == "member":
            return self._told(label, take_part(self.group, GROUP_ADDRESS, label, random, stop))
        return super()._program(what, label, random, stop)

    async def _is_complete(self, cluster: roq.Cluster) -> bool:
        """The group's log is kept by the same stores."""
        if not await super()._is_complete(cluster):
            return False
        session = await Session.connect(ZOOKEEPER)
        try:
            found = await cluster.tapes(QUEUE)
            spec = (await cluster.work_queue(f"{QUEUE}@{GROUP}")).record.spec
            if (node := await session.get(paths.log(spec.log))) is None:
                return True
            of_group = msgspec.structs.replace(found, views=(TapeView(spec.log, "", True, node.data),))
            stores = Stores(StaticDirectory(found.stores))
            try:
                return await self._has_all_copies(of_group, stores, spec.write_quorum)
            finally:
                stores.close()
        except TemporaryError:
            return False
        finally:
            await session.close()

    def judged(self, faults: list[Fault]) -> tuple[list[str], tuple[int, int, int]]:
        """What is wrong, and what was stored, leased and acked."""
        wrong, (stored, _, _) = super().judged(faults)
        return wrong + judge_group(self.group, self.recording), (stored, *self.group.counts())

    async def look(self, seconds: float) -> None:
        """Wait until the group is done, too."""
        await super().look(seconds)
        done = asyncio.Event()

        async def program(stop: asyncio.Event) -> None:
            await self._told("admin", await_done(self.group, GROUP_ADDRESS, GROUP_SECONDS))
            done.set()

        self.admin.run("admin", program)
        await done.wait()

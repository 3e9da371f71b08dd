"""Master process: the active one of a work queue answers its clients, a standby follows the log and waits.

    standby ──activated──► take the log over ──► catch up with it ──► serve ──append failed──► begin again
       ▲                       │ a later term has it                                               │
       └───────────────────────┴───────────────────────────────────────────────────────────────────┘

Which one is active is the GCM's word (role and term in the ProcessSpec); that there is only one is the log's: taking it over
fences every other. Sockets: `clients` (door.py), `control` (Shutdown Monitor). Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial

from roq.coordination import paths
from roq.coordination.operations import Check
from roq.coordination.session import Session
from roq.errors import DataLost, InvalidConfiguration, LogFenced, NotLeader, NotReady, RoqError, TemporaryError, UnknownFormat
from roq.log.replicated.reader import LogReader
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import LogSettings, RepairSettings
from roq.log.replicated.stores import StoreDirectory
from roq.log.replicated.writer import LogWriter
from roq.runtime.backoff import delays
from roq.runtime.liveness import announce_ready, beat, open_board
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks, run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import master as wire
from roq.wire.assignment import MonitorRole, ProcessSpec, from_json
from roq.wire.child import ChildSpec
from roq.wire.envelope import seal_error
from roq.wire.work_queue import TaskSettings, WorkQueueRecord, WorkQueueSpec
from roq.workqueue.master.blobs import BlobRegistry
from roq.workqueue.master.copies import CopiesDesk
from roq.workqueue.master.door import Door
from roq.workqueue.master.follower import LogFollower
from roq.workqueue.master.reign import MasterReign, SteadyClock
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.snapshots import snapshots
from roq.workqueue.records import BlobRef, Configure

LOST_RETRY_SECONDS = 5.0  # between two looks for what no store has any more
GRACE_MS = 2_000  # after a take-over no lease ends: those who hold one must find the new master first

log = logger(__name__)


class Master:
    """One master, active or standby, on the running loop."""

    def __init__(self, spec: ChildSpec, stop: asyncio.Event) -> None:
        if spec.process.work is None:
            raise InvalidConfiguration("a master without a work queue")
        self._spec, self._stop = spec, stop
        self._process, self._work = spec.process, spec.process.work
        self.counters = Counters()
        self._clock = SteadyClock()
        self._reign: MasterReign | None = None
        self._writer: LogWriter | None = None
        self._blobs: BlobRegistry | None = None
        self._copies: CopiesDesk | None = None
        self._changed = asyncio.Event()
        self._trouble: RoqError | None = None  # why we can't serve although it is our turn
        self._fenced_term = 0  # a later one has the log: we are not active whatever our assignment says
        self._tasks = Tasks(lambda error: stop.set())
        control = spec.ports["control"]
        self._control = ShutdownMonitor(spec.process.name, spec.address, control, stop, self.counters, self._configure)
        self._door = Door(spec.address, spec.ports["clients"], self._take, self._taken, self.counters)

    @property
    def _active(self) -> bool:
        return self._process.role is MonitorRole.ACTIVE and self._process.term > self._fenced_term

    def _configure(self, process: ProcessSpec) -> None:
        """A standby is activated, a term begins, or the quorums grow."""
        if (process.role, process.term) != (self._process.role, self._process.term):
            log.info("role changed", extra={"fields": {"role": str(process.role), "term": process.term}})
        self._process, self._work = process, process.work or self._work
        if self._writer is not None and self._blobs is not None:
            self._writer.quorums, self._blobs.spec = (self._work.write_quorum, self._work.ack_quorum), self._work
            self._blobs.repair_due.set()
        self._changed.set()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, peer: bytes, id: int, request: wire.Request) -> None:
        reign, blobs = self._reign, self._blobs
        if reign is None or reign.failed.done() or blobs is None:
            leads = self._active and (reign is None or not isinstance(reign.failed.result(), LogFenced))
            trouble = self._trouble or NotReady("the master is just taking over")
            error = trouble if leads else NotLeader("this is not the active master")
            self._door.send(peer, seal_error(id, error))
        elif type(request) is wire.GetCopies and self._copies is not None:
            self._copies.ask(peer, id)
        elif reign.turned_away(peer, id, request):
            return
        elif type(request) is wire.Reserve:
            blobs.reserve(peer, id, request)
        elif type(request) is wire.PayloadStored:
            blobs.stored(peer, id, request)
        else:
            reign.take(peer, id, request)

    def _taken(self) -> None:
        if self._reign is not None:
            self._reign.look()

    # --- reigns -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        session = await self._session()
        try:
            directory = await StoreDirectory(session).start()
            pauses = delays(0.05, 1.0)
            while True:
                try:
                    await self._live(session, directory)
                    pauses = delays(0.05, 1.0)
                except LogFenced as error:
                    log.warning("master is fenced by a newer term", extra={"fields": {"reason": str(error)}})
                    self._fenced_term = self._process.term
                except UnknownFormat:
                    raise  # reading on would be wrong
                except DataLost as error:  # whoever asks is told at once; a disk may be brought back
                    self._trouble = error
                    log.critical("the work queue can't be served: %s", error)
                    await asyncio.sleep(LOST_RETRY_SECONDS)
                except TemporaryError as error:
                    self._trouble = error
                    log.warning(
                        "master restarts from the log", extra={"fields": {"error": type(error).__name__, "reason": str(error)}}
                    )
                    await asyncio.sleep(next(pauses))
        finally:
            await session.close()

    async def _session(self) -> Session:
        for delay in delays():
            try:
                return await Session.connect(self._spec.zookeeper)
            except TemporaryError as error:
                log.warning("waiting for ZooKeeper", extra={"fields": {"reason": str(error)}})
                await asyncio.sleep(delay)
        raise AssertionError("delays() never ends")

    async def _live(self, session: Session, directory: StoreDirectory) -> None:
        """Follow, and when it is our turn, reign until something ends it."""
        reader = LogReader(session, self._work.log, directory)
        try:
            follower = LogFollower(reader)
            if not self._active:
                await self._follow(follower)
            settings, term, guard = _settings(self._work), self._process.term, partial(self._wanted, session)
            writer = await LogWriter.take_over(session, self._work.log, directory, settings, term, guard)
            try:
                taken = await session.get(paths.log(self._work.log))
                if taken is None:
                    raise LogFenced("the log was removed")
                since = time.monotonic()
                await follower.catch_up(writer.confirmed)
                self._clock.take_over(follower.fold.clock, taken.changed + round((time.monotonic() - since) * 1000))
                await self._serve_from(follower, writer)
            finally:
                await writer.close()
        finally:
            reader.close()

    async def _wanted(self, session: Session) -> Check:
        """A log is made only for a queue that is there: one of a removed queue would stay for ever."""
        path = paths.work_queue(self._process.queue)
        node = await session.get(path)
        if node is None or from_json(node.data, WorkQueueRecord).spec.log != self._work.log:
            raise LogFenced("the work queue was removed")
        return Check(path, node.version)

    async def _follow(self, follower: LogFollower) -> None:
        following = asyncio.get_running_loop().create_task(follower.follow(), name="follow the log")
        try:
            while not self._active:
                self._changed.clear()
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({following, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if following.done():
                    following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _serve_from(self, follower: LogFollower, writer: LogWriter) -> None:
        quiet_until = self._clock.now() + GRACE_MS if follower.position else 0
        term = self._process.term
        inline, here = self._work.inline_bytes, self._door.connected
        service = MasterService(follower.fold, follower.recent, term, inline, self._places, quiet_until, here)
        reign = MasterReign(service, writer, self._door.send, self._drop, self._clock, self.counters)
        reign.position = follower.position
        blobs = BlobRegistry(self._work, writer.stores, service, reign.turn, reign.barrier, self._clock.now, self.counters)
        if not service.fold.version:
            service.apply(Configure(self._clock.now(), _contract_settings(self._work), 0))
        beside = Tasks(reign.end)
        lost = asyncio.Event()
        repairer = LogRepairer(writer, RepairSettings(), lost.set)
        beside.start(snapshots(reign, writer, self.counters, lost), "snapshots")
        beside.start(repairer.run(), "repairs of the log")
        self._copies = CopiesDesk((repairer.copies, blobs.copies), self._answer_copies, beside)
        self._reign, self._writer, self._blobs, self._trouble = reign, writer, blobs, None
        self.counters["reigns"] += 1
        log.info("master serves", extra={"fields": {"term": term, "position": follower.position}})
        reign.turn()
        blobs.start()
        try:
            error = await reign.failed
            if isinstance(error, LogFenced):
                self._fenced_term = term
        finally:
            self._reign = self._writer = self._blobs = self._copies = None
            reign.close()
            await beside.stop()
            await blobs.close()
        raise error if isinstance(error, RoqError) else AssertionError(error)

    def _answer_copies(self, peer: bytes, id: int, answer: wire.Copies | RoqError) -> None:
        self._door.send(peer, seal_error(id, answer) if isinstance(answer, RoqError) else wire.seal_answer(id, answer))

    def _places(self, hosts: tuple[str, ...]) -> tuple[wire.Place, ...]:
        return self._blobs.places(hosts) if self._blobs is not None else ()

    def _drop(self, blobs: Iterable[BlobRef]) -> None:
        if self._blobs is not None:
            self._blobs.drop(blobs)

    async def serve(self) -> None:
        """Until stopped."""
        board = open_board(self._spec)
        self._tasks.start(beat(board, self._spec.slot), "heartbeat")
        self._tasks.start(self._run(), "reigns")
        announce_ready(self._spec)
        try:
            await self._stop.wait()
        finally:
            await self._tasks.stop()
            self._door.close()
            self._control.close()
            board.close()


def _settings(work: WorkQueueSpec) -> LogSettings:
    return LogSettings.model_validate({"write_quorum": work.write_quorum, "ack_quorum": work.ack_quorum})


def _contract_settings(work: WorkQueueSpec) -> TaskSettings:
    settings = work.settings
    return TaskSettings(settings.max_attempts, settings.dedup_seconds, settings.payload_bytes_max)


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises PortTaken."""
    await Master(spec, stop).serve()


def main(spec: ChildSpec) -> int:
    """Entry point of the forked child; its exit code."""
    return run(lambda stop: serve(spec, stop))

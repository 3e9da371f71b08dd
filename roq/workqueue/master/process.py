"""Master process: the active one of a work queue answers its clients, a standby follows the log and waits.

    standby ──activated──► take the log over ──► catch up with it ──► serve ──append failed──► retry
       ▲                       │ a later term has it                                              │
       └───────────────────────┴──────────────────────────────────────────────────────────────────┘

A group's master is also fed from the tapes of its queue, by a program that this one is started with (intake.py); another
forwards what transactions publish (outgoing.py).

Which one is active is the GCM's word (role and term in the ProcessSpec); that there is only one is the log's: taking it over
fences every other. Sockets: `clients`, whose requests are handed over one by one, without a task for each, and `control`
(Shutdown Monitor). Nothing is decided here: what is answered is service.py's, when it is appended and sent term.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from roq.coordination import paths
from roq.coordination.link import Check
from roq.coordination.session import Session
from roq.errors import (
    AccessDenied,
    CallError,
    DataLost,
    FrameError,
    InvalidConfiguration,
    LogFenced,
    NotLeader,
    NotReady,
    Overloaded,
    RoqError,
    TemporaryError,
    UnknownFormat,
)
from roq.log.replicated.reader import LogReader
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import LogSettings, RepairSettings
from roq.log.replicated.stores import StoreDirectory
from roq.log.replicated.writer import LogWriter
from roq.runtime.audit import acted, refused
from roq.runtime.backoff import delays
from roq.runtime.liveness import announce_ready, beat, open_board
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.router import Router
from roq.runtime.run import Tasks, run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import master as wire
from roq.wire.assignment import MonitorRole, ProcessSpec, from_json
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import EnvelopeKind, open_envelope, seal_error
from roq.wire.process import ChildSpec
from roq.wire.rights import ADMINISTRATIVE, allow_at_master
from roq.wire.task import StoreAddress
from roq.wire.work_queue import GroupSource, WorkQueueRecord, WorkQueueSpec
from roq.workqueue.master import closed
from roq.workqueue.master.blobs import BlobStores
from roq.workqueue.master.follower import LogFollower
from roq.workqueue.master.intake import GroupIntake
from roq.workqueue.master.outgoing import OutgoingOutbox
from roq.workqueue.master.registry import RegistryPace
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import MasterTerm, SteadyClock, snapshots
from roq.workqueue.records import BlobRef, Configure

LOST_RETRY_SECONDS = 5.0  # between two looks for what no store has any more
GRACE_MS = 2_000  # after a take-over no lease ends: those who hold one must find the new master first

COPIES_ASKED_MAX = 100  # people who ask at the same time whether all copies are there

FeedProgram = Callable[[str, GroupSource, GroupIntake], Coroutine[Any, Any, None]]  # by ZooKeeper's addresses; until cancelled
ForwardProgram = Callable[[str, OutgoingOutbox], Coroutine[Any, Any, None]]  # the same
_OF_PAYLOADS = (wire.Reserve, wire.PayloadStored)
log = logger(__name__)


class BesidePrograms(NamedTuple):
    """What runs beside a master that serves: feed fills a group, forward publishes what transactions say."""

    feed: FeedProgram
    forward: ForwardProgram


@dataclass(frozen=True)
class ServedTerm:
    """All of a term in which this master serves. asked: (peer, id) of those who wait for an answer about copies."""

    term: MasterTerm
    writer: LogWriter
    blobs: BlobStores
    repairer: LogRepairer
    beside: Tasks
    asked: list[tuple[bytes, int]] = field(default_factory=list)


class Master:
    """One master, active or standby, on the running loop."""

    def __init__(self, spec: ChildSpec, stop: asyncio.Event, programs: BesidePrograms) -> None:
        if spec.process.work is None:
            raise InvalidConfiguration("a master without a work queue")
        self._spec, self._stop, self._programs = spec, stop, programs
        self._process, self._work = spec.process, spec.process.work
        self.counters = Counters()
        self._clock = SteadyClock()
        self._serving: ServedTerm | None = None
        self._changed = asyncio.Event()
        self._trouble: RoqError | None = None  # why we can't serve although it is our turn
        self._fenced_term = 0  # a later one has the log: we are not active whatever our assignment says
        self._tasks = Tasks(lambda error: stop.set())
        control = spec.ports["control"]
        self._control = ShutdownMonitor(spec.process.name, spec.address, control, stop, self.counters, self._configure)
        self._refusals = Refusals(log, self.counters)
        self._allow = allow_at_master(spec.process.queue)
        self._router = Router(spec.address, spec.ports["clients"], self._message, self._taken)

    @property
    def _active(self) -> bool:
        return self._process.role is MonitorRole.ACTIVE and self._process.term > self._fenced_term

    def _configure(self, process: ProcessSpec) -> None:
        """A standby is activated, a term begins, or the quorums grow."""
        if (process.role, process.term) != (self._process.role, self._process.term):
            log.info("role changed", extra={"fields": {"role": str(process.role), "term": process.term}})
        self._process, self._work = process, process.work or self._work
        if (serving := self._serving) is not None:
            serving.writer.quorums = self._work.write_quorum, self._work.ack_quorum
            serving.term.service.shards, serving.term.service.closed = self._work.shards, self._work.closed
            serving.blobs.registry.configure(self._work)
        self._changed.set()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _message(self, parts: list[bytes]) -> None:
        try:
            call = wire.open_call(parts[-1])
        except UNDECODABLE as error:
            self._refuse(parts, error)
            return
        if len(parts) != 2:
            self._refusals.note("undecodable", FrameError(f"{len(parts)} parts instead of 2"))
            return
        self.counters["requests"] += 1
        if self._router.security is not None and not self._may(parts[0], call):
            return
        if type(call.body) in ADMINISTRATIVE:
            acted(self._router.card_of(parts[0]), call.body)
        self._take(parts[0], call.id, call.body)

    def _may(self, peer: bytes, call: wire.Call) -> bool:
        """Whether the peer's card has the right to it; if not, it is told which one is missing."""
        card = self._router.card_of(peer)
        try:
            if card is not None:
                self._allow(card, call.body)
        except AccessDenied as denied:
            self._refusals.note("denied", denied)
            refused(card, call.body, denied)
            self._router.send(peer, seal_error(call.id, denied))
            return False
        return card is not None or (self._router.security is not None and self._router.security.mixed)

    def _refuse(self, parts: list[bytes], error: Exception) -> None:
        """Whoever can be answered is."""
        self._refusals.note("undecodable", error)
        try:
            envelope = open_envelope(parts[-1])
        except FrameError:
            return
        if envelope.kind == EnvelopeKind.REQUEST and len(parts) == 2:
            self._router.send(parts[0], seal_error(envelope.id, FrameError(f"undecodable request: {error}")))

    def _take(self, peer: bytes, id: int, request: wire.Request) -> None:
        """Must not block, nor raise."""
        serving = self._serving
        if serving is None or serving.term.failed.done():
            leads = self._active and (serving is None or not isinstance(serving.term.failed.result(), LogFenced))
            trouble = self._trouble or NotReady("the master is just taking over")
            error = trouble if leads else NotLeader("this is not the active master")
            self._router.send(peer, seal_error(id, error))
        elif type(request) is wire.GetCopies:
            self._get_copies(serving, peer, id)
        elif isinstance(request, wire.CountHeld):
            count = serving.blobs.registry.held_on(request.host)
            self._router.send(peer, wire.seal_answer(id, wire.Counted(count)))
        elif serving.term.turned_away(peer, id, request):
            return
        elif self._work.source is not None and isinstance(request, wire.Put | wire.Reserve):
            text = f"{self._process.queue} is a group: it gets what is published to queue {self._work.source.queue}"
            self._router.send(peer, seal_error(id, CallError(text)))
        elif self._process.queue == wire.TRANSACTIONS and isinstance(request, wire.Put | wire.Reserve):
            self._router.send(peer, seal_error(id, CallError(f"{wire.TRANSACTIONS} is for transactions: it takes no tasks")))
        elif isinstance(request, _OF_PAYLOADS) and (refusal := self._closed_to(serving, request)) is not None:
            refuse = partial(self._router.send, peer, seal_error(id, refusal))
            serving.term.service.after(refuse, self._clock.now())  # one who was replaced must not say so
        elif isinstance(request, _OF_PAYLOADS):
            serving.blobs.take(peer, id, request)
        elif type(request) is wire.CountLeft and (pending := serving.blobs.registry.pending):
            self._router.send(peer, wire.seal_answer(id, wire.Counted(pending)))
        elif type(request) is wire.FindKeys and serving.blobs.registry.stores_keys(request.keys):
            self._router.send(peer, seal_error(id, NotReady("a task with one of these keys is being stored: ask again")))
        else:
            serving.term.take(peer, id, request)

    def _closed_to(self, serving: ServedTerm, request: wire.Reserve | wire.PayloadStored) -> RoqError | None:
        """Why a closed shard takes no payload; None: it does."""
        if not serving.term.service.closed:
            return None
        being_stored = serving.blobs.registry.stores(request.producer, request.sequence)
        return closed.refusal(serving.term.service.fold, request, being_stored)

    def _taken(self) -> None:
        """All that came together."""
        if self._serving is not None:
            self._serving.term.look()

    def _get_copies(self, serving: ServedTerm, peer: bytes, id: int) -> None:
        """Whether all that stores keep for this queue has all of its copies: asked by people who are about to replace a disk.
        All who ask while the stores are being asked get one answer."""
        if len(serving.asked) >= COPIES_ASKED_MAX:
            error = Overloaded("too many ask for the copies of this work queue: try again")
            self._router.send(peer, seal_error(id, error))
            return
        serving.asked.append((peer, id))
        if len(serving.asked) == 1:
            serving.beside.start(self._look_for_copies(serving), "copies")

    async def _look_for_copies(self, serving: ServedTerm) -> None:
        found: list[wire.Shortage] | RoqError
        try:
            found = await serving.repairer.copies() + await serving.blobs.copies()
        except RoqError as error:
            found = error
        for peer, id in serving.asked:
            sealed = seal_error(id, found) if isinstance(found, RoqError) else _copies(id, found)
            self._router.send(peer, sealed)
        serving.asked.clear()

    # --- terms --------------------------------------------------------------------------------------------------------

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
        """Follow, and when it is our turn, serve until something ends it."""
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
        serving = self._begin(follower, writer)
        term = serving.term
        self._serving, self._trouble = serving, None
        self.counters["terms"] += 1
        log.info("master serves", extra={"fields": {"term": self._process.term, "position": follower.position}})
        term.turn()
        serving.blobs.start()
        try:
            error = await term.failed
            if isinstance(error, LogFenced):
                self._fenced_term = self._process.term
        finally:
            self._serving = None
            term.close()
            await serving.beside.stop()
            await serving.blobs.close()
        raise error if isinstance(error, RoqError) else AssertionError(error)

    def _begin(self, follower: LogFollower, writer: LogWriter) -> ServedTerm:
        quiet_until = self._clock.now() + GRACE_MS if follower.position else 0
        inline, here = self._work.inline_bytes, self._router.peers.__contains__
        service = MasterService(follower.fold, follower.recent, self._process.term, inline, self._places, quiet_until, here)
        service.shards, service.closed = self._work.shards, self._work.closed
        term = MasterTerm(service, writer, self._router.send, self._drop, self._clock, self.counters)
        term.position = follower.position
        blobs = BlobStores(
            self._work, writer.stores, service, term.turn, term.barrier, self._clock.now, self.counters, RegistryPace()
        )
        if not service.fold.version:
            service.apply(Configure(self._clock.now(), self._work.settings, 0))
        beside, lost = Tasks(term.end), asyncio.Event()
        repairer = LogRepairer(writer, RepairSettings(), lost.set)
        beside.start(snapshots(term, writer, self.counters, lost), "snapshots")
        beside.start(repairer.run(), "repairs of the log")
        if (source := self._work.source) is not None:
            intake = GroupIntake(service, term, self._clock.now)
            beside.start(self._programs.feed(self._spec.zookeeper, source, intake), "feed")
        outbox = OutgoingOutbox(service, term, self._work.log, self._clock.now)
        beside.start(self._programs.forward(self._spec.zookeeper, outbox), "outbox")
        return ServedTerm(term, writer, blobs, repairer, beside)

    def _places(self, hosts: tuple[str, ...]) -> tuple[StoreAddress, ...]:
        return self._serving.blobs.places(hosts) if self._serving is not None else ()

    def _drop(self, blobs: Iterable[BlobRef]) -> None:
        if self._serving is not None:
            self._serving.blobs.drop(blobs)

    async def serve(self) -> None:
        """Until stopped."""
        board = open_board(self._spec)
        self._tasks.start(beat(board, self._spec.slot), "heartbeat")
        self._tasks.start(self._run(), "terms")
        announce_ready(self._spec)
        try:
            await self._stop.wait()
        finally:
            await self._tasks.stop()
            self._router.close()
            self._control.close()
            board.close()


def _copies(id: int, found: list[wire.Shortage]) -> bytes:
    return wire.seal_answer(id, wire.Copies(found[: wire.SHORTAGES_MAX]))


def _settings(work: WorkQueueSpec) -> LogSettings:
    return LogSettings.model_validate({"write_quorum": work.write_quorum, "ack_quorum": work.ack_quorum})


async def serve(spec: ChildSpec, stop: asyncio.Event, programs: BesidePrograms) -> None:
    """Serve until `stop`. Raises PortTaken."""
    await Master(spec, stop, programs).serve()


def main(spec: ChildSpec, programs: BesidePrograms) -> int:
    """Entry point of the forked child; its exit code."""
    return run(lambda stop: serve(spec, stop, programs))

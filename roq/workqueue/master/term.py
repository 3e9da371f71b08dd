"""One term of a master: requests that come together become one entry of the log, and are answered when it is durable.

At most APPENDS_AT_ONCE entries are on their way; what comes meanwhile waits for the next one, so a busy log grows by few large
entries and an idle one answers at once. The first append that fails ends the term: which of the last records took effect is
for the next one to find out. What is answered is decided in service.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from roq.errors import LogFenced, NotLeader, Overloaded, RoqError, TemporaryError
from roq.log.replicated.writer import LogWriter
from roq.runtime.backoff import delays
from roq.runtime.observe import Counters, logger
from roq.wire import master as wire
from roq.wire.envelope import seal_error
from roq.workqueue.master.dump import Dump
from roq.workqueue.master.service import Body, EntryBatch, MasterService
from roq.workqueue.records import BlobRef, encode

APPENDS_AT_ONCE = 2
TIMER_SECONDS_MAX = 5.0
SNAPSHOT_BYTES_MIN = 32 * 1024 * 1024  # of the log since the last snapshot
SNAPSHOT_RATIO = 3  # … and this many times the last snapshot's size, so that making them stays a small part of the work
SNAPSHOT_SEGMENTS = 100  # of the log are too many, however small: one without a snapshot ends at SEGMENTS_MAX
SNAPSHOT_LOOK_SECONDS = 2.0
SKEW_MS = 5_000  # between a master's clock and ZooKeeper's: more is logged

log = logger(__name__)


class EntryWriter(Protocol):
    """The log."""

    def write(self, entry: bytes, done: Callable[[int | RoqError], None]) -> None:
        """Calls `done` with the position when it and all before it are on stable storage, or with what stopped the log."""


class SteadyClock:
    """Milliseconds since 1970 that never step back or jump. wall: seconds since 1970, if not this machine's."""

    def __init__(self, wall: Callable[[], float] | None = None) -> None:
        self._wall = wall or time.time
        self._offset = self._wall() - time.monotonic()

    def now(self) -> int:
        """Now."""
        return int((self._offset + time.monotonic()) * 1000)

    def take_over(self, logged: int, witness: int) -> None:
        """Begin a term. logged: the highest time in the log; witness: what another machine's clock says now.

        Never before `logged`: one whose clock is behind its predecessor's would end no lease until it is not. Beyond that, the
        slower of the two clocks says how long nobody led: one that is far ahead alone would end every lease at once, and tasks
        at their last attempt with them. The faster one may be right: then leases run longer by the time without a leader.
        """
        own = round(self._wall() * 1000)
        if abs(own - witness) > SKEW_MS:
            log.warning(
                "clocks differ: the slower one is used",
                extra={"fields": {"own_ms": own, "zookeeper_ms": witness, "own_ahead_seconds": (own - witness) / 1000}},
            )
        self._offset = max(logged, min(own, witness)) / 1000 - time.monotonic()


class MasterTerm:
    """send(peer, message); drop(blobs): nobody needs them any more; `failed` has why it ended."""

    def __init__(
        self,
        service: MasterService,
        writer: EntryWriter,
        send: Callable[[bytes, bytes], bool],
        drop: Callable[[Iterable[BlobRef]], None],
        clock: SteadyClock,
        counters: Counters,
    ) -> None:
        self.service = service
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.position = 0  # of the newest durable entry
        self.bytes_written = 0
        self._writer, self._send, self._drop, self._clock, self._counters = writer, send, drop, clock, counters
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[EntryBatch] = deque()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0
        self._wanted: asyncio.Future[tuple[int, Dump]] | None = None
        self._dumped: tuple[EntryBatch, asyncio.Future[tuple[int, Dump]]] | None = None
        self._dump: Dump | None = None  # the newest

    def take(self, peer: bytes, id: int, request: wire.Request) -> None:
        """A request. `look` has to follow."""
        self.service.take(peer, id, request, self._clock.now())

    def turned_away(self, peer: bytes, id: int, request: wire.Request) -> bool:
        """Refuse it while so much waits for the log, at once: the log may stand still. Not so what is on its way already."""
        waiting = self.service.waiting
        if not waiting.full:
            return False
        if not waiting.join(peer, id, request):
            self._counters["turned_away"] += 1
            self._send(peer, seal_error(id, Overloaded("too much waits for this work queue's log: try again")))
        return True

    def turn(self) -> None:
        """`look` once this turn of the loop has taken in what there is."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.look)

    def look(self) -> None:
        """Append what there is, as far as that may be done at once."""
        self._scheduled = False
        if self.failed.done():
            return
        batches = self.service.batches
        if len(self._under_way) < APPENDS_AT_ONCE:
            self.service.cut()
        while batches:
            batch = batches[0]
            if not batch.records:
                batches.popleft()
                if self._under_way:  # it tells of what is not durable yet
                    self.service.waiting.follow(batch, self._under_way[-1])
                else:
                    self._settle(batch)
            elif len(self._under_way) < APPENDS_AT_ONCE:
                batches.popleft()
                self._append(batch)
            else:
                break
        if self._wanted is not None and not self.service.cut():
            self._begin_dump()
        self._set_timer()

    def _append(self, batch: EntryBatch) -> None:
        entry = encode(batch.records)
        self.bytes_written += len(entry)
        self._counters["entries"] += 1
        self._counters["records"] += len(batch.records)
        self._under_way.append(batch)
        try:
            self._writer.write(entry, partial(self._appended, batch))
        except RoqError as error:
            self.end(error)

    def _appended(self, batch: EntryBatch, result: int | RoqError) -> None:
        if self.failed.done():
            return
        if not isinstance(result, int):
            self.end(result)
            return
        assert self._under_way[0] is batch, "entries are durable in their order"
        self._under_way.popleft()
        self.position = result
        if self._dumped is not None and self._dumped[0] is batch:
            (_, wanted), self._dumped = self._dumped, None
            if not wanted.done() and self._dump is not None:
                wanted.set_result((self.position, self._dump))
        self._settle(batch)
        if self.service.batches or not self._under_way:
            self.look()

    def _settle(self, batch: EntryBatch) -> None:
        self.service.waiting.durable(batch)
        missed: list[Body] = []
        for peer, id, body in batch.answers:
            if not self._send(peer, seal_error(id, body) if isinstance(body, RoqError) else wire.seal_answer(id, body)):
                missed.append(body)
        if missed:
            self._missed(batch, missed)
        if batch.dropped:
            self._drop(batch.dropped)
        for call in batch.then:
            call()

    def _missed(self, batch: EntryBatch, missed: list[Body]) -> None:
        """Answers whose askers are gone. Leases nobody got to know of would be nobody's until they end."""
        self._counters["answers_undelivered"] += len(missed)
        reached = Counter(id(body) for _, _, body in batch.answers) - Counter(map(id, missed))
        for body in missed:
            if isinstance(body, wire.Leases) and body.tasks and id(body) not in reached:
                self.service.give_back(body.tasks, self._clock.now())
                self.turn()

    async def barrier(self) -> None:
        """Returns when all that was applied is durable; raises NotLeader if it never will be."""
        durable = asyncio.Event()
        self.service.after(durable.set, self._clock.now())
        self.turn()
        waiting = self._loop.create_task(durable.wait())
        try:
            ends: list[asyncio.Future[Any]] = [waiting, self.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not durable.is_set():
            raise NotLeader("this master serves no longer")

    def end(self, error: BaseException) -> None:
        """It can't go on."""
        if not self.failed.done():
            self.failed.set_result(error)

    def snapshot(self) -> asyncio.Future[tuple[int, Dump]]:
        """Position and dump of the state, as soon as they can be told together. One at a time."""
        self._wanted = self._loop.create_future()
        self.turn()
        return self._wanted

    def _begin_dump(self) -> None:
        """The state now is that behind the newest entry appended: nothing is applied and not appended."""
        wanted, self._wanted = self._wanted, None
        if wanted is None or wanted.done():
            return
        self._dump = Dump(self.service.fold)
        if self._under_way:
            self._dumped = (self._under_way[-1], wanted)
        else:
            wanted.set_result((self.position, self._dump))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        due = self.service.due()
        if due is None:
            return
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        seconds = min(max(due + 1 - self._clock.now(), 0) / 1000, TIMER_SECONDS_MAX)
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.failed.done():
            self.service.tick(self._clock.now())
            self.look()

    def close(self) -> None:
        """Do nothing more. Whoever waits for an answer is told that it will not come from here."""
        if self._timer is not None:
            self._timer.cancel()
        self.end(LogFenced("the term has ended"))
        if self._wanted is not None:
            self._wanted.cancel()
        if self._dumped is not None:
            self._dumped[1].cancel()
        if self._dump is not None:
            self._dump.discard()
        error = NotLeader("this master serves no longer")
        left = [(peer, id) for batch in self._under_way for peer, id, _ in batch.answers]
        for peer, id in (*left, *self.service.unanswered()):
            self._send(peer, seal_error(id, error))


async def snapshots(term: MasterTerm, writer: LogWriter, counters: Counters, lost: asyncio.Event) -> None:
    """Every so often, until the term ends; and when stores have lost what only the state in memory can replace."""
    written = size = 0
    pauses = delays(SNAPSHOT_LOOK_SECONDS, 60.0)
    while True:
        await asyncio.sleep(SNAPSHOT_LOOK_SECONDS)
        small = term.bytes_written - written < max(SNAPSHOT_BYTES_MIN, SNAPSHOT_RATIO * size)
        if small and len(writer.meta.segments) <= SNAPSHOT_SEGMENTS and not lost.is_set():
            continue
        lost.clear()  # what is lost still is found again in the next round of repairs
        position, dump = await term.snapshot()
        try:
            data = await dump.data()
            await writer.snapshot(position, data)
        except LogFenced:
            return  # the term ends by itself
        except TemporaryError as error:
            log.warning("snapshot could not be written", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(next(pauses))
            continue
        written, size = term.bytes_written, len(data)
        del data  # it is as large as the queue
        counters["snapshots"] += 1
        lost.clear()  # what was missed while this one was made
        pauses = delays(SNAPSHOT_LOOK_SECONDS, 60.0)

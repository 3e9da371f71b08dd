"""Drives one shuffle in one term: performs what its machine (roq.shuffle.plan) wants and feeds the results back, one event
after the other. What is asked of followers travels once however many attempts are committed: their digest stands for them, who
does not know it is told them in parts, and an answer in pages is put together. Not covered: who asks for what
(shuffle_leader.py), how a record is written (shuffle_store.py)."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from gcm.crash import crash_point
from gcm.followers import FollowerLinks
from gcm.shuffle_store import ShuffleStore
from gcm.term import LeaderTerm
from roq.errors import DataLost, FrameError, NotLeader, RoqError, ShuffleNotFound, StaleEpoch, WinnersUnknown
from roq.runtime.observe import logger
from roq.shuffle import events
from roq.shuffle.committed import CommittedAttempts, parts
from roq.shuffle.events import Event, Instruction
from roq.shuffle.plan import ShufflePlan, StageStep
from roq.shuffle.record import ShuffleRecord, new_table
from roq.shuffle.sampling import is_sound, key_count, message_bytes, reduced
from roq.wire import shuffle as wire
from roq.wire.shuffle import Cursor, RunSample, ShuffleState

log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
P = TypeVar("P", wire.Counts, wire.Samples)
SAMPLES_HELD = 16  # times the keys that are wanted; more are made fewer at once
SAMPLE_BYTES_MAX = 8 * 1024 * 1024  # of one answer
TELL_SECONDS = 20.0  # one part of the committed attempts
PAUSE_SECONDS = (0.1, 5.0)  # between two tries of one request to a follower
ASKS_AT_ONCE = 8  # of one host, of all shuffles
LATE_SECONDS = 0.01  # some loops' timers run 1 ms early


class FollowerRequest(Protocol):
    """A follower's answer (gcm/followers.py)."""

    async def __call__(self, host: str, request: msgspec.Struct, expect: type[T], seconds: float, /) -> T:
        """Raises what the follower raises, Unavailable, DeadlineExceeded, Closed."""


class Inquirer:
    """Of one shuffle. record: any of it; what is committed is said by each request."""

    def __init__(self, request: FollowerRequest, record: ShuffleRecord) -> None:
        self._request, self._record = request, record
        self._named: tuple[dict[int, str], CommittedAttempts] | None = None  # as they are in requests, and as they are told
        self._telling: dict[str, asyncio.Lock] = {}
        self._told: dict[str, int] = {}  # how often, by host

    async def answer(self, host: str, request: wire.Request, expect: type[msgspec.Struct], seconds: float) -> msgspec.Struct:
        """All of it. seconds: for each page. Raises what the follower raises, Unavailable, DeadlineExceeded, FrameError."""
        if not isinstance(request, wire.AboutCommitted):
            return await self._request(host, request, expect, seconds)
        committed = self._committed(request.committed)
        if len(committed):
            request = msgspec.structs.replace(request, committed={}, digest=committed.digest)
        ask = partial(self._one, host, committed, seconds)
        match request:
            case wire.CountRows():
                return await _counts(ask, request)
            case wire.TellSamples():
                return await _samples(ask, request, committed)
            case wire.FetchInterval():
                return await _fetched(ask, request)
            case _:
                return await ask(request, expect)

    def _committed(self, named: dict[int, str]) -> CommittedAttempts:
        if self._named is None or (self._named[0] is not named and self._named[0] != named):
            self._named = (named, CommittedAttempts(named))
        self._named = (named, self._named[1])
        return self._named[1]

    async def _one(
        self, host: str, committed: CommittedAttempts, seconds: float, request: msgspec.Struct, expect: type[T]
    ) -> T:
        """One page. Who does not know what is committed is told once, however many requests wait for that."""
        told = self._told.get(host, 0)
        try:
            return await self._request(host, request, expect, seconds)
        except WinnersUnknown:
            async with self._telling.setdefault(host, asyncio.Lock()):
                if self._told.get(host, 0) == told:
                    for part in parts(self._record.id, self._record.name, self._record.spec, committed):
                        await self._request(host, part, wire.FollowerDone, TELL_SECONDS)
                    self._told[host] = told + 1
        return await self._request(host, request, expect, seconds)


class PageRequest(Protocol):
    """One page of an answer."""

    async def __call__(self, request: msgspec.Struct, expect: type[T], /) -> T:
        """Raises as FollowerRequest."""


async def _pages(ask: PageRequest, request: wire.CountRows | wire.TellSamples, expect: type[P]) -> AsyncIterator[P]:
    """Raises FrameError: they do not go on."""
    begin: Cursor | None = request.begin
    while begin is not None:
        page = await ask(msgspec.structs.replace(request, begin=begin), expect)
        if page.next is not None and page.next <= begin:
            raise FrameError("pages do not go on")
        yield page
        begin = page.next


async def _fetched(ask: PageRequest, request: wire.FetchInterval) -> wire.Fetched:
    """When it is complete, however long that takes: each time the follower says that it goes on."""
    size, complete = 0, False
    while not complete:
        reply = await ask(request, wire.Fetched)
        size, complete = size + reply.size, reply.complete
    return wire.Fetched(size)


async def _counts(ask: PageRequest, request: wire.CountRows) -> wire.Counts:
    rows, sizes = [0] * len(request.intervals), [0] * len(request.intervals)
    async for page in _pages(ask, request, wire.Counts):
        if not len(rows) == len(page.rows) == len(page.sizes):
            raise FrameError("that does not answer what was asked")
        rows, sizes = [*map(add, rows, page.rows)], [*map(add, sizes, page.sizes)]
    return wire.Counts(rows, sizes)


async def _samples(ask: PageRequest, request: wire.TellSamples, committed: CommittedAttempts) -> wire.Samples:
    """All samples, or fewer that stand for them, as if they had been one page."""
    found: list[RunSample] = []
    keys = 0
    async for page in _pages(ask, request, wire.Samples):
        if not all(map(is_sound, page.samples)):
            raise FrameError("that does not answer what was asked")
        found += page.samples
        keys += key_count(page.samples)
        if request.keys and keys > SAMPLES_HELD * request.keys:
            found = await asyncio.to_thread(reduced, found, 4 * request.keys, 4 * SAMPLE_BYTES_MAX, committed.by)
            keys = key_count(found)
    if request.keys and (keys > 2 * request.keys or sum(map(message_bytes, found)) > SAMPLE_BYTES_MAX):
        found = await asyncio.to_thread(reduced, found, request.keys, SAMPLE_BYTES_MAX, committed.by)
    return wire.Samples(found)


# what answers a request, and how long that may take: of what comes in pages, one of them (roq/shuffle/node/queries.py)
ANSWERS: dict[type[msgspec.Struct], tuple[type[msgspec.Struct], float]] = {
    wire.CountRows: (wire.Counts, 30.0),
    wire.TellSamples: (wire.Samples, 30.0),
    wire.FetchInterval: (wire.Fetched, 60.0),
    wire.KeepIntervals: (wire.FollowerDone, 60.0),
    wire.ForgetShuffle: (wire.FollowerDone, 20.0),
    wire.TableChanged: (wire.FollowerDone, 5.0),
}


class DriverContext(NamedTuple):
    """What all shuffles of one term share. rooms: of requests to each host. deleted(id): every follower has forgotten it."""

    term: LeaderTerm
    links: FollowerLinks
    rooms: dict[str, asyncio.Semaphore]
    deleted: Callable[[str], None]


class Driver:
    """One shuffle. `start` it; its tasks end with the term, or with `stop`. A defect of ours ends that: the term goes on, this
    shuffle does not before the next leader reads it."""

    def __init__(self, plan: ShufflePlan, store: ShuffleStore, context: DriverContext) -> None:
        self.plan, self.store = plan, store
        self.refused: RoqError | None = None  # why the attempts named last can't be committed
        self.given_up: RoqError | None = None  # why it is left alone
        self._context = context
        self._events: deque[tuple[Event, asyncio.Future[None] | None]] = deque()
        self._work = asyncio.Event()
        self._changed: dict[asyncio.Future[None], None] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._tries: dict[int, int] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._running: asyncio.Task[None] | None = None
        self._inquirer = Inquirer(context.links.request, plan.record)

    @property
    def record(self) -> ShuffleRecord:
        """As it is written."""
        return self.plan.record

    def start(self) -> None:
        """From now on."""
        self._running = self._context.term.tasks.start(self._run(), f"shuffle {self.record.name}")

    def stop(self, reason: RoqError | None = None) -> None:
        """It is gone, or it is driven no longer and this is why: nothing holds on to it, nor does it to what holds on to it.
        What goes round in a circle stays until Python looks for circles, which it does the more seldom the more a process has;
        and what a timer holds, a term and all of its shuffles, stays until that goes off: after days."""
        self._leave(reason or ShuffleNotFound(f"shuffle {self.record.name!r} was removed"))
        if self._running is not None:
            self._running.cancel()
        self._running = None

    def feed(self, event: Event) -> None:
        """Let this happen."""
        if self.given_up is not None:
            return
        self._events.append((event, None))
        self._work.set()

    async def submit(self, event: Event) -> None:
        """Let this happen; returns when it was written, if that was needed. Raises what the machine raises, NotLeader."""
        self._check()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events.append((event, future))
        self._work.set()
        await self._or_over(future)

    async def until(self, done: Callable[[ShuffleRecord], bool]) -> ShuffleRecord:
        """The first record of which `done` is true. Raises what it raises, NotLeader."""
        while not done(self.record):
            self._check()
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed[future] = None
            try:
                await self._or_over(future)
            finally:
                del self._changed[future]
        return self.record

    def _check(self) -> None:
        """Raises why it was given up: an error of its own for each who asks, as an error that is raised holds on to them."""
        if self.given_up is not None:
            raise type(self.given_up)(str(self.given_up))

    async def _or_over(self, future: asyncio.Future[None]) -> None:
        over: list[asyncio.Future[Any]] = [future, self._context.term.ended]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            future.cancel()
            raise NotLeader("this Global Configuration Manager leads no longer")
        future.result()

    # --- one event after the other ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._events:
                    await self._handle(*self._events[0])
                    if self.given_up is not None:
                        return
                    self._events.popleft()
        except NotLeader:
            return  # the next leader goes on
        except Exception as error:  # noqa: BLE001 (a defect that concerns this shuffle only; it is logged)
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        fields = {"shuffle": self.record.name}
        log.error("shuffle failed and is not driven any further by this leader", exc_info=error, extra={"fields": fields})
        what = f"{type(error).__name__}: {error}"
        self._leave(RoqError(f"shuffle {self.record.name!r} is left alone until another GCM leads: {what}"))

    def _leave(self, reason: RoqError) -> None:
        self.given_up = reason
        for _, answer in self._events:
            if answer is not None and not answer.done():
                answer.set_exception(type(reason)(str(reason)))
                answer.exception()  # whoever asked may be gone: then nobody else looks at it
        self._events.clear()
        for timer in self._timers:
            timer.cancel()
        for task in self._asking.values():
            task.cancel()
        self._timers.clear()
        self._asking.clear()
        self._tell_changed()

    async def _handle(self, event: Event, answer: asyncio.Future[None] | None) -> None:
        try:
            out = deque(self.plan.handle(event, time.monotonic()))
        except RoqError as error:
            if answer is None or answer.done():
                raise
            answer.set_exception(error)
            return
        if isinstance(event, events.Commit):
            self.refused = None
        asked = self.plan.record
        while out:
            out.extend(await self._perform(out.popleft()))
        if isinstance(event, events.Answered):
            self._asking.pop(event.id, None)
            self._tries.pop(event.id, None)
        if not isinstance(event, events.Answered | events.FollowerFailed) or self.plan.record is not asked:
            self._cancel_asks()
        if answer is not None and not answer.done():
            answer.set_result(None)
        self._tell_changed()

    def _tell_changed(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)

    def _cancel_asks(self) -> None:
        """What is not waited for any more."""
        for id in [id for id in self._asking if not self.plan.outstanding(id)]:
            self._asking.pop(id).cancel()
            self._tries.pop(id, None)

    async def _perform(self, instruction: Instruction) -> list[Instruction]:
        match instruction:
            case events.WriteRecord(record):
                return await self._write(record)
            case events.Ask():
                self._asking[instruction.id] = self._start(lambda: self._ask(instruction), "ask")
            case events.ComputeTable():
                self._start(lambda: self._compute_table(instruction), "cut")
            case events.Refuse(error):
                log.warning(
                    "committed attempts were refused", extra={"fields": {"shuffle": self.record.name, "reason": str(error)}}
                )
                self.refused = error
            case events.Wake(seconds):
                if self.plan.step is StageStep.PAUSE:
                    fields = {"shuffle": self.record.name, "state": self.record.state, "stage": self.record.stage}
                    log.warning("shuffle data are not at their holders; counting again soon", extra={"fields": fields})
                loop = asyncio.get_running_loop()
                ahead = [timer for timer in self._timers if timer.when() > loop.time()]
                self._timers = [*ahead, loop.call_later(seconds + LATE_SECONDS, self.feed, events.TimePassed())]
            case events.DeleteShuffle():
                self._context.deleted(self.record.id)
        return []

    async def _write(self, record: ShuffleRecord) -> list[Instruction]:
        stage = "removed" if record.state is ShuffleState.REMOVED else str(record.stage)
        crash_point(f"shuffle.{stage}.decided")
        await self.store.write(record)
        crash_point(f"shuffle.{stage}.written")
        fields = {"shuffle": record.name, "state": record.state, "stage": record.stage, "table": record.epoch}
        log.info("shuffle state changed", extra={"fields": fields})
        return self.plan.handle(events.RecordWritten(), time.monotonic())

    # --- beside it ----------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], Awaitable[None]], what: str) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 (as above)
                self._give_up(error)

        return self._context.term.tasks.start(run(), f"shuffle {self.record.name}: {what}")

    async def _compute_table(self, job: events.ComputeTable) -> None:
        """In a thread: it may take seconds."""
        table = await asyncio.to_thread(new_table, job.record, job.samples, job.count, job.hosts)
        self.feed(events.TableComputed(job.id, table))

    async def _ask(self, ask: events.Ask) -> None:
        expect, seconds = ANSWERS[type(ask.request)]
        room = self._context.rooms.setdefault(ask.host, asyncio.Semaphore(ASKS_AT_ONCE))
        try:
            async with room:
                reply = await self._inquirer.answer(ask.host, self._addressed(ask.request), expect, seconds)
            self.feed(events.Answered(ask.id, reply))  # type: ignore[arg-type]  # one of wire.Reply: see ANSWERS
        except StaleEpoch as error:
            self._context.term.step_down(error)
        except RoqError as error:
            tries = self._tries[ask.id] = self._tries.get(ask.id, 0) + 1
            fields = {
                "shuffle": self.record.name,
                "host": ask.host,
                "request": type(ask.request).__name__,
                "reason": str(error),
            }
            log.info("request to a follower failed", extra={"fields": fields})
            longest = min(PAUSE_SECONDS[0] * 2**tries, PAUSE_SECONDS[1])
            await asyncio.sleep(longest * (0.5 + 0.5 * random.random()))
            self.feed(events.FollowerFailed(ask.id, isinstance(error, DataLost)))

    def _addressed(self, request: wire.Request) -> wire.Request:
        """With the endpoints of sources in place of their hosts."""
        if not isinstance(request, wire.FetchInterval):
            return request
        known = self._context.links.endpoints
        return msgspec.structs.replace(request, sources=[known[host] for host in request.sources if host in known])

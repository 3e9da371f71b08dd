"""Who listens, and what they are told: one look at the cluster, however many there are. It looks while somebody listens, or
asked for an overview not long ago.

    overview      the cluster in a few numbers, at once and when they have changed
    cluster       what happened (roq/client/events.py)
    unreachable   since when, and why; told to whoever comes meanwhile, too
    reachable     again
    cut           last, and why: too slow, signed out, the console ends

Each listener has LINE_MAX events that wait for it, or is cut: nobody's slowness costs more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

import msgspec

from roq.console.errors import TooManyStreams
from roq.console.problem import advice_on
from roq.console.source import ClusterOutage, ConsoleSource
from roq.console.summary import ClusterSummary, summarize
from roq.errors import RoqError, Unavailable
from roq.runtime.observe import logger

LISTENERS_MAX = 400  # streams of all kinds, of which a page has two or three: each is a connection and some tasks
LINE_MAX = 256
LINGER_SECONDS = 15.0  # after the last listener: a page that is reloaded finds numbers
LOOK_SECONDS = 1.0  # between two looks whether anybody is left
RETRY_SECONDS = 1.0
log = logger(__name__)
Event = tuple[str, bytes]  # name, JSON


class LiveListener:
    """One stream. still(): raises why it may not listen any more."""

    def __init__(self, still: Callable[[], None]) -> None:
        self.line: asyncio.Queue[Event] = asyncio.Queue(LINE_MAX)
        self.still = still
        self.cut = ""

    def tell(self, event: Event) -> None:
        """Or cut it."""
        if self.cut:
            return
        try:
            self.line.put_nowait(event)
        except asyncio.QueueFull:
            self.end(f"{LINE_MAX} events were not read in time")

    def end(self, reason: str) -> None:
        """What waits is dropped; its last event says why."""
        self.cut = reason
        while not self.line.empty():
            self.line.get_nowait()
        self.line.put_nowait(("cut", msgspec.json.encode({"reason": reason})))


class Streams:
    """How many are open, of all kinds."""

    def __init__(self) -> None:
        self.open = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Raises TooManyStreams."""
        if self.open >= LISTENERS_MAX:
            raise TooManyStreams
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Hub:
    """Of one console."""

    def __init__(self, source: ConsoleSource) -> None:
        self._source = source
        self._listeners: set[LiveListener] = set()
        self._task: asyncio.Task[None] | None = None
        self._wanted = 0.0
        self._told: ClusterSummary | None = None
        self._outage: ClusterOutage | None = None
        self.closed = asyncio.Event()

    def want(self) -> None:
        """Look, for some time from now on."""
        self._wanted = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    def add(self, listener: LiveListener) -> None:
        """Told what is so now, then what happens."""
        self._listeners.add(listener)
        if self._source.outage is not None:
            listener.tell(_unreachable(self._source.outage))
        elif self._told is not None:
            listener.tell(_overview(self._told))
        self.want()

    def remove(self, listener: LiveListener) -> None:
        """It has gone."""
        self._listeners.discard(listener)

    async def close(self) -> None:
        """All streams end."""
        self.closed.set()
        for listener in list(self._listeners):
            listener.end("the console ends")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        tasks = [asyncio.create_task(work()) for work in (self._source.beat, self._source.watch, self._changes, self._events)]
        try:
            while self._listeners or time.monotonic() - self._wanted < LINGER_SECONDS:
                await asyncio.wait(tasks, timeout=LOOK_SECONDS)
                for task in tasks:
                    if task.done():
                        task.result()  # raises: they run for ever
                await self._source.take_access()
                for listener in list(self._listeners):
                    self._check(listener)
        except Exception:
            log.exception("the look at the cluster ended")
            for listener in list(self._listeners):
                listener.end("the console failed: its log says how")
        finally:
            ended = time.monotonic()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._told = self._source.live = None  # too old for who comes next
            if not self.closed.is_set() and (self._wanted > ended or any(not one.cut for one in self._listeners)):
                self._task = asyncio.create_task(self._look())  # of those who came meanwhile

    def _check(self, listener: LiveListener) -> None:
        try:
            listener.still()
        except RoqError as error:
            listener.end(str(error))

    def _tell(self, event: Event) -> None:
        for listener in list(self._listeners):
            listener.tell(event)

    async def _changes(self) -> None:
        while True:
            await self._source.changed.wait()
            self._source.changed.clear()
            outage = self._source.outage
            if outage != self._outage:
                self._tell(_reachable(self._outage) if outage is None else _unreachable(outage))
                self._outage = outage
            if outage is None:
                await self._look_at_numbers()

    async def _look_at_numbers(self) -> None:
        try:
            found = summarize(await self._source.view(), self._source.live)
        except RoqError as error:  # the next look tells
            log.info("no overview was made", extra={"fields": {"reason": str(error)}})
            return
        before, self._told = self._told, found
        if before is None or _timeless(before) != _timeless(found):
            self._tell(_overview(found))

    async def _events(self) -> None:
        while True:
            try:
                async with aclosing(self._source.cluster.events()) as events:
                    async for event in events:
                        self._source.has_changed()  # who is told looks at once
                        told = {**msgspec.to_builtins(event), "sentence": str(event)}
                        self._tell(("cluster", msgspec.json.encode(told)))
            except RoqError as error:
                log.info("events can't be had", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(RETRY_SECONDS)


def _timeless(found: ClusterSummary) -> ClusterSummary:
    """As it would be at no particular moment: two of them differ by what they say of the cluster."""
    rates = None if found.rates is None else msgspec.structs.replace(found.rates, time=0.0)
    return msgspec.structs.replace(found, time=0.0, rates=rates)


def _overview(found: ClusterSummary) -> Event:
    return "overview", msgspec.json.encode(found)


def _unreachable(outage: ClusterOutage) -> Event:
    told = {**msgspec.structs.asdict(outage), "advice": advice_on(Unavailable())}
    return "unreachable", msgspec.json.encode(told)


def _reachable(outage: ClusterOutage | None) -> Event:
    return "reachable", msgspec.json.encode({"since": outage.since if outage is not None else None, "until": time.time()})

"""What a subscriber has read and its application has not taken yet: handed out message by message or in lists.

For those who derive: `look()` before the application waits, `took()` after it took something, `holds_back()` whether something
older than what comes now will be put in later, `behind_since()` when that was written which was not read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from operator import length_hint
from typing import NamedTuple

from roq.errors import MessagesLost, RoqError
from roq.pubsub.latest import LatestByTopic, messages_of
from roq.pubsub.subscription import Batch, Message
from roq.wire.where import Where

BATCHES_WITHOUT_BREATH = 16  # handed out before the loop gets a turn, however much there is to read
LATENCIES_KEPT = 512
LATENCIES_SECONDS = 10.0  # older ones don't say how it is now, however few came since
UNSAID_SECONDS = 30.0  # until it is known what was lost: a path's end is waited for, a publisher that died is missed after 10 s
EXPIRED = -1  # in place of an entry's number: nothing is left of that tape


class Reached(NamedTuple):
    """Everything up to these entries is in the inbox before this: one of each tape, by Exchange. The last item of the inbox
    takes what is reached next, so there are never more of them than of messages and losses, and one."""

    entries: dict[str, int]


class Latencies:
    """Seconds from a batch's opening to its taking: the last one, and those before it. since: nanoseconds since 1970; what is
    older was recorded, and says nothing of latency."""

    def __init__(self) -> None:
        self.since = 0.0
        self.last = 0.0
        self.kept: deque[tuple[int, float]] = deque(maxlen=LATENCIES_KEPT)  # and when it was taken, in ns since 1970

    def all(self, now_ns: int) -> tuple[float, float, float]:
        """The last one, and of those of the last seconds median and 99th percentile; 0.0: there are none."""
        oldest = now_ns - int(LATENCIES_SECONDS * 1e9)
        ordered = sorted(latency for taken, latency in self.kept if taken >= oldest)
        half = ordered[len(ordered) // 2] if ordered else 0.0
        most = ordered[int(len(ordered) * 0.99)] if ordered else 0.0
        return self.last, half, most


class Inbox:
    """Iterate it, or take `batches`."""

    def __init__(self, on_lost: Callable[[MessagesLost], None], where: Where | None = None, *, latest: bool = False) -> None:
        """latest: until `give_latest` only the latest message of each topic is wanted of what is given to `keep_latest`."""
        self.lost = self.messages = self.bytes = 0
        self.unselected = 0  # messages for which `where` was not true
        self._on_lost = on_lost
        self._where = where
        self._buffer: deque[Batch | MessagesLost | Reached] = deque()
        self._buffered = 0
        self._in_hand: int | None = None  # time of the batch that the application was given; None: it asks for the next
        self._done: dict[str, int] = {}  # entries of tapes up to which everything was taken, by Exchange
        self._marks: dict[str, int] = {}  # entries that were read, while something is held back
        self._unsaid: dict[str, float] = {}  # by Exchange: until then something may be lost that was not reported (monotonic)
        self._current: Iterator[Message] = iter(())
        self._waiters: list[asyncio.Future[None]] = []
        self._failure: RoqError | None = None
        self._closed = False
        self._breath = 0
        self._latest = LatestByTopic(where) if latest else None
        self._latencies = Latencies()

    def look(self) -> None:
        """Read what there is; the application waits for it."""
        raise NotImplementedError

    def took(self) -> None:
        """There is more room."""
        raise NotImplementedError

    def holds_back(self) -> bool:
        """Whether something that was read is not in here yet."""
        raise NotImplementedError

    def behind_since(self, now_ms: int) -> list[int]:
        """Of each place that may have what is not in here yet: about when that was written (milliseconds since 1970)."""
        raise NotImplementedError

    def behind_ms(self, now_ms: int) -> int:
        """Of one that reads tapes: 0 if the application is done with everything that is stored, as far as was seen in the last
        seconds; else how long ago that was written which comes next, at least 1. now_ms: since 1970, by this host's clock."""
        first = next((item.header.timestamp for item in self._buffer if isinstance(item, Batch)), None)
        times = self.behind_since(now_ms) + [one // 1_000_000 for one in (self._in_hand, first) if one is not None]
        if self._failure is not None:
            times.append(now_ms)
        return max(1, now_ms - min(times)) if times else 0

    def rests(self) -> bool:
        """Does nobody wait for messages? An application does."""
        return False

    def reached(self, exchange: str, entry: int) -> None:
        """All of this entry of the Exchange's tape was read (EXPIRED: the tape is forgotten). It counts once all that is held
        back is in here, too."""
        self._marks[exchange] = entry
        self.put_marks()

    def begins_behind(self, exchange: str, entry: int | None = None) -> None:
        """A connection to the Exchange did, by its tape; None: that is not known yet. What lies between this and what counts
        may not have come, which is reported when its publishers are heard again: no other entry of any tape counts before."""
        known = (one.entries for one in self._buffer if isinstance(one, Reached))
        if entry is None or entry > max(entries.get(exchange, 0) for entries in (self._done, *known)):
            self._unsaid[exchange] = time.monotonic() + UNSAID_SECONDS
        else:
            self._unsaid.pop(exchange, None)

    def put_marks(self) -> None:
        """Of entries all of which is in here by now. Also to be called now and then."""
        if not self._marks or self.holds_back() or self._latest or max(self._unsaid.values(), default=0.0) > time.monotonic():
            return
        marks, self._marks = self._marks, {}
        last = self._buffer[-1] if self._buffer else None
        if isinstance(last, Reached):
            last.entries.update(marks)  # nothing in between
        else:
            self._buffer.append(Reached(marks))
        self._wake()

    def _count(self, reached: Reached) -> None:
        for exchange, entry in reached.entries.items():
            if entry == EXPIRED:
                self._done.pop(exchange, None)
            else:
                self._done[exchange] = max(entry, self._done.get(exchange, 0))

    def keep_latest(self, before: int) -> None:
        """Of what came into the inbox behind so many items."""
        if self._latest is not None:
            self._buffered -= self._latest.take(self._buffer, before)

    def give_latest(self) -> None:
        """Everything is wanted from now on."""
        latest, self._latest = self._latest, None
        if latest is not None:
            batches = latest.give()
            self._buffer.extend(batches)
            self._buffered += sum(batch.size for batch in batches)
            self.put_marks()
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @property
    def taken(self) -> int:
        """Messages that the application is done with, or has before it."""
        return self.messages + self.unselected - length_hint(self._current)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        while True:
            for message in self._current:
                yield message
            batch = await self.next_batch()
            if batch is None:
                return
            self._current = iter(batch)

    async def __anext__(self) -> Message:
        """One message; for `await anext(subscriber)`."""
        while True:
            for message in self._current:
                return message
            batch = await self.next_batch()
            if batch is None:
                raise StopAsyncIteration
            self._current = iter(batch)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """The messages in lists as they arrive, each list of one publisher and topic; cheaper than one by one."""
        rest = list(self._current)
        if rest:
            yield rest
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> list[Message] | None:
        """The next messages, of one publisher and topic; None once closed. Raises SlowSubscriber, or what `on_lost` raises."""
        self._in_hand = None
        while True:
            self._breath += 1
            if self._breath >= BATCHES_WITHOUT_BREATH:
                self._breath = 0
                await asyncio.sleep(0)
            while not self._buffer:
                if self._closed:
                    return None
                if self._failure is not None:
                    raise self._failure
                self.look()
                if not self._buffer:
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.remove(waiter)
            item = self._buffer.popleft()
            if isinstance(item, MessagesLost):
                self.lost += item.count
                self._on_lost(item)
                continue
            if isinstance(item, Reached):
                self._count(item)
                continue
            self._buffered -= item.size
            self.took()
            self.bytes += item.size
            timestamp, latencies = item.header.timestamp, self._latencies
            if timestamp >= latencies.since:
                taken = time.time_ns()
                latencies.last = max(0.0, (taken - timestamp) / 1e9)
                latencies.kept.append((taken, latencies.last))
            messages = messages_of(item)
            if self._where is not None:
                self.unselected += len(messages)
                messages = self._where.select(messages)
                self.unselected -= len(messages)
            self.messages += len(messages)
            if messages:
                self._in_hand = timestamp
                return messages

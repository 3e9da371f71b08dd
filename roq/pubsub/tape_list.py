"""The tapes of a recorded queue, as far as one subscriber reads them: which there are, where it begins, what may be unread.

A tape that was read to its end is left, and taken up again where it was when its Exchange writes on. One that has expired
altogether is reported if there was more on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from roq.coordination.locate import GcmClient
from roq.errors import MessagesLost, NotRecorded
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.pubsub.order import FOREVER, Origin
from roq.pubsub.outage import Outage
from roq.pubsub.start import LIVE, Start, time_ms
from roq.pubsub.tape import LATELY_SECONDS, SKEW_MS, UNCONFIRMED_MS, Tape, has_older
from roq.pubsub.tape_looks import FoundTapes, look_at_tapes
from roq.wire import gcm
from roq.wire.assignment import from_json
from roq.wire.recording import TapePosition

RECENT_SECONDS = 1.0  # so old may be what is said of the tapes' segments


class TapeList:
    """name: the queue's part of the tapes' names. reading: by Exchange. looked, looked_ms: when the last look began (monotonic
    seconds, 0: look at once; milliseconds since 1970). recorded, since: at that look, whether the queue is, see wire.gcm.Tapes.
    outage: of the GCM, or of a tape's stores.

    on_missed: a range of entries that had expired. on_expired(exchange): of whose tape nothing is left. wants: the topics that
    are read; None: all."""

    def __init__(
        self,
        client: GcmClient,
        queue: str,
        start: Start,
        on_missed: Callable[[MessagesLost], None],
        on_expired: Callable[[str], None],
        wants: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._client, self._queue, self._start = client, queue, start
        self._on_missed, self._on_expired, self._wants = on_missed, on_expired, wants
        self._directory = StaticDirectory({})
        self.stores = Stores(self._directory)
        self.outage = Outage("the tapes can't be read now", queue=queue)
        self.name = ""
        self.reading: dict[str, Tape] = {}
        self.looked = 0.0
        self.looked_ms = 0
        self._first_ms = 0  # the first look
        self.recorded, self.since = True, 0
        self._read: dict[str, int] = {}  # up to where a tape was read that is not read any more; it may grow again
        self._found: gcm.Tapes | None = None  # by the last look
        self._left: set[str] = set()  # Exchanges that are not read from their tapes
        self.early_ms = 0  # so much before its time a reader that begins at one is told what there is
        self.begins: dict[str, int] = {}  # of that one: the entry before its time, by Exchange

    def begin_behind(self, position: TapePosition) -> None:
        """There, instead of where it was to begin. Before the first look."""
        self._start = position

    async def look(self) -> None:
        """Which tapes there are, and where. Raises QueueNotFound, NotRecorded, Unavailable, DeadlineExceeded."""
        self.know(await self.ask())

    async def ask(self, since: float | None = None) -> FoundTapes:
        """The GCM's answer, for `know`, to a question of that time or later (monotonic); of now. Raises as `look`."""
        return await look_at_tapes(self._client, self._queue, time.monotonic() if since is None else since)

    async def unread_now(self) -> list[tuple[Tape, LogMeta]]:
        """All tapes that are read or are still to be, with their segments of now: who stands still looks at nothing, while what
        it reads goes on in other segments, and on other tapes. Raises as `look`."""
        found, *_ = await self.ask(time.monotonic() - RECENT_SECONDS)
        self._directory.endpoints.update(found.stores)
        views = [view for view in found.views if view.exchange not in self._read or view.exchange in self.reading]
        return [
            (
                self.reading.get(view.exchange) or Tape(view, self.stores, (self._queue, found.made_by)),
                from_json(view.meta, LogMeta),
            )
            for view in views
        ]

    def know(self, answer: FoundTapes) -> bool:
        """These are the tapes; whether that is the same as before. Raises NotRecorded: they are another queue's."""
        found, began, began_ms = answer
        if self.name not in ("", found.tapes):
            raise NotRecorded(f"queue {self._queue!r} was removed and created anew: what was on its tapes is gone")
        self.name, self.looked, self.looked_ms = found.tapes, began, began_ms
        self.recorded, self.since = found.recorded, found.since
        self._first_ms = self._first_ms or began_ms
        self._directory.endpoints.update(found.stores)
        self._directory.alive.update(found.stores)
        for view in found.views:
            if view.exchange in self.reading:
                self.reading[view.exchange].update(view)
            elif view.exchange not in self._left:
                tape = Tape(view, self.stores, (self._queue, found.made_by))
                if self._wants is not None:
                    tape.select(self._wants)
                begin = 0 if isinstance(self._start, TapePosition) else tape.metadata.trimmed
                tape.done = self._read.get(view.exchange, begin)
                if view.exchange not in self._read or not tape.ended:
                    self.reading[view.exchange] = tape
        self._forget({view.exchange for view in found.views})
        same, self._found = found == self._found, found
        return same

    def _forget(self, there: set[str]) -> None:
        """The others have expired altogether."""
        for exchange in self.reading.keys() - there:
            tape = self.reading[exchange]
            if not tape.ended:
                self._on_missed(MessagesLost(0, "", tape.done + 1, max(tape.done + 1, tape.metadata.next_first - 1), 0))
            self.leave(exchange)
        for exchange in self._read.keys() - there:
            del self._read[exchange]
            self._on_expired(exchange)

    async def seek(self) -> None:
        """To where reading begins. Raises InvalidPosition, LogUnavailable, DataLost."""
        start, tapes = self._start, self.reading.values()
        if start == LIVE:
            await asyncio.gather(*(tape.seek_end() for tape in tapes))
        elif isinstance(start, datetime | timedelta):
            since = time_ms(start)
            await asyncio.gather(*(self._seek(tape, since) for tape in tapes))
        elif isinstance(start, TapePosition):
            start.check_queue(self.name)
            for exchange, done in start.done.items():
                if exchange in self.reading:
                    self.reading[exchange].begin_behind(done)
                else:  # its tape has expired, nobody knows whether there was more on it
                    self._on_missed(MessagesLost(0, "", done + 1, done + 1, 0))

    async def _seek(self, tape: Tape, since_ms: int) -> None:
        if self.early_ms:
            await tape.seek(since_ms - self.early_ms)
        early = tape.done
        await tape.seek(since_ms)
        self.begins[tape.exchange.id] = tape.done
        tape.done = early if self.early_ms else tape.done

    async def ends(self) -> dict[str, int]:
        """The last entry of each tape that is known to be stored, by Exchange; not of those whose stores don't answer."""
        tapes = list(self.reading.values())
        found = await asyncio.gather(*(tape.confirmed_end(tape.metadata) for tape in tapes), return_exceptions=True)
        return {tape.exchange.id: end for tape, end in zip(tapes, found, strict=True) if isinstance(end, int)}

    def leave(self, exchange: str, *, for_good: bool = False) -> None:
        """Read its tape no longer. for_good: even if it grows; what comes from this Exchange comes from elsewhere."""
        if exchange in self.reading:
            self._read[exchange] = self.reading.pop(exchange).done
        if for_good:
            self._left.add(exchange)

    def take_up(self, exchange: str) -> None:
        """Read its tape again, if there is one."""
        self._left.discard(exchange)

    def unread(self, exchange: str, origin: Origin) -> bool:
        """As has_older, of what is read. An Exchange that is not known may have a tape that was made just now."""
        if exchange in ("", origin[0]) or exchange in self.reading or exchange in self._read or exchange in self._left:
            return has_older(self.reading, exchange, origin)
        return self.looked_ms - UNCONFIRMED_MS <= origin[1] + SKEW_MS and origin[1] != FOREVER

    def unread_at(self, exchange: str) -> float:
        """When what this Exchange's tape has (or "": any) last lay unread; now, while it does (monotonic)."""
        now = time.monotonic()
        return max((tape.unread_at(now) for name, tape in self.reading.items() if exchange in ("", name)), default=0.0)

    def behind_since(self, now_ms: int) -> list[int]:
        """Of each tape that was not seen at its end lately: when what follows was written, as far as is known; likewise of
        tapes that may have been made since the last look (milliseconds since 1970). now_ms: by this host's clock."""
        now = time.monotonic()
        times = [since for tape in self.reading.values() if (since := tape.behind_since(now)) is not None]
        unlisted = [self.looked_ms] if now_ms - self.looked_ms > LATELY_SECONDS * 1000 else []
        return [since or self._first_ms for since in times] + unlisted

    def switched_on(self) -> int:
        """See wire.gcm.Tapes, since."""
        return self.since

    @property
    def more(self) -> bool:
        """More may come from some tape, also if there is none just now: what was written last by an Exchange that is gone can
        be read when its tape is closed."""
        return any(not tape.ended for tape in self.reading.values())

"""What a subscriber that follows what is stored asks beside its reading: each tape at whose end it is for more, and the GCM
which tapes there are. Stores hold such a question until there is an answer, for as long as nobody waits for it. There may be a
thousand such subscribers, so one to whom nothing comes asks seldom.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from roq.errors import DataLost, LogUnavailable, RoqError
from roq.pubsub.tape import Tape
from roq.pubsub.tape_list import TapeList
from roq.pubsub.tape_looks import FoundTapes
from roq.runtime.observe import logger

POLL_SECONDS = 3.0  # a store that has no more of a tape answers then, or when it has
WAITED_SECONDS = 0.3  # the same while somebody waits until it is certain that there is no more
RETRY_SECONDS = 0.5  # after a store did not answer
LOST_SECONDS = 5.0  # what no host has is not lost before that: disks come back, and copies are made
WATCH_SECONDS = 0.8  # between two looks at which tapes there are
FLOWING_SECONDS = 2.0  # at most, each twice as long as the one before while the answer is the same and nobody waits
QUIET_SECONDS = 5.0  # the same while nothing comes, and has not for the next: readers are many, and one GCM answers all
FLOW_SECONDS = 3.0

log = logger(__name__)
T = TypeVar("T")


class TapeWatches:
    """Of one subscriber. waits: whether something waits for the end of a tape. missed(tape, count): so many entries that no
    host has any more, the last of which it is now behind. `news` is set when an answer is there."""

    def __init__(self, queue: str, tapes: TapeList, waits: Callable[[], bool], missed: Callable[[Tape, int], None]) -> None:
        self._queue, self._tapes, self._waits, self._missed = queue, tapes, waits, missed
        self.news = asyncio.Event()
        self._asked: dict[Tape, asyncio.Task[int]] = {}
        self._patient: set[Tape] = set()  # those of them who were asked while nobody waited for the answer
        self._looking: asyncio.Task[FoundTapes] | None = None
        self._pause = WATCH_SECONDS
        self._handed_at = 0.0  # when something was handed out last (monotonic)
        self._stirred = asyncio.Event()  # something was handed out, waits, or failed since it was looked last

    def __contains__(self, tape: object) -> bool:
        return tape in self._asked

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, tape: Tape) -> None:
        """For more, until there is some."""
        self._asked[tape] = self._listen_to(self._more(tape))

    def handed_out(self) -> None:
        """Something comes."""
        self._handed_at = time.monotonic()
        self._stirred.set()

    def hurry(self) -> None:
        """If somebody waits by now: what was asked while nobody did is asked anew."""
        if not self._waits():
            return
        self._stirred.set()
        for tape in [tape for tape in self._asked if tape in self._patient]:
            self._asked.pop(tape).cancel()
        self._patient.clear()

    def answers(self) -> Iterator[tuple[Tape, int | BaseException]]:
        """What is there, see Tape.fetch; tapes that are not read any more are not asked any more."""
        for tape, asked in list(self._asked.items()):
            if self._tapes.reading.get(tape.exchange.id) is not tape:
                asked.cancel()
                del self._asked[tape]
            elif asked.done():
                del self._asked[tape]
                yield tape, asked.exception() or asked.result()

    def look(self) -> None:
        """Know which tapes there are if that was answered, and go on asking."""
        looking = self._looking
        if looking is None or looking.done():
            self._looking = self._listen_to(self._look_later())
            if looking is not None:
                same = self._tapes.know(looking.result())
                self._pause = min(2 * self._pause, QUIET_SECONDS) if same else WATCH_SECONDS

    def close(self) -> None:
        """Ask no more."""
        for task in (*self._asked.values(), *([self._looking] if self._looking is not None else [])):
            task.cancel()

    def _listen_to(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=f"tapes of {self._queue}")
        task.add_done_callback(self._is_news)
        return task

    def _is_news(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # nobody may ask any more
        self.news.set()

    async def _more(self, tape: Tape) -> int:
        """Until there is more of it; see Tape.fetch. Entries that no host has any more are passed over, after a while."""
        lost_at = math.inf
        while not (tape.ahead or tape.ended):
            try:
                if missed := await self._fetch(tape):
                    return missed
            except LogUnavailable as error:
                self._stirred.set()
                self._tapes.outage.failed(error)
                await asyncio.sleep(RETRY_SECONDS)
            except DataLost as error:
                self._stirred.set()
                lost_at = min(lost_at, time.monotonic())
                if self._tapes.looked <= lost_at or time.monotonic() - lost_at < LOST_SECONDS:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                log.error("going on without an entry of a tape: %s", error, extra={"fields": {"queue": self._queue}})
                tape.done += 1
                self._missed(tape, 1)
        return 0

    async def _fetch(self, tape: Tape) -> int:
        if not (waits := self._waits()):
            self._patient.add(tape)
        try:
            return await tape.fetch(WAITED_SECONDS if waits else POLL_SECONDS, waits)
        finally:
            self._patient.discard(tape)

    def _look_pause(self) -> float:
        """Between two looks at which tapes there are."""
        if self._waits() or any(not tape.looked for tape in self._asked):
            return WATCH_SECONDS
        return self._pause if time.monotonic() - self._handed_at > FLOW_SECONDS else min(self._pause, FLOWING_SECONDS)

    async def _look_later(self) -> FoundTapes:
        while True:
            self._stirred.clear()
            await asyncio.sleep(WATCH_SECONDS)
            if (left := self._tapes.looked + self._look_pause() - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._stirred.wait()
                continue
            try:
                return await self._tapes.ask(time.monotonic() - self._look_pause() / 2)
            except RoqError as error:
                self._tapes.outage.wait_out(error)

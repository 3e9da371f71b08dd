"""A durable subscriber's position: asked for when it opens, kept in the cluster while it reads.

Whoever opens a name holds it, with a token drawn for that; the leading GCM refuses what any other holder wants kept. The
position is looked at once in a while, so messages cost nothing more, and it may be late: what was taken since it was kept last
comes again after a crash. It names only what the application came back from, so nothing is left out that came here. In a queue
with overflow "drop" an Exchange may drop what is on its tape before a live subscriber has it: that is reported as lost, and the
position moves past it; one that follows what is stored, or nothing, gets it. While no GCM leads, messages flow on and the
position waits. Not covered: what a position is (roq/wire/recording.py), where it is kept (gcm/durables.py).
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable

from roq.coordination.locate import GcmClient
from roq.errors import Closed, DurableTaken, MessagesLost, ProcessFailed, RoqError
from roq.ids import check_name, new_token
from roq.pubsub.inbox import Reached
from roq.pubsub.outage import Outage
from roq.pubsub.past import Past
from roq.pubsub.start import LAST, Start
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.tape_looks import describe_tapes
from roq.runtime.observe import logger
from roq.wire.durables import DurablePosition, KeepPosition, OpenDurable
from roq.wire.gcm import Done
from roq.wire.recording import TapePosition

log = logger(__name__)
KEEP_SECONDS = 1.0  # between two positions that are kept
REQUEST_SECONDS = 10.0
MOMENT_SECONDS = 0.1  # for a request, however little time is left
TAPES_KEPT = 500  # in a position; beyond it is asked which tapes have expired: Exchanges come and go
LOOK_SECONDS = 3600.0  # and so often in any case: what is named and gone is reported as lost when the name is opened again


class PositionKeeper:
    """`await open()`, then `start()`; `await close()` at the end, which may be called at any time, and again.

    position(): how far the application has got, None: nothing is to be kept now. unfinished(): Exchanges of whose tapes
    something was not read or not taken yet. fail(error): it was opened elsewhere, or there is no such queue any more.
    """

    def __init__(
        self,
        client: GcmClient,
        queue: str,
        name: str,
        position: Callable[[], TapePosition | None],
        unfinished: Callable[[], set[str]],
        fail: Callable[[RoqError], None],
        every_seconds: float = KEEP_SECONDS,
    ) -> None:
        """Raises InvalidName."""
        self._client, self._queue, self._name = client, queue, check_name(name, "durable subscriber")
        self._position, self._unfinished, self._fail, self._every_seconds = position, unfinished, fail, every_seconds
        self._holder = new_token()
        self._number = 0  # of the last position that was sent
        self._kept: dict[str, int] | None = None
        self._expired: set[str] = set()  # Exchanges whose tapes are gone
        self._tapes_max = TAPES_KEPT
        self._looked = time.monotonic()  # when it was asked last which have expired
        self._outage = Outage("the position can't be kept now", queue=queue, durable=name)
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout_seconds: float) -> TapePosition | None:
        """Hold the name from now on; where to go on, None for a new one. Raises QueueNotFound, NotRecorded, AccessDenied,
        CallError, Unavailable, DeadlineExceeded."""
        owner = f"{socket.gethostname()} (pid {os.getpid()})"
        request = OpenDurable(self._queue, self._name, self._holder, owner)
        answer = await self._client.request(request, DurablePosition, timeout_seconds)
        return TapePosition.parse(answer.position) if answer.position else None

    def pass_over(self) -> None:
        """The position of now need not be kept, only one behind it."""
        position = self._position()
        self._kept = position.done if position is not None else None

    def start(self) -> None:
        """Keep from now on how far it got."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"position of {self._name}")

    async def keep(self, timeout_seconds: float = REQUEST_SECONDS) -> None:
        """Keep the position of now, if it is another one. Raises DurableTaken, QueueNotFound, Unavailable, DeadlineExceeded."""
        async with self._sending:
            position = self._position()
            if position is None:
                return
            deadline = time.monotonic() + timeout_seconds
            done = await self._without_expired(position, timeout_seconds)
            if done == self._kept:
                return
            self._number += 1
            text = str(TapePosition(position.tapes, done))
            request = KeepPosition(self._queue, self._name, self._holder, self._number, text)
            await self._client.request(request, Done, max(MOMENT_SECONDS, deadline - time.monotonic()))
            self._kept = done

    async def _without_expired(self, position: TapePosition, timeout_seconds: float) -> dict[str, int]:
        done = {exchange: entry for exchange, entry in position.done.items() if exchange not in self._expired}
        too_many = len(done) > self._tapes_max and done != self._kept
        is_due = self._number > 0 and time.monotonic() - self._looked > LOOK_SECONDS
        if not (too_many or is_due):
            return done
        tapes = await describe_tapes(self._client, self._queue, timeout_seconds)
        self._looked = time.monotonic()
        if tapes.tapes == position.tapes:
            self._expired |= done.keys() - {view.exchange for view in tapes.views} - self._unfinished()
        done = {exchange: entry for exchange, entry in done.items() if exchange not in self._expired}
        self._tapes_max = max(TAPES_KEPT, 2 * len(done))
        return done

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._every_seconds)
                try:
                    await self.keep()
                except RoqError as error:
                    self._outage.wait_out(error)
        except Closed:
            return
        except RoqError as error:
            self._fail(error)
        except Exception as error:  # a defect must not end in silence
            log.exception("defect while a position was kept", extra={"fields": {"queue": self._queue, "durable": self._name}})
            self._fail(ProcessFailed(f"the position could not be kept: {error}"))

    async def close(self, timeout_seconds: float) -> None:
        """Keep the last position, as well as it goes in that time: what it lacks comes again."""
        task, self._task = self._task, None
        if task is None:
            return
        given_up = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if given_up:
            return
        kept = False
        try:
            async with asyncio.timeout(max(MOMENT_SECONDS, timeout_seconds)):
                await self.keep(timeout_seconds)
                kept = True
                self._looked = -math.inf  # who opens the name next may do so when more has expired
                await self.keep(timeout_seconds)
        except (RoqError, TimeoutError) as error:
            fields = {"queue": self._queue, "durable": self._name, "reason": str(error) or "no answer in time"}
            if kept:
                log.info("tapes that have expired may be reported as lost at the next start", extra={"fields": fields})
            else:
                log.warning("last position not stored: messages taken since then are redelivered", extra={"fields": fields})


class DurableSubscriber(Subscriber):
    """A Subscriber that goes on where the one of this name before it was. `start` is for the first time; then "live", too, is a
    place on the tapes."""

    _begins_on_tapes = True

    def __init__(
        self,
        client: GcmClient,
        queue: str,
        topics: tuple[str, ...],
        on_lost: Callable[[MessagesLost], None],
        start: Start,
        follow: bool | str,
        where: str,
        *,
        name: str,
    ) -> None:
        """Raises InvalidName, and as a Subscriber does."""
        super().__init__(client, queue, topics, on_lost, start, follow, where)
        self._start = start
        self._report: MessagesLost | None = None  # the last one of what had expired
        self._keeper = PositionKeeper(client, queue, name, self._place, self._unfinished, self.fail)

    async def _begin(self, past: Past, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        kept = await self._keeper.open(timeout_seconds)
        if kept is not None:
            past.tapes.begin_behind(kept)
            self._order.amid, self._order.entire = True, False  # a replay may bring what came in the life before
            self.give_latest()  # none: all that follows is wanted
        await super()._begin(past, max(MOMENT_SECONDS, deadline - time.monotonic()))
        if kept is None and self._start == LAST:
            self._keeper.pass_over()  # a place before what was left out: until the latest were taken, it begins with them again
        else:
            await self._keeper.keep(max(MOMENT_SECONDS, deadline - time.monotonic()))
        self._keeper.start()

    def missed(self, lost: MessagesLost) -> None:
        """See PastReader."""
        self._report = lost
        super().missed(lost)

    def _place(self) -> TapePosition | None:
        """None until the application took the reports of what had expired: after a crash they come again."""
        if self._report is not None and self._report in self._buffer:
            return None
        self._report = None
        return self.position

    def _unfinished(self) -> set[str]:
        reading = set[str]() if self._past is None else set(self._past.tapes.reading)
        return reading.union(self._marks, *(item.entries for item in self._buffer if isinstance(item, Reached)))

    async def close(self, timeout_seconds: float = 1.0) -> None:
        """Leave the queue; iteration ends, and the last position is kept. Takes at most about `timeout_seconds`."""
        try:
            await self._keeper.close(timeout_seconds / 2)
        finally:
            await super().close(timeout_seconds)

    def fail(self, error: RoqError) -> None:
        """As a Subscriber does; if another has the name now, what was not handed out yet is for that one."""
        if isinstance(error, DurableTaken):
            self._buffer.clear()
            self._buffered = 0
        super().fail(error)

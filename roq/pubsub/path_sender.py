"""A publisher's paths to its Exchanges: links, replay buffer and confirmations, as the path machine (path.py) orders.

The publisher gives it frames in order; they leave on one path at a time, are kept (replay_buffer.py) until they are known to
have passed the Exchange, and are sent again if their path breaks. A replay leaves in parts: the next one when a
MARK behind the last one has come out of the Exchange, so that it overruns no queue there; what is published then follows it.
Not here: batches and topics (publisher.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from roq.errors import Closed, DeadlineExceeded, NotConfirmed, NotRecorded, RoqError
from roq.pubsub.links import BACKLOG_BYTES, ExchangeLink
from roq.pubsub.path import CloseLink, Finished, Instruction, OpenLink, PathMachine, Replay, Reuse, SendFin, SendOpen
from roq.pubsub.replay_buffer import HOLD_BYTES, ReplayBuffer
from roq.runtime.observe import logger
from roq.wire.frame import FrameKind, PathOpening, StoredUpTo, encode_bundle, encode_control, parse
from roq.wire.limits import BATCH_BYTES
from roq.wire.member_id import MemberId
from roq.wire.monitor import ExchangeAddress

log = logger(__name__)
FIN_SECONDS = 10.0  # a FIN that is not confirmed by then: the old link counts as lost, and what went over it is sent again
PART_FRAMES = 8  # of a replay, before its MARK: a small part of what an Exchange queues for each subscriber
PART_SECONDS = 0.25  # a part that is not confirmed: the next one leaves all the same
REPLAY_SECONDS = 10.0  # from here on a replay no longer waits for confirmations: only for room, as live messages do
ASK_SECONDS = 0.1  # while the buffer is full of unconfirmed frames: how often a confirmation is asked for
HELD_SECONDS = 10.0  # an Exchange that has confirmed nothing for so long is not waited for: messages flow on


class PathSender:
    """`before_change()` is called before the path changes: what is batched belongs to the old one. `on_change()` after it, and
    when a replay is over. `last_sequence()`: number of the last payload given to `send`."""

    def __init__(
        self,
        publisher: MemberId,
        before_change: Callable[[], None],
        on_change: Callable[[], None],
        last_sequence: Callable[[], int],
    ) -> None:
        self.opened = asyncio.Event()  # the first path is open
        self.has_room = asyncio.Event()  # set whenever the backlog may have shrunk
        self.lost_token = ""  # Exchange whose link was lost, until the next path opens
        self.replays = 0  # times what may be missing was sent again
        self.blocks = False  # the queue's overflow is "block": wait for confirmations rather than forget what has none
        self.bundle_bytes = BATCH_BYTES
        self.stores = False  # confirmations are asked for that say that everything is stored, not only forwarded
        self.unstored = False  # something was not stored, and nobody was told
        self.stored: tuple[str, StoredUpTo] | None = None  # the last one, and the Exchange that gave it
        self._publisher, self.proof = publisher
        self._before_change, self._on_change, self._last_sequence = before_change, on_change, last_sequence
        self._machine = PathMachine()
        self._links: dict[int, ExchangeLink] = {}  # by path
        self._link: ExchangeLink | None = None  # where frames go now
        self._buffer = ReplayBuffer()
        self._flushes: dict[asyncio.Future[None], int] = {}  # who waits, for the number of which payload; never one before
        self._asking = False  # at the end of this turn of the loop
        self._part = 0  # MARK behind the part of a replay that is under way, 0 if none is
        self._part_timer: asyncio.TimerHandle | None = None
        self._replay_until = 0.0
        self._fin_waits = 0  # path whose FIN follows what waits, 0 if none does
        self._held_since: float | None = None  # the buffer is full of unconfirmed frames
        self._unheard = False  # nobody confirms: not held back until somebody does
        self._finished = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._loop = asyncio.get_running_loop()

    @property
    def path(self) -> int:
        """Number of the current path, 0 before the first."""
        return self._machine.path

    @property
    def exchange(self) -> str:
        """Id of the Exchange frames go to now, "" if there is none."""
        return self._machine.current.id if self._machine.current else ""

    @property
    def place(self) -> tuple[int, str, str]:
        """Path, id of its Exchange, token."""
        return self.path, self.exchange, self.token

    @property
    def token(self) -> str:
        """Which life of the Exchange that is."""
        return self._machine.current.token if self._machine.current else ""

    @property
    def leaving(self) -> int:
        """Earlier paths whose FIN is not confirmed."""
        return len(self._machine.leaving)

    # --- frames -------------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, last: int) -> int:
        """Send a data frame of the current path, or keep it for when its turn comes. last: number of its last payload. How many
        payloads were given up for that."""
        buffer, now = self._buffer, time.monotonic()
        if self._link is None or buffer.waiting:
            given_up = buffer.keep(frame, last, now)
            self._fail_flushes()
            self._pump()
            return given_up
        buffer.sent(frame, last, now)
        self._link.send(frame)
        if buffer.mark_due:
            self.mark()
        return 0

    def send_control(self, kind: FrameKind, body: Any) -> None:
        """Send a control frame on the current path, if there is one and nothing waits for it that would be overtaken."""
        if self._link is not None and not self._buffer.waiting:
            self._control(self._link, kind, self._machine.path, body)

    @property
    def follows(self) -> bool:
        """Whether a control frame would follow everything published: there is a link, and no replay is under way."""
        return self._link is not None and not self._buffer.waiting

    @property
    def _waits(self) -> bool:
        """Whether something is kept that is to leave before the last FIN."""
        return bool(self._buffer.waiting)

    @property
    def confirmed(self) -> int:
        """Number of the last message that is confirmed with all before it."""
        return self._buffer.confirmed

    @property
    def reveals_up_to(self) -> int:
        """Watermarks may speak of messages up to this number."""
        return self._buffer.last

    def backlog(self) -> int:
        """Bytes that wait for an Exchange, as far as they count: the replay buffer holds much while there is none."""
        held = 0
        if (over := self._buffer.unconfirmed_bytes - HOLD_BYTES) > 0:
            waits = self._link is None or bool(self._buffer.waiting)
            held = over + BACKLOG_BYTES if waits or (self.blocks and not self._unheard) else 0
        return held + sum(link.backlog_bytes for link in self._links.values())

    def drop(self) -> int:
        """Give up the oldest half of what waits; how many payloads."""
        frames = [frame for link in self._links.values() for frame in link.drop_oldest(BACKLOG_BYTES // 2)]
        return sum(parse(frame)[1].count for frame in frames)

    # --- confirmations ------------------------------------------------------------------------------------------------

    @property
    def mark_number(self) -> int:
        """Of the newest MARK."""
        return self._buffer.mark_number

    @property
    def confirmed_mark(self) -> int:
        """Everything before this MARK has passed the Exchange."""
        return self._buffer.confirmed_mark

    def mark(self) -> int:
        """Ask for confirmation of everything sent; the number of the MARK. Only while `follows`, or at the end of a part."""
        assert self._link is not None
        number = self._buffer.mark(self._machine.path)
        self._control(self._link, FrameKind.STORE if self.stores else FrameKind.MARK, self._machine.path, number)
        return number

    def _mark_soon(self) -> None:
        """One for all who ask in this turn of the loop."""
        if not self._asking:
            self._asking = True
            self._loop.call_soon(self._mark_now)

    def _mark_now(self) -> None:
        self._asking = False
        if self._flushes and self.follows:
            self.mark()

    def keep_asking(self) -> None:
        """Once a second: a MARK if something sent is not confirmed, and forget what need not be kept."""
        if self.follows and self._buffer.open_question:
            self.mark()
        self._buffer.prune(time.monotonic())

    def held_back(self) -> bool:
        """Whether it is for want of confirmations alone that there is no room."""
        return self.follows and all(link.backlog_bytes <= BACKLOG_BYTES for link in self._links.values())

    def ask(self) -> None:
        """The publisher waits for a confirmation: ask for it again, or go on without if it has not come for too long."""
        now = time.monotonic()
        self._held_since = self._held_since or now
        if now - self._held_since > HELD_SECONDS and not self.stores:
            log.warning(
                "replay buffer is full of unconfirmed messages: going on, they can't be replayed if the Exchange is lost now",
                extra={"fields": {"publisher": self._publisher}},
            )
            self._unheard, self._held_since = True, None
            self.has_room.set()
        elif self._link is not None and not self._link.backlog_bytes and not self._buffer.waiting:
            self.mark()

    def raise_unstored(self) -> None:
        """Raise NotRecorded if it became known since this was last said that something was not stored."""
        unstored, self.unstored = self.unstored, False
        if unstored:
            raise NotRecorded

    async def confirm(self, timeout_seconds: float, *, again: bool = False) -> None:
        """Return when everything sent so far has passed the Exchange, and is stored if `stores` says so. Raises
        DeadlineExceeded, NotConfirmed, NotRecorded, Closed. again: ask, though all of it is known to have passed."""
        self.raise_unknown()
        self.raise_unstored()
        target = self._last_sequence()
        if self._buffer.confirmed >= target and not again:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._flushes[future] = target
        if self.stores:
            self._mark_soon()
        elif self.follows:
            self.mark()
        try:
            async with asyncio.timeout(timeout_seconds):
                await future
        except TimeoutError:
            raise DeadlineExceeded(f"the Exchange did not confirm within {timeout_seconds:g} s") from None
        finally:
            self._flushes.pop(future, None)

    def raise_unknown(self) -> None:
        """Raise NotConfirmed if it became unknown since this was last said whether some messages have passed."""
        unknown, self._buffer.unknown = self._buffer.unknown, None
        if unknown is not None:
            raise NotConfirmed(
                f"messages {unknown.first}..{unknown.last} had left the replay buffer unconfirmed when their path broke: "
                "it is not known whether subscribers get them; those that miss them get MessagesLost",
                *unknown,
            )

    def _fail_flushes(self) -> None:
        """Whoever waits in `flush` learns of what became unknown; if nobody does, the next one will."""
        waiting = [future for future in self._flushes if not future.done()]
        if waiting and self._buffer.unknown is not None:
            try:
                self.raise_unknown()
            except NotConfirmed as error:
                for future in waiting:
                    future.set_exception(NotConfirmed(str(error), error.first, error.last))

    def _break(self) -> None:
        """The path is broken: what is kept will be sent again."""
        self._held_since, self._unheard = None, False
        self._buffer.broken()
        if self._buffer.unknown is not None:
            fields = self._buffer.unknown._asdict()
            log.warning("path broken after unconfirmed messages had left the replay buffer", extra={"fields": fields})
        self._fail_flushes()

    # --- paths --------------------------------------------------------------------------------------------------------

    def assign(self, exchange: ExchangeAddress, path: int, abandon: str = "") -> None:
        """The Monitor's word: go on there, on this path. abandon: token of the Exchange that is gone."""
        if abandon:
            self.abandoned(abandon, path - 1)
        self._perform(self._machine.assign(exchange, path))

    def welcome(self, exchange: ExchangeAddress, path: int, abandon: str = "") -> None:
        """The same, as we join."""
        self._perform(self._machine.welcome(path))
        self.assign(exchange, path, abandon)

    def forwarded(self, path: int, mark: int) -> None:
        """The Exchange's word: everything on this path up to its FIN (mark 0) or the mark has passed it."""
        if self._buffer.forwarded(path, mark):
            self._held_since, self._unheard = None, False
            for future in [future for future, target in self._flushes.items() if target <= self._buffer.confirmed]:
                del self._flushes[future]
                if not future.done():
                    future.set_result(None)
            self.has_room.set()
        if mark == 0:
            self._perform(self._machine.forwarded(path))
        elif path == self._machine.path and mark >= self._part > 0:
            self._next_part()

    def _is_stored(self, link: ExchangeLink, stored: StoredUpTo) -> None:
        """The Exchange's word about its tape."""
        if not stored.copies:
            waiting, self._flushes = self._flushes, {}
            self.stored, self.unstored = None, not waiting
            for future in waiting:
                if not future.done():
                    future.set_exception(NotRecorded())
        else:
            self.stored = (link.exchange.id, stored)
        self.forwarded(stored.path, stored.mark)

    def abandoned(self, token: str, path: int) -> None:
        """The Monitor's word: paths up to this one through this life of an Exchange are over, whatever its links look like."""
        for link in [one for one in self._links.values() if one.exchange.token == token and one.path <= path]:
            self._lost(link)

    def _give_up(self, path: int) -> None:
        """Nobody has confirmed the FIN: closing the link may cut something off, so it counts as lost."""
        if path in self._machine.leaving and path in self._links and not self._fin_waits:
            log.warning("end of a path was not confirmed: replaying what may be missing", extra={"fields": {"path": path}})
            self._lost(self._links[path])

    async def finish(self, timeout_seconds: float) -> bool:
        """End the path, and wait until all of it is known to be forwarded; whether it is."""
        had_path = self._machine.current is not None or self._machine.broken is not None
        self._perform(self._machine.close())
        try:
            if timeout_seconds > 0:
                async with asyncio.timeout(timeout_seconds):
                    await self._finished.wait()
        except TimeoutError:
            return not had_path
        return not had_path or self._finished.is_set()

    def close(self, error: RoqError | None = None) -> None:
        """Close every link; whoever waits for a confirmation gets the error, or Closed."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._link = None
        for timer in self._timers:
            timer.cancel()
        if self._part_timer is not None:
            self._part_timer.cancel()
        unknown, self._buffer = self._buffer.unknown, ReplayBuffer(begin=self._buffer.confirmed)
        self._buffer.unknown = unknown
        self.has_room.set()
        for future in self._flushes:
            if not future.done():
                future.set_exception(error or Closed("the publisher was closed"))
        self._finished.set()

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case OpenLink(exchange, path):
                    told = self._welcomed, self._lost, self._room, self.forwarded, self._is_stored
                    self._links[path] = ExchangeLink(exchange, path, *told)
                case SendFin(path):
                    if self._machine.closing and self._waits:
                        self._fin_waits = path
                    else:
                        self._fin(path)
                case SendOpen(path, left, finished):
                    self._open(path, PathOpening(left, finished, self.proof))
                case Replay():
                    self._replay()
                case Reuse(old, new):
                    self._links[new] = self._links.pop(old)
                    self._links[new].path = new
                case CloseLink(path):
                    if (link := self._links.pop(path, None)) is not None:
                        link.close()
                    self.has_room.set()
                case Finished():
                    self._finished.set()
        self._machine.check()
        if any(isinstance(instruction, SendOpen) for instruction in instructions):
            self._on_change()  # only now: what it sends must not overtake a replay

    def _fin(self, path: int) -> None:
        """The last frame of this path: behind what was sent on it. What waits goes on with the next one."""
        self._fin_waits = 0
        if self._machine.closing:
            self._on_change()  # for the last watermarks
        if self.stores:  # from here on the Exchange confirms the end, too, once it is stored
            self._control(self._links[path], FrameKind.STORE, path, self._buffer.mark(path))
        self._buffer.mark(path, fin=True)
        self._control(self._links[path], FrameKind.FIN, path, None)
        self._timers = [timer for timer in self._timers if timer.when() > self._loop.time()]
        self._timers.append(self._loop.call_later(FIN_SECONDS, self._give_up, path))
        self._link = None if self._machine.closing else self._link

    def _open(self, path: int, opening: PathOpening) -> None:
        self._link = self._links[path]
        self._part = 0
        last = self._buffer.sent_to
        if not opening.finished:
            self._break()  # a replay follows: subscribers are told where it begins
            last = self._buffer.opens_after()
            unfinished, self._fin_waits = self._fin_waits, 0
            self._perform(self._machine.forwarded(unfinished))  # all of it is sent again: nobody is to wait for its FIN
        self._control(self._link, FrameKind.OPEN, path, opening, last)
        self.lost_token = ""
        self.opened.set()
        if opening.finished:
            self._pump()

    # --- replays ------------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """All that subscribers may be missing has begun to leave again."""
        self.replays += 1
        self._replay_until = time.monotonic() + REPLAY_SECONDS
        if self._buffer.waiting:
            self._pump()
        else:
            self._caught_up()

    def _pump(self) -> None:
        """Send the next part of what waits, unless the one before is still on its way."""
        link, buffer = self._link, self._buffer
        if link is None or not buffer.waiting or self._part or link.backlog_bytes:
            return
        path = link.path
        for _ in range(PART_FRAMES):
            found = buffer.take(path, self.bundle_bytes)
            first = encode_bundle(self._publisher, path, buffer.sent_to, found, time.time_ns()) if len(found) > 1 else found[0]
            link.send(first)
            if not buffer.waiting:
                break
        number = self.mark()
        if buffer.waiting:
            self._part = number
            patience = PART_SECONDS if time.monotonic() < self._replay_until else 0.0
            self._part_timer = self._loop.call_later(patience, self._next_part)
        else:
            self._caught_up()

    def _next_part(self) -> None:
        self._part = 0
        if self._part_timer is not None:
            self._part_timer.cancel()
        self._pump()

    def _caught_up(self) -> None:
        """Nothing waits any more."""
        self.has_room.set()
        if self._fin_waits:
            self._fin(self._fin_waits)
        self._loop.call_soon(self._on_change)

    def _room(self) -> None:
        self.has_room.set()
        self._pump()

    # --- links --------------------------------------------------------------------------------------------------------

    def _control(self, link: ExchangeLink, kind: FrameKind, path: int, body: Any, sequence: int | None = None) -> None:
        number = self._buffer.sent_to if sequence is None else sequence
        link.send(encode_control(kind, self._publisher, path, number, body, time.time_ns()))

    def _welcomed(self, link: ExchangeLink) -> None:
        self._before_change()
        self._perform(self._machine.attached(link.path))

    def _lost(self, link: ExchangeLink) -> None:
        """The Exchange at the other end is gone, or is another life of it."""
        self.lost_token = link.exchange.token
        self._before_change()
        if self._link is link:
            self._link = None
            self._fin_waits = 0
            self._break()
        self._perform(self._machine.lost(link.path))
        self._on_change()

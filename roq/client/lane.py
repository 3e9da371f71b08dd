"""A publisher's lane to its Exchanges: links, ring and confirmations, as the path machine (path.py) orders.

The publisher gives it frames in order; the lane sees to it that they leave on one path at a time, are kept in the ring for a
replay, and are known to have passed the Exchange before a link is closed. Not here: batches and topics (publisher.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from roq.client.link import BACKLOG_BYTES, ExchangeLink
from roq.client.path import CloseLink, Connect, Finished, Instruction, PathMachine, Replay, Reuse, SendFin, SendOpen
from roq.client.ring import RING_BYTES, Ring
from roq.errors import Closed, DeadlineExceeded
from roq.wire.frame import Kind, PathOpening, encode_control, parse
from roq.wire.monitor import ExchangeAddress

FIN_SECONDS = 10.0  # an old link is kept at most this long for its FIN to be confirmed


class Lane:
    """`before_change()` is called before the path changes: what is batched belongs to the old one. `on_change()` after it.
    `last_sequence()`: number of the last payload given to `send`."""

    def __init__(
        self,
        publisher: int,
        before_change: Callable[[], None],
        on_change: Callable[[], None],
        last_sequence: Callable[[], int],
    ) -> None:
        self.opened = asyncio.Event()  # the first path is open
        self.has_room = asyncio.Event()  # set whenever the backlog may have shrunk
        self.lost_token = ""  # Exchange whose link was lost, until the next path opens
        self.replays = 0  # times the ring was sent again
        self._publisher = publisher
        self._before_change, self._on_change, self._last_sequence = before_change, on_change, last_sequence
        self._machine = PathMachine()
        self._links: dict[int, ExchangeLink] = {}  # by path
        self._link: ExchangeLink | None = None  # where frames go now
        self._ring = Ring()
        self._marks: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._mark = 0
        self._finished = asyncio.Event()
        self._unconfirmed = False
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
    def token(self) -> str:
        """Which life of the Exchange that is."""
        return self._machine.current.token if self._machine.current else ""

    @property
    def leaving(self) -> int:
        """Earlier paths whose FIN is not confirmed."""
        return len(self._machine.leaving)

    # --- frames -------------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, timestamp: int) -> int:
        """Send a data frame of the current path, or keep it for the next one. How many payloads were given up for that."""
        if self._link is None:
            return self._ring.keep(frame, timestamp)
        self._ring.sent(frame, timestamp)
        self._link.send(frame)
        return 0

    def send_control(self, kind: Kind, body: Any) -> None:
        """Send a control frame on the current path, if there is one."""
        if self._link is not None:
            self._control(self._link, kind, self._machine.path, body)

    def backlog(self) -> int:
        """Bytes that wait for an Exchange, as far as they count: the ring holds some seconds' worth while there is none."""
        held = self._ring.unsent_bytes - RING_BYTES // 2 if self._link is None else 0
        return max(0, held) + sum(link.backlog_bytes for link in self._links.values())

    def drop(self) -> int:
        """Give up the oldest half of what waits; how many payloads."""
        frames = [frame for link in self._links.values() for frame in link.drop_oldest(BACKLOG_BYTES // 2)]
        return sum(parse(frame)[1].count for frame in frames)

    async def confirm(self, timeout_seconds: float) -> None:
        """Return when everything sent so far has passed the Exchange. Raises DeadlineExceeded, Closed."""
        self._mark += 1
        mark = self._mark
        future: asyncio.Future[None] = self._loop.create_future()
        self._marks[mark] = (self._machine.path, future)
        self.send_control(Kind.MARK, mark)
        try:
            async with asyncio.timeout(timeout_seconds):
                await future
        except TimeoutError:
            raise DeadlineExceeded(f"the Exchange did not confirm within {timeout_seconds:g} s") from None
        finally:
            self._marks.pop(mark, None)

    # --- paths --------------------------------------------------------------------------------------------------------

    def assign(self, exchange: ExchangeAddress, path: int, abandon: str = "") -> None:
        """The Monitor's word: go on there, on this path. abandon: token of the Exchange that is gone."""
        for link in [one for one in self._links.values() if one.exchange.token == abandon]:
            self._lost(link)
        self._perform(self._machine.assign(exchange, path))

    def forwarded(self, path: int, mark: int) -> None:
        """The Monitor's word: everything on this path up to its FIN (mark 0) or the mark has passed the Exchange."""
        if mark == 0:
            self._perform(self._machine.forwarded(path))
        for number, (mark_path, future) in list(self._marks.items()):
            covered = mark_path <= path if mark == 0 else (mark_path == path and number <= mark)
            if covered and not future.done():
                future.set_result(None)

    def _give_up(self, path: int) -> None:
        """Nobody has confirmed the FIN: the link is closed, and what went over it stays unconfirmed."""
        if path in self._machine.leaving:
            self._unconfirmed = True
            self._perform(self._machine.forwarded(path))

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
        return not had_path or (self._finished.is_set() and not self._unconfirmed)

    def close(self) -> None:
        """Close every link; whoever waits for a confirmation gets Closed."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        for timer in self._timers:
            timer.cancel()
        self._ring = Ring()
        self.has_room.set()
        for _, future in self._marks.values():
            if not future.done():
                future.set_exception(Closed("the publisher was closed"))

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Connect(exchange, path):
                    self._links[path] = ExchangeLink(exchange, path, self._welcomed, self._lost, self.has_room.set)
                case SendFin(path):
                    self._control(self._links[path], Kind.FIN, path, None)
                    self._timers.append(self._loop.call_later(FIN_SECONDS, self._give_up, path))
                    self._link = None if self._machine.closing else self._link
                case SendOpen(path, left, finished):
                    self._open(path, PathOpening(left, finished))
                case Replay(path):
                    self._replay(path)
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

    def _open(self, path: int, opening: PathOpening) -> None:
        self._link = self._links[path]
        last = self._last_sequence()
        if opening.left and not opening.finished:
            self._ring.prune(time.time_ns())
            last = self._ring.first_sequence(last + 1) - 1  # a replay follows: what comes before it is not repeated
        self._control(self._link, Kind.OPEN, path, opening, last)
        self.lost_token = ""
        self.opened.set()

    def _replay(self, path: int) -> None:
        """Send again all that subscribers may be missing, then what waits for confirmation."""
        assert self._link is not None
        self.replays += 1
        for frame in self._ring.replay(path):
            self._link.send(frame)
        for number, (_, future) in self._marks.items():
            self._marks[number] = (path, future)
            self._control(self._link, Kind.MARK, path, number)
        self.has_room.set()

    def _control(self, link: ExchangeLink, kind: Kind, path: int, body: Any, sequence: int | None = None) -> None:
        number = self._last_sequence() if sequence is None else sequence
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
        self._perform(self._machine.lost(link.path))
        self._on_change()

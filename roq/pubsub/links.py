"""A client's connection to one Exchange: a publisher's link to its front, a subscriber's attachment to its back.

An ExchangeLink is open once the Exchange has welcomed it; what it says there is what was forwarded. An Attachment has
subscriptions, frames that wait to be looked at, and whether its subscriptions proved to be active.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from roq.runtime.links import PublisherLink, SubscriberLink
from roq.wire.frame import CONTROL_PREFIX, StoredUpTo, confirmed, stored_up_to, welcome
from roq.wire.limits import SUBSCRIBER_BYTES_QUEUED
from roq.wire.monitor import ExchangeAddress

BACKLOG_BYTES = 512 * 1024  # frames that the transport did not take; above this `publish` waits or drops
WELCOME_SECONDS = 5.0  # without a welcome by then the link counts as lost
ASK_SECONDS, QUIET_SECONDS = 1.5, 60.0  # between two questions where it has become quiet, and until it is left at that
LIFE_SECONDS = 3.0  # three signs of life within the 10 s after which an Exchange gives a full subscriber up


class ExchangeLink(PublisherLink):
    """Frames leave in the order in which they were given. `on_welcome(link)` once this life of the Exchange takes our
    frames; `on_lost(link)` when it takes no more, or another life of it answers; `on_room()` when the backlog has emptied;
    `on_confirmed(path, mark)` for what it has forwarded, `on_stored(link, stored)` for what is on its tape."""

    def __init__(
        self,
        exchange: ExchangeAddress,
        path: int,
        on_welcome: Callable[[ExchangeLink], None],
        on_lost: Callable[[ExchangeLink], None],
        on_room: Callable[[], None],
        on_confirmed: Callable[[int, int], None],
        on_stored: Callable[[ExchangeLink, StoredUpTo], None],
    ) -> None:
        self.exchange, self.path = exchange, path
        self.welcomed = False
        self._welcome = welcome(exchange.token)
        self._on_welcome, self._on_lost, self._on_room, self._on_confirmed = on_welcome, on_lost, on_room, on_confirmed
        self._on_stored = on_stored
        super().__init__(exchange.front_endpoint())
        self._timer = self._loop.call_later(WELCOME_SECONDS, self._not_welcome)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the transport did not take."""
        return self.waiting_bytes

    def _not_welcome(self) -> None:
        if not self.welcomed:
            self._lose()

    def _lose(self) -> None:
        if not self.closed:
            self.once = True
            self._on_lost(self)

    def drop_oldest(self, keep_bytes: int) -> list[bytes]:
        """Take data frames off the backlog until at most `keep_bytes` remain; the frames taken. Control frames stay."""
        dropped: list[bytes] = []
        kept: deque[bytes] = deque()
        while self._waiting and self.waiting_bytes > keep_bytes:
            frame = self._waiting.popleft()
            if frame[:1] == CONTROL_PREFIX:
                kept.append(frame)
            else:
                dropped.append(frame)
                self.waiting_bytes -= len(frame)
        kept.extend(self._waiting)
        self._waiting = kept
        return dropped

    def told(self, message: bytes) -> None:
        """By the Exchange: its welcome, another life's, or what was forwarded."""
        if message == self._welcome:
            if not self.welcomed:
                self.welcomed = self.once = True
                self._on_welcome(self)
        elif message[:2] == b"\x01\xfe":
            self._lose()
        elif (known := confirmed(message)) is not None:
            self._on_confirmed(*known)
        elif (stored := stored_up_to(message)) is not None:
            self._on_stored(self, stored)

    def room(self) -> None:
        """The backlog is empty."""
        self._on_room()

    def ended(self) -> None:
        """What was on its way may be lost, so what follows is decided. Before the welcome it is tried again."""
        super().ended()
        if self.welcomed:
            self._lose()

    def close(self) -> None:
        """Close the connection; frames in the backlog are given up (and were confirmed, replayed or reported by then)."""
        self._timer.cancel()
        super().close()


class Attachment:
    """`on_readable(self)` whenever there are frames in `frames`; the owner takes them from there.

    Subscriptions are sent in byte order on every (re)connection, and the last of them is the control prefix: the Exchange's
    ATTACHED in answer to it proves them all.
    """

    def __init__(
        self,
        exchange: ExchangeAddress,
        prefixes: Sequence[bytes],
        max_frame_bytes: int,
        on_readable: Callable[[Attachment], None],
    ) -> None:
        self.exchange = exchange
        self.proved = self.taped = False
        self.closed = False
        self.answered = False  # the Exchange has proved the subscriptions of one connection
        self.unread_at = 0.0  # when frames that had come were last left unread (time.monotonic)
        self.read_at = 0.0  # when nothing more had come at last
        self.looking = False  # `look_soon` was called and has not been served yet
        self.frames: deque[bytes] = deque()
        self._looked_at = 0  # bytes that had come when `frames` was empty last
        self._shown_at = 0.0
        self._pieces = self._pieces_seen = 0  # that have come, and when it was looked last
        self._heard_at = self._asked_at = 0.0  # when that was another number last, and when the other end was asked
        self._on_readable = on_readable
        self._loop = asyncio.get_running_loop()
        self.link = SubscriberLink(exchange.back_endpoint(), sorted(prefixes), self._came, max_frame_bytes)
        self.look_soon()

    @property
    def origin(self) -> tuple[str, int]:
        """Of a frame that is taken just now: its Exchange, and when it came (milliseconds since 1970)."""
        return self.exchange.id, time.time_ns() // 1_000_000

    def _came(self, messages: list[list[bytes]]) -> None:
        self._pieces += 1
        self.frames.extend([parts[0] for parts in messages])
        if not self.looking:
            self._on_readable(self)

    def look_soon(self) -> None:
        """Read at the next turn of the loop."""
        if not self.looking:
            self.looking = True
            self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        self.looking = False
        if not self.closed:
            self._on_readable(self)

    def was_read(self) -> None:
        """The owner has taken what it wants for now."""
        link = self.link
        if not self.frames:
            self._looked_at = link.received_bytes
        link.pause(link.received_bytes - self._looked_at > SUBSCRIBER_BYTES_QUEUED)

    def catch_up(self) -> None:
        """Look at what has come while the loop was busy."""
        if not self.looking:
            self.link.read_now()

    def take_rest(self) -> None:
        """The Exchange is gone: what had come from it is in `frames` then."""
        self.looking = True
        self.link.read_now()

    def show_life(self, now: float) -> None:
        """Frames lie unread, so the Exchange's PINGs do too: it hears from us that we live."""
        if now - self._shown_at >= LIFE_SECONDS:
            self._shown_at = now
            self.link.show_life()

    def look_if_quiet(self, now: float) -> None:
        """Once a second. Where nothing has come since, and something had within the last minute: a connection that broke on the
        way is known to who sends, and only silent to who reads. What is sent on it has the other end say so."""
        if self._pieces != self._pieces_seen:
            self._pieces_seen, self._heard_at = self._pieces, now
        elif now - self._heard_at < QUIET_SECONDS and now - self._asked_at >= ASK_SECONDS:
            self._asked_at = now
            self.link.show_life()

    def close(self) -> None:
        """Close the connection; frames not read are gone."""
        if not self.closed:
            self.closed = True
            self.link.unsubscribe(CONTROL_PREFIX)  # so that nobody waits for us, if what still comes has this look like a break
            self.link.close()

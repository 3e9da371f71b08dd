"""The forwarding of one Exchange: publishers connect to its front, subscribers to its back.

What one publisher sent in one piece leaves in as few pieces as there are runs for the same subscribers (runs.py); all get the
same bytes, undecoded. A publisher is welcomed by the token of the Exchange, and told what was forwarded when it asks (MARK) or
ends a path (FIN). A subscriber is told when its subscriptions are active (ATTACHED). Each has a bounded queue:

    drop    frames for a full one are dropped and counted; control frames are not, until it has twice its bound: then it is cut
    block   while one is full nothing is read from publishers; one that shows no sign of life meanwhile is cut

With a `security`, only who may publish to the queue is let in in front, and who may subscribe at the back.

Not covered: who belongs to the queue (the Monitor).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from roq.errors import FrameError
from roq.pubsub.exchange.runs import FrameRun, FrameRuns
from roq.runtime.connections import Peer, Server
from roq.runtime.links import SubscribedPeer, Subscriptions
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.security import Security
from roq.wire import frame as frames
from roq.wire import zmtp
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.card import Right
from roq.wire.frame import CONTROL_PREFIX, SUBSCRIBE_ALL, FrameKind, welcome
from roq.wire.limits import (
    BLOCK_BYTES_QUEUED,
    DROP_BYTES_QUEUED,
    FRAME_OVERHEAD_BYTES,
    SUBSCRIPTION_BYTES_MAX,
    UNFINISHED_BYTES_MAX,
)
from roq.wire.rights import check_member

LOOK_SECONDS = 1.0  # between two looks at those who are full
SILENT_LOOKS_MAX = 10  # of one that is full, takes nothing and says nothing: longer than any pause of a healthy program
ANSWERED = (FrameKind.MARK, FrameKind.FIN)
_BUNDLE = bytes((FrameKind.BUNDLE,))  # data, sent again

log = logger(__name__)
Route = tuple[SubscribedPeer, ...]


def queue_bytes(settings: QueueSettings) -> int:
    """Bound of what one subscriber has not taken yet."""
    if settings.overflow is Overflow.BLOCK:
        return BLOCK_BYTES_QUEUED
    return max(DROP_BYTES_QUEUED, 2 * settings.max_frame_bytes)


class ForwardedTotals(NamedTuple):
    """Totals since the start: frames and bytes in from publishers, out to subscribers."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0


class Forwarder:
    """Bound on both sides when made; raises PortTaken. token: names this life of the Exchange. queue: whose rights count."""

    def __init__(
        self,
        address: str,
        front_port: int,
        back_port: int,
        token: str,
        settings: QueueSettings,
        counters: Counters,
        security: Security | None = None,
        queue: str = "",
    ) -> None:
        self.blocks = settings.overflow is Overflow.BLOCK
        self.frame_bytes_max = settings.max_frame_bytes + FRAME_OVERHEAD_BYTES
        self.queue_bytes = queue_bytes(settings)
        self.subscriptions = Subscriptions[SubscribedPeer]()
        self.counters = counters
        self.refusals = Refusals(log, counters)
        self.greeting = zmtp.frame(SUBSCRIBE_ALL) + zmtp.frame(welcome(token))
        self.attached = zmtp.frame(frames.encode_control(FrameKind.ATTACHED, 0, 0, 0, token, time.time_ns()))
        self._frames_in = self._bytes_in = self._frames_out = self._bytes_out = 0
        self._full: dict[SubscriberPeer, None] = {}
        self._turns: dict[PublisherPeer, None] = {}  # who was read last comes last
        self._looking: asyncio.TimerHandle | None = None
        self._front = Server(
            address,
            front_port,
            b"XSUB",
            self.frame_bytes_max,
            lambda: PublisherPeer(self, self._front),
            max(UNFINISHED_BYTES_MAX, 4 * self.frame_bytes_max),
            security,
            lambda card: check_member(card, Right.PUBLISH, queue),
        )
        try:
            self._back = Server(
                address,
                back_port,
                b"XPUB",
                SUBSCRIPTION_BYTES_MAX,
                lambda: SubscriberPeer(self, self._back),
                UNFINISHED_BYTES_MAX,
                security,
                lambda card: check_member(card, Right.SUBSCRIBE, queue),
            )
        except BaseException:
            self._front.close()
            raise
        self.front_port, self.back_port = self._front.port, self._back.port

    @property
    def traffic(self) -> ForwardedTotals:
        """So far."""
        return ForwardedTotals(self._frames_in, self._bytes_in, self._frames_out, self._bytes_out)

    def forward(self, runs: Sequence[FrameRun[Route]]) -> None:
        """To those who subscribed."""
        for route, pieces, count, size in runs:
            self._frames_in += count
            self._bytes_in += size
            if route:
                self._frames_out += count * len(route)
                self._bytes_out += size * len(route)
                for subscriber in route:
                    subscriber.send(pieces)

    # --- full subscribers ---------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether publishers wait for a subscriber."""
        return self.blocks and bool(self._full)

    def is_full(self, subscriber: SubscriberPeer) -> None:
        """Its queue has reached its bound."""
        if self.blocks and not self._full:
            for publisher in self._turns:
                publisher.hold("full")
        self._full[subscriber] = None
        if self.blocks and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def has_room(self, subscriber: SubscriberPeer) -> None:
        """It took enough, or is gone."""
        known = subscriber in self._full
        self._full.pop(subscriber, None)
        if known and self.blocks and not self._full:
            for publisher in self._turns:  # the loop reads in this order, and the first ones may fill somebody again
                publisher.release("full")

    def was_read(self, publisher: PublisherPeer) -> None:
        """The others go first when publishers have waited."""
        self._turns.pop(publisher, None)
        self._turns[publisher] = None

    def is_gone(self, publisher: PublisherPeer) -> None:
        """Its connection ended."""
        self._turns.pop(publisher, None)

    def _look(self) -> None:
        self._looking = None
        for subscriber in list(self._full):
            if subscriber.silent_looks() >= SILENT_LOOKS_MAX:
                log.warning("a subscriber that others wait for shows no sign of life: its connection is cut")
                self.counters["subscribers_cut"] += 1
                subscriber.transport.abort()
        if self._full:
            self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def stop(self) -> None:
        """What subscribers have not taken yet leaves if the process lives on for so long (`send_rest`)."""
        if self._looking is not None:
            self._looking.cancel()
        self._front.close()
        self._back.close()


class PublisherPeer(Peer, asyncio.Protocol):
    """A publisher's connection."""

    patient = True

    def __init__(self, forwarder: Forwarder, server: Server) -> None:
        super().__init__(server)
        self._forwarder = forwarder
        self._runs: FrameRuns[Route] | None = None  # once it has greeted
        self._asked: list[bytes] = []  # control frames to be answered

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        forwarder, finished = self._forwarder, False
        forwarder.was_read(self)
        data = self.opened(data)
        try:
            if self._runs is None:
                data = self._greet(data)
            if self._runs is not None and data:
                runs = self._runs.feed(data)
                forwarder.forward(runs)
                finished = bool(runs)
                if self._asked:
                    self._answer()
                if self._runs.pongs:
                    self.answer(self._runs.pongs)
                    self._runs.pongs.clear()
        except FrameError as error:
            forwarder.refusals.note("publisher", error)
            self.refuse(error)
        self.have_read(self.unfinished + (0 if self._runs is None else self._runs.unfinished), finished=finished)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        self._forwarder.is_gone(self)
        super().connection_lost(error)

    def _greet(self, data: bytes) -> bytes:
        """What came behind the other end's greeting, for the runs. Raises FrameError."""
        messages = self.take(data)
        if not self.parser.ready:
            return b""
        self._runs = FrameRuns(self._forwarder.subscriptions.route, self._forwarder.frame_bytes_max, self._control)
        self.transport.write(self._forwarder.greeting)
        if self._forwarder.held:
            self.hold("full")
        if any(len(parts) != 1 for parts in messages):
            raise FrameError("a message of more than one part")
        return b"".join((*(zmtp.frame(parts[0]) for parts in messages), self.parser.rest()))

    def _control(self, body: bytes) -> None:
        if len(body) > 2 and body[2] in ANSWERED:
            self._asked.append(body)

    def _answer(self) -> None:
        """Everything before these frames is with the subscribers' queues by now."""
        asked, self._asked = self._asked, []
        answers = []
        for body in asked:
            _, header, content = frames.parse(body)
            mark = frames.mark_body(content) if header.kind == FrameKind.MARK else 0
            answers.append(zmtp.frame(frames.confirmation(header.path, mark)))
        self.answer(answers)


class SubscriberPeer(SubscribedPeer):
    """A subscriber's connection, whose write buffer is its queue."""

    patient = True

    def __init__(self, forwarder: Forwarder, server: Server) -> None:
        super().__init__(server, forwarder.subscriptions)
        self._forwarder = forwarder
        self._full = False
        self._seen = (0, 0, 0)  # what was heard, what waited, for how many looks neither changed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        super().connection_made(transport)
        if not transport.is_closing():
            self.transport.set_write_buffer_limits(self._forwarder.queue_bytes)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        super().connection_lost(error)
        self._forwarder.has_room(self)

    def subscribed(self, prefix: bytes) -> None:
        """That is active now, and so is what came before."""
        if prefix.startswith(CONTROL_PREFIX) and frames.control_prefix(FrameKind.ATTACHED).startswith(prefix):
            self.transport.write(self._forwarder.attached)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Whole frames."""
        if self._full and not self._forwarder.blocks:
            self._send_control(b"".join(pieces))
        elif len(pieces) == 1:
            self.transport.write(pieces[0])
        else:
            self.transport.writelines(pieces)

    def _send_control(self, data: bytes) -> None:
        """Of these frames, only those that say where a publisher is: without them others would wait, or gaps stay unknown."""
        dropped, kept = 0, []
        for flags_at, begin, stop in zmtp.frames_in(data):
            if data.startswith(CONTROL_PREFIX, begin) and data[begin + 2 : begin + 3] != _BUNDLE:
                kept.append(data[flags_at:stop])
            else:
                dropped += 1
        self._forwarder.counters["frames_dropped"] += dropped
        if not kept:
            return
        self.transport.write(b"".join(kept))
        if self.transport.get_write_buffer_size() > 2 * self._forwarder.queue_bytes:
            self._forwarder.refusals.note("slow_subscriber", "it takes not even control frames: its connection is cut")
            self.transport.abort()

    def pause_writing(self) -> None:
        """For the transport."""
        self._full = True
        self._forwarder.is_full(self)

    def resume_writing(self) -> None:
        """For the transport."""
        self._full = False
        self._forwarder.has_room(self)

    def waiting_bytes_max(self) -> int:
        """A full queue alone is no reason to drop one that asks."""
        return super().waiting_bytes_max() + 2 * self._forwarder.queue_bytes

    def silent_looks(self) -> int:
        """For how many looks in a row, this one included, it took nothing and said nothing."""
        heard, waits = self.heard, self.transport.get_write_buffer_size()
        looks = self._seen[2] + 1 if self._seen[:2] == (heard, waits) else 0
        self._seen = heard, waits, looks
        return looks

"""The forwarding of one Exchange: publishers connect to its front, subscribers to its back.

What one publisher sent in one piece leaves in as few pieces as there are runs for the same subscribers (runs.py); all get the
same bytes, undecoded. A publisher is welcomed by the token of the Exchange, and told what was forwarded when it asks (MARK) or
ends a path (FIN). A subscriber is told when its subscriptions are active (ATTACHED). Each has a bounded queue:

    drop    frames for a full one are dropped and counted; control frames are not, until it has twice its bound: then it is cut.
            One that is told of the tape is told what was dropped (dropped.py) before it is told that more is stored
    block   while one is full nothing is read from publishers; one that shows no sign of life meanwhile is cut

In a recorded queue everything is also written to the Exchange's tape (recorder.py); publishers that ask (STORE) are told what
is stored there, and subscribers that ask where their messages begin on it.

With a `security`, only who may publish to the queue is let in in front, and who may subscribe at the back; a program's
connection carries what is of the publisher that has opened its path there, and proved that its id is its own.

Not covered: who belongs to the queue (the Monitor).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from roq.errors import AccessDenied, FrameError
from roq.pubsub.exchange.absent import AbsentSubscribers
from roq.pubsub.exchange.dropped import DroppedTopics
from roq.pubsub.exchange.publish_quota import PublishQuotas
from roq.pubsub.exchange.recorder import Recorder
from roq.pubsub.exchange.runs import ForwardedTotals, FrameRun, FrameRuns
from roq.runtime.audit import turned_away
from roq.runtime.connections import BudgetedPeer, Server
from roq.runtime.links import SubscribedPeer, Subscriptions
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.security import Security
from roq.wire import frame as frames
from roq.wire import zmtp
from roq.wire.assignment import Overflow, QueueSettings
from roq.wire.card import Card, CardRole, Right
from roq.wire.frame import CONTROL_PREFIX, SUBSCRIBE_ALL, FrameKind, StoredUpTo, welcome
from roq.wire.limits import (
    BLOCK_BYTES_QUEUED,
    DROP_BYTES_QUEUED,
    FRAME_OVERHEAD_BYTES,
    SUBSCRIPTION_BYTES_MAX,
    UNFINISHED_BYTES_MAX,
)
from roq.wire.member_id import MemberId
from roq.wire.rights import check_member

LOOK_SECONDS = 1.0  # between two looks at those who are full
SILENT_LOOKS_MAX = 10  # of one that is full, takes nothing and says nothing: longer than any pause of a healthy program
FENCES_KEPT = 10_000  # as the Monitor does
ANSWERED = (FrameKind.MARK, FrameKind.FIN, FrameKind.STORE)
OWN = (FrameKind.ATTACHED, FrameKind.TAPED, FrameKind.INDEX)
TAPED_PREFIX = frames.control_prefix(FrameKind.TAPED)
_BUNDLE = bytes((FrameKind.BUNDLE,))  # data, sent again

log = logger(__name__)
Route = tuple[SubscribedPeer, ...]


def queue_bytes(settings: QueueSettings) -> int:
    """Bound of what one subscriber has not taken yet."""
    if settings.overflow is Overflow.BLOCK:
        return BLOCK_BYTES_QUEUED
    return max(DROP_BYTES_QUEUED, 2 * settings.max_frame_bytes)


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
        self.counters, self.refusals, self._quotas = counters, Refusals(log, counters), PublishQuotas()
        self.greeting = zmtp.frame(SUBSCRIBE_ALL) + zmtp.frame(welcome(token))
        self.recorder: Recorder | None = None  # while the queue is recorded
        self.queue, self._token, self._tape_full = queue, token, False
        self.fences = dict[int, int]()  # publishers whose paths up to this one are refused; fenced last comes last
        self._told_of_tape, self.absent = dict[SubscriberPeer, None](), AbsentSubscribers()
        self.attached = zmtp.frame(frames.encode_control(FrameKind.ATTACHED, 0, 0, 0, token, time.time_ns()))
        self._frames_in = self._bytes_in = self._frames_out = self._bytes_out = 0
        self._full, self._turns = dict[SubscriberPeer, None](), dict[PublisherPeer, None]()  # who was read last comes last
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
        """To those who subscribed, and to the tape."""
        if self.recorder is not None:
            self.recorder.take(runs)
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

    def holds(self) -> list[str]:
        """For what publishers wait."""
        return ["full"] * self.held + ["tape"] * self._tape_full

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

    # --- the tape -----------------------------------------------------------------------------------------------------

    def hold_for_tape(self, full: bool) -> None:
        """Stores don't keep up: publishers wait, or do no longer."""
        self._tape_full = full
        for publisher in self._turns:
            (publisher.hold if full else publisher.release)("tape")

    def ask_tape(self, subscriber: SubscriberPeer) -> None:
        """Tell it where its messages begin on the tape, and from then on what is stored."""

        def tell(position: int) -> None:
            if not subscriber.transport.is_closing():
                subscriber.transport.write(self._taped(position))
                self._told_of_tape[subscriber] = None

        subscriber.dropped = subscriber.dropped or DroppedTopics()  # the answer may come later, and speaks of now
        if self.recorder is None:
            tell(0)
        else:
            self.recorder.where(tell)

    def stored(self, position: int) -> None:
        """Everything up to this entry of the tape is."""
        if self._told_of_tape:
            frame = self._taped(position)
            for subscriber in self._told_of_tape:
                subscriber.send_taped(frame)

    def _taped(self, position: int) -> bytes:
        return zmtp.frame(frames.encode_control(FrameKind.TAPED, 0, 0, position, self._token, time.time_ns()))

    def forget(self, subscriber: SubscriberPeer) -> None:
        """Its connection ended."""
        self._told_of_tape.pop(subscriber, None)
        self.has_room(subscriber)

    def fence(self, publisher: int, path: int, done: Callable[[], None]) -> None:
        """Take nothing more of this publisher's paths up to this one. done: called once what was taken is stored."""
        path = max(path, self.fences.pop(publisher, 0))
        self.fences[publisher] = path
        if len(self.fences) > FENCES_KEPT:
            del self.fences[next(iter(self.fences))]
        for peer in [one for one in self._turns if one.path_of(publisher) <= path]:
            fields = {"publisher": publisher, "path": path, "peer": peer.peer_address}
            log.warning("a producer was opened anew: the connection of the one before is cut", extra={"fields": fields})
            self.counters["producers_fenced"] += 1
            peer.transport.abort()
        if self.recorder is None:
            done()
        else:
            self.recorder.when_stored(lambda position: done())

    def spend(self, publisher: PublisherPeer, card: Card, size: int) -> None:
        """So much was read of a publisher whose card has a quota."""
        loop = asyncio.get_running_loop()
        if seconds := self._quotas.spend(card, size, loop.time()):
            self.counters["publishers_slowed"] += 1
            publisher.hold("quota")
            loop.call_later(seconds, publisher.release, "quota")

    def was_read(self, publisher: PublisherPeer) -> None:
        """The others go first when publishers have waited."""
        self._turns.pop(publisher, None)
        self._turns[publisher] = None

    def is_gone(self, publisher: PublisherPeer) -> None:
        """Its connection ended."""
        self.absent.left(publisher)
        self._turns.pop(publisher, None)

    def _look(self) -> None:
        self._looking = None
        for subscriber in list(self._full):
            if subscriber.silent_looks() >= SILENT_LOOKS_MAX:
                fields = {"peer": subscriber.peer_address}
                log.warning("a subscriber that others wait for is silent: its connection is cut", extra={"fields": fields})
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


class PublisherPeer(BudgetedPeer):
    """A publisher's connection."""

    patient = True

    def __init__(self, forwarder: Forwarder, server: Server) -> None:
        super().__init__(server)
        self._forwarder = forwarder
        self._runs: FrameRuns[Route] | None = None  # once it has greeted
        self._asked: list[bytes] = []  # control frames to be answered
        self._recorder: Recorder | None = None  # that took what came last
        self._mixed = self._began = False  # of what nothing was confirmed, some was taken by no recorder, or by another one
        self._opened = (0, 0)  # publisher, and its newest path
        self._program: Card | None = None  # of a program that has one: it proves that this publisher's id is its own
        self._proved = b""  # as the bytes of a frame; nothing of another publisher is taken then
        self._wants_stored = False  # what it is told of its paths' ends, too, is told once that is stored

    def data_received(self, data: bytes) -> None:
        """For the loop."""
        forwarder, finished = self._forwarder, False
        forwarder.was_read(self)
        if self.card is not None and self.card.quota.publish_bytes_per_second:
            forwarder.spend(self, self.card, len(data))
        data = self.opened(data)
        try:
            if self._runs is None:
                data = self._greet(data)
            if self._runs is not None and data:
                runs = self._runs.feed(data)
                forwarder.forward(runs)
                finished = bool(runs)
                if self._recorder is not forwarder.recorder:
                    self._recorder, self._mixed = forwarder.recorder, self._began
                self._began = True
                if self._asked:
                    self._answer()
                if self._runs.pongs:
                    self.answer(self._runs.pongs)
                    self._runs.pongs.clear()
        except (FrameError, AccessDenied) as error:
            forwarder.refusals.note("publisher", error)
            if isinstance(error, AccessDenied):
                turned_away(error, b"" if self._program is None else self._program.key)
            self.transport.abort()
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
        self._program = self.card if self.card is not None and self.card.role is CardRole.CLIENT else None
        forwarder, on_sender = self._forwarder, None if self._program is None else self._check_sender
        self._runs = FrameRuns(forwarder.subscriptions.route, forwarder.frame_bytes_max, self._control, on_sender)
        forwarder.absent.when_back(self, self._welcome)
        for reason in self._forwarder.holds():
            self.hold(reason)
        if any(len(parts) != 1 for parts in messages):
            raise FrameError("a message of more than one part")
        return b"".join((*(zmtp.frame(parts[0]) for parts in messages), self.parser.rest()))

    def _welcome(self) -> None:
        self.transport.write(self._forwarder.greeting)

    def _control(self, body: bytes) -> None:
        kind = body[2] if len(body) > 2 else 0
        if kind in OWN:
            raise FrameError(f"a frame of kind {kind}, which only an Exchange sends")
        if kind == FrameKind.OPEN:
            self._take_opening(body)
        if self._program is not None:
            if kind == FrameKind.RETIRE:
                raise AccessDenied(f"a publisher, {self._program.name}, can't retire an Exchange: only the Monitor does")
            self._check_sender(body)
            for part in frames.bundle_body(frames.parse(body)[2]) if kind == FrameKind.BUNDLE else ():
                self._check_sender(part)
        if kind in ANSWERED:
            self._asked.append(body)

    def _take_opening(self, body: bytes) -> None:
        """Raises FrameError, AccessDenied."""
        _, header, content = frames.parse(body)
        if header.path <= self._forwarder.fences.get(header.publisher, 0):
            raise FrameError(f"path {header.path} of a producer that was opened anew since")
        if self._program is not None and (security := self._server.security) is not None:
            proof = frames.opening_body(content).proof
            security.check_member(self._program, self._forwarder.queue, MemberId(header.publisher, proof))
            self._proved = frames.publisher_of(body)
        self._opened = header.publisher, header.path

    def _check_sender(self, frame: bytes) -> None:
        """Of a program's. frame: at least up to the publisher's id. Raises AccessDenied."""
        if frames.publisher_of(frame) != self._proved or not self._proved:
            raise AccessDenied("a program has sent a frame of a publisher that has opened no path on its connection")

    def path_of(self, publisher: int) -> float:
        """Its newest one here, if this is that publisher's connection; else beyond any."""
        return self._opened[1] if self._opened[0] == publisher else math.inf

    def _answer(self) -> None:
        """Everything before these frames is with the subscribers' queues by now, and on its way to the tape."""
        asked, self._asked = self._asked, []
        answers, recorder = [], self._forwarder.recorder
        for body in asked:
            _, header, content = frames.parse(body)
            if header.kind == FrameKind.STORE:
                self._wants_stored = True
                if recorder is None or self._mixed:
                    self._is_stored(None, header.path, frames.mark_body(content), 0)
                else:
                    recorder.when_stored(partial(self._is_stored, recorder, header.path, frames.mark_body(content)))
                self._mixed = False
            elif header.kind == FrameKind.FIN and self._wants_stored and recorder is not None:
                recorder.when_stored(partial(self._has_ended, header.path))
            else:
                self._mixed = False
                mark = frames.mark_body(content) if header.kind == FrameKind.MARK else 0
                answers.append(zmtp.frame(frames.confirmation(header.path, mark)))
        if answers:
            self.answer(answers)

    def _is_stored(self, recorder: Recorder | None, path: int, mark: int, position: int) -> None:
        """Everything before this STORE, up to that entry of the tape. recorder None: not all of it is."""
        copies = 0 if recorder is None else max(1, recorder.copies)
        self._tell(frames.store_confirmation(StoredUpTo(path, mark, copies, position)))

    def _has_ended(self, path: int, position: int) -> None:
        """Everything before this FIN is stored."""
        self._tell(frames.confirmation(path, 0))

    def _tell(self, message: bytes) -> None:
        if not self.transport.is_closing():
            self.answer([zmtp.frame(message)])


class SubscriberPeer(SubscribedPeer):
    """A subscriber's connection, whose write buffer is its queue."""

    patient = True

    def __init__(self, forwarder: Forwarder, server: Server) -> None:
        super().__init__(server, forwarder.subscriptions)
        self._forwarder = forwarder
        self._full = False
        self.dropped: DroppedTopics | None = None  # of one that is told of the tape
        self._taped = b""  # what it is to be told of it once it has room
        self._attached_at = ""  # its address, once it was told that it is attached
        self._seen = (0, 0, 0)  # what was heard, what waited, for how many looks neither changed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the loop."""
        super().connection_made(transport)
        if not transport.is_closing():
            self.transport.set_write_buffer_limits(self._forwarder.queue_bytes)

    def connection_lost(self, error: Exception | None) -> None:
        """For the loop."""
        if error is not None:
            self._forwarder.absent.broke(self._attached_at, self._forwarder.subscriptions.of(self))
        super().connection_lost(error)
        self._forwarder.forget(self)

    def subscribed(self, prefix: bytes) -> None:
        """That is active now, and so is what came before."""
        if prefix.startswith(CONTROL_PREFIX) and frames.control_prefix(FrameKind.ATTACHED).startswith(prefix):
            self._attached_at = self.peer_address
            self.transport.write(self._forwarder.attached)
            self._forwarder.absent.came(self._attached_at, self._forwarder.subscriptions.of(self))
        elif prefix == TAPED_PREFIX:
            self._forwarder.ask_tape(self)

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
        dropped, kept, told = 0, [], self.dropped
        for flags_at, begin, stop in zmtp.frames_in(data):
            if data.startswith(CONTROL_PREFIX, begin) and data[begin + 2 : begin + 3] != _BUNDLE:
                kept.append(data[flags_at:stop])
            else:
                dropped += 1
                if told is not None:
                    told.add(data[begin:stop])
        if told is not None and told.is_full:
            kept += self._what_was_dropped(told)
        self._forwarder.counters["frames_dropped"] += dropped
        if not kept:
            return
        self.transport.write(b"".join(kept))
        if self.transport.get_write_buffer_size() > 2 * self._forwarder.queue_bytes:
            self._forwarder.refusals.note("slow_subscriber", "it takes not even control frames: its connection is cut")
            self.transport.abort()

    def send_taped(self, frame: bytes) -> None:
        """Up to where everything is stored; once it is known what of that it does not get."""
        if self.dropped:
            self._taped = frame
        else:
            self.send([frame])

    def _what_was_dropped(self, dropped: DroppedTopics) -> list[bytes]:
        taped, self._taped = self._taped, b""
        return [*map(zmtp.frame, dropped.watermarks(time.time_ns())), taped]

    def pause_writing(self) -> None:
        """For the transport."""
        self._full = True
        self._forwarder.is_full(self)

    def resume_writing(self) -> None:
        """For the transport."""
        self._full = False
        self._forwarder.has_room(self)
        if self.dropped:
            self.transport.write(b"".join(self._what_was_dropped(self.dropped)))

    def waiting_bytes_max(self) -> int:
        """A full queue alone is no reason to drop one that asks."""
        return super().waiting_bytes_max() + 2 * self._forwarder.queue_bytes

    def silent_looks(self) -> int:
        """For how many looks in a row, this one included, it took nothing and said nothing."""
        heard, waits = self.heard, self.transport.get_write_buffer_size()
        looks = self._seen[2] + 1 if self._seen[:2] == (heard, waits) else 0
        self._seen = heard, waits, looks
        return looks

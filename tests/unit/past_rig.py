"""A subscriber that reads tapes that are only in memory, step by step."""

from __future__ import annotations

import time

from roq.client.read import TapeWindow
from roq.coordination.locate import GcmClient
from roq.errors import MessagesLost
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.pubsub.handover import Told
from roq.pubsub.inbox import Reached
from roq.pubsub.past import Past
from roq.pubsub.start import Start
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.tape import Tape
from roq.pubsub.tape_looks import FoundTapes
from roq.wire import gcm, zmtp
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow, to_json
from roq.wire.frame import FrameKind, PathOpening, encode_control, encode_data
from roq.wire.recording import Record, encode_entry

NOW = 1_000_000_000
P, Q = 7, 8


def data(publisher: int, path: int, number: int) -> bytes:
    return encode_data(b"t", publisher, path, number, number - 1, number - 1, [b"%d" % number], 0)


def opens(publisher: int, path: int, after: int, left: str = "", *, finished: bool = True) -> bytes:
    return encode_control(FrameKind.OPEN, publisher, path, after, PathOpening(left, finished and left != ""), 0)


def fin(publisher: int, path: int, last: int) -> bytes:
    return encode_control(FrameKind.FIN, publisher, path, last, None, 0)


class Scene:
    """A subscriber and the tapes that it reads. `given`: numbers of messages, and ranges that were reported lost. end: of a
    window; None: it is none. `done`: its position."""

    def __init__(self, start: Start = "earliest", follow: bool | str = True, end: int | None = None) -> None:
        about = GcmClient("127.0.0.1:1"), "q", (), lambda lost: None, start
        self.subscriber = Subscriber(*about, follow) if end is None else TapeWindow(*about, end)
        self.subscriber._started, self.done = time.monotonic(), dict[str, int]()
        assert self.subscriber._past is not None
        self.past: Past = self.subscriber._past

    def tape(self, name: str, state: SegmentState | None = SegmentState.OPEN, last: int = -1) -> Tape:
        """Of this Exchange, with one segment."""
        segments = () if state is None else (SegmentMetadata(f"{name}~1", 1, state, (Fragment(1, ("h",)),), last),)
        view = gcm.TapeView(f"tape.t.{name}", name, True, to_json(LogMeta(segments=segments)))
        if name in self.past.tapes.reading:
            self.past.tapes.reading[name].update(view)
        else:
            self.past.tapes.reading[name] = Tape(view, self.past.tapes.stores)
        return self.past.tapes.reading[name]

    async def read(self, name: str, at: int, *frames: bytes) -> list[int | str]:
        """The next entry of this tape, and what was given then."""
        tape = self.past.tapes.reading[name]
        tape.ahead.append((tape.done + 1, encode_entry(NOW + at, [zmtp.frame(frame) for frame in frames])))
        await self.past._hand_out(tape, [tape])
        return self.settle()

    def settle(self) -> list[int | str]:
        """A look whether somebody waits no longer. What was given since the last one."""
        self.past._finish()
        self.subscriber.settle()
        taken, self.subscriber._buffer = list(self.subscriber._buffer), type(self.subscriber._buffer)()
        for one in taken:
            if isinstance(one, Reached):
                self.done.update(one.entries)
        return [
            _told(one) if isinstance(one, MessagesLost) else one.header.sequence
            for one in taken
            if not isinstance(one, Reached)
        ]

    def attach(self, *names: str) -> None:
        """Join, at Exchanges that do not answer."""
        exchanges = tuple(wire.ExchangeAddress(name, "127.0.0.1", 1, 1, 1) for name in names)
        self.subscriber._tapes = "t"
        self.subscriber.take(wire.SubscriberWelcome(1, 1, exchanges, Overflow.BLOCK, 4096))
        self.past._arrived, self.past._since = True, time.monotonic()

    def told(self, name: str, entry: int) -> None:
        """The Exchange has said where its messages begin; then somebody looked at the tapes."""
        waiting = self.past.handover.waiting
        attachment = next(one for one in waiting if one.exchange.id == name)
        waiting[attachment].told = Told(entry, time.monotonic())
        self.past.tapes.looked = time.monotonic()


def _told(lost: MessagesLost) -> str:
    return f"{'' if lost.count else 'perhaps '}lost {lost.first}..{lost.last}"


def listed(*of_a: LogMeta) -> FoundTapes:
    """What the GCM says of the tape of A."""
    views = tuple(gcm.TapeView("tape.t.A", "A", True, to_json(meta)) for meta in of_a)
    return FoundTapes(gcm.Tapes("t", Record(), True, views, {}), time.monotonic(), NOW)

"""When a subscriber that begins with the past goes on: what counts as read, and what is waited for.

Every interleaving of tapes: tests/model/test_tapes.py. Not covered: reading from stores, tests/integration.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from roq.coordination.locate import GcmClient
from roq.errors import MessagesLost
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.pubsub.inbox import Reached
from roq.pubsub.past import SKEW_MS, Past, Tape, Told, has_older
from roq.pubsub.subscriber import HOLD_SECONDS, Subscriber
from roq.wire import gcm, zmtp
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow, to_json
from roq.wire.frame import FrameKind, PathOpening, encode_control, encode_data
from roq.wire.limits import SUBSCRIBER_BYTES_QUEUED
from roq.wire.recording import encode_entry

NOW = 1_000_000_000
P, Q = 7, 8


def data(publisher: int, path: int, number: int) -> bytes:
    return encode_data(b"t", publisher, path, number, number - 1, number - 1, [b"%d" % number], 0)


def opens(publisher: int, path: int, after: int, left: str = "", *, finished: bool = True) -> bytes:
    return encode_control(FrameKind.OPEN, publisher, path, after, PathOpening(left, finished and left != ""), 0)


def fin(publisher: int, path: int, last: int) -> bytes:
    return encode_control(FrameKind.FIN, publisher, path, last, None, 0)


class Scene:
    """A subscriber and the tapes that it reads. `given`: numbers of messages, and ranges that were reported lost."""

    def __init__(self) -> None:
        self.subscriber = Subscriber(GcmClient("127.0.0.1:1"), "q", (), lambda lost: None, "earliest")
        self.subscriber._started = time.monotonic()
        assert self.subscriber._past is not None
        self.past: Past = self.subscriber._past

    def tape(self, name: str, state: SegmentState | None = SegmentState.OPEN, last: int = -1) -> Tape:
        """Of this Exchange, with one segment."""
        segments = () if state is None else (SegmentMetadata(f"{name}~1", 1, state, (Fragment(1, ("h",)),), last),)
        view = gcm.TapeView(f"tape.t.{name}", name, True, to_json(LogMeta(segments=segments)))
        if name in self.past._reading:
            self.past._reading[name].update(view)
        else:
            self.past._reading[name] = Tape(view, self.past._stores)
        return self.past._reading[name]

    async def read(self, name: str, at: int, *frames: bytes) -> list[int | str]:
        """The next entry of this tape, and what was given then."""
        tape = self.past._reading[name]
        tape.ahead.append((tape.done + 1, encode_entry(NOW + at, [zmtp.frame(frame) for frame in frames])))
        await self.past._hand_out(tape, [tape])
        return self.settle()

    def settle(self) -> list[int | str]:
        """A look whether somebody waits no longer. What was given since the last one."""
        self.past._finish()
        self.subscriber.settle()
        taken, self.subscriber._buffer = list(self.subscriber._buffer), type(self.subscriber._buffer)()
        return [
            f"lost {one.first}..{one.last}" if isinstance(one, MessagesLost) else one.header.sequence
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
        attachment = next(one for one in self.past._holding if one.exchange.id == name)
        self.past._holding[attachment] = Told(entry, time.monotonic())
        self.past._looked = time.monotonic()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.subscriber.close(0)


@pytest.mark.parametrize(
    ("exchange", "origin", "older"),
    [
        ("A", ("B", NOW - SKEW_MS), True),
        ("A", ("B", NOW - SKEW_MS - 1), False),
        ("A", ("A", NOW), False),
        ("E", ("B", NOW), False),
        ("X", ("B", NOW), False),
        ("", ("B", NOW), True),
        ("", ("A", NOW), False),
        ("", ("E", NOW - SKEW_MS - 1), False),
    ],
)
async def test_a_tape_may_have_what_is_older_until_it_was_read_so_far(
    scene: Scene, exchange: str, origin: tuple[str, int], older: bool
) -> None:
    scene.tape("A").written = NOW
    scene.tape("E", SegmentState.CLOSED, 1).done = 1
    assert has_older(scene.past._reading, exchange, origin) is older
    assert scene.past.unread(exchange, origin) is older


async def test_a_path_begins_at_once_when_the_end_of_the_one_before_was_read(scene: Scene) -> None:
    """The tape of an idle Exchange never gets any later."""
    scene.tape("A")
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1), fin(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 1, "A"), data(P, 2, 2)) == [2]


async def test_the_end_is_waited_for_however_late_its_exchange_wrote_it(scene: Scene) -> None:
    scene.tape("A")
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await scene.read("A", 3 * SKEW_MS, opens(Q, 1, 0), data(Q, 1, 1)) == [1]
    assert await scene.read("A", 4 * SKEW_MS, data(P, 1, 2), fin(P, 1, 2)) == [2, 3]


@pytest.mark.parametrize("state", [SegmentState.OPEN, SegmentState.CLOSED])
async def test_the_rest_of_an_entry_may_be_much_older_than_its_time(scene: Scene, state: SegmentState) -> None:
    """A recorder that waited for its stores writes what came meanwhile in one entry; it counts as read at its end."""
    scene.tape("A", state, 1 if state is SegmentState.CLOSED else -1)
    scene.tape("B")
    assert await scene.read("B", 0, opens(P, 2, 2, "A", finished=False), data(P, 2, 3)) == []
    assert await scene.read("A", 2 * SKEW_MS, opens(P, 1, 0), data(P, 1, 1), data(P, 1, 2)) == [1, 2, 3]


async def test_if_the_end_is_missing_the_replay_that_follows_goes_first(scene: Scene) -> None:
    """A died before it had forwarded 2 and the FIN: the path through B begins again."""
    scene.tape("A", SegmentState.CLOSED, 1)
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await scene.read("B", SKEW_MS, opens(P, 3, 1, "B", finished=False), data(P, 3, 2), data(P, 3, 3)) == [2, 3]


async def test_if_no_replay_follows_it_goes_on_without_the_end(scene: Scene) -> None:
    scene.tape("A", SegmentState.CLOSED, 1)
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await scene.read("B", 2 + SKEW_MS, data(P, 2, 4)) == ["lost 2..2", 3, 4]


async def test_a_tape_that_nobody_has_closed_is_no_wait_that_ends_by_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What A wrote last can be read when it is closed, which takes longer than a missing FIN is waited for."""
    scene.tape("A")
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 1, "A", finished=False), data(P, 2, 2)) == []
    scene.subscriber._order.publishers[P].waiting_since = time.monotonic() - 2 * HOLD_SECONDS
    assert scene.settle() == []
    scene.tape("A", SegmentState.CLOSED, 1)
    assert scene.settle() == [2]


async def test_what_waited_for_its_tape_counts_as_unread_until_then(scene: Scene) -> None:
    """The FIN of a path that another one's tape follows may be on its way from a live Exchange."""
    scene.tape("A")
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 1, "A"), data(P, 2, 2)) == []
    scene.subscriber._order.publishers[P].waiting_since = time.monotonic() - 2 * HOLD_SECONDS
    scene.attach("A", "B")
    for attachment in scene.past._holding:
        attachment.proved = True
    scene.told("A", 1)
    scene.told("B", 1)
    assert scene.settle() == []
    assert not scene.past._holding
    for attachment in scene.subscriber._attachments.values():
        attachment.looking = False
    assert scene.settle() == [], "it was released just now"


@pytest.mark.parametrize(("recorded", "entry"), [(True, 0), (False, 0), (True, 1), (False, 1)])
async def test_an_exchange_that_records_no_longer_is_read_to_the_end_of_its_tape(
    scene: Scene, recorded: bool, entry: int
) -> None:
    """It says that nothing comes first, though it may still be writing the last of it."""
    tape = scene.tape("A")
    tape.done = entry
    scene.attach("A")
    scene.told("A", entry)
    scene.past._recorded = recorded
    scene.settle()
    assert bool(scene.past._holding) is (not recorded and not entry)
    scene.tape("A", SegmentState.CLOSED, max(1, entry))
    tape.done = 1
    scene.settle()
    assert not scene.past._holding


async def test_an_exchange_is_read_until_it_has_said_where_its_messages_begin(scene: Scene) -> None:
    """It can't say so before it has its tape; publishers have sent much by then."""
    scene.attach("A")
    (attachment,) = scene.past._holding
    attachment.frames.append(data(P, 1, 1))
    attachment.link.received_bytes += 2 * SUBSCRIBER_BYTES_QUEUED
    assert scene.past.holds(attachment)
    assert not attachment.link._paused
    attachment.frames.append(encode_control(FrameKind.TAPED, 0, 0, 3, "A", 0))
    assert scene.past.holds(attachment)
    assert attachment.proved
    assert attachment.link._paused, "the tape comes first"

"""The position of a live subscriber, when a connection to an Exchange begins behind what it had: what lies between may not have
come. The real subscriber; frames are put before it by hand. Not covered: what reports the loss, tests/unit/test_order*.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from roq.coordination.locate import GcmClient
from roq.pubsub import inbox
from roq.pubsub.inbox import UNSAID_SECONDS
from roq.pubsub.subscriber import Subscriber
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import FrameKind, encode_control
from tests.unit.past_rig import P, data, opens


def address(name: str) -> wire.ExchangeAddress:
    return wire.ExchangeAddress(name, "127.0.0.1", 1, 1, 1)


class Live:
    """A subscriber that has read the tapes: that of A up to entry 3, that of B up to entry 5."""

    def __init__(self) -> None:
        self.subscriber = Subscriber(GcmClient("127.0.0.1:1"), "q", (), lambda lost: None, "earliest")
        self.subscriber._started, self.subscriber._tapes = time.monotonic(), "t"
        self.subscriber._done.update(A=3, B=5)
        self.subscriber.is_over()
        exchanges = tuple(address(name) for name in "AB")
        self.subscriber.take(wire.SubscriberWelcome(1, 1, exchanges, Overflow.BLOCK, 4096))
        self.now = time.monotonic()

    def come(self, name: str, *frames: bytes) -> None:
        (attachment,) = [one for one in self.subscriber._attachments.values() if one.exchange.id == name]
        attachment.frames.extend(frames)
        self.subscriber._read(attachment)

    def done(self) -> dict[str, int]:
        """Of the position, once the application has taken all."""
        for item in self.subscriber._buffer:
            if isinstance(item, inbox.Reached):
                self.subscriber._count(item)
        self.subscriber._buffer.clear()
        position = self.subscriber.position
        assert position is not None
        return dict(position.done)


def attached(name: str) -> bytes:
    return encode_control(FrameKind.ATTACHED, 0, 0, 0, address(name).token, 0)


def taped(name: str, entry: int) -> bytes:
    return encode_control(FrameKind.TAPED, 0, 0, entry, address(name).token, 0)


@pytest.fixture
async def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    live = Live()
    monkeypatch.setattr(inbox, "time", SimpleNamespace(monotonic=lambda: live.now, time_ns=time.time_ns))
    return live


@pytest.fixture(autouse=True)
def ends(live: Live) -> Iterator[None]:
    yield
    live.subscriber._drop_attachments()


async def test_a_connection_that_begins_where_the_tape_was_read_holds_up_no_position(live: Live) -> None:
    live.come("A", attached("A"), taped("A", 3), opens(P, 1, 0), data(P, 1, 1), taped("A", 4))
    assert live.done() == {"A": 4, "B": 5}


async def test_what_came_before_the_connection_is_not_counted_before_it_may_have_been_reported(live: Live) -> None:
    """Nor is anything else: a position says of all publishers what was taken."""
    live.come("B", attached("B"), taped("B", 5))
    live.come("A", attached("A"), taped("A", 7), taped("A", 7), data(P, 1, 9), taped("A", 8))
    live.come("B", taped("B", 6))
    assert live.done() == {"A": 3, "B": 5}
    live.now += UNSAID_SECONDS
    live.subscriber.put_marks()
    assert live.subscriber.holds_back() is False
    assert live.done() == {"A": 8, "B": 6}


async def test_a_connection_that_is_made_anew_says_anew_where_it_begins(live: Live) -> None:
    """Entries 4 to 6 were sent while there was none."""
    live.come("A", attached("A"), taped("A", 3))
    live.come("A", attached("A"), taped("A", 6), taped("A", 6))
    assert live.done() == {"A": 3, "B": 5}
    live.now += UNSAID_SECONDS / 2
    live.come("A", attached("A"), taped("A", 6), taped("A", 7))
    assert live.done() == {"A": 3, "B": 5}, "what waits does not count, though it is no news that it may be lost"
    live.now += UNSAID_SECONDS
    live.come("A", taped("A", 8))
    assert live.done() == {"A": 8, "B": 5}


async def test_until_it_has_said_where_it_begins_no_position_moves(live: Live) -> None:
    live.come("B", attached("B"), taped("B", 5))
    live.come("A", attached("A"))
    live.come("B", taped("B", 6))
    assert live.done() == {"A": 3, "B": 5}
    live.come("A", taped("A", 3))
    live.come("B", taped("B", 6))
    assert live.done() == {"A": 3, "B": 6}

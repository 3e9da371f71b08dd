"""When a subscriber that begins with the past goes on: what counts as read, and what is waited for.

Every interleaving of tapes: tests/model/test_tapes.py. Not covered: reading from stores, tests/integration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from roq.coordination.locate import GcmClient
from roq.errors import AccessDenied, InvalidConfiguration, RoqError, Unavailable
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.pubsub import outage
from roq.pubsub.inbox import Reached
from roq.pubsub.order import FOREVER
from roq.pubsub.order_limits import HOLD_SECONDS
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Batch
from roq.pubsub.tape import SKEW_MS, UNCONFIRMED_MS, has_older
from roq.pubsub.tape_looks import FoundTapes
from roq.wire import zmtp
from roq.wire.frame import FrameKind, encode_control, encode_data
from roq.wire.limits import SUBSCRIBER_BYTES_QUEUED
from roq.wire.recording import encode_entry
from tests.unit.past_rig import NOW, P, Q, Scene, data, fin, opens


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
    assert has_older(scene.past.tapes.reading, exchange, origin) is older
    assert scene.past.unread(exchange, origin) is older


@pytest.mark.parametrize(
    ("exchange", "origin", "older"),
    [
        ("A", ("B", NOW - SKEW_MS), True),
        ("A", ("B", NOW - SKEW_MS - 1), False),
        ("A", ("", NOW - SKEW_MS - 1), True),  # of itself: its clock is not the one that says when it was seen
        ("A", ("", NOW - 2 * SKEW_MS - 1), False),
        ("", ("B", NOW - SKEW_MS - 1), False),
    ],
)
async def test_or_until_its_end_was_seen_late_enough(scene: Scene, exchange: str, origin: tuple[str, int], older: bool) -> None:
    scene.tape("A").seen = NOW
    assert scene.past.unread(exchange, origin) is older


async def test_an_exchange_that_is_not_known_may_have_a_tape_that_was_made_just_now(scene: Scene) -> None:
    """Until somebody has looked for tapes late enough; never one whose tape was read to its end."""
    scene.past.tapes.looked_ms = NOW
    late = NOW - UNCONFIRMED_MS - SKEW_MS
    assert scene.past.unread("X", ("B", late))
    assert not scene.past.unread("X", ("B", late - 1))
    assert not scene.past.unread("X", ("B", FOREVER)), "nobody knows whether its end will ever come"
    scene.tape("E", SegmentState.CLOSED, 1).done = 1
    scene.past.tapes.leave("E")
    assert not scene.past.unread("E", ("B", NOW))


async def test_a_move_away_from_it_waits_until_its_tape_is_found(scene: Scene) -> None:
    scene.tape("B")
    scene.past.tapes.looked_ms = NOW
    assert await scene.read("B", 1, opens(Q, 1, 0), data(Q, 1, 1), fin(Q, 1, 1)) == [1]
    assert await scene.read("B", 2, opens(Q, 3, 2, "C"), data(Q, 3, 3)) == [], "path 2 was on a tape that is not known yet"
    scene.tape("C")
    assert await scene.read("C", 1, opens(Q, 2, 1, "B"), data(Q, 2, 2)) == [2]
    assert await scene.read("C", 3, fin(Q, 2, 2)) == [3]


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


@pytest.mark.parametrize("given", [False, True])
async def test_of_a_path_whose_beginning_lies_before_a_position_nothing_is_missing(scene: Scene, given: bool) -> None:
    """Also behind the ends of paths before it, which may lie anywhere; not so once anything was given."""
    scene.subscriber._order.amid = True
    scene.tape("A")
    scene.tape("B")
    assert await scene.read("A", 0, fin(P, 1, 2)) == []
    assert await scene.read("B", 1, *([data(P, 3, 4)] if given else []), fin(P, 3, 4)) == ([4] if given else [])
    scene.tape("A", SegmentState.CLOSED, 2)
    scene.tape("B", SegmentState.CLOSED, 1)
    lost = ["lost 5..7"] if given else []
    assert await scene.read("A", 2, data(P, 6, 8), data(P, 6, 9)) == [*lost, 8, 9]


async def test_nobody_knows_whether_what_was_on_paths_is_missing_that_lie_before_a_position(scene: Scene) -> None:
    """2 comes again, from an Exchange that was cut off; what was sent on path 2 was taken before. Paths that were seen leave no
    doubt."""
    scene.subscriber._order.amid = True
    for name in "ABC":
        scene.tape(name)
    assert await scene.read("B", 0, opens(P, 3, 5, "B", finished=False), data(P, 3, 6)) == []
    assert await scene.read("A", 1, data(P, 1, 2)) == []
    scene.tape("C").seen = scene.tape("B").seen = NOW + 2 * SKEW_MS
    assert await scene.read("A", 2 * SKEW_MS, data(Q, 1, 1)) == [1, 2, "perhaps lost 3..5", 6]
    assert await scene.read("B", 1, opens(P, 4, 7, "B", finished=False), data(P, 4, 8)) == ["lost 7..7", 8]


async def test_nor_whether_the_beginning_of_such_a_path_is(scene: Scene) -> None:
    """Of path 2 only the end is behind the position."""
    scene.subscriber._order.amid = True
    for name in "ABC":
        scene.tape(name)
    assert await scene.read("C", 0, opens(P, 3, 7, "B", finished=False), data(P, 3, 8)) == []
    assert await scene.read("A", 1, opens(P, 1, 1, "A", finished=False), data(P, 1, 2)) == []
    assert await scene.read("B", 2, data(P, 2, 6), data(P, 2, 7)) == []
    scene.tape("C").seen = NOW + 2 * SKEW_MS
    assert await scene.read("B", 2 * SKEW_MS, data(Q, 1, 1)) == [1, 2, "perhaps lost 3..5", 6, 7, 8]


async def test_what_waited_for_its_tape_counts_as_unread_until_then(scene: Scene) -> None:
    """The FIN of a path that another one's tape follows may be on its way from a live Exchange."""
    scene.tape("A")
    scene.tape("B")
    assert await scene.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await scene.read("B", 1, opens(P, 2, 1, "A"), data(P, 2, 2)) == []
    scene.subscriber._order.publishers[P].waiting_since = time.monotonic() - 2 * HOLD_SECONDS
    scene.attach("A", "B")
    for attachment in scene.past.handover.waiting:
        attachment.proved = True
    scene.told("A", 1)
    scene.told("B", 1)
    assert scene.settle() == []
    assert not scene.past.handover.waiting
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
    scene.past.tapes.recorded = recorded
    scene.settle()
    assert bool(scene.past.handover.waiting) is (not recorded and not entry)
    scene.tape("A", SegmentState.CLOSED, max(1, entry))
    tape.done = 1
    scene.settle()
    assert not scene.past.handover.waiting


async def test_an_exchange_is_read_until_it_has_said_where_its_messages_begin(scene: Scene) -> None:
    """It can't say so before it has its tape; publishers have sent much by then."""
    scene.attach("A")
    (attachment,) = scene.past.handover.waiting
    attachment.frames.append(data(P, 1, 1))
    attachment.link.received_bytes += 2 * SUBSCRIBER_BYTES_QUEUED
    assert scene.past.handover.holds(attachment)
    assert not attachment.link._paused
    attachment.frames.append(encode_control(FrameKind.TAPED, 0, 0, 3, "A", 0))
    assert scene.past.handover.holds(attachment)
    assert attachment.proved
    assert attachment.link._paused, "the tape comes first"


async def test_a_connection_that_is_made_anew_meanwhile_begins_later_on_the_tape(scene: Scene) -> None:
    """What was lost in between is there; what is stored meanwhile (another TAPED) does not move the beginning."""
    tape = scene.tape("A")
    scene.attach("A")
    (attachment,) = scene.past.handover.waiting

    def comes(*frames: bytes) -> None:
        attachment.frames.extend(frames)
        assert scene.past.handover.holds(attachment)
        scene.past.tapes.looked = time.monotonic()

    attached = encode_control(FrameKind.ATTACHED, 0, 0, 0, "A", 0)
    begin, stored, again = (encode_control(FrameKind.TAPED, 0, 0, entry, "A", 0) for entry in (3, 4, 7))
    comes(attached, begin, data(P, 1, 4), stored)
    comes(attached)
    comes(again, data(P, 1, 8))
    tape.done = 6
    scene.settle()
    assert scene.past.handover.waiting
    tape.done = 7
    scene.settle()
    assert not scene.past.handover.waiting


async def test_one_that_is_made_anew_while_other_tapes_are_read_waits_for_its_own_again(scene: Scene) -> None:
    """What was lost in between is on it; nothing shows the loss of what a reader from a position may not know."""
    attached = encode_control(FrameKind.ATTACHED, 0, 0, 0, "A/1", 0)
    begin, stored, again = (encode_control(FrameKind.TAPED, 0, 0, entry, "A/1", 0) for entry in (3, 4, 7))
    tape = scene.tape("A")
    scene.tape("B")
    scene.attach("A")
    (attachment,) = scene.past.handover.waiting
    attachment.frames.extend([attached, begin])
    assert scene.past.handover.holds(attachment)
    tape.done, scene.past.tapes.looked = 3, time.monotonic()
    scene.settle()
    assert not scene.past.handover.waiting
    scene.subscriber._read(attachment)
    attachment.frames.extend([stored, attached])
    scene.subscriber._read(attachment)
    scene.past.tapes.looked = time.monotonic()
    scene.tape("A").done = 6
    scene.settle()
    assert scene.past.handover.waiting, "where it begins is not known"
    attachment.frames.append(again)
    scene.subscriber._read(attachment)
    assert (len(attachment.frames), scene.past.tapes.looked) == (3, 0.0), "its tape is looked for"
    scene.past.tapes.looked = time.monotonic()
    scene.settle()
    assert scene.past.handover.waiting
    scene.past.tapes.reading["A"].done = 7
    scene.settle()
    assert not scene.past.handover.waiting


@pytest.mark.parametrize("run", [1, 2, 3, 100], ids="{} entries at once".format)
@pytest.mark.parametrize(
    ("times", "begins"),
    [
        ((100, 210, 150, 220), 2),  # the clock was set back
        ((210, 150, 220), 1),
        ((100, 110, 150, 210, 220), 4),
        ((100, 150), 3),
        ((200, 200), 1),
        ((), 1),
        ((100, 210, 150, 160, 170, 180, 190, 195, 230, 240), 2),
    ],
)
async def test_a_time_begins_with_the_first_entry_that_is_late_enough(
    scene: Scene, times: tuple[int, ...], begins: int, run: int
) -> None:
    """As one that ends at a time leaves out that entry and all that follow."""
    tape = scene.tape("A")
    entries = [(number, encode_entry(NOW + time, [])) for number, time in enumerate((-9_000, -5_000, *times), 1)]

    async def read_from(_meta: LogMeta, after: int, wait_seconds: float = 0.0, **_: object) -> list[tuple[int, bytes]]:
        return entries[after : after + run]

    tape.read_from = read_from  # type: ignore[assignment, method-assign]
    await tape.seek(NOW + 200)
    assert tape.done == begins + 1


@pytest.mark.parametrize("error", [Unavailable("no GCM leads"), AccessDenied("the card begins in 9 s: is the clock wrong?")])
async def test_who_waits_for_a_leader_is_told_why(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: RoqError
) -> None:
    monkeypatch.setattr(outage, "QUIET_SECONDS", 0.0)
    caplog.set_level("INFO", outage.__name__)
    asked = asyncio.Event()

    async def ask(since: float | None = None) -> FoundTapes:
        asked.set()
        raise error

    scene.past.tapes.ask = ask  # type: ignore[method-assign]
    scene.past._start_task(scene.past._run())
    await asyncio.wait_for(asked.wait(), 5.0)
    (warned,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert vars(warned)["fields"] == {"queue": "q", "reason": str(error)}
    assert scene.subscriber._failure is None


async def test_what_follows_is_said_in_one_of_three_ways() -> None:
    for follow in ("live", "", None, 1):
        with pytest.raises(InvalidConfiguration, match="'stored'"):
            Scene(follow=follow)  # type: ignore[arg-type]
    assert Subscriber(GcmClient("127.0.0.1:1"), "q", (), lambda lost: None, "live", False)._past is None


@pytest.fixture
async def ending() -> AsyncIterator[Scene]:
    """One that ends with what was written up to NOW."""
    made = Scene(follow=False)
    made.past._present = NOW
    yield made
    await made.subscriber.close(0)


@pytest.mark.parametrize(("late", "read"), [(SKEW_MS, [1, 2, 3]), (SKEW_MS + 1, [])])
async def test_who_reads_to_the_end_goes_on_where_others_wait_for_what_was_written_before(
    ending: Scene, late: int, read: list[int]
) -> None:
    """A's clock is ahead: what was published before this was opened has a later time."""
    ending.tape("A")
    ending.tape("B")
    assert await ending.read("B", 0, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await ending.read("A", late, opens(Q, 1, 0), data(Q, 1, 1)) == [1]
    assert await ending.read("A", late + 1, opens(P, 1, 0), data(P, 1, 1), data(P, 1, 2), fin(P, 1, 2)) == read
    assert await ending.read("A", late + 2, data(Q, 1, 2)) == [], "nobody waits for that"


@pytest.mark.parametrize(("position", "read"), [(900, [2]), (901, [])])
async def test_behind_the_end_nothing_is_read_though_what_lies_before_was_passed_over(
    ending: Scene, position: int, read: list[int]
) -> None:
    """It has none of the topics."""
    tape = ending.tape("A")
    ending.past._ends = {"A": 900}
    assert await ending.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    tape.ahead.append((position, encode_entry(NOW + 1, [zmtp.frame(data(P, 1, 2))])))
    await ending.past._hand_out(tape, [tape])
    assert ending.settle() == read


# --- the last message of each topic ---------------------------------------------------------------------------------------


def on(topic: bytes, number: int, before: int, *payloads: bytes) -> bytes:
    return encode_data(topic, P, 1, number, before, before, list(payloads), 0)


async def test_of_the_past_only_the_last_message_of_each_topic_is_given_in_their_order() -> None:
    scene = Scene("last")
    scene.tape("A")
    assert await scene.read("A", 0, opens(P, 1, 0), on(b"t", 1, 0, b"1", b"2", b"3"), on(b"u", 4, 0, b"4")) == []
    scene.subscriber.reached("A", 1)
    assert await scene.read("A", 1, on(b"t", 5, 3, b"5"), on(b"v", 7, 0, b"7"), on(b"t", 9, 8, b"9")) == ["lost 6..8"]
    assert scene.subscriber.health().buffered_bytes == 0
    scene.subscriber.give_latest()
    items = list(scene.subscriber._buffer)
    given = [(one.header.sequence, one.payloads) for one in items if isinstance(one, Batch)]
    assert given == [(4, [b"4"]), (7, [b"7"]), (9, [b"9"])]
    assert items[-1] == Reached({"A": 2}), "a position says nothing before they were taken"
    assert scene.subscriber.health().buffered_bytes > 0
    scene.subscriber._buffer.clear()
    assert await scene.read("A", 2, on(b"t", 10, 9, b"10", b"11")) == [10], "everything from then on"
    await scene.subscriber.close(0)

"""One that follows what is stored: what it waits for, for how long, and how far behind it is.

Not covered: reading from stores, tests/integration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest

import roq.pubsub.past as past_module
import roq.pubsub.subscriber as subscriber_module
from roq.errors import DataLost, LogUnavailable, MessagesLost, NotRecorded, RoqError
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.pubsub import tape_watches
from roq.pubsub.order_limits import FULL_HOLD_SECONDS, STORED_HOLD_SECONDS, SWEEP_SECONDS, TELL_SECONDS
from roq.pubsub.tape import LATELY_SECONDS, SKEW_MS, UNREADABLE_SECONDS, Tape
from roq.pubsub.tape_looks import FoundTapes
from roq.wire import gcm, zmtp
from roq.wire.assignment import to_json
from roq.wire.frame import FrameKind, encode_control
from roq.wire.recording import Record, encode_entry
from tests.unit.past_rig import NOW, P, Q, Scene, data, fin, listed, opens


@pytest.fixture
async def following() -> AsyncIterator[Scene]:
    """In the present."""
    made = Scene(follow="stored")
    await made.past._arrive()
    yield made
    await made.subscriber.close(0)


async def test_it_is_ready_in_the_present_and_goes_on(following: Scene) -> None:
    following.subscriber._opened = True
    await following.subscriber.ready(0.1)
    following.tape("A")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert following.subscriber.health().problems == ()
    assert not following.past._over()


async def test_a_replay_waits_until_the_end_of_the_tape_that_was_left_was_seen(following: Scene) -> None:
    following.tape("A")
    following.tape("B")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await following.read("B", 1, opens(P, 2, 1, "A", finished=False), data(P, 2, 2)) == []
    following.tape("A").seen = NOW + SKEW_MS + 1
    assert following.settle() == []
    following.tape("A").seen = NOW + SKEW_MS + 2
    assert following.settle() == [2]


async def waits(following: Scene, left: SegmentState = SegmentState.OPEN) -> Tape:
    """2 waits on B for the end of the path through A, for as long as is waited; the tape of A."""
    tape = following.tape("A", left, 9 if left is SegmentState.CLOSED else -1)
    following.tape("B")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await following.read("B", 1, opens(P, 2, 1, "A"), data(P, 2, 2)) == []
    following.subscriber._order.publishers[P].waiting_since = time.monotonic() - STORED_HOLD_SECONDS
    tape.looked, tape.late_at = time.monotonic(), 0.0
    return tape


async def test_an_end_that_never_comes_is_given_up_after_a_long_time(following: Scene) -> None:
    """Its tape was read to the end all the time."""
    await waits(following)
    following.subscriber._order.publishers[P].waiting_since = time.monotonic() - STORED_HOLD_SECONDS + 1
    assert following.settle() == []
    following.subscriber._order.publishers[P].waiting_since = time.monotonic() - STORED_HOLD_SECONDS
    assert following.settle() == [2]


@pytest.mark.parametrize("late", [False, True])
async def test_not_while_its_tape_has_what_was_not_handed_out(following: Scene, late: bool) -> None:
    """The application may need longer than that for what comes before it. late: it was handed out just now."""
    tape = await waits(following)
    tape.ahead.append((2, encode_entry(NOW + 2, [zmtp.frame(one) for one in (opens(Q, 1, 0), data(Q, 1, 1))])))
    if late:
        await following.past._hand_out(tape, [tape])
    assert following.settle() == ([1] if late else [])
    tape.ahead.clear()
    tape.late_at = time.monotonic() - STORED_HOLD_SECONDS
    assert following.settle() == [2]


@pytest.mark.parametrize("state", [SegmentState.OPEN, SegmentState.RECOVERY, SegmentState.CLOSED])
async def test_a_tape_that_cannot_be_read_is_waited_for_longer(following: Scene, state: SegmentState) -> None:
    """The hosts that have it are down."""
    tape = await waits(following, state)

    async def read_from(*_: object, **__: object) -> list[tuple[int, bytes]]:
        raise LogUnavailable("the host is down")

    tape.read_from = read_from  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(LogUnavailable):
            await tape.fetch()
        assert following.settle() == []
    tape._failing -= UNREADABLE_SECONDS + STORED_HOLD_SECONDS - 1
    assert following.settle() == []
    tape._failing -= 1
    assert following.settle() == [2]


async def test_the_wait_is_told_in_the_log(following: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "roq.pubsub.order_limits")  # another test may have set another one for all
    await waits(following)
    following.subscriber._order.publishers[P].waiting_since = time.monotonic() - TELL_SECONDS - 1
    for told in (0, 1, 1):
        assert following.settle() == []
        assert sum("wait for what they sent before" in record.message for record in caplog.records) == told
        following.subscriber._limits._told -= TELL_SECONDS if not told else 0


async def test_while_too_much_is_held_back_only_tapes_that_are_waited_for_are_read(
    following: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no wait is given up for want of memory: the rest stays on the tapes."""
    monkeypatch.setattr(subscriber_module, "HELD_BYTES", 3_000)
    monkeypatch.setattr(subscriber_module, "HELD_BYTES_MAX", 6_000)
    left, behind = following.tape("A"), following.tape("B")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await following.read("B", 1, opens(P, 2, 2, "A")) == []
    behind.ahead.extend((number, encode_entry(NOW + number, [zmtp.frame(data(P, 2, number))])) for number in range(3, 40))
    await following.past._hand_out(behind, [behind])
    assert following.settle() == []
    assert behind.ahead, "the next ones wait on the tape"
    assert following.past._admits(left)
    assert following.subscriber._order.unfinished == 0
    following.subscriber._order.publishers[P].waiting_since = time.monotonic() - FULL_HOLD_SECONDS + 1
    left.looked, left.late_at = time.monotonic(), 0.0
    assert following.settle() == []
    assert (await following.read("A", 2, data(P, 1, 2), fin(P, 1, 2)))[:2] == [2, 3]
    await following.past._hand_out(behind, [behind])
    assert following.settle()[-1] == 39


async def test_if_nothing_comes_from_them_either_the_wait_is_given_up_sooner(
    following: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = await waits(following)
    following.subscriber._order.publishers[P].waiting_since = time.monotonic() - FULL_HOLD_SECONDS
    assert following.settle() == []
    monkeypatch.setattr(subscriber_module, "HELD_BYTES", 1_000)
    left.ahead.append((2, encode_entry(NOW, [])))
    assert following.settle() == []
    left.ahead.clear()
    assert following.settle() == [2]


async def test_a_replay_that_is_waited_for_may_be_on_any_tape(following: Scene) -> None:
    """Its Exchange may have died, too: they are to be read while too much is held back."""
    left = following.tape("A", SegmentState.CLOSED, 1)
    following.tape("B")
    following.tape("C")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert left.ended
    assert await following.read("B", 1, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    order = following.subscriber._order
    assert [order.waits_for_tape(one) for one in ("A", "B", "C")] == [False, True, True]
    assert order.awaits() == {""}


async def test_a_path_whose_place_is_not_known_is_waited_for_on_every_tape_that_was_not_read_so_far(following: Scene) -> None:
    for name in "ABC":
        following.tape(name)
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    following.tape("C").written = NOW + 2 * SKEW_MS
    assert await following.read("B", 1, data(P, 3, 4)) == []
    order = following.subscriber._order
    assert [order.waits_for_tape(one) for one in ("A", "B", "C")] == [True, False, False]


# --- what can't be read -------------------------------------------------------------------------------------------------


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """One that follows what is stored, at its beginning. B has one entry; nobody lists tapes."""
    made = Scene(follow="stored")
    made.subscriber._opened = True

    async def look() -> None:
        made.past.tapes.looked, made.past.tapes.looked_ms = time.monotonic(), time.time_ns() // 1_000_000

    async def ask(since: float | None = None) -> FoundTapes:
        reading = made.past.tapes.reading
        views = tuple(gcm.TapeView(tape.log_id, name, True, to_json(tape.metadata)) for name, tape in reading.items())
        return FoundTapes(gcm.Tapes("t", Record(), True, views, {}), time.monotonic(), time.time_ns() // 1_000_000)

    async def one_entry(_meta: LogMeta, after: int, wait_seconds: float = 0.0, **_: object) -> list[tuple[int, bytes]]:
        if not after:
            return [(1, encode_entry(NOW, [zmtp.frame(frame) for frame in (opens(P, 1, 0), data(P, 1, 1))]))]
        await asyncio.sleep(wait_seconds)
        return []

    made.past.tapes.look, made.past.tapes.ask = look, ask  # type: ignore[method-assign]
    made.tape("B").read_from = one_entry  # type: ignore[assignment, method-assign]
    monkeypatch.setattr(past_module, "REFRESH_SECONDS", 0.01)
    for name, seconds in {"RETRY_SECONDS": 0.01, "WATCH_SECONDS": 0.01, "LOST_SECONDS": 0.05, "POLL_SECONDS": 0.05}.items():
        monkeypatch.setattr(tape_watches, name, seconds)
    yield made
    await made.subscriber.close(0)


@pytest.mark.parametrize("error", [LogUnavailable("its host is down"), DataLost("entry 1 is damaged")])
async def test_one_tape_that_cannot_be_read_does_not_keep_the_others_from_being_read(reading: Scene, error: RoqError) -> None:
    """Also before the present was reached: whoever depends on it waits in the order machine."""

    async def fails(*_: object, **__: object) -> list[tuple[int, bytes]]:
        await asyncio.sleep(0)
        raise error

    reading.tape("A").read_from = fails  # type: ignore[method-assign]
    reading.past._start_task(reading.past._run())
    batch = await asyncio.wait_for(reading.subscriber.next_batch(), 5.0)
    assert [message.sequence for message in batch or ()] == [1]
    async with asyncio.timeout(5.0):
        await reading.subscriber._ready.wait()
    assert reading.subscriber.behind_ms(time.time_ns() // 1_000_000) > 0


async def test_an_entry_that_no_host_has_is_reported_and_passed_over(reading: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The next one follows; a position lies behind it."""
    lost: list[MessagesLost] = []
    tried: list[float] = []
    reading.subscriber._on_lost = lost.append

    async def fails_once(_meta: LogMeta, after: int, wait_seconds: float = 0.0, **_: object) -> list[tuple[int, bytes]]:
        if not after:
            tried.append(time.monotonic())
            await asyncio.sleep(0)
            raise DataLost("entry 1 is damaged")
        if after == 1:
            return [(2, encode_entry(NOW, [zmtp.frame(frame) for frame in (opens(Q, 1, 0), data(Q, 1, 1))]))]
        await asyncio.sleep(wait_seconds)
        return []

    reading.tape("A").read_from = fails_once  # type: ignore[assignment, method-assign]
    reading.past._start_task(reading.past._run())
    publishers = set[int]()
    async with asyncio.timeout(5.0):
        while publishers != {P, Q}:
            batch = await reading.subscriber.next_batch()
            assert batch is not None
            publishers.add(batch[0].publisher)
    assert [(one.publisher, one.first, one.last) for one in lost] == [(0, 1, 1)]
    assert tried[-1] - tried[0] >= tape_watches.LOST_SECONDS, "it is looked for again"
    assert [record.levelname for record in caplog.records if "entry 1 is damaged" in record.message] == ["ERROR"]


# --- how far behind -------------------------------------------------------------------------------------------------------


async def test_it_is_behind_until_every_tape_was_seen_at_its_end_lately(following: Scene) -> None:
    now_ms = NOW + 60_000
    following.past.tapes.looked_ms = now_ms
    behind = following.subscriber.behind_ms
    assert behind(now_ms) == 0, "there is no tape"
    tape = following.tape("A")
    assert behind(now_ms) > 0, "it was not looked at"
    assert await following.read("A", 10_000, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert behind(now_ms) == 50_000, "what was written last was read, it is not known whether more follows"
    tape.looked = time.monotonic()
    following.subscriber._buffered = 0
    assert behind(now_ms) == 0
    tape.looked -= LATELY_SECONDS
    assert behind(now_ms) == 50_000
    tape.looked, tape.live = time.monotonic(), False
    assert behind(now_ms) == 50_000, "what its Exchange stored last may be seen when it is closed"
    tape.live = True
    tape.ahead.append((2, encode_entry(NOW + 20_000, [])))
    assert behind(now_ms) == 40_000
    assert behind(NOW) == 1, "clocks differ"
    following.tape("A", SegmentState.CLOSED, 1)
    tape.ahead.clear()
    tape.looked = 0.0
    assert behind(now_ms) == 0, "it has ended"
    following.past.tapes.looked_ms -= round(LATELY_SECONDS * 1000) + 1
    assert behind(now_ms) == LATELY_SECONDS * 1000 + 1, "there may be tapes that were made since"


async def test_it_is_behind_while_something_is_held_back_or_not_taken(following: Scene) -> None:
    now_ms = NOW + 60_000
    following.past.tapes.looked_ms = now_ms
    left, other = following.tape("A"), following.tape("B")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await following.read("B", 10_000, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    left.looked = other.looked = time.monotonic()
    following.subscriber._buffered = 0
    assert following.subscriber.behind_ms(now_ms) == 50_000
    left.ahead.append((2, encode_entry(NOW + 11_000, [zmtp.frame(data(P, 1, 2)), zmtp.frame(fin(P, 1, 2))])))
    await following.past._hand_out(left, [left])
    left.looked = other.looked = time.monotonic()
    following.subscriber._opened = True
    for _ in range(2):
        assert following.subscriber.behind_ms(now_ms) > 0
        assert await following.subscriber.next_batch()
    assert following.subscriber.behind_ms(now_ms) > 0, "it may not be done with that yet"
    asks = asyncio.ensure_future(following.subscriber.next_batch())
    await asyncio.sleep(0)
    assert following.subscriber.behind_ms(now_ms) == 0
    asks.cancel()
    following.subscriber.fail(NotRecorded("it is gone"))
    assert following.subscriber.behind_ms(now_ms) > 0


@pytest.mark.parametrize("flows", [False, True])
async def test_new_tapes_are_looked_for_less_often_while_nothing_comes(reading: Scene, flows: bool) -> None:
    watches = reading.past._watches
    watches._pause = tape_watches.QUIET_SECONDS  # the answer was the same for some time
    assert watches._look_pause() == tape_watches.QUIET_SECONDS
    if flows:
        assert await reading.read("B", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert watches._look_pause() == (tape_watches.FLOWING_SECONDS if flows else tape_watches.QUIET_SECONDS)
    reading.past._watermarks.append(Mock())
    assert watches._look_pause() == tape_watches.WATCH_SECONDS, "something waits"
    reading.past._watermarks.clear()


@pytest.mark.parametrize("stirs", ["something is handed out", "something waits", "a store does not answer"])
async def test_who_looks_seldom_looks_soon_when_something_happens(reading: Scene, stirs: str) -> None:
    past, watches, looks = reading.past, reading.past._watches, list[float]()
    tape = reading.tape("B")
    tape.done, tape.looked = 1, time.monotonic()
    ask = past.tapes.ask

    async def asked(since: float | None = None) -> FoundTapes:
        looks.append(time.monotonic())
        return await ask(since)

    async def fails(*_: object, **__: object) -> list[tuple[int, bytes]]:
        raise LogUnavailable("its host is down")

    past.tapes.ask = asked  # type: ignore[method-assign]
    past.tapes.looked = time.monotonic()
    watches._pause = 60.0
    watches.look()
    await asyncio.sleep(0.1)
    assert not looks
    if stirs == "something is handed out":
        past.tapes.looked -= 30.0  # longer ago than is right while something comes
        watches.handed_out()
    elif stirs == "something waits":
        past._watermarks.append(Mock())
        watches.hurry()
    else:
        tape.read_from = fails  # type: ignore[method-assign]
        watches.ask(tape)
    async with asyncio.timeout(5):
        while not looks:
            await asyncio.sleep(0.01)
    past._watermarks.clear()
    watches.close()


async def test_a_store_that_holds_a_question_is_asked_anew_when_somebody_waits_for_the_answer(reading: Scene) -> None:
    past, watches, asked = reading.past, reading.past._watches, list[float]()
    tape = reading.tape("B")
    tape.done = 1

    async def nothing(_meta: LogMeta, _after: int, wait_seconds: float = 0.0, **_: object) -> list[tuple[int, bytes]]:
        asked.append(wait_seconds)
        await asyncio.sleep(60 if len(asked) == 1 else wait_seconds)
        return []

    tape.read_from = nothing  # type: ignore[assignment, method-assign]
    watches.ask(tape)
    await asyncio.sleep(0)
    watches.hurry()
    assert tape in watches, "nobody waits"
    past._watermarks.append(Mock())
    watches.hurry()
    assert tape not in watches
    watches.ask(tape)
    watches.hurry()
    async with asyncio.timeout(5):
        while len(asked) < 3:
            await asyncio.sleep(0.01)
    assert asked[:3] == [tape_watches.POLL_SECONDS, tape_watches.WAITED_SECONDS, tape_watches.WAITED_SECONDS]
    assert tape in watches
    past._watermarks.clear()
    watches.close()


def test_the_same_answer_is_known_as_such() -> None:
    tapes = Scene(follow="stored").past.tapes
    assert [tapes.know(listed(meta)) for meta in (LogMeta(), LogMeta(), LogMeta(trimmed=1))] == [False, True, False]


async def test_a_path_that_began_unrecorded_begins_when_nothing_older_can_be_on_a_tape(following: Scene) -> None:
    """Recording was switched off meanwhile: nobody will ever see its beginning."""
    following.tape("A")
    following.tape("B")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await following.read("B", 1, data(P, 3, 4), data(P, 3, 5)) == []
    assert await following.read("A", 2, data(P, 1, 2)) == [2]
    following.tape("A").seen = NOW + 1 + SKEW_MS
    assert following.settle() == []
    following.tape("A").seen += 1
    assert following.settle() == ["lost 3..3", 4, 5]


async def test_a_watermark_waits_until_no_other_tape_may_have_what_it_speaks_of(following: Scene) -> None:
    """It came through another Exchange."""
    following.tape("A")
    following.tape("B")
    says = encode_control(FrameKind.WATERMARK, P, 1, 3, {"t": (3, 3)}, 0)
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await following.read("B", 1, says) == []
    assert await following.read("A", 2, data(P, 1, 2)) == [2]
    following.tape("A").seen = NOW + 2 + SKEW_MS
    assert following.settle() == ["lost 3..3"]
    assert following.past._watermark_bytes == 0


async def test_what_an_exchange_has_dropped_is_told_before_the_position_passes_it(following: Scene) -> None:
    """While another tape is read, too."""
    following.tape("A")
    following.tape("B")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    says = encode_control(FrameKind.WATERMARK, P, 1, 3, {"t": (3, 3)}, 0, 2)
    assert await following.read("B", 1, says) == ["perhaps lost 2..3"]
    assert following.past._watermark_bytes == 0
    assert await following.read("A", 2, data(P, 1, 2)) == [2], "it is taken for nothing else"


@pytest.mark.parametrize("behind", [False, True])
async def test_publishers_that_have_ended_are_forgotten_unless_it_does_not_keep_up(following: Scene, behind: bool) -> None:
    """As live ones are: it may read for months. Watermarks of theirs may still come if it is behind."""
    following.tape("A")
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1), fin(P, 1, 1)) == [1]
    known, limits = following.subscriber._order.publishers[P], following.subscriber._limits
    known.heard = limits._swept = -10 * SWEEP_SECONDS
    following.past._behind_at = time.monotonic() if behind else -10 * SWEEP_SECONDS
    following.settle()
    assert bool(known.topics) is behind


async def test_a_tape_that_was_closed_is_read_on_when_its_exchange_writes_again(following: Scene) -> None:
    tapes = following.past.tapes
    tapes.know(listed(LogMeta(segments=(SegmentMetadata("A~1", 1, SegmentState.OPEN, (Fragment(1, ("h",)),)),))))
    assert await following.read("A", 0, opens(P, 1, 0), data(P, 1, 1)) == [1]
    closed = SegmentMetadata("A~1", 1, SegmentState.CLOSED, (Fragment(1, ("h",)),), 1)
    tapes.know(listed(LogMeta(segments=(closed,))))
    following.settle()
    assert tapes.reading == {}
    tapes.know(listed(LogMeta(segments=(closed, SegmentMetadata("A~2", 2, SegmentState.OPEN, (Fragment(2, ("h",)),))))))
    assert tapes.reading["A"].done == 1


async def test_of_a_tape_that_has_expired_the_rest_is_told_and_the_position_names_it_no_longer(following: Scene) -> None:
    subscriber, tapes = following.subscriber, following.past.tapes
    lost: list[MessagesLost] = []
    subscriber._on_lost = lost.append
    open_segment = SegmentMetadata("A~1", 1, SegmentState.OPEN, (Fragment(1, ("h",)),))
    tapes.know(listed(LogMeta(segments=(open_segment,))))
    subscriber._tapes = "t"
    tape = tapes.reading["A"]
    tape.ahead.append((1, encode_entry(NOW, [zmtp.frame(frame) for frame in (opens(P, 1, 0), data(P, 1, 1))])))
    await following.past._hand_out(tape, [tape])
    batch = await subscriber.next_batch()
    assert [message.sequence for message in batch or ()] == [1]
    tapes.know(listed())
    subscriber._closed = True
    assert await subscriber.next_batch() is None
    assert [(one.publisher, one.first, one.last) for one in lost] == [(0, 2, 2)]
    assert subscriber.position is not None
    assert subscriber.position.done == {}

"""The subscriber's order machine, one situation at a time. Every interleaving: tests/model/test_moves.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from roq.errors import MessagesLost
from roq.pubsub.order import HELD_FRAME_BYTES, Deliver, FrameEvent, OrderMachine, Output
from roq.pubsub.tape import has_older
from roq.wire.frame import FrameKind, Header, PathOpening

PUBLISHER = 7
HOLD, HOLD_MAX = 5.0, 60.0


class Subscriber:
    """A machine with its context; `seen` is what the application is given and told."""

    def __init__(self, *attached: str, wants: str = "abc") -> None:
        self.attached = set(attached)
        self.machine = OrderMachine(self.attached.__contains__, lambda topic: topic.decode() in wants)
        self.seen: list[str] = []
        self.unread: dict[str, float] = {}  # by Exchange: when frames from it last lay unread
        self.now = 0.0

    def take(self, outputs: list[Output]) -> list[str]:
        news = []
        for output in outputs:
            if isinstance(output, MessagesLost):
                news.append(f"lost {output.count or 'any'} of {output.topic}{output.first}..{output.last}")
            else:
                header = output.event.header
                first, last = header.sequence + output.skip, header.sequence + header.count - 1
                name = output.event.topic.decode()
                news.append(f"{name}{first}" if first == last else f"{name}{first}..{last}")
        self.machine.check()
        self.seen += news
        return news

    def expire(self, now: float) -> list[str]:
        return self.take(self.machine.expire(now, HOLD, HOLD_MAX, lambda left: self.unread.get(left, 0.0)))

    def frame(self, kind: FrameKind, path: int, sequence: int, extra: Any = None) -> list[str]:
        return self.take(
            self.machine.handle(FrameEvent(b"", Header(1, kind, PUBLISHER, path, sequence, 0, 0, 0, 0), None, extra), self.now)
        )

    def opens(self, path: int, sequence: int, left: str = "", finished: bool = True) -> list[str]:
        return self.frame(FrameKind.OPEN, path, sequence, PathOpening(left, finished and left != ""))

    def fin(self, path: int, sequence: int) -> list[str]:
        return self.frame(FrameKind.FIN, path, sequence)

    def watermark(self, path: int, sequence: int, **topics: tuple[int, int]) -> list[str]:
        return self.frame(FrameKind.WATERMARK, path, sequence, topics)

    def data(self, path: int, topic: str, sequence: int, previous: int = 0, index: int = 0, count: int = 1) -> list[str]:
        event = FrameEvent(topic.encode(), Header(1, 0, PUBLISHER, path, sequence, previous, index, count, 0))
        if self.machine.accept(event.topic, event.header):
            return self.take([Deliver(event)])
        return self.take(self.machine.handle(event, self.now))


def test_what_is_expected_is_delivered_the_quick_way() -> None:
    one = Subscriber("A")
    one.opens(1, 0)
    assert one.data(1, "a", 1, count=3) == ["a1..3"]
    assert one.data(1, "b", 4) == ["b4"]
    assert one.data(1, "a", 5, previous=3, index=3, count=2) == ["a5..6"]
    assert one.machine.publishers[PUBLISHER].topics == {b"a": [6, 5], b"b": [4, 1]}
    accepted = one.machine.accept(b"a", Header(1, 0, PUBLISHER, 1, 7, 6, 5, 1, 0))
    assert accepted
    for other in ({"path": 2}, {"previous": 5}, {"sequence": 6}, {"publisher": 8}):
        assert not one.machine.accept(b"a", Header(1, 0, PUBLISHER, 1, 8, 7, 6, 1, 0)._replace(**other))


def test_a_gap_is_told_before_what_follows_it() -> None:
    one = Subscriber("A")
    one.opens(1, 0)
    one.data(1, "a", 1)
    assert one.data(1, "a", 9, previous=6, index=4) == ["lost 3 of a2..6", "a9"]
    assert one.data(1, "b", 10, previous=8, index=2) == ["lost 2 of b1..8", "b10"], "a ready subscriber knows it was there"


def test_a_lost_tail_is_told_by_a_watermark_once() -> None:
    one = Subscriber("A", wants="ab")
    one.opens(1, 0)
    one.data(1, "a", 1)
    assert one.watermark(1, 5, a=(5, 3), b=(3, 1), c=(4, 1)) == ["lost 2 of a2..5", "lost 1 of b1..3"]
    assert one.watermark(1, 5, a=(5, 3), b=(3, 1), c=(4, 1)) == []
    assert one.data(1, "a", 6, previous=5, index=3) == ["a6"]


def test_a_watermark_repeated_after_the_end_still_tells() -> None:
    one = Subscriber("A")
    one.opens(1, 0)
    one.fin(1, 2)
    assert one.watermark(1, 2, a=(2, 2)) == ["lost 2 of a1..2"]


def test_a_publisher_met_in_the_middle_is_taken_from_there() -> None:
    one = Subscriber("A")
    assert one.data(3, "a", 10, previous=9, index=6) == ["a10"]
    assert one.data(3, "b", 11, previous=8, index=4) == ["b11"], "what came before our time is no gap"
    assert one.data(3, "c", 14, previous=12, index=3) == ["lost 1 of c10..12", "c14"] or one.seen[-2].endswith("c10..12")


def test_the_count_of_a_gap_never_exceeds_its_range() -> None:
    one = Subscriber("A")
    one.data(3, "a", 10, previous=9, index=6)
    assert one.data(3, "b", 12, previous=11, index=500) == ["lost 2 of b10..11", "b12"]
    assert one.watermark(3, 14, c=(13, 900)) == ["lost 4 of c10..13"]


def test_an_old_watermark_says_nothing_of_where_to_begin() -> None:
    """The Monitor repeats watermarks for half a minute; a subscriber that joins meanwhile must not start from one."""
    one = Subscriber("A", "B")
    assert one.watermark(1, 5, a=(5, 5)) == []
    assert one.data(3, "a", 9, previous=8, index=8) == ["a9"]
    assert one.machine.held_frames() == 0


def dropped(one: Subscriber, path: int, first: int, last: int, **topics: tuple[int, int]) -> list[str]:
    """What an Exchange says that it has dropped."""
    header = Header(1, FrameKind.WATERMARK, PUBLISHER, path, last, first, 0, 0, 0)
    return one.take(one.machine.handle(FrameEvent(b"", header, None, topics, origin=("A", 0)), one.now))


def test_what_an_exchange_has_dropped_of_one_that_was_not_met_is_reported() -> None:
    one = Subscriber("A", wants="a")
    assert dropped(one, 1, 5, 7, a=(6, 3), b=(7, 4)) == ["lost any of a5..6"]
    assert one.data(1, "a", 8, previous=6, index=3) == ["a8"]
    assert dropped(one, 1, 9, 9, a=(9, 5)) == ["lost 1 of a9..9"]
    assert dropped(one, 1, 9, 9, a=(9, 5)) == []


def test_also_behind_the_end_of_its_path() -> None:
    """A control frame: it passes what was dropped."""
    one = Subscriber("A")
    assert one.fin(1, 5) == []
    assert dropped(one, 1, 4, 5, a=(5, 3)) == ["lost any of a4..5"]


def test_also_where_it_waits_for_the_end_of_the_path_before() -> None:
    one = Subscriber("A", "B")
    assert one.opens(2, 3, "A") == []
    assert dropped(one, 1, 2, 3, a=(3, 3)) == ["lost any of a2..3"]
    assert one.fin(1, 3) == []
    assert one.data(2, "a", 4, previous=3, index=3) == ["a4"]


def test_what_was_dropped_may_be_missing_from_a_replay() -> None:
    """It begins behind what was confirmed, and that is what an Exchange had taken."""
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.opens(2, 2, "A", finished=False)
    assert dropped(one, 1, 2, 3, a=(2, 2), b=(3, 1)) == ["lost any of a2..2", "lost any of b2..3"]
    assert one.data(2, "b", 3, previous=0, index=0) == ["b3"], "not lost after all"
    assert dropped(one, 1, 2, 3, b=(3, 1)) == []
    assert one.watermark(2, 3, a=(2, 2)) == ["lost 1 of a2..2"]


def test_what_was_dropped_does_not_wait_for_tapes() -> None:
    one = Subscriber("A")
    one.machine.read_tapes(lambda exchange, origin: True, lambda: 0, entire=True)
    assert dropped(one, 1, 5, 5, a=(5, 5)) == ["lost any of a5..5"]
    assert one.machine.publishers == {}


def test_repeats_are_dropped_even_in_part() -> None:
    one = Subscriber("A")
    one.opens(1, 0)
    one.data(1, "a", 1, count=3)
    assert one.data(1, "a", 1, count=3) == []
    assert one.data(1, "a", 2, previous=1, index=1, count=4) == ["a4..5"]
    assert one.machine.duplicated == 5


def test_a_move_is_held_until_the_end_of_the_old_path() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.opens(2, 2, "A")
    assert one.data(2, "a", 3, previous=2, index=2) == []
    assert one.machine.waiting == {PUBLISHER}
    assert one.machine.held_frames() == 2
    assert one.data(1, "a", 2, previous=1, index=1) == ["a2"]
    assert one.fin(1, 2) == ["a3"]
    assert one.machine.waiting == set()


def test_first_met_by_a_new_path_the_old_one_comes_first() -> None:
    one = Subscriber("A", "B")
    assert one.opens(2, 2, "A") == one.data(2, "a", 3, previous=2, index=2) == []
    assert one.opens(1, 0) == []
    assert one.data(1, "a", 1) == ["a1"]
    one.data(1, "a", 2, previous=1, index=1)
    assert one.fin(1, 2) == ["a3"]
    assert one.seen == ["a1", "a2", "a3"]


def test_first_met_by_the_second_next_path_both_before_come_first() -> None:
    """Found by the model: two quick moves, and the newest path is the fastest."""
    one = Subscriber("A", "B", "C")
    assert one.opens(3, 2, "B") == one.data(3, "a", 3, previous=2, index=2) == []
    assert one.opens(1, 0) == []
    assert one.data(1, "a", 1) == ["a1"]
    assert one.fin(1, 1) == []
    assert one.opens(2, 1, "A") == []
    assert one.data(2, "a", 2, previous=1, index=1) == ["a2"]
    assert one.fin(2, 2) == ["a3"]


def test_first_met_by_the_end_of_a_path() -> None:
    one = Subscriber("A", "B")
    assert one.fin(1, 5) == one.opens(2, 5, "A") == []
    assert one.data(2, "a", 6, previous=4, index=2) == ["a6"]


def test_a_path_in_between_is_waited_for() -> None:
    """There and back: the next path but one comes through the Exchange that was faster."""
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.fin(1, 0)
    assert one.opens(3, 1, "B") == one.data(3, "a", 2, previous=1, index=1) == []
    one.opens(2, 0, "A")
    assert one.data(2, "a", 1) == ["a1"]
    assert one.fin(2, 1) == ["a2"]


def test_whoever_is_not_attached_to_the_old_exchange_goes_on() -> None:
    one = Subscriber("B")
    one.opens(2, 2, "A")
    assert one.data(2, "a", 3, previous=2, index=2) == ["a3"]


def test_detaching_lets_go_on() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.opens(2, 0, "A")
    one.data(2, "a", 1)
    assert one.take(one.machine.detached(one.now)) == []
    one.attached.discard("A")
    assert one.take(one.machine.detached(one.now)) == ["a1"]


def test_a_hold_expires_only_after_its_time() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.now = 10.0
    one.opens(2, 1, "A")
    one.now = 12.0
    one.data(2, "a", 2, previous=1, index=1)
    assert one.expire(10.0 + HOLD - 0.1) == []
    assert one.expire(10.0 + HOLD) == ["lost 1 of a1..1", "a2"]
    assert one.data(1, "a", 1) == [], "told already"
    assert one.machine.late == 1


def test_a_hold_does_not_expire_while_the_old_exchanges_frames_lie_unread() -> None:
    """In our own full buffer: nobody has read as far as the FIN."""
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.opens(2, 1, "A")
    one.data(2, "a", 2, previous=1, index=1)
    assert one.machine.awaits() == {"A"}
    for now in (HOLD, 2 * HOLD, 3 * HOLD):
        one.unread["A"] = now
        assert one.expire(now) == []
    assert one.expire(4 * HOLD - 0.1) == []
    assert [*one.data(1, "a", 1), *one.fin(1, 1)] == ["a1", "a2"]
    assert one.machine.awaits() == set()


@pytest.mark.parametrize("unread", [0.0, HOLD_MAX])
def test_a_hold_expires_when_all_was_read_and_in_any_case_at_last(unread: float) -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.opens(2, 1, "A")
    one.data(2, "a", 2, previous=1, index=1)
    one.unread["A"] = unread
    when = HOLD_MAX if unread else HOLD
    assert one.expire(when - 0.1) == []
    assert one.expire(when) == ["lost 1 of a1..1", "a2"]
    assert one.machine.unfinished == 1


def test_a_path_whose_open_was_dropped_waits_for_no_exchange_in_particular() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(2, "a", 2, previous=1, index=1)
    assert one.machine.awaits() == {""}
    one.unread[""] = 1.0
    assert one.expire(HOLD) == []
    assert one.expire(HOLD + 1.0) == ["lost 1 of a1..1", "a2"]


def test_what_is_held_is_counted_and_bounded() -> None:
    """Beyond the bound the longest wait ends, and says what is missing; no message that is held is lost for that."""
    one = Subscriber("A", "B")

    def frame(publisher: int, path: int, number: int) -> list[str]:
        header = Header(1, 0, publisher, path, number, number - 1, number - 1, 1, 0)
        return one.take(one.machine.handle(FrameEvent(b"a", header, None, None, 1000), float(number)))

    for publisher in (1, 2):
        assert frame(publisher, 1, 1) == ["a1"]
        assert frame(publisher, 2, publisher + 2) == frame(publisher, 2, publisher + 3) == []
    assert one.machine.held_bytes == 4 * (1000 + HELD_FRAME_BYTES)
    assert one.take(one.machine.relieve(9.0, one.machine.held_bytes)) == []
    assert one.take(one.machine.relieve(9.0, one.machine.held_bytes - 1)) == ["lost 1 of a2..2", "a3", "a4"]
    assert one.machine.waiting == {2}
    assert one.take(one.machine.relieve(9.0, 0)) == ["lost 2 of a2..3", "a4", "a5"]
    assert (one.machine.held_bytes, one.machine.unfinished) == (0, 2)


def test_what_comes_after_an_expired_hold_is_told_not_hidden() -> None:
    """Found by the model: nothing of the publisher was known, so nothing before the new path counted as a gap."""
    one = Subscriber("A", "B")
    one.opens(2, 2, "A")
    assert one.expire(HOLD) == []
    assert one.data(1, "a", 1, count=2) == ["lost 2 of a1..2"]
    assert one.data(2, "a", 3, previous=2, index=2) == ["a3"]


def test_a_lost_first_message_is_told_though_the_new_path_came_first() -> None:
    """Found by the model: the baseline was taken from FIN instead of OPEN."""
    one = Subscriber("A", "B")
    one.opens(2, 1, "A")
    one.opens(1, 0)
    one.fin(1, 1)
    assert one.data(2, "a", 2, previous=1, index=1) == ["lost 1 of a1..1", "a2"]


def test_a_replay_goes_on_at_once_and_repeats_are_dropped() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.opens(2, 0, "A", finished=False)
    assert one.data(2, "a", 1) == []
    assert one.data(2, "a", 2, previous=1, index=1) == ["a2"]
    assert one.data(1, "a", 2, previous=1, index=1) == []


def test_a_replay_overtakes_a_path_that_waits_for_a_dead_exchange() -> None:
    """Found by the model: path 2 waits for a FIN that died with A; path 3 brings everything again."""
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.opens(2, 1, "A")
    one.data(2, "a", 2, previous=1, index=1)
    one.opens(3, 0, "A", finished=False)
    assert one.data(3, "a", 1) == ["a1"]
    assert one.data(3, "a", 2, previous=1, index=1) == ["a2"]


def test_a_replay_never_brings_an_older_message_of_another_topic_after_a_newer_one() -> None:
    """a4 was dropped inside path 1, and b5 was delivered: a4 comes too late for the order over all topics."""
    one = Subscriber("A", "B")
    one.opens(1, 0)
    assert [*one.data(1, "b", 1), *one.data(1, "a", 2), *one.data(1, "b", 3, 1, 1)] == ["b1", "a2", "b3"]
    assert one.data(1, "b", 5, previous=3, index=2) == ["b5"]
    one.opens(2, 0, "A", finished=False)
    assert one.data(2, "b", 1) == one.data(2, "a", 2) == one.data(2, "b", 3, 1, 1) == []
    assert one.data(2, "a", 4, previous=2, index=1) == ["lost 1 of a3..4"]
    assert one.data(2, "b", 5, previous=3, index=2) == []
    assert one.watermark(2, 5, a=(4, 2), b=(5, 3)) == [], "reported already"
    assert one.data(2, "a", 6, previous=4, index=2) == ["a6"]


def test_of_a_frame_the_replay_brings_only_what_is_newer_than_all_that_was_delivered() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(1, "b", 5, count=2)
    one.opens(2, 0, "A", finished=False)
    assert one.data(2, "a", 4, previous=1, index=1, count=5) == ["lost 4 of a1..6", "a7..8"]


def test_a_replay_fills_a_gap_while_nothing_newer_was_delivered() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.opens(2, 0, "A", finished=False)
    assert [*one.data(2, "a", 1), *one.data(2, "b", 2), *one.data(2, "a", 3, 1, 1)] == ["b2", "a3"]


def test_held_frames_that_a_replay_does_not_repeat_are_delivered_before_it() -> None:
    one = Subscriber("A", "B", "C")
    one.opens(1, 0)
    one.data(1, "a", 1)
    one.opens(2, 2, "A")
    assert one.data(2, "a", 3, previous=2, index=2) == one.data(2, "b", 4) == one.data(2, "a", 5, 3, 3) == []
    assert one.opens(3, 4, "B", finished=False) == ["lost 1 of a2..2", "a3", "b4"]
    assert one.data(3, "a", 5, previous=3, index=3) == ["a5"]
    assert one.machine.held_frames() == 0


@pytest.mark.parametrize(
    ("since", "written", "waits"), [(0, 5, False), (5_000, 5_100, True), (900, 20_000, False), (90_000, 20_000, True)]
)
def test_one_that_begins_in_the_middle_waits_for_what_was_sent_before_recording_was_switched_on(
    since: int, written: int, waits: bool
) -> None:
    """Another tape was read up to a second after that: what was written before it may follow, by another clock."""
    tape = Mock(written=6_000, seen=0, ended=False)
    machine = OrderMachine(
        {"B"}.__contains__,
        lambda topic: True,
        unread=lambda exchange, origin: has_older({"A": tape}, exchange, origin),
        since=lambda: since,
    )
    machine.amid = True
    event = FrameEvent(b"a", Header(1, 0, PUBLISHER, 4, 7, 6, 6, 1, 0), origin=("B", written))
    assert bool(machine.handle(event, 0.0)) is not waits
    tape.ended = True
    assert bool(machine.detached(0.0)) is waits


def test_what_joins_others_that_wait_does_not_ask_again_what_they_wait_for() -> None:
    """Seconds of several tapes may have to be read before one frame can be handed out: each costs no more than to be kept."""
    asked = Mock(return_value=True)
    machine = OrderMachine({"B"}.__contains__, lambda topic: True, unread=asked, since=lambda: 5)
    machine.amid = True
    for number in range(1, 101):
        event = FrameEvent(b"a", Header(1, 0, PUBLISHER, 4, number, number - 1, number - 1, 1, 0), origin=("B", 5))
        assert machine.handle(event, 0.0) == []
    assert asked.call_count == 1
    asked.return_value = False
    assert len(machine.detached(0.0)) == 100


@pytest.mark.parametrize("entire", [True, False])
def test_a_replay_of_what_came_before_the_first_path_met_is_new_to_a_reader_of_all_tapes(entire: bool) -> None:
    """To one that came later it is not: that was before its time."""
    subscriber = Subscriber()
    subscriber.machine.entire = entire
    subscriber.opens(path=2, sequence=60, left="gone")
    subscriber.opens(path=3, sequence=0, left="here", finished=False)
    assert subscriber.data(path=3, topic="a", sequence=1, count=60) == (["a1..60"] if entire else [])
    assert subscriber.data(path=3, topic="a", sequence=61, previous=60, index=60) == ["a61"]


@pytest.mark.parametrize("entire", [True, False])
def test_what_such_a_replay_brings_too_late_is_reported(entire: bool) -> None:
    subscriber = Subscriber()
    subscriber.machine.entire = entire
    subscriber.opens(path=2, sequence=60, left="gone")
    assert subscriber.data(path=2, topic="b", sequence=61) == ["b61"]
    subscriber.opens(path=3, sequence=0, left="here", finished=False)
    assert subscriber.data(path=3, topic="a", sequence=1, count=60) == (["lost 60 of a1..60"] if entire else [])
    assert subscriber.data(path=3, topic="b", sequence=61) == []
    assert subscriber.data(path=3, topic="a", sequence=62, previous=60, index=60) == ["a62"]


def test_publishers_do_not_wait_for_each_other() -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    one.opens(2, 0, "A")
    other = FrameEvent(b"a", Header(1, 0, 8, 1, 1, 0, 0, 1, 0))
    assert one.take(one.machine.handle(other, 0.0)) == ["a1"]
    assert one.machine.waiting == {PUBLISHER}


@pytest.mark.parametrize("broken", ["held", "waiting"])
def test_check_sees_what_is_wrong(broken: str) -> None:
    one = Subscriber("A", "B")
    one.opens(1, 0)
    publisher = one.machine.publishers[PUBLISHER]
    if broken == "held":
        publisher.held[1] = []
        one.machine.waiting.add(PUBLISHER)
    else:
        one.machine.waiting.add(PUBLISHER)
    with pytest.raises(AssertionError):
        one.machine.check()

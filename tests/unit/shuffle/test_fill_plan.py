"""What a buffer decides about one shuffle: what the leader is told and when, who gets which part, when an attempt is done.
Time is an argument. With its sockets and threads: tests/integration/test_follower.py."""

from __future__ import annotations

import pytest

from roq.errors import AttemptLost, DataLost, FrameError, RoqError, ShuffleNotFound, ShuffleSealed, StorageFull, Unavailable
from roq.runtime.observe import Counters
from roq.shuffle.node.attempt import Attempt, BufferedBlock, Part
from roq.shuffle.node.fill_plan import (
    ASK_SECONDS,
    FAILURE_SECONDS,
    PAUSE_SECONDS_MAX,
    REPORT_ALL_SECONDS,
    REPORT_SECONDS,
    AttemptEnded,
    FillPlan,
    FillReport,
    FreeMemory,
    SendPart,
)
from roq.wire.gcm import TableInfo
from roq.wire.shuffle import Block, Interval, Position, Range, Receipt, RunSample
from tests.harness.shuffle_rows import SPEC

BORDER = Position(b"k", 0, 0, 5)


def table(*holders: str, border: Position = BORDER) -> tuple[Range, ...]:
    return Range(0, 1, Interval(None, border), holders=holders), Range(1, 2, Interval(border, None), holders=holders)


class Buffer:
    """One attempt of ten rows in two blocks, of which the table splits none or the first one."""

    def __init__(self) -> None:
        self.plan = FillPlan("s", "visits", SPEC, "h", Counters())
        self.attempt = self.plan.attempts[0, "a"] = Attempt(0, "a", "w", 0.0)
        self.attempt.took(0, [Block(0, 5, b"a", b"j", 0, b"12345"), Block(5, 5, b"l", b"z", 0, b"12345")])
        self.plan.run_ended(self.attempt, RunSample(0, "a", 0, 10, 10, (b"a",), (0,), (10,)))

    def finish(self) -> None:
        self.attempt.finish(Receipt(0, "a", 10, 10, 1))

    def report(self, now: float) -> FillReport:
        return self.plan.report(pressed=False, now=now)

    def tell(self, info: TableInfo, now: float) -> FillReport:
        report = self.report(now)
        self.plan.answered(report, info, now)
        return report

    def split(self) -> list[Part]:
        """What is unsplit, as a collector does it. What is to be sent."""
        making: dict[int, list[BufferedBlock]] = {}
        while self.attempt.unsplit:
            block = self.attempt.unsplit.popleft()
            number, borders = self.plan.span(self.attempt, block)
            assert not borders
            self.plan.collect(self.attempt, making, number, block)
        self.plan.collected(self.attempt, making)
        return self.sends()

    def sends(self) -> list[Part]:
        return [each.part for each in self.plan.taken() if isinstance(each, SendPart)]


def info(epoch: int, *holders: str, winners: dict[int, str] | None = None) -> TableInfo:
    return TableInfo(epoch, table(*holders) if epoch else (), {}, 2, winners or {})


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


def stored(buffer: Buffer, now: float) -> None:
    """There is a table, and all holders have all parts."""
    buffer.tell(info(1, "b", "c"), now)
    parts = buffer.split()
    for host in "bc":
        buffer.plan.sent([*dict.fromkeys(parts)], host, None, now)
    buffer.plan.taken()


def test_an_attempt_is_done_when_the_leader_was_told_that_all_is_stored(buffer: Buffer) -> None:
    report = buffer.tell(info(1, "b", "c"), 1.0)
    assert report.request.samples
    assert not report.request.wanted, "nobody waits for a table yet"
    parts = buffer.split()
    assert [(part.number, sorted(part.missing)) for part in dict.fromkeys(parts)] == [(0, ["b", "c"]), (1, ["b", "c"])]
    buffer.finish()
    buffer.plan.sent(parts[::2], "b", None, 1.1)
    assert not buffer.attempt.complete
    buffer.plan.sent(parts[::2], "c", None, 1.1)
    assert buffer.attempt.complete
    assert not buffer.attempt.done
    assert buffer.plan.report_in(1.0) == pytest.approx(REPORT_SECONDS)
    report = buffer.tell(info(1, "b", "c"), 1.2)
    assert report.request.stored == [buffer.attempt.receipt]
    assert (buffer.attempt.done, buffer.attempt.failed) == (True, None)
    assert buffer.plan.finished == {(0, "a")}
    assert [each for each in buffer.plan.taken() if isinstance(each, AttemptEnded)] == [AttemptEnded(buffer.attempt)]


def test_nothing_is_released_by_another_table_than_it_was_stored_by(buffer: Buffer) -> None:
    stored(buffer, 1.0)
    buffer.finish()
    report = buffer.report(1.5)
    buffer.plan.answered(report, info(2, "b", "d"), 1.5)
    assert not buffer.attempt.done
    assert [(each.part.number, each.host) for each in buffer.plan.taken() if isinstance(each, SendPart)] == [(0, "d"), (1, "d")]


def test_other_borders_split_everything_again(buffer: Buffer) -> None:
    stored(buffer, 1.0)
    (first, second) = sorted(buffer.attempt.stored, key=lambda part: part.number)
    moved = TableInfo(2, table("b", "c", border=Position(b"m", 0, 0, 7)), {}, 2, {})
    buffer.tell(moved, 1.5)
    assert first.void
    assert second.void
    assert [block.first for block in buffer.attempt.unsplit] == [0, 5]
    assert buffer.plan.span(buffer.attempt, buffer.attempt.unsplit[1]) == (0, [Position(b"m", 0, 0, 7)])
    assert not buffer.sends()


def test_the_leader_is_asked_for_a_table_when_somebody_waits_for_it(buffer: Buffer) -> None:
    assert not buffer.report(1.0).request.wanted
    assert buffer.plan.report(pressed=True, now=1.0).request.wanted
    buffer.finish()
    assert buffer.report(1.0).request.wanted
    buffer.plan.refused(Unavailable("no leader"), 1.0)
    assert buffer.plan.report_in(1.1) == pytest.approx(ASK_SECONDS - 0.1)
    assert "Unavailable" in str(buffer.plan.why_not_yet(1.1))
    assert buffer.plan.why_not_yet(1.0 + FAILURE_SECONDS) == "there is no table yet"


def test_samples_are_told_once_and_again_to_a_leader_that_may_know_none(buffer: Buffer) -> None:
    assert buffer.tell(info(0), 10.0).request.samples
    assert not buffer.tell(info(0), 10.0 + REPORT_ALL_SECONDS).request.samples
    assert buffer.tell(info(0), 10.1 + REPORT_ALL_SECONDS).request.samples


def test_samples_are_freed_when_there_is_a_table(buffer: Buffer) -> None:
    stored(buffer, 1.0)
    assert not buffer.report(1.5).request.samples
    assert FreeMemory([], 1) in buffer.plan.taken()


@pytest.mark.parametrize(
    ("error", "seen"),
    [(ShuffleNotFound("gone"), AttemptLost), (DataLost("lies"), None), (ShuffleSealed("sealed"), ShuffleSealed)],
)
def test_what_the_leader_refuses(buffer: Buffer, error: RoqError, seen: type[RoqError] | None) -> None:
    buffer.plan.refused(error, 1.0)
    assert buffer.plan.ended is (seen is not None)
    assert type(buffer.attempt.failed) is (type(None) if seen is None else seen)


def test_a_sealed_shuffle_takes_nothing_more(buffer: Buffer) -> None:
    buffer.tell(info(1, "b", winners={0: "other"}), 1.0)
    assert buffer.plan.ended
    assert isinstance(buffer.attempt.failed, ShuffleSealed)


def test_nothing_is_sent_while_the_table_changes(buffer: Buffer) -> None:
    buffer.tell(info(1, "b", "c"), 1.0)
    part = buffer.split()[0]
    assert buffer.plan.wants(part, "b", 1.0)
    assert not buffer.plan.pause(1), "it is known"
    assert buffer.plan.pause(2)
    assert not buffer.plan.wants(part, "b", 1000.0), "as long as something is being sent"
    buffer.plan.quiet(1000.0)
    assert not buffer.plan.wants(part, "b", 1000.0 + PAUSE_SECONDS_MAX - 0.1)
    assert buffer.plan.wants(part, "b", 1000.0 + PAUSE_SECONDS_MAX), "the leader did not get that far"
    buffer.plan.resume()
    assert part in buffer.sends()


def test_a_refusal_is_why_it_is_not_done_and_damage_ends_it(buffer: Buffer) -> None:
    buffer.tell(info(1, "b", "c"), 1.0)
    part = buffer.split()[0]
    full = StorageFull("no space")
    buffer.plan.sent([part], "b", full, 2.0)
    assert buffer.plan.why_not_yet(2.0) is full
    assert "b" in part.missing
    buffer.plan.sent([part], "b", FrameError("damaged on its way"), 2.0)
    assert isinstance(buffer.attempt.failed, AttemptLost)
    assert buffer.attempt.done
    assert part.void
    assert not [*buffer.attempt.holding()]


def test_nothing_is_to_be_said_when_nothing_is_here() -> None:
    assert FillPlan("s", "visits", SPEC, "h", Counters()).report_in(1.0) is None

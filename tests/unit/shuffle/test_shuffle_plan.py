"""What the leader's machine of a shuffle keeps and counts. What it does: tests/scenarios/shuffle_plan. Whatever dies when:
tests/model/test_shuffle.py."""

from __future__ import annotations

from collections.abc import Sequence

from roq.shuffle.events import (
    Answered,
    Ask,
    AttemptReported,
    Commit,
    ComputeTable,
    Event,
    FollowerFailed,
    Instruction,
    Rebalance,
    RecordWritten,
    Remove,
    TableComputed,
    TimePassed,
    WriteRecord,
)
from roq.shuffle.plan import GATHER_SECONDS, STAGES, ShufflePlan
from roq.shuffle.ranges import Placement
from roq.shuffle.record import FollowerHosts, ShuffleRecord, Stage, new_table
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Receipt, RunSample, ShuffleState, Spec
from tests.harness.scenarios import FOLDER

HOSTS = ("a", "b", "c")
ROWS = 100
GOOD = Receipt(0, "good", ROWS, ROWS * 10, 1)


def sample(partition: int = 0, rows: int = ROWS) -> RunSample:
    keys = tuple(number.to_bytes(2, "big") for number in range(rows))
    return RunSample(partition, "good", 0, rows, rows * 10, keys, tuple(range(rows)), (10,) * rows)


class Leader:
    """A machine whose records are written at once. answers: what followers say, by kind of request; the rest stays asked."""

    def __init__(self, ranges: int = 4, replicas: int = 2) -> None:
        spec = Spec(("k",), b"s", replicas, ranges)
        self.plan = ShufflePlan(ShuffleRecord("s", "id", spec, 0.0, "t", placement=Placement.RING), 1)
        self.now = 0.0
        self.asked: list[Ask] = []
        self.told: list[Instruction] = []  # what is neither written nor asked nor worked out
        self.counted: dict[Interval, int] = {}  # fewer rows than there should be, by interval
        self.hosts(*HOSTS)

    @property
    def record(self) -> ShuffleRecord:
        return self.plan.record

    def stage(self) -> Stage:
        return self.record.stage

    def hosts(self, *running: str, members: Sequence[str] | None = None, settled: bool = True) -> None:
        self.feed(FollowerHosts(frozenset(running), frozenset(running if members is None else members), settled))

    def feed(self, event: Event) -> None:
        """And everything that comes of it but the answers of followers."""
        waiting = self.plan.handle(event, self.now)
        while waiting:
            self.plan.check()
            instruction = waiting.pop(0)
            match instruction:
                case WriteRecord():
                    waiting += self.plan.handle(RecordWritten(), self.now)
                case Ask():
                    self.asked.append(instruction)
                case ComputeTable(id, record, samples, count, hosts):
                    waiting += self.plan.handle(TableComputed(id, new_table(record, samples, count, hosts)), self.now)
                case _:
                    self.told.append(instruction)
        self.plan.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(TimePassed())

    def table(self) -> None:
        """The first one is cut."""
        self.feed(AttemptReported((sample(),), (), wanted=True))
        self.wait(GATHER_SECONDS)

    def answer(self, *kinds: type[wire.Request]) -> list[Ask]:
        """All that was asked of these kinds is answered, and what comes of it, until something else is asked for."""
        done = []
        while mine := [ask for ask in self.asked if isinstance(ask.request, kinds)]:
            self.asked = [ask for ask in self.asked if ask not in mine]
            for ask in mine:
                done.append(ask)
                self.feed(Answered(ask.id, self.reply(ask.request)))
        return done

    def reply(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.CountRows(_, intervals, _):
                rows = [self.counted.get(each, _rows(each)) for each in intervals]
                return wire.Counts(rows, [each * 10 for each in rows])
            case wire.TellSamples(_, intervals, _):
                return wire.Samples([part for each in intervals if (part := _part(each)).rows])
            case wire.FetchInterval(_, _, interval, _, _):
                return wire.Fetched(_rows(interval) * 10)
        return wire.FollowerDone()

    def sealed(self) -> Leader:
        self.table()
        self.feed(Commit((GOOD,)))
        self.answer(wire.CountRows, wire.TellSamples, wire.FetchInterval)
        self.answer(wire.KeepIntervals)
        assert (self.record.state, self.record.stage) == (ShuffleState.SEALED, Stage.NONE)
        return self


def _rows(interval: Interval) -> int:
    return _part(interval).rows


def _part(interval: Interval) -> RunSample:
    first = interval.lower.row if interval.lower else 0
    end = interval.upper.row if interval.upper else ROWS
    whole, rows = sample(), range(first, end)
    return RunSample(0, "good", 0, len(rows), len(rows) * 10, whole.keys[first:end], tuple(rows), (10,) * len(rows))


def test_no_table_without_hosts() -> None:
    one = Leader()
    one.hosts()
    one.table()
    assert one.record.epoch == 0
    one.hosts("a")
    assert [each.holders for each in one.record.table] == [("a",)] * 4


def test_a_shuffle_that_is_cut_anew_is_read_by_the_table_that_was_counted() -> None:
    """In the new one nobody knows yet how many rows a range should have: a holder that lacks some would not be noticed."""
    one = Leader()
    one.feed(AttemptReported((sample(rows=8),), (), wanted=True))
    one.wait(GATHER_SECONDS)
    one.feed(Commit((GOOD,)))
    one.answer(wire.CountRows, wire.TellSamples, wire.FetchInterval, wire.KeepIntervals)
    before = one.record
    assert before.state is ShuffleState.SEALED
    one.feed(Rebalance("r", 2))
    one.answer(wire.TellSamples)
    assert one.stage() is Stage.MOVING
    assert all(each.rows < 0 for each in one.record.table)
    told = one.record.describe(0)
    assert (told.ranges, told.former) == (before.table, one.record.table)
    one.answer(wire.FetchInterval)
    one.answer(wire.CountRows)
    told = one.record.describe(0)
    assert (told.ranges, told.former) == (one.record.table, ())
    assert sum(each.rows for each in told.ranges) == before.rows


def test_an_uneven_table_is_cut_anew_and_former_holders_forget_last() -> None:
    one = Leader()
    one.feed(AttemptReported((sample(rows=8),), (), wanted=True))
    one.wait(GATHER_SECONDS)
    one.feed(Commit((GOOD,)))
    one.answer(wire.CountRows)
    assert one.stage() is Stage.CUTTING
    one.answer(wire.TellSamples)
    assert one.stage() is Stage.MOVING
    assert (one.record.epoch, len(one.record.former)) == (2, 4)
    assert not any(isinstance(ask.request, wire.KeepIntervals) for ask in one.asked)
    one.answer(wire.FetchInterval)
    one.answer(wire.CountRows)
    assert (one.record.state, one.record.former) == (ShuffleState.SEALED, ())
    assert [each.rows for each in one.record.table] == [25] * 4
    assert {each.identity for each in one.record.table} & {1, 2, 3, 4}, "identities are taken over"
    assert one.record.moved >= one.record.moved_least > 0


def test_a_lost_holder_is_replaced_and_one_that_restarts_is_not() -> None:
    one = Leader().sealed()
    before = one.record.table
    one.hosts("a", "b", members=HOSTS)
    assert one.record.table == before
    one.hosts("a", "b")
    assert one.stage() is Stage.MOVING
    fetched = one.answer(wire.FetchInterval)
    assert all("c" not in ask.request.sources for ask in fetched if isinstance(ask.request, wire.FetchInterval))
    one.answer(wire.CountRows)
    assert all({*each.holders} == {"a", "b"} for each in one.record.table)
    assert [each.interval for each in one.record.table] == [each.interval for each in before]
    assert one.record.moved == one.record.moved_least == 10 * sum(each.rows for each in before if "c" in each.holders)


def test_at_the_beginning_of_a_reign_nobody_is_lost() -> None:
    one = Leader().sealed()
    one.plan = ShufflePlan(one.record, 2)
    one.asked.clear()
    one.hosts("a", settled=False)
    one.wait(1)
    assert (one.record.stage, one.record.epoch) == (Stage.NONE, 1)
    assert not one.asked
    one.hosts("a", "b", settled=True)
    assert one.stage() is Stage.MOVING


def test_a_removed_shuffle_is_forgotten_when_all_that_run_have_answered() -> None:
    one = Leader().sealed()
    one.feed(Remove("x"))
    assert not one.plan.forgotten
    one.answer(wire.ForgetShuffle)
    assert one.plan.forgotten
    assert (one.record.state, one.record.table, one.record.receipts) == (ShuffleState.REMOVED, (), ())


def test_late_and_repeated_answers_change_nothing() -> None:
    one = Leader().sealed()
    before = one.record
    for id in range(100):
        one.feed(Answered(id, wire.FollowerDone()))
        one.feed(FollowerFailed(id))
    one.feed(TableComputed(1, new_table(before, [], 4, HOSTS)))
    assert one.record is before
    assert not one.asked


def test_scenarios_show_every_stage() -> None:
    lines = [line for path in (FOLDER / "shuffle_plan").glob("*.txt") for line in path.read_text().splitlines()]
    written = {line.removeprefix("write ").partition(", table")[0] for line in lines if line.startswith("write ")}
    assert written == {", ".join(word for word in at if word is not Stage.NONE) for at in STAGES}

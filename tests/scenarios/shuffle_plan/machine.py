"""A shuffle's leader and its followers for its scenarios: `store`, `lose` and `answer` are about what followers have.

Row n of partition p has key 2n + p and 10 bytes. `..10`, `10..20` and `20..` are intervals of keys, and `0/x` is
attempt x of partition 0. What is asked of a follower stays asked until it answers or fails; a record is written by `written`.
"""

from __future__ import annotations

from collections.abc import Iterator

from roq.shuffle.events import (
    Answered,
    Ask,
    AttemptReported,
    Commit,
    ComputeTable,
    DeleteShuffle,
    Event,
    FollowerFailed,
    Instruction,
    Rebalance,
    RecordWritten,
    Refuse,
    Remove,
    TableComputed,
    TimePassed,
    Touched,
    Wake,
    WriteRecord,
)
from roq.shuffle.plan import ShufflePlan
from roq.shuffle.record import FollowerHosts, ShuffleRecord, Table, new_table
from roq.wire import shuffle as wire
from roq.wire.shuffle import Interval, Position, Receipt, RunSample, Spec
from tests.harness.scenarios import shown

Row = tuple[int, str, int]  # partition, attempt, number
ROW_BYTES = 10


class Machine:
    """No shuffle yet: `create`."""

    def __init__(self) -> None:
        self._now, self._term = 0.0, 0
        self._attempts: dict[str, int] = {}  # rows of those that are told of
        self._kept: dict[str, set[Row]] = {}  # by host
        self._asked: list[Ask] = []
        self._computing: ComputeTable | None = None
        self._plan: ShufflePlan

    def check(self) -> None:
        """The machine's own invariants."""
        self._plan.check()

    def _feed(self, event: Event) -> Iterator[str]:
        for instruction in self._plan.handle(event, self._now):
            yield self._taken(instruction)

    def _taken(self, instruction: Instruction) -> str:
        match instruction:
            case WriteRecord(record):
                self._asked.clear()  # of no interest any more
                table = f", {_table(record)}" if record.epoch not in (0, self._plan.record.epoch) else ""
                return f"write {_stage(record)}{table}"
            case Ask(id, host, request):
                self._asked = [*(ask for ask in self._asked if ask.id != id), instruction]
                return f"ask {host}: {_request(request)}"
            case ComputeTable():
                self._computing = instruction
                return f"compute a table of {instruction.count} ranges for {' '.join(sorted(instruction.hosts))}"
            case Wake(seconds):
                return f"wake in {seconds:g} s"
            case Refuse(error):
                return f"refuse: {shown(error)}"
            case DeleteShuffle():
                return "delete the record"

    # --- the leader -----------------------------------------------------------------------------------------------------

    def create(self, ranges: int = 2, replicas: int = 2, abandoned: float = float("inf")) -> None:
        """abandoned: seconds. Hosts are told next."""
        record = ShuffleRecord("s", "id", Spec(("k",), b"", replicas, ranges), 0.0, "t")
        self._term, self._plan = 1, ShufflePlan(record, 1, abandoned)
        self._attempts, self._kept, self._asked = {}, {}, []

    def new_leader(self) -> None:
        """The leader dies; the next one knows what is written, and its hosts are told next."""
        self._term += 1
        self._asked, self._plan = [], ShufflePlan(self._plan.record, self._term)

    def written(self) -> Iterator[str]:
        """The record is."""
        return self._feed(RecordWritten())

    def computed(self) -> Iterator[str]:
        """The table is."""
        assert self._computing is not None
        asked = self._computing
        return self._feed(TableComputed(asked.id, new_table(asked.record, asked.samples, asked.count, asked.hosts)))

    def later(self, seconds: float) -> Iterator[str]:
        """Time passes."""
        self._now += seconds
        return self._feed(TimePassed())

    # --- clients --------------------------------------------------------------------------------------------------------

    def report(self, attempt: str, rows: int = 10, wanted: str = "yes") -> Iterator[str]:
        """A buffer has these rows. wanted: it needs a table to go on."""
        self._attempts[attempt] = rows
        return self._feed(AttemptReported((_sample(_rows(attempt, rows)),), (), wanted == "yes"))

    def store(self, attempt: str, rows: int = 10) -> Iterator[str]:
        """All of these rows are with the holders of their ranges."""
        self._attempts[attempt] = rows
        for each in self._plan.record.table:
            for host in each.holders:
                self._kept.setdefault(host, set()).update(_within(_rows(attempt, rows), each.interval))
        return self._feed(AttemptReported((), (self._receipt(attempt),), False))

    def commit(self, *attempts: str) -> Iterator[str]:
        """With their receipts."""
        return self._feed(Commit(tuple(map(self._receipt, attempts))))

    def _receipt(self, attempt: str) -> Receipt:
        (partition, _, name), rows = attempt.partition("/"), self._attempts.get(attempt, 10)
        return Receipt(int(partition), name, rows, rows * ROW_BYTES, 1)

    def rebalance(self, transaction: str, ranges: int) -> Iterator[str]:
        """Split anew."""
        return self._feed(Rebalance(transaction, ranges))

    def touch(self) -> Iterator[str]:
        """Somebody is about to go on with it."""
        return self._feed(Touched())

    def remove(self) -> Iterator[str]:
        """Nobody wants it any more."""
        return self._feed(Remove("r"))

    # --- followers ------------------------------------------------------------------------------------------------------

    def hosts(self, *running: str, members: str = "", joining: str = "", settled: str = "yes") -> Iterator[str]:
        """Followers that run now. members: single letters, if they are others. settled: who is not there is lost."""
        joins = frozenset(joining)
        placed = frozenset(members) if members else frozenset(running) - joins
        return self._feed(FollowerHosts(frozenset(running), placed, settled == "yes", joins))

    def lose(self, host: str, first: int = 0, last: int = 1000) -> None:
        """The follower has no rows with these keys any more."""
        self._kept[host] = {row for row in self._kept.get(host, ()) if not first <= _key(row) <= last}

    def answer(self, *hosts: str) -> Iterator[str]:
        """These (or all) have done what they are asked now."""
        for ask in [ask for ask in self._asked if not hosts or ask.host in hosts]:
            if ask in self._asked:
                self._asked.remove(ask)
                yield from self._feed(Answered(ask.id, self._reply(ask)))

    def fail(self, host: str, final: str = "no") -> Iterator[str]:
        """It has not answered in time. final: asking again is of no use."""
        for ask in [ask for ask in self._asked if ask.host == host]:
            self._asked.remove(ask)
            yield from self._feed(FollowerFailed(ask.id, final == "yes"))

    def _reply(self, ask: Ask) -> wire.Reply:
        kept = self._kept.setdefault(ask.host, set())
        match ask.request:
            case wire.FetchInterval(_, _, interval, committed, sources):
                there = set[Row]().union(*(self._kept.get(host, ()) for host in sources))
                found = {row for row in _within(there, interval) if committed.get(row[0], row[1]) == row[1]} - kept
                kept |= found
                return wire.Fetched(len(found) * ROW_BYTES)
            case wire.KeepIntervals(_, _, intervals, committed):
                self._kept[ask.host] = {row for each in intervals for row in _committed(kept, each, committed)}
            case wire.ForgetShuffle():
                kept.clear()
            case wire.CountRows(_, intervals, committed):
                rows = [len(_committed(kept, each, committed)) for each in intervals]
                return wire.Counts(rows, [each * ROW_BYTES for each in rows])
            case wire.TellSamples(_, intervals, committed):
                return wire.Samples(
                    [_sample(rows) for each in intervals for rows in _by_attempt(_committed(kept, each, committed))]
                )
        return wire.FollowerDone()

    # --- what can be seen -----------------------------------------------------------------------------------------------

    def state(self) -> Iterator[str]:
        """The record, as it is written; what each follower keeps."""
        record = self._plan.record
        yield f"{_stage(record)}{f', {_table(record)}' if record.epoch else ''}"
        if record.former:
            yield f"the table before: {_ranges(record.former)}"
        for host, rows in sorted(self._kept.items()):
            counts = [f"{len(one)} rows of {min(one)[0]}/{min(one)[1]}" for one in _by_attempt(rows)]
            yield f"{host} keeps {', '.join(counts) or 'nothing'}"


def _rows(attempt: str, rows: int) -> set[Row]:
    partition, _, name = attempt.partition("/")
    return {(int(partition), name, number) for number in range(rows)}


def _key(row: Row) -> int:
    return 2 * row[2] + row[0]


def _within(rows: set[Row], interval: Interval) -> set[Row]:
    def position(row: Row) -> Position:
        return Position(_key(row).to_bytes(2, "big"), row[0], 0, row[2])

    lower, upper = interval.lower, interval.upper
    return {row for row in rows if (not lower or lower <= position(row)) and (not upper or position(row) < upper)}


def _committed(rows: set[Row], interval: Interval, committed: dict[int, str]) -> set[Row]:
    return {row for row in _within(rows, interval) if committed.get(row[0]) == row[1]}


def _by_attempt(rows: set[Row]) -> list[set[Row]]:
    return [{row for row in rows if row[:2] == attempt} for attempt in sorted({row[:2] for row in rows})]


def _sample(rows: set[Row]) -> RunSample:
    """Of one attempt: every row."""
    found = sorted(rows)
    keys = tuple(_key(row).to_bytes(2, "big") for row in found)
    count, numbers = len(found), tuple(row[2] for row in found)
    return RunSample(found[0][0], found[0][1], 0, count, count * ROW_BYTES, keys, numbers, (ROW_BYTES,) * count)


def _stage(record: ShuffleRecord) -> str:
    return f"{record.state}, {record.stage}" if record.stage != "none" else record.state


def _table(record: ShuffleRecord) -> str:
    return f"table {record.epoch}: {_ranges(record.table)}"


def _ranges(table: Table) -> str:
    def one(each: wire.Range) -> str:
        rows = f" ({each.rows} rows)" if each.rows >= 0 else ""
        return f"{_interval(each.interval)} at {' '.join(sorted(each.holders))}{rows}"

    return ", ".join(map(one, table))


def _interval(interval: Interval) -> str:
    lower, upper = (str(int.from_bytes(one.key, "big")) if one else "" for one in (interval.lower, interval.upper))
    return f"{lower}..{upper}" if lower or upper else "all"


def _request(request: wire.Request) -> str:
    match request:
        case wire.TableChanged(_, _, epoch):
            return f"the table is {epoch} now"
        case wire.FetchInterval(_, _, interval, committed, sources):
            return f"fetch {_interval(interval)} of {_attempts(committed)} from {' '.join(sources)}"
        case wire.CountRows(_, intervals, committed):
            return f"count {' and '.join(map(_interval, intervals))} of {_attempts(committed)}"
        case wire.TellSamples(_, intervals, _, keys):
            return f"{'sample' if keys else 'account for'} {' and '.join(map(_interval, intervals))}"
        case wire.KeepIntervals(_, _, intervals, committed):
            return f"keep no more than {' and '.join(map(_interval, intervals)) or 'nothing'} of {_attempts(committed)}"
        case wire.ForgetShuffle():
            return "forget all of it"
    raise AssertionError(request)


def _attempts(committed: dict[int, str]) -> str:
    return " ".join(f"{partition}/{attempt}" for partition, attempt in committed.items()) or "every attempt"

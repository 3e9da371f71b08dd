"""A shuffle's leader among its followers, as a model that can be searched: requests are done in any order, leaders die with
requests under way (which are done all the same), answers are lost or told twice, followers die with all they have, or join, or
are away and come back with all they had (and with requests that had not come to them yet). Who runs is a member a moment later.
Ticks may be early.

The machine is the real one (roq/shuffle/plan.py); followers keep sets of rows. What is promised:
- What is sealed can be read: every row of a winner is at a living holder of its range, in the table or in the former one.
- Nobody forgets a row while there are fewer other copies of it, on disks of living hosts, than are wanted (and possible).
- What is being filled gets as many holders as there can be.
- When nothing is left to do, the shuffle is sealed, every range is whole at as many followers as there are copies wanted (and
  hosts), and nobody keeps anything else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from msgspec.structs import replace

from roq.shuffle.events import (
    Answered,
    Ask,
    Commit,
    ComputeTable,
    FollowerFailed,
    Instruction,
    Rebalance,
    RecordWritten,
    Refuse,
    TableComputed,
    TimePassed,
    Wake,
    WriteRecord,
)
from roq.shuffle.ranges import Placement, table_of
from roq.shuffle.record import ShuffleRecord, Stage, new_table, with_holders
from roq.wire import shuffle as wire
from roq.wire.shuffle import Receipt, RunSample, ShuffleState, Spec
from tests.harness.intervals import within
from tests.model.moves import Breach
from tests.model.shuffle_world import (
    ROWS,
    SIZE,
    WINNER,
    Limits,
    Row,
    World,
    changed,
    copied,
    every_row,
    forget_numbers,
    number_of,
    position,
)

KINDS = ("leaders_killed", "followers_killed", "joins", "answers_lost", "answers_twice", "aways", "early_ticks")
ID = "d"  # with it ranges lie so that what the controls leave out is missed: not so with every id
COMMIT = Commit((Receipt(0, WINNER, ROWS, ROWS * SIZE, 1),))


class Model:
    """Explorable."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._checked: set[Hashable] = set()
        forget_numbers()

    def start(self) -> World:
        """Filled, and the winner named."""
        limits = self.limits
        borders = [position((WINNER, row)) for row in limits.borders]
        spec = Spec(("k",), b"", limits.replicas)
        record = ShuffleRecord("s", ID, spec, 0.0, "t", epoch=1, placement=Placement.RING)
        table = with_holders(record, table_of(borders), limits.hosts)
        record = replace(record, table=table, fresh=len(table) + 1)
        data: dict[str, frozenset[Row]] = {host: frozenset() for host in limits.hosts}
        for each in table:
            for host in each.holders:
                data[host] |= {row for row in every_row() if within(each.interval, position(row))}
        lacking = table[0].holders[0]
        data[lacking] -= {(WINNER, row) for row in range(limits.forgetful)}
        budget = tuple(getattr(limits, kind) for kind in KINDS)
        plan = limits.machine(record, 1)
        seen = tuple((host, (0, 0)) for host in limits.hosts)
        nobody = frozenset[str]()
        world = World(plan, record, 1, 0.0, tuple(data.items()), seen, nobody, nobody, False, (), (), (), budget)
        return self._feed(world, world.hosts())

    # --- steps ------------------------------------------------------------------------------------------------------------

    def steps(self, state: World) -> Iterator[tuple[bool, str, World]]:
        """See Explorable."""
        for must, label, after in self._steps(state):
            self._check(after)
            yield must, label, after

    def _steps(self, state: World) -> Iterator[tuple[bool, str, World]]:
        writing = state.plan.writing is not None
        questions = [ask for ask in state.asks if not _changes(ask)]  # among themselves their order makes no difference
        for ask in () if writing else (*questions[:1], *(ask for ask in state.asks if _changes(ask))):
            yield from self._do(state, ask)
        for ask in state.former_asks:  # of a leader that is gone: it may be done late, or never
            if ask.host not in state.away:
                after, _ = self._perform(state, ask)
                yield False, f"{_name(ask)}, not waited for any more", _without_former(after, ask)
        for instruction in state.others:
            if writing and not isinstance(instruction, WriteRecord):
                continue  # one thing after the other
            yield True, type(instruction).__name__, self._carry_out(state, instruction)
            if isinstance(instruction, Wake) and (spent := _spend(state, "early_ticks")):
                yield False, "early tick", self._carry_out(spent, instruction, early=0.001)
        if state.stale_hosts and not writing:
            yield True, "hosts seen", self._feed(changed(state, stale_hosts=False), state.hosts())
        for host in sorted(state.away):
            back = changed(state, away=state.away - {host}, joining=state.joining | {host}, stale_hosts=True)
            yield True, f"{host} is back", back
        if not state.stale_hosts:
            for host in sorted(state.joining):
                yield True, f"{host} becomes a member", changed(state, joining=state.joining - {host}, stale_hosts=True)
        if self.limits.filled and not writing and state.durable.state is ShuffleState.FILLING:
            yield True, "commit", self._feed(state, COMMIT)
        yield from self._faults(state)

    def _do(self, state: World, ask: Ask) -> Iterator[tuple[bool, str, World]]:
        after, reply = self._perform(state, ask)
        done = changed(after, asks=tuple(each for each in after.asks if each != ask))
        if reply is None:
            if ask.host in state.running or not state.stale_hosts:  # else the leader is about to see that it is gone
                yield True, f"{_name(ask)} fails", self._feed(done, FollowerFailed(ask.id))
            return
        yield True, _name(ask), self._feed(done, Answered(ask.id, reply))
        if spent := _spend(done, "answers_lost"):
            yield False, f"{_name(ask)}, answer lost", self._feed(spent, FollowerFailed(ask.id))
        if spent := _spend(after, "answers_twice"):
            yield False, f"{_name(ask)}, and again later", self._feed(spent, Answered(ask.id, reply))

    def _carry_out(self, state: World, instruction: Instruction, early: float = 0) -> World:
        state = changed(state, others=tuple(each for each in state.others if each is not instruction))
        match instruction:
            case WriteRecord(record):
                return self._feed(changed(state, durable=record), RecordWritten())
            case ComputeTable(id, record, samples, count, hosts):
                return self._feed(state, TableComputed(id, new_table(record, samples, count, hosts)))
            case Wake(seconds):
                return self._feed(changed(state, now=state.now + seconds - early), TimePassed())
            case Refuse(error):
                raise Breach(f"refused: {error}")
        raise Breach(f"not expected: {instruction}")

    def _faults(self, state: World) -> Iterator[tuple[bool, str, World]]:
        if spent := _spend(state, "leaders_killed"):
            yield False, "leader killed", self._next_leader(spent)
            for instruction in state.others:
                if isinstance(instruction, WriteRecord):
                    yield False, "leader killed after its write", self._next_leader(changed(spent, durable=instruction.record))
        if spent := _spend(state, "followers_killed"):
            for host in sorted({host for host, _ in state.data}.intersection(self.limits.can_leave)):
                data = tuple(each for each in state.data if each[0] != host)
                left = {"away": state.away - {host}, "joining": state.joining - {host}}
                yield False, f"{host} killed", changed(spent, data=data, stale_hosts=True, **left)
        if spent := _spend(state, "joins"):
            data, seen = (*state.data, ("new", frozenset())), (*state.seen, ("new", (0, 0)))
            joining = state.joining | {"new"}
            yield False, "a follower joins", changed(spent, data=data, seen=seen, joining=joining, stale_hosts=True)
        patient = state.durable.state is ShuffleState.SEALED or self.limits.replicas > 1  # else winners may be refused
        if patient and (spent := _spend(state, "aways")):
            for host in sorted(state.running.intersection(self.limits.can_leave)):
                left = {"away": state.away | {host}, "joining": state.joining - {host}}
                yield False, f"{host} is away", changed(spent, stale_hosts=True, **left)

    def _next_leader(self, state: World) -> World:
        plan = self.limits.machine(state.durable, state.epoch + 1)
        after = changed(
            state,
            plan=plan,
            epoch=state.epoch + 1,
            asks=(),
            others=(),
            former_asks=state.former_asks + tuple(each for each in state.asks if _forgets(each)),
            stale_hosts=False,
        )
        return self._feed(after, after.hosts())

    def _feed(self, state: World, event: Any) -> World:
        plan = copied(state.plan)
        out = plan.handle(event, state.now)
        plan.check()
        asks = tuple(each for each in state.asks if plan.outstanding(each.id))
        dropped = tuple(each for each in state.asks if not plan.outstanding(each.id))  # not waited for any more, but under way
        new = tuple(each for each in out if isinstance(each, Ask) and each not in asks)
        others = tuple(each for each in out if not isinstance(each, Ask))
        after = changed(
            state,
            plan=plan,
            asks=asks + new,
            others=state.others + others,
            former_asks=state.former_asks + tuple(each for each in dropped if _forgets(each)),
        )
        return self._client(after)

    def _client(self, state: World) -> World:
        """Asks again until it has its answer."""
        if state.plan.writing is not None:
            return state
        record = state.plan.record
        if record.state is ShuffleState.FILLING:
            return state if self.limits.filled else self._feed(state, COMMIT)
        wished = state.plan._rebalance_wanted is not None
        if self.limits.ranges and record.state is ShuffleState.SEALED and not record.rebalanced and not wished:
            return self._feed(state, Rebalance("r", self.limits.ranges))
        return state

    # --- followers --------------------------------------------------------------------------------------------------------

    def _perform(self, state: World, ask: Ask) -> tuple[World, wire.Reply | None]:
        data, seen, request = dict(state.data), dict(state.seen), ask.request
        if ask.host not in state.running:
            return state, None
        leader, table = seen[ask.host]
        leader_now, table_now = getattr(request, "epoch", leader), getattr(request, "table_epoch", table)
        if self.limits.fenced and leader_now < leader:
            return state, None
        if self.limits.tables and isinstance(request, wire.KeepIntervals) and table_now < table:
            return state, None
        seen[ask.host] = max(leader, leader_now), max(table, table_now)
        here = data[ask.host]
        reply: wire.Reply = wire.FollowerDone()
        match request:
            case wire.CountRows(_, intervals, winners):
                counts = [sum(_counts(row, each, winners) for row in here) for each in intervals]
                reply = wire.Counts(counts, [count * SIZE for count in counts])
            case wire.TellSamples(_, intervals, winners):
                told = [_sample(sorted(row for row in here if _counts(row, each, winners))) for each in intervals]
                reply = wire.Samples([sample for sample in told if sample is not None])
            case wire.FetchInterval(_, _, interval, winners, sources):
                if not state.running.intersection(sources):
                    return state, None
                there = frozenset[Row]().union(*(data[source] for source in state.running.intersection(sources)))
                got = {row for row in there if _counts(row, interval, winners)} - here
                data[ask.host] = here | got
                reply = wire.Fetched(len(got) * SIZE)
            case wire.KeepIntervals(_, _, intervals, winners):
                kept = (row for row in here if any(_counts(row, each, winners) for each in intervals))
                data[ask.host] = frozenset(kept)
                self._check_forgotten(here - data[ask.host], data, ask.host)
        return changed(state, data=tuple(data.items()), seen=tuple(seen.items())), reply

    # --- promises ---------------------------------------------------------------------------------------------------------

    def _check_forgotten(self, rows: frozenset[Row], data: dict[str, frozenset[Row]], host: str) -> None:
        """Not with followers that die: what is forgotten may have been held often enough when it was asked for."""
        wanted = 0 if self.limits.followers_killed else min(self.limits.replicas, len(data))
        for row in rows:
            copies = sum(row in each for each in data.values())
            if row[0] == WINNER and copies < wanted:
                raise Breach(f"{host} forgets {row}: {copies} copies are left on {len(data)} hosts")

    def _check(self, state: World) -> None:
        record = state.durable
        if record.state is ShuffleState.FILLING:
            self._check_filling(state)
        if record.state is not ShuffleState.SEALED:
            return
        known = number_of(record), state.data
        if known not in self._checked:
            self._check_sealed(record, dict(state.data))
            self._checked.add(known)

    def _check_filling(self, state: World) -> None:
        """When nothing is under way, as many hosts as can hold each range, and have all of it."""
        if state.stale_hosts or state.asks or state.others:
            return
        members, data = state.running - state.joining, dict(state.data)
        for each in state.durable.table:
            rows = {row for row in every_row() if within(each.interval, position(row))}
            if len(each.holders) < min(self.limits.replicas, len(members)):
                raise Breach(f"range {each.number} is filled at {each.holders} alone")
            if lacking := [host for host in each.holders if host in data and rows - data[host]]:
                raise Breach(f"{lacking} lack rows of range {each.number}")

    def _check_sealed(self, record: ShuffleRecord, data: dict[str, frozenset[Row]]) -> None:
        for number in range(ROWS):
            row = (WINNER, number)
            places = [
                host
                for table in (record.table, record.former)
                for each in table
                if within(each.interval, position(row))
                for host in each.holders
            ]
            if not any(row in data.get(host, ()) for host in places):
                raise Breach(f"row {number} can't be read at {places}")
        if record.former:
            return
        for each in record.table:
            for host in each.holders:
                lacks = [row for row in every_row() if row[0] == WINNER and within(each.interval, position(row))]
                if host in data and (left := set(lacks) - data[host]):
                    raise Breach(f"{host} is told to hold range {each.number}, but lacks {left}")

    def end(self, state: World) -> None:
        """See Explorable."""
        record, data = state.durable, dict(state.data)
        if record.state is not ShuffleState.SEALED or record.stage is not Stage.NONE:
            raise Breach(f"it ends {record.state}, {record.stage}, {state.plan.step}")
        if self.limits.ranges and record.rebalanced != "r":
            raise Breach("it was never rebalanced")
        for each in record.table:
            if len(each.holders) != min(self.limits.replicas, len(data)) or not {*each.holders} <= {*data}:
                raise Breach(f"range {each.number} is held by {each.holders}")
        for host, rows in data.items():
            mine = [each.interval for each in record.table if host in each.holders]
            wanted = {row for row in every_row() if row[0] == WINNER and any(within(part, position(row)) for part in mine)}
            if rows != wanted:
                raise Breach(f"{host} keeps {sorted(rows)}, not {sorted(wanted)}")
        if record.moved < record.moved_least:
            raise Breach(f"moved {record.moved} of at least {record.moved_least}")


def _counts(row: Row, interval: wire.Interval, winners: dict[int, str]) -> bool:
    return within(interval, position(row)) and (not winners or row[0] in winners.values())


def _sample(rows: list[Row]) -> RunSample | None:
    if not rows:
        return None
    numbers = tuple(number for _, number in rows)
    keys = tuple(position(row).key for row in rows)
    return RunSample(0, WINNER, 0, len(rows), len(rows) * SIZE, keys, numbers, (SIZE,) * len(rows))


def _changes(ask: Ask) -> bool:
    return isinstance(ask.request, wire.KeepIntervals | wire.FetchInterval)


def _forgets(ask: Ask) -> bool:
    """Done late, it does harm if it is obeyed. Data that comes late does not."""
    return isinstance(ask.request, wire.KeepIntervals)


def _name(ask: Ask) -> str:
    return f"{type(ask.request).__name__} at {ask.host}"


def _without_former(state: World, ask: Ask) -> World:
    return changed(state, former_asks=tuple(each for each in state.former_asks if each is not ask))


def _spend(state: World, kind: str) -> World | None:
    index = KINDS.index(kind)
    if not state.budget[index]:
        return None
    return changed(state, budget=(*state.budget[:index], state.budget[index] - 1, *state.budget[index + 1 :]))

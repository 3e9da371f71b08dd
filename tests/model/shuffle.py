"""A shuffle's leader among its followers, as a model that can be searched: requests are done in any order, leaders die with
requests under way (which are done all the same), answers are lost or told twice, followers die with all they have, or join.

The machine is the real one (roq/shuffle/plan.py); followers keep sets of rows. What is promised:
- What is sealed can be read: every row of a winner is at a living holder of its range, in the table or in the former one.
- When nothing is left to do, the shuffle is sealed, every range is whole at as many followers as there are copies wanted (and
  hosts), and nobody keeps anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec

from roq.shuffle.events import (
    Answered,
    Ask,
    Commit,
    Cut,
    Failed,
    Hosts,
    Instruction,
    Rebalance,
    Recut,
    Refuse,
    Tick,
    Wake,
    Write,
    Written,
)
from roq.shuffle.plan import Plan
from roq.shuffle.ranges import table_of, within
from roq.shuffle.record import Record, Stage, recut, with_holders
from roq.wire import shuffle as wire
from roq.wire.shuffle import Position, Receipt, RunSample, Spec, State
from tests.model.moves import Breach

ROWS = 4  # of the winner, and of the loser
SIZE = 10  # of each row
WINNER, LOSER = "winner", "loser"
Row = tuple[str, int]  # attempt, number


def position(row: Row) -> Position:
    """The loser's rows lie between the winner's."""
    return Position(bytes([row[1]]), 0 if row[0] == WINNER else 1, 0, row[1])


@dataclass(frozen=True)
class Limits:
    """What may go wrong, how often. machine: the one that is searched. fenced: followers refuse what is older than what they
    have seen. ranges: of a rebalancing after the commit, 0: none. uneven: ranges begin as one row and the rest."""

    leaders_killed: int = 0
    followers_killed: int = 0
    joins: int = 0
    answers_lost: int = 0
    answers_twice: int = 0
    ranges: int = 0
    replicas: int = 2
    borders: tuple[int, ...] = (2,)
    hosts: tuple[str, ...] = ("a", "b", "c")
    forgetful: int = 0  # rows that one holder lacks when the winners are named
    machine: type[Plan] = Plan
    fenced: bool = True


@dataclass(frozen=True)
class World:
    """One state. asks: of this leader and of former ones. data: what each living follower keeps. seen: newest epoch it saw."""

    plan: Plan
    durable: Record
    epoch: int
    now: float
    data: tuple[tuple[str, frozenset[Row]], ...]
    seen: tuple[tuple[str, int], ...]
    stale_hosts: bool
    asks: tuple[Ask, ...]
    others: tuple[Instruction, ...]
    former_asks: tuple[Ask, ...]
    budget: tuple[int, ...]

    @cached_property
    def _key(self) -> bytes:
        frozen = tuple(_frozen(getattr(self, each.name)) for each in fields(self))
        return blake2b(repr(frozen).encode(), digest_size=16).digest()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self._key == other._key


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Plan):
        return tuple(sorted((name, _frozen(each)) for name, each in vars(value).items() if name not in ("_out", "_now")))
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, msgspec.msgpack.encode(value)
    if is_dataclass(value):
        return type(value).__name__, tuple(_frozen(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, dict):
        return tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    if isinstance(value, frozenset | set):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    return repr(value) if value is None or isinstance(value, Enum) else value


KINDS = ("leaders_killed", "followers_killed", "joins", "answers_lost", "answers_twice")


class Model:
    """Explorable."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def start(self) -> World:
        """Filled, and the winner named."""
        limits = self.limits
        borders = [position((WINNER, row)) for row in limits.borders]
        spec = Spec(("k",), b"", limits.replicas)
        table = with_holders("s", table_of(borders), limits.hosts, limits.replicas)
        record = Record("s", "s", spec, 0.0, "t", table=table, epoch=1, fresh=len(table) + 1)
        data: dict[str, frozenset[Row]] = {host: frozenset() for host in limits.hosts}
        for each in table:
            for host in each.holders:
                data[host] |= {row for row in every_row() if within(each.interval, position(row))}
        lacking = table[0].holders[0]
        data[lacking] -= {(WINNER, row) for row in range(limits.forgetful)}
        budget = tuple(getattr(limits, kind) for kind in KINDS)
        plan = limits.machine(record, 1)
        seen = tuple((host, 0) for host in limits.hosts)
        world = World(plan, record, 1, 0.0, tuple(data.items()), seen, False, (), (), (), budget)
        world = self._feed(world, Hosts(frozenset(data), frozenset(data)))
        return self._client(world)

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
            after, _ = self._perform(state, ask)
            yield False, f"{_name(ask)} of a former leader", _without_former(after, ask)
        for instruction in state.others:
            if writing and not isinstance(instruction, Write):
                continue  # one thing after the other
            yield True, type(instruction).__name__, self._carry_out(state, instruction)
        if state.stale_hosts and not writing:
            hosts = frozenset(host for host, _ in state.data)
            yield True, "hosts seen", self._feed(_with(state, stale_hosts=False), Hosts(hosts, hosts))
        yield from self._faults(state)

    def _do(self, state: World, ask: Ask) -> Iterator[tuple[bool, str, World]]:
        after, reply = self._perform(state, ask)
        done = _with(after, asks=tuple(each for each in after.asks if each != ask))
        if reply is None:
            if ask.host in dict(state.data) or not state.stale_hosts:  # else the leader is about to see that it is gone
                yield True, f"{_name(ask)} fails", self._feed(done, Failed(ask.id))
            return
        yield True, _name(ask), self._feed(done, Answered(ask.id, reply))
        if spent := _spend(done, "answers_lost"):
            yield False, f"{_name(ask)}, answer lost", self._feed(spent, Failed(ask.id))
        if spent := _spend(after, "answers_twice"):
            yield False, f"{_name(ask)}, and again later", self._feed(spent, Answered(ask.id, reply))

    def _carry_out(self, state: World, instruction: Instruction) -> World:
        state = _with(state, others=tuple(each for each in state.others if each is not instruction))
        match instruction:
            case Write(record):
                return self._feed(_with(state, durable=record), Written())
            case Recut(id, record, samples, count, hosts):
                return self._feed(state, Cut(id, recut(record, samples, count, hosts)))
            case Wake(seconds):
                return self._feed(_with(state, now=state.now + seconds), Tick())
            case Refuse(error):
                raise Breach(f"refused: {error}")
        raise Breach(f"not expected: {instruction}")

    def _faults(self, state: World) -> Iterator[tuple[bool, str, World]]:
        if spent := _spend(state, "leaders_killed"):
            yield False, "leader killed", self._next_leader(spent)
            for instruction in state.others:
                if isinstance(instruction, Write):
                    yield False, "leader killed after its write", self._next_leader(_with(spent, durable=instruction.record))
        if spent := _spend(state, "followers_killed"):
            for host, _ in state.data:
                data = tuple(each for each in state.data if each[0] != host)
                yield False, f"{host} killed", _with(spent, data=data, stale_hosts=True)
        if spent := _spend(state, "joins"):
            data = (*state.data, ("new", frozenset()))
            yield False, "a follower joins", _with(spent, data=data, seen=(*state.seen, ("new", 0)), stale_hosts=True)

    def _next_leader(self, state: World) -> World:
        plan = self.limits.machine(state.durable, state.epoch + 1)
        hosts = frozenset(host for host, _ in state.data)
        after = _with(
            state,
            plan=plan,
            epoch=state.epoch + 1,
            asks=(),
            others=(),
            former_asks=state.former_asks + tuple(each for each in state.asks if _forgets(each)),
            stale_hosts=False,
        )
        return self._feed(after, Hosts(hosts, hosts))

    def _feed(self, state: World, event: Any) -> World:
        plan = copy.copy(state.plan)
        for name, value in vars(plan).items():
            if isinstance(value, dict | list | set):
                setattr(plan, name, value.copy())
        out = plan.handle(event, state.now)
        plan.check()
        asks = tuple(each for each in state.asks if each.id in plan._asks)
        dropped = tuple(each for each in state.asks if each.id not in plan._asks)  # not waited for any more, but under way
        new = tuple(each for each in out if isinstance(each, Ask) and each not in asks)
        others = tuple(each for each in out if not isinstance(each, Ask))
        after = _with(
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
        if record.state is State.FILLING:
            return self._feed(state, Commit((Receipt(0, WINNER, ROWS, ROWS * SIZE, 1),)))
        wished = state.plan._rebalance_wanted is not None
        if self.limits.ranges and record.state is State.SEALED and not record.rebalanced and not wished:
            return self._feed(state, Rebalance("r", self.limits.ranges))
        return state

    # --- followers --------------------------------------------------------------------------------------------------------

    def _perform(self, state: World, ask: Ask) -> tuple[World, wire.Reply | None]:
        data, seen, request = dict(state.data), dict(state.seen), ask.request
        if ask.host not in data:
            return state, None
        epoch = getattr(request, "epoch", None)
        if epoch is not None:
            if self.limits.fenced and epoch < seen[ask.host]:
                return state, None
            seen[ask.host] = max(epoch, seen[ask.host])
        here = data[ask.host]
        reply: wire.Reply = wire.Done()
        match request:
            case wire.CountRows(_, intervals, winners):
                counts = [sum(_counts(row, each, winners) for row in here) for each in intervals]
                reply = wire.Counts(counts, [count * SIZE for count in counts])
            case wire.TellSamples(_, intervals, winners):
                told = [_sample(sorted(row for row in here if _counts(row, each, winners))) for each in intervals]
                reply = wire.Samples([sample for sample in told if sample is not None])
            case wire.FetchInterval(_, _, interval, winners, sources):
                if not any(source in data for source in sources):
                    return state, None
                there = frozenset[Row]().union(*(data[source] for source in sources if source in data))
                got = {row for row in there if _counts(row, interval, winners)} - here
                data[ask.host] = here | got
                reply = wire.Fetched(len(got) * SIZE)
            case wire.KeepIntervals(_, _, intervals, winners):
                kept = (row for row in here if any(_counts(row, each, winners) for each in intervals))
                data[ask.host] = frozenset(kept)
        return _with(state, data=tuple(data.items()), seen=tuple(seen.items())), reply

    # --- promises ---------------------------------------------------------------------------------------------------------

    def _check(self, state: World) -> None:
        record = state.durable
        if record.state is not State.SEALED:
            return
        data = dict(state.data)
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
        if record.state is not State.SEALED or record.stage is not Stage.NONE:
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


def every_row() -> list[Row]:
    """Of both attempts."""
    return [(attempt, number) for attempt in (WINNER, LOSER) for number in range(ROWS)]


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


def _with(state: World, **changes: Any) -> World:
    values = {each.name: getattr(state, each.name) for each in fields(state)}
    return World(**(values | changes))


def _without_former(state: World, ask: Ask) -> World:
    return _with(state, former_asks=tuple(each for each in state.former_asks if each is not ask))


def _spend(state: World, kind: str) -> World | None:
    index = KINDS.index(kind)
    if not state.budget[index]:
        return None
    return _with(state, budget=(*state.budget[:index], state.budget[index] - 1, *state.budget[index + 1 :]))

"""What a search through a shuffle's machine (shuffle.py) may do, and one state of it. States are many and share most of what
they are made of: values that never change are numbered, and states compared by the numbers."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

import msgspec

from roq.shuffle.events import Ask, Instruction
from roq.shuffle.plan import Alarm, Round, ShufflePlan
from roq.shuffle.record import FollowerHosts, ShuffleRecord
from roq.wire.shuffle import Position

ROWS = 4  # of the winner, and of the loser
SIZE = 10  # of each row
WINNER, LOSER = "winner", "loser"
Row = tuple[str, int]  # attempt, number


@cache
def position(row: Row) -> Position:
    """The loser's rows lie between the winner's."""
    return Position(bytes([row[1]]), 0 if row[0] == WINNER else 1, 0, row[1])


@cache
def every_row() -> tuple[Row, ...]:
    """Of both attempts."""
    return tuple((attempt, number) for attempt in (WINNER, LOSER) for number in range(ROWS))


@dataclass(frozen=True)
class Limits:
    """What may go wrong, how often. machine: the one that is searched. fenced, tables: followers refuse what is of an older
    leader, or forgetting by an older table, than what they have seen. ranges: of a rebalancing after the commit, 0: none.
    can_leave: hosts that may be away (with the only copy: when it is sealed), or die. filled: winners are named by a step of
    its own, at any time."""

    leaders_killed: int = 0
    followers_killed: int = 0
    joins: int = 0
    aways: int = 0
    early_ticks: int = 0
    answers_lost: int = 0
    answers_twice: int = 0
    ranges: int = 0
    replicas: int = 2
    borders: tuple[int, ...] = (2,)
    hosts: tuple[str, ...] = ("a", "b", "c")
    forgetful: int = 0  # rows that one holder lacks when the winners are named
    machine: type[ShufflePlan] = ShufflePlan
    fenced: bool = True
    tables: bool = True
    can_leave: tuple[str, ...] = ("a", "b", "c", "d", "new")
    filled: bool = False


@dataclass(frozen=True)
class World:
    """One state. asks: of this leader and of former ones. data: what each living follower keeps. seen: newest epoch it saw, and
    newest table. away, joining: hosts that can't be reached, and those that can, but are no members yet."""

    plan: ShufflePlan
    durable: ShuffleRecord
    epoch: int
    now: float
    data: tuple[tuple[str, frozenset[Row]], ...]
    seen: tuple[tuple[str, tuple[int, int]], ...]
    away: frozenset[str]
    joining: frozenset[str]
    stale_hosts: bool
    asks: tuple[Ask, ...]
    others: tuple[Instruction, ...]
    former_asks: tuple[Ask, ...]
    budget: tuple[int, ...]

    @cached_property
    def _key(self) -> Hashable:
        plan = _plan_key(self.plan)
        times = tuple(_ahead(time, self.now) for time in _times(self.plan))
        last = self.plan._round.last_id
        told = (
            number_of(self.durable),
            tuple((last - each.id, each.host, number_of(each.request)) for each in self.asks),
            tuple(map(number_of, self.others)),
            tuple((each.host, number_of(each.request)) for each in self.former_asks),
            tuple(last - id for id in self.plan._round.asked),
        )
        rest = (self.epoch, self.data, self.seen, self.away, self.joining, self.stale_hosts, self.budget)
        return plan, times, told, rest

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self._key == other._key

    @cached_property
    def running(self) -> frozenset[str]:
        """Who can be reached."""
        return frozenset(host for host, _ in self.data) - self.away

    def hosts(self) -> FollowerHosts:
        """As the leader sees them, when it looks."""
        return FollowerHosts(self.running, self.running - self.joining, joining=self.joining)


def changed(state: World, **changes: Any) -> World:
    """The same but for this."""
    return World(**({name: getattr(state, name) for name in NAMES} | changes))


NAMES = [each.name for each in fields(World)]
TIMES = ("_keep_at", "_missing_since", "_wanted_at")  # of the machine: what matters is how far off they are
UNTOLD = (
    *TIMES,
    "_alarm",
    "_out",
    "_now",
    "_samples",
    "_heard_at",
    "_abandoned_seconds",
)  # the others make no difference here
LONG_AGO = -100.0  # seconds: longer than anything is waited for
_numbers: dict[Hashable, int] = {}  # of values: states are compared by them
_known: dict[int, tuple[Any, int]] = {}  # by id, with the value, so that ids stay


def forget_numbers() -> None:
    """Before another search."""
    _numbers.clear()
    _known.clear()


def _times(plan: ShufflePlan) -> tuple[float | list[float] | None, ...]:
    return (plan._round.until, plan._alarm.due, *(getattr(plan, name) for name in TIMES))


def copied(value: Any) -> Any:
    """A plan that can go on without this one, and what it is made of that changes."""
    found = copy.copy(value)
    for name, each in vars(found).items():
        if isinstance(each, dict | list | set):
            setattr(found, name, each.copy())
        elif isinstance(each, Round | Alarm):
            setattr(found, name, copied(each))
    return found


def number_of(value: Any) -> int:
    """The same for equal values, which never change."""
    known = _known.get(id(value))
    if known is None:
        known = _known[id(value)] = value, _numbers.setdefault(_valued(value), len(_numbers))
    return known[1]


def _plan_key(plan: ShufflePlan) -> Hashable:
    """A plan is copied before it goes on (shuffle.py), so it never changes either."""
    known = _known.get(id(plan))
    if known is None:
        key = tuple([_frozen(each) for name, each in vars(plan).items() if name not in UNTOLD])
        known = _known[id(plan)] = plan, _numbers.setdefault(key, len(_numbers))
    return known[1]


def _valued(value: Any) -> Hashable:
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, msgspec.msgpack.encode(value)
    if is_dataclass(value):
        return type(value).__name__, tuple(_frozen(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Exception):
        return repr(value)
    assert isinstance(value, Hashable)
    return value


def _ahead(time: float | list[float] | None, now: float) -> Hashable:
    if isinstance(time, list):
        return tuple(_ahead(each, now) for each in time)
    return None if time is None else round(max(LONG_AGO, time - now), 4)


def _frozen(value: Any) -> Hashable:
    if value is None or isinstance(value, str | int | float):  # also an Enum of strings
        return value
    if isinstance(value, dict):
        return tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, Round):  # what it asks is among the asks of the world
        return value.step, _frozen(value.answers)
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    return value if isinstance(value, frozenset) else number_of(value)

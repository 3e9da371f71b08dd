"""What the model of moves (moves.py) is made of: how much may happen, and all of a moment in one frozen value.

Not covered: the frozen machines and frames inside it, see machines.py.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from roq.pubsub import order, path
from roq.wire.frame import FrameKind
from tests.model.machines import Doubts, Frame, Order, Path

T = TypeVar("T")
STARTING, ACTIVE, RETIRING, GONE = range(4)  # phases of an Exchange
ABSENT, JOINING = -2, -1  # of a subscriber, before it is ready


class Rules(NamedTuple):
    """The Monitor's rules. Only the tests switch one off, to see the model fail."""

    prove_before_move: bool = True
    retire_after_fin: bool = True
    stop_after_detach: bool = True
    join_apart: bool = True  # no move while a subscriber joins, and the other way round
    await_open: bool = True  # a subscriber joins only when the OPEN of the last move was seen as well
    excuse_silent: bool = True  # an Exchange is proved without a subscriber that is frozen
    remember_offers: bool = True  # no RETIRE through an Exchange that a publisher was sent to and may yet come to


class Config(NamedTuple):
    """How much may happen.

    retires: Exchanges that are emptied and stopped; retargets: moves that the Monitor gives up on for another Exchange;
    drops: frames that an Exchange drops for one subscriber; delays: holds that expire although the FIN would have come;
    deaths: Exchanges killed, and the publisher fails over; kills: the publisher is killed while it moves;
    changes: the Exchange on which the publisher is to begin is killed, and another Monitor takes over;
    freezes: the second subscriber stands still, for a while or for ever;
    late: the second subscriber joins whenever it likes, if ever; met: the subscribers know of the publisher at the start;
    proved: this many Exchanges are proved by those subscribers at the start.
    """

    messages: int = 3
    exchanges: int = 2
    moves: int = 0
    drops: int = 0
    delays: int = 0
    deaths: int = 0
    retires: int = 0
    retargets: int = 0
    kills: int = 0
    closes: int = 0
    changes: int = 0
    freezes: int = 0
    late: bool = False
    met: bool = False
    proved: int = 1
    order: order.OrderSafeguards = order.OrderSafeguards()
    path: path.PathSafeguards = path.PathSafeguards()
    rules: Rules = Rules()


class Budget(NamedTuple):
    """What is left of it."""

    moves: int
    drops: int
    delays: int
    deaths: int
    retires: int
    retargets: int
    kills: int
    closes: int
    changes: int
    freezes: int


class Reader(NamedTuple):
    """A subscriber. proved: set of Exchanges; since: messages sent before it was ready; delivered, lost, doubted: sets of
    messages; thawed: it has been frozen; passed_by: an Exchange carries messages without it, and it has not heard of that."""

    order: Order | None = None
    proved: int = 0
    since: int = ABSENT
    last: int = 0
    delivered: int = 0
    lost: int = 0
    doubted: int = 0
    doubts: Doubts = None
    thawed: bool = False
    passed_by: bool = False


class Link(NamedTuple):
    """The publisher's connection for one path; frames: sent, not yet taken by the Exchange."""

    path: int
    exchange: int
    welcomed: bool = False
    frames: tuple[Frame, ...] = ()


Pipe = tuple[Frame, ...] | None  # None: not subscribed


class State(NamedTuple):
    """All of it at one moment."""

    path: Path
    sent: int
    opened: int  # last path opened
    ended: int  # last path ended
    alive: bool  # the publisher
    finished: bool
    notices: frozenset[tuple[str, int, int]]  # Monitor or Exchange → publisher, in any order: what, path, Exchange
    links: tuple[Link, ...]
    pipes: tuple[tuple[Pipe, ...], ...]  # by Exchange, then by subscriber
    phases: tuple[int, ...]
    news: frozenset[tuple[FrameKind, int, int]]  # FIN and OPEN on their way to the Monitor: kind, path, Exchange
    placed: tuple[int, int, int]  # the Monitor's knowledge: path, Exchange, target
    offered: frozenset[tuple[int, int]]  # (path, Exchange) of notices, until the Monitor knows where the publisher went
    seen: int  # newest path whose OPEN the Monitor saw (told only where it makes a difference)
    frozen: bool  # the second subscriber does nothing
    replayed: int  # path of the fail-over, 0 before
    readers: tuple[Reader, ...]
    budget: Budget


def put(row: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    """The row with one value replaced."""
    return (*row[:at], value, *row[at + 1 :])

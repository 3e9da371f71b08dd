"""What the membership machine knows and what it orders: states, records and instructions. Pure data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from roq.errors import RoqError
from roq.wire import monitor as wire


class ExchangeState(StrEnum):
    """How an Exchange is, see membership.py."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"
    RETIRING = "retiring"
    DRAINED = "drained"


CARRYING = (ExchangeState.ACTIVE, ExchangeState.DRAINING)


class Notify(NamedTuple):
    """Send a notice to a member."""

    peer: bytes
    notice: msgspec.Struct


class Probe(NamedTuple):
    """Send a probe through this Exchange."""

    exchange: wire.ExchangeAddress


class Retire(NamedTuple):
    """Send RETIRE through this Exchange."""

    exchange: wire.ExchangeAddress


class WatchExchange(NamedTuple):
    """Connect to this Exchange (probes in, control frames out)."""

    exchange: wire.ExchangeAddress


class Unwatch(NamedTuple):
    """Disconnect from it."""

    exchange: wire.ExchangeAddress


class AnswerDue(NamedTuple):
    """A request that had to wait has its answer."""

    waiter: Hashable
    reply: msgspec.Struct | RoqError


Instruction = Notify | Probe | Retire | WatchExchange | Unwatch | AnswerDue


class Exchange:
    """One Exchange of the queue."""

    __slots__ = ("address", "heard", "host", "last_report", "listed", "may_carry", "proving_since", "state")

    def __init__(self, address: wire.ExchangeAddress, host: str, now: float) -> None:
        self.address, self.host, self.last_report = address, host, now
        self.proving_since = now
        self.heard = False  # a probe came back to the Monitor itself: it will see what publishers end and ask
        self.state = ExchangeState.STARTING
        self.listed = 0  # version of the first list that names it
        self.may_carry = False  # STARTING, yet publishers of an earlier Monitor may be on it


class PublisherRecord:
    """One publisher: where it is, and where it is going (`target`, "" if nowhere)."""

    __slots__ = (
        "deadline",
        "exchange",
        "last_report",
        "lost",
        "lost_at",
        "lost_path",
        "offered",
        "opened",
        "path",
        "peer",
        "relocated",
        "target",
    )

    def __init__(self, peer: bytes, exchange: str, path: int, now: float) -> None:
        self.peer, self.exchange, self.path, self.last_report = peer, exchange, path, now
        self.target = ""
        self.relocated = False  # it has been told
        self.opened = 0  # newest path whose OPEN came out of its Exchange
        self.offered: dict[str, int] = {}  # Exchanges it was told to go to, by path, until it is known where it went
        self.deadline = 0.0
        self.lost = ""  # token of the Exchange that died under it, until it has opened its next path
        self.lost_path = 0
        self.lost_at = 0.0

    def lose(self, token: str, path: int, now: float) -> None:
        """Its link is gone; what it was told to do before is void."""
        if self.lost != token:
            self.lost, self.lost_at = token, now
            self.target, self.relocated = "", False
        self.lost_path = self.path = max(path, self.path)

    def opening(self, now: float) -> bool:
        """Whether it has left its last Exchange and not been seen on the next one yet."""
        return self.opened < self.path and now < self.deadline

    def offer(self, exchange: str, path: int) -> None:
        """It was told to use this path there."""
        self.offered[exchange] = max(path, self.offered.get(exchange, 0))

    def is_on(self, path: int, exchange: str) -> None:
        """It is known to use this path there."""
        self.path, self.exchange = path, exchange
        if path > self.lost_path:
            self.lost = ""
        if self.target == exchange:
            self.target, self.relocated = "", False


class SubscriberRecord:
    """One subscriber; `attached` has the tokens of the Exchanges that it proved."""

    __slots__ = ("attached", "joined", "last_report", "passed_by", "peer", "ready", "reported", "returning", "told", "was_told")

    def __init__(self, peer: bytes, now: float, returning: bool = False) -> None:
        self.peer, self.joined, self.last_report = peer, now, now
        self.attached: frozenset[str] = frozenset()
        self.ready = False  # it proved everything that is known to carry messages
        self.told = False  # and has been told so
        self.was_told = False  # once, and may have been told the contrary since
        self.returning = returning  # an earlier Monitor had told it: it knows whom it might miss
        self.reported = False
        self.passed_by = 0  # times that something carried messages without it, since it was ready first

    def may_miss(self, tokens: Iterable[str]) -> None:
        """These carry messages, whether or not it has proved them."""
        if not self.attached.issuperset(tokens):
            self.ready = False
            self.passed_by += self.was_told or self.returning

    def tell(self, ready: bool) -> None:
        """It is being told whether it is ready."""
        self.told = ready
        self.was_told |= ready


class PendingRequest(NamedTuple):
    """A Move, Drain or AwaitExchange that is not answered yet."""

    waiter: Hashable
    kind: str  # "move", "drain", "active"
    deadline: float  # then it is answered with DeadlineExceeded
    subject: str = ""  # Exchange id for drain and active
    moves: frozenset[tuple[int, str]] = frozenset()  # for move: (publisher, Exchange)
    refused: tuple[str, ...] = ()

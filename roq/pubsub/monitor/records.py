"""What the membership machine knows and what it orders: an Exchange's states and transitions, records, instructions. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from roq.errors import RoqError
from roq.wire import monitor as wire

JOINING_SECONDS = 2.0  # moves and proofs wait at most this long for a subscriber to become ready
PROVING_SILENT_SECONDS = 2.5  # two reports missed: with the report before its death, the living wait less than 3 s
PROVING_SECONDS = 10.0  # whoever reports and has not proved an Exchange by then does not read


class ExchangeState(StrEnum):
    """How an Exchange is, see membership.py. One that is lost, or stopped, is known no more."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"
    RETIRING = "retiring"
    DRAINED = "drained"


class ExchangeEvent(StrEnum):
    """What changes the state of an Exchange."""

    PROVED = "proved"  # everybody who has to hear it does, or is not waited for
    SILENT = "silent"  # it has not reported for too long
    RESTARTED = "restarted"  # another life of it has reported
    DRAIN = "drain"  # it is to be emptied
    UNUSED = "unused"  # no publisher's FIN may still have to come through it
    DETACHED = "detached"  # every subscriber has read RETIRE and left it


CARRYING = (ExchangeState.ACTIVE, ExchangeState.DRAINING)
# What is not named leaves an Exchange as it is.
TRANSITIONS = {
    (ExchangeState.STARTING, ExchangeEvent.PROVED): ExchangeState.ACTIVE,
    (ExchangeState.STARTING, ExchangeEvent.DRAIN): ExchangeState.RETIRING,  # nothing ever passed through it
    (ExchangeState.ACTIVE, ExchangeEvent.DRAIN): ExchangeState.DRAINING,
    (ExchangeState.ACTIVE, ExchangeEvent.SILENT): ExchangeState.STARTING,
    (ExchangeState.ACTIVE, ExchangeEvent.RESTARTED): ExchangeState.STARTING,
    (ExchangeState.DRAINING, ExchangeEvent.RESTARTED): ExchangeState.RETIRING,  # its publishers replay elsewhere
    (ExchangeState.DRAINING, ExchangeEvent.UNUSED): ExchangeState.RETIRING,
    (ExchangeState.RETIRING, ExchangeEvent.DETACHED): ExchangeState.DRAINED,
}


class Notify(NamedTuple):
    """Send a notice to a member."""

    peer: bytes
    notice: msgspec.Struct


class Retire(NamedTuple):
    """Send RETIRE through this Exchange."""

    exchange: wire.ExchangeAddress


class WatchExchange(NamedTuple):
    """Connect to this Exchange (RETIRE and watermarks in, control frames out)."""

    exchange: wire.ExchangeAddress


class Unwatch(NamedTuple):
    """Disconnect from it."""

    exchange: wire.ExchangeAddress


class AnswerDue(NamedTuple):
    """A request that had to wait has its answer."""

    waiter: Hashable
    reply: msgspec.Struct | RoqError


Instruction = Notify | Retire | WatchExchange | Unwatch | AnswerDue


class Exchange:
    """One Exchange of the queue."""

    __slots__ = ("address", "heard", "host", "last_report", "listed", "may_carry", "peer", "protocol", "proving_since", "state")

    def __init__(
        self, address: wire.ExchangeAddress, host: str, now: float, peer: bytes = b"", protocol: int = wire.SERVER_PROTOCOL
    ) -> None:
        self.address, self.host, self.last_report, self.peer = address, host, now, peer
        self.protocol = protocol  # what it understands
        self.proving_since = now
        self.heard = False  # the Monitor itself is attached: it will see where publishers begin and end
        self.state = ExchangeState.STARTING  # carries only if `heard`
        self.listed = 0  # version of the first list that names it
        self.may_carry = False  # STARTING, yet publishers of an earlier Monitor may be on it

    def on(self, event: ExchangeEvent) -> bool:
        """Take the transition; whether there was one."""
        before, self.state = self.state, TRANSITIONS.get((self.state, event), self.state)
        return self.state is not before

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self.heard or self.state not in CARRYING, f"{self.address.id} carries, and the Monitor does not hear it"


class PublisherRecord:
    """One publisher: where it is, and where it is going (`target`, "" if nowhere)."""

    __slots__ = (
        "deadline",
        "exchange",
        "last_report",
        "lost",
        "lost_at",
        "lost_path",
        "needs",
        "offered",
        "opened",
        "path",
        "peer",
        "protocol",
        "relocated",
        "target",
    )

    def __init__(
        self, peer: bytes, exchange: str, path: int, now: float, protocol: int = wire.PROTOCOL, needs: int = 1
    ) -> None:
        self.peer, self.exchange, self.path, self.last_report = peer, exchange, path, now
        self.protocol = protocol  # what it understands
        self.needs = needs  # what subscribers have to understand that are to read it
        self.target = ""
        self.relocated = False  # it has been told; only while there is a target
        self.opened = 0  # newest path whose OPEN came out of its Exchange
        self.offered: dict[str, int] = {}  # Exchanges it was told to go to, by path, until it is known where it went
        self.deadline = 0.0
        self.lost = ""  # token of the Exchange that died under it, until it has opened its next path
        self.lost_path = 0  # one that it had
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

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self.target or not self.relocated, "it was told to go, and nowhere"
        assert not self.lost or self.lost_path <= self.path, "it lost a path that it never had"


class SubscriberRecord:
    """One subscriber; `attached` has the tokens of the Exchanges that it proved."""

    __slots__ = ("attached", "joined", "last_report", "passed_by", "peer", "ready", "reported", "returning", "told", "was_told")

    def __init__(self, peer: bytes, now: float, returning: bool = False) -> None:
        self.peer, self.joined, self.last_report = peer, now, now
        self.attached: frozenset[str] = frozenset()
        self.ready = False  # it proved everything that is known to carry messages
        self.told = False  # and has been told so: then it was_told
        self.was_told = False  # once, and may have been told the contrary since
        self.returning = returning  # an earlier Monitor had told it: it knows whom it might miss
        self.reported = False
        self.passed_by = 0  # times that something carried messages without it, since it was ready first; 0 before

    def may_miss(self, tokens: Iterable[str]) -> None:
        """These carry messages, whether or not it has proved them."""
        if not self.attached.issuperset(tokens):
            self.ready = False
            self.passed_by += self.was_told or self.returning

    def tell(self, ready: bool) -> None:
        """It is being told whether it is ready."""
        self.told = ready
        self.was_told |= ready

    def waited_for(self, now: float) -> bool:
        """Whether an Exchange is not ACTIVE without its proof, for a while."""
        if now - self.last_report > PROVING_SILENT_SECONDS:
            return False
        return self.ready or now - self.joined < (PROVING_SECONDS if self.returning else JOINING_SECONDS)

    def check(self) -> None:
        """The invariants; AssertionError if one is broken."""
        assert self.was_told or not self.told, "it is told that it is ready, and was never"
        assert not self.passed_by or self.was_told or self.returning, "it was passed by before it was ready"


class PendingRequest(NamedTuple):
    """A Move, Drain or AwaitExchange that is not answered yet."""

    waiter: Hashable
    kind: str  # "move", "drain", "active"
    deadline: float  # then it is answered with DeadlineExceeded
    subject: str = ""  # Exchange id for drain and active
    moves: frozenset[tuple[int, str]] = frozenset()  # for move: (publisher, Exchange)
    refused: tuple[str, ...] = ()

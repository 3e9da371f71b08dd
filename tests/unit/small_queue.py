"""A membership machine with a clock and short names, for the tests of one situation at a time."""

from __future__ import annotations

from typing import Any

from roq.pubsub.monitor.membership import Membership
from roq.pubsub.monitor.records import AnswerDue, ExchangeState, Instruction, Notify
from roq.pubsub.monitor.takeover import FormerExchanges, Takeover
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow
from roq.wire.frame import PathOpening
from roq.wire.monitor import ExchangeAddress

USE = wire.PublisherWelcome(3, 0, ExchangeAddress("", "", 0, 0), Overflow.BLOCK, 4096)
P, S, T = 11, 21, 22


def address(id: str, incarnation: int = 1) -> ExchangeAddress:
    return ExchangeAddress(id, "127.0.0.1", 1, 2, incarnation)


class Queue:
    """A machine and a clock; every call checks the invariants."""

    def __init__(self, *exchanges: str) -> None:
        self.machine = Membership(3, USE)
        self.now = 100.0
        for id in exchanges:
            self.exchange(id)

    def did(self, instructions: list[Instruction]) -> list[Instruction]:
        self.machine.check()
        return instructions

    def exchange(self, id: str, incarnation: int = 1) -> list[Instruction]:
        out = self.reports(id, incarnation)
        return out + self.did(self.machine.exchange_heard(address(id, incarnation).token, self.now))

    def reports(self, id: str, incarnation: int = 1) -> list[Instruction]:
        zeros = (0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0)
        return self.did(self.machine.exchange_report(wire.ExchangeReport(address(id, incarnation), "h", *zeros), self.now))

    def join(self, id: int = P, path: int = 0, exchange: str = "") -> wire.PublisherWelcome:
        known = self.machine.exchanges.get(exchange)
        token = known.address.token if known else ""
        return self.machine.join_publisher(wire.JoinPublisher(id, path, exchange, token, wire.PROTOCOL), b"p%d" % id, self.now)

    def subscribe(self, id: int = S) -> wire.SubscriberWelcome:
        return self.machine.join_subscriber(wire.JoinSubscriber(id, (">",), False, wire.PROTOCOL), b"s%d" % id, self.now)

    def at(self, path: int, exchange: str, leaving: int = 0, id: int = P, lost: str = "") -> list[Instruction]:
        report = wire.PublisherReport(id, path, exchange, lost, leaving, 0, 0, 0, 0.0)
        return self.did(self.machine.publisher_report(report, b"p%d" % id, self.now))

    def proves(self, *tokens: str, id: int = S, version: int = 99) -> list[Instruction]:
        report = wire.SubscriberReport(id, version, tokens, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        return self.did(self.machine.subscriber_report(report, b"s%d" % id, self.now))

    def fin(self, path: int, exchange: str, id: int = P) -> list[Instruction]:
        return self.did(self.machine.fin_seen(id, path, exchange, self.now))

    def opened(self, path: int, exchange: str, id: int = P, replayed: bool = False) -> list[Instruction]:
        opening = PathOpening("left", path > 1 and not replayed)
        return self.did(self.machine.open_seen(id, path, exchange, opening, self.now))

    def move(self, target: str, id: int = P) -> list[Instruction]:
        return self.did(self.machine.move([(id, target)], "move", self.now))

    def drain(self, id: str) -> list[Instruction]:
        return self.did(self.machine.drain(id, "drain", self.now))

    def tick(self, seconds: float, *alive: str) -> list[Instruction]:
        self.now += seconds
        for id in alive:
            self.exchange(id, self.machine.exchanges[id].address.incarnation)
        return self.did(self.machine.tick(self.now))

    def state(self, id: str) -> ExchangeState:
        return self.machine.exchanges[id].state

    def place(self, id: int = P) -> tuple[int, str, str]:
        one = self.machine.publishers[id]
        return one.path, one.exchange, one.target


def notices(instructions: list[Instruction], kind: type[Any]) -> list[Any]:
    return [one.notice for one in instructions if isinstance(one, Notify) and isinstance(one.notice, kind)]


def replies(instructions: list[Instruction]) -> list[Any]:
    return [one.reply for one in instructions if isinstance(one, AnswerDue)]


def taken_over(
    *exchanges: str, expected: dict[int, float] | None = None, former: FormerExchanges | None = None, sought: bool = False
) -> Queue:
    queue = Queue()
    queue.machine = Membership(3, USE, Takeover(queue.now, expected, former, sought))
    for id in exchanges:
        queue.exchange(id)
    return queue

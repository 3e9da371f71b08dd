"""The Monitor's Membership for its scenarios: commands are named after the messages that come in, and there is a clock.

Exchange `A` is its first life, `A/2` its second. A publisher's report is answered with Heard: shown only if that says more.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from roq.pubsub.monitor.membership import Membership
from roq.pubsub.monitor.records import Instruction, Notify
from roq.pubsub.monitor.takeover import FormerExchanges, Takeover
from roq.wire import monitor as wire
from roq.wire.assignment import FormerProcess, Overflow
from roq.wire.frame import PathOpening
from roq.wire.process import Named

USE = wire.PublisherWelcome(1, 0, wire.ExchangeAddress("", "", 0, 0), Overflow.DROP, 4096)


def address(exchange: str) -> wire.ExchangeAddress:
    """`A` or `A/2`."""
    id, _, life = exchange.partition("/")
    return wire.ExchangeAddress(id, "127.0.0.1", 1, 2, int(life or 1))


class Machine:
    """A queue whose first Monitor has just started."""

    def __init__(self) -> None:
        self._members = Membership(1, USE)
        self._now = 100.0

    def check(self) -> None:
        """The machine's own invariants."""
        self._members.check()

    def take_over(self, term: int, named: str = "", lost: str = "") -> None:
        """Another Monitor, under this term. named: subscribers it expects; lost: an Exchange of a lost host, which may live."""
        named_ones = {int(one): self._now for one in named.split(",")} if named else None
        lives = [FormerProcess(f"exchange/q/{lost}", "hx", lost, lease_seconds=12.0)] if lost else []
        use, left = msgspec.structs.replace(USE, term=term), FormerExchanges(lives, self._now)
        self._members = Membership(term, use, Takeover(self._now, named_ones, left))

    def exchange_report(self, exchange: str, frames_in: int = 0) -> list[Instruction]:
        """Once a second from every Exchange."""
        totals = (frames_in, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0)
        return self._members.exchange_report(wire.ExchangeReport(address(exchange), "h", *totals), self._now)

    def exchange_attached(self, exchange: str) -> list[Instruction]:
        """The Exchange has told the Monitor itself that it is attached."""
        return self._members.exchange_heard(address(exchange).token, self._now)

    def join_publisher(self, id: int, path: int = 0, exchange: str = "") -> list[wire.PublisherWelcome]:
        """path, exchange: where a publisher is that knows the queue already."""
        token = address(exchange).token if exchange else ""
        request = wire.JoinPublisher(id, path, address(exchange).id, token, wire.PROTOCOL)
        return [self._members.join_publisher(request, b"publisher %d" % id, self._now)]

    def publisher_report(self, id: int, path: int, exchange: str = "", leaving: int = 0, lost: str = "") -> list[Instruction]:
        """leaving: paths whose FIN is under way; lost: the Exchange whose link broke."""
        report = wire.PublisherReport(id, path, exchange, address(lost).token if lost else "", leaving, 0, 0, 0, 0.0)
        out = self._members.publisher_report(report, b"publisher %d" % id, self._now)
        return [
            one
            for one in out
            if one != Notify(b"publisher %d" % id, wire.Heard(self._members.term, True, protocol=wire.PROTOCOL))
        ]

    def join_subscriber(self, id: int, returning: str = "no") -> list[wire.SubscriberWelcome]:
        """returning: an earlier Monitor had told it that it is ready."""
        request = wire.JoinSubscriber(id, (">",), returning == "yes", wire.PROTOCOL)
        return [self._members.join_subscriber(request, b"subscriber %d" % id, self._now)]

    def subscriber_report(self, id: int, *proved: str) -> list[Instruction]:
        """proved: the Exchanges that have told it that it is attached."""
        tokens = tuple(address(exchange).token for exchange in proved)
        report = wire.SubscriberReport(id, self._members.version, tokens, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        return self._members.subscriber_report(report, b"subscriber %d" % id, self._now)

    def fin_seen(self, id: int, path: int, exchange: str) -> list[Instruction]:
        """A publisher's FIN came out of an Exchange."""
        return self._members.fin_seen(id, path, exchange, self._now)

    def open_seen(self, id: int, path: int, exchange: str, fin: str = "yes") -> list[Instruction]:
        """A publisher's OPEN came out of an Exchange. fin: whether its path before was ended with FIN."""
        opening = PathOpening("?" if path > 1 else "", fin == "yes" and path > 1)
        return self._members.open_seen(id, path, exchange, opening, self._now)

    def move(self, id: int, exchange: str) -> list[Instruction]:
        """Of the ScalingProcess or `roq`."""
        return self._members.move([(id, exchange)], "move", self._now)

    def drain(self, exchange: str) -> list[Instruction]:
        """Likewise."""
        return self._members.drain(exchange, "drain", self._now)

    def leave(self, id: int) -> list[Instruction]:
        """A member says good-bye."""
        return self._members.leave(id, self._now)

    def fenced_monitor_names(self, *subscribers: int) -> None:
        """The Monitor before was fenced, and knew these."""
        self._members.takeover.expect(Named(dict.fromkeys(subscribers, 0.0), True), self._now)

    def later(self, seconds: float) -> None:
        """Time passes."""
        self._now += seconds

    def tick(self) -> list[Instruction]:
        """Once a second."""
        return self._members.tick(self._now)

    def state(self) -> Iterator[str]:
        """Exchanges, publishers, subscribers."""
        for id, exchange in self._members.exchanges.items():
            yield f"Exchange {id}: {exchange.state}"
        for number, publisher in self._members.publishers.items():
            target = f", to {publisher.target}" if publisher.target else ""
            lost = f", lost {publisher.lost}" if publisher.lost else ""
            yield f"publisher {number}: path {publisher.path} on {publisher.exchange}{target}{lost}"
        for number, subscriber in self._members.subscribers.items():
            attached = ", ".join(sorted(subscriber.attached)) or "nothing"
            yield f"subscriber {number}: proved {attached}{', ready' if subscriber.ready else ''}"

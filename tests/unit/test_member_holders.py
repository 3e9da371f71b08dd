"""Who may speak for a member of a secured queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from roq.errors import AccessDenied
from roq.pubsub.monitor import holders
from roq.pubsub.monitor.holders import MemberHolders
from roq.runtime.security import Security
from roq.tools.authority import Authority
from roq.wire import monitor
from roq.wire.card import Card, CardRole

QUEUE = "orders"


def reports(id: int) -> list[Any]:
    """What is said of a member without a proof."""
    return [
        monitor.Leave(id),
        monitor.PublisherReport(id, 1, "e", "", 0, 0, 0, 0, 0.0),
        monitor.SubscriberReport(id, 0, (), 0, 0, 0, 0, 0.0, 0.0, 0.0),
    ]


class Queue:
    """What its Monitor knows, and cards of several."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.init(folder / "authority.json")
        self.host = self.security("host-1", CardRole.HOST)
        self.known = MemberHolders(QUEUE, self.host)
        self.alice, self.bob = self.security("alice"), self.security("bob")

    def security(self, name: str, role: CardRole = CardRole.CLIENT) -> Security:
        return Security(self.authority.issue(name, role))

    def joins(self, of: Security) -> list[Any]:
        """Two, of a publisher and of a subscriber, that this card proves."""
        one, other = of.draw_member_id(), of.draw_member_id()
        return [monitor.JoinPublisher(one.id, proof=one.proof), monitor.JoinSubscriber(other.id, (), proof=other.proof)]

    def produces(self, of: Card, id: int = 7) -> monitor.JoinPublisher:
        return monitor.JoinPublisher(id, above=1, proof=self.host.seal_grant(QUEUE, id, of))


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(tmp_path)


def test_nobody_else_speaks_for_a_member(queue: Queue) -> None:
    known = queue.known
    for join in queue.joins(queue.alice):
        known.check(queue.alice.card, join)
        (id, *_) = msgspec.structs.astuple(join)
        for report in reports(id):
            with pytest.raises(AccessDenied, match=f"member {id:x} of the queue joined with another card than that of bob"):
                known.check(queue.bob.card, report)
        with pytest.raises(AccessDenied, match=f"bob did not prove that the id {id:x} is its own"):
            known.check(queue.bob.card, join)
        for own in (join, *reports(id)):
            known.check(queue.alice.card, own)
        known.check(queue.security("alice").card, monitor.Leave(id))  # a renewed card of the same name
    known.check(queue.bob.card, monitor.Describe())


def test_a_monitor_that_began_anew_takes_no_first_comer_for_another(queue: Queue) -> None:
    for join in queue.joins(queue.alice):
        with pytest.raises(AccessDenied, match="did not prove"):
            queue.known.check(queue.bob.card, join)
        with pytest.raises(AccessDenied, match="did not prove"):
            queue.known.check(queue.alice.card, msgspec.structs.replace(join, proof=b""))
        queue.known.check(queue.alice.card, join)


def test_a_host_is_trusted_and_a_client_does_not_speak_for_what_is_its(queue: Queue) -> None:
    known, other = queue.known, queue.security("host-2", CardRole.HOST)
    known.check(queue.host.card, monitor.JoinPublisher(7))
    with pytest.raises(AccessDenied):
        known.check(queue.alice.card, monitor.JoinPublisher(7))
    for report in reports(7):
        known.check(other.card, report)
        with pytest.raises(AccessDenied):
            known.check(queue.alice.card, report)


def test_what_is_said_of_a_member_that_has_not_joined_again_shuts_nobody_out(queue: Queue) -> None:
    join, _ = queue.joins(queue.alice)
    for report in reports(join.publisher):
        queue.known.check(queue.bob.card, report)
    queue.known.check(queue.alice.card, join)


def test_a_named_producer_goes_on_with_another_card_and_the_one_before_is_out(queue: Queue) -> None:
    known, first = queue.known, queue.produces(queue.alice.card)
    known.check(queue.alice.card, first)
    with pytest.raises(AccessDenied):
        known.check(queue.bob.card, first)
    known.check(queue.bob.card, queue.produces(queue.bob.card))
    for report in reports(7):
        known.check(queue.bob.card, report)
        with pytest.raises(AccessDenied):
            known.check(queue.alice.card, report)


def test_who_is_gone_is_forgotten(queue: Queue) -> None:
    known, card = queue.known, queue.host.card
    for member in range(holders.SPARE + 3):
        known.check(card, monitor.JoinPublisher(member))
    known.keep({0, 1}, 2)
    assert len(known) == holders.SPARE + 3, "not yet"
    known.check(card, monitor.JoinPublisher(1 << 40))
    known.check(card, monitor.JoinPublisher(1 << 41))
    known.keep({0, 1}, 2)
    assert len(known) == 2

"""Who may speak for a member of a secured queue."""

from __future__ import annotations

from typing import Any

import pytest

from roq.errors import AccessDenied
from roq.pubsub.monitor import holders
from roq.pubsub.monitor.holders import MemberHolders
from roq.wire import monitor
from roq.wire.card import Card, CardRole


def card(name: str, role: CardRole = CardRole.CLIENT) -> Card:
    return Card("id of " + name, name, role, b"k" * 32, (), 0.0, 2e9)


ALICE, BOB, HOST = card("alice"), card("bob"), card("host-1", CardRole.HOST)
REPORT = monitor.PublisherReport(7, 1, "e", "", 0, 0, 0, 0, 0.0)
OTHERS: list[Any] = [
    monitor.Leave(7),
    REPORT,
    monitor.JoinPublisher(7),
    monitor.JoinSubscriber(7, ()),
    monitor.SubscriberReport(7, 0, (), 0, 0, 0, 0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize("join", [monitor.JoinPublisher(7), monitor.JoinSubscriber(7, ())])
@pytest.mark.parametrize("request_of_another", OTHERS)
def test_nobody_else_speaks_for_a_member(join: Any, request_of_another: Any) -> None:
    known = MemberHolders()
    known.check(ALICE, join)
    with pytest.raises(AccessDenied, match="member 7 of the queue joined with another card than that of bob"):
        known.check(BOB, request_of_another)
    known.check(ALICE, request_of_another)
    known.check(card("alice"), monitor.Leave(7))  # a renewed card of the same name
    known.check(BOB, monitor.Describe())


def test_a_host_is_trusted_and_a_client_does_not_speak_for_what_is_its() -> None:
    known = MemberHolders()
    known.check(HOST, monitor.JoinPublisher(7))
    with pytest.raises(AccessDenied):
        known.check(ALICE, monitor.Leave(7))
    known.check(card("host-2", CardRole.HOST), REPORT)
    known.check(ALICE, monitor.JoinPublisher(8))
    known.check(HOST, monitor.JoinPublisher(8))
    with pytest.raises(AccessDenied):
        known.check(ALICE, monitor.Leave(8))


def test_only_who_joins_is_the_holder() -> None:
    """After a Monitor's restart: what is said of a member that has not joined again shuts nobody out."""
    known = MemberHolders()
    for request in (monitor.Leave(7), REPORT, monitor.SubscriberReport(7, 0, (), 0, 0, 0, 0, 0.0, 0.0, 0.0)):
        known.check(BOB, request)
    known.check(ALICE, monitor.JoinPublisher(7))
    with pytest.raises(AccessDenied):
        known.check(BOB, monitor.JoinPublisher(7, above=1))  # she is no named producer


def test_a_named_producer_goes_on_with_another_card_and_the_one_before_is_out() -> None:
    known = MemberHolders()
    known.check(ALICE, monitor.JoinPublisher(7, above=1))
    known.check(BOB, monitor.JoinPublisher(7, above=2))
    known.check(BOB, REPORT)
    with pytest.raises(AccessDenied):
        known.check(ALICE, REPORT)


def test_who_is_gone_is_forgotten() -> None:
    known = MemberHolders()
    for member in range(holders.SPARE + 3):
        known.check(ALICE, monitor.JoinPublisher(member))
    known.keep({0, 1}, 2)
    assert len(known) == holders.SPARE + 3, "not yet"
    known.check(ALICE, monitor.JoinPublisher(1 << 40))
    known.check(ALICE, monitor.JoinPublisher(1 << 41))
    known.keep({0, 1}, 2)
    assert len(known) == 2
    known.check(BOB, monitor.JoinPublisher(5))

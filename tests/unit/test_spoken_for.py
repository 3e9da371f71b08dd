"""Who may speak for a member of a secured queue: what the Monitor looks at, whoever it knows already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from roq.errors import AccessDenied
from roq.runtime.security import Security
from roq.tools.authority import Authority
from roq.wire import monitor
from roq.wire.card import CardRole
from roq.wire.member_id import MemberId

QUEUE = "orders"


def said_of(member: MemberId) -> list[Any]:
    """All that a member says of itself."""
    id, proof = member
    return [
        monitor.JoinPublisher(id, proof=proof),
        monitor.JoinSubscriber(id, (), proof=proof),
        monitor.PublisherReport(id, 1, "e", "", 0, 0, 0, 0, 0.0, proof=proof),
        monitor.SubscriberReport(id, 0, (), 0, 0, 0, 0, 0.0, 0.0, 0.0, proof=proof),
        monitor.Leave(id, proof),
    ]


class Cards:
    """Of several, and how a host of theirs looks at what one says."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.init(folder / "authority.json")
        self.host = self.security("host-1", CardRole.HOST)
        self.alice, self.bob = self.security("alice"), self.security("bob")

    def security(self, name: str, role: CardRole = CardRole.CLIENT) -> Security:
        return Security(self.authority.issue(name, role))

    def check(self, of: Security, said: Any) -> None:
        member = monitor.spoken_for(said)
        assert member is not None
        self.host.check_member(of.card, QUEUE, member)


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    return Cards(tmp_path)


def test_everything_that_members_say_names_them() -> None:
    """A new kind of message about a member has to be in `spoken_for`."""
    kinds = {kind for kind in vars(monitor).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    fields = {kind: set(kind.__struct_fields__) for kind in kinds}
    about = {kind for kind, names in fields.items() if names & {"proof"}}
    assert about == {type(said) for said in said_of(MemberId(7, b"p"))}
    assert {kind for kind, names in fields.items() if {"publisher", "subscriber"} & names} - about == {
        monitor.FencePublisher,  # said by the Monitor
        monitor.PathsFenced,  # by Exchanges, whose host's card counts
        monitor.ResponderView,  # part of an answer
    }
    assert monitor.spoken_for(monitor.Describe()) is None


def test_nobody_else_speaks_for_a_member(cards: Cards) -> None:
    drawn = cards.alice.draw_member_id()
    granted = MemberId(7, cards.host.seal_grant(QUEUE, 7, cards.alice.card))
    for said in said_of(drawn) + said_of(granted):
        cards.check(cards.alice, said)
        cards.check(cards.security("alice"), said)  # a renewed card of the same name
        with pytest.raises(AccessDenied, match="bob did not prove that the id"):
            cards.check(cards.bob, said)
        with pytest.raises(AccessDenied, match="alice did not prove that the id"):
            cards.check(cards.alice, msgspec.structs.replace(said, proof=b""))


def test_a_host_is_trusted_and_a_client_does_not_speak_for_what_is_its(cards: Cards) -> None:
    for said in said_of(cards.host.draw_member_id()) + said_of(MemberId(7)):
        cards.check(cards.host, said)
        cards.check(cards.security("host-2", CardRole.HOST), said)
        with pytest.raises(AccessDenied):
            cards.check(cards.alice, said)


def test_a_named_producer_goes_on_with_another_card(cards: Cards) -> None:
    for holder in (cards.alice, cards.bob):
        cards.check(holder, monitor.JoinPublisher(7, above=1, proof=cards.host.seal_grant(QUEUE, 7, holder.card)))


def test_grants_are_taken_while_keys_rotate(tmp_path: Path) -> None:
    """By who is one rotation behind, too: a GCM seals with the key that everybody knows."""
    cards = Cards(tmp_path)
    for _ in range(3):
        behind = cards.host
        cards.authority.rotate()
        cards.host = cards.security("host-1", CardRole.HOST)
        granted = MemberId(7, cards.host.seal_grant(QUEUE, 7, cards.alice.card))
        for server in (behind, cards.host):
            server.check_member(cards.alice.card, QUEUE, granted)
        before = MemberId(7, behind.seal_grant(QUEUE, 7, cards.alice.card))
        cards.host.check_member(cards.alice.card, QUEUE, before)

"""Whose card a publisher or subscriber of a secured queue joined with: nobody else may leave, report or join again in its name.
Their ids can be read off messages, so who joins proves that its id is its own (roq/wire/member_id.py).

A named producer may go on with another program's card, to which the GCM has granted it. Known is who joined since this Monitor
began. Not covered: what is sent to Exchanges, which ask for the same proof.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from roq.errors import AccessDenied
from roq.runtime.security import Security
from roq.wire import monitor
from roq.wire.card import Card, CardRole
from roq.wire.member_id import MemberId

SPARE = 1_000  # ids of those who are gone, before they are looked through


class MemberHolders:
    """By member's id: the name on the card; "" for hosts and GCMs, which are trusted with each other's. security: of this
    process; without one nobody has a card, and nothing is checked."""

    def __init__(self, queue: str, security: Security | None) -> None:
        self._queue, self._security = queue, security
        self._holders: dict[int, str] = {}

    def check(self, card: Card, request: Any) -> None:
        """Raises AccessDenied."""
        name = "" if card.role is not CardRole.CLIENT else card.name
        match request:
            case monitor.JoinPublisher(id) | monitor.JoinSubscriber(id):
                if self._security is not None:
                    self._security.check_member(card, self._queue, MemberId(id, request.proof))
                self._holders[id] = name
            case monitor.PublisherReport(id) | monitor.SubscriberReport(id) | monitor.Leave(id):
                if name and self._holders.get(id, name) != name:
                    raise AccessDenied(f"member {id:x} of the queue joined with another card than that of {name}")

    def keep(self, members: Container[int], count: int) -> None:
        """Forget those who are none of the queue's `count` members, now and then."""
        if len(self._holders) > 2 * count + SPARE:
            self._holders = {member: holder for member, holder in self._holders.items() if member in members}

    def __len__(self) -> int:
        return len(self._holders)

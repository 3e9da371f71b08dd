"""Whose card a publisher or subscriber of a secured queue joined with: nobody else may leave, report or join again in its name.
Their ids can be read off messages, so they prove nothing. Pure.

Known is who joined since this Monitor began: of a member that has not joined again yet, whoever does first is the holder. Not
covered: named producers, which may go on with another program's card, and what is sent to Exchanges (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from roq.errors import AccessDenied
from roq.wire import monitor
from roq.wire.card import Card, CardRole

SPARE = 1_000  # ids of those who are gone, before they are looked through


class MemberHolder(NamedTuple):
    """name: on the card; "" for hosts and GCMs, which are trusted with each other's. producer: it may go on elsewhere."""

    name: str
    producer: bool


class MemberHolders:
    """By member's id."""

    def __init__(self) -> None:
        self._holders: dict[int, MemberHolder] = {}

    def check(self, card: Card, request: Any) -> None:
        """Raises AccessDenied."""
        name = "" if card.role is not CardRole.CLIENT else card.name
        match request:
            case monitor.JoinPublisher(member, above=above):
                joining: MemberHolder | None = MemberHolder(name, above > 0)
            case monitor.JoinSubscriber(member):
                joining = MemberHolder(name, producer=False)
            case monitor.PublisherReport(member) | monitor.SubscriberReport(member) | monitor.Leave(member):
                joining = None
            case _:
                return
        holder = self._holders.get(member)
        if holder is not None and name and holder.name != name:
            goes_on = joining is not None and joining.producer and holder.producer
            if not goes_on:
                raise AccessDenied(f"member {member:x} of the queue joined with another card than that of {name}")
        if joining is not None:
            self._holders[member] = joining

    def keep(self, members: Container[int], count: int) -> None:
        """Forget those who are none of the queue's `count` members, now and then."""
        if len(self._holders) > 2 * count + SPARE:
            self._holders = {member: holder for member, holder in self._holders.items() if member in members}

    def __len__(self) -> int:
        return len(self._holders)

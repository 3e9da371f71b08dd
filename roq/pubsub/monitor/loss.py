"""What follows when an Exchange dies, or a publisher's link to it: whose messages have to be replayed, and where. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from roq.pubsub.monitor.records import Exchange, ExchangeState, PublisherRecord, SubscriberRecord
from roq.wire.monitor import ExchangeAddress, JoinPublisher

LINK_SECONDS = 0.5  # an Exchange that reports so long after a link to it broke is alive


def lose(publishers: Collection[PublisherRecord], address: ExchangeAddress, now: float) -> None:
    """This life of an Exchange is over: whoever was on it has to replay, whoever was on the way to it is not any more."""
    for publisher in publishers:
        publisher.offered.pop(address.id, None)
        if publisher.target == address.id:
            publisher.target, publisher.relocated = "", False
        if publisher.exchange == address.id:
            publisher.lose(address.token, publisher.path, now)


def all_back(
    expected: frozenset[int] | None, subscribers: Mapping[int, SubscriberRecord], exchange: Exchange, request: JoinPublisher
) -> bool:
    """Whether this publisher may replay on this Exchange although the Monitor has just been activated: its link is lost, as it
    knows itself, and every subscriber that is expected hears what comes through the Exchange."""
    if request.exchange or expected is None:
        return False
    return all(id in subscribers and exchange.address.token in subscribers[id].attached for id in expected)


def missed(publishers: Collection[PublisherRecord], exchange: Exchange) -> bool:
    """Whether a publisher has yet to replay what was lost with this Exchange."""
    return any(publisher.lost == exchange.address.token for publisher in publishers)


def replacement(exchanges: Collection[Exchange], publisher: PublisherRecord, load: Callable[[str], int]) -> str:
    """Where a publisher shall go whose Exchange was lost, "" while there is nothing: the same one first, in its new life or if
    it has shown since that only the link had broken; else the one with the least load."""

    def usable(one: Exchange) -> bool:
        alive = one.last_report - publisher.lost_at > LINK_SECONDS
        return one.state is ExchangeState.ACTIVE and (one.address.token != publisher.lost or alive)

    found = [one for one in exchanges if usable(one)]
    if not found:
        return ""
    return min(found, key=lambda one: (one.address.id != publisher.exchange, load(one.address.id), one.address.id)).address.id

"""When an order of the scaling process, or of people, is carried out, and what is answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from roq.errors import DeadlineExceeded, RoqError
from roq.pubsub.monitor.records import Exchange, ExchangeState, PendingRequest, PublisherRecord
from roq.wire import monitor as wire

# Longer than whoever asks waits; without a bound of our own, requests whose asker is gone would use up the places for requests.
MOVE_ANSWER_SECONDS = 40.0
DRAIN_ANSWER_SECONDS = 90.0
ACTIVE_ANSWER_SECONDS = 20.0


def answer(
    waiting: PendingRequest, exchanges: Mapping[str, Exchange], publishers: Mapping[int, PublisherRecord], now: float
) -> msgspec.Struct | RoqError | None:
    """What to tell whoever gave this order, None while it is not carried out and its time is not over."""
    reply = _outcome(waiting, exchanges, publishers)
    if reply is None and now >= waiting.deadline:
        known = exchanges.get(waiting.subject)
        state = (
            f"Exchange {waiting.subject!r} is {known.state if known else 'not known'}" if waiting.subject else "not all moved"
        )
        return DeadlineExceeded(f"{waiting.kind} was not done in time: {state}")
    return reply


def _outcome(
    waiting: PendingRequest, exchanges: Mapping[str, Exchange], publishers: Mapping[int, PublisherRecord]
) -> msgspec.Struct | RoqError | None:
    if waiting.kind == "move":
        members = [(id, target, publishers.get(id)) for id, target in sorted(waiting.moves)]
        if any(publisher is not None and publisher.target for _, _, publisher in members):
            return None
        failed = [(id, target) for id, target, publisher in members if publisher is None or publisher.exchange != target]
        refused = tuple(f"{id:016x} to {target}: it did not move in time or left" for id, target in failed)
        return wire.Moved(len(members) - len(failed), waiting.refused + refused)
    exchange = exchanges.get(waiting.subject)
    if waiting.kind == "active":
        return wire.Recorded() if exchange is not None and exchange.state is ExchangeState.ACTIVE else None
    if exchange is None or exchange.state is ExchangeState.DRAINED:
        return wire.Drained()
    return None

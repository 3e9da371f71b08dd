"""Bugs that durable subscribers would have without one of their rules, as far as a few seeds show them."""

from __future__ import annotations

from functools import partial

import msgspec

import gcm.durables
from gcm.durables import DurableRecord, keep_in
from roq.pubsub.durable import DurableSubscriber
from roq.pubsub.inbox import Reached
from roq.tools.simulation.run import What
from roq.wire.durables import KeepPosition
from roq.wire.recording import TapePosition
from tests.simulation.known_bugs import Known, put


def _what_came(subscriber: DurableSubscriber) -> TapePosition | None:
    """The application need not have taken it."""
    position = subscriber.position
    if position is not None:
        for item in subscriber._buffer:
            if isinstance(item, Reached):
                position.done.update(item.entries)
    return position


def _kept_for_all(before: DurableRecord | None, request: KeepPosition, now: float) -> DurableRecord:
    if before is not None:
        request = msgspec.structs.replace(request, holder=before.holder, number=before.number + 1)
    return keep_in(before, request, now)


BUGS: dict[str, Known] = {
    "what a durable subscriber has not handed out counts as taken": Known(
        partial(put, (DurableSubscriber, "_place", _what_came)), 0, What.DURABLES, cheap=True
    ),
    "a durable name is kept for whoever had it": Known(
        partial(put, (gcm.durables, "keep_in", _kept_for_all)), 0, What.DURABLES
    ),
}

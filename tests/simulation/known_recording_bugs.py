"""Bugs of recorded queues that RoQ once had, or that its models switch on, put back one at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from roq.pubsub import handover, order
from roq.pubsub.exchange import recorder, topic_index
from roq.pubsub.subscriber import Subscriber
from roq.tools.simulation.run import What
from tests.simulation.known_bugs import Known, put, rule


def _stored_at_once(one: recorder.Recorder, told: recorder.Told) -> None:
    one.where(told)


def _nothing_amid(one: order.OrderMachine, publisher: order.KnownPublisher, opening: Any, first: order.FrameEvent) -> None:
    """What lies between what came first of a publisher and its next path is missing, as for one that reads everything."""


def _never_held(one: handover.Handover, attachment: Any) -> bool:
    """What an Exchange sends is not held back until its tape was read up to there."""
    one.waiting.pop(attachment, None)
    return False


BUGS: dict[str, Known] = {
    "messages count as stored before they are": Known(
        partial(put, (recorder.Recorder, "when_stored", _stored_at_once)), 3, What.RECORDED, cheap=True
    ),
    "a path does not wait for the tape of the one before": Known(rule(order.OrderMachine, "await_tapes"), 2, What.RECORDED),
    "a reader that begins at a position misses what was before it": Known(
        partial(put, (order.OrderMachine, "_begin_amid", _nothing_amid)), 4, What.RECORDED
    ),
    "who reads to the end leaves a tape that others wait for": Known(
        partial(put, (Subscriber, "awaits", lambda reader, exchange: False)), 4402, What.RECORDED
    ),
    "an index leaves out where topics are": Known(
        partial(put, (topic_index, "group_of", lambda position: 0)), 4, What.RECORDED
    ),
    "the present overtakes the past": Known(partial(put, (handover.Handover, "holds", _never_held)), 2, What.RECORDED),
}

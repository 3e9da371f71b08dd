"""Bugs that producers would have without one of their rules, as far as a few seeds show them (tests/model has the others)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from roq.coordination.locate import GcmClient
from roq.pubsub import producer
from roq.pubsub.producer_tail import ProducerTail
from roq.tools.simulation.run import What
from roq.wire.producers import ProducerGrant
from tests.simulation.known_bugs import Known, put


async def _nothing_read(client: GcmClient, queue: str, grant: ProducerGrant, moved: Callable[[], None]) -> ProducerTail:
    return ProducerTail(grant.number, {})


BUGS: dict[str, Known] = {
    "a life does not look at what the one before has stored": Known(
        partial(put, (producer, "read_tail", _nothing_read)), 0, What.PRODUCERS, cheap=True
    ),
}

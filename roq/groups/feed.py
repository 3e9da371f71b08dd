"""The feed of a group, in the process of its master: what is stored on the tapes of a recorded queue comes into its work queue.

    tapes ──► subscriber, which joins nothing ──► intake: fold and log ──► leases
                       ▲                              │
                       └──── position, after a take-over

It reads as a subscriber does that begins in the past, so paths, moves and repeats are put right by the same order machine; but
only what is stored, and only from the stores: a group that stands still holds nobody back. Where it is, is kept in the group's
log behind what was fed, so the next master goes on there and the publishers' numbers drop what comes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Protocol

from roq.coordination.locate import GcmClient
from roq.errors import InvalidHeaders, MessagesLost, NotRecorded, ProcessFailed, QueueNotFound, RoqError
from roq.pubsub.start import EARLIEST, Start
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import Message
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.run import Tasks
from roq.wire.headers import join_headers
from roq.wire.recording import TapePosition
from roq.wire.work_queue import GroupOrder, GroupSource
from roq.workqueue.records import FeedMessage

KEEP_SECONDS = 0.2  # between two positions that are kept
PAUSE_SECONDS = 0.1, 5.0  # between two tries, the first and the longest
FEED_COUNT = 1_000  # messages fed at once

log = logger(__name__)


class Intake(Protocol):
    """Where messages go: the master's GroupIntake."""

    waiting_since: int | None

    @property
    def position(self) -> dict[str, int] | None:
        """See GroupIntake, as all of these."""

    def now(self) -> int:
        """ms."""

    async def take(self, messages: Sequence[FeedMessage]) -> None:
        """As soon as there is room."""

    def reached(self, done: dict[str, int]) -> None:
        """All that was taken lies up to here."""


async def feed(zookeeper: str, source: GroupSource, intake: Intake) -> None:
    """Until cancelled. What can't be read now is tried again, and told in the log; what is in the group is served meanwhile."""
    client, fields = GcmClient(zookeeper), {"queue": source.queue}
    pauses = delays(*PAUSE_SECONDS)
    try:
        while True:
            before = intake.position
            try:
                await _read(client, source, intake)
            except (NotRecorded, QueueNotFound) as error:
                log.info("the group's queue is not there: %s", error, extra={"fields": fields})
            except RoqError as error:
                log.warning("the group can't be fed now, trying again: %s", error, extra={"fields": fields})
            except Exception:  # a defect must not end the master, whose members have leases
                log.exception("defect while a group was fed, trying again", extra={"fields": fields})
            intake.waiting_since = intake.waiting_since or intake.now()
            if intake.position != before:
                pauses = delays(*PAUSE_SECONDS)
            await asyncio.sleep(next(pauses))
    finally:
        client.close()


def begin(source: GroupSource, position: dict[str, int] | None) -> Start:
    """Where to read on. position: up to which the group was fed, None for a new one. Raises InvalidPosition, ValueError."""
    if position is not None:
        return TapePosition(source.tapes, position)
    if source.start == EARLIEST:
        return EARLIEST
    if source.start.startswith("p1."):
        return TapePosition.parse(source.start)
    return datetime.fromisoformat(source.start)


def _lost(lost: MessagesLost) -> None:
    log.warning("messages do not come into the group: %s", lost)


async def _read(client: GcmClient, source: GroupSource, intake: Intake) -> None:
    start = begin(source, intake.position)
    subscriber = Subscriber(client, source.queue, source.topics, _lost, start, "stored", where=source.where)
    keeper = Tasks(lambda error: subscriber.fail(ProcessFailed(f"the feed failed: {error}")))
    async with subscriber:
        if (found := subscriber.position) is None or found.tapes != source.tapes:
            raise NotRecorded(f"queue {source.queue!r} was created anew: this group belongs to the one before")
        intake.reached(found.done)  # where it begins, in any case
        keeper.start(_keep(subscriber, intake), "feed position")
        try:
            await _feed(subscriber, source.order is GroupOrder.TOPIC, intake)
        finally:
            await keeper.stop()


async def _feed(subscriber: Subscriber, ordered: bool, intake: Intake) -> None:
    async for batch in subscriber.batches():
        for begin in range(0, len(batch), FEED_COUNT):
            await intake.take(list(_records(batch[begin : begin + FEED_COUNT], ordered, intake.now())))


async def _keep(subscriber: Subscriber, intake: Intake) -> None:
    """A position counts what was taken before the batch in progress, all of which is in the intake by now."""
    while True:
        await asyncio.sleep(KEEP_SECONDS)
        if (position := subscriber.position) is not None:
            intake.reached(position.done)
        now = intake.now()
        behind = subscriber.behind_ms(now)
        intake.waiting_since = now - behind if behind else 0


def _records(messages: Sequence[Message], ordered: bool, now: int) -> Iterator[FeedMessage]:
    """A message that no task can be is left out, and told in the log."""
    for message in messages:
        try:
            payload = join_headers(message.payload, message.headers)
        except InvalidHeaders as error:
            who = f"message {message.sequence} of publisher {message.publisher:016x} on {message.topic!r}"
            log.error("%s does not come into the group: %s", who, error)
            continue
        published = message.timestamp // 1_000_000
        yield FeedMessage(now, message.publisher, message.sequence, payload, message.topic, published, ordered)

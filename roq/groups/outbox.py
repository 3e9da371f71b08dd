"""The forwarder of transactions, in the process of a master: what they publish goes from its outbox to recorded queues.

    outbox ──► named producer ──► tapes
      ▲                             │
      └───────── OutboxForwarded ─────────┘ stored

Every message is on the tapes once, whatever dies: only what is durable leaves, each queue's in one order, and the producer's
last number says how many of them are there. A master that was replaced and does not know it can't publish: it opens the
producer, which ends whoever had it, and shows then that the log is still its own; who owns the log later opens the producer
later.

A queue whose messages can't leave, because it is stopped, or its stores are away, or it is not recorded just now, holds up no
other; its messages wait in the outbox, and new transactions to it are refused when they are too many. Those to a queue that
has not been there for GONE_SECONDS are given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from roq.coordination.locate import GcmClient
from roq.errors import (
    InvalidHeaders,
    InvalidTopic,
    NotReady,
    NotRecorded,
    PayloadTooLarge,
    QueueNotFound,
    QueueStopped,
    RoqError,
)
from roq.pubsub.named_publisher import NamedPublisher
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.run import Tasks
from roq.wire import gcm
from roq.wire.headers import split_headers

PAUSE_SECONDS = 0.1, 5.0  # between two tries, the first and the longest
IDLE_SECONDS = 60.0  # a publisher that has had nothing to do for so long is closed
GONE_SECONDS = 30.0  # a queue that was not there for so long, whenever it was looked for, was removed
WARN_SECONDS = 60.0
MESSAGES_AT_ONCE = 1_000  # published before the next confirmation
REFUSED = InvalidTopic, PayloadTooLarge, InvalidHeaders  # no queue takes this message ever

log = logger(__name__)


class OutgoingSource(Protocol):
    """What is to be forwarded: the master's OutgoingOutbox, which says more of each of these."""

    producer: str

    async def changed(self) -> None:
        """There is more."""

    def queues(self) -> list[str]:
        """To which there is something to be forwarded."""

    def waiting(self, queue: str) -> int:
        """Messages to be forwarded to this one."""

    def first(self, queue: str, count: int) -> list[tuple[str, bytes]]:
        """The first of them: topic, payload behind its headers."""

    async def prove(self) -> None:
        """This master's log is its own."""

    async def attach(self, queue: str, tapes: str, stored: int) -> None:
        """The producer's last number."""

    def sent(self, queue: str, count: int) -> None:
        """So many more are on the tapes."""

    async def give_up(self, queue: str) -> None:
        """The first can't be published."""

    def idle(self, queue: str) -> None:
        """Nothing was to be done for a while."""

    def gone(self, queue: str) -> int:
        """The queue was removed."""


async def forward(zookeeper: str, outbox: OutgoingSource) -> None:
    """Until cancelled."""
    running: dict[str, asyncio.Event] = {}  # by queue: set when there is more
    tasks, clients = Tasks(lambda error: None), contextlib.ExitStack()
    client: GcmClient | None = None  # most masters never commit a transaction

    async def one(client: GcmClient, queue: str) -> None:
        try:
            await _forward(client, queue, outbox, running[queue])
        finally:
            del running[queue]

    try:
        while True:
            for queue in outbox.queues():
                if client is None:
                    client = GcmClient(zookeeper)
                    clients.callback(client.close)
                if queue not in running:
                    running[queue] = asyncio.Event()
                    tasks.start(one(client, queue), f"transactions to {queue}")
                running[queue].set()
            await outbox.changed()
    finally:
        await tasks.stop()
        clients.close()


async def _forward(client: GcmClient, queue: str, outbox: OutgoingSource, more: asyncio.Event) -> None:
    """Returns when nothing was to be done for a while."""
    pauses, before, warned, missing = delays(*PAUSE_SECONDS), 0, -WARN_SECONDS, Missing(time.monotonic)
    while left := outbox.waiting(queue):
        pauses, before = (pauses if left == before else delays(*PAUSE_SECONDS)), left
        try:
            await outbox.prove()
            await _publish(client, queue, outbox, more)
            continue
        except RoqError as error:
            if missing.for_long(error):
                left = outbox.gone(queue)
                log.error("queue %r was removed: it does not get %s messages of transactions on their way", queue, left)
                continue
            if time.monotonic() - warned >= WARN_SECONDS:
                warned = time.monotonic()
                log.warning("%s messages of transactions wait for queue %r: %s", left, queue, _what_to_do(queue, error))
        except Exception:  # a defect must not end the master, whose members have leases
            log.exception("defect while messages of transactions were forwarded to queue %r, trying again", queue)
        await asyncio.sleep(next(pauses))


class Missing:
    """Whether a queue is not there for good. clock(): seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None

    def for_long(self, error: RoqError) -> bool:
        """After one more look, with this result: whether all were in vain for GONE_SECONDS."""
        if not isinstance(error, QueueNotFound):
            self._since = None
            return False
        now = self._clock()
        self._since = now if self._since is None else self._since
        return now - self._since >= GONE_SECONDS


def _what_to_do(queue: str, error: RoqError) -> str:
    if isinstance(error, NotRecorded | QueueStopped):
        verb = "record" if isinstance(error, NotRecorded) else "start"
        return f"{error} (`roq queue {verb} {queue}`); or remove the queue, and they are given up"
    return str(error)


async def _publish(client: GcmClient, queue: str, outbox: OutgoingSource, more: asyncio.Event) -> None:
    tapes = await _tapes(client, queue)
    publisher = NamedPublisher(client, queue, outbox.producer)
    await publisher.open()
    try:
        await outbox.prove()
        exchanges = set[str]()  # of these tapes
        await _check_same(client, queue, tapes)
        await outbox.attach(queue, tapes, publisher.number)
        while True:
            more.clear()
            while messages := outbox.first(queue, MESSAGES_AT_ONCE):
                stored_by = await _publish_some(publisher, queue, outbox, messages)
                if not stored_by <= exchanges:
                    await _check_same(client, queue, tapes)
                    exchanges |= stored_by
            async with asyncio.timeout(IDLE_SECONDS):
                await more.wait()
    except TimeoutError:
        await publisher.close()
        outbox.idle(queue)
    except BaseException:
        with contextlib.suppress(RoqError):
            await publisher.close(0)
        raise


async def _tapes(client: GcmClient, queue: str) -> str:
    """The queue's part of their names, which no other queue has, nor one created anew. Raises QueueNotFound, QueueStopped,
    NotRecorded: the producer is not opened in vain."""
    record = (await client.request(gcm.DescribeQueue(queue), gcm.QueueInfo)).record
    if record.recording is None or not record.recording.on:
        raise NotRecorded(f"queue {queue!r} is not recorded")
    if not record.running:
        raise QueueStopped(f"queue {queue!r} is stopped")
    return record.recording.tapes


async def _check_same(client: GcmClient, queue: str, tapes: str) -> None:
    """Raises NotReady, and as `_tapes`."""
    if await _tapes(client, queue) != tapes:
        raise NotReady(f"queue {queue!r} was created anew")


async def _publish_some(
    publisher: NamedPublisher, queue: str, outbox: OutgoingSource, messages: list[tuple[str, bytes]]
) -> set[str]:
    """Up to one that no queue takes. The Exchange that stored the last one; of a queue created anew there are others."""
    count, refused, stored_by = 0, None, set[str]()
    for topic, stored in messages:
        payload, headers = split_headers(stored)
        try:
            await publisher.publish(topic, payload, headers or None)
        except REFUSED as error:
            refused = error
            break
        count += 1
    if count:
        receipt = await publisher.flush()
        stored_by.update(receipt.position.done if receipt.position is not None else ())
        outbox.sent(queue, count)
    if refused is not None:
        topic = messages[count][0]
        log.error("a message of a transaction to queue %r, topic %r, is given up: %s", queue, topic, refused)
        await outbox.give_up(queue)
    return stored_by

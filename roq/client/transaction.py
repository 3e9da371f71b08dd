"""Transactions: messages to recorded queues and acks that take effect together, or not at all.

    async with cluster.transaction() as transaction:
        await transaction.publish("invoices", message.topic, invoice)
        await transaction.ack(message)

Within the block everything is only collected; its end sends one request to the master of the acked messages' group, or, where
nothing is acked, to that of the cluster's own work queue of transactions. Not covered: plain code (blocking_transaction.py),
how it is committed (roq/workqueue/transaction.py) and forwarded (roq/groups/outbox.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from enum import StrEnum, auto
from types import TracebackType
from typing import NamedTuple

from roq.coordination.link import parse_address
from roq.coordination.locate import GcmClient
from roq.errors import (
    CallError,
    Closed,
    InvalidConfiguration,
    NotRecorded,
    PayloadTooLarge,
    RoqError,
    TemporaryError,
    WorkQueueNotFound,
)
from roq.ids import topic_bytes
from roq.wire import gcm
from roq.wire.headers import Headers, check_message_headers, join_headers
from roq.wire.limits import FRAME_OVERHEAD_BYTES
from roq.wire.master import TRANSACTIONS
from roq.workqueue.address import parse, queue_address, zookeepers
from roq.workqueue.prefetch import QueuedTask, Task
from roq.workqueue.queue import WorkQueue
from roq.workqueue.transaction import CollectedTransaction, came_from

LOOK_SECONDS = 10.0  # what is known of a queue is asked again after so long
ASK_SECONDS = 15.0  # one question to the GCM
HEADER_BYTES = 8  # what one header adds besides its name and value, as a publisher counts it


class TransactionStage(StrEnum):
    """Where a transaction is."""

    NEW = auto()
    OPEN = auto()
    UNDECIDED = auto()  # a commit failed in a way that may be other the next time, or was cut off
    ENDED = auto()


class _Destination(NamedTuple):
    """asked: monotonic seconds."""

    payload_max: int
    asked: float


class TransactionHub:
    """What the transactions of one connection share: what is known of queues, and the work queue of those that ack nothing."""

    def __init__(self, client: GcmClient, zookeeper: str) -> None:
        self.zookeeper = zookeeper
        self._client = client
        self._destinations: dict[str, _Destination] = {}
        self._queue: WorkQueue | None = None
        self._opening = asyncio.Lock()

    async def payload_max(self, queue: str) -> int:
        """Bytes of the largest message that this recorded queue takes, with its headers. Raises QueueNotFound, NotRecorded,
        Unavailable."""
        known, now = self._destinations.get(queue), time.monotonic()
        if known is None or now - known.asked > LOOK_SECONDS:
            info = await self._client.request(gcm.DescribeQueue(queue), gcm.QueueInfo, ASK_SECONDS)
            if not info.record.recorded:
                self._destinations.pop(queue, None)
                raise NotRecorded(f"queue {queue!r} is not recorded, so no transaction can publish to it: `roq queue record`")
            known = self._destinations[queue] = _Destination(info.record.settings.max_frame_bytes - FRAME_OVERHEAD_BYTES, now)
        return known.payload_max

    async def commit(self, collected: CollectedTransaction) -> None:
        """Of one that acks nothing."""
        asked_before = collected.number is not None
        for attempt in range(2):
            queue = await self.queue()
            try:
                await collected.commit(queue)
                return
            except WorkQueueNotFound:  # somebody removed it
                if attempt or asked_before:  # it may have taken effect there
                    raise
                if self._queue is queue:
                    await self.close()

    async def queue(self) -> WorkQueue:
        """Open, and made if it is missing."""
        async with self._opening:
            if self._queue is None:
                opened = WorkQueue(queue_address(self.zookeeper, TRANSACTIONS))
                await opened.open()
                self._queue = opened
            return self._queue

    async def close(self) -> None:
        """Let go."""
        queue, self._queue = self._queue, None
        if queue is not None:
            with contextlib.suppress(WorkQueueNotFound):
                await queue.close()


def _is_of(address: str, zookeeper: str) -> bool:
    """Whether a work queue is in the cluster behind these addresses. They may differ: one that both name will do."""
    place, here = parse(address), parse(queue_address(zookeeper, TRANSACTIONS))
    if place.scheme != "roq" or parse_address(place.zookeeper).chroot != parse_address(zookeeper).chroot:
        return False
    return not set(zookeepers(place)[0]).isdisjoint(zookeepers(here)[0])


class TransactionSteps:
    """What both faces do the same way: collect, and say what must not be done. No IO."""

    def __init__(self, zookeeper: str) -> None:
        self._zookeeper = zookeeper
        self._collected = CollectedTransaction()
        self._stage = TransactionStage.NEW

    def _enter(self) -> None:
        if self._stage is not TransactionStage.NEW:
            raise CallError("a transaction is entered once, and none within itself: make another one")
        self._stage = TransactionStage.OPEN

    @property
    def _is_to_be_committed(self) -> bool:
        """At the end of its block. Nobody who was told that it may not have taken effect is taken to be content with that."""
        return self._stage in (TransactionStage.OPEN, TransactionStage.UNDECIDED)

    def _check_open(self, *stages: TransactionStage) -> None:
        if self._stage is TransactionStage.NEW:
            raise Closed("enter this transaction first: with …")
        if self._stage not in (TransactionStage.OPEN, *stages):
            raise Closed("this transaction has ended: make another one")

    def _collect(self, queue: str, topic: str, payload: bytes, headers: Headers | None, payload_max: int) -> None:
        topic_bytes(topic)
        copied, beside = check_message_headers(headers) if headers else ({}, 0)
        if payload.__class__ is not bytes:
            try:
                payload = bytes(memoryview(payload))
            except TypeError:
                raise TypeError(f"a payload is bytes-like, got {type(payload).__name__}") from None
        size = len(payload) + beside + HEADER_BYTES * len(copied)
        if size > payload_max:
            raise PayloadTooLarge(f"a message of {size} bytes with its headers; queue {queue!r} takes at most {payload_max}")
        self._collected.publish(queue, topic, join_headers(payload, copied))

    def _claim(self, task: QueuedTask) -> None:
        if not _is_of(came_from(task), self._zookeeper):
            raise InvalidConfiguration(
                f"a transaction acks tasks of its own cluster's groups and work queues, not of {came_from(task)}"
            )
        self._collected.ack(task)

    def _ended(self, error: BaseException | None) -> None:
        """A commit has come back."""
        match error:
            case Closed():
                unknown = self._collected.number is not None  # it was sent
            case None | RoqError():
                unknown = isinstance(error, TemporaryError)
            case _:  # cancelled, or interrupted: it may take effect all the same
                unknown = True
        if unknown:
            self._stage = TransactionStage.UNDECIDED
        else:
            self._end()

    def _end(self) -> None:
        self._stage = TransactionStage.ENDED
        self._collected.let_go()

    def _leave(self) -> None:
        """The block is left. What may have taken effect can be asked for still, but its leases are not renewed any longer."""
        if self._stage is TransactionStage.UNDECIDED:
            self._collected.let_go()
        else:
            self._end()


class Transaction(TransactionSteps):
    """Made by `Cluster.transaction`; use as an async context manager. An exception in its block, and `rollback`, undo all of
    it: nothing was sent. One coroutine.

    The end of the block commits, unless `commit` did. Both raise TransactionAborted: a lease was lost, nothing was published
    and nothing acked; Overloaded: nothing was done, a queue takes no messages just now; DeadlineExceeded, and whatever cuts it
    off (cancellation): it may have taken effect or not, and `commit()` asks once more under the same number, within 30 minutes
    of the first time; AccessDenied, Unavailable.
    """

    def __init__(self, hub: TransactionHub) -> None:
        super().__init__(hub.zookeeper)
        self._hub = hub

    async def __aenter__(self) -> Transaction:
        self._enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None and self._is_to_be_committed:
                await self.commit()
        finally:
            self._leave()

    async def publish(self, queue: str, topic: str, payload: bytes, headers: Headers | None = None) -> None:
        """A message that is published if this transaction is. Raises QueueNotFound, NotRecorded, InvalidTopic, InvalidHeaders,
        PayloadTooLarge, TransactionTooLarge, Closed, Unavailable."""
        self._check_open()
        payload_max = await self._hub.payload_max(queue)
        self._check_open()
        self._collect(queue, topic, payload, headers, payload_max)

    async def ack(self, task: Task) -> None:
        """A task, or message of a group, that is done if this transaction is; its lease is renewed until then. All must be of
        one group. Raises LeaseLost, InvalidConfiguration, TransactionTooLarge, Closed."""
        self._check_open()
        self._claim(task)

    async def commit(self) -> None:
        """All of it takes effect. See the class for what this raises."""
        self._check_open(TransactionStage.UNDECIDED)
        failure: BaseException | None = None
        try:
            if self._collected.tasks:
                await self._collected.commit()
            elif self._collected:
                await self._hub.commit(self._collected)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._ended(failure)

    def rollback(self) -> None:
        """Forget it. What it has collected was not sent, unless `commit` was called."""
        self._end()

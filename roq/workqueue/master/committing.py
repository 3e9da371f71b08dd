"""What a master asks of a transaction before it writes it: that it is well formed, and that its messages have room. Pure.

A destination whose messages do not leave fills its own room first, so that others have theirs. Not covered: what a transaction
does (fold.py, outbox.py); who may publish where (roq/wire/rights.py).
"""

from __future__ import annotations

from roq.errors import InvalidConfiguration, Overloaded, TransactionTooLarge
from roq.ids import check_name, topic_bytes
from roq.wire import master as wire
from roq.workqueue import codec
from roq.workqueue.outbox import TransactionOutbox, message_bytes
from roq.workqueue.records import CommitTransaction, Outgoing

DESTINATION_BYTES_MAX = 16 * 1024 * 1024  # of messages that wait to be forwarded to one queue
DESTINATION_MESSAGES_MAX = 50_000
OUTBOX_BYTES_MAX = 64 * 1024 * 1024  # to all queues: they are in the master's memory and in its snapshots
DESTINATIONS_MAX = 1_000  # queues that something waits for, or was forwarded to lately
DELIVERY_SHARE, MESSAGE_SHARE, QUEUE_SHARE = 20, 9, 12  # of a record, beyond names and what users gave: at most
ID_MAX, NUMBER_MAX = (1 << 64) - 1, (1 << 62) - 1


def commit_record(one: wire.TransactionToCommit, now: int) -> CommitTransaction:
    """The record for the log. Raises CallError: it is no transaction that a client of ours would send."""
    if not 0 < one.producer <= ID_MAX or not 0 < one.sequence <= NUMBER_MAX:
        raise InvalidConfiguration("a transaction has a producer and a number")
    deliveries = tuple(map(codec.parse_token, one.tokens))
    if len(deliveries) > wire.TRANSACTION_ACKS_MAX or len(set(deliveries)) < len(deliveries):
        raise TransactionTooLarge(f"a transaction acks at most {wire.TRANSACTION_ACKS_MAX} messages, each once")
    queues = {part.queue for part in one.outgoing}
    if len(queues) < len(one.outgoing) or len(queues) > wire.TRANSACTION_QUEUES_MAX:
        raise TransactionTooLarge(f"a transaction publishes to at most {wire.TRANSACTION_QUEUES_MAX} queues")
    count, size = sum(len(part.messages) for part in one.outgoing), record_bytes(one)
    if count > wire.TRANSACTION_MESSAGES_MAX or size > wire.TRANSACTION_BYTES_MAX:
        limits = f"{wire.TRANSACTION_MESSAGES_MAX} messages or {wire.TRANSACTION_BYTES_MAX} bytes"
        raise TransactionTooLarge(f"a transaction publishes at most {limits}, got {count} messages of {size} bytes")
    if not all(part.messages for part in one.outgoing):
        raise InvalidConfiguration("a transaction publishes nothing to one of its queues")
    for part in one.outgoing:
        check_name(part.queue)
        for topic in {topic for topic, _ in part.messages}:
            topic_bytes(topic)
    outgoing = tuple(Outgoing(part.queue, tuple(part.messages)) for part in one.outgoing)
    return CommitTransaction(now, one.producer, one.sequence, deliveries, outgoing)


def record_bytes(one: wire.TransactionToCommit) -> int:
    """Of topics and payloads."""
    return sum(message_bytes(message) for part in one.outgoing for message in part.messages)


def logged_bytes(record: CommitTransaction) -> int:
    """Of all that makes it longer than another record."""
    size = DELIVERY_SHARE * len(record.deliveries)
    for part in record.outgoing:
        size += QUEUE_SHARE + len(part.queue.encode()) + MESSAGE_SHARE * len(part.messages)
        size += sum(map(message_bytes, part.messages))
    return size


def check_room(outbox: TransactionOutbox, one: wire.TransactionToCommit) -> None:
    """Raises Overloaded: messages don't leave as fast as they come."""
    for part in one.outgoing:
        there = outbox.destinations.get(part.queue)
        if there is None and len(outbox.destinations) >= DESTINATIONS_MAX:
            raise Overloaded(
                f"transactions of this work queue or group are on their way to {DESTINATIONS_MAX} other queues: try again"
            )
        if there is not None and (there.bytes >= DESTINATION_BYTES_MAX or len(there.waiting) >= DESTINATION_MESSAGES_MAX):
            raise Overloaded(
                f"{len(there.waiting)} messages of transactions wait for queue {part.queue!r}, which takes none just now: "
                "try again; the log of the work queue's master says why"
            )
    if outbox.bytes >= OUTBOX_BYTES_MAX:
        raise Overloaded(f"{outbox.bytes} bytes of transactions wait to be published: try again")

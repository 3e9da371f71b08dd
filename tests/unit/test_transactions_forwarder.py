"""The forwarder of transactions, alone: what it asks before it publishes. Not covered: publishing (tests/integration)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from roq.errors import NotReady, NotRecorded, QueueNotFound, QueueStopped, RoqError, UnknownFormat
from roq.groups import outbox
from roq.groups.outbox import GONE_SECONDS, Missing
from roq.wire.assignment import QueueRecord, QueueSettings
from roq.wire.gcm import DescribeQueue, QueueInfo
from roq.wire.policy import Policy
from roq.wire.recording import Record

QUEUE = QueueRecord("q", QueueSettings(), True, "h", 1, {"e": "h"}, 0.0, "made", record=Record(days=1), recorded=True)


class Gcm:
    """Says this of the queue, one after the other."""

    def __init__(self, *records: QueueRecord) -> None:
        self._records: Iterator[QueueRecord] = iter(records)

    async def request(self, body: msgspec.Struct, expect: type[QueueInfo], timeout_seconds: float = 15.0) -> QueueInfo:
        """See GcmClient."""
        assert body == DescribeQueue("q"), "nothing else is asked for"
        return QueueInfo(next(self._records), (), True, Policy())


class Source:
    """An outbox with messages that nobody gets to see."""

    producer = "_roq.outbox.l0g"

    async def changed(self) -> None:
        """See OutgoingSource, as all of these."""

    def queues(self) -> list[str]:
        return ["q"]

    def waiting(self, queue: str) -> int:
        return 1

    def first(self, queue: str, count: int) -> list[tuple[str, bytes]]:
        raise AssertionError("a message leaves")

    async def prove(self) -> None: ...

    async def attach(self, queue: str, tapes: str, stored: int) -> None:
        raise AssertionError("numbers of one queue are taken for another's")

    def sent(self, queue: str, count: int) -> None: ...

    async def give_up(self, queue: str) -> None: ...

    def idle(self, queue: str) -> None: ...

    def gone(self, queue: str) -> int:
        return 1


class Opened:
    """A publisher that opens at once."""

    number = 0

    def __init__(self, client: Gcm, queue: str, producer: str) -> None: ...

    async def open(self) -> None:
        """See NamedPublisher."""

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """See NamedPublisher."""


@pytest.mark.parametrize(
    ("record", "error", "what_to_do"),
    [
        (msgspec.structs.replace(QUEUE, running=False), QueueStopped, "roq queue start q"),
        (msgspec.structs.replace(QUEUE, recorded=False), NotRecorded, "roq queue record q"),
    ],
)
async def test_a_producer_is_not_opened_in_vain(record: QueueRecord, error: type[RoqError], what_to_do: str) -> None:
    """Each opening that comes to nothing uses up a life of its name."""
    with pytest.raises(error) as raised:
        await outbox._publish(Gcm(record), "q", Source(), asyncio.Event())  # type: ignore[arg-type]
    assert what_to_do in outbox._what_to_do("q", raised.value)


async def test_a_queue_that_is_created_anew_meanwhile_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "NamedPublisher", Opened)
    anew = msgspec.structs.replace(QUEUE, transaction="anew")
    with pytest.raises(NotReady, match="created anew"):
        await outbox._publish(Gcm(QUEUE, anew), "q", Source(), asyncio.Event())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="taken for another's"):
        await outbox._publish(Gcm(QUEUE, QUEUE), "q", Source(), asyncio.Event())  # type: ignore[arg-type]


def test_a_queue_is_removed_when_it_was_not_there_for_a_while() -> None:
    now = 0.0
    missing = Missing(lambda: now)
    assert not missing.for_long(QueueNotFound())
    now = GONE_SECONDS - 1
    assert not missing.for_long(QueueNotFound())
    assert not missing.for_long(UnknownFormat())
    now = 2 * GONE_SECONDS
    assert not missing.for_long(QueueNotFound()), "once it was there"
    now += GONE_SECONDS
    assert missing.for_long(QueueNotFound())

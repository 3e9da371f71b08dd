"""Publishers of what is to be stored at an Exchange that confirms nothing, or is gone: they say so, and give nothing up.

Not covered: a whole cluster (test_producers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from gcm.producers import grant, open_record
from roq.coordination.locate import GcmClient
from roq.errors import Closed, DeadlineExceeded
from roq.pubsub.links import BACKLOG_BYTES
from roq.pubsub.named_publisher import NamedPublisher
from roq.pubsub.publisher import STORED, Publisher
from roq.pubsub.replay_buffer import HOLD_BYTES, KEPT_BYTES
from roq.runtime.rpc import RpcServer
from roq.wire import monitor as wire
from roq.wire.assignment import MonitorAddress, Overflow, QueueRecord, QueueSettings
from roq.wire.gcm import Done, QueueInfo
from roq.wire.policy import Policy
from roq.wire.producers import KeepProducer, OpenProducer
from roq.wire.recording import Record
from tests.integration.test_path_sender import Front

MESSAGES, PAYLOAD = 20_000, bytes(4096)  # more than a replay buffer takes


class Queue:
    """A recorded queue's GCM and Monitor, and an Exchange that takes everything, and says nothing. kept: numbers that were."""

    def __init__(self) -> None:
        self.front = Front("A")
        self.server = RpcServer("127.0.0.1", 0, wire.Request, self._handle, wire.NoticeToMonitor, lambda peer, notice: None)
        self.kept: list[int] = []
        self._reads = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            self.front.read()
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._reads.cancel()
        await asyncio.wait([self._reads])
        self.server.close()
        self.front.socket.close(0)

    async def _handle(self, peer: bytes, request: Any) -> msgspec.Struct:
        if isinstance(request, wire.Leave):
            return wire.Left()
        return wire.PublisherWelcome(1, 1, self.front.address, Overflow.BLOCK, 1 << 20, monitor=wire.SERVER_PROTOCOL)

    async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> Any:
        match request:
            case OpenProducer():
                return grant(open_record(None, request, 7, 1.0))
            case KeepProducer():
                self.kept.append(request.number)
                return Done()
        record = QueueRecord("q", QueueSettings(), True, "h", 1, {}, 0.0, record=Record(), recorded=True)
        return QueueInfo(record, (MonitorAddress("h", "127.0.0.1", self.server.port, 1),), True, Policy())

    def publisher(self, *, named: bool) -> Publisher:
        client = cast(GcmClient, self)
        return NamedPublisher(client, "q", "p") if named else Publisher(client, "q", STORED)


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    made = Queue()
    yield made
    await made.close()


@pytest.mark.quick
async def test_a_close_says_that_nothing_is_stored(queue: Queue) -> None:
    publisher = await queue.publisher(named=True).open()
    await publisher.publish("t", b"1")
    with pytest.raises(DeadlineExceeded, match=r"closed after 0\.3 s without .* stored: open it again"):
        await publisher.close(0.3)
    assert (publisher.number, set(queue.kept)) == (0, {0})


@pytest.mark.parametrize("named", [True, False], ids=["a producer", "what is to be stored"])
async def test_however_many_publish_at_once_nothing_is_given_up(queue: Queue, named: bool) -> None:
    """While no Exchange takes anything all but the first wait for room, though nobody lets the loop turn in between."""
    publisher = await queue.publisher(named=named).open()
    sender = publisher._sender
    sender.abandoned(sender.token, sender.path)
    publishing = [asyncio.create_task(publisher.publish("t", PAYLOAD)) for _ in range(MESSAGES)]
    async with asyncio.timeout(60):
        while sender.backlog() <= BACKLOG_BYTES:
            await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(task.done() for task in publishing) * len(PAYLOAD) < HOLD_BYTES + BACKLOG_BYTES < KEPT_BYTES
    assert (publisher.dropped, publisher.number, sender._buffer.unknown) == (0, 0, None)
    await publisher.close(0)
    refused = [task.exception() for task in publishing if await asyncio.wait([task]) and task.exception()]
    assert refused
    assert all(isinstance(error, Closed) for error in refused)

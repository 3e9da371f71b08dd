"""Consume, transform, produce to two queues, exactly once, and the same to both: while consumers, the master of their group and
the Exchanges that what they publish passes are killed, again and again.

Not covered: every interleaving (tests/model/test_transactions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter

import pytest

import roq
from roq.wire.assignment import ProcessKind

pytestmark = pytest.mark.timeout(200)
BOUND_SECONDS = 150.0
TOPICS, GROUP = 5, "movers"
CONSUMER = """
import sys
from roq import blocking

zookeeper, source, result, journal, group = sys.argv[1:]
with blocking.connect(zookeeper) as cluster, cluster.subscriber(source, group=group, lease_seconds=3.0, count=20) as member:
    print("ready", flush=True)
    for message in member:
        with cluster.transaction() as transaction:
            transaction.publish(result, message.topic, message.payload + b"!")
            transaction.publish(journal, message.topic, message.payload)
            transaction.ack(message)
"""


class Consumer:
    """A process of its own, which is killed."""

    def __init__(self, zookeeper: str, *queues: str) -> None:
        arguments = [sys.executable, "-c", CONSUMER, zookeeper, *queues, GROUP]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    async def ready(self) -> None:
        assert self._process.stdout is not None
        assert await asyncio.to_thread(self._process.stdout.readline) == b"ready\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


async def kill(client: roq.Cluster, kind: ProcessKind, queue: str) -> None:
    """All processes of this kind; of a work queue's masters the active one."""
    active = (await client.work_queue(queue)).record.master_host if kind is ProcessKind.MASTER else ""
    reports = [info.report for info in (await client.view()).hosts if info.report is not None and active in ("", info.host)]
    for process in (one for report in reports for one in report.processes):
        if process.kind is kind and process.queue == queue and process.pid:
            with contextlib.suppress(ProcessLookupError):  # killed before, and not reported yet
                os.kill(process.pid, signal.SIGKILL)


async def stored(client: roq.Cluster, queue: str, count: int) -> list[roq.Message]:
    """All that is on the queue's tapes, once so many messages are, which are forwarded when they are committed."""
    found = 0
    async with client.subscriber(queue, start="earliest", follow="stored") as messages:
        while found < count:
            batch = await messages.next_batch()
            assert batch is not None
            found += len(batch)
    async with client.subscriber(queue, start="earliest", follow=False) as messages:
        return [message async for message in messages]


@pytest.mark.parametrize("seed", [1])
async def test_every_message_is_moved_once_and_in_order(client: roq.Cluster, seed: int) -> None:
    chance, count = random.Random(seed), 1_500
    source, *moved = (f"txk-{uuid.uuid4().hex[:12]}" for _ in range(3))
    for name in (source, *moved):
        await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    await client.create_group(source, GROUP)
    async with client.publisher(source, confirm="stored") as publisher:
        for number in range(count):
            await publisher.publish(f"t.{number % TOPICS}", b"%d" % number)
    killed = Counter[str]()
    async with asyncio.timeout(BOUND_SECONDS), client.subscriber(source, group=GROUP) as watching:
        consumers = [Consumer(client.zookeeper, source, *moved) for _ in range(2)]
        try:
            while (await watching.queue.status()).completed < count:
                await asyncio.sleep(chance.uniform(0.2, 0.8))
                if killed["consumer"] < 8 and chance.random() < 0.6:
                    killed["consumer"] += 1
                    consumers.pop(0).kill()
                    consumers.append(Consumer(client.zookeeper, source, *moved))
                    await consumers[-1].ready()
                elif killed["master"] < 4 and chance.random() < 0.5:
                    killed["master"] += 1
                    await kill(client, ProcessKind.MASTER, f"{source}@{GROUP}")
                elif killed["exchange"] < 4:
                    killed["exchange"] += 1
                    await kill(client, ProcessKind.EXCHANGE, moved[killed["exchange"] % 2])
        finally:
            for consumer in consumers:
                consumer.kill()
        result, journal = [await stored(client, queue, count) for queue in moved]
        await kill(client, ProcessKind.MASTER, f"{source}@{GROUP}")
        assert (await watching.queue.status()).completed == count
        assert [len(await stored(client, queue, count)) for queue in moved] == [count] * 2, (
            "the next master forwards nothing again"
        )
    assert min(killed["consumer"], killed["master"]) > 0, f"each was killed: {killed}"
    assert killed["exchange"] > 1, f"of either queue: {killed}"
    for found, mark in ((result, b"!"), (journal, b"")):
        assert [one for one, times in Counter(message.payload for message in found).items() if times > 1] == []
        for topic in range(TOPICS):
            mine = [message.payload for message in found if message.topic == f"t.{topic}"]
            assert mine == [b"%d" % number + mark for number in range(topic, count, TOPICS)]
    for name in (source, *moved):
        await client.remove_queue(name)

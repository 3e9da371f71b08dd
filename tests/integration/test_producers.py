"""Producers on a real cluster: closed, killed, opened elsewhere and again; each message is on the tapes once, in order.

Not covered: what the GCM keeps (test_gcm_producers.py), every interleaving (tests/model/test_producers.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.errors import Closed, InvalidName, MessagesLost, NotRecorded, ProducerFenced, ProducerNotFound
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.pubsub.tape import Tape
from roq.wire.assignment import ProcessKind
from roq.wire.frame import FrameKind, bundle_body, parse, payloads
from roq.wire.recording import decode_entry
from tests.harness.documented import block, run
from tests.integration.running import RunningCluster
from tests.integration.test_recorded import kill, numbers, read, take

BOUND_SECONDS = 30
TOPICS = 7
KILLS = 8
LOADER = """
import asyncio, sys, roq

async def main(zookeeper, queue, last):
    async with roq.connect(zookeeper) as cluster, cluster.publisher(queue, producer="loader") as publisher:
        print("from", publisher.number, flush=True)
        for number in range(publisher.number + 1, int(last) + 1):
            await publisher.publish(f"t{number % 7}", b"%d" % number)
            if number % 3000 == 0:
                print("at", number, flush=True)
    print("done", publisher.number, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test."""
    name = f"prod-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)


async def on_tapes(client: roq.Cluster, queue: str) -> list[int]:
    """Payloads of all data frames on the tapes, tape by tape, repeats included."""
    tapes = await client.tapes(queue)
    stores, found = Stores(StaticDirectory(tapes.stores)), list[int]()

    def collect(frame: bytes) -> None:
        _, header, body = parse(frame)
        if header.kind == FrameKind.BUNDLE:
            for inner in bundle_body(body):
                collect(inner)
        elif header.kind == FrameKind.DATA:
            found.extend(int(item) for item in payloads(header, body) if isinstance(item, bytes))

    try:
        for view in tapes.views:
            tape = Tape(view, stores, (queue, tapes.made_by))
            while True:
                await tape.fetch()
                if not tape.ahead:
                    break
                for position, entry in tape.ahead:
                    tape.done = position
                    for frame in decode_entry(entry).frames:
                        collect(frame)
                tape.ahead.clear()
    finally:
        stores.close()
    return found


async def load(cluster: RunningCluster, queue: str, last: int) -> Process:
    """A program of its own."""
    return await asyncio.create_subprocess_exec(sys.executable, "-c", LOADER, cluster.zookeeper, queue, str(last), stdout=PIPE)


async def said(process: Process) -> tuple[str, int]:
    assert process.stdout is not None
    async with asyncio.timeout(BOUND_SECONDS):
        word, number = (await process.stdout.readline()).split()
    return word.decode(), int(number)


async def publish_on(publisher: roq.Publisher) -> None:
    """Until it is refused."""
    async with asyncio.timeout(BOUND_SECONDS):
        while True:
            await publisher.publish("t", b"0")
            await asyncio.sleep(0.01)


@pytest.mark.quick
async def test_numbers_go_on_when_it_is_opened_again(client: roq.Cluster, recorded: str) -> None:
    lost: list[MessagesLost] = []
    async with client.subscriber(recorded, on_lost=lost.append) as live:
        await live.ready(BOUND_SECONDS)
        ids = set()
        for first in (1, 11, 21):
            async with client.publisher(recorded, producer="p") as publisher:
                assert publisher.number == first - 1
                for number in range(first, first + 10):
                    await publisher.publish(f"t{number % 3}", b"%d" % number)
                assert (await publisher.flush()).level == "stored"
                assert publisher.number == first + 9
                ids.add(publisher.id)
            (view,) = await client.producers(recorded)
            assert (view.name, view.number, view.closed) == ("p", first + 9, True)
        assert numbers(await take(live, 30)) == list(range(1, 31))
    assert len(ids) == 1
    assert lost == []
    assert await on_tapes(client, recorded) == list(range(1, 31))


async def test_what_is_sent_again_under_its_number_counts_once(client: roq.Cluster, recorded: str) -> None:
    """A life that was not closed: the next one finds on the tapes what was not kept; the one before is fenced."""
    old = client.publisher(recorded, producer="p")
    await old.open()
    await old.publish_many("t", [b"%d" % number for number in range(1, 1001)], confirm="stored")
    async with client.publisher(recorded, producer="p") as new:
        assert new.number == 1000
        with pytest.raises(ProducerFenced, match=rf"opened since by .*\(pid {os.getpid()}\)"):
            await publish_on(old)
        with pytest.raises(ProducerFenced):
            await old.flush()
        with pytest.raises(ProducerFenced):
            await old.close()
        await new.publish("t", b"1001")
    assert await on_tapes(client, recorded) == list(range(1, 1002))
    assert numbers(await read(client, recorded)) == list(range(1, 1002))


async def test_moved_while_it_publishes(client: roq.Cluster, recorded: str) -> None:
    """A path opens when everything on the one before is stored."""
    (first,) = (await client.queue(recorded)).record.exchanges
    second = (await client.create_exchange(recorded)).exchange
    await client.exchange_active(recorded, second)
    moved, last = 0, 3000
    async with client.publisher(recorded, producer="p") as publisher:
        for number in range(1, last + 1):
            await publisher.publish(f"t{number % TOPICS}", b"%d" % number)
            if number % 500 == 0:
                moved += (await client.move(recorded, [(publisher.id, (first, second)[number // 500 % 2])])).moved
    assert moved >= 4
    assert sorted(await on_tapes(client, recorded)) == list(range(1, last + 1))
    assert numbers(await read(client, recorded)) == list(range(1, last + 1))


async def test_killed_again_and_again_while_exchanges_are_killed(
    client: roq.Cluster, cluster: RunningCluster, recorded: str
) -> None:
    second = (await client.create_exchange(recorded)).exchange
    await client.exchange_active(recorded, second)
    last, word, lives = 40_000, "", 0
    while word != "done":
        process = await load(cluster, recorded, last)
        assert (await said(process))[0] == "from"
        lives += 1
        while (word := (await said(process))[0]) == "at" and lives > KILLS:
            pass
        if word == "at":
            if lives % 3 == 0:
                await kill(client, recorded, ProcessKind.EXCHANGE)
            process.send_signal(signal.SIGKILL)
        await process.wait()
    assert lives > KILLS
    found = await on_tapes(client, recorded)
    assert set(found) == set(range(1, last + 1))
    came = numbers(await read(client, recorded))
    assert came == list(range(1, last + 1))


async def test_what_can_not_be(client: roq.Cluster, recorded: str, queue: str) -> None:
    with pytest.raises(InvalidName):
        client.publisher(recorded, producer="a/b")
    with pytest.raises(NotRecorded):
        async with client.publisher(queue, producer="p"):
            pass
    with pytest.raises(ProducerNotFound):
        await client.forget_producer(recorded, "p")
    publisher = client.publisher(recorded, producer="p")
    await publisher.open()
    await publisher.publish("t", b"1", confirm="stored")
    await client.forget_producer(recorded, "p")
    with pytest.raises(ProducerFenced, match="forgotten"):
        await publish_on(publisher)
    async with client.publisher(recorded, producer="p") as again:
        assert again.number == 0
        assert again.id != publisher.id
    with pytest.raises(Closed):
        await again.publish("t", b"3")


def test_for_plain_code(cluster: RunningCluster) -> None:
    name = f"prod-{uuid.uuid4().hex[:12]}"
    with blocking.connect(cluster.zookeeper) as client:
        client.create_queue(name, record=roq.Record(days=1))
        for first in (1, 2):
            with client.publisher(name, producer="p") as publisher:
                assert publisher.number == first - 1
                publisher.publish("t", b"%d" % first)
        assert [view.number for view in client.producers(name)] == [2]
        client.forget_producer(name, "p")
        assert client.producers(name) == []
        client.remove_queue(name)


def test_the_loader_of_the_documents(cluster: RunningCluster, tmp_path: Path) -> None:
    name = f"prod-{uuid.uuid4().hex[:12]}"
    source = block("docs/recorded-queues.md", "Producers").replace("127.0.0.1:2181", cluster.zookeeper).replace("orders", name)
    with blocking.connect(cluster.zookeeper) as client:
        client.create_queue(name, record=roq.Record(days=1))
        for _ in range(2):  # the second time there is nothing to do
            run(source, tmp_path)
        assert [view.number for view in client.producers(name)] == [3]
        with client.subscriber(name, start="earliest", follow=False) as reader:
            assert [message.payload for message in reader] == [b"one", b"two", b"three"]
        client.remove_queue(name)

"""Recorded queues on a real cluster: what is confirmed as stored is read again, in order, over deaths and moves, and then live.

Not covered: what the stores and logs do (test_stores.py, test_log_keeper.py), the command line (test_cli_recording.py), many
faults at once (tests/simulation, tests/failure).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta

import pytest

import roq
from roq import blocking
from roq.errors import (
    Closed,
    InvalidConfiguration,
    InvalidPosition,
    MessagesLost,
    NoHosts,
    NotRecorded,
    QueueConflict,
)
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.wire.assignment import ProcessKind, from_json
from tests.integration.running import RunningCluster

BOUND_SECONDS = 20


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test."""
    name = f"rec-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)


async def take(subscriber: roq.Subscriber, count: int) -> list[roq.Message]:
    async with asyncio.timeout(BOUND_SECONDS):
        return [await anext(subscriber) for _ in range(count)]


async def read(client: roq.Cluster, queue: str, start: object = "earliest", *topics: str) -> list[roq.Message]:
    """All there is on the tapes from there on; fails if anything is told lost."""
    lost: list[MessagesLost] = []
    async with (
        asyncio.timeout(BOUND_SECONDS),
        client.subscriber(queue, *topics, start=start, follow=False, on_lost=lost.append) as past,  # type: ignore[call-overload]
    ):
        found = [message async for message in past]
    assert lost == []
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        while not condition():  # what another process does has no event here
            await asyncio.sleep(0.02)


async def kill(client: roq.Cluster, queue: str, kind: ProcessKind, exchange: str = "") -> None:
    """One process of the queue, and wait until another one runs in its place."""
    view = await client.view()
    (process,) = [
        one
        for host in view.hosts
        if host.report is not None
        for one in host.report.processes
        if one.kind is kind and one.queue == queue and (not exchange or one.exchange == exchange)
    ][:1]
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(BOUND_SECONDS):
        while True:
            view = await client.view()
            reports = [host.report for host in view.hosts if host.report is not None]
            if any(one.name == process.name and one.restarts > process.restarts for each in reports for one in each.processes):
                return
            await asyncio.sleep(0.05)


def numbers(messages: list[roq.Message]) -> list[int]:
    return [int(message.payload) for message in messages]


@pytest.mark.quick
async def test_what_is_stored_is_read_from_the_beginning_and_then_live(client: roq.Cluster, recorded: str) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher:
        for number in range(3_000):
            headers: dict[str, str | bytes] | None = {"n": str(number)} if number % 3 == 0 else None
            await publisher.publish(f"t.{number % 7}", b"%d" % number, headers)
        receipt = await publisher.publish("t.end", b"3000", confirm="stored")
        assert receipt is not None
        assert (receipt.level, receipt.copies) == ("stored", 2), "two hosts: both have it"
        assert numbers(await read(client, recorded)) == list(range(3_001))
        assert numbers(await read(client, recorded, "earliest", "t.3")) == list(range(3, 3_000, 7))
        async with client.subscriber(recorded, start="earliest") as late:
            assert numbers(await take(late, 3_001)) == list(range(3_001))
            for number in range(3_001, 4_000):
                await publisher.publish("live", b"%d" % number)
                await asyncio.sleep(0)
            came = await take(late, 999)
            assert numbers(came) == list(range(3_001, 4_000))
            await late.ready(BOUND_SECONDS)
            assert (late.lost, late.duplicated) == (0, 0) or late.duplicated > 0
    messages = await read(client, recorded)
    assert [message.headers for message in messages[:4]] == [{"n": "0"}, {}, {}, {"n": "3"}]
    assert {message.publisher for message in messages} == {publisher.id}


async def test_one_by_one_and_together(client: roq.Cluster, recorded: str) -> None:
    async with client.publisher(recorded) as publisher:
        receipt = await publisher.flush()
        assert receipt.level == "routed"
        receipts = await asyncio.gather(*(publisher.publish("t", b"%d" % n, confirm="stored") for n in range(500)))
        assert {one.level for one in receipts if one is not None} == {"stored"}
        one = await publisher.publish_many("t", [b"%d" % n for n in range(500, 900)], confirm="stored")
        assert one is not None
        assert one.position is not None
        assert numbers(await read(client, recorded)) == list(range(900))
        assert await read(client, recorded, one.position) == [], "that is behind everything"
        assert (await publisher.flush()).level == "stored", "from the first time on it is asked for"
        with pytest.raises(InvalidConfiguration, match="'routed' or 'stored'"):
            await publisher.publish("t", b"x", confirm="forever")


async def test_where_to_begin(client: roq.Cluster, recorded: str) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher:
        await publisher.publish("t", b"0", confirm="stored")
        await asyncio.sleep(0.05)  # entries are dated to the millisecond
        between = datetime.now().astimezone()
        await asyncio.sleep(0.05)
        await publisher.publish("t", b"1", confirm="stored")
        assert numbers(await read(client, recorded, between)) == [1]
        assert numbers(await read(client, recorded, between.replace(tzinfo=None))) == [1], "local time"
        assert numbers(await read(client, recorded, timedelta(hours=1))) == [0, 1]
        assert numbers(await read(client, recorded, datetime.now().astimezone() + timedelta(days=1))) == []
        async with client.subscriber(recorded, start="earliest") as first:
            assert numbers(await take(first, 2)) == [0, 1]
            await first.ready(BOUND_SECONDS)
            for number in range(2, 300):
                await publisher.publish("t", b"%d" % number)
            await publisher.flush()
            assert numbers(await take(first, 298)) == list(range(2, 300))
            waiting = asyncio.ensure_future(anext(first))  # what was taken counts once the next is asked for
            await until(lambda: numbers_behind(first, 2))
            position = first.position
            await publisher.publish("t", b"300", confirm="stored")
            assert (await asyncio.wait_for(waiting, BOUND_SECONDS)).payload == b"300"
        assert position is not None
        assert roq.TapePosition.parse(str(position)) == position
        again = numbers(await read(client, recorded, str(position)))
        assert again[-1] == 300
        assert again == list(range(again[0], 301))
        async with client.subscriber(recorded) as live:
            assert live.position is None


def numbers_behind(subscriber: roq.Subscriber, entry: int) -> bool:
    position = subscriber.position
    return position is not None and max(position.done.values(), default=0) > entry


async def test_the_exchange_and_the_store_are_killed_while_it_flows(client: roq.Cluster, recorded: str) -> None:
    (exchange,) = (await client.queue(recorded)).record.exchanges
    sent, stop = 0, asyncio.Event()

    async def publish() -> None:
        nonlocal sent
        async with client.publisher(recorded, confirm="stored") as publisher:
            while not stop.is_set():
                for _ in range(200):
                    await publisher.publish(f"t.{sent % 3}", b"%d" % sent)
                    sent += 1
                await publisher.flush(BOUND_SECONDS)

    lost: list[MessagesLost] = []
    async with client.subscriber(recorded, start="earliest", on_lost=lost.append) as early:
        publishing = asyncio.create_task(publish())
        came = numbers(await take(early, 2_000))
        for kind in (ProcessKind.EXCHANGE, ProcessKind.EXCHANGE, ProcessKind.MONITOR):
            await kill(client, recorded, kind, exchange if kind is ProcessKind.EXCHANGE else "")
            came += numbers(await take(early, 2_000))
        await kill(client, "", ProcessKind.STORE)
        came += numbers(await take(early, 2_000))
        stop.set()
        await asyncio.wait_for(publishing, BOUND_SECONDS)
        came += numbers(await take(early, sent - len(came)))
    assert came == list(range(sent))
    assert lost == []
    assert numbers(await read(client, recorded)) == list(range(sent))


async def test_a_reader_gets_to_the_present_of_a_queue_that_is_never_quiet(client: roq.Cluster, recorded: str) -> None:
    sent, stop = 0, asyncio.Event()

    async def publish() -> None:
        nonlocal sent
        async with client.publisher(recorded) as publisher:
            while not stop.is_set():
                await publisher.publish("t", b"%d" % sent)
                sent += 1
                await asyncio.sleep(0.001)

    publishing = asyncio.create_task(publish())
    await until(lambda: sent > 500)
    before = sent
    come = numbers(await read(client, recorded))
    assert come == list(range(len(come)))
    assert len(come) > before / 2, "up to about when it was asked"
    async with client.subscriber(recorded, start="earliest") as late:
        reading = asyncio.create_task(take(late, before + 2_000))
        await late.ready(BOUND_SECONDS)
        assert numbers(await reading) == list(range(before + 2_000))
        stop.set()
        await publishing
        assert late.lost == 0


async def test_tapes_of_exchanges_that_came_and_went(client: roq.Cluster, recorded: str) -> None:
    (first,) = (await client.queue(recorded)).record.exchanges
    async with client.publisher(recorded, confirm="stored") as publisher, client.publisher(recorded) as other:
        number = 0
        for _ in range(3):
            added = (await client.create_exchange(recorded)).exchange
            await client.exchange_active(recorded, added)
            assert (await client.move(recorded, [(publisher.id, added)])).moved == 1
            for _ in range(200):
                await publisher.publish("t", b"%d" % number)
                await other.publish("other", b"%d" % number)
                number += 1
            await publisher.flush()
            await client.remove_exchange(recorded, added)
        await other.flush()
        await publisher.publish("t", b"%d" % number, confirm="stored")
        messages = await read(client, recorded)
        assert numbers([one for one in messages if one.topic == "t"]) == list(range(number + 1))
        views = (await client.tapes(recorded)).views
        assert (len(views), [view.exchange for view in views if view.live]) == (4, [first])
        ended = [from_json(view.meta, LogMeta) for view in views if not view.live]
        assert all(meta.segments[-1].state is SegmentState.CLOSED for meta in ended if meta.segments), "sealed at the end"
        async with client.subscriber(recorded, start="earliest") as late:
            mine = [one for one in await take(late, len(messages)) if one.topic == "t"]
            assert numbers(mine) == list(range(number + 1))
            await publisher.publish("t", b"live")
            assert (await take(late, 1))[0].payload == b"live"


async def test_switched_on_and_off_while_messages_flow(client: roq.Cluster, queue: str) -> None:
    with pytest.raises(NotRecorded):
        await client.publisher(queue, confirm="stored").open()
    with pytest.raises(NotRecorded):
        await client.subscriber(queue, start="earliest").open()
    with pytest.raises(NotRecorded):
        await client.tapes(queue)
    async with client.publisher(queue) as publisher, client.subscriber(queue) as live:
        await publisher.publish("t", b"before")
        await publisher.flush()
        await client.record_queue(queue, roq.Record(days=1))
        await on(publisher, b"recorded")
        await client.record_queue(queue, None)
        with pytest.raises(NotRecorded):
            await asyncio.wait_for(for_ever(publisher), BOUND_SECONDS)
        await publisher.publish("t", b"after")
        await publisher.flush()
        async with asyncio.timeout(BOUND_SECONDS):
            while (await anext(live)).payload != b"after":
                continue
        assert live.lost == 0, "live messages notice nothing"
        payloads = [message.payload for message in await read(client, queue)]
        assert b"recorded" in payloads
        assert not {b"before", b"after"} & set(payloads)
        await client.record_queue(queue, roq.Record(days=1))
        await on(publisher, b"again")
        lost: list[MessagesLost] = []
        async with client.subscriber(queue, start="earliest", follow=False, on_lost=lost.append) as past:
            payloads = [message.payload async for message in past]
        assert payloads.index(b"recorded") < payloads.index(b"again")
        assert sum(one.count for one in lost) > 0, "what was not recorded shows"


async def for_ever(publisher: roq.Publisher) -> None:
    """Until the Exchange has heard that it records no more."""
    while True:
        await publisher.publish("t", b"not", confirm="stored")


async def on(publisher: roq.Publisher, payload: bytes) -> None:
    """Publish this until the Exchange has heard that it is to record."""
    async with asyncio.timeout(BOUND_SECONDS):
        while True:
            try:
                await publisher.publish("t", payload, confirm="stored")
                return
            except NotRecorded:
                await asyncio.sleep(0.02)


async def test_what_can_not_be(client: roq.Cluster, recorded: str) -> None:
    for start in ("yesterday", 5, ""):
        with pytest.raises((InvalidConfiguration, InvalidPosition)):
            client.subscriber(recorded, start=start)  # type: ignore[arg-type]
    with pytest.raises(InvalidPosition, match="another queue"):
        await client.subscriber(recorded, start=roq.TapePosition("0" * 16, {})).open()
    with pytest.raises(QueueConflict):
        await client.create_queue(recorded, overflow="block", record=roq.Record(days=2))
    with pytest.raises(NoHosts):
        await client.record_queue(recorded, roq.Record(copies=5))
    with pytest.raises(InvalidConfiguration):
        await client.record_queue(recorded, roq.Record(days=-1))
    with pytest.raises(InvalidConfiguration, match="max_frame_bytes"):
        await client.create_queue(f"{recorded}-big", max_frame_bytes=8 * 1024 * 1024, record=roq.Record())
    past = client.subscriber(recorded, start="earliest")
    with pytest.raises(Closed, match="open this subscriber"):
        await past.next_batch()


async def test_a_removed_queues_tapes_are_gone(client: roq.Cluster, cluster: RunningCluster) -> None:
    name = f"rec-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, record=roq.Record())
    async with client.publisher(name, confirm="stored") as publisher:
        await publisher.publish("t", b"old", confirm="stored")
    position = roq.TapePosition((await client.tapes(name)).tapes, {})
    await client.remove_queue(name)
    await client.create_queue(name, record=roq.Record())
    assert await read(client, name) == []
    with pytest.raises(InvalidPosition, match="created anew"):
        await client.subscriber(name, start=position).open()
    await client.remove_queue(name)


async def test_the_past_of_a_slow_reader_is_bounded(client: roq.Cluster, recorded: str) -> None:
    payload, count = bytes(50_000), 1_000
    async with client.publisher(recorded, confirm="stored") as publisher:
        for _ in range(count):
            await publisher.publish("t", payload)
        await publisher.flush(BOUND_SECONDS)
        async with client.subscriber(recorded, start="earliest") as slow:
            await take(slow, 1)
            most = 0
            began = time.monotonic()
            while time.monotonic() - began < 1.0:
                await asyncio.sleep(0.05)
                most = max(most, slow.health().buffered_bytes)
            assert most < 8 * 1024 * 1024
            assert len(await take(slow, count - 1)) == count - 1
            await publisher.publish("t", b"live")
            assert (await take(slow, 1))[0].payload == b"live"
            assert slow.lost == 0


def test_for_plain_code(cluster: RunningCluster) -> None:
    name = f"rec-{uuid.uuid4().hex[:12]}"
    with blocking.connect(cluster.zookeeper) as client:
        client.create_queue(name, record=roq.Record(days=1))
        with client.publisher(name, confirm="stored") as publisher:
            publisher.publish("t", b"0")
            receipt = publisher.publish("t", b"1", confirm="stored")
            assert receipt is not None
            assert receipt.level == "stored"
            assert publisher.flush().level == "stored"
        with client.subscriber(name, start="earliest", follow=False) as past:
            assert [message.payload for message in past] == [b"0", b"1"]
            assert past.position is not None
        with client.subscriber(name, start=past.position, follow=False) as rest:
            assert list(rest) == []
        client.remove_queue(name)

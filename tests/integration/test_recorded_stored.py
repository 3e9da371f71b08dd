"""Subscribers of a recorded queue that follow what is stored: in order and once, whatever Exchanges do; nobody waits for them.

Not covered: how the past is read, and the helpers used here (test_recorded.py); every interleaving (tests/model/test_tapes.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator

import pytest

import roq
from roq.errors import InvalidConfiguration, MessagesLost, NotRecorded
from roq.wire.assignment import ProcessKind
from tests.integration.test_recorded import BOUND_SECONDS, kill, numbers, read, take, until


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test."""
    name = f"rec-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)


@pytest.mark.quick
async def test_what_is_stored_is_followed_without_joining(client: roq.Cluster, recorded: str) -> None:
    """Soon after it is stored, and over Exchanges that come and go; the Monitor does not know of the reader."""
    (first,) = (await client.queue(recorded)).record.exchanges
    lost: list[MessagesLost] = []
    async with (
        client.publisher(recorded, confirm="stored") as publisher,
        client.subscriber(recorded, start="earliest", follow="stored", on_lost=lost.append) as reader,
    ):
        await reader.ready(BOUND_SECONDS)
        number, waits = 0, []
        for _ in range(30):
            await publisher.publish("t", b"%d" % number, confirm="stored")
            began = time.monotonic()
            assert numbers(await take(reader, 1)) == [number]
            waits.append(time.monotonic() - began)
            number += 1
        assert sorted(waits)[15] < 0.1
        for _ in range(2):
            added = (await client.create_exchange(recorded)).exchange
            await client.exchange_active(recorded, added)
            assert (await client.move(recorded, [(publisher.id, added)])).moved == 1
            for _ in range(100):
                await publisher.publish("t", b"%d" % number)
                number += 1
            await publisher.flush(BOUND_SECONDS)
            await client.remove_exchange(recorded, added)
        assert numbers(await take(reader, 200)) == list(range(30, 230))
        assert [member.id for member in (await client.inspect(recorded)).members] == [publisher.id]
        assert list((await client.queue(recorded)).record.exchanges) == [first]
        await publisher.publish("t", b"230", confirm="stored")
        async with asyncio.timeout(2 * BOUND_SECONDS):  # a tape that was not sealed in time is closed by who looks after it
            assert (await anext(reader)).payload == b"230"
        position = reader.position
    assert lost == []
    assert position is not None
    came: list[int] = []
    async with client.subscriber(recorded, start=position, follow="stored") as again:
        while not came or came[-1] < 230:
            came += numbers(await take(again, 1))
    assert came == list(range(came[0], 231)), "from the position on"


async def test_who_follows_what_is_stored_gets_it_over_deaths(client: roq.Cluster, recorded: str) -> None:
    """Two Exchanges, both killed, one of them removed; a publisher on each, one of them moved; a store is killed."""
    (first,) = (await client.queue(recorded)).record.exchanges
    second = (await client.create_exchange(recorded)).exchange
    await client.exchange_active(recorded, second)
    sent, stop = [0, 0], asyncio.Event()

    async def publish(publisher: roq.Publisher, who: int) -> None:
        while not stop.is_set():
            for _ in range(50):
                await publisher.publish(f"t.{who}", b"%d" % sent[who])
                sent[who] += 1
            await publisher.flush(BOUND_SECONDS)

    lost: list[MessagesLost] = []
    async with (
        client.publisher(recorded, confirm="stored") as one,
        client.publisher(recorded, confirm="stored") as other,
        client.subscriber(recorded, start="live", follow="stored", on_lost=lost.append) as reader,
    ):
        await client.move(recorded, [(one.id, first), (other.id, second)])
        publishing = [asyncio.create_task(publish(publisher, who)) for who, publisher in enumerate((one, other))]
        await kill(client, recorded, ProcessKind.EXCHANGE, first)
        await kill(client, recorded, ProcessKind.EXCHANGE, second)
        await kill(client, "", ProcessKind.STORE)
        await client.remove_exchange(recorded, second)
        await asyncio.sleep(0.5)  # some more, by both through the first one
        stop.set()
        await asyncio.wait_for(asyncio.gather(*publishing), BOUND_SECONDS)
        async with asyncio.timeout(2 * BOUND_SECONDS):
            came = [await anext(reader) for _ in range(sum(sent))]
    assert lost == []
    for who in (0, 1):
        assert numbers([message for message in came if message.topic == f"t.{who}"]) == list(range(sent[who]))


async def test_a_replay_away_from_an_idle_exchange_is_not_waited_for_for_ever(client: roq.Cluster, recorded: str) -> None:
    """Nothing is written any more to the tape of the one that was left, and nobody closes it: its Exchange lives."""
    (first,) = (await client.queue(recorded)).record.exchanges
    async with (
        client.publisher(recorded, confirm="stored") as publisher,
        client.subscriber(recorded, start="earliest", follow="stored") as reader,
    ):
        await publisher.publish("t", b"0", confirm="stored")
        assert numbers(await take(reader, 1)) == [0]
        second = (await client.create_exchange(recorded)).exchange
        await client.exchange_active(recorded, second)
        view = await client.view()
        (process,) = [
            one for host in view.hosts if host.report for one in host.report.processes if one.exchange == first and one.pid
        ]
        os.kill(process.pid, signal.SIGKILL)
        await publisher.publish("t", b"1", confirm="stored")
        assert [one.exchanges for one in (await client.inspect(recorded)).members] == [(second,)]
        began = time.monotonic()
        assert numbers(await take(reader, 1)) == [1]
        assert time.monotonic() - began < 14
        async with client.subscriber(recorded, start="earliest", follow="stored") as again:
            assert numbers(await take(again, 2)) == [0, 1]
        assert reader.lost == 0


async def test_a_reader_that_takes_nothing_holds_nobody_back(client: roq.Cluster, recorded: str) -> None:
    payload, count = bytes(50_000), 600
    async with (
        client.publisher(recorded, confirm="stored") as publisher,
        client.subscriber(recorded, start="live", follow="stored") as reader,
        client.subscriber(recorded) as live,
    ):
        await publisher.publish("t", b"first", confirm="stored")
        assert (await take(reader, 1))[0].payload == b"first"
        publishing = asyncio.create_task(publisher.publish_many("t", [payload] * count, confirm="stored"))
        assert len(await take(live, count + 1)) == count + 1
        assert await asyncio.wait_for(publishing, BOUND_SECONDS) is not None
        assert reader.health().buffered_bytes < 8 * 1024 * 1024
        assert len(await take(reader, count)) == count
        assert (reader.lost, reader.health().problems) == (0, ())


async def test_it_begins_in_the_present_and_ends_with_its_queue(client: roq.Cluster) -> None:
    name = f"rec-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, record=roq.Record())
    async with client.publisher(name, confirm="stored") as publisher:
        await publisher.publish("t", b"before", confirm="stored")
        assert len(await read(client, name)) == 1, "so the stores know"
        async with client.subscriber(name, follow="stored") as reader:
            await reader.ready(BOUND_SECONDS)
            assert reader.position is not None
            assert min(reader.position.done.values()) >= 1
            await publisher.publish("t", b"after", confirm="stored")
            assert [message.payload for message in await take(reader, 1)] == [b"after"]
            with pytest.raises(InvalidConfiguration, match="'stored'"):
                client.subscriber(name, follow="ever")
            waiting = asyncio.ensure_future(anext(reader))
            await client.remove_queue(name)
            await client.create_queue(name, record=roq.Record())
            with pytest.raises(NotRecorded, match="created anew"):
                await asyncio.wait_for(waiting, BOUND_SECONDS)
    await client.remove_queue(name)


# --- the last message of each topic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("follow", [False, True, "stored"])
async def test_the_last_message_of_each_topic_comes_first(client: roq.Cluster, recorded: str, follow: bool | str) -> None:
    lost: list[MessagesLost] = []
    async with client.publisher(recorded, confirm="stored") as publisher, client.publisher(recorded) as other:
        for number in range(500):
            await publisher.publish(f"t.{number % 5}", b"%d" % number)
        for number in (500, 501):
            await publisher.publish("t.2", b"%d" % number)
        await publisher.flush(BOUND_SECONDS)
        await publisher.publish("u", b"502", confirm="stored")
        async with client.subscriber(recorded, "t.>", start="last", follow=follow, on_lost=lost.append) as reader:
            assert numbers(await take(reader, 5)) == [495, 496, 498, 499, 501]
            if follow is False:
                assert await reader.next_batch() is None
            else:
                await reader.ready(BOUND_SECONDS)
                waiting = asyncio.ensure_future(anext(reader))
                await other.publish("t.9", b"503")
                assert (await asyncio.wait_for(waiting, BOUND_SECONDS)).payload == b"503"
        assert [payload.payload for payload in await read(client, recorded, "last", "u", "t.2")] == [b"501", b"502"]
    assert lost == []


@pytest.mark.parametrize("follow", [True, "stored"])
async def test_none_of_the_last_messages_is_left_out_while_they_change(
    client: roq.Cluster, recorded: str, follow: bool | str
) -> None:
    """Of each topic one that was the last when it was asked, or a later one; then all that follow, once."""
    sent, stop = 0, asyncio.Event()

    async def publish() -> None:
        nonlocal sent
        async with client.publisher(recorded, confirm="stored") as publisher:
            while not stop.is_set():
                await publisher.publish(f"t.{sent % 20}", b"%d" % sent)
                sent += 1
                await asyncio.sleep(0 if sent % 20 else 0.002)

    publishing = asyncio.create_task(publish())
    await until(lambda: sent > 2_000)
    before = sent
    async with client.subscriber(recorded, start="last", follow=follow) as reader:
        await reader.ready(BOUND_SECONDS)
        await until(lambda: sent > before + 2_000)
        stop.set()
        await publishing
        async with asyncio.timeout(BOUND_SECONDS):
            came = [int((await anext(reader)).payload)]
            while came[-1] < sent - 1:
                came.append(int((await anext(reader)).payload))
        assert reader.lost == 0
    assert came == sorted(set(came)), "each once, in order"
    first, rest = came[:20], came[20:]
    assert {number % 20 for number in first} == set(range(20))
    assert first[0] >= before - 100, "the rest of the past is left out"
    assert rest == list(range(first[-1] + 1, sent))
    assert all(number > first[-1] - 20 for number in first), "none in between is left out"

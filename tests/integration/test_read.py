"""`roq.read` on a real cluster: exact content, windows that touch, bounded memory, an early end.

Not covered: what is kept and lost over deaths and moves (test_recorded.py), Spark (tests/spark).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

import roq
from roq.client import rows
from roq.errors import (
    InvalidAddress,
    InvalidConfiguration,
    InvalidFilter,
    InvalidPosition,
    MessagesLost,
    NotRecorded,
    QueueNotFound,
)
from tests.harness.documented import block
from tests.integration.running import RunningCluster

MESSAGES, PUBLISHERS = 100_000, 4
SETTLED_SECONDS = 0.3  # entries are dated to the millisecond, and clocks are of one machine
BOUND_SECONDS = 10.0


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test."""
    name = f"read-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)


def at(cluster: RunningCluster, queue: str) -> str:
    return f"roq://{cluster.zookeeper}/{queue}"


async def fill(client: roq.Cluster, queue: str, publishers: int, count: int) -> list[tuple[int, int, str, bytes]]:
    """(publisher, sequence, topic, payload) of what they published and is stored."""

    async def publish() -> list[tuple[int, int, str, bytes]]:
        told = []
        async with client.publisher(queue, confirm="stored") as publisher:
            for number in range(count):
                topic, payload = f"t.{number // 100 % 10}", b"%d of %d" % (number, publisher.id)
                await publisher.publish(topic, payload)
                told.append((publisher.id, number + 1, topic, payload))
        return told

    return [row for told in await asyncio.gather(*(publish() for _ in range(publishers))) for row in told]


def as_rows(table: pa.Table) -> list[tuple[int, int, str, bytes]]:
    columns = [table[name].to_pylist() for name in ("publisher", "sequence", "topic", "payload")]
    return list(zip(*columns, strict=True))


async def read(*arguments: Any, **options: Any) -> pa.Table:
    """All of it, beside the test's own loop."""

    def work() -> pa.Table:
        with roq.read(*arguments, on_lost=roq.raise_lost, **options) as batches:
            return batches.read_all()

    async with asyncio.timeout(60):
        return await asyncio.to_thread(work)


async def test_everything_is_read_once_in_order(client: roq.Cluster, cluster: RunningCluster, recorded: str) -> None:
    told = await fill(client, recorded, PUBLISHERS, MESSAGES // PUBLISHERS)
    table = await read(at(cluster, recorded), batch_rows=10_000)
    found = as_rows(table)
    assert table.schema == rows.SCHEMA
    assert max(len(batch) for batch in table.to_batches()) <= 10_000
    assert Counter(found) == Counter(told)
    assert len(found) == len(told)
    for publisher in {row[0] for row in told}:
        assert [row[1] for row in found if row[0] == publisher] == list(range(1, MESSAGES // PUBLISHERS + 1))
    now = time.time_ns()
    assert all(0 <= now - stamp.value < 600e9 for stamp in table["timestamp"][::1000])
    part = await read(recorded, "t.3", "t.7", cluster=cluster.zookeeper)
    assert Counter(as_rows(part)) == Counter(row for row in told if row[2] in ("t.3", "t.7"))


@pytest.mark.quick
async def test_columns_and_windows(client: roq.Cluster, cluster: RunningCluster, recorded: str) -> None:
    times, positions = [], []
    async with client.publisher(recorded, confirm="stored") as publisher:
        for number in range(4):
            headers: dict[str, str | bytes] = {"ä": "ü", "raw": b"\xff"} if number == 1 else {}
            await publisher.publish("eu.paris", b"%d" % number, headers)
            receipt = await publisher.publish("us.boston", b"", confirm="stored")
            assert receipt is not None
            positions.append(receipt.position)
            await asyncio.sleep(SETTLED_SECONDS)
            times.append(datetime.now().astimezone())
    address = at(cluster, recorded)
    table = await read(address)
    assert table["payload"].to_pylist() == [b"0", b"", b"1", b"", b"2", b"", b"3", b""]
    assert table["topic"].to_pylist()[:2] == ["eu.paris", "us.boston"]
    assert table["publisher"].to_pylist() == [publisher.id] * 8
    assert table["headers"].to_pylist() == [[], [], [("ä", "ü".encode()), ("raw", b"\xff")], *[[]] * 5]
    edges: list[Any] = [timedelta(hours=1), *times[:3], None]
    windows = [await read(address, "eu.*", since=since, until=until) for since, until in pairwise(edges)]
    assert [window["payload"].to_pylist() for window in windows] == [[b"0"], [b"1"], [b"2"], [b"3"]]
    places: list[Any] = ["earliest", positions[0], str(positions[1]), positions[2], None]
    windows = [await read(address, "eu.*", since=since, until=until) for since, until in pairwise(places)]
    assert [window["payload"].to_pylist() for window in windows] == [[b"0"], [b"1"], [b"2"], [b"3"]]
    assert len(await read(address, since=positions[3])) == 0
    assert (await read(address, since="last"))["payload"].to_pylist() == [b"3", b""]
    assert (await read(address, "eu.*", since="last", until=times[1]))["payload"].to_pylist() == [b"1"]
    some = await read(address, where="exists(headers['raw']) or topic == 'us.boston'", since=times[0], batch_rows=1)
    assert some["payload"].to_pylist() == [b"1", b"", b"", b""]
    assert len(await read(address, since=positions[2], until=positions[1])) == 0


async def test_a_read_goes_on_behind_another(client: roq.Cluster, cluster: RunningCluster, recorded: str) -> None:
    seen: list[bytes] = []
    position: Any = "earliest"

    def work(since: Any) -> tuple[list[bytes], roq.TapePosition]:
        with roq.read(at(cluster, recorded), since=since, batch_rows=30) as batches:
            taken = [payload for batch in batches for payload in batch["payload"].to_pylist()]
            return taken, batches.position

    async with client.publisher(recorded, confirm="stored") as publisher:
        for number in range(5):
            await publisher.publish_many("t", [b"%d" % number] * 100, confirm="stored")

            taken, position = await asyncio.to_thread(work, position)
            seen += taken
    assert seen == [b"%d" % number for number in range(5) for _ in range(100)]


async def test_reading_as_the_document_does(
    client: roq.Cluster, cluster: RunningCluster, recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client.publisher(recorded) as publisher:
        for number in range(10):
            await publisher.publish(f"{'eu' if number % 2 else 'us'}.paris", b"%d" % number)
        await publisher.publish("eu.paris", b"", confirm="stored")
    text = block("docs/arrow-and-spark.md", "Recorded queues as data")
    text = text.replace("roq://127.0.0.1:2181/orders", at(cluster, recorded))
    await asyncio.to_thread(exec, text, {})
    assert capsys.readouterr().out == "6 rows of the last two hours\n"


async def test_a_slow_reader_holds_it_back_and_ends_it_early(
    client: roq.Cluster, cluster: RunningCluster, recorded: str
) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher:
        await publisher.publish_many("t", [b"%6d" % number + bytes(10_000) for number in range(6_000)], confirm="stored")

    def ended() -> bool:
        return not any(thread.name.startswith("roq.read") for thread in threading.enumerate())

    def work() -> None:
        with roq.read(at(cluster, recorded)) as batches:
            first = next(batches)
            assert 16 * 2**20 <= sum(map(len, first["payload"].to_pylist())) <= 17 * 2**20, "closed by its bytes"
            window = batches._window
            last = window.health().buffered_bytes
            deadline = time.monotonic() + BOUND_SECONDS
            while last < 4 * 2**20 and time.monotonic() < deadline:
                time.sleep(0.05)  # what another thread does has no event here
                last = window.health().buffered_bytes
            time.sleep(0.3)
            assert last <= window.health().buffered_bytes < 7 * 2**20, "no more than is read ahead"
        assert ended()
        assert list(batches) == []
        rest = iter(roq.read(at(cluster, recorded)))
        next(rest)
        del rest
        gc.collect()
        deadline = time.monotonic() + BOUND_SECONDS
        while not ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ended(), "what is let go of ends"
        with roq.read(at(cluster, recorded), batch_rows=1000) as batches:
            table = pa.table(batches)  # as an Arrow stream
        assert len(table) == 6_000
        with roq.read(at(cluster, recorded), batch_rows=1000) as batches:
            assert [int(payload[:6]) for payload in batches.reader().read_all()["payload"].to_pylist()] == list(range(6_000))

    await asyncio.to_thread(work)


async def until_stored(publisher: roq.Publisher, on: bool) -> None:
    """Until the Exchange has heard that it records; or for ever, which ends with NotRecorded once it has heard the other."""
    while True:
        try:
            await publisher.publish("t", b"n", confirm="stored")
        except NotRecorded:
            if not on:
                raise
            await asyncio.sleep(0.05)
            continue
        if on:
            return


async def test_what_is_lost_is_told_in_its_place(client: roq.Cluster, cluster: RunningCluster, recorded: str) -> None:
    async with client.publisher(recorded) as publisher:
        await publisher.publish("t", b"1", confirm="stored")
        await client.record_queue(recorded, None)
        with pytest.raises(NotRecorded):
            await asyncio.wait_for(until_stored(publisher, False), BOUND_SECONDS)
        await publisher.publish("t", b"lost")
        await publisher.flush()
        await client.record_queue(recorded, roq.Record(days=1))
        await asyncio.wait_for(until_stored(publisher, True), BOUND_SECONDS)

    def work() -> tuple[list[bytes], list[MessagesLost], list[bytes]]:
        lost: list[MessagesLost] = []
        with roq.read(at(cluster, recorded), on_lost=lost.append) as batches:
            everything = batches.read_all()["payload"].to_pylist()
        with roq.read(at(cluster, recorded), on_lost=roq.raise_lost) as batches:
            before = next(batches)["payload"].to_pylist()
            with pytest.raises(MessagesLost):
                next(batches)
        return everything, lost, before

    everything, lost, before = await asyncio.to_thread(work)
    assert b"lost" not in everything
    assert everything[: len(before)] == before
    assert before[0] == b"1"
    assert everything[-1] == b"n"
    assert sum(one.count for one in lost) >= 1


async def test_wrong_calls_are_told(client: roq.Cluster, cluster: RunningCluster, recorded: str, queue: str) -> None:
    address = at(cluster, recorded)
    other = roq.TapePosition("0123456789abcdef", {})
    wrong: list[tuple[type[Exception], tuple[Any, ...], dict[str, Any], str]] = [
        (InvalidAddress, ("orders",), {}, "names no cluster: roq://"),
        (InvalidAddress, ("log:///data/tasks",), {}, "names no cluster: roq://"),
        (InvalidConfiguration, (f"{address}?standbys=1",), {}, "for work queues"),
        (InvalidConfiguration, (address,), {"since": "live"}, "a subscriber gets what comes"),
        (InvalidConfiguration, (address,), {"until": "earliest"}, "until is a datetime"),
        (InvalidConfiguration, (address,), {"batch_rows": 0}, "batch_rows is 1 to"),
        (InvalidFilter, (address,), {"where": "price >"}, "price >"),
        (InvalidPosition, (address,), {"since": other}, "of another queue"),
        (InvalidPosition, (address,), {"until": other}, "of another queue"),
        (QueueNotFound, (at(cluster, "no-such"),), {}, "no-such"),
        (NotRecorded, (at(cluster, queue),), {}, "not recorded"),
    ]
    for kind, arguments, options, text in wrong:
        with pytest.raises(kind, match=text):
            await asyncio.to_thread(lambda given=arguments, more=options: roq.read(*given, **more))  # type: ignore[misc]
    assert not any(thread.name == "roq.read" for thread in threading.enumerate())

"""Durable subscribers on a real cluster: read, closed, killed, opened elsewhere and again, with nothing left out.

Not covered: what the GCM does with positions (test_gcm_durables.py), when one is kept (tests/unit/test_durable.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import roq
from roq import blocking
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import DurableNotFound, DurableTaken, InvalidConfiguration, InvalidName, MessagesLost, NotRecorded
from roq.log.replicated.metadata import LogMeta
from roq.wire.assignment import from_json, to_json
from roq.wire.recording import TapePosition
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli, end, hears, line_of

BOUND_SECONDS = 20
NAME = "billing"
READER = """
import asyncio, sys, roq

async def main(zookeeper, queue):
    async with roq.connect(zookeeper) as cluster:
        async with cluster.subscriber(queue, durable="billing", start="earliest") as subscriber:
            async for message in subscriber:
                print(int(message.payload), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test."""
    name = f"dur-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    if await client.queue_exists(name):
        await client.remove_queue(name)


async def store(client: roq.Cluster, queue: str, *numbers: int, each: int = 10) -> None:
    """Stored, an entry for so many at a time or smaller ones."""
    async with client.publisher(queue, confirm="stored") as publisher:
        for first in range(0, len(numbers), each):
            payloads = [b"%d" % number for number in numbers[first : first + each]]
            await publisher.publish_many("t", payloads, confirm="stored")


async def take(subscriber: roq.Subscriber, count: int) -> list[int]:
    async with asyncio.timeout(BOUND_SECONDS):
        return [int((await anext(subscriber)).payload) for _ in range(count)]


async def rest(
    client: roq.Cluster, queue: str, *topics: str, durable: str = NAME, start: str = "earliest", lost: int = 0
) -> list[int]:
    """What a job that ends with the present gets. lost: entries that are told as gone."""
    told: list[MessagesLost] = []
    job = client.subscriber(queue, *topics, start=start, durable=durable, follow=False, on_lost=told.append)
    async with asyncio.timeout(BOUND_SECONDS), job:
        found = [int(message.payload) async for message in job]
    assert sum(one.last - one.first + 1 for one in told) == lost
    return found


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        while not await condition():  # what another process does has no event here
            await asyncio.sleep(0.02)


async def kept(client: roq.Cluster, queue: str) -> TapePosition | None:
    views = [view for view in await client.durables(queue) if view.name == NAME]
    return TapePosition.parse(views[0].position) if views and views[0].position else None


async def entries(client: roq.Cluster, queue: str) -> int:
    """How many the position that is kept counts."""
    position = await kept(client, queue)
    return sum(position.done.values()) if position is not None else -1


async def counts(client: roq.Cluster, queue: str, wanted: int) -> None:
    """Wait until the position that is kept counts so many entries."""

    async def so_many() -> bool:
        return await entries(client, queue) >= wanted

    await until(so_many)


@pytest.mark.quick
async def test_opened_again_it_goes_on_behind_what_was_taken(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(300))
    async with client.subscriber(recorded, durable=NAME, start="earliest") as first:
        assert await take(first, 155) == list(range(155))
    again = await rest(client, recorded)
    assert again == list(range(again[0], 300))
    assert 0 < again[0] <= 155
    (view,) = await client.durables(recorded)
    assert (view.name, 0 < view.opened <= view.kept, f"(pid {os.getpid()})" in view.owner) == (NAME, True, True)


async def test_a_job_gets_each_night_what_has_come_since_exactly(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(100))
    assert await rest(client, recorded) == list(range(100))
    assert await rest(client, recorded) == []
    await store(client, recorded, *range(100, 130))
    assert await rest(client, recorded) == list(range(100, 130))
    assert await rest(client, recorded, durable="another") == list(range(130))
    await store(client, recorded, 130)
    assert await rest(client, recorded, "other.topics") == [], "allowed, and it goes on all the same"
    assert await rest(client, recorded) == []
    assert [view.name for view in await client.durables(recorded)] == ["another", NAME]


async def test_without_a_start_it_begins_with_the_present_and_that_place_is_kept(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(50))
    subscriber = await client.subscriber(recorded, durable=NAME).open()
    await subscriber.ready(BOUND_SECONDS)
    await store(client, recorded, *range(50, 60))
    assert await take(subscriber, 1) == [50]
    await subscriber.close()
    assert await rest(client, recorded) == list(range(50, 60)), "of one entry, from which nobody came back"
    await store(client, recorded, *range(60, 70))
    async with client.subscriber(recorded, durable=NAME) as live:
        assert await take(live, 10) == list(range(60, 70))
        await live.ready(BOUND_SECONDS)
        await store(client, recorded, *range(70, 80))
        assert await take(live, 10) == list(range(70, 80))
    again = await rest(client, recorded)
    assert again == list(range(80 - len(again), 80))


async def test_one_that_reads_the_stores_alone_goes_on_too(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(20))
    async with client.subscriber(recorded, durable=NAME, start="earliest", follow="stored") as first:
        assert await take(first, 20) == list(range(20))
        await store(client, recorded, *range(20, 30))
        assert await take(first, 10) == list(range(20, 30))
        waiting = asyncio.ensure_future(take(first, 1))
        await counts(client, recorded, 3)
        waiting.cancel()
    await store(client, recorded, *range(30, 40))
    async with client.subscriber(recorded, durable=NAME, follow="stored") as second:
        found = await take(second, 1)
        assert found[0] in {20, 30}
        assert found + await take(second, 39 - found[0]) == list(range(found[0], 40))


async def test_the_latest_of_each_topic_are_for_the_first_time(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(30))
    async with client.subscriber(recorded, durable=NAME, start="last", follow="stored") as first:
        assert await take(first, 1) == [29]
    assert await rest(client, recorded, start="last") == [29], "nobody came back from it, so nothing else is kept"
    await store(client, recorded, *range(30, 40))
    assert await rest(client, recorded, start="last") == list(range(30, 40))


async def test_what_expired_in_its_absence_is_told(cluster: RunningCluster, client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(50))
    assert await rest(client, recorded) == list(range(50))
    before = await entries(client, recorded)
    await store(client, recorded, *range(50, 100))
    await client.stop_queue(recorded)
    (view,) = (await client.tapes(recorded)).views
    meta = from_json(view.meta, LogMeta)
    expired = msgspec.structs.replace(meta, trimmed=meta.next_first - 1, segments=())
    session = await Session.connect(cluster.zookeeper)
    try:
        await session.set(paths.log(view.log), to_json(expired), -1)  # as retention leaves it when all of it is too old
    finally:
        await session.close()
    assert await rest(client, recorded, lost=expired.trimmed - before) == []
    assert await rest(client, recorded) == [], "it is told once"
    await client.start_queue(recorded)
    await store(client, recorded, *range(100, 110))
    assert await rest(client, recorded) == list(range(100, 110))


async def reader(zookeeper: str, queue: str) -> Process:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return await asyncio.create_subprocess_exec(sys.executable, "-c", READER, zookeeper, queue, stdout=PIPE, env=environment)


async def printed(process: Process, last: int) -> list[int]:
    """Its lines up to that number."""
    assert process.stdout is not None
    found = list[int]()
    async with asyncio.timeout(BOUND_SECONDS):
        while not found or found[-1] < last:
            line = await process.stdout.readline()
            assert line, "the reader ended"
            found.append(int(line))
    return found


async def test_a_killed_reader_repeats_only_what_was_not_kept(
    cluster: RunningCluster, client: roq.Cluster, recorded: str
) -> None:
    await store(client, recorded, *range(200))
    process = await reader(cluster.zookeeper, recorded)
    assert await printed(process, 199) == list(range(200))
    await counts(client, recorded, 20)
    await store(client, recorded, *range(200, 300))
    came = await printed(process, 250)
    process.kill()
    assert process.stdout is not None
    came += [int(line) for line in (await process.stdout.read()).splitlines()]
    await process.wait()
    position = await kept(client, recorded)
    assert position is not None
    async with client.subscriber(recorded, start=position, follow=False) as past:
        expected = [int(message.payload) async for message in past]
    again = await rest(client, recorded)
    assert again == expected == list(range(again[0], 300))
    assert 200 <= again[0] <= came[-1] + 1


async def test_who_opened_it_before_fails_and_the_other_goes_on(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(100))
    async with client.subscriber(recorded, durable=NAME, start="earliest") as first:
        assert await take(first, 100) == list(range(100))
        reading = asyncio.ensure_future(take(first, 1_000))
        await counts(client, recorded, 10)
        async with (
            roq.connect(client.zookeeper) as elsewhere,
            elsewhere.subscriber(recorded, durable=NAME, start="earliest") as second,
        ):
            await second.ready(BOUND_SECONDS)
            await store(client, recorded, *range(100, 150))
            assert await take(second, 50) == list(range(100, 150))
            with pytest.raises(DurableTaken, match=f"'{NAME}' of queue '{recorded}' was opened since by .*pid"):
                await asyncio.wait_for(reading, BOUND_SECONDS)
            assert first.health().problems
    again = await rest(client, recorded)
    assert again == list(range(150 - len(again), 150))


async def test_forgotten_while_it_is_open_it_fails_and_begins_anew(client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(10))
    async with client.subscriber(recorded, durable=NAME, start="earliest") as subscriber:
        assert await take(subscriber, 10) == list(range(10))
        await client.forget_durable(recorded, NAME)
        reading = asyncio.ensure_future(take(subscriber, 100))
        await store(client, recorded, *range(10, 20))
        with pytest.raises(DurableTaken, match="forgotten"):
            await asyncio.wait_for(reading, BOUND_SECONDS)
    assert await client.durables(recorded) == []
    with pytest.raises(DurableNotFound, match=f"no durable subscriber '{NAME}'"):
        await client.forget_durable(recorded, NAME)
    assert await rest(client, recorded) == list(range(20))


async def test_what_it_needs(client: roq.Cluster, queue: str) -> None:
    with pytest.raises(NotRecorded, match="roq queue record"):
        await client.subscriber(queue, durable=NAME).open()
    with pytest.raises(NotRecorded):
        await client.durables(queue)
    for name in ("a/b", ""):
        with pytest.raises(InvalidName, match="durable subscriber"):
            client.subscriber(queue, durable=name)
    with pytest.raises(InvalidConfiguration, match="durable"):
        client.subscriber(queue, durable=NAME, group="g")  # type: ignore[call-overload]


async def test_a_removed_queue_leaves_nothing_in_zookeeper(cluster: RunningCluster, client: roq.Cluster, recorded: str) -> None:
    await store(client, recorded, *range(10))
    session = await Session.connect(cluster.zookeeper)
    try:
        before = await session.children(paths.DURABLES)
        async with client.subscriber(recorded, durable=NAME, start="earliest") as subscriber:
            assert await take(subscriber, 10) == list(range(10))
            (folder,) = {*await session.children(paths.DURABLES)} - {*before}
            assert await session.children(f"{paths.DURABLES}/{folder}") == [NAME]
            await client.remove_queue(recorded)

        async def gone() -> bool:
            return folder not in await session.children(paths.DURABLES)

        await until(gone)
    finally:
        await session.close()
    await client.create_queue(recorded, record=roq.Record(days=1))
    await store(client, recorded, 1, 2, 3)
    assert await rest(client, recorded) == [1, 2, 3], "another queue of the same name"


def test_in_plain_code(cluster: RunningCluster) -> None:
    name = f"dur-{uuid.uuid4().hex[:12]}"
    with blocking.connect(cluster.zookeeper) as client:
        client.create_queue(name, record=roq.Record(days=1))
        with client.publisher(name, confirm="stored") as publisher:
            publisher.publish_many("t", [b"%d" % number for number in range(5)], confirm="stored")
        with client.subscriber(name, durable=NAME, start="earliest", follow=False) as job:
            assert [int(message.payload) for message in job] == list(range(5))
        with client.subscriber(name, durable=NAME, start="earliest", follow=False) as job:
            assert list(job) == []
        (view,) = client.durables(name)
        assert view.name == NAME
        client.forget_durable(name, NAME)
        assert client.durables(name) == []
        client.remove_queue(name)


# --- the leader goes away ---------------------------------------------------------------------------------------------


@pytest.fixture
def two_gcms(tmp_path: Path) -> Iterator[RunningCluster]:
    """A cluster of its own: its leaders are killed."""
    running = RunningCluster(tmp_path, gcms=2, hosts=1, session_seconds=2.0)
    yield running
    running.stop()


async def test_messages_flow_on_while_nobody_leads_and_the_next_leader_keeps_on(two_gcms: RunningCluster) -> None:
    local = two_gcms.local
    async with roq.connect(two_gcms.zookeeper) as client:
        await client.create_queue("q", overflow="block", record=roq.Record(days=1))
        await store(client, "q", *range(50))
        async with (
            client.publisher("q", confirm="stored") as publisher,
            client.subscriber("q", durable=NAME, start="earliest") as subscriber,
        ):
            assert await take(subscriber, 50) == list(range(50))
            await subscriber.ready(BOUND_SECONDS)

            async def live() -> bool:
                return subscriber._past is None  # until then it asks the leader for the tapes

            await until(live)
            before = await entries(client, "q")
            names = list(local.gcms)
            for name in names:
                two_gcms.call(local.kill_gcm(name))
            for number in range(50, 80):
                await publisher.publish("t", b"%d" % number, confirm="stored")
                assert await take(subscriber, 1) == [number]
            two_gcms.call(local.start_gcm(names[0]))
            for number in range(80, 110):
                await publisher.publish("t", b"%d" % number, confirm="stored")
                assert await take(subscriber, 1) == [number]
            reading = asyncio.ensure_future(take(subscriber, 1))
            await counts(client, "q", before + 50)
            assert not reading.done()
            await publisher.publish("t", b"110", confirm="stored")
            assert await reading == [110]
        again = await rest(client, "q")
        assert again == list(range(111 - len(again), 111))
        assert len(again) < 30


# --- from the shell ---------------------------------------------------------------------------------------------------


def test_from_the_shell(cluster: RunningCluster) -> None:
    cli, name = Cli(cluster.zookeeper), f"dur-{uuid.uuid4().hex[:12]}"
    cli.run("queue", "create", name, "--record", "1d")
    for line in (b"one\n", b"two\n", b"three\n"):
        cli.run("pub", name, "t", "--confirm", "stored", stdin=line)
    for line in (b"one\n", b"two\n"):
        done = cli.run("sub", name, "--durable", NAME, "--start", "earliest", "--count", "1")
        assert done.stdout == line
        assert f"go on with --durable {NAME}" in done.stderr.decode()
    with cli.started("sub", name, "--durable", NAME) as sub:
        hears(sub.stdout, b"three\n")
        assert line_of(sub.stderr) == b"roq sub: ready\n"
        sub.send_signal(signal.SIGINT)
        end(sub)
    (row,) = json.loads(cli.run("queue", "durables", name, "--json").stdout)
    assert (row["name"], row["position"][:3], row["tapes"]) == (NAME, "p1.", 1)
    assert row["entries"] >= 3
    assert NAME in cli.run("queue", "durables", name).stdout.decode()
    assert b"no durable subscriber" in cli.run("queue", "forget-durable", name, "other", code=1).stderr
    assert cli.run("queue", "forget-durable", name, NAME).stderr == f"forgot {NAME} of {name}\n".encode()
    assert json.loads(cli.run("queue", "durables", name, "--json").stdout) == []
    cli.run("queue", "rm", name)

"""A program that knows nothing but ZeroMQ and docs/wire.md publishes and subscribes (examples/plain_zmq.py)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import roq

PROGRAM = Path(__file__).parents[2] / "examples" / "plain_zmq.py"
BOUND_SECONDS = 20


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), *arguments, stdout=asyncio.subprocess.PIPE)


@pytest.mark.quick
async def test_a_program_without_roq_takes_part(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue):  # which waits until the Exchange has told its Monitor where it is
        (exchange,) = (await client.inspect(queue)).exchanges
    where = exchange.exchange
    reader = await start("subscribe", f"{where.address}:{where.back}", "--topic", "eu.", "--count", "4")
    assert reader.stdout is not None
    try:
        async with asyncio.timeout(BOUND_SECONDS), client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
            assert await reader.stdout.readline() == b"subscribed\n"
            first = b""
            while not first:  # a SUB can't say when its subscription has arrived
                await publisher.publish("eu.ours", b"ours")
                try:
                    async with asyncio.timeout(0.1):
                        first = await reader.stdout.readline()
                except TimeoutError:
                    continue
            assert first.startswith(f"eu.ours ours ({publisher.id:016x} ".encode())
            writer = await start("publish", f"{where.address}:{where.front}", "--topic", "eu.theirs", "one", "two", "three")
            told, _ = await writer.communicate()
            assert told == b"3 forwarded\n"
            theirs = [message async for message in taken(subscriber, 3)]
            assert [(one.payload, one.sequence) for one in theirs] == [(b"one", 1), (b"two", 2), (b"three", 3)]
            lines = [line async for line in reader.stdout]
            assert [line.split()[:2] for line in lines if line.startswith(b"eu.theirs")][:3] == [
                [b"eu.theirs", word] for word in (b"one", b"two", b"three")
            ]
            assert await reader.wait() == 0
    finally:
        if reader.returncode is None:
            reader.kill()
            await reader.wait()


async def taken(subscriber: roq.Subscriber, count: int):  # type: ignore[no-untyped-def]
    """The next so many on eu.theirs."""
    async for message in subscriber:
        if message.topic == "eu.theirs":
            yield message
            count -= 1
        if not count:
            return

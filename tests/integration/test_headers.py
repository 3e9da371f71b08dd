"""Headers of messages on a real cluster: beside messages without, over the death of an Exchange, plain code and the shell."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

import roq
from roq import blocking
from roq.errors import InvalidHeaders, MessagesLost, PayloadTooLarge
from roq.wire.headers import HEADERS_BYTES_MAX
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli, line_of

BOUND_SECONDS = 20
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def take(subscriber: roq.Subscriber, count: int) -> list[roq.Message]:
    async with asyncio.timeout(BOUND_SECONDS):
        return [await anext(subscriber) for _ in range(count)]


@pytest.mark.quick
async def test_messages_with_and_without_headers_keep_their_order(client: roq.Cluster, queue: str) -> None:
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        for number in range(600):
            headers: dict[str, str | bytes] = {"traceparent": TRACE, "n": b"%d" % number, "empty": ""}
            await publisher.publish(f"t.{number % 3}", b"%d" % number, headers if number % 2 else None)
            headers["n"] = b"changed afterwards"
        await publisher.publish_many("t.0", [b"many", b"many"], {"content-type": "text/plain"})
        await publisher.publish("t.0", b"none", {})
        messages = await take(subscriber, 603)
    for number, message in enumerate(messages[:600]):
        wanted = {"traceparent": TRACE, "n": b"%d" % number, "empty": ""} if number % 2 else {}
        assert (message.payload, message.sequence, message.headers) == (b"%d" % number, number + 1, wanted)
    assert [(one.payload, one.headers) for one in messages[600:]] == [
        (b"many", {"content-type": "text/plain"}),
        (b"many", {"content-type": "text/plain"}),
        (b"none", {}),
    ]


async def test_what_is_refused_leaves_the_publisher_as_it_was(client: roq.Cluster) -> None:
    await client.create_queue("small-frames", max_frame_bytes=4096)
    async with client.subscriber("small-frames") as subscriber, client.publisher("small-frames") as publisher:
        with pytest.raises(InvalidHeaders, match="at most 4096"):
            await publisher.publish("t", b"x", {"a": "x" * HEADERS_BYTES_MAX})
        with pytest.raises(PayloadTooLarge, match="payload of 1000 bytes with headers of 30"):
            await publisher.publish("t", bytes(1000), {"a": "x" * 3000})
        with pytest.raises(InvalidHeaders):
            await publisher.publish_many("t", [b"x"], {"roq-own": "x"})
        await publisher.publish("t", bytes(1000), {"a": "x" * 2000})
        (message,) = await take(subscriber, 1)
        assert (message.sequence, message.headers) == (1, {"a": "x" * 2000})
    await client.remove_queue("small-frames")


async def test_headers_outlive_an_exchange(client: roq.Cluster, queue: str) -> None:
    told: list[MessagesLost] = []
    info = await client.queue(queue)
    host = next(one for one in await client.hosts() if one.host == info.record.monitor_host)
    assert host.report is not None
    process = next(one for one in host.report.processes if one.exchange in info.record.exchanges)
    async with client.subscriber(queue, on_lost=told.append) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish("t", b"", {"n": "1"})
        await take(subscriber, 1)
        os.kill(process.pid, signal.SIGKILL)
        for number in range(2, 102):  # kept, and sent again in bundles
            await publisher.publish("t", b"", {"n": str(number)} if number % 2 else None)
            await asyncio.sleep(0)
        await publisher.flush()
        messages = await take(subscriber, 100)
    assert [one.sequence for one in messages] == list(range(2, 102))
    assert all(one.headers == ({"n": str(one.sequence)} if one.sequence % 2 else {}) for one in messages)
    assert told == []


def test_plain_code_has_them_too(cluster: RunningCluster, queue: str) -> None:
    with (
        blocking.connect(cluster.zookeeper) as client,
        client.subscriber(queue) as subscriber,
        client.publisher(queue) as publisher,
    ):
        headers: dict[str, str | bytes] = {"a": "b"}
        publisher.publish("t", b"one", headers)
        headers["a"] = "changed afterwards"
        publisher.publish_many("t", [b"two"], {"c": b"d"})
        with pytest.raises(InvalidHeaders):
            publisher.publish("t", b"three", {"": "x"})
        publisher.flush()
        messages = iter(subscriber)
        found = [next(messages) for _ in range(2)]
    assert [(one.payload, one.headers) for one in found] == [(b"one", {"a": "b"}), (b"two", {"c": b"d"})]


def test_headers_are_set_and_shown(cluster: RunningCluster, queue: str) -> None:
    cli = Cli(cluster.zookeeper)
    with cli.subscribed(queue, "--json", "--count", "2") as sub:
        cli.run("pub", queue, "t", "-H", "content-type=text/plain", "--header", "eq=a=b", stdin=b"one\n")
        cli.run("pub", queue, "t", stdin=b"two\n")
        annotated, bare = (json.loads(line_of(sub.stdout)) for _ in range(2))
    assert annotated["headers"] == {"content-type": "text/plain", "eq": "a=b"}
    assert "headers" not in bare
    assert b"NAME=TEXT" in cli.run("pub", queue, "t", "-H", "no-value", stdin=b"x\n", code=1).stderr
    assert b"RoQ's own" in cli.run("pub", queue, "t", "-H", "roq-x=1", stdin=b"x\n", code=1).stderr

"""Conditions of subscribers on a real cluster: live and of the past, from programs and from the shell.

Not covered: what a condition says (tests/unit/test_where.py), groups.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from roq import blocking
from tests.harness.documented import block, run
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli
from tests.integration.test_documented import printed

BOUND_SECONDS = 20
WHERE = "body.price > 100 and region == 'eu'"


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue, removed after the test."""
    name = f"where-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    yield name
    await client.remove_queue(name)


async def published(publisher: roq.Publisher, numbers: range) -> list[int]:
    """On two topics, the region in a header or in the body; the numbers of those that WHERE selects."""
    for number in numbers:
        body = {"number": number, "price": number % 200, "region": ("eu", "us")[number % 2]}
        headers: dict[str, str | bytes] | None = {"region": "us"} if number % 6 == 0 else None
        await publisher.publish(f"t.{number % 2}", b"no JSON" if number % 10 == 8 else json.dumps(body).encode(), headers)
    return [number for number in numbers if number % 200 > 100 and number % 2 == 0 and number % 6 and number % 10 != 8]


def numbers(messages: list[roq.Message]) -> list[int]:
    return [json.loads(message.payload)["number"] for message in messages]


@pytest.mark.quick
async def test_the_past_and_then_what_comes(client: roq.Cluster, recorded: str) -> None:
    async with client.publisher(recorded, confirm="stored") as publisher, asyncio.timeout(BOUND_SECONDS):
        expected = await published(publisher, range(2_000))
        await publisher.flush()
        async with client.subscriber(recorded, start="earliest", follow=False, where=WHERE) as past:
            assert numbers([message async for message in past]) == expected
            assert (past.messages, past.unselected, past.lost) == (len(expected), 2_000 - len(expected), 0)
        position = past.position
        async with client.subscriber(recorded, "t.0", start="earliest", where=WHERE) as late:
            assert numbers([await anext(late) for _ in expected]) == expected
            await late.ready(BOUND_SECONDS)
            further = await published(publisher, range(2_000, 4_000))
            came = [await anext(late) for _ in further]
            assert numbers(came) == further
            assert came[1].sequence - came[0].sequence > 1, "numbers are what the publisher gave"
            assert late.lost == 0
        await publisher.flush()
        async with client.subscriber(recorded, start=position or "", follow=False, where=WHERE) as behind:
            assert numbers([message async for message in behind])[-len(further) :] == further
        async with client.subscriber(recorded, start="last", follow=False, where=WHERE) as last:
            assert numbers([message async for message in last]) == further[-1:], "of each topic, of those that are selected"


async def test_one_that_selects_nothing_keeps_up(client: roq.Cluster, queue: str) -> None:
    """overflow "block": a publisher waits for a subscriber that does not take anything, and that is not one."""
    payload = json.dumps({"price": 1, "note": "x" * 1_000}).encode()
    async with (
        client.subscriber(queue, where="price > 1") as nothing,
        client.publisher(queue) as publisher,
        asyncio.timeout(BOUND_SECONDS),
    ):
        waiting = asyncio.ensure_future(anext(nothing))
        for _ in range(100):
            await publisher.publish_many("t", [payload] * 400)
        await publisher.publish("t", b'{"price": 2}')
        await publisher.flush()
        assert (await waiting).sequence == 40_001
        assert (nothing.messages, nothing.unselected, nothing.lost) == (1, 40_000, 0)


async def test_what_is_wrong_is_refused_before_anything_is_connected(client: roq.Cluster) -> None:
    with pytest.raises(roq.InvalidFilter, match="column 7") as refused:
        client.subscriber("no-such-queue", where="price !> 1")
    assert refused.value.column == 7


def test_from_plain_code(cluster: RunningCluster) -> None:
    with blocking.connect(cluster.zookeeper) as connected:
        name = f"where-{uuid.uuid4().hex[:12]}"
        connected.create_queue(name)
        with connected.subscriber(name, where="price > 1") as dear, connected.publisher(name) as publisher:
            for price in (1, 2, 1, 3):
                publisher.publish("t", b'{"price": %d}' % price)
            publisher.flush()
            messages = iter(dear)
            assert [next(messages).payload for _ in range(2)] == [b'{"price": 2}', b'{"price": 3}']
        connected.remove_queue(name)


@pytest.mark.quick
def test_what_the_document_shows(cluster: RunningCluster, tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    follow, read = block("docs/filters.md", "Content filters").splitlines()
    printed("roq queue create orders --record 1d", tmp_path, **here)
    try:
        for line, headers in (("120", "-H region=us"), ("99", ""), ("121", "-H ce-type=order.paid")):
            body = f'{{"price": {line}, "region": "eu"}}'
            printed(f"echo '{body}' | roq pub orders eu.paris --confirm stored {headers}", tmp_path, **here)
        assert printed(f"{follow} --start earliest -n 1", tmp_path, **here) == '{"price": 121, "region": "eu"}\n'
        assert printed(read, tmp_path, **here) == '{"price": 121, "region": "eu"}\n'
        source = block("docs/filters.md", "Content filters", 2).replace("127.0.0.1:2181", cluster.zookeeper)
        assert run(source, tmp_path) == '{"price": 120, "items": [{"sku": "b"}]}\n'
    finally:
        printed("roq queue rm orders", tmp_path, **here)


def test_a_wrong_one_in_the_shell(cluster: RunningCluster) -> None:
    for command in (("sub", "none"), ("queue", "read", "none")):
        told = Cli(cluster.zookeeper).run(*command, "--where", "price > 'a' + 1", code=1).stderr.decode()
        assert told.startswith("roq: InvalidFilter: column 9 of the condition: ")
        assert told.endswith("\n  price > 'a' + 1\n          ^\n")

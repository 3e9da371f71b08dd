"""Some topics of a recorded queue on a real cluster: what is not of them is passed over, and nothing of them is missing.

Not covered: which entries are read by an index, tests/unit/test_tape_index.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

import roq
from roq.errors import MessagesLost
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.reader import Entry, SegmentReader
from roq.wire.tape_index import INDEX_EVERY

BOUND_SECONDS = 60
COUNT = INDEX_EVERY + 200  # entries at least: each message is one
RARE = (17, 600, 601, INDEX_EVERY + 100)


@pytest.fixture
async def recorded(client: roq.Cluster) -> AsyncIterator[str]:
    """A fresh recorded queue with COUNT messages, each in an entry of its own, of which RARE have the topic `rare`."""
    name = f"rec-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    async with asyncio.timeout(BOUND_SECONDS), client.publisher(name, confirm="stored") as publisher:
        for number in range(1, COUNT + 1):
            topic = "rare.one" if number in RARE else f"often.{number % 7}"
            await publisher.publish(topic, b"%d" % number, confirm="stored")
    yield name
    await client.remove_queue(name)


class Given:
    """Entries that stores gave since it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.positions = set[int]()
        read_from = SegmentReader.read_from

        async def counted(
            reader: SegmentReader, meta: LogMeta, after: int, wait: float = 0.0, *, ask_all: bool = False, last: int = 0
        ) -> list[Entry]:
            run = await read_from(reader, meta, after, wait, ask_all=ask_all, last=last)
            self.positions.update(position for position, _ in run)
            return run

        monkeypatch.setattr(SegmentReader, "read_from", counted)


@pytest.mark.quick
async def test_what_is_not_wanted_is_passed_over_and_nothing_is_reported(
    client: roq.Cluster, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[MessagesLost] = []
    async with asyncio.timeout(BOUND_SECONDS):
        async with client.subscriber(recorded, start="earliest", follow=False, on_lost=lost.append) as everything:
            assert len([message async for message in everything]) == COUNT
            end = everything.position
        assert end is not None
        given = Given(monkeypatch)
        async with client.subscriber(recorded, "rare.*", start="earliest", follow=False, on_lost=lost.append) as past:
            assert [int(message.payload) async for message in past] == list(RARE)
            place = past.position
            assert place is not None
            assert all(place.done[one] >= last for one, last in end.done.items()), "it is behind what was passed over, too"
        assert sum(position < INDEX_EVERY for position in given.positions) < INDEX_EVERY / 4
        async with client.subscriber(recorded, "rare", start="earliest", on_lost=lost.append) as subscriber:
            assert [int((await anext(subscriber)).payload) for _ in RARE] == list(RARE)
            await subscriber.ready()
            async with client.publisher(recorded) as publisher:
                await publisher.publish("often.0", b"")
                await publisher.publish("rare.two", b"0")
                await publisher.flush()
            message = await anext(subscriber)
            assert (message.topic, message.payload) == ("rare.two", b"0")
        async with client.subscriber(recorded, "rare", start=place, follow=False, on_lost=lost.append) as rest:
            assert [message.topic async for message in rest] == ["rare.two"]
    assert lost == []

"""What is older than a recorded queue keeps goes from its stores, and who was behind it is told.

Not covered: which segments go (tests/unit/test_retention.py).
"""

from __future__ import annotations

import asyncio

import pytest

import roq
from roq.log.replicated.metadata import LogMeta
from roq.wire.assignment import ProcessKind, from_json
from tests.integration.test_durable import entries, recorded, rest, store  # noqa: F401 - recorded is a fixture
from tests.integration.test_recorded import kill, numbers, read

KEPT = roq.Record(days=3 / 86_400)
EXPIRED_SECONDS = 90.0  # tapes are looked at twice a minute


async def trimmed(client: roq.Cluster, queue: str, log: str) -> int:
    """How many entries of this tape have expired."""
    (meta,) = (from_json(view.meta, LogMeta) for view in (await client.tapes(queue)).views if view.log == log)
    return meta.trimmed


@pytest.mark.timeout(180)
async def test_what_is_too_old_is_gone_and_who_was_behind_is_told(client: roq.Cluster, recorded: str) -> None:  # noqa: F811
    await client.record_queue(recorded, KEPT)
    await store(client, recorded, *range(50))
    assert await rest(client, recorded) == list(range(50))
    before = await entries(client, recorded)
    await store(client, recorded, *range(50, 100))
    (tape,) = (await client.tapes(recorded)).views
    await kill(client, recorded, ProcessKind.EXCHANGE)  # the next one closes the tape, and a whole segment is what goes
    await store(client, recorded, *range(100, 110))
    async with asyncio.timeout(EXPIRED_SECONDS):
        while not (gone := await trimmed(client, recorded, tape.log)):  # another process does it: no event here
            await asyncio.sleep(0.2)
    assert gone > before, "what nobody had taken is among it"
    assert numbers(await read(client, recorded)) == list(range(100, 110))
    assert await rest(client, recorded, lost=gone - before) == list(range(100, 110))
    assert await rest(client, recorded) == [], "it is told once"

"""A buffer that must spill: to the disk while that has room, and no further than the logs of work queues, which share it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roq.errors import Overloaded, Unavailable
from roq.runtime.observe import Counters
from roq.shuffle.node.buffer import Buffer
from roq.shuffle.node.memory import BlockMemory, Budget
from roq.wire import shuffle as wire
from roq.wire.gcm import ReportRuns, TableInfo
from tests.harness.shuffle_rows import SPEC, run_of

MEMORY = 1 << 20
PAD = 10_000


async def no_leader(runs: ReportRuns) -> TableInfo:
    raise Unavailable


async def no_store(endpoint: str, request: wire.StorePieces) -> None:
    raise Unavailable


@pytest.mark.parametrize("free_bytes_min", [0, 1 << 60])
async def test_what_is_spilled_leaves_room_on_the_disk(tmp_path: Path, free_bytes_min: int) -> None:
    counters = Counters()
    memory = BlockMemory(tmp_path / "spill", Budget(MEMORY), counters, free_bytes_min)
    buffer = Buffer("h", memory, counters, no_leader, no_store)
    buffer.open(wire.OpenAttempt("s", "visits", SPEC, 0, "a", "w"))
    blocks = run_of(range(400), 1, pad=PAD)
    refused = False
    for number, block in enumerate(blocks):
        try:
            buffer.send(wire.SendBlocks("s", 0, "a", number, 0, [block]))
        except Overloaded:
            refused = True
            break
        async with asyncio.timeout(10):
            while buffer._memory.budget.spill and not counters["spills_failed"]:  # it is on its way to the file
                await asyncio.sleep(0)
    assert refused is (free_bytes_min > 0), "writers wait, as their blocks stay in memory"
    assert bool(counters["bytes_spilled"]) is (free_bytes_min == 0)
    await buffer.close()

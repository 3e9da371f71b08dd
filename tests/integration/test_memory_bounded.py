"""Memory is bounded when a subscriber is stuck: half a gibibyte passes it by, and nobody keeps it (invariant D6).

`overflow="drop"`: its frames are dropped. `overflow="block"`: publishers wait for it until it is disconnected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import pytest

import roq
from roq.errors import MessagesLost, SlowSubscriber
from roq.testing import LoopbackCluster
from roq.tools.chaos.watch import read

NO_QUICK_TEST = "half a gibibyte has to pass"
PAYLOAD = bytes(64 * 1024 - 200)
MESSAGES = 8_000
MIB = 1 << 20
GROWTH_MAX = {"client": 192, "exchange": 64, "monitor": 16, "scaling": 8, "roq-hcm": 8, "roq-fork-server": 8}  # MiB
# the client holds the publisher's replay buffer (64 MiB) and the buffers of two subscribers


def memory(pids: Mapping[str, int]) -> dict[str, int]:
    found = {name: read(pid)[1] for name, pid in pids.items()}
    return {name: reading.memory for name, reading in found.items() if reading is not None}


async def watch(pids: Mapping[str, int], most: dict[str, int]) -> None:
    while True:
        for name, value in memory(pids).items():
            most[name] = max(most.get(name, 0), value)
        await asyncio.sleep(0.1)


class Tally:
    """What one subscriber got or was told as lost; `all_known` when that makes MESSAGES."""

    def __init__(self) -> None:
        self.known, self.lost = 0, 0
        self.all_known = asyncio.Event()

    def told(self, gap: MessagesLost) -> None:
        self.lost += gap.count
        self.add(gap.count)

    def add(self, messages: int) -> None:
        self.known += messages
        if self.known == MESSAGES:
            self.all_known.set()

    async def read(self, subscriber: roq.Subscriber) -> None:
        async for batch in subscriber.batches():
            self.add(len(batch))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("overflow", ["drop", "block"])
async def test_a_stuck_subscriber_fills_nobodys_memory(overflow: str) -> None:
    async with LoopbackCluster(gcms=1, hcms=1, zookeeper="java") as cluster, cluster.connect() as client:
        await client.create_queue("q", overflow=overflow)
        await cluster.wait_queue_ready("q")
        pids = {one.name.partition("/")[0]: one.pid for one in await cluster.system_processes("host-1")} | {
            "client": os.getpid()
        }
        assert set(pids) == set(GROWTH_MAX)
        before, most = memory(pids), dict[str, int]()
        watching = asyncio.create_task(watch(pids, most))
        async with client.subscriber("q") as stuck:
            tally = Tally()
            async with client.subscriber("q", on_lost=tally.told) as other, client.publisher("q") as publisher:
                reading = asyncio.create_task(tally.read(other))
                async with asyncio.timeout(60):
                    for _ in range(MESSAGES):
                        await publisher.publish("t", PAYLOAD)
                    await publisher.flush(30)
                    await tally.all_known.wait()
            await reading
            watching.cancel()
            if overflow == "block":
                assert tally.lost == 0
                with pytest.raises(SlowSubscriber):
                    await Tally().read(stuck)
        grown = {name: (value - before[name]) / MIB for name, value in most.items()}
        assert {name: value for name, value in grown.items() if value > GROWTH_MAX[name]} == {}

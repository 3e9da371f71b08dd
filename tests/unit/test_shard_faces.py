"""The asynchronous face of a queue of which one shard has no master: puts, acks and leases of the others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

import roq
from roq.errors import Unavailable
from roq.wire.shards import marked, unmarked
from roq.wire.task import LeasedTask, NewTask, Settlement
from roq.wire.work_queue import TaskSettings
from roq.workqueue import batcher
from roq.workqueue import queue as queue_module
from roq.workqueue.contract import RoundTrip
from roq.workqueue.lease_keeper import DONE
from roq.workqueue.memory import MemoryQueue

SHARDS = 3
SOON = 10.0  # seconds that nothing here takes, unless it waits for the shard without a master


class BrokenShards(MemoryQueue):
    """Tasks in memory, each with the token of a shard; what comes to that of number `broken` waits until it is `mended`."""

    def __init__(self) -> None:
        super().__init__(TaskSettings())
        self.broken, self.mended = -1, threading.Event()
        self.open_shards = SHARDS
        self.put_calls = 0
        self.shards: list[list[LeasedTask[bytes]]] = [[] for _ in range(SHARDS)]

    def _at(self, shard: int) -> None:
        if shard == self.broken:
            self.mended.wait(60)
            raise Unavailable(f"shard {shard} has no master")

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        self.put_calls += 1
        self._at((self.put_calls - 1) % SHARDS)
        return [f"{self.put_calls}" for _ in tasks]

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        settled = self.settle(settle)
        having = next((shard for shard in self.shards if shard), [])
        tasks = [having.pop() for _ in range(min(count, len(having)))]
        return RoundTrip(settled, tasks, 0.0)

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        for one in settlements:
            self._at(unmarked(one.token)[0])
        return ["" for _ in settlements]

    def close(self) -> None: ...


def task(shard: int) -> LeasedTask[bytes]:
    token = marked(shard, "1.0.1")
    return LeasedTask(token, token, b"%d" % shard, 1, 0, 0, 0)


@pytest.fixture
async def backend(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BrokenShards]:
    made = BrokenShards()
    monkeypatch.setattr(queue_module, "open_backend", lambda address, options: made)
    monkeypatch.setattr(batcher, "BESIDE_SECONDS", 0.02)
    yield made
    made.mended.set()


@pytest.mark.parametrize("broken", range(SHARDS))
async def test_acks_and_leases_of_other_shards_go_on(backend: BrokenShards, broken: int) -> None:
    async with asyncio.timeout(SOON), roq.WorkQueue("memory:") as queue:
        backend.shards = [[task(shard)] for shard in range(SHARDS)]
        leased = [one for _ in range(SHARDS) for one in await queue.lease(60.0)]
        backend.broken = broken
        well, last = (shard for shard in range(SHARDS) if shard != broken)
        stuck = asyncio.create_task(queue._lease(60.0, 1, 0.0, [(leased[broken], DONE)]))  # as a loop acks
        stuck_too = asyncio.create_task(queue.ack_many([leased[broken]]))
        await asyncio.sleep(0.05)
        await leased[well].ack()
        assert await queue.ack_many([leased[last]]) == []
        backend.shards = [[task(well)], [task(last)], [task(broken)]]
        taken = []
        async for one in queue.leases(60.0, wait_seconds=0):
            taken.append(int(one.payload))
            if taken[-1] == broken:
                break
            await one.ack()  # and the next lease travels with it
        assert taken == [well, last, broken]
        assert not stuck.done()
        assert not stuck_too.done()
        backend.mended.set()
        for unsettled in await asyncio.gather(stuck, stuck_too, return_exceptions=True):
            assert isinstance(unsettled, Unavailable)


async def test_puts_go_beside_one_that_takes_long(backend: BrokenShards) -> None:
    async with asyncio.timeout(SOON), roq.WorkQueue("memory:") as queue:
        backend.broken = 0
        stuck = asyncio.create_task(queue.put(b"first"))
        await asyncio.sleep(0.05)
        assert [await queue.put(b"second"), *await asyncio.gather(queue.put(b"third"))] == ["2", "3"]
        assert not stuck.done()
        backend.mended.set()
        with pytest.raises(Unavailable):
            await stuck


async def test_puts_into_a_queue_of_one_shard_keep_their_order(backend: BrokenShards) -> None:
    async with asyncio.timeout(SOON), roq.WorkQueue("memory:") as queue:
        backend.open_shards, backend.broken = 1, 0
        puts = [asyncio.create_task(queue.put(b"%d" % number)) for number in range(3)]
        await asyncio.sleep(0.1)
        later = asyncio.create_task(queue.put(b"later"))
        await asyncio.sleep(0.1)
        assert backend.put_calls == 1
        assert not any(one.done() for one in (*puts, later))
        backend.mended.set()
        await asyncio.gather(*puts, later, return_exceptions=True)
        assert backend.put_calls == 2, "what waited went together"

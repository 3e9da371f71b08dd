"""Readers and worker processes of roq chaos end when they are told to, and do not go on for ever with what fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import roq
from roq.tools.chaos.history import SubscriberHistory
from roq.tools.chaos.recorded_load import RecordedReading
from roq.tools.chaos.worker import WorkerEvent, WorkerEventKind, WorkerPlan
from roq.tools.chaos.workers import WorkerProcesses

WAIT_SECONDS = 30.0


class SlowlyClosed:
    """A subscriber to which nothing comes, and that lets go when it may."""

    def __init__(self) -> None:
        self.letting_go, self.may_let_go = asyncio.Event(), asyncio.Event()

    async def batches(self) -> AsyncIterator[list[roq.Message]]:
        try:
            while True:
                await asyncio.sleep(WAIT_SECONDS)
                yield []
        finally:
            self.letting_go.set()
            await self.may_let_go.wait()

    async def close(self) -> None:
        return


async def test_who_is_cancelled_while_a_reading_ends_is_cancelled() -> None:
    slow = SlowlyClosed()
    reading = RecordedReading(cast(roq.Subscriber, slow), SubscriberHistory(1))
    assert not await reading.read(0.01, None)
    ending = asyncio.create_task(reading.end())
    await slow.letting_go.wait()
    ending.cancel()
    await asyncio.wait({ending}, timeout=WAIT_SECONDS)
    assert ending.cancelled()
    slow.may_let_go.set()
    await reading.end()


async def test_a_worker_that_fails_is_not_started_again() -> None:
    heard = list[WorkerEvent]()
    ended = asyncio.Event()

    def listen(event: WorkerEvent) -> None:
        heard.append(event)
        if event.kind is WorkerEventKind.ENDED:
            ended.set()

    async with WorkerProcesses() as pool:
        pool.add(WorkerPlan("no address", "one", 1), listen)
        async with asyncio.timeout(WAIT_SECONDS):
            await ended.wait()
            await asyncio.gather(*pool._keepers)
        assert [event.kind for event in heard] == [WorkerEventKind.FAILED, WorkerEventKind.ENDED]
        assert [text.partition(":")[0] for text in pool.failures] == ["worker one.1"]

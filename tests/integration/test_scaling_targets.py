"""Targets on a real queue: load makes it late and an Exchange is added for that; a group that lags is told, with the reason."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

import roq
from roq.pubsub.scaling.what_if import replay
from roq.wire.kpi import Decision, QueueKpi
from tests.harness.cards import as_holder
from tests.integration.secured_rig import started

pytestmark = pytest.mark.timeout(90)
PUBLISHERS = 4
PAYLOAD = b"x" * 1000
TARGET_SECONDS = 0.1
POLICY = roq.Policy(target=roq.TargetRule(max_latency_p99_seconds=TARGET_SECONDS), bounds=roq.Bounds(max_exchanges=2))
CALM_RECORDS = 5
PATIENCE_SECONDS = 40.0
LOOK_SECONDS = 0.2


async def until(client: roq.Cluster, queue: str, wanted: Callable[[Decision], bool]) -> Decision:
    """The first decision of this kind, once there is one."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = next(filter(wanted, (await client.inspect(queue)).decisions), None)
        if found is not None:
            return found
        await asyncio.sleep(LOOK_SECONDS)
    raise AssertionError(f"no such decision within {PATIENCE_SECONDS:g} s: {(await client.inspect(queue)).decisions}")


@pytest.mark.quick
async def test_load_that_makes_it_late_gets_another_exchange(client: roq.Cluster) -> None:
    queue = f"test-{uuid.uuid4().hex[:12]}"
    await client.create_queue(queue, overflow="block", policy=POLICY)
    stop, records, loop = asyncio.Event(), list[QueueKpi](), asyncio.get_running_loop()

    async def publish(publisher: roq.Publisher) -> None:
        while not stop.is_set():
            await publisher.publish("load", PAYLOAD)

    async def record() -> None:
        async for kpi in client.kpis(queue):
            records.append(kpi)

    async def read(subscriber: roq.Subscriber) -> None:
        seen: dict[int, int] = {}
        async for message in subscriber:
            assert message.sequence == seen.get(message.publisher, message.sequence - 1) + 1
            seen[message.publisher] = message.sequence

    recording = loop.create_task(record())
    publishers = [await client.publisher(queue).open() for _ in range(PUBLISHERS)]
    try:
        async with client.subscriber(queue) as subscriber:
            reading = loop.create_task(read(subscriber))
            while len(records) < CALM_RECORDS:
                await publishers[0].publish("load", PAYLOAD)
                await asyncio.sleep(0.01)
            assert (await client.inspect(queue)).decisions == ()
            publishing = [loop.create_task(publish(each)) for each in publishers]
            decision = await until(client, queue, lambda one: one.action == "scale-out" and one.outcome != "")
            stop.set()
            await asyncio.gather(*publishing)
            assert not reading.done(), "the reader failed"
            assert subscriber.lost == subscriber.duplicated == 0
            await subscriber.close()
            await reading
        assert decision.cause.startswith("p99 latency is ")
        assert f"1 of 1 subscribers exceed {TARGET_SECONDS * 1000:g} ms; new Exchange 1 of 1" in decision.cause
        assert decision.outcome.startswith("created on host ")
        at = next(index for index, kpi in enumerate(records) if kpi.time == decision.time)
        assert records[at].subscribers[0].latency_p99_seconds > TARGET_SECONDS
        assert (decision.time, decision.cause) in [(one.time, one.cause) for one in replay(records, POLICY)]
    finally:
        stop.set()
        recording.cancel()
        for publisher in publishers:
            await publisher.close()
        await client.remove_queue(queue)


async def group_is_told_once(client: roq.Cluster) -> None:
    """A message waits in a group that nobody works for: there is one report of it, in the end."""
    queue = f"test-{uuid.uuid4().hex[:12]}"
    policy = roq.Policy(group=roq.GroupRule(max_ready_seconds=1.0))
    await client.create_queue(queue, overflow="block", record=roq.Record(days=1))
    try:
        await client.create_group(queue, "billing")
        async with client.publisher(queue, confirm="stored") as publisher:
            await publisher.publish("invoice", b"1")
            await publisher.flush()
        await client.set_policy(queue, policy)  # on its way, its rules in full, to a process that runs already
        assert await client.get_policy(queue) == policy
        told = await until(client, queue, lambda one: one.action == "hold")
        assert told.cause.startswith("group billing has a message that has waited for ")
        assert told.cause.endswith("another Exchange would not help: its workers are too few or too slow")
        assert len((await client.inspect(queue)).decisions) == 1
    finally:
        await client.remove_queue(queue)


async def test_a_group_without_workers_is_told_once(client: roq.Cluster) -> None:
    await group_is_told_once(client)


async def test_a_scaling_process_may_ask_masters_of_a_secured_cluster(tmp_path: Path) -> None:
    with started(tmp_path, "--hosts", "1") as made, as_holder(made.owner):
        async with roq.connect(made.zookeeper) as client:
            await group_is_told_once(client)

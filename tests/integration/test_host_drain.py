"""A host whose signal ends it drains first, if it is told to: what it runs moves to hosts that stay, then it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from roq.client.cluster import connect
from roq.client.events import STOPPING, ClusterEvent, EventKind
from roq.tools.local.cluster import LocalCluster
from tests.harness.traffic import Traffic

SECONDS, DRAIN_SECONDS = 60.0, 30.0
UNMOVED = "processes end that no other host has taken over"


class Draining(LocalCluster):
    """As in containers: a signal ends a host with all that runs there, after it was drained."""

    def environment(self, process: str) -> dict[str, str]:
        return {**super().environment(process), "ROQ_KEEP_CHILDREN": "false", "ROQ_DRAIN_SECONDS": str(DRAIN_SECONDS)}


async def leaves(events: AsyncIterator[ClusterEvent], host: str) -> ClusterEvent:
    """The event that tells of it."""
    async for event in events:
        if (event.kind, event.host) == (EventKind.HOST_DRAINING, host):
            return event
    raise AssertionError("events have ended")


async def test_hosts_that_stop_hand_over_first_but_not_the_last_one(tmp_path: Path) -> None:
    async with Draining(tmp_path, hosts=2) as local, connect(local.zookeeper) as client:
        first, second = local.hosts["host-1"], local.hosts["host-2"]
        await client.create_queue("orders", host="host-2", overflow="block")
        work = await client.create_work_queue("work", write_quorum=1, standbys=0)
        async with Traffic(client, "orders") as traffic, asyncio.TaskGroup() as beside:
            events = client.events()
            assert (await anext(events)).kind is EventKind.WATCHING
            said = beside.create_task(leaves(events, "host-2"))
            assert await second.terminate(SECONDS)
            assert UNMOVED not in second.log.read_text()
            info = await client.queue("orders")
            assert (info.record.monitor_host, set(info.record.exchanges.values())) == ("host-1", {"host-1"})
            assert (await client.work_queue("work")).record.master_host == "host-1", f"was on {work.record.master_host}"
            await traffic.flowing()
            assert (await asyncio.wait_for(said, SECONDS)).detail == STOPPING
        assert traffic.received == list(range(1, len(traffic.received) + 1)), "lost, repeated or reordered"
        assert not traffic.lost
        began = time.monotonic()
        assert await first.terminate(SECONDS)
        assert time.monotonic() - began < DRAIN_SECONDS, "no other host stays: there is nothing to wait for"
        assert UNMOVED in first.log.read_text()

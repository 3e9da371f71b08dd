"""The topology as one listens to it: `cluster.topology()` and `roq status --watch`, while the leading GCM dies."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import roq
from roq import blocking
from roq.client.broadcasts import topology_events
from roq.coordination.locate import GcmClient
from roq.errors import Closed
from roq.tools.local.cluster import JAVA, LocalCluster
from tests.integration.running import RunningCluster
from tests.integration.test_cli import COMMAND_SECONDS, ROOT, hears_ctrl_c

COMES_SECONDS = 30.0


async def until(events: AsyncIterator[roq.TopologyEvent], true: Callable[[roq.TopologyEvent], bool]) -> roq.TopologyEvent:
    """The first such event; all before it are passed over."""
    async with asyncio.timeout(COMES_SECONDS):
        async for event in events:
            if true(event):
                return event
    raise AssertionError("the topology ended")


def watching(zookeeper: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "roq.cli", "status", "--watch", "--cluster", zookeeper, *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=hears_ctrl_c,  # noqa: PLW1509
    )


class Lines:
    """What a command prints, read by a thread."""

    def __init__(self, command: subprocess.Popen[str]) -> None:
        self._command, self._lines, self._came = command, list[str](), threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._command.stdout is not None
        for line in self._command.stdout:
            with self._came:
                self._lines.append(line)
                self._came.notify_all()

    def until(self, true: Callable[[str], bool]) -> str:
        """The first line that is so."""
        with self._came:
            assert self._came.wait_for(lambda: any(map(true, self._lines)), COMES_SECONDS), self._lines
            return next(filter(true, self._lines))

    def ended(self) -> int:
        self._command.send_signal(signal.SIGINT)
        return self._command.wait(COMMAND_SECONDS)


@pytest.mark.timeout(120)
async def test_changes_are_told_and_the_whole_again_under_another_leader(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path, gcms=2, session_seconds=2.0, zookeeper=JAVA)
    async with local as cluster, roq.connect(cluster.zookeeper) as client:
        with watching(cluster.zookeeper, "--json") as command:
            lines = Lines(command)
            lines.until(lambda line: json.loads(line)["change"] == "snapshot")
            async with aclosing(client.topology()) as events:
                first = await until(events, lambda event: True)
                assert first.change is roq.Change.SNAPSHOT
                assert first.view is not None
                assert [host.host for host in first.view.hosts] == ["host-1"]
                await client.create_queue("before")
                made = await until(events, lambda event: event.change is roq.Change.QUEUE_CREATED)
                assert (made.queue, made.host, made.view, made.epoch) == ("before", "host-1", None, first.epoch)
                added = await until(events, lambda event: event.change is roq.Change.EXCHANGE_ADDED)
                assert (added.queue, added.host) == ("before", "host-1")
                leader = next(
                    name for name, gcm in cluster.gcms.items() if first.view.leader.startswith(f"{gcm.option('--address')}:")
                )
                await cluster.kill_gcm(leader)
                await client.create_queue("meanwhile", timeout_seconds=COMES_SECONDS)
                again = await until(events, lambda event: event.change is roq.Change.SNAPSHOT)
                assert again.view is not None
                assert again.epoch > first.epoch
                seen = {queue.record.name for queue in again.view.queues}
                if "meanwhile" not in seen:
                    await until(events, lambda event: event.queue == "meanwhile")
                assert "before" in seen
                await client.remove_queue("before")
                gone = await until(events, lambda event: event.change is roq.Change.QUEUE_REMOVED)
                assert gone.queue == "before"
                joined = await cluster.add_host()
                assert (await until(events, lambda event: event.change is roq.Change.HOST_JOINED)).host == joined
            await asyncio.to_thread(same_in_lines, lines, first.epoch, joined)
    assert cluster.leftovers == []


def same_in_lines(lines: Lines, epoch: int, joined: str) -> None:
    def found(**wanted: Any) -> Callable[[str], bool]:
        return lambda line: wanted.items() <= json.loads(line).items()

    lines.until(found(change="queue-created", queue="before", host="host-1"))
    again = json.loads(lines.until(lambda line: (row := json.loads(line))["change"] == "snapshot" and row["epoch"] > epoch))
    assert "before" in again["queues"]
    assert again["hosts"] == ["host-1"]
    lines.until(found(change="host-joined", host=joined))
    assert lines.ended() == 130


@pytest.mark.quick
async def test_a_line_per_change_for_people_and_the_plain_face(cluster: RunningCluster, client: roq.Cluster) -> None:
    with watching(cluster.zookeeper) as command, blocking.connect(cluster.zookeeper) as plain:
        lines = Lines(command)
        await asyncio.to_thread(lines.until, lambda line: "snapshot" in line and "2 hosts" in line)
        events = plain.topology()
        assert (await asyncio.to_thread(next, events)).change is roq.Change.SNAPSHOT
        async with roq.open_queue(f"roq://{cluster.zookeeper}/topology"):
            pass
        await asyncio.to_thread(lines.until, lambda line: "work-queue-created" in line and line.endswith("  topology\n"))
        event = await asyncio.to_thread(lambda: next(one for one in events if one.work_queue == "topology"))
        assert event.change is roq.Change.WORK_QUEUE_CREATED
        await client.remove_work_queue("topology")
        assert await asyncio.to_thread(lines.ended) == 130


async def test_who_closes_the_connection_ends_it(cluster: RunningCluster) -> None:
    async with roq.connect(cluster.zookeeper) as client:
        events = client.topology()
        await until(events, lambda event: event.change is roq.Change.SNAPSHOT)
    with pytest.raises(Closed):
        await until(events, lambda event: False)


async def test_who_closes_the_connection_ends_it_while_nobody_leads() -> None:
    client = GcmClient("127.0.0.1:1")
    reading = asyncio.create_task(anext(topology_events(client)))
    done, _ = await asyncio.wait({reading}, timeout=0.2)  # it looks for a leader
    assert not done
    client.close()
    with pytest.raises(Closed):
        async with asyncio.timeout(COMES_SECONDS / 3):
            await reading

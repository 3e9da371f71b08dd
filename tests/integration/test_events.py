"""What happens in a cluster, as one listens to it: `cluster.events()`, its plain face and `roq events`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.errors import Closed
from roq.tools.local.cluster import JAVA, LocalCluster
from tests.harness.documented import block
from tests.integration.running import RunningCluster
from tests.integration.test_cli import COMMAND_SECONDS, ROOT, hears_ctrl_c
from tests.integration.test_topology import Lines

COMES_SECONDS = 30.0
Kind = roq.EventKind


async def until(
    events: AsyncIterator[roq.ClusterEvent], kind: roq.EventKind, true: Callable[[roq.ClusterEvent], bool] = lambda event: True
) -> roq.ClusterEvent:
    """The first such event; all before it are passed over."""
    seen = list[str]()
    try:
        async with asyncio.timeout(COMES_SECONDS):
            async for event in events:
                seen.append(f"{event.kind}: {event}")
                if event.kind is kind and true(event):
                    return event
    except TimeoutError:
        raise AssertionError(f"no {kind} came, only {seen}") from None
    raise AssertionError("the events ended")


@contextmanager
def telling(zookeeper: str, *options: str) -> Iterator[Lines]:
    """What `roq events` prints."""
    command = subprocess.Popen(
        [sys.executable, "-m", "roq.cli", "events", "--cluster", zookeeper, *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=hears_ctrl_c,  # noqa: PLW1509
    )
    with command:
        try:
            yield Lines(command)
        finally:
            command.kill()


@pytest.mark.quick
async def test_a_recorded_queue_its_group_and_its_tape_from_all_faces(cluster: RunningCluster, client: roq.Cluster) -> None:
    name = "events-of-mine"
    with telling(cluster.zookeeper, "--queue", name) as lines, blocking.connect(cluster.zookeeper) as plain:
        await asyncio.to_thread(lines.until, lambda line: "  watching " in line)
        others = plain.events()
        assert (await asyncio.to_thread(next, others)).kind is Kind.WATCHING
        other = asyncio.create_task(asyncio.to_thread(lambda: next(one for one in others if one.queue == name)))
        async with aclosing(client.events()) as events:
            await until(events, Kind.WATCHING)
            await client.create_queue(name, record=roq.Record(days=1.0))
            made = await until(events, Kind.QUEUE_CREATED, lambda event: event.queue == name)
            assert str(made) == f"queue {name} was created on {made.host}"
            await client.create_group(name, "billing")
            group = await until(events, Kind.GROUP_CREATED)
            assert (group.queue, group.group, group.work_queue) == (name, "billing", f"{name}@billing")
            await client.remove_group(name, "billing")
            await until(events, Kind.GROUP_REMOVED)
            created = await client.create_exchange(name)
            await until(events, Kind.EXCHANGE_ADDED, lambda event: event.exchange == created.exchange)
            await client.exchange_active(name, created.exchange)
            await client.remove_exchange(name, created.exchange)
            await until(events, Kind.EXCHANGE_REMOVED, lambda event: event.exchange == created.exchange)
            ended = await until(events, Kind.TAPE_CLOSED)
            assert (ended.queue, ended.exchange) == (name, created.exchange)
            await client.remove_queue(name)
            await until(events, Kind.QUEUE_REMOVED, lambda event: event.queue == name)
        await asyncio.to_thread(lines.until, lambda line: f"queue {name} was removed" in line)
        assert (await other).kind is Kind.QUEUE_CREATED
        assert await asyncio.to_thread(lines.ended) == 130


@pytest.mark.timeout(150)
async def test_deaths_another_leader_and_decisions_with_what_became_of_them(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path, gcms=2, session_seconds=2.0, zookeeper=JAVA)
    async with local as cluster, roq.connect(cluster.zookeeper) as client:
        await client.create_queue("orders")
        async with aclosing(client.events()) as events:
            await until(events, Kind.WATCHING)
            [host] = await client.hosts()
            assert host.report is not None
            [exchange] = [one for one in host.report.processes if one.kind is roq.ProcessKind.EXCHANGE]
            os.kill(exchange.pid, signal.SIGKILL)
            died = await until(events, Kind.PROCESS_DIED)
            assert (died.process, died.queue, died.host) == (exchange.name, "orders", host.host)

            view = await client.view()
            leader = next(name for name, gcm in cluster.gcms.items() if view.leader.startswith(f"{gcm.option('--address')}:"))
            await cluster.kill_gcm(leader)
            await client.create_queue("meanwhile", timeout_seconds=COMES_SECONDS)
            changed = await until(events, Kind.LEADER_CHANGED)
            assert f"epoch {view.epoch + 1}" in changed.detail
            await until(events, Kind.QUEUE_CREATED, lambda event: event.queue == "meanwhile")

            before = datetime.now(UTC)
            await client.set_policy("orders", roq.Policy(bounds=roq.Bounds(min_exchanges=2)))
            await until(events, Kind.POLICY_CHANGED)
            decided = await until(events, Kind.DECISION)
            assert decided.decision is not None
            assert (decided.queue, decided.decision.action) == ("orders", "scale-out")
            done = await until(events, Kind.DECISION_DONE)
            assert done.decision is not None
            assert (done.decision.cause, bool(done.decision.outcome)) == (decided.decision.cause, True)
        async with aclosing(client.events(since=before - timedelta(seconds=5))) as again:
            assert (await until(again, Kind.DECISION_DONE)).decision == done.decision
        told = await asyncio.to_thread(json_line, cluster.zookeeper, "--since", "1m", "--kind", "decision", "--count", "1")
        assert told["decision"]["cause"] == decided.decision.cause  # type: ignore[index]
    assert cluster.leftovers == []


def json_line(zookeeper: str, *options: str) -> dict[str, object]:
    command = [sys.executable, "-m", "roq.cli", "events", "-c", zookeeper, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=COMMAND_SECONDS, check=True)
    return dict(json.loads(done.stdout))


async def test_who_closes_the_connection_ends_it(cluster: RunningCluster) -> None:
    async with roq.connect(cluster.zookeeper) as client:
        events = client.events()
        await until(events, Kind.WATCHING)
    with pytest.raises(Closed):
        await asyncio.wait_for(anext(events), COMES_SECONDS)


def test_the_document_s_program(cluster: RunningCluster) -> None:
    program = block("docs/cli.md", "What happens").replace("127.0.0.1:2181", cluster.zookeeper)
    command = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with command, blocking.connect(cluster.zookeeper) as client:
        try:
            lines = Lines(command)
            lines.until(lambda line: line.startswith("watching watching 2 hosts"))
            client.create_queue("shown")
            lines.until(lambda line: line.startswith("queue-created queue shown was created on host-"))
            assert command.wait(COMMAND_SECONDS) == 0
            client.remove_queue("shown")
        finally:
            command.kill()

"""The cluster's own history of a queue that scales out: kept, shown, replayed; switched on and off. Real processes.

Not covered: how it is added up and shown (tests/unit/test_history.py), Spark over it (tests/spark/test_pipeline_history.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from roq.client.history import past_decisions, past_kpis, read_history
from roq.errors import CallError, InvalidName, NotRecorded, QueueNotFound
from roq.wire.assignment import ProcessKind
from roq.wire.kpi import HISTORY_DECISIONS, HISTORY_KPIS, HISTORY_QUEUES, QueueDecision
from tests.harness.documented import block, run
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli
from tests.integration.test_documented import printed

pytestmark = pytest.mark.timeout(90)
POLICY = roq.Policy(queue=roq.QueueRule(max_publishers_per_exchange=1.0), bounds=roq.Bounds(max_exchanges=2))
POLICY_TOML = "[queue]\nmax_publishers_per_exchange = 1.0\n[bounds]\nmax_exchanges = 2\n"
LOOK_SECONDS = 0.25
PATIENCE_SECONDS = 30.0


@pytest.fixture
async def history(client: roq.Cluster) -> AsyncIterator[None]:
    """It is on, and off afterwards."""
    await client.record_history(roq.Record(days=1))
    yield
    await client.record_history(None)


@pytest.fixture
async def scaled_out(client: roq.Cluster, history: None) -> AsyncIterator[str]:
    """A queue whose scale-out is in the history, with its outcome."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, overflow="block", policy=POLICY)
    async with client.publisher(name) as one, client.publisher(name) as other:
        for publisher in (one, other):
            await publisher.publish("load", b"x" * 100)
        await until_kept(client, name)
        await until_kpis(client, name, exchanges=2)
    yield name
    await client.remove_queue(name)


async def until_kept(client: roq.Cluster, name: str) -> list[QueueDecision]:
    """All decisions, once there is one, and all have their outcome."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = await past_decisions(client, name, "earliest")
        if found and all(one.outcome for one in found if one.action != "hold"):
            return found
        await asyncio.sleep(LOOK_SECONDS)  # nobody tells when it is stored
    raise AssertionError(f"no decision with its outcome is in the history: {found}")


@pytest.mark.quick
async def test_what_happened_is_kept_shown_and_replayed(
    client: roq.Cluster, cluster: RunningCluster, scaled_out: str, tmp_path: Path
) -> None:
    kept = await read_history(client, scaled_out, "earliest")
    out = next(one for one in kept.decisions if one.action == "scale-out")
    assert "created on host" in out.outcome
    assert out.exchange in (await client.queue(scaled_out)).record.exchanges
    assert max(one.exchanges_most for one in kept.periods) == 2
    assert max(one.publishers_most for one in kept.periods) == 2
    known = {(one.time, one.cause) for one in (await client.inspect(scaled_out)).decisions}
    assert {(one.time, one.cause) for one in kept.decisions} <= known

    cli, policy = Cli(cluster.zookeeper), tmp_path / "policy.toml"
    policy.write_text(POLICY_TOML)
    shown = (await asyncio.to_thread(cli.run, "queue", "show", scaled_out, "--history", "--since", "1h")).stdout.decode()
    assert f"scale-out: {out.cause} → {out.outcome}" in shown
    told = await asyncio.to_thread(cli.json, "queue", "show", scaled_out, "--history")
    assert sum(one["records"] for one in told["periods"]) >= sum(one.records for one in kept.periods)
    arguments = "policy", "replay", str(policy), "--queue", scaled_out, "--since", "earliest", "--json"
    replayed = [json.loads(line) for line in (await asyncio.to_thread(cli.run, *arguments)).stdout.splitlines()]
    assert [(one["action"], one["taken"], one["would"]) for one in replayed if one["time"] == out.time] == [
        ("scale-out", True, True)
    ]
    policy.write_text("[bounds]\nmax_exchanges = 2\n")
    lines = (await asyncio.to_thread(cli.run, *arguments[:-1])).stdout.decode().splitlines()
    assert [line.split()[0] for line in lines if "scale-out" in line] == ["taken"]


async def test_nobody_else_makes_or_removes_its_queues_and_they_keep_nothing_of_themselves(
    client: roq.Cluster, cluster: RunningCluster, scaled_out: str
) -> None:
    with pytest.raises(InvalidName, match="the cluster's own"):
        await client.create_queue("_roq.mine")
    with pytest.raises(CallError, match="roq history off"):
        await client.remove_queue(HISTORY_KPIS)
    async with client.subscriber(HISTORY_KPIS, scaled_out, group="alerts") as member:  # what is in them is for everybody
        async with asyncio.timeout(PATIENCE_SECONDS):
            message = await anext(member)
        assert json.loads(message.payload)["queue"] == scaled_out
        await message.ack()
    topics = set[str]()
    for name in HISTORY_QUEUES:
        async with client.subscriber(name, start="earliest", follow=False) as past:
            topics |= {message.topic async for message in past}
    assert scaled_out in topics
    assert topics.isdisjoint(HISTORY_QUEUES)
    cli = Cli(cluster.zookeeper)
    listed = [{row["queue"] for row in await asyncio.to_thread(cli.json, "queue", "ls", *more)} for more in ((), ("--all",))]
    assert scaled_out in listed[0]
    assert listed[1] - listed[0] == set(HISTORY_QUEUES)
    state = await asyncio.to_thread(cli.json, "history", "show")
    assert [(row["queue"], row["record"]["days"]) for row in state] == [(HISTORY_KPIS, 1.0), (HISTORY_DECISIONS, 1.0)]


def test_what_the_document_shows(cluster: RunningCluster, tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    on, state, shown, replay, off = block("docs/history.md", "The cluster's history").splitlines()
    (tmp_path / "policy.toml").write_text(POLICY_TOML)
    assert "kept for 7 d" in printed(f"{on} 2>&1", tmp_path, **here)
    try:
        printed("roq queue create orders", tmp_path, **here)
        assert "RECORDS/s" in printed(state, tmp_path, **here)
        end = time.monotonic() + PATIENCE_SECONDS
        while "a row is" not in (told := printed(shown, tmp_path, **here)):
            assert time.monotonic() < end, told
        assert " taken, by the policy " in printed(f"{replay} 2>&1", tmp_path, **here)
    finally:
        assert "removed" in printed(f"{off} 2>&1", tmp_path, **here)
        printed("roq queue rm orders", tmp_path, **here)
    source = block("docs/history.md", "The cluster's history", 2).replace("127.0.0.1:2181", cluster.zookeeper)
    assert run(source, tmp_path).startswith("days 7")


async def test_a_history_that_dies_holds_nothing_up_and_goes_on(client: roq.Cluster, history: None) -> None:
    """All processes of its queues are killed; the queue scales out meanwhile, and that is in the history afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    await client.create_queue(name, policy=POLICY)
    try:
        await until_kpis(client, name)
        scaling = await pids(client, name, ProcessKind.SCALING)
        async with client.publisher(name), client.publisher(name):
            for queue in HISTORY_QUEUES:
                for pid in await pids(client, queue, ProcessKind.EXCHANGE, ProcessKind.MONITOR):
                    os.kill(pid, signal.SIGKILL)
            killed = time.time()
            taken = await until_scaled_out(client, name)
            kept = await until_kept(client, name)
        assert [(one.time, one.cause, one.outcome) for one in kept if one.action == "scale-out"] == [taken]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while max([kpi.time async for kpi in past_kpis(client, name, "earliest")]) < killed + 1:
                await asyncio.sleep(LOOK_SECONDS)
        assert await pids(client, name, ProcessKind.SCALING) == scaling
    finally:
        await client.remove_queue(name)


async def pids(client: roq.Cluster, queue: str, *kinds: ProcessKind) -> set[int]:
    """Of what runs of a queue."""
    reports = [host.report for host in await client.hosts() if host.report is not None]
    return {one.pid for report in reports for one in report.processes if one.queue == queue and one.kind in kinds}


async def until_scaled_out(client: roq.Cluster, name: str) -> tuple[float, str, str]:
    """Time, cause and outcome of the scale-out, as the queue's Monitor knows it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            for one in (await client.inspect(name)).decisions:
                if one.action == "scale-out" and one.outcome:
                    return one.time, one.cause, one.outcome
            await asyncio.sleep(LOOK_SECONDS)


async def test_off_and_on_while_a_queue_runs(client: roq.Cluster, queue: str) -> None:
    with pytest.raises(NotRecorded, match="roq history on"):
        await read_history(client, queue, "earliest")
    await client.record_history(roq.Record(days=1))
    await client.record_history(roq.Record(days=2))
    assert [(await client.queue(name)).record.record for name in HISTORY_QUEUES] == [roq.Record(days=2)] * 2
    await until_kpis(client, queue)
    await client.record_history(None)
    await client.record_history(None)
    for name in HISTORY_QUEUES:
        with pytest.raises(QueueNotFound):
            await client.queue(name)
    await client.record_history(roq.Record())
    try:
        await until_kpis(client, queue)  # the process that was told so is the same one
        with pytest.raises(QueueNotFound):
            await read_history(client, "never was", "earliest")
    finally:
        await client.record_history(None)


async def until_kpis(client: roq.Cluster, queue: str, exchanges: int = 1) -> None:
    """Until there is a record of it with so many Exchanges."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any([len(kpi.exchanges) == exchanges async for kpi in past_kpis(client, queue, "earliest")]):
            await asyncio.sleep(LOOK_SECONDS)

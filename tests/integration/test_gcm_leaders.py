"""Who leads: standby, stale epoch, ZooKeeper out of reach, a leader killed in the middle of a request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from roq.coordination import paths
from roq.coordination.election import participants, take_epoch
from roq.coordination.locate import read_leader, read_tree_format
from roq.errors import (
    NotLeader,
    TemporaryError,
)
from roq.runtime.installation import installed_version
from roq.runtime.shutdown import ask
from roq.wire import gcm as wire
from roq.wire import process as process_wire
from roq.wire.assignment import from_json, to_json
from roq.wire.tree_format import FORMAT, READS, TreeFormat
from tests.integration.gcm_bench import PATIENCE_SECONDS, SESSION_SECONDS, Bench, eventually


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(chroot, stack)


@pytest.fixture
def wire_to_zookeeper(request: pytest.FixtureRequest) -> Any:
    """A connection that can be cut; here the name `wire` is a module."""
    return request.getfixturevalue("wire")


@pytest.fixture
async def served(bench: Bench) -> Bench:
    """A leader and two hosts."""
    await bench.gcm()
    await bench.host("left")
    await bench.host("right")
    await bench.hosts_alive(2)
    return bench


# --- leader and standby ------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_standby_names_the_leader_and_takes_over(bench: Bench) -> None:
    first, stop_first = await bench.gcm()
    await bench.ask(wire.ListQueues(), wire.Queues)
    second, _ = await bench.gcm()

    async def told() -> bool:
        with pytest.raises(NotLeader) as refusal:
            await bench.ask_at(second.port, wire.ListQueues(), wire.Queues)
        return refusal.value.leader == f"127.0.0.1:{first.port}"

    await eventually(told)
    epoch = (await read_leader(bench.zookeeper)).epoch
    stop_first.set()

    async def leads() -> bool:
        try:
            return (await bench.ask_at(second.port, wire.GetCluster(), wire.ClusterView)).epoch > epoch
        except NotLeader:
            return False

    await eventually(leads, seconds=1.5)  # a clean stop makes room at once, no session has to end
    assert (await read_leader(bench.zookeeper)).port == second.port


async def test_stale_epoch_steps_down_and_leads_anew(served: Bench) -> None:
    await served.create("before")
    old = await read_leader(served.zookeeper)
    await take_epoch(await served.session())  # somebody else leads, as far as ZooKeeper is concerned
    with pytest.raises(NotLeader):
        await served.ask_at(old.port, wire.CreateQueue("during", "t"), wire.QueueInfo)
    assert (await served.create("during", "t")).ready
    assert (await read_leader(served.zookeeper)).epoch > old.epoch + 1
    assert {info.record.name for info in (await served.ask(wire.ListQueues(), wire.Queues)).queues} == {"before", "during"}


# --- the format of ZooKeeper's tree ------------------------------------------------------------------------------------


async def test_the_first_leader_writes_the_format_and_the_next_leaves_it(bench: Bench) -> None:
    session = await bench.session()
    _, stop = await bench.gcm()
    await bench.ask(wire.ListQueues(), wire.Queues)
    written = await session.get(paths.FORMAT)
    assert written is not None
    assert from_json(written.data, TreeFormat) == TreeFormat(FORMAT, READS, installed_version())
    assert await read_tree_format(bench.zookeeper) == from_json(written.data, TreeFormat)
    stop.set()
    await bench.gcm()
    await bench.ask(wire.ListQueues(), wire.Queues)
    assert await session.get(paths.FORMAT) == written


async def test_a_newer_format_that_may_be_led_is_left_alone(bench: Bench) -> None:
    session = await bench.session()
    await session.ensure_path("")
    newer = TreeFormat(FORMAT + 1, FORMAT, "0.9.0")
    before = await session.create(paths.FORMAT, to_json(newer))
    await bench.gcm()
    await bench.ask(wire.ListQueues(), wire.Queues)
    assert await session.get(paths.FORMAT) == before


async def test_nobody_leads_a_tree_of_a_newer_version_until_it_is_readable(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    session = await bench.session()
    await session.ensure_path("")
    await session.create(paths.FORMAT, to_json(TreeFormat(FORMAT + 1, FORMAT + 1, "0.9.0")))
    for _ in range(2):
        await bench.gcm()

    async def both_refused() -> bool:
        return len([line for line in caplog.records if "stands for no election" in line.message]) == 2

    await eventually(both_refused)
    assert await participants(session, paths.LATCH) == [], "newer GCMs have the election for themselves"
    epoch = await session.get(paths.EPOCH)
    assert await session.children(paths.QUEUES) == []
    with pytest.raises(TemporaryError):
        await read_leader(bench.zookeeper)
    assert await session.get(paths.EPOCH) == epoch, "they go on trying"
    node = await session.get(paths.FORMAT)
    assert node is not None
    await session.set(paths.FORMAT, to_json(TreeFormat(FORMAT + 1, FORMAT, "0.9.0")), node.version)
    await bench.ask(wire.ListQueues(), wire.Queues)


# --- ZooKeeper out of reach --------------------------------------------------------------------------------------------


async def test_leader_cut_off_from_zookeeper_refuses_until_it_is_back(bench: Bench, wire_to_zookeeper: Any) -> None:
    chroot = bench.zookeeper.partition("/")[2]
    alone, _ = await bench.gcm(zookeeper=f"{wire_to_zookeeper.address}/{chroot}")
    await bench.host("left")
    await bench.hosts_alive(1)
    await bench.create("before")
    epoch = (await read_leader(bench.zookeeper)).epoch
    wire_to_zookeeper.cut()

    async def answers() -> bool:
        try:
            await bench.ask_at(alone.port, wire.ListQueues(), wire.Queues)
        except NotLeader:
            return False
        return True

    async def refuses() -> bool:
        return not await answers()

    await eventually(refuses, SESSION_SECONDS + 0.5)
    with pytest.raises(NotLeader):
        await bench.ask_at(alone.port, wire.CreateQueue("during", "t"), wire.QueueInfo)
    wire_to_zookeeper.heal()
    await eventually(answers)
    assert (await bench.create("after")).ready
    assert (await read_leader(bench.zookeeper)).epoch > epoch
    assert [info.record.name for info in (await bench.ask(wire.ListQueues(), wire.Queues)).queues] == ["after", "before"]


async def test_stop_answers_what_is_pending(bench: Bench) -> None:
    _, stop = await bench.gcm()
    host = await bench.host("left")
    await bench.hosts_alive(1)
    host.obeys.clear()
    leader = await read_leader(bench.zookeeper)
    pending = asyncio.ensure_future(bench.ask_at(leader.port, wire.CreateQueue("q", "t"), wire.QueueInfo))
    session = await bench.session()

    async def begun() -> bool:
        return await session.get(paths.queue("q")) is not None

    await eventually(begun)
    stop.set()
    with pytest.raises(NotLeader):
        await pending


# --- as a process ------------------------------------------------------------------------------------------------------


async def start_process(zookeeper: str, *flags: str) -> tuple[Process, dict[str, int]]:
    command = [
        sys.executable,
        "-m",
        "gcm",
        "--security",
        "none",
        "--zookeeper",
        zookeeper,
        "--session-seconds",
        str(SESSION_SECONDS),
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=environment)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        line = await process.stdout.readline()
    return process, json.loads(line)


async def test_fail_over_keeps_queues_and_finishes_what_was_begun(bench: Bench) -> None:
    first, told = await start_process(bench.zookeeper)
    assert told["ready"]
    assert told["pid"] == first.pid
    second, other = await start_process(bench.zookeeper)
    try:
        host = await bench.host("left")
        await bench.hosts_alive(1)
        await bench.create("kept")
        host.obeys.clear()
        leader = await read_leader(bench.zookeeper)
        victim, survivor = (first, other) if leader.port == told["port"] else (second, told)
        request = wire.CreateQueue("begun", "t-begun")
        lost = asyncio.ensure_future(bench.ask_at(leader.port, request, wire.QueueInfo, 1.0))
        session = await bench.session()

        async def begun() -> bool:
            return await session.get(paths.transaction(paths.TransactionKind.QUEUE, "t-begun")) is not None

        await eventually(begun)
        victim.send_signal(signal.SIGKILL)
        killed = asyncio.get_running_loop().time()
        with pytest.raises(TemporaryError):
            await lost
        host.obeys.set()

        async def taken_over() -> bool:
            with suppress(TemporaryError):
                return (await read_leader(bench.zookeeper)).port == survivor["port"]
            return False

        await eventually(taken_over, 8.0)
        seconds = asyncio.get_running_loop().time() - killed
        assert seconds < SESSION_SECONDS + 3.0, "to look again would take 10 s"
        info = await bench.ask(request, wire.QueueInfo)
        assert info.ready
        assert info.record.transaction == "t-begun"
        names = [entry.record.name for entry in (await bench.ask(wire.ListQueues(), wire.Queues)).queues]
        assert names == ["begun", "kept"]

        async def forgotten() -> bool:
            return await session.get(paths.transaction(paths.TransactionKind.QUEUE, "t-begun")) is None

        await eventually(forgotten)
    finally:
        for process in (first, second):
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await process.wait()
    assert {first.returncode, second.returncode} == {0, -signal.SIGKILL}


async def test_process_answers_its_shutdown_monitor(chroot: str) -> None:
    process, told = await start_process(chroot, "--name", "one")
    pong = await ask("127.0.0.1", told["control"], process_wire.Ping())
    assert isinstance(pong, process_wire.Pong)
    assert (pong.name, pong.pid) == ("gcm/one", process.pid)
    await ask("127.0.0.1", told["control"], process_wire.Shutdown("test"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await process.wait() == 0

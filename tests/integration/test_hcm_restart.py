"""An HCM that is back within its session: the host was never away, and none of its processes notices.

The test is in the GCM's place; the child programs are trivial ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.session import Session
from roq.testing.freezing import freeze
from roq.wire.assignment import HostReport, Leaving, ProcessKind, ProcessSpec, ProcessState, from_json
from roq.wire.stores import StoreRegistration, StoreState
from tests.integration.hcm_rig import HOST, WAIT_SECONDS, Report, Rig, queue

SESSION = ("--session-seconds", "20")  # the restart is within it, whatever else the machine does
MANY = tuple(ProcessSpec(ProcessKind.MONITOR, f"q{number:02}") for number in range(60))
ONE_MORE = ProcessSpec(ProcessKind.MONITOR, "one-more")
STORE = ProcessSpec(ProcessKind.STORE, "")


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[Rig]:
    session = await sessions(chroot)
    await session.ensure_path("")
    made = Rig(chroot, tmp_path / "state", session)
    made.directory.mkdir()
    yield made
    await made.close()


async def taken_over(rig: Rig, before: Node) -> Node:
    """The registration of the restarted HCM; it may never be missing in between."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            node = await rig.session.get(paths.host(HOST))
            assert node is not None, "the host was away"
            if node.czxid != before.czxid:
                return node
            await asyncio.sleep(0.01)


async def registered(rig: Rig) -> Node:
    node = await rig.session.get(paths.host(HOST))
    assert node is not None
    return node


def unwritten(rig: Rig, name: str) -> None:
    """As if the HCM had been killed before it wrote down that it forked this process."""
    file = rig.directory / "state.json"
    state = msgspec.json.decode(file.read_bytes())
    state["children"][name]["pid"] = 0
    file.write_bytes(msgspec.json.encode(state))


def pids(report: Report) -> dict[str, int]:
    return {name: process.pid for name, process in report.items()}


async def test_it_is_registered_and_has_adopted_all_before_it_can_fork(rig: Rig, tmp_path: Path) -> None:
    await rig.start(*SESSION)
    before = await rig.running(*MANY)
    was = await registered(rig)
    assert rig.report is not None
    incarnation = rig.report.incarnation
    await rig.kill_hcm()
    unwritten(rig, "monitor/q07")
    may_fork = tmp_path / "may fork"
    await rig.spawn(*SESSION, "--process-module", "held_programs", HELD_UNTIL=str(may_fork))
    await taken_over(rig, was)

    def adopted(found: Report) -> bool:
        assert rig.report is not None
        return rig.report.incarnation != incarnation

    after = await rig.until(adopted)
    assert pids(after) == pids(before)
    assert not any(process.restarts for process in after.values())
    await rig.assign(*MANY[1:], ONE_MORE)  # obeyed, as far as it goes without a fork server
    after = await rig.until(lambda found: MANY[0].name not in found and ONE_MORE.name in found)
    assert after[ONE_MORE.name].state is ProcessState.STARTING
    may_fork.touch()
    after = await rig.running(*MANY[1:], ONE_MORE)
    await rig.until_ready()
    assert pids(after).items() >= {name: pid for name, pid in pids(before).items() if name != MANY[0].name}.items()


async def test_its_last_report_stays_until_all_are_adopted(rig: Rig) -> None:
    """It is registered while one of its children has not answered yet. What it says of them next is complete, and an
    assignment that comes meanwhile finds what runs."""
    await rig.start(*SESSION)
    before = await rig.running(*queue("orders"))
    was = await registered(rig)
    await rig.kill_hcm()
    reports: list[HostReport] = []

    def reported(node: Node | None) -> None:
        if node is not None:
            reports.append(from_json(node.data, HostReport))

    watch = rig.session.watch_data(paths.running(HOST), reported)
    busy = before["exchange/orders/e1"]
    unwritten(rig, busy.name)
    rig.program = "patient_hcm"
    freeze(busy.pid)
    try:
        await rig.spawn(*SESSION)
        await taken_over(rig, was)
        assert len({report.incarnation for report in reports}) <= 1, "it knew nothing yet"
        revision = await rig.assign(*queue("orders"), ONE_MORE)
    finally:
        os.kill(busy.pid, signal.SIGCONT)
    after = await rig.running(*queue("orders"), ONE_MORE)
    assert pids(after).items() >= pids(before).items()
    for report in reports:
        told = {process.name: process.pid for process in report.processes}
        assert told.items() >= pids(before).items(), report
        assert report.revision < revision or told.keys() > before.keys()
    assert not any(process.restarts for process in after.values())
    watch.close()


async def test_where_its_store_serves_is_said_in_each_session(rig: Rig) -> None:
    """Whoever writes a log follows that, and not the report of all that runs."""
    seen, changed = list[str](), asyncio.Event()

    def stores(names: list[str]) -> None:
        seen[:] = names
        changed.set()

    async def until(*said: StoreRegistration) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while seen != [one.node_name for one in said]:
                changed.clear()
                await changed.wait()

    watch = rig.session.watch_children(paths.stores(), stores)
    await rig.start(*SESSION)
    await until()
    port = (await rig.running(STORE))[STORE.name].ports["clients"]
    running = StoreRegistration(HOST, rig.address, port, StoreState.RUNNING)
    await until(running)
    first = await rig.session.get(paths.store(running.node_name))
    assert first is not None
    await rig.session.create_ephemeral(paths.store("another=10.0.0.1:7=running"))
    await rig.kill_hcm()
    await rig.start(*SESSION)
    async with asyncio.timeout(WAIT_SECONDS):
        while (now := await rig.session.get(paths.store(running.node_name))) is None or now.owner == first.owner:
            changed.clear()
            await changed.wait()
    await rig.assign(STORE, leaving=Leaving.EVERYTHING)
    another = StoreRegistration("another", "10.0.0.1", 7, StoreState.RUNNING)
    await until(another, StoreRegistration(HOST, rig.address, port, StoreState.LEAVING))
    await rig.running()
    await until(another)
    watch.close()

"""An HCM in a fail-over: its processes are told of it while they run, and a reviving host runs nothing old.

The test is in the GCM's place; the child programs are trivial ones that tell what they were told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.session import Session
from roq.tools.local import leftovers
from roq.wire.assignment import MonitorAddress, MonitorRole, ProcessKind, ProcessSpec, ProcessState
from tests.integration.hcm_rig import HOST, WAIT_SECONDS, Rig, queue


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[Rig]:
    session = await sessions(chroot)
    await session.ensure_path("")
    made = Rig(chroot, tmp_path / "state", session)
    made.directory.mkdir()
    yield made
    await made.close()


async def test_a_fail_over_reaches_running_processes_and_a_demotion_restarts(rig: Rig) -> None:
    """A backup becomes active, an Exchange is told of another Monitor: the same processes go on."""
    await rig.start()
    backup = ProcessSpec(ProcessKind.MONITOR, "orders", role=MonitorRole.BACKUP)
    away = ProcessSpec(ProcessKind.EXCHANGE, "bills", "e1", monitor=MonitorAddress("h2", rig.address, 9000, 9001))
    before = await rig.running(backup, away)
    active = msgspec.structs.replace(backup, role=MonitorRole.ACTIVE, term=2)
    moved = msgspec.structs.replace(away, term=2, monitor=MonitorAddress("h3", rig.address, 9002, 9003, 2))
    after = await rig.running(active, moved)
    told = {"monitor/orders": ("active", 1), "exchange/bills/e1": ("monitor_clients", 9002)}
    for name, (counter, value) in told.items():
        async with asyncio.timeout(WAIT_SECONDS):
            while (await rig.ping(after[name])).counters[counter] != value:
                await asyncio.sleep(0.02)
        assert (await rig.ping(after[name])).counters["term"] == 2
        assert (after[name].pid, after[name].restarts) == (before[name].pid, 0)
    await rig.assign(msgspec.structs.replace(backup, term=3), moved)
    again = await rig.until(
        lambda found: (
            found["monitor/orders"].pid not in (0, before["monitor/orders"].pid)
            and found["monitor/orders"].state is ProcessState.RUNNING
        )
    )
    assert again["monitor/orders"].ports == before["monitor/orders"].ports
    assert (await rig.ping(again["monitor/orders"])).counters["active"] == 0


async def test_a_reviving_host_stops_what_is_not_wanted_before_it_registers(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"), *queue("bills"))
    await rig.kill_hcm()
    async with asyncio.timeout(WAIT_SECONDS):
        while await rig.session.get(paths.host(HOST)) is not None:
            await asyncio.sleep(0.02)
    assert {process.pid for process in before.values()} <= {one.pid for one in leftovers.find(rig.token)}
    await rig.assign(*queue("bills"), epoch=2)
    seen: list[set[int]] = []

    def registered(node: Node | None) -> None:
        if node is not None:
            seen.append({one.pid for one in leftovers.find(rig.token)})

    rig.session.watch_data(paths.host(HOST), registered)
    await rig.start()
    kept = {process.pid for process in before.values() if process.queue == "bills"}
    gone = {process.pid for process in before.values() if process.queue == "orders"}
    await rig.until(lambda found: {process.queue for process in found.values()} == {"bills"})
    assert seen
    assert kept <= seen[0]
    assert not gone & seen[0]

"""A real HCM with its fork server and forked children, a real ZooKeeper, and the test in the GCM's place.

Not covered: what the real child programs do; what the GCM assigns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from roq.coordination import paths
from roq.coordination.registration import parse_instance
from roq.coordination.session import Session
from roq.runtime.backoff import delays
from roq.runtime.liveness import start_time
from roq.runtime.run import EXIT_FOR_GOOD
from roq.runtime.shutdown import ask
from roq.testing.freezing import freeze
from roq.tools.local import leftovers
from roq.wire import hcm as wire
from roq.wire.assignment import (
    ProcessKind,
    ProcessSpec,
    ProcessState,
)
from roq.wire.hcm import HostPayload
from roq.wire.policy import Bounds, Policy
from roq.wire.process import Shutdown
from tests.integration.hcm_rig import HOST, WAIT_SECONDS, Report, Rig, queue


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[Rig]:
    session = await sessions(chroot)
    await session.ensure_path("")
    made = Rig(chroot, tmp_path / "state", session)
    made.directory.mkdir()
    yield made
    await made.close()


async def gone(pid: int) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while start_time(pid) is not None:
            await asyncio.sleep(0.01)


@pytest.mark.quick
async def test_starts_registers_runs_and_stops_a_queue(rig: Rig) -> None:
    await rig.start()
    node = await rig.session.get(paths.host(HOST))
    assert node is not None
    instance = parse_instance(node.data)
    assert (instance.address, instance.port) == (rig.address, rig.ready["port"])
    assert instance.payload_as(HostPayload).exchanges_max == 8

    found = await rig.running(*queue("orders"))
    assert {name: sorted(process.ports) for name, process in found.items()} == {
        "monitor/orders": ["clients", "control", "kpis"],
        "exchange/orders/e1": ["back", "control", "front"],
        "scaling/orders": ["control"],
    }
    ports = [port for process in found.values() for port in process.ports.values()]
    assert len(set(ports)) == 7
    assert all(7000 <= port < 17000 for port in ports)
    for process in found.values():
        pong = await rig.ping(process)
        assert (pong.name, pong.pid) == (process.name, process.pid)
        assert pong.counters["monitor_clients"] == found["monitor/orders"].ports["clients"]

    await rig.running(*queue("orders")[:2])
    await gone(found["scaling/orders"].pid)
    await rig.running()
    assert rig.report is not None
    assert rig.report.processes == ()


async def test_creation_is_fast(rig: Rig) -> None:
    await rig.start()
    await rig.running(*queue("first"))
    taken = []
    for number in range(5):
        specs = [spec for name in range(number + 1) for spec in queue(f"q{name}")]
        began = time.monotonic()
        await rig.running(*queue("first"), *specs)
        taken.append(time.monotonic() - began)
    assert min(taken) < 0.2, taken  # a fork; a Python of its own would take longer


@pytest.mark.quick
async def test_a_killed_child_is_back_at_once_on_the_same_ports(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    victim = before["exchange/orders/e1"]
    taken = []
    for _ in range(3):
        await asyncio.sleep(2.1)  # it served for a while: no quick death
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        dead = victim.pid
        after = await rig.until(
            lambda found, dead=dead: (  # type: ignore[misc]
                found["exchange/orders/e1"].pid not in (0, dead) and found["exchange/orders/e1"].state is ProcessState.RUNNING
            )
        )
        taken.append(time.monotonic() - began)
        victim = after["exchange/orders/e1"]
    assert victim.ports == before["exchange/orders/e1"].ports
    assert victim.restarts == 3
    assert "SIGKILL" in victim.error
    assert after["monitor/orders"] == before["monitor/orders"]
    assert min(taken) < 0.25, taken  # a fork; a Python of its own would take longer
    assert (await rig.ping(victim)).pid == victim.pid


async def test_a_hung_child_is_killed_and_restarted(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    hung = before["monitor/orders"]
    began = time.monotonic()
    freeze(hung.pid)
    after = await rig.until(
        lambda found: found["monitor/orders"].restarts == 1 and found["monitor/orders"].state is ProcessState.RUNNING
    )
    assert 2.0 < time.monotonic() - began < 7.0
    assert "no heartbeat" in after["monitor/orders"].error
    assert after["monitor/orders"].ports == hung.ports
    await gone(hung.pid)


async def test_crashing_children_are_given_up_with_their_reason(rig: Rig) -> None:
    await rig.start()
    specs = [ProcessSpec(ProcessKind.MONITOR, name) for name in ("crash", "defect", "good")]
    await rig.assign(*specs)
    failed = {"monitor/crash": "ProcessFailed: this program always gives up", "monitor/defect": "ValueError: a defect"}
    found = await rig.until(lambda found: bool(found) and all(found[name].state is ProcessState.FAILED for name in failed), 40)
    for name, reason in failed.items():
        assert found[name].pid == 0
        assert "exit code" in found[name].error
        assert reason in found[name].error
    assert found["monitor/good"].state is ProcessState.RUNNING
    await rig.assign(*specs)
    await rig.until(lambda found: found["monitor/crash"].state is ProcessState.STARTING)  # a new revision: another chance


@pytest.mark.quick
async def test_a_restarted_hcm_adopts_its_children(rig: Rig) -> None:
    session_seconds = 9.0
    await rig.start("--session-seconds", str(session_seconds))
    before = await rig.running(*queue("orders"))
    registered = await rig.session.get(paths.host(HOST))
    assert registered is not None
    await rig.kill_hcm()
    os.kill(before["scaling/orders"].pid, signal.SIGKILL)  # dies while no HCM watches
    began = time.monotonic()
    await rig.start("--session-seconds", str(session_seconds))
    assert time.monotonic() - began < session_seconds / 2  # it takes its own registration over, and does not wait for its end
    again = await rig.session.get(paths.host(HOST))
    assert again is not None
    assert again.czxid != registered.czxid

    def whole(found: Report) -> bool:
        assert rig.report is not None
        states = {process.state for process in found.values()}
        return found["scaling/orders"].pid != before["scaling/orders"].pid and states == {ProcessState.RUNNING}

    after = await rig.until(whole)
    for name in ("monitor/orders", "exchange/orders/e1"):
        assert after[name].pid == before[name].pid
        assert after[name].restarts == 0
    assert {name: process.ports for name, process in after.items()} == {name: process.ports for name, process in before.items()}
    os.kill(after["monitor/orders"].pid, signal.SIGKILL)  # an adopted child is watched like any other
    await rig.until(
        lambda found: (
            found["monitor/orders"].pid != before["monitor/orders"].pid
            and found["monitor/orders"].state is ProcessState.RUNNING
        )
    )
    await rig.running()


async def test_stopping_the_hcm_alone_leaves_children_for_the_next(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    assert rig.process is not None
    rig.process.terminate()
    assert await rig.ended() == 0, rig.log()
    assert all(start_time(process.pid) is not None for process in before.values())
    assert await rig.session.get(paths.host(HOST)) is not None
    await rig.start()
    after = await rig.until(lambda found: rig.report is not None and rig.report.incarnation != "")
    assert {process.pid for process in after.values()} == {process.pid for process in before.values()}


async def test_shutdown_host_leaves_nothing(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    assert await rig.call(wire.ShutdownHost("test")) == wire.OrderTaken()
    assert await rig.ended() == 0, rig.log()
    assert leftovers.find(rig.token) == []
    assert await rig.session.get(paths.host(HOST)) is None
    assert await rig.until(lambda found: not found) == {}
    await rig.start()
    after = await rig.until(lambda found: {process.state for process in found.values()} == {ProcessState.RUNNING})
    assert {name: process.ports for name, process in after.items()} == {name: process.ports for name, process in before.items()}


async def test_a_service_manager_does_not_start_again_what_was_stopped_for_good(rig: Rig) -> None:
    for _ in range(2):
        await rig.spawn(NOTIFY_SOCKET=str(rig.directory / "nobody"))
        await rig.until_ready()
        if rig.report is None:
            await rig.running()
            assert await rig.call(wire.ShutdownHost("test")) == wire.OrderTaken()
            assert await rig.ended() == EXIT_FOR_GOOD, rig.log()
        else:
            assert rig.process is not None
            rig.process.terminate()
            assert await rig.ended() == 0, rig.log()
            assert "leaving the processes to the next HCM" in rig.log()


async def test_a_host_that_was_empty_meanwhile_stops_too(rig: Rig) -> None:
    await rig.start()
    await rig.running(*queue("orders"))
    await rig.running()
    await rig.running(*queue("bills"))
    assert await rig.call(wire.ShutdownHost("test")) == wire.OrderTaken()
    assert await rig.ended(8.0) == 0, rig.log()
    assert leftovers.find(rig.token) == []


async def test_without_keep_children_a_signal_stops_all(rig: Rig) -> None:
    await rig.start("--no-keep-children")
    await rig.running(*queue("stubborn"))
    began = time.monotonic()
    assert isinstance(await ask(rig.address, rig.ready["control"], Shutdown("test")), msgspec.Struct)
    assert await rig.ended() == 0, rig.log()
    assert time.monotonic() - began < 8.0
    assert leftovers.find(rig.token) == []


async def test_a_lower_epoch_is_refused_also_after_a_restart(rig: Rig) -> None:
    await rig.start()
    found = await rig.running(*queue("orders"), epoch=5)
    await rig.assign(epoch=4)
    await rig.assign(epoch=4)
    await rig.kill_hcm()
    await rig.start()
    processes = await rig.call(wire.GetProcesses())
    assert isinstance(processes, wire.Processes)
    assert processes.report.epoch == 5
    assert {process.pid for process in processes.report.processes} == {process.pid for process in found.values()}
    await rig.running(epoch=5)


async def test_a_new_policy_reaches_the_running_process(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    policy = Policy(bounds=Bounds(max_exchanges=9))
    after = await rig.running(*queue("orders", policy=policy))
    async with asyncio.timeout(WAIT_SECONDS):
        while (await rig.ping(after["scaling/orders"])).counters["max_exchanges"] != 9:
            await asyncio.sleep(0.02)
    assert after["scaling/orders"].pid == before["scaling/orders"].pid
    assert after["scaling/orders"].restarts == 0


async def occupy(address: str, port: int) -> socket.socket:
    """Listen on a port whose owner was just killed: the kernel takes a moment to free it."""
    stranger = socket.socket()
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    async with asyncio.timeout(10):
        for wait in delays(0.01, 0.2):
            try:
                stranger.bind((address, port))
                break
            except OSError:
                await asyncio.sleep(wait)
    stranger.listen()
    return stranger


async def test_taken_ports_are_passed_over_at_first_and_waited_for_later(rig: Rig) -> None:
    with socket.socket() as stranger:
        stranger.bind((rig.address, 7001))
        stranger.listen()
        await rig.start()
        found = await rig.running(ProcessSpec(ProcessKind.MONITOR, "orders"))
        ports = found["monitor/orders"].ports
        assert sorted(ports.values()) == [7000, 7002, 7003]
    await rig.kill_hcm()
    os.kill(found["monitor/orders"].pid, signal.SIGKILL)
    await gone(found["monitor/orders"].pid)
    with await occupy(rig.address, ports["control"]):
        await rig.start()
        await rig.until(lambda found: "can't bind" in found["monitor/orders"].error)
    after = await rig.until(lambda found: found["monitor/orders"].state is ProcessState.RUNNING)
    assert after["monitor/orders"].ports == ports


async def test_ports_that_never_served_are_given_up_when_taken(rig: Rig) -> None:
    await rig.start()
    await rig.assign(ProcessSpec(ProcessKind.MONITOR, "crash"), ProcessSpec(ProcessKind.SCALING, "crash-not"))
    before = await rig.until(lambda found: bool(found) and found["monitor/crash"].restarts > 1)
    ports = before["monitor/crash"].ports
    with socket.socket() as stranger:
        stranger.bind((rig.address, ports["clients"]))
        stranger.listen()
        after = await rig.until(lambda found: found["monitor/crash"].ports != ports)
        assert ports["clients"] not in after["monitor/crash"].ports.values()
    assert "none runs on this host" in after["scaling/crash-not"].error


async def test_a_killed_fork_server_is_replaced(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    server = next(process for process in leftovers.find(rig.token) if process.command.startswith("roq-fork-server"))
    os.kill(server.pid, signal.SIGKILL)
    after = await rig.running(*queue("orders"), *queue("more"))
    assert after["monitor/orders"].pid == before["monitor/orders"].pid
    os.kill(before["monitor/orders"].pid, signal.SIGKILL)
    await rig.until(
        lambda found: found["monitor/orders"].restarts == 1 and found["monitor/orders"].state is ProcessState.RUNNING
    )


async def test_two_hosts_of_one_name(rig: Rig, tmp_path: Path) -> None:
    await rig.start()
    await rig.running(*queue("orders"))
    (tmp_path / "second").mkdir()
    second = Rig(rig.zookeeper, tmp_path / "second" / "state", rig.session)
    second.directory.mkdir()
    try:
        with pytest.raises(AssertionError, match="HostConflict"):
            await second.start()
        assert await second.ended() == 1
    finally:
        await second.close()
    await rig.running(*queue("orders"), *queue("more"))


async def test_one_hcm_per_state_directory(rig: Rig) -> None:
    await rig.start()
    second = Rig(rig.zookeeper, rig.directory, rig.session)
    try:
        with pytest.raises(AssertionError, match="another HCM runs"):
            await second.start()
        assert await second.ended() == 1
    finally:
        await second.close()


async def test_draining_is_told_and_remembered(rig: Rig) -> None:
    await rig.start("--exchanges-max", "3")
    await rig.running(*queue("orders"))
    assert await rig.call(wire.SetDraining(True)) == wire.OrderTaken()
    node = await rig.session.get(paths.host(HOST))
    assert node is not None
    assert parse_instance(node.data).payload_as(HostPayload).draining
    capacity = await rig.call(wire.GetCapacity())
    assert isinstance(capacity, wire.Capacity)
    assert (capacity.exchanges, capacity.exchanges_max) == (1, 3)
    async with asyncio.timeout(WAIT_SECONDS):
        while not msgspec.json.decode((rig.directory / "state.json").read_bytes())["draining"]:
            await asyncio.sleep(0.02)  # the state file follows in the background
    await rig.kill_hcm()
    await rig.start()
    processes = await rig.call(wire.GetProcesses())
    assert isinstance(processes, wire.Processes)
    assert processes.draining


async def test_children_run_on_and_are_watched_without_zookeeper(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    await rig.kill_hcm()
    os.kill(before["monitor/orders"].pid, signal.SIGKILL)
    address, rig.zookeeper = rig.zookeeper, "127.0.0.1:1/nothing"
    assert address != rig.zookeeper
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.start("--port", "6900"), 8.0)  # never ready: ZooKeeper is away
    rig.ready = {"port": 6900}
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            processes = await rig.call(wire.GetProcesses())
            assert isinstance(processes, wire.Processes)
            states = [process.state for process in processes.report.processes]
            if states == [ProcessState.RUNNING] * 3:
                break
            await asyncio.sleep(0.05)


async def test_a_vanished_registration_is_made_again(rig: Rig) -> None:
    await rig.start()
    before = await rig.running(*queue("orders"))
    registered = await rig.session.get(paths.host(HOST))
    assert registered is not None
    await rig.session.delete(paths.host(HOST))
    async with asyncio.timeout(WAIT_SECONDS):
        while await rig.session.get(paths.host(HOST)) is None:
            await asyncio.sleep(0.02)
    after = await rig.running(*queue("orders"))
    assert after["monitor/orders"].pid == before["monitor/orders"].pid

"""A leader whose provider is a program that is slow, hangs, or says no. The rest of the leader's work goes on meanwhile.

Not covered: machines that become hosts (test_fleet.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import roq
from roq.client.events import LOOK_SECONDS, EventKind
from roq.tools.authority import Authority
from roq.wire import gcm as wire
from roq.wire.fleet import FleetInfo, FleetLimits, GetFleet, MachineState, SetFleet
from tests.integration.gcm_bench import PATIENCE_SECONDS, Bench, eventually

LIMITS = FleetLimits(1, 1, boot_seconds=1.0, idle_seconds=1.0)
FOLDER = """#!/bin/sh
cd {folder}
case "$1" in
create) {create}; : >"$2" ;;
list) {list}; ls ;;
destroy) rm -f "$2" ;;
esac
"""


@pytest.fixture
async def bench(chroot: str) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(chroot, stack)


async def fleet_of(
    bench: Bench, place: Path, *, create: str = ":", list_: str = ":", seconds: float = 10.0, more: str = ""
) -> Path:
    """A leader with such a program; the folder with a file for each machine."""
    folder, program, path = place / "machines", place / "program", place / "fleet.toml"
    folder.mkdir()
    program.write_text(FOLDER.format(folder=folder, create=create, list=list_))
    program.chmod(0o700)
    path.write_text(f'provider = "command"\ncall_seconds = {seconds}\n{more}\n[command]\nprogram = ["{program}"]\n')
    path.chmod(0o600)
    await bench.gcm(fleet=path, security="none")
    return folder


async def states(bench: Bench) -> list[MachineState]:
    return [machine.state for machine in (await bench.ask(GetFleet(), FleetInfo)).machines]


@pytest.mark.quick
async def test_what_is_answered_during_a_slow_list_counts(bench: Bench, tmp_path: Path) -> None:
    folder = await fleet_of(bench, tmp_path, list_="sleep 2")
    await bench.ask(SetFleet(LIMITS, "t"), FleetInfo)

    async def first_is_gone() -> bool:
        return MachineState.GONE in await states(bench)  # it never became a host

    await eventually(first_is_gone)
    await bench.ask(SetFleet(FleetLimits(), "t2"), FleetInfo)

    async def none_left() -> bool:
        return {*await states(bench)} == {MachineState.GONE} and not list(folder.iterdir())

    await eventually(none_left)


async def test_a_program_that_hangs_is_given_up_and_nobody_waits_for_it(bench: Bench, tmp_path: Path) -> None:
    folder = await fleet_of(bench, tmp_path, create="sleep 600", seconds=0.5)
    host = await bench.host("own")
    await bench.hosts_alive(1)
    await bench.ask(SetFleet(LIMITS, "t"), FleetInfo)
    assert (await bench.ask(wire.CreateQueue("q", "t"), wire.QueueInfo)).ready
    assert host.name == "own"

    async def told() -> bool:
        return "took longer than 0.5 s: it was ended" in (await bench.ask(GetFleet(), FleetInfo)).problem

    await eventually(told)
    assert not list(folder.iterdir())


async def test_a_program_that_has_no_more(bench: Bench, tmp_path: Path) -> None:
    await fleet_of(bench, tmp_path, create="echo 'quota of 0 machines' >&2; exit 75")
    await bench.ask(SetFleet(LIMITS, "t"), FleetInfo)

    async def told() -> bool:
        return "quota of 0 machines" in (await bench.ask(GetFleet(), FleetInfo)).problem

    await eventually(told)
    assert len(await states(bench)) == 1, "the next try is in ten minutes"


async def test_a_card_that_can_not_be_made_ends_no_term(bench: Bench, tmp_path: Path) -> None:
    Authority.init(tmp_path / "authority.json")
    (tmp_path / "authority.json.lock").unlink(missing_ok=True)
    (tmp_path / "authority.json.lock").mkdir()  # as on a disk that can't be written
    await fleet_of(bench, tmp_path, more=f'authority = "{tmp_path}/authority.json"')
    await bench.ask(SetFleet(LIMITS, "t"), FleetInfo)
    epoch = (await bench.ask(wire.GetCluster(), wire.ClusterView)).epoch

    async def told() -> bool:
        return "must be able to write" in (await bench.ask(GetFleet(), FleetInfo)).problem

    await eventually(told)
    assert (await bench.ask(wire.GetCluster(), wire.ClusterView)).epoch == epoch


async def test_a_leader_without_a_provider_says_so(bench: Bench) -> None:
    await bench.gcm(security="none")
    assert (await bench.ask(GetFleet(), FleetInfo)).limits is None
    await bench.ask(SetFleet(LIMITS, "t"), FleetInfo)

    async def told() -> bool:
        return "has no provider" in (await bench.ask(GetFleet(), FleetInfo)).problem

    await eventually(told)
    assert await states(bench) == []


async def test_what_machines_go_through_is_told(bench: Bench, tmp_path: Path) -> None:
    await fleet_of(bench, tmp_path)
    async with roq.connect(bench.zookeeper) as cluster, asyncio.timeout(PATIENCE_SECONDS * 3):
        events = cluster.events()
        assert (await anext(events)).kind == EventKind.WATCHING
        await bench.ask(SetFleet(FleetLimits(1, 1, boot_seconds=2.5 * LOOK_SECONDS, idle_seconds=1.0), "t"), FleetInfo)
        ordered, gone = await _machines(events)
        await events.aclose()
    assert ordered.host == gone.host
    assert "is being made" in str(ordered)


async def _machines(events: AsyncGenerator[roq.ClusterEvent, None]) -> list[roq.ClusterEvent]:
    """That one was ordered, and that the same is gone: none becomes a host, and another one is ordered for each."""
    ordered = dict[str, roq.ClusterEvent]()
    async for event in events:
        if event.kind == EventKind.MACHINE_ORDERED:
            ordered[event.host] = event
        if event.kind == EventKind.MACHINE_GONE and event.host in ordered:
            return [ordered[event.host], event]
    return []

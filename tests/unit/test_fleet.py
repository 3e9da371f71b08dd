"""The fleet over time: one machine that is played, hours in steps of a second. Order and deaths: tests/model/fleet.py."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct
from rich.console import Console

from gcm import evacuation, fleet, transactions
from gcm.cluster import STORE_NAME, ClusterState, Host, HostRegistration, host_infos
from gcm.fleet import (
    ALL_SAFEGUARDS,
    FleetCall,
    FleetMemory,
    FleetReport,
    FleetSafeguards,
    FleetVerb,
    FleetWrite,
    MachineEvent,
)
from gcm.placement import has_room
from gcm.reconcile import STORE, changes, stamp
from roq.cli.doctor_cluster import check_fleet
from roq.cli.fleet import changed, fleet_view, per_hour
from roq.coordination import paths
from roq.coordination.link import Create, Delete, SetData
from roq.errors import CallError, InvalidConfiguration
from roq.wire.assignment import Leaving, ProcessKind, ProcessSpec, QueueRecord, QueueSettings
from roq.wire.fleet import FleetInfo, FleetLimits, MachineState, MachineView
from roq.wire.gcm import DrainHost
from roq.wire.hcm import HostPayload

HOUR = 3600
EXCHANGE, MONITOR = ProcessSpec(ProcessKind.EXCHANGE, "q", "x"), ProcessSpec(ProcessKind.MONITOR, "q")
FULL = Host("full", HostRegistration("10.0.0.1", 1, HostPayload("1", 0)))


@dataclass
class Stage:
    """A cluster whose one host has no slot, a provider, and a leader that looks once a second."""

    limits: FleetLimits
    guards: FleetSafeguards = ALL_SAFEGUARDS
    slots: int = 2
    boot_seconds: int = 3
    works: Callable[[FleetCall], str] = lambda call: ""  # what goes wrong with a call
    boots: bool = True
    exhausted: bool = False
    now: float = 0.0
    memory: FleetMemory = field(default_factory=FleetMemory)
    real: dict[str, float] = field(default_factory=dict)  # machine → when it was made
    calls: list[tuple[float, FleetCall]] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    data: set[str] = field(default_factory=set)
    most: int = 0  # machines there were at a time

    def __post_init__(self) -> None:
        self.cluster = fleet.set_limits(ClusterState(hosts={FULL.name: FULL}), self.limits, "f")

    def run(self, seconds: int, wanted: Callable[[float], bool] = lambda now: False) -> None:
        """wanted(now): a queue finds no slot, and asks every ten seconds."""
        for _ in range(seconds):
            self.now += 1
            if wanted(self.now) and self.now % 10 == 0 and not any(map(has_room, self.cluster.hosts.values())):
                self.memory = fleet.demanded(self.memory, "q", self.now)
            self._boot()
            for host in evacuation.to_empty(self.cluster):
                self.cluster = self.cluster if host in self.data else evacuation.emptied(self.cluster, host)
            for _ in range(10):
                if not self._turn():
                    break
            self.most = max(self.most, len(self.real))

    def _boot(self) -> None:
        for name, made in self.real.items():
            if self.boots and self.now - made >= self.boot_seconds and not self.cluster.host(name).alive:
                registered = HostRegistration("10.0.0.2", 1, HostPayload("1", self.slots))
                self.cluster = self.cluster.with_host(replace(self.cluster.host(name), registration=registered))

    def _turn(self) -> bool:
        steps, self.memory = fleet.decide(self.cluster, self.memory, self.now, self.slots, self.guards)
        for step in steps:
            match step:
                case FleetWrite():
                    self.cluster = fleet.after(self.cluster, step, self.now, self.guards)
                    fleet.check(self.cluster)
                case FleetCall():
                    self._call(step)
                case FleetReport(what):
                    self.reports.append(what)
        return any(isinstance(step, FleetWrite | FleetCall) for step in steps)

    def _call(self, call: FleetCall) -> None:
        self.calls.append((self.now, call))
        problem = self.works(call)
        if call.verb is FleetVerb.LIST:
            self.memory = fleet.listed(self.memory, None if problem else tuple(self.real), self.now, problem)
            return
        if call.verb is FleetVerb.CREATE and not problem:
            self.real.setdefault(call.name, self.now)
        elif call.verb is FleetVerb.DESTROY and not problem:
            self.real.pop(call.name, None)
            self.cluster = self.cluster.with_host(replace(self.cluster.host(call.name), registration=None))
        elif call.verb is FleetVerb.INSPECT:
            problem = "it keeps data" if call.name in self.data else ""
        self.memory = fleet.answered(self.memory, call, problem, self.now, exhausted=self.exhausted)

    def use(self, *processes: ProcessSpec) -> str:
        """These run on the machine that serves; its name."""
        name = next(name for name, one in self.cluster.machines.items() if one.state is MachineState.SERVING)
        host = replace(self.cluster.host(name), assigned={one.name: one for one in processes})
        self.cluster = self.cluster.with_host(host)
        return name

    def count(self, verb: FleetVerb) -> int:
        return sum(call.verb is verb for _, call in self.calls)

    def states(self) -> list[MachineState]:
        return [machine.state for machine in self.cluster.machines.values()]


def test_machines_at_least_are_made_and_kept() -> None:
    stage = Stage(FleetLimits(2, 5))
    stage.run(HOUR)
    assert stage.states() == [MachineState.SERVING] * 2
    assert stage.count(FleetVerb.CREATE) == 2
    assert not stage.reports


def test_one_comes_for_a_queue_and_goes_when_it_is_idle() -> None:
    stage = Stage(FleetLimits(0, 5, idle_seconds=100))
    stage.run(30, lambda now: True)
    name = stage.use(EXCHANGE, STORE)
    stage.run(HOUR)
    assert stage.states() == [MachineState.SERVING], "in use"
    stage.use(STORE)
    stage.run(99)
    assert stage.states() == [MachineState.SERVING], "not idle for so long"
    stage.run(20)
    assert stage.states() == [MachineState.GONE]
    assert not stage.real
    assert [host.host for host in host_infos(stage.cluster)] == ["full"], "what was given back is no lost host"
    stage.run(2 * HOUR)
    assert not stage.cluster.machines
    assert name not in stage.cluster.hosts, "its name is never used again"


def test_a_host_is_given_back_only_when_nothing_is_on_it() -> None:
    stage = Stage(FleetLimits(0, 5, idle_seconds=10))
    stage.run(15, lambda now: True)
    name = stage.use(MONITOR, STORE)
    stage.data.add(name)
    stage.run(20)
    assert stage.states() == [MachineState.RETURNING]
    assert stage.cluster.host(name).leaving is Leaving.EVERYTHING
    host = stage.cluster.host(name)
    stage.cluster = stage.cluster.with_host(replace(host, assigned={STORE_NAME: STORE}))
    stage.run(100)
    assert stage.states() == [MachineState.RETURNING]
    stage.data.clear()
    stage.run(30)
    assert stage.states() == [MachineState.GONE]


def test_what_can_not_be_emptied_serves_again_and_is_left_for_longer_each_time() -> None:
    stage = Stage(FleetLimits(0, 5, idle_seconds=60))
    stage.run(30, lambda now: True)
    name = stage.use(MONITOR)
    returns, before = 0, MachineState.SERVING
    for _ in range(12 * 60):
        stage.run(60)
        state = stage.cluster.machines[name].state
        returns += (before, state) == (MachineState.SERVING, MachineState.RETURNING)
        before = state
    assert 4 <= returns <= 12
    assert not stage.cluster.host(name).draining or before is MachineState.RETURNING
    assert 1 <= len(stage.reports) <= returns


def test_a_machine_that_is_wanted_again_is_kept() -> None:
    stage = Stage(FleetLimits(0, 1, idle_seconds=10))
    stage.run(15, lambda now: True)
    name = stage.use(MONITOR)
    stage.run(15)
    assert stage.states() == [MachineState.RETURNING]
    stage.run(11, lambda now: True)
    assert stage.cluster.machines[name].state is MachineState.SERVING
    assert not stage.cluster.host(name).draining
    assert stage.count(FleetVerb.CREATE) == 1


@pytest.mark.parametrize("limits", [FleetLimits(0, 2), FleetLimits(0, 9, cost=1.0, budget=2.9)], ids=["max", "budget"])
def test_no_more_than_allowed_and_the_reason_is_told_once(limits: FleetLimits) -> None:
    stage = Stage(limits, slots=0)
    stage.slots = 1
    stage.run(HOUR, lambda now: not stage.real)
    stage.use(EXCHANGE)
    stage.run(60, lambda now: True)
    for name in stage.real:
        host = replace(stage.cluster.host(name), assigned={EXCHANGE.name: EXCHANGE})
        stage.cluster = stage.cluster.with_host(host)
    stage.run(HOUR, lambda now: True)
    assert stage.most == 2
    assert len([what for what in stage.reports if "no machine more is allowed" in what]) == 1


def test_a_machine_that_never_boots_is_destroyed_and_the_next_one_waits_longer() -> None:
    stage = Stage(FleetLimits(1, 3, boot_seconds=60), boots=False)
    stage.run(4 * HOUR)
    made = [at for at, call in stage.calls if call.verb is FleetVerb.CREATE]
    gaps = [later - earlier for earlier, later in pairwise(made)]
    assert gaps[0] < 120
    assert gaps[-1] >= 600
    assert stage.most == 1
    assert len(stage.reports) == len(made), "one line for each, with its reason"
    assert all("no host of its name registered within 60 s" in what for what in stage.reports)


@pytest.mark.parametrize("verb", [FleetVerb.CREATE, FleetVerb.LIST, FleetVerb.DESTROY])
def test_a_provider_that_always_fails_is_asked_ever_more_rarely(verb: FleetVerb) -> None:
    least = FleetLimits(1, 3, idle_seconds=10)
    stage = Stage(least, works=lambda call: "no" if call.verb is verb else "")
    stage.run(60)
    if verb is FleetVerb.DESTROY:
        stage.cluster = fleet.set_limits(stage.cluster, FleetLimits(0, 3, idle_seconds=10), "f")
    stage.run(6 * HOUR)
    assert stage.count(verb) < (6 * HOUR / 100 if verb is FleetVerb.LIST else 60)
    assert stage.count(FleetVerb.CREATE) < 60
    assert 1 <= len(stage.reports) <= 60


def test_without_waiting_it_would_be_asked_all_the_time() -> None:
    """The control of the test before."""
    stage = Stage(FleetLimits(1, 3), replace(ALL_SAFEGUARDS, back_off=False))
    stage.works = lambda call: "no" if call.verb is FleetVerb.CREATE else ""
    stage.run(100)
    assert stage.count(FleetVerb.CREATE) > 50


def test_of_a_provider_that_has_no_more_none_is_asked_for_ten_minutes() -> None:
    stage = Stage(FleetLimits(1, 3), exhausted=True)
    stage.works = lambda call: "quota" if call.verb is FleetVerb.CREATE else ""
    stage.run(590)
    assert stage.count(FleetVerb.CREATE) == 1
    stage.run(60)
    assert stage.count(FleetVerb.CREATE) == 2


def test_a_machine_that_vanishes_is_given_up_and_replaced() -> None:
    stage = Stage(FleetLimits(1, 1, boot_seconds=30))
    stage.run(20)
    name = next(iter(stage.real))
    del stage.real[name]
    stage.cluster = stage.cluster.with_host(replace(stage.cluster.host(name), registration=None))
    stage.run(120)
    assert len(stage.real) == 1
    assert name not in stage.real


def test_what_looks_like_ours_is_left_alone_counted_and_told_once() -> None:
    stage = Stage(FleetLimits(1, 1))
    stage.real["roq-f-77"] = -1e9
    stage.boots = False
    stage.run(HOUR)
    assert list(stage.real) == ["roq-f-77"]
    assert stage.count(FleetVerb.CREATE) == 0, "it may be one of ours, and cost"
    assert len([what for what in stage.reports if "roq-f-77" in what]) == 1


def test_a_lost_host_s_machine_is_kept_as_long_as_something_counts_on_its_store() -> None:
    stage = Stage(FleetLimits(1, 2, boot_seconds=30))
    stage.run(20)
    name = stage.use(STORE)
    stage.data.add(name)
    stage.boots = False
    stage.cluster = stage.cluster.with_host(replace(stage.cluster.host(name), registration=None))
    stage.run(25)
    assert stage.count(FleetVerb.CREATE) == 1, "it may be back at once"
    stage.run(10)
    assert stage.count(FleetVerb.CREATE) == 2, "another one is made"
    stage.run(600)
    assert name in stage.real
    assert len([what for what in stage.reports if "start it again" in what]) == 1
    stage.data.clear()
    stage.run(60)
    assert name not in stage.real


def test_a_machine_that_was_made_twice_counts_twice_and_is_told_once() -> None:
    stage = Stage(FleetLimits(1, 2))
    stage.run(20)
    name = next(iter(stage.real))
    stage.memory = fleet.listed(replace(stage.memory, list_begun=stage.now), [name, name], stage.now)
    stage.cluster = fleet.set_limits(stage.cluster, FleetLimits(2, 2), "f")
    steps, stage.memory = fleet.decide(stage.cluster, stage.memory, stage.now, stage.slots)
    assert not [step for step in steps if isinstance(step, FleetWrite)]
    assert any(isinstance(step, FleetReport) and f"made {name} more than once" in step.what for step in steps)


def test_what_is_destroyed_takes_no_data_either() -> None:
    stage = Stage(FleetLimits(0, 5, idle_seconds=10))
    stage.run(15, lambda now: True)
    name = stage.use(MONITOR, STORE)
    stage.cluster = fleet.after(stage.cluster, FleetWrite(name, MachineEvent.IDLE), 0.0)
    refused = fleet.after(stage.cluster, FleetWrite(name, MachineEvent.EMPTIED), 0.0)
    assert refused.machines[name].state is MachineState.RETURNING, "its store has not ended"
    stage.cluster = stage.cluster.with_host(replace(stage.cluster.host(name), registration=None))
    host = fleet.after(stage.cluster, FleetWrite(name, MachineEvent.LOST), 0.0).host(name)
    assert (host.draining_wanted, host.leaving, [*host.assigned]) == (True, Leaving.EVERYTHING, [MONITOR.name])


def test_its_store_ends_before_it_is_found_empty() -> None:
    stage = Stage(FleetLimits(0, 5, idle_seconds=10))
    stage.run(15, lambda now: True)
    name = stage.use(STORE)
    stage.data.add(name)
    stage.run(60)
    assert stage.states() == [MachineState.RETURNING]
    assert stage.count(FleetVerb.INSPECT) == 0
    stage.cluster = evacuation.emptied(stage.cluster, name)
    stage.run(30)
    assert stage.count(FleetVerb.INSPECT) >= 1
    assert stage.states() == [MachineState.RETURNING], "something came while its store ended"


def running(stage: Stage, hosts: int, lost: Collection[str] = (), slots: int = 1) -> None:
    """Hosts with a queue each, of which these are away."""
    for number in range(hosts):
        name, queue = f"own-{number}", f"q{number}"
        registration = None if name in lost else HostRegistration("10.0.1.1", 1, HostPayload("1", slots))
        spec = ProcessSpec(ProcessKind.EXCHANGE, queue, "x")
        stage.cluster = stage.cluster.with_host(Host(name, registration, {spec.name: spec}))
        record = QueueRecord(queue, QueueSettings(), True, name, 1, {"x": name}, 0.0)
        stage.cluster = replace(stage.cluster, queues={**stage.cluster.queues, queue: record})


def test_hosts_that_restart_make_no_machine() -> None:
    """Of a full cluster one; or all, and somebody asks meanwhile."""
    names = [f"own-{number}" for number in range(8)]
    stage = Stage(FleetLimits(0, 5))
    running(stage, 8, names[:1])
    stage.run(25)
    running(stage, 8, names)
    stage.cluster = stage.cluster.with_host(replace(FULL, registration=None))
    stage.run(25, lambda now: True)
    assert stage.count(FleetVerb.CREATE) == 0
    running(stage, 8, slots=2)
    stage.run(60)
    running(stage, 8)
    stage.run(60)
    assert stage.count(FleetVerb.CREATE) == 0
    running(stage, 8, names[:1])
    stage.run(40)
    assert stage.count(FleetVerb.CREATE) == 1, "one that stays away is replaced"


def test_machines_at_least_are_not_made_again_for_a_moment_s_absence() -> None:
    stage = Stage(FleetLimits(2, 5))
    stage.run(20)
    for name in stage.real:
        stage.cluster = stage.cluster.with_host(replace(stage.cluster.host(name), registration=None))
    stage.memory, stage.boots = FleetMemory(), False  # a new leader
    stage.run(20)
    stage.boots = True
    stage.run(60)
    assert stage.count(FleetVerb.CREATE) == 2


@pytest.mark.parametrize("cordon", [Leaving.NOTHING, Leaving.EVERYTHING])
def test_what_an_operator_has_cordoned_stays_so(cordon: Leaving) -> None:
    stage = Stage(FleetLimits(0, 1, idle_seconds=10))
    stage.run(15, lambda now: True)
    name = stage.use(MONITOR)
    request = DrainHost(name, True, "t", cordon)
    stage.cluster = transactions.drain_host(stage.cluster, request)
    stage.run(15)
    assert (stage.states(), stage.cluster.host(name).leaving) == ([MachineState.RETURNING], Leaving.EVERYTHING)
    stage.run(600)
    assert stage.states() == [MachineState.SERVING], "it could not be emptied"
    assert (stage.cluster.host(name).draining_wanted, stage.cluster.host(name).leaving) == (True, cordon)


def test_a_returning_machine_that_is_uncordoned_serves() -> None:
    stage = Stage(FleetLimits(0, 1, idle_seconds=100))
    stage.run(15, lambda now: True)
    name = stage.use(MONITOR)
    stage.run(100)
    assert stage.states() == [MachineState.RETURNING]
    stage.cluster = transactions.drain_host(stage.cluster, DrainHost(name, False, "t"))
    stage.run(50)
    assert stage.states() == [MachineState.SERVING]
    assert not stage.cluster.host(name).draining


def test_a_lost_machine_keeps_no_other_one() -> None:
    stage = Stage(FleetLimits(2, 2, idle_seconds=10))
    stage.run(20)
    lost, other = stage.real
    stage.data |= {lost}
    stage.cluster = stage.cluster.with_host(replace(stage.cluster.host(lost), assigned={STORE_NAME: STORE}))
    stage.cluster = fleet.after(stage.cluster, FleetWrite(lost, MachineEvent.IDLE), 0.0)
    stage.cluster = stage.cluster.with_host(replace(stage.cluster.host(lost), registration=None))
    stage.boots = False
    stage.cluster = fleet.set_limits(stage.cluster, FleetLimits(0, 2, idle_seconds=10), "f")
    stage.run(60)
    assert stage.cluster.machines[other].state is MachineState.GONE
    assert lost in stage.real


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 3))
def test_nothing_thrashes(seed: int, least: int, more: int) -> None:
    """Demands that come and go, calls that fail or not: no machine is made in vain more often than the back-off allows."""
    chance = random.Random(seed)
    stage = Stage(FleetLimits(least, least + more, boot_seconds=20, idle_seconds=300))
    stage.works = lambda call: "no" if chance.random() < 0.3 else ""
    for _ in range(40):
        wanted = chance.random() < 0.5
        stage.boots = chance.random() < 0.8
        stage.run(60, lambda now, wanted=wanted: wanted)  # type: ignore[misc]
    assert stage.most <= least + more
    assert stage.count(FleetVerb.CREATE) <= 40 * (least + 1) / 2 + 20
    assert set(stage.real) <= set(stage.cluster.machines)


def test_records_in_zookeeper() -> None:
    """A machine brings the folder of its host, and both go."""
    limits = FleetLimits(0, 2)
    none = ClusterState()
    before = fleet.set_limits(none, limits, "f")
    assert [type(op) for op in changes(none, before)] == [Create]
    after = fleet.after(before, FleetWrite("", MachineEvent.WANTED), 1.0)
    paths_made = [op.path for op in changes(before, after)]
    assert paths_made == [paths.host_state("roq-f-1"), paths.machine("roq-f-1"), paths.FLEET]
    going = stamp(after, fleet.after(after, FleetWrite("roq-f-1", MachineEvent.FAILED), 1.0))
    assert [(type(op), op.path) for op in changes(after, going)] == [
        (SetData, paths.machine("roq-f-1")),
        (Create, paths.assignment("roq-f-1")),
    ]
    gone = fleet.after(going, FleetWrite("roq-f-1", MachineEvent.UNLISTED), 1.0)
    forgotten = fleet.after(gone, FleetWrite("roq-f-1", MachineEvent.FORGOTTEN), 1.0)
    deleted = [(type(op), op.path) for op in changes(gone, forgotten)]
    assert deleted == [(Delete, paths.machine("roq-f-1")), (Delete, paths.assignment("roq-f-1"))]


def test_what_people_are_shown_and_the_doctor_says() -> None:
    assert check_fleet(FleetInfo("", "", None, (), (), "")) == []
    machine = MachineView("roq-f-1", MachineState.SERVING, 0.0, True, 3, "")
    info = FleetInfo(
        "docker", "roq-f-", FleetLimits(0, 2, cost=0.5, budget=3.0), (machine,), ("orders",), "no card for roq-f-2"
    )
    (finding,) = check_fleet(info)
    assert (finding.found, bool(finding.advice)) == ("no card for roq-f-2", True)
    assert not check_fleet(replace_struct(info, problem=""))[0].advice
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(fleet_view(info))
    shown = console.export_text()
    for words in (
        "0 to 2, 3/h pay for 2 at 0.5/h",
        "no slot for: orders",
        "problem: no card for roq-f-2",
        "roq-f-1",
        "serving",
    ):
        assert words in shown


def test_what_an_operator_gives() -> None:
    before = FleetLimits(1, 5, cost=0.5)
    assert changed(before, None, 9, None, "3.5/h", "2m", None) == FleetLimits(1, 9, 0.5, 3.5, boot_seconds=120.0)
    for text in ("much", "-1/h", "inf"):
        with pytest.raises(CallError):
            per_hour(text)


@pytest.mark.parametrize(
    "limits",
    [
        FleetLimits(3, 2),
        FleetLimits(0, 2, budget=3.0),
        FleetLimits(2, 4, cost=2.0, budget=3.0),
        FleetLimits(0, 2, cost=-1.0),
        FleetLimits(0, 2, boot_seconds=0.0),
        FleetLimits(0, 2, idle_seconds=float("nan")),
    ],
)
def test_limits_that_make_no_sense(limits: FleetLimits) -> None:
    with pytest.raises(InvalidConfiguration):
        limits.check()

"""A fleet (gcm/fleet.py) between leaders that die and a provider that fails, lies, and is late. Every order is searched.

The world: what the provider really has, with which copies; which of that are hosts, what is on these; the calls under way. A
leader takes its decision in one step: it records all that it decided to record, else starts the calls. It dies between any two
steps, its calls live on. `tick` is a time in which everything that is timed runs out; calls are over by then, as each is
bounded, and what boots has. `moment` is one that is long enough for the next list. A list may omit anything, but not for as
long as what is gone is remembered. What is on a host is one process that is no Exchange, and its data. Data comes to whatever
host runs a store, also to one that is to be left: others may take none. The store of such a host ends at any time.

F1  nothing is destroyed that is not recorded
F2  nothing is destroyed with a process or data on it
F3  there is no machine of ours that is not recorded
F4  there are never more machines than allowed, but for those that were made after they had been destroyed
F5  left alone, all is as wanted in a while: what is wanted is there or reported as impossible, what is not wanted is gone

Not covered: how long anything takes (tests/unit/test_fleet.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gcm import fleet
from gcm.cluster import STORE_NAME, ClusterState, Host, HostRegistration
from gcm.fleet import FleetCall, FleetMemory, FleetReport, FleetSafeguards, FleetVerb, FleetWrite
from gcm.reconcile import STORE
from roq.wire.assignment import Leaving, ProcessKind, ProcessSpec
from roq.wire.fleet import FleetLimits, FleetRecord, MachineRecord, MachineState
from roq.wire.hcm import HostPayload
from tests.model.moves import Breach

TICK = 1_000.0  # more than every time-out here
MOMENT = max(fleet.LIST_SECONDS, fleet.LIST_SECONDS_MAX)
ID = "f"
PREFIX = f"roq-{ID}-"
STRANGER, FOREIGN = f"{PREFIX}900", "somebody-1"
PROCESS = ProcessSpec(ProcessKind.MONITOR, "q")
SETTLE_ROUNDS = 80
SLOTS = 1


class FleetConfig(NamedTuple):
    """The bounds of one search. faults: calls that fail, lie or are late; uses: processes placed on machines; lost: machines
    that vanish; demands: queues without a slot. stranger: the provider lists something that looks like ours."""

    least: int = 0
    most: int = 1
    demands: int = 1
    crashes: int = 0
    faults: int = 0
    uses: int = 0
    lost: int = 0
    duds: int = 0
    stranger: bool = False
    record_first: bool = True
    settle_one_in: int = 0  # of the states, from each of which F5 is looked at; 0: none
    guards: FleetSafeguards = fleet.ALL_SAFEGUARDS


class Held:
    """A leader's memory: hashable, its times counted from now."""

    def __init__(self, memory: FleetMemory) -> None:
        self.memory = memory
        self._key = _key(memory)
        self._hash = hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._key == other._key


def _key(memory: FleetMemory) -> tuple[Any, ...]:
    def flat(value: Any) -> Any:
        return tuple(sorted(value.items())) if isinstance(value, dict) else value

    return tuple((name, flat(value)) for name, value in vars(memory).items())


@dataclass(frozen=True)
class World:
    """One state."""

    records: tuple[tuple[str, MachineState], ...] = ()
    number: int = 0
    real: tuple[str, ...] = ()  # at the provider; twice: made twice
    late: frozenset[str] = frozenset()  # made when it had been destroyed
    hosts: frozenset[str] = frozenset()  # registered
    closed: frozenset[str] = frozenset()  # nothing new is placed there
    used: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()  # assigned
    duds: frozenset[str] = frozenset()  # never boot
    leader: Held = field(default_factory=lambda: Held(FleetMemory()))
    calls: tuple[FleetCall, ...] = ()  # of the leader
    orphans: tuple[FleetCall, ...] = ()  # nobody waits for any more
    unrecorded: tuple[str, ...] = ()  # made first (a safeguard is off)
    demands: int = 0
    crashes: int = 0
    faults: int = 0
    uses: int = 0
    losses: int = 0
    dud_budget: int = 0


class FleetModel:
    """To be searched (search.explore)."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self.settled = self._met = 0
        self._limits = FleetLimits(config.least, config.most, boot_seconds=300.0, idle_seconds=1.0)

    def start(self) -> World:
        """Nothing there but what is somebody else's."""
        config = self._config
        real = (FOREIGN, *((STRANGER,) if config.stranger else ()))
        return World(
            real=real,
            demands=config.demands,
            crashes=config.crashes,
            faults=config.faults,
            uses=config.uses,
            losses=config.lost,
            dud_budget=config.duds,
        )

    def end(self, state: World) -> None:
        """Time goes on for ever: there is no end."""

    def steps(self, state: World) -> Iterator[tuple[bool, str, World]]:
        """Everything that can happen."""
        self._met += 1
        if self._config.settle_one_in and self._met % self._config.settle_one_in == 0:
            self.settled += 1
            self._settle(state)
        yield from self._moves(state)

    def _moves(self, state: World) -> Iterator[tuple[bool, str, World]]:
        self._check(state)
        yield from self._led(state)
        for call in state.calls:
            yield from self._answered(state, call)
        for call in dict.fromkeys(state.orphans):
            yield True, f"{call.verb} {call.name}, late", self._performed(_once(state, orphan=call), call)
        yield from self._world(state)
        if (ticked := self._ticked(state)) is not None and ticked != state:
            yield True, "tick", ticked
        memory = state.leader.memory
        if memory.list_begun > -MOMENT and FleetCall(FleetVerb.LIST) not in memory.calls:
            yield True, "moment", replace(state, leader=Held(replace(memory, list_begun=-MOMENT)))

    # --- the leader -------------------------------------------------------------------------------------------------------

    def cluster(self, state: World) -> ClusterState:
        """As the leader sees it."""
        hosts = {}
        for name in {name for name, _ in state.records} | state.hosts:
            registration = HostRegistration("10.0.0.1", 1, HostPayload("1", SLOTS)) if name in state.hosts else None
            assigned = {PROCESS.name: PROCESS} if name in state.used else {}
            assigned |= {STORE.name: STORE} if name in state.stores else {}
            leaving = Leaving.EVERYTHING if name in state.closed else Leaving.NOTHING
            hosts[name] = Host(name, registration, assigned, name in state.closed, leaving)
        machines = {name: MachineRecord(name, kind, 0.0) for name, kind in state.records}
        return ClusterState(hosts=hosts, fleet=FleetRecord(ID, self._limits, state.number), machines=machines)

    def _decide(self, state: World) -> tuple[list[fleet.Step], FleetMemory]:
        return fleet.decide(self.cluster(state), state.leader.memory, 0.0, SLOTS, self._config.guards)

    def _led(self, state: World) -> Iterator[tuple[bool, str, World]]:
        steps, memory = self._decide(state)
        writes = [step for step in steps if isinstance(step, FleetWrite)]
        if state.unrecorded:
            name = state.unrecorded[0]
            recorded = (*state.records, (name, MachineState.BOOTING))
            yield True, f"record {name}", replace(state, unrecorded=state.unrecorded[1:], records=tuple(sorted(recorded)))
        elif writes:
            yield (
                True,
                "; ".join(f"record {w.name or 'a new one'} {w.event}" for w in writes),
                self._written(replace(state, leader=Held(memory)), writes),
            )
        else:
            calls = tuple(step for step in steps if isinstance(step, FleetCall))
            after = replace(state, leader=Held(memory), calls=(*state.calls, *calls))
            if after != state:
                yield True, f"call {', '.join(f'{c.verb} {c.name}' for c in calls)}", after

    def _written(self, state: World, writes: list[FleetWrite]) -> World:
        cluster = self.cluster(state)
        for write in writes:
            if not write.name and not self._config.record_first:
                name = f"{PREFIX}{state.number + 1}"
                return replace(state, number=state.number + 1, real=(*state.real, name), unrecorded=(name,))
            cluster = fleet.after(cluster, write, 0.0, self._config.guards)
        assert cluster.fleet is not None
        return replace(
            state,
            records=tuple(sorted((name, machine.state) for name, machine in cluster.machines.items())),
            number=cluster.fleet.number,
            closed=frozenset(name for name, host in cluster.hosts.items() if host.draining_wanted),
            stores=frozenset(name for name, host in cluster.hosts.items() if STORE_NAME in host.assigned),
        )

    # --- the provider -----------------------------------------------------------------------------------------------------

    def _answered(self, state: World, call: FleetCall) -> Iterator[tuple[bool, str, World]]:
        what = f"{call.verb} {call.name}"
        without = _once(state, call=call)
        if call.verb is FleetVerb.LIST:
            yield True, what, _listed(without, state.real)
            if state.faults:
                spent = replace(without, faults=state.faults - 1)
                yield False, f"{what} fails", _listed(spent, None)
                known = dict(state.records)
                for name in sorted(name for name in {*state.real} if known.get(name) not in (None, MachineState.GONE)):
                    yield False, f"{what} omits {name}", _listed(spent, tuple(n for n in state.real if n != name))
            return
        if call.verb is FleetVerb.INSPECT:
            yield True, what, _told(without, call, "data" if call.name in state.data else "")
            return
        done = self._performed(without, call)
        yield True, what, _told(done, call, "")
        if state.faults:
            spent = replace(without, faults=state.faults - 1)
            yield False, f"{what} fails", _told(spent, call, "no")
            yield False, f"{what} fails half-way", _told(self._performed(spent, call), call, "no")
            yield False, f"{what} is a lie", _told(spent, call, "")
            late = replace(spent, orphans=_sorted((*spent.orphans, call)))
            yield False, f"{what} hangs", _told(late, call, "time-out")
            if call.verb is FleetVerb.CREATE:
                twice = self._performed(spent, call)
                yield False, f"{what} twice", _told(replace(twice, real=(*twice.real, call.name)), call, "")

    def _performed(self, state: World, call: FleetCall) -> World:
        name = call.name
        if call.verb is FleetVerb.CREATE:
            if name in state.real:
                return state
            known = dict(state.records).get(name)
            late = state.late | {name} if known in (None, *fleet.OFF) else state.late
            return replace(state, real=tuple(sorted((*state.real, name))), late=late)
        if call.verb is not FleetVerb.DESTROY:
            return state
        if name in (FOREIGN, STRANGER):
            raise Breach(f"F1: {name} is destroyed")
        if name in state.used | state.data:
            raise Breach(f"F2: {name} is destroyed with something on it")
        return _vanished(state, name)

    # --- everything else --------------------------------------------------------------------------------------------------

    def _world(self, state: World) -> Iterator[tuple[bool, str, World]]:
        own = sorted({*state.real} - {FOREIGN, STRANGER})
        for name in own:
            if name not in state.hosts | state.duds:
                yield True, f"{name} registers", replace(state, hosts=state.hosts | {name})
                if state.dud_budget:
                    yield (
                        False,
                        f"{name} never boots",
                        replace(state, duds=state.duds | {name}, dud_budget=state.dud_budget - 1),
                    )
            if state.losses and name in state.hosts:
                yield False, f"{name} vanishes", replace(_vanished(state, name), losses=state.losses - 1)
                off = replace(state, hosts=state.hosts - {name}, used=state.used - {name}, duds=state.duds | {name})
                yield False, f"{name} is off", replace(off, losses=state.losses - 1)
        for name in sorted(state.hosts):
            if state.uses and name not in state.closed | state.used:
                more = replace(state, uses=state.uses - 1, used=state.used | {name}, stores=state.stores | {name})
                yield False, f"{name} is used", replace(more, data=state.data | {name})
            if state.uses and name in state.stores - state.data:
                yield False, f"a copy comes to {name}", replace(state, uses=state.uses - 1, data=state.data | {name})
        for name in sorted(state.hosts & state.closed & state.stores - state.used):
            yield True, f"the store of {name} ends", replace(state, stores=state.stores - {name})
        for name in sorted(state.used & state.closed):
            yield True, f"{name} is left", replace(state, used=state.used - {name})
        for name in sorted(state.data - state.used):
            if name in state.hosts and name not in state.closed:
                continue
            yield True, f"what {name} keeps goes elsewhere", replace(state, data=state.data - {name})
        if state.demands:
            leader = Held(fleet.demanded(state.leader.memory, "q", 0.0))
            yield False, "a queue finds no slot", replace(state, demands=state.demands - 1, leader=leader)
        if state.crashes:
            crashed = replace(state, crashes=state.crashes - 1, leader=Held(FleetMemory()), calls=(), unrecorded=())
            yield False, "the leader dies", replace(crashed, orphans=_sorted((*state.orphans, *_lasting(state.calls))))

    def _ticked(self, state: World) -> World | None:
        booting = {*state.real} - {FOREIGN, STRANGER} - state.hosts - state.duds
        if state.calls or state.orphans or state.unrecorded or booting:
            return None
        steps, memory = self._decide(state)
        if [step for step in steps if not isinstance(step, FleetReport)] or Held(memory) != state.leader:
            return None  # a leader that stands still for so long is one that died
        return replace(state, leader=Held(_aged(memory)))

    def _check(self, state: World) -> None:
        known = dict(state.records)
        own = {*state.real} - {FOREIGN, STRANGER}
        if unknown := own - {*known} - {*state.unrecorded}:
            raise Breach(f"F3: nothing is recorded of {sorted(unknown)}")
        if len(state.unrecorded) == 0 and len(own - state.late) > self._limits.affordable - (STRANGER in state.real):
            raise Breach(f"F4: {len(own)} machines")

    # --- F5 ---------------------------------------------------------------------------------------------------------------

    def _settle(self, state: World) -> None:
        """Nothing goes wrong any more. Breach: it does not become right. What never boots stays so."""
        seen = set[World]()
        state = replace(state, faults=0, crashes=0, uses=0, losses=0, demands=0, dud_budget=0)
        for _ in range(SETTLE_ROUNDS):
            moves = [(label, after) for must, label, after in self._moves(state) if must]
            seen.add(state)
            timed = ("tick", "moment")
            fresh = [after for label, after in moves if label not in timed] or [after for _, after in moves]
            if not fresh:
                break
            state = fresh[0]
            if state in seen and self._right(state):
                return
        if not self._right(state):
            raise Breach(f"F5: {state.records}, really {state.real}")

    def _right(self, state: World) -> bool:
        known = dict(state.records)
        own = {*state.real} - {FOREIGN, STRANGER}
        serving = {name for name, kind in known.items() if kind is MachineState.SERVING}
        kept = {name for name in serving if name in state.used | state.data}
        enough = len(serving) >= min(self._config.least, self._limits.affordable - (STRANGER in state.real))
        coming = [kind for kind in known.values() if kind is not MachineState.SERVING]
        return (
            own == serving
            and not coming
            and (enough or bool(state.duds))
            and len(serving) <= max(self._config.least, len(kept))
        )


def _lasting(calls: tuple[FleetCall, ...]) -> list[FleetCall]:
    return [call for call in calls if call.verb in (FleetVerb.CREATE, FleetVerb.DESTROY)]


def _once(state: World, call: FleetCall | None = None, orphan: FleetCall | None = None) -> World:
    calls, orphans = list(state.calls), list(state.orphans)
    if call is not None:
        calls.remove(call)
    if orphan is not None:
        orphans.remove(orphan)
    return replace(state, calls=tuple(calls), orphans=tuple(orphans))


def _told(state: World, call: FleetCall, problem: str) -> World:
    return replace(state, leader=Held(fleet.answered(state.leader.memory, call, problem, 0.0)))


def _listed(state: World, names: tuple[str, ...] | None) -> World:
    return replace(state, leader=Held(fleet.listed(state.leader.memory, names, 0.0)))


def _vanished(state: World, name: str) -> World:
    gone = frozenset((name,))
    return replace(
        state,
        real=tuple(one for one in state.real if one != name),
        late=state.late - gone,
        hosts=state.hosts - gone,
        used=state.used - gone,
        data=state.data - gone,
        stores=state.stores - gone,
        duds=state.duds - gone,
    )


def _aged(memory: FleetMemory) -> FleetMemory:
    """A tick later. What is older than a tick is as old as a tick: all time-outs are shorter, however often they doubled."""

    def older(moment: float) -> float:
        return max(moment - TICK, -TICK)

    def all_older(table: Any) -> dict[str, float]:
        return {name: older(moment) for name, moment in table.items()}

    return replace(
        memory,
        since={name: (kind, older(moment)) for name, (kind, moment) in memory.since.items()},
        idle=all_older(memory.idle),
        lost=all_older(memory.lost),
        destroyed=all_older(memory.destroyed),
        again=all_older(memory.again),
        demands={name: at for name, at in all_older(memory.demands).items() if at > -TICK},
        list_begun=older(memory.list_begun),
        listed_begun=older(memory.listed_begun),
        create_at=older(memory.create_at),
        failures=min(1, memory.failures),
        list_failures=min(1, memory.list_failures),
        tries={name: min(1, count) for name, count in memory.tries.items()},
        kept={name: min(1, count) for name, count in memory.kept.items()},
    )


def _sorted(calls: tuple[FleetCall, ...]) -> tuple[FleetCall, ...]:
    return tuple(sorted(calls, key=lambda call: (call.verb, call.name)))

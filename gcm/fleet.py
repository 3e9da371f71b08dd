"""Which machines a provider is asked for, and which it is given back. Pure.

Theory of operation. A machine is a record in ZooKeeper, its state in MachineState, and goes by TRANSITIONS, one way:

    creating → booting → serving ⇄ returning → destroying ⇄ gone → (forgotten)
        └─────────┴─────────┴──────────────────────┘  a failed call, a boot time-out, a lost machine

1. The record comes first. A call is made for what is recorded, and its result is recorded before anything follows from it. So a
   leader may die anywhere: the next one finds the record and makes the same call again. Calls are idempotent by name, and no
   name is used twice.
2. What is destroyed takes nothing new from the same write on: its host is draining, and runs no store. Only an empty one is
   returned: its store ends first, and whether anything counts on that is looked at once more behind it.
3. Gone is what is destroyed *and* not in a list that was begun after that. It is remembered for FORGET_SECONDS: a call of a
   leader before, or of one that was given up as hanging, may still make it; then it is destroyed again.
4. Nothing but what has a record is ever touched. What looks like ours without one is counted, reported, and left alone.
5. Whatever does not come off makes the next creation wait, twice as long each time. Each reason is reported once.

Times are steady seconds of one leader: the next one waits anew, and never acts early. Not covered: performing it
(fleet_keeper.py), the provider (providers/).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

import msgspec

from gcm.cluster import STORE_NAME, ClusterState, Host
from gcm.placement import has_room
from roq.coordination import paths
from roq.errors import InvalidConfiguration
from roq.wire.assignment import Leaving
from roq.wire.fleet import FleetLimits, FleetRecord, MachineRecord, MachineState

FORGET_SECONDS = 900.0  # longer than any call takes
DEMAND_SECONDS = 90.0  # who found no slot is remembered so long; it asks again
LIST_SECONDS = 30.0  # between two lists when nothing waits for one
SOON_SECONDS = 2.0  # and when something does
LIST_SECONDS_MAX = 120.0  # and while it fails
BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 5.0, 600.0
RETURN_SECONDS = 600.0  # what is not empty by then serves again
INSPECT_SECONDS_MAX = 20.0  # between two looks whether it is empty
AWAY_SECONDS = 30.0  # a host that is lost may be back by then, and none is made in its place
CREATIONS_AT_ONCE = 4  # machines on their way
KEPT_DOUBLINGS_MAX = 7  # of the idle time, for what could not be emptied

V = TypeVar("V")
OFF = (MachineState.DESTROYING, MachineState.GONE)
COMING = (MachineState.CREATING, MachineState.BOOTING)


class MachineEvent(StrEnum):
    """What moves a machine's record on."""

    WANTED = "wanted"  # there is to be one more
    MADE = "made"  # the provider has made it
    FAILED = "failed"  # that did not come off, or no host registered in time
    REGISTERED = "registered"  # a host of its name
    IDLE = "idle"  # it runs no Exchange, and is to be given back
    KEPT = "kept"  # it is wanted again, or can't be emptied
    EMPTIED = "emptied"  # nothing is on it any more
    LOST = "lost"  # its host, with nothing that counts on it, or with the machine
    UNLISTED = "unlisted"  # since it was destroyed
    REAPPEARED = "reappeared"  # though it was gone
    FORGOTTEN = "forgotten"  # nothing can bring it back any more


# None: there is no record. What is not named leaves a record as it is.
TRANSITIONS: Mapping[tuple[MachineState | None, MachineEvent], MachineState | None] = {
    (None, MachineEvent.WANTED): MachineState.CREATING,
    (MachineState.CREATING, MachineEvent.MADE): MachineState.BOOTING,
    (MachineState.CREATING, MachineEvent.REGISTERED): MachineState.SERVING,  # nobody has heard that it was made
    (MachineState.CREATING, MachineEvent.FAILED): MachineState.DESTROYING,  # half of it may be there
    (MachineState.BOOTING, MachineEvent.REGISTERED): MachineState.SERVING,
    (MachineState.BOOTING, MachineEvent.FAILED): MachineState.DESTROYING,
    (MachineState.SERVING, MachineEvent.IDLE): MachineState.RETURNING,
    (MachineState.SERVING, MachineEvent.LOST): MachineState.DESTROYING,
    (MachineState.RETURNING, MachineEvent.KEPT): MachineState.SERVING,
    (MachineState.RETURNING, MachineEvent.EMPTIED): MachineState.DESTROYING,
    (MachineState.RETURNING, MachineEvent.LOST): MachineState.DESTROYING,
    (MachineState.DESTROYING, MachineEvent.UNLISTED): MachineState.GONE,
    (MachineState.GONE, MachineEvent.REAPPEARED): MachineState.DESTROYING,
    (MachineState.GONE, MachineEvent.FORGOTTEN): None,
}


class FleetVerb(StrEnum):
    """What is asked outside: of the provider, or whether a host is empty."""

    CREATE = "create"
    DESTROY = "destroy"
    LIST = "list"
    INSPECT = "inspect"


@dataclass(frozen=True)
class FleetCall:
    """Ask this, and tell `answered` or `listed`. name: "" for LIST."""

    verb: FleetVerb
    name: str = ""


@dataclass(frozen=True)
class FleetWrite:
    """Record this: `after(cluster)`. A new machine's name is "" until then."""

    name: str
    event: MachineEvent
    reason: str = ""


@dataclass(frozen=True)
class FleetReport:
    """Say this to people: somebody has to do something."""

    what: str


Step = FleetCall | FleetWrite | FleetReport


@dataclass(frozen=True)
class FleetSafeguards:
    """Each is needed: the model switches them off in turn."""

    close_first: bool = True  # what is destroyed takes nothing new
    store_ends: bool = True  # and its store has ended when it is found empty
    empty_only: bool = True  # only what is empty is returned
    own_only: bool = True  # only what has a record is destroyed
    confirm: bool = True  # gone is what is not listed any more
    remember: bool = True  # what is gone is remembered
    count_all: bool = True  # whatever may cost money counts
    boot_bound: bool = True  # who does not register is destroyed
    back_off: bool = True  # failures make the next creation wait


ALL_SAFEGUARDS = FleetSafeguards()


@dataclass(frozen=True)
class FleetMemory:
    """What one leader has seen, beside the records. All times: its steady seconds."""

    since: Mapping[str, tuple[MachineState, float]] = field(default_factory=dict)  # seen in this state
    idle: Mapping[str, float] = field(default_factory=dict)  # serves nothing since
    lost: Mapping[str, float] = field(default_factory=dict)  # this host is away since
    calls: frozenset[FleetCall] = frozenset()  # under way
    done: Mapping[str, tuple[FleetVerb, str]] = field(default_factory=dict)  # answered, not recorded yet; what went wrong
    destroyed: Mapping[str, float] = field(default_factory=dict)  # when that was answered
    empty: frozenset[str] = frozenset()  # found so since they return, or are lost
    again: Mapping[str, float] = field(default_factory=dict)  # not asked about this one before
    tries: Mapping[str, int] = field(default_factory=dict)  # what went wrong with it in a row
    kept: Mapping[str, int] = field(default_factory=dict)  # how often it could not be emptied
    list_begun: float = 0.0
    listed: tuple[str, ...] | None = None  # None: not yet, or the last one failed
    listed_begun: float = 0.0  # when that one was begun
    list_failures: int = 0  # in a row
    list_problem: str = ""
    stale: frozenset[str] = frozenset()  # whose destruction was answered after that
    stale_next: frozenset[str] = frozenset()  # after the one under way was begun
    failures: int = 0  # creations that came to nothing, in a row
    create_at: float = 0.0  # no creation before
    demands: Mapping[str, float] = field(default_factory=dict)  # queue → when it found no slot
    reported: Mapping[str, str] = field(default_factory=dict)  # about what → words


# --- transitions of the records ----------------------------------------------------------------------------------------


def set_limits(cluster: ClusterState, limits: FleetLimits, fresh_id: str) -> ClusterState:
    """With these limits. fresh_id: of a fleet that had none. Raises InvalidConfiguration."""
    limits.check()
    if paths.FLEET in cluster.unreadable:
        raise InvalidConfiguration("the fleet's record is damaged, or of a newer version: the GCM's log says more")
    record = cluster.fleet or FleetRecord(fresh_id, limits)
    return replace(cluster, fleet=msgspec.structs.replace(record, limits=limits))


def prefix(record: FleetRecord) -> str:
    """What all its names begin with."""
    return f"roq-{record.id}-"


def number_of(name: str) -> int:
    """Of a machine: those made later have a higher one."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def after(cluster: ClusterState, write: FleetWrite, now: float, guards: FleetSafeguards = ALL_SAFEGUARDS) -> ClusterState:
    """With that recorded; unchanged if what it was decided from is not so any more. now: seconds since 1970."""
    record = cluster.machines.get(write.name)
    transition = record.state if record is not None else None, write.event
    if transition not in TRANSITIONS:
        return cluster
    state = TRANSITIONS[transition]
    if record is None:
        return _with_new(cluster, now, guards)
    if state is None:
        return _forgotten(cluster, record)
    host = cluster.host(write.name)
    if guards.empty_only and _overtaken(host, record.state, state, guards):
        return cluster
    cordon = record.cordon
    if state is MachineState.RETURNING:
        cordon = host.leaving if host.draining_wanted else None
    changed = MachineRecord(record.name, state, record.created, write.reason, cordon)
    cluster = replace(cluster, machines={**cluster.machines, record.name: changed})
    if state is MachineState.SERVING:
        return cluster.with_host(_reopened(host, cordon)) if record.state is MachineState.RETURNING else cluster
    return _marked(cluster, changed, guards)


def _overtaken(host: Host, before: MachineState, wanted: MachineState, guards: FleetSafeguards) -> bool:
    """It has come to life, or is used, since that was decided."""
    if wanted is MachineState.RETURNING:
        return host.exchanges > 0
    if wanted is not MachineState.DESTROYING or before in OFF:
        return False
    if before in COMING:
        return has_served(host)
    return host.alive and (before is MachineState.SERVING or _occupied(host, guards))


def _with_new(cluster: ClusterState, now: float, guards: FleetSafeguards) -> ClusterState:
    fleet = cluster.fleet
    if fleet is None or len(_costly(cluster, guards)) >= fleet.limits.affordable:
        return cluster
    fleet = msgspec.structs.replace(fleet, number=fleet.number + 1)
    machine = MachineRecord(f"{prefix(fleet)}{fleet.number}", MachineState.CREATING, now)
    return replace(cluster, fleet=fleet, machines={**cluster.machines, machine.name: machine})


def _marked(cluster: ClusterState, machine: MachineRecord, guards: FleetSafeguards) -> ClusterState:
    """Its host takes nothing new from now on. What is destroyed has no store, so that nothing is ever put there either: by
    those who know of no host that leaves, or find no other one."""
    if machine.state in COMING or not guards.close_first:
        return cluster
    host = cluster.host(machine.name)
    ended = machine.state in OFF and guards.store_ends
    assigned = {name: spec for name, spec in host.assigned.items() if name != STORE_NAME} if ended else host.assigned
    closed = replace(host, draining_wanted=True, leaving=Leaving.EVERYTHING, assigned=assigned)
    return cluster.with_host(closed) if closed != host else cluster


def _reopened(host: Host, cordon: Leaving | None) -> Host:
    """As it was before it was to be given back, unless somebody has said something else meanwhile."""
    if not _is_marked(host):
        return host
    return replace(host, draining_wanted=cordon is not None, leaving=cordon or Leaving.NOTHING)


def _is_marked(host: Host) -> bool:
    return host.draining_wanted and host.leaving is Leaving.EVERYTHING


def _forgotten(cluster: ClusterState, machine: MachineRecord) -> ClusterState:
    """Without it, and without its host: the name is never used again."""
    if cluster.host(machine.name).alive:
        return cluster
    machines = {name: one for name, one in cluster.machines.items() if name != machine.name}
    return replace(cluster, machines=machines, hosts={k: v for k, v in cluster.hosts.items() if k != machine.name})


def check(cluster: ClusterState) -> None:
    """The invariants of its records; AssertionError if one is broken."""
    fleet = cluster.fleet
    assert fleet is not None or not cluster.machines, "machines without a fleet"
    for name, machine in cluster.machines.items():
        assert fleet is not None
        assert name == f"{prefix(fleet)}{number_of(name)}", f"{name} is none of this fleet"
        assert number_of(name) <= fleet.number, f"the name of {name} will be used again"
        assert machine.state not in OFF or STORE_NAME not in cluster.host(name).assigned, f"{name} is destroyed with a store"


# --- questions ---------------------------------------------------------------------------------------------------------


def in_use(host: Host) -> bool:
    """Anything but a store is assigned to it."""
    return any(name != STORE_NAME for name in host.assigned)


def _occupied(host: Host, guards: FleetSafeguards) -> bool:
    """Anything is assigned to it."""
    return bool(host.assigned) if guards.store_ends else in_use(host)


def has_served(host: Host) -> bool:
    """It is registered, or was, as something was placed there."""
    return host.alive or bool(host.assigned)


def _costly(cluster: ClusterState, guards: FleetSafeguards) -> list[MachineRecord]:
    over = (MachineState.GONE,) if guards.count_all else OFF
    return [machine for machine in cluster.machines.values() if machine.state not in over]


def unmet(cluster: ClusterState, memory: FleetMemory, now: float) -> tuple[str, ...]:
    """Queues that want an Exchange and find no slot: those that were refused one lately, and those that lost one that no host
    has room for, and that was no host's restart. None while all hosts are away and may be back at once."""
    hosts = cluster.hosts
    used = [name for name, host in hosts.items() if host.assigned and not host.alive]
    away = any(not _is_missed(cluster, memory, name, now) for name in used)
    if any(map(has_room, hosts.values())) or (away and not any(host.alive for host in hosts.values())):
        return ()
    found = {queue for queue, at in memory.demands.items() if now - at < DEMAND_SECONDS}
    for queue, record in cluster.queues.items():
        if record.running and any(_is_missed(cluster, memory, host, now) for host in record.exchanges.values()):
            found.add(queue)
    return tuple(sorted(found))


def _is_missed(cluster: ClusterState, memory: FleetMemory, host: str, now: float) -> bool:
    """It is lost, and not for a moment: by now another one could be there."""
    bound = min(AWAY_SECONDS, cluster.fleet.limits.boot_seconds) if cluster.fleet is not None else AWAY_SECONDS
    return host in memory.lost and now - memory.lost[host] >= bound


# --- what has happened -------------------------------------------------------------------------------------------------


def demanded(memory: FleetMemory, queue: str, now: float) -> FleetMemory:
    """A queue was refused an Exchange for want of a slot."""
    kept = {name: at for name, at in memory.demands.items() if now - at < DEMAND_SECONDS}
    return replace(memory, demands={**kept, queue: now})


def hopeless(memory: FleetMemory) -> bool:
    """No machine will come soon."""
    return not memory.reported.keys().isdisjoint(("room", "create", "list"))


def met(memory: FleetMemory, queue: str) -> FleetMemory:
    """It got one."""
    return replace(memory, demands=_without(memory.demands, queue))


def answered(memory: FleetMemory, call: FleetCall, problem: str, now: float, *, exhausted: bool = False) -> FleetMemory:
    """A call about a machine has ended. problem: "" if it did what it should. exhausted: there are no more to be had."""
    memory = replace(memory, calls=memory.calls - {call})
    name, verb = call.name, call.verb
    if verb is FleetVerb.CREATE:
        memory = replace(memory, done={**memory.done, name: (verb, problem)})
        return failed(memory, now, exhausted=exhausted) if problem else memory
    if problem:
        count = memory.tries.get(name, 0) + 1
        wait = min(_backoff(count), INSPECT_SECONDS_MAX if verb is FleetVerb.INSPECT else BACKOFF_SECONDS_MAX)
        return replace(memory, tries={**memory.tries, name: count}, again={**memory.again, name: now + wait})
    memory = replace(memory, tries=_without(memory.tries, name), again=_without(memory.again, name))
    if verb is FleetVerb.DESTROY:
        memory = replace(memory, stale=memory.stale | {name}, stale_next=memory.stale_next | {name})
        return replace(memory, destroyed={**memory.destroyed, name: now})
    return replace(memory, empty=memory.empty | {name})


def listed(memory: FleetMemory, names: Iterable[str] | None, now: float, problem: str = "") -> FleetMemory:
    """A list has ended; None: it failed, with this problem."""
    memory = replace(memory, calls=memory.calls - {FleetCall(FleetVerb.LIST)}, list_problem=problem)
    if names is None:
        return replace(memory, listed=None, list_failures=memory.list_failures + 1)
    found = tuple(sorted(names))
    return replace(memory, listed=found, list_failures=0, listed_begun=memory.list_begun, stale=memory.stale_next)


def failed(memory: FleetMemory, now: float, *, exhausted: bool = False) -> FleetMemory:
    """A creation came to nothing."""
    count = memory.failures + 1
    wait = BACKOFF_SECONDS_MAX if exhausted else _backoff(count)
    return replace(memory, failures=count, create_at=max(memory.create_at, now + wait))


def _backoff(count: int) -> float:
    return min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * float(2 ** min(count - 1, 10)))


def _without(table: Mapping[str, V], name: str) -> dict[str, V]:
    return {key: value for key, value in table.items() if key != name}


def _seen(cluster: ClusterState, memory: FleetMemory, now: float) -> FleetMemory:
    """With the times from which waiting counts, and without what is about machines, or states of them, that are over."""
    machines = cluster.machines
    same = {n for n, (state, _) in memory.since.items() if n in machines and machines[n].state is state}
    since = {name: memory.since[name] if name in same else (one.state, now) for name, one in machines.items()}
    hosts = {name: cluster.host(name) for name in machines}
    serving = [name for name, one in machines.items() if one.state is MachineState.SERVING]
    idle = {name: memory.idle.get(name, now) for name in serving if hosts[name].alive and not hosts[name].exchanges}
    lost = {name: memory.lost.get(name, now) for name, host in {**cluster.hosts, **hosts}.items() if not host.alive}
    return replace(
        memory,
        demands={} if any(map(has_room, cluster.hosts.values())) else memory.demands,  # who still wants one asks again
        since=since,
        idle=idle,
        lost=lost,
        done={name: value for name, value in memory.done.items() if name in same},
        destroyed={name: value for name, value in memory.destroyed.items() if name in same},
        empty=frozenset(n for n in memory.empty & same if n in lost or machines[n].state is MachineState.RETURNING),
        again={name: value for name, value in memory.again.items() if name in same},
        tries={name: value for name, value in memory.tries.items() if name in same},
        kept={name: value for name, value in memory.kept.items() if name in machines},
    )


# --- the decision ------------------------------------------------------------------------------------------------------


@dataclass
class _Decision:
    """One look at everything."""

    cluster: ClusterState
    fleet: FleetRecord
    memory: FleetMemory
    now: float
    slots: int
    guards: FleetSafeguards
    steps: list[Step] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    looking: bool = False  # something waits for the next list

    def age(self, name: str) -> float:
        return self.now - self.memory.since[name][1]

    def may_ask(self, name: str) -> bool:
        return self.now >= self.memory.again.get(name, 0.0) and not any(call.name == name for call in self.memory.calls)

    def is_listed(self, name: str) -> bool:
        return self.memory.listed is not None and name in self.memory.listed and name not in self.memory.stale

    def is_unlisted(self, name: str) -> bool:
        return self.memory.listed is not None and name not in self.memory.listed and name not in self.memory.stale

    def not_listed_since(self, name: str, moment: float) -> bool:
        return self.is_unlisted(name) and self.memory.listed_begun >= moment

    def call(self, verb: FleetVerb, name: str = "") -> None:
        call = FleetCall(verb, name)
        self.steps.append(call)
        self.memory = replace(self.memory, calls=self.memory.calls | {call})
        if verb is FleetVerb.LIST:
            self.memory = replace(self.memory, list_begun=self.now, stale_next=frozenset())

    def write(self, name: str, event: MachineEvent, reason: str = "") -> None:
        machine = self.cluster.machines.get(name)
        assert (machine.state if machine is not None else None, event) in TRANSITIONS, f"{name} is {machine}, and {event}"
        self.steps.append(FleetWrite(name, event, reason))


def decide(
    cluster: ClusterState, before: FleetMemory, now: float, slots: int, guards: FleetSafeguards = ALL_SAFEGUARDS
) -> tuple[list[Step], FleetMemory]:
    """What is to be recorded now, or if that is nothing, asked. slots: Exchanges that a machine takes."""
    fleet = cluster.fleet
    if fleet is None:
        return [], before
    at = _Decision(cluster, fleet, _seen(cluster, before, now), now, slots, guards)
    for name in sorted(cluster.machines):
        _one(at, cluster.machines[name])
    _strangers(at)
    _create(at)
    _give_back(at)
    _list(at)
    reports, memory = _reports(at)
    if writes := [step for step in at.steps if isinstance(step, FleetWrite)]:  # what is to be asked is decided again with them
        memory = replace(memory, calls=before.calls, list_begun=before.list_begun, stale_next=before.stale_next)
        return [*writes, *reports], memory
    return [*at.steps, *reports], memory


def _one(at: _Decision, machine: MachineRecord) -> None:
    name = machine.name
    match machine.state:
        case MachineState.CREATING:
            _creating(at, name)
        case MachineState.BOOTING:
            _booting(at, name)
        case MachineState.SERVING:
            _serving(at, name)
        case MachineState.RETURNING:
            _returning(at, name)
        case MachineState.DESTROYING:
            _destroying(at, name)
        case MachineState.GONE:
            _gone(at, name)


def _creating(at: _Decision, name: str) -> None:
    verb, problem = at.memory.done.get(name, (None, ""))
    if has_served(at.cluster.host(name)):
        at.write(name, MachineEvent.REGISTERED)
    elif problem:
        at.problems["create"] = f"a machine could not be created: {problem}"
        at.write(name, MachineEvent.FAILED, problem)
    elif verb is FleetVerb.CREATE:
        at.write(name, MachineEvent.MADE)
    elif at.may_ask(name):
        at.call(FleetVerb.CREATE, name)


def _booting(at: _Decision, name: str) -> None:
    bound = at.fleet.limits.boot_seconds
    if has_served(at.cluster.host(name)):
        at.memory = replace(at.memory, failures=0, create_at=0.0)
        at.write(name, MachineEvent.REGISTERED)
    elif at.age(name) >= bound and at.guards.boot_bound:
        reason = f"no host of its name registered within {bound:g} s"
        at.problems["create"] = f"machine {name} is destroyed: {reason}"
        at.memory = failed(at.memory, at.now)
        at.write(name, MachineEvent.FAILED, reason)


def _serving(at: _Decision, name: str) -> None:
    lost = at.memory.lost.get(name)
    if lost is None:
        return
    bound = at.fleet.limits.boot_seconds
    if at.now - lost < bound:
        at.looking = True
    elif at.not_listed_since(name, lost + bound):
        at.write(name, MachineEvent.LOST, "its host is lost, and the provider lists it no longer")
    elif name in at.memory.empty:
        at.write(name, MachineEvent.LOST, f"its host is lost for {bound:g} s, and nothing counts on it any more")
    elif not in_use(at.cluster.host(name)) and at.may_ask(name):
        at.call(FleetVerb.INSPECT, name)
    if at.is_listed(name) and at.memory.tries.get(name):
        at.problems[name] = f"host {name} is lost, and something counts on what its store keeps: start it again"


def _returning(at: _Decision, name: str) -> None:
    if not at.cluster.host(name).alive:
        _serving(at, name)
    elif unmet(at.cluster, at.memory, at.now) or _serve(at) < at.fleet.limits.least:
        at.write(name, MachineEvent.KEPT, "it is wanted again")
    elif at.guards.close_first and not _is_marked(at.cluster.host(name)):
        at.write(name, MachineEvent.KEPT, "somebody says that it shall not be left")
    elif not at.guards.empty_only or (name in at.memory.empty and not _occupied(at.cluster.host(name), at.guards)):
        at.write(name, MachineEvent.EMPTIED, "it was idle")
    elif at.age(name) >= RETURN_SECONDS:
        at.memory = replace(at.memory, kept={**at.memory.kept, name: min(KEPT_DOUBLINGS_MAX, at.memory.kept.get(name, 0) + 1)})
        at.problems[name] = f"machine {name} can't be given back: not everything on it can be moved elsewhere"
        at.write(name, MachineEvent.KEPT, "it could not be emptied")
    elif at.may_ask(name) and not _occupied(at.cluster.host(name), at.guards):
        at.call(FleetVerb.INSPECT, name)


def _destroying(at: _Decision, name: str) -> None:
    destroyed, alive = at.memory.destroyed.get(name), at.cluster.host(name).alive
    if destroyed is None:
        if at.memory.tries.get(name):
            at.problems[name] = f"machine {name} could not be destroyed, and is asked for again and again"
        if at.may_ask(name):
            at.call(FleetVerb.DESTROY, name)
        return
    if not at.guards.confirm or (at.is_unlisted(name) and not alive):
        at.write(name, MachineEvent.UNLISTED, at.cluster.machines[name].reason)
        return
    at.looking = True
    if at.now - destroyed >= at.fleet.limits.boot_seconds and (alive or at.is_listed(name)):
        what = "its host is still there" if alive else "the provider still lists it"
        at.problems[name] = f"machine {name} should be destroyed, but {what}"
        at.memory = replace(at.memory, destroyed=_without(at.memory.destroyed, name))


def _gone(at: _Decision, name: str) -> None:
    since = at.memory.since[name][1]
    if at.cluster.host(name).alive or at.is_listed(name):
        at.write(name, MachineEvent.REAPPEARED, "it has come after it was destroyed")
    elif not at.guards.remember or at.not_listed_since(name, since + FORGET_SECONDS):
        at.write(name, MachineEvent.FORGOTTEN)


def _strangers(at: _Decision) -> None:
    """Never touched: it may be another's that only looks like ours."""
    if twice := sorted(name for name, count in Counter(at.memory.listed or ()).items() if count > 1):
        at.problems["twice"] = f"the provider made {', '.join(twice)} more than once: all of a name go together"
    names = _strange(at)
    if not names:
        return
    if at.guards.own_only:
        at.problems["strangers"] = f"nothing is recorded of {', '.join(names)}, named like machines of this fleet: left alone"
        return
    for name in names:
        if at.may_ask(name):
            at.call(FleetVerb.DESTROY, name)


def _strange(at: _Decision) -> list[str]:
    hosts = (name for name, host in at.cluster.hosts.items() if host.alive)
    found = {name for name in (*(at.memory.listed or ()), *hosts) if name.startswith(prefix(at.fleet))}
    return sorted(found - at.cluster.machines.keys())


def _unexpected(at: _Decision) -> int:
    """What costs beside the records."""
    names = at.memory.listed or ()
    return len(_strange(at)) + len(names) - len({*names})


def _serve(at: _Decision) -> int:
    """Machines that hosts run on."""
    machines = at.cluster.machines.values()
    return sum(one.state is MachineState.SERVING and at.cluster.host(one.name).alive for one in machines)


def _restarting(at: _Decision) -> int:
    """Machines whose hosts may be back at once."""
    serving = [name for name, one in at.cluster.machines.items() if one.state is MachineState.SERVING]
    return sum(name in at.memory.lost and not _is_missed(at.cluster, at.memory, name, at.now) for name in serving)


def _create(at: _Decision) -> None:
    limits, machines = at.fleet.limits, at.cluster.machines.values()
    if at.memory.failures:  # it stands until one serves
        at.problems.setdefault("create", at.memory.reported.get("create", ""))
    costly = len(_costly(at.cluster, at.guards))
    if costly > limits.affordable:
        at.problems["surplus"] = f"{costly} machines are there: those in use are kept, though {_bound(limits)}"
    coming = sum(one.state in COMING for one in machines)
    wanting = unmet(at.cluster, at.memory, at.now)
    for_queues = -(-len(wanting) // at.slots) if at.slots else 0
    missing = max(limits.least - _serve(at) - _restarting(at) - coming, for_queues - coming)
    if missing <= 0:
        return
    why = f"queue {wanting[0]} finds no Exchange slot" if wanting else f"fewer than {limits.least} machines serve"
    room = limits.affordable - costly - (_unexpected(at) if at.guards.count_all else 0)
    going = sum(one.state is MachineState.DESTROYING for one in machines)
    if room <= 0 < room + going:
        at.looking = True  # there will be room
    elif room <= 0:
        at.problems["room"] = f"{why}, and no machine more is allowed: {_bound(limits)}"
    elif at.now < at.memory.create_at and at.guards.back_off:
        return
    elif at.memory.listed is None:
        at.looking = True  # what it can't list is not trusted to be made
    else:
        for _ in range(min(missing, room, CREATIONS_AT_ONCE - coming)):
            at.write("", MachineEvent.WANTED, why)


def _bound(limits: FleetLimits) -> str:
    if limits.affordable < limits.most:
        return f"the budget of {limits.budget:g}/h pays for {limits.affordable} at {limits.cost:g}/h"
    return f"max is {limits.most}"


def _give_back(at: _Decision) -> None:
    """One at a time, the one that is idle longest, while nothing is wanted or on its way. What is off keeps no other one."""
    machines = at.cluster.machines
    under_way = [name for name, one in machines.items() if one.state is MachineState.RETURNING and at.cluster.host(name).alive]
    if under_way or any(one.state in COMING for one in machines.values()):
        return
    if unmet(at.cluster, at.memory, at.now) or _serve(at) <= at.fleet.limits.least:
        return

    def due(name: str) -> bool:
        wait = at.fleet.limits.idle_seconds * float(1 << at.memory.kept.get(name, 0))
        return at.now - at.memory.idle[name] >= wait

    if found := sorted((since, name) for name, since in at.memory.idle.items() if due(name)):
        at.write(found[0][1], MachineEvent.IDLE, "it runs no Exchange")


def _list(at: _Decision) -> None:
    if FleetCall(FleetVerb.LIST) in at.memory.calls:
        if "list" in at.memory.reported:
            at.problems["list"] = at.memory.reported["list"]
        return
    if not at.cluster.machines and not at.fleet.limits.most:
        return
    never = at.memory.listed is None and not at.memory.list_begun
    wait = SOON_SECONDS if at.looking else LIST_SECONDS
    if at.memory.list_failures:
        at.problems["list"] = f"machines can't be listed, and none is made: {at.memory.list_problem}"
        wait = min(LIST_SECONDS_MAX, _backoff(at.memory.list_failures))
    if never or at.now - at.memory.list_begun >= wait:
        at.call(FleetVerb.LIST)


def _reports(at: _Decision) -> tuple[list[FleetReport], FleetMemory]:
    """What is new of what is wrong."""
    problems = {about: what for about, what in at.problems.items() if what}
    fresh = [FleetReport(what) for about, what in problems.items() if at.memory.reported.get(about) != what]
    return fresh, replace(at.memory, reported=problems)

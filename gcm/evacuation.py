"""How queues and work queues leave a host that keeps running: what is done next about one of them. Pure.

What is to leave a host an operator says (`Host.leaving`), or the host itself that is about to stop (`Host.stopping`). Whoever
leads looks at the present state only and takes one step at a time, each of which a next leader may repeat or go on from.
Something new runs before something old ends:

Monitor, master   a backup (standby) that runs on a staying host takes over under the next term; if there is none, one is added
backup, standby   another one runs first, if any host takes it; then it goes
Exchange          another one, whose id says whose place it takes, runs first; then the Monitor drains the old one, which ends
anything stopped  is written to another host

What is one too many, as after a step that was called off, goes again from the host that has most. Lost hosts are for
recovery.py; what stores keep is moved by whoever owns it (roq/log/replicated, roq/shuffle). Carried out by evacuator.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from gcm.cluster import (
    STORE_NAME,
    ClusterState,
    Host,
    exchange_name,
    failure,
    is_running,
    master_name,
    monitor_address,
    monitor_name,
)
from gcm.placement import place_exchange, place_master, place_monitor, refilled, takes_monitor
from gcm.transactions import successor, successor_id
from roq.errors import HostFull, HostNotFound, NoHosts
from roq.wire.assignment import LEASE_UNKNOWN_SECONDS, FormerProcess, Leaving, MonitorAddress, ProcessKind, QueueRecord
from roq.wire.fleet import MachineState
from roq.wire.hosts import HostRemains
from roq.wire.work_queue import WorkQueueRecord

FORMER_MAX = 64
WAITS_MAX = 5  # reasons that are told of one host

Place = Callable[[Collection[str]], Host | None]  # a host for one more, beside those


@dataclass(frozen=True)
class DrainExchange:
    """Have the Monitor move everybody away from this Exchange; then it goes (`drained`)."""

    queue: str
    exchange: str
    monitor: MonitorAddress


@dataclass(frozen=True)
class StepWaits:
    """Nothing can be done now. why: for people."""

    why: str


@dataclass(frozen=True)
class Seats:
    """Hosts of a queue's Monitors, or of a work queue's masters."""

    active: str
    backups: tuple[str, ...]


Step = ClusterState | DrainExchange | StepWaits | None  # the next cluster; what must be done first; None: nothing is to be done


def leaves(cluster: ClusterState, host: str) -> bool:
    """Processes are to leave this host, which lives."""
    at = cluster.host(host)
    return at.alive and (at.leaving is not Leaving.NOTHING or at.stopping)


def subjects(cluster: ClusterState) -> list[str]:
    """Queues and work queues about which something is to be done, or waited for."""
    return [subject for subject in cluster.records() if _concerned(cluster, subject)]


def _concerned(cluster: ClusterState, subject: str) -> bool:
    record = cluster.record(subject)
    if record is None:
        return False
    if any(leaves(cluster, name) for name in cluster.hosts_of(record)):
        return True
    if isinstance(record, WorkQueueRecord):
        return len(record.standby_hosts) > record.standbys
    surplus = len(record.backups) > record.settings.replication - 1
    return surplus or (record.running and any(_replacements(record)))


def step(cluster: ClusterState, subject: str, chance: random.Random) -> Step:
    """What is next about this queue or work queue."""
    record = cluster.record(subject)
    if record is None or not _concerned(cluster, subject):
        return None
    if lost := [name for name in cluster.hosts_of(record) if not cluster.host(name).alive]:
        return StepWaits(f"what {record.name} had on lost host {lost[0]} is placed elsewhere first")
    if isinstance(record, WorkQueueRecord):
        return _work_queue_step(cluster, record, chance)
    return _queue_step(cluster, record, chance) if record.running else _at_rest(cluster, record, chance)


def changed(cluster: ClusterState, subject: str, chance: random.Random) -> ClusterState:
    """With the next step, if that is a change of the cluster."""
    after = step(cluster, subject, chance)
    return after if isinstance(after, ClusterState) else cluster


def drained(cluster: ClusterState, queue: str, exchange: str) -> ClusterState:
    """Nothing passes the Exchange any more: it ends, unless it is the only one by now."""
    record = cluster.queues.get(queue)
    if record is None or exchange not in record.exchanges or len(record.exchanges) == 1:
        return cluster
    return _with_queue(cluster, record, exchanges={id: host for id, host in record.exchanges.items() if id != exchange})


def emptied(cluster: ClusterState, host: str) -> ClusterState:
    """Nothing counts on its store any more: that ends, and with it whatever the host shall run."""
    at = cluster.host(host)
    return cluster.with_host(replace(at, assigned={})) if _has_only_its_store(at) else cluster


def to_empty(cluster: ClusterState) -> list[str]:
    """Evacuated hosts that run nothing any more but a store."""
    return [name for name, host in cluster.hosts.items() if host.alive and _has_only_its_store(host)]


def _has_only_its_store(host: Host) -> bool:
    return host.leaving is Leaving.EVERYTHING and [*host.assigned] == [STORE_NAME]


# --- Monitors and masters ------------------------------------------------------------------------------------------------


def _seats_step(cluster: ClusterState, seats: Seats, wanted: int, name: str, place: Place) -> Seats | StepWaits | None:
    """wanted: backups. name: of the process, the same on each host."""
    active, backups = seats.active, seats.backups
    failed = [host for host in backups if failure(cluster, host, name) is not None]
    staying = [host for host in backups if not leaves(cluster, host) and host not in failed]
    ready = [host for host in staying if is_running(cluster, host, name)]
    going = [host for host in backups if leaves(cluster, host)]
    wanted_staying = wanted + leaves(cluster, active)  # one of them becomes the active one
    if going or leaves(cluster, active):
        if len(staying) < wanted_staying:
            if (more := _added(seats, place)) is not None:
                return more
            if back := [host for host in (active, *going) if _is_given_back(cluster, host)]:
                return StepWaits(f"no other host takes {name} of machine {back[0]}, which is not given back without that")
        if len(ready) < len(staying):
            return StepWaits(f"{name} does not run on {', '.join(staying)} yet")
        if going and (ready or not leaves(cluster, active)):
            return Seats(active, _less(backups, going[0]))
        if ready:
            return _activated(cluster, seats, ready)
        return StepWaits(failure(cluster, failed[0], name) or "" if failed else f"no other host takes {name}")
    if len(backups) <= wanted:
        return None
    if failed:
        return Seats(active, _less(backups, failed[0]))
    if len(ready) < len(backups):
        return StepWaits(f"{name} does not run on {', '.join(staying)} yet")
    fullest = max((active, *backups), key=lambda host: (_load(cluster, host), host))
    return _activated(cluster, seats, ready) if fullest == active else Seats(active, _less(backups, fullest))


def _is_given_back(cluster: ClusterState, host: str) -> bool:
    """A machine of the fleet that goes by itself: nobody asked for fewer copies of anything."""
    machine = cluster.machines.get(host)
    return machine is not None and machine.state is MachineState.RETURNING


def _activated(cluster: ClusterState, seats: Seats, ready: Iterable[str]) -> Seats:
    chosen = min(ready, key=lambda host: (_load(cluster, host), host))
    return Seats(chosen, _less(seats.backups, chosen))


def _added(seats: Seats, place: Place) -> Seats | None:
    host = place((seats.active, *seats.backups))
    return Seats(seats.active, (*seats.backups, host.name)) if host is not None else None


def _load(cluster: ClusterState, host: str) -> int:
    at = cluster.host(host)
    return at.monitors + at.masters


def _less(hosts: tuple[str, ...], host: str) -> tuple[str, ...]:
    return tuple(one for one in hosts if one != host)


def _work_queue_step(cluster: ClusterState, record: WorkQueueRecord, chance: random.Random) -> Step:
    seats = Seats(record.master_host, record.standby_hosts)

    def place(taken: Collection[str]) -> Host | None:
        return place_master(cluster, taken, chance)

    after = _seats_step(cluster, seats, record.standbys, master_name(record.name), place)
    if not isinstance(after, Seats):
        return after
    term = record.term + (after.active != record.master_host)
    moved = msgspec.structs.replace(record, master_host=after.active, standby_hosts=after.backups, term=term)
    return replace(cluster, work_queues={**cluster.work_queues, record.name: moved})


def _queue_step(cluster: ClusterState, record: QueueRecord, chance: random.Random) -> Step:
    seats = Seats(record.monitor_host, record.backups)

    def place(taken: Collection[str]) -> Host | None:
        return place_monitor(cluster, taken, chance)

    after = _seats_step(cluster, seats, record.settings.replication - 1, monitor_name(record.name), place)
    if after is None:
        return _exchange_step(cluster, record, chance)
    if not isinstance(after, Seats):
        return after
    if after.active == record.monitor_host:
        return _with_queue(cluster, record, backups=after.backups)
    lost, planned = (tuple(one for one in record.former if one.planned is each) for each in (False, True))
    former = (*lost[-FORMER_MAX:], *planned[-1:], _former_monitor(cluster, record))  # those before have been fenced
    told = {"monitor_host": after.active, "backups": after.backups, "term": record.term + 1, "former": former}
    return _with_queue(cluster, record, **told)


def _former_monitor(cluster: ClusterState, record: QueueRecord) -> FormerProcess:
    """The Monitor that ends: the one after it asks it who was with it."""
    at, name = cluster.host(record.monitor_host), monitor_name(record.name)
    process, report = at.running.get(name), at.report
    if process is None or report is None:
        return FormerProcess(name, at.name, planned=True)
    lease = report.lease_seconds or LEASE_UNKNOWN_SECONDS
    return FormerProcess(name, at.name, "", report.address, process.ports.get("control", 0), lease, planned=True)


# --- Exchanges -----------------------------------------------------------------------------------------------------------


def _replacements(record: QueueRecord) -> Iterator[str]:
    """Exchanges whose place another one is about to take."""
    if len(record.exchanges) < 2:
        return iter(())
    return (id for id in record.exchanges if successor(record, id) is not None)


def _exchange_step(cluster: ClusterState, record: QueueRecord, chance: random.Random) -> Step:
    going = next(_replacements(record), None)
    if going is None:
        going = next((id for id, host in record.exchanges.items() if leaves(cluster, host)), None)
    if going is None:
        return None
    other = successor(record, going)
    if other is None:
        return replaced(cluster, record, going, "", chance)
    host, name = record.exchanges[other], exchange_name(record.name, other)
    if failure(cluster, host, name) is not None:  # placed anew, elsewhere
        return _with_queue(cluster, record, exchanges={id: at for id, at in record.exchanges.items() if id != other})
    monitor = monitor_address(cluster, record)
    if monitor is None or not is_running(cluster, host, name):
        return StepWaits(f"{name} does not run on {host} yet" if monitor else f"no Monitor of queue {record.name} serves")
    return DrainExchange(record.name, going, monitor)


def replaced(
    cluster: ClusterState, record: QueueRecord, exchange: str, host: str, chance: random.Random
) -> ClusterState | StepWaits:
    """With one more Exchange, on `host` or where most room is, which takes the place of this one."""
    try:
        at = place_exchange(cluster, host, chance).name
    except (HostFull, HostNotFound, NoHosts) as error:
        return StepWaits(f"Exchange {exchange} of queue {record.name} has no other place: {error}")
    exchanges = {**record.exchanges, successor_id(record, exchange): at}
    return _with_queue(cluster, record, exchanges=exchanges)


def _at_rest(cluster: ClusterState, record: QueueRecord, chance: random.Random) -> Step:
    """A stopped queue: nothing of it runs, so it is written elsewhere at once."""
    active = record.monitor_host
    if leaves(cluster, active):
        new = place_monitor(cluster, (), chance)
        if new is None:
            return StepWaits(f"no other host takes queue {record.name}")
        active = new.name
    kept = [host for host in record.backups if host != active and not leaves(cluster, host)]
    backups = refilled(
        kept,
        record.settings.replication - 1,
        lambda _: False,
        lambda taken: place_monitor(cluster, (active, *taken), chance),
    )
    exchanges = dict(record.exchanges)
    for id, host in record.exchanges.items():
        if leaves(cluster, host):
            try:
                exchanges[id] = place_exchange(cluster, "", chance).name
            except (HostFull, NoHosts) as error:
                return StepWaits(f"stopped queue {record.name} has no other place: {error}")
    backups = backups[: record.settings.replication - 1]
    return _with_queue(cluster, record, monitor_host=active, backups=backups, exchanges=exchanges)


def _with_queue(cluster: ClusterState, record: QueueRecord, **fields: object) -> ClusterState:
    after = msgspec.structs.replace(record, **fields)
    return replace(cluster, queues={**cluster.queues, record.name: after})


# --- whether it can be, and how far it is --------------------------------------------------------------------------------


def check_possible(cluster: ClusterState, host: str, leaving: Leaving, copies: Mapping[str, int]) -> None:
    """Raises HostNotFound, NoHosts, HostFull: what is to leave would find no place. copies: wanted of what its store keeps, by
    what that is, in words."""
    at = cluster.hosts.get(host)
    if at is None or not at.alive:
        raise HostNotFound(f"no live host is named {host!r}: what ran on a lost one is placed elsewhere by itself")
    others = [other for other in cluster.hosts.values() if other.name != host and takes_monitor(other)]
    if not others:
        raise NoHosts(f"no other host takes what is on {host!r}: add one, or `roq host uncordon` one, first")
    free = sum(max(0, other.exchanges_max - other.exchanges) for other in others)
    if at.exchanges > free:
        raise HostFull(f"{at.exchanges} Exchanges are on host {host!r}, the others have {free} free slots: add a host first")
    what, wanted = max(copies.items(), key=lambda item: item[1], default=("", 0))
    if leaving is Leaving.EVERYTHING and wanted > len(others):
        short = f"{what} wants {wanted} copies, and {len(others)} other hosts could keep them"
        raise NoHosts(f"host {host!r} can't be evacuated: {short}. Add a host first; `roq host drain` moves processes alone")


def seats_wanted(cluster: ClusterState, host: str) -> dict[str, int]:
    """How many hosts are wanted by each queue and work queue that has a Monitor or master here; by what that is, in words."""
    here = ((name, one.settings.replication) for name, one in cluster.queues.items() if host in one.monitor_hosts)
    queues = {f"the Monitor of {name}": count for name, count in here}
    works = {f"the master of {name}": one.standbys + 1 for name, one in cluster.work_queues.items() if host in one.hosts}
    return {**queues, **works}


def processes_left(cluster: ClusterState, host: str, chance: random.Random) -> HostRemains:
    """What is to run there, or runs there still; without what its store keeps."""
    at = cluster.host(host)
    kinds = {**{name: spec.kind for name, spec in at.assigned.items()}, **{name: one.kind for name, one in at.running.items()}}
    kinds |= _stopped_here(cluster, host)
    count = {kind: sum(one is kind for one in kinds.values()) for kind in ProcessKind}
    waits: list[str] = []
    if at.leaving is Leaving.EVERYTHING and at.report and at.reported_revision >= at.revision and not at.report.leaving:
        waits.append("its roq-hcm is of an older version and does not say that its store is to be left: upgrade it")
    if leaves(cluster, host):
        for subject, record in cluster.records().items():
            if len(waits) < WAITS_MAX and host in cluster.hosts_of(record):
                waits += [after.why] if isinstance(after := step(cluster, subject, chance), StepWaits) else []
    counted = count[ProcessKind.EXCHANGE], count[ProcessKind.MONITOR], count[ProcessKind.MASTER]
    return HostRemains(host, at.leaving, *counted, waits=tuple(waits), store=STORE_NAME in at.assigned)


def _stopped_here(cluster: ClusterState, host: str) -> dict[str, ProcessKind]:
    """What belongs there of queues that are stopped, by process name."""
    found: dict[str, ProcessKind] = {}
    for record in cluster.queues.values():
        if not record.running:
            found |= {monitor_name(record.name): ProcessKind.MONITOR} if host in record.monitor_hosts else {}
            here = [id for id, at in record.exchanges.items() if at == host]
            found |= {exchange_name(record.name, id): ProcessKind.EXCHANGE for id in here}
    return found

"""What moves by itself, and whereto, so that hosts have about as much as each other: after one joined, or after a cold start,
when the first that came up got everything. Pure.

Two kinds of load are levelled, each by itself: Exchanges, by free slots, as they are placed; and *seats*, Monitors and masters
with their backups and standbys, by their number. One thing goes from the fullest host to the emptiest, and only if they differ
by GAP_MIN and by GAP_FRACTION of what the fullest has: each move makes the difference smaller by two, so there is an end, and
nothing ever goes back. A move is only begun here, by one Exchange or seat more; evacuation.py ends it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import msgspec

from gcm import evacuation
from gcm.cluster import Action, ClusterState, Host, Record, is_running, master_name, monitor_name
from gcm.fleet import in_use
from gcm.placement import has_room, takes_monitor
from roq.wire.assignment import QueueRecord, work_subject
from roq.wire.fleet import MachineState
from roq.wire.work_queue import WorkQueueRecord

GAP_MIN = 3  # a smaller difference is not worth a move, and one of two would swing
GAP_FRACTION = 0.2
MOVES_AT_ONCE = 2  # under way in the whole cluster

CREATIONS = (Action.CREATE_QUEUE, Action.CREATE_EXCHANGE, Action.CREATE_WORK_QUEUE)

Load = Callable[[Host], int]


@dataclass(frozen=True)
class Relocation:
    """One thing that is to go from host `source` to host `target`. subject: its queue or work queue. exchange: its id, "" for a
    seat. why: for people."""

    subject: str
    source: str
    target: str
    exchange: str
    why: str


def next_move(cluster: ClusterState, avoided: Collection[tuple[str, str]] = ()) -> Relocation | None:
    """What to begin now; None if hosts are level enough, or something else is to be done first. avoided: (subject, target) that
    were tried lately."""
    if not cluster.options.rebalance or cluster.recoveries or any(_is_being_left(cluster, name) for name in cluster.hosts):
        return None
    usable = [host for host in cluster.hosts.values() if takes_monitor(host)]
    exchanges = _uneven(usable, _without_spare(cluster, usable), slots_used, lambda host: host.exchanges)
    others = _uneven(usable, usable, seats, seats)
    if exchanges is None and others is None:
        return None
    busy = frozenset(evacuation.subjects(cluster))
    if len(busy) >= MOVES_AT_ONCE or any(entry.action in CREATIONS for entry in cluster.transactions.values()):
        return None
    move = _exchange_move(cluster, *exchanges, busy, avoided) if exchanges is not None else None
    return move or (_seat_move(cluster, *others, busy, avoided) if others is not None else None)


def _is_being_left(cluster: ClusterState, name: str) -> bool:
    """Processes are on their way from there. A host that was drained, and stays for days, keeps nothing from moving."""
    return evacuation.leaves(cluster, name) and in_use(cluster.host(name))


def begun(cluster: ClusterState, move: Relocation, avoided: Collection[tuple[str, str]], chance: random.Random) -> ClusterState:
    """With the move begun, if it is still what is to be done next."""
    record = cluster.record(move.subject)
    if record is None or next_move(cluster, avoided) != move:
        return cluster
    if isinstance(record, WorkQueueRecord):
        after = msgspec.structs.replace(record, standby_hosts=(*record.standby_hosts, move.target))
        return replace(cluster, work_queues={**cluster.work_queues, record.name: after})
    if not move.exchange:
        moved = msgspec.structs.replace(record, backups=(*record.backups, move.target))
        return replace(cluster, queues={**cluster.queues, record.name: moved})
    outcome = evacuation.replaced(cluster, record, move.exchange, move.target, chance)
    return outcome if isinstance(outcome, ClusterState) else cluster


def slots_used(host: Host) -> int:
    """The less of them are free, the higher."""
    return host.exchanges - host.exchanges_max


def seats(host: Host) -> int:
    """Monitors and masters."""
    return host.monitors + host.masters


def _without_spare(cluster: ClusterState, hosts: list[Host]) -> list[Host]:
    """Those that Exchanges may be moved to. A machine of the fleet that runs none, and need not be there, is to be given back:
    it was made for a queue that asked, so it is filled by such."""
    serving = sum(one.state is MachineState.SERVING and cluster.host(name).alive for name, one in cluster.machines.items())
    if serving <= (cluster.fleet.limits.least if cluster.fleet else 0):
        return hosts
    return [host for host in hosts if host.exchanges or host.name not in cluster.machines]


def _uneven(sources: list[Host], targets: list[Host], load: Load, amount: Load) -> tuple[Host, Host] | None:
    """The fullest and the emptiest, if it is worth it."""
    if not sources or not targets:
        return None
    source = max(sources, key=lambda host: (load(host), host.name))
    target = min(targets, key=lambda host: (load(host), host.name))
    gap = load(source) - load(target)
    return (source, target) if gap >= max(GAP_MIN, GAP_FRACTION * amount(source)) else None


def _exchange_move(
    cluster: ClusterState, source: Host, target: Host, busy: Collection[str], avoided: Collection[tuple[str, str]]
) -> Relocation | None:
    if not has_room(target):
        return None
    found: list[tuple[int, str, str]] = []
    for record in _at_rest(cluster, busy, avoided, target.name):
        if isinstance(record, QueueRecord):
            here = [id for id, host in record.exchanges.items() if host == source.name]
            beside = sum(host == target.name for host in record.exchanges.values())
            found += [(beside - len(here), record.name, here[0])] if here else []
    if not found:
        return None
    _, queue, exchange = min(found)
    why = f"{source.name} runs {source.exchanges} Exchanges, {target.name} {target.exchanges}"
    return Relocation(queue, source.name, target.name, exchange, why)


def _seat_move(
    cluster: ClusterState, source: Host, target: Host, busy: Collection[str], avoided: Collection[tuple[str, str]]
) -> Relocation | None:
    masters_first = source.masters - target.masters > source.monitors - target.monitors
    found: list[tuple[bool, bool, str]] = []
    for record in _at_rest(cluster, busy, avoided, target.name):
        hosts = _seats_of(record)
        if source.name in hosts and target.name not in hosts:
            master = isinstance(record, WorkQueueRecord)
            found.append((master is not masters_first, hosts[0] == source.name, _subject(record)))
    if not found:
        return None
    subject = min(found)[2]
    why = f"{source.name} runs {seats(source)} Monitors and masters, {target.name} {seats(target)}"
    return Relocation(subject, source.name, target.name, "", why)


def _at_rest(
    cluster: ClusterState, busy: Collection[str], avoided: Collection[tuple[str, str]], target: str
) -> Iterator[Record]:
    """Queues and work queues that run as they should, and with which nothing is being done."""
    for subject, record in cluster.records().items():
        if subject in busy or (subject, target) in avoided or (isinstance(record, QueueRecord) and not record.running):
            continue
        name = master_name(record.name) if isinstance(record, WorkQueueRecord) else monitor_name(record.name)
        if all(is_running(cluster, host, name) for host in _seats_of(record)):
            yield record


def _seats_of(record: Record) -> tuple[str, ...]:
    """Hosts of its Monitors or masters, the active one's first."""
    return record.hosts if isinstance(record, WorkQueueRecord) else record.monitor_hosts


def _subject(record: Record) -> str:
    return work_subject(record.name) if isinstance(record, WorkQueueRecord) else record.name

"""The faults of a run: what, whom, when, how long. Pure: the same arguments give the same schedule.

A fault has a name, "kill-master": what is done, and to whom. What is possible depends on the kind of cluster, on its disks, and
on the loads: without a work queue there is no master to kill. A shuffle's follower is a part of its host's store.

One fault every `every` seconds, ended before the next begins; a quarter of the periods is quiet (never the first). Faults are
dealt from a shuffled deck of all that are possible, so that each comes once before any comes twice. A third of the partitions
reject.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec
from msgspec import structs

from roq.errors import CallError

QUIET = 0.25  # of the periods
REJECTED = 3  # every third partition
CALM_SECONDS = 3.0  # at least, between the end of a fault and the next period
WARM_UP_SECONDS = 2.0  # of undisturbed load at the start
EVERY_SECONDS_MIN = 2.0
SHORT_SECONDS = (0.3, 1.5)  # shorter than a heartbeat is late, and than a session
LONGER_THAN_SESSION = (1.0, 2.5)  # a long fault takes the session and this much


class ChaosKind(StrEnum):
    """What is done. A partition drops packets silently, REJECT answers them with resets."""

    KILL = "kill"
    PAUSE = "pause"
    PARTITION = "partition"  # from every other machine and the clients
    REJECT = "reject"  # the same, told
    CUT_FROM_ZOOKEEPER = "cut-from-zookeeper"
    MUTE = "mute"  # one-way: it hears, but is not heard
    DELAY = "delay"  # what it sends comes late
    FILL_DISK = "fill-disk"
    MOVE_CLOCK = "move-clock"  # it is stopped, and started with another time of day


class LoadKind(StrEnum):
    """What a cluster has to do meanwhile."""

    PUBSUB = "pubsub"
    TASKS = "tasks"
    GROUPS = "groups"
    SHUFFLE = "shuffle"


class Role(StrEnum):
    """Whom it hits. HOST is a machine with all its processes; partitions hit the machine that the process is on. RECORDER is an
    Exchange that records, WORKER a process of the load that works on tasks or messages."""

    EXCHANGE = "exchange"
    RECORDER = "recorder"
    MONITOR = "monitor"
    SCALING = "scaling"
    MASTER = "master"
    STORE = "store"
    WORKER = "worker"
    HCM = "hcm"
    GCM = "gcm"
    ZOOKEEPER = "zookeeper"
    HOST = "host"


class ChaosFault(msgspec.Struct, frozen=True):
    """at: seconds after the start of the load. seconds: until it is ended; 0: it has no end of its own (a killed process is
    started again by whoever looks after it). number: chooses among the candidates there are then."""

    at: float
    kind: ChaosKind
    role: Role
    seconds: float
    number: int


FaultPair = tuple[ChaosKind, Role]
PROCESSES = (Role.EXCHANGE, Role.RECORDER, Role.MONITOR, Role.SCALING, Role.MASTER, Role.STORE, Role.WORKER)
LASTING = (Role.HCM, Role.GCM, Role.ZOOKEEPER, Role.HOST)  # killed, they stay away until they are started again
NETWORK: tuple[FaultPair, ...] = (
    *((ChaosKind.PARTITION, role) for role in (Role.EXCHANGE, Role.MONITOR, Role.MASTER, Role.GCM, Role.HOST, Role.ZOOKEEPER)),
    *((ChaosKind.CUT_FROM_ZOOKEEPER, role) for role in (Role.GCM, Role.HOST)),
    *((ChaosKind.MUTE, role) for role in (Role.EXCHANGE, Role.MONITOR, Role.GCM)),
    *((ChaosKind.DELAY, role) for role in (Role.GCM, Role.HOST)),
)
CLOCKS: tuple[FaultPair, ...] = ((ChaosKind.MOVE_CLOCK, Role.GCM), (ChaosKind.MOVE_CLOCK, Role.HOST))
PROCESS_FAULTS: tuple[FaultPair, ...] = tuple((kind, role) for kind in (ChaosKind.KILL, ChaosKind.PAUSE) for role in Role)
DISKS: tuple[FaultPair, ...] = ((ChaosKind.FILL_DISK, Role.HOST),)
EVERY_FAULT = (*PROCESS_FAULTS, *NETWORK, *CLOCKS, *DISKS)
ON_LOOPBACK = tuple(pair for pair in PROCESS_FAULTS if pair != (ChaosKind.KILL, Role.ZOOKEEPER))
IN_CONTAINERS = (*PROCESS_FAULTS, *NETWORK, *CLOCKS)
# A disk that can be filled is in memory, and empty when its machine was away: nothing may take a host away there.
LOSES_DISK: tuple[FaultPair, ...] = ((ChaosKind.KILL, Role.HOST), (ChaosKind.MOVE_CLOCK, Role.HOST))
QUEUES, WORK = frozenset({LoadKind.PUBSUB, LoadKind.GROUPS}), frozenset({LoadKind.TASKS, LoadKind.GROUPS})
NEEDS: dict[Role, frozenset[LoadKind]] = {
    **dict.fromkeys((Role.EXCHANGE, Role.MONITOR, Role.SCALING), QUEUES),
    **dict.fromkeys((Role.MASTER, Role.WORKER), WORK),
    Role.STORE: WORK | {LoadKind.SHUFFLE},
    Role.RECORDER: frozenset({LoadKind.GROUPS}),
}


def fault_name(pair: FaultPair) -> str:
    """As --faults has it."""
    return "-".join(pair)


def choose_faults(names: Sequence[str], loads: frozenset[LoadKind], *, containers: bool) -> tuple[FaultPair, ...]:
    """The faults with these names ("kill-master"); none: all that this kind of cluster, with these loads, can do but fill
    disks. Raises CallError for what is unknown, or not possible here."""
    if not names:
        everything = IN_CONTAINERS if containers else ON_LOOPBACK
        return tuple(pair for pair in everything if loads & NEEDS.get(pair[1], loads))
    known = {fault_name(pair): pair for pair in EVERY_FAULT}
    if unknown := [name for name in names if name not in known]:
        raise CallError(f"there is no fault {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = tuple(known[name] for name in dict.fromkeys(names))
    for name, pair in zip(dict.fromkeys(names), chosen, strict=True):
        if not containers and pair not in ON_LOOPBACK:
            raise CallError(f"{name} needs machines of their own: give --docker instead of --local")
        if not loads & (needed := NEEDS.get(pair[1], loads)):
            raise CallError(f"{name} hits nothing here: have {' or '.join(sorted(needed))} among --loads")
    if needs_small_disks(chosen) and (losing := [fault_name(pair) for pair in chosen if pair in LOSES_DISK]):
        raise CallError(
            f"disks that can be filled do not outlive their machine: give fill-disk-host or {', '.join(losing)}, not both"
        )
    return chosen


def needs_small_disks(pairs: Collection[FaultPair]) -> bool:
    """Whether some disk is to be filled."""
    return not set(DISKS).isdisjoint(pairs)


def schedule(
    possible: Sequence[FaultPair],
    *,
    seed: int,
    seconds: float,
    every: float,
    session_seconds: float,
    longest: float | None = None,
) -> list[ChaosFault]:
    """The faults of a run of `seconds`. longest: no fault takes longer (seconds; None: as long as the period allows)."""
    if every < EVERY_SECONDS_MIN or seconds < WARM_UP_SECONDS + EVERY_SECONDS_MIN:
        raise CallError(
            f"a fault every {every:g} s for {seconds:g} s won't do: from {EVERY_SECONDS_MIN:g} s on, and twice that"
        )
    every = min(every, seconds - WARM_UP_SECONDS)  # a short run has one period
    dice = random.Random(seed)
    most = every - min(CALM_SECONDS, every / 2) if longest is None else min(longest, every - min(CALM_SECONDS, every / 2))
    deck: list[tuple[ChaosKind, Role, bool]] = []
    faults: list[ChaosFault] = []
    start = WARM_UP_SECONDS
    while start + most <= seconds:
        if not deck:
            deck = _deck(possible, with_long=most > session_seconds + LONGER_THAN_SESSION[0])
            dice.shuffle(deck)
        if dice.random() >= QUIET or not faults:
            kind, role, long = deck.pop()
            low, high = (session_seconds + extra for extra in LONGER_THAN_SESSION) if long else SHORT_SECONDS
            length = round(dice.uniform(low, min(high, most)), 3)
            at = round(start + dice.uniform(0.0, min(every - most, seconds - most - start)), 3)
            lasts = kind is not ChaosKind.KILL or role in LASTING
            number = dice.randrange(1 << 16)
            if kind is ChaosKind.PARTITION and (number >> 8) % REJECTED == 0:
                kind = ChaosKind.REJECT
            faults.append(ChaosFault(at, kind, role, length if lasts else 0.0, number))
        start += every
    return faults


def gentle(fault: ChaosFault) -> ChaosFault:
    """The same, over before anybody loses a session."""
    return structs.replace(fault, seconds=min(fault.seconds, SHORT_SECONDS[1]))


def _deck(possible: Sequence[FaultPair], *, with_long: bool) -> list[tuple[ChaosKind, Role, bool]]:
    """Everything that can happen: each fault short, and long where it lasts."""
    deck = [(kind, role, False) for kind, role in possible]
    if with_long:
        deck += [(kind, role, True) for kind, role in possible if kind is not ChaosKind.KILL or role in LASTING]
    return deck

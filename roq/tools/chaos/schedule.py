"""The faults of a run: what, whom, when, how long. Pure: the same arguments give the same schedule.

One fault every `every` seconds, ended before the next begins; a quarter of the periods is quiet (never the first). Faults are
dealt from a shuffled deck of all that are possible, so that each comes once before any comes twice. A third of the partitions
reject.
"""

from __future__ import annotations

import random
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


class Role(StrEnum):
    """Whom it hits. HOST is a machine with all its processes; partitions hit the machine that the process is on."""

    EXCHANGE = "exchange"
    MONITOR = "monitor"
    SCALING = "scaling"
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


PROCESSES = (Role.EXCHANGE, Role.MONITOR, Role.SCALING)
LASTING = (Role.HCM, Role.GCM, Role.ZOOKEEPER, Role.HOST)  # killed, they stay away until they are started again
NETWORK: tuple[tuple[ChaosKind, Role], ...] = (
    *((ChaosKind.PARTITION, role) for role in (Role.EXCHANGE, Role.MONITOR, Role.GCM, Role.HOST, Role.ZOOKEEPER)),
    *((ChaosKind.CUT_FROM_ZOOKEEPER, role) for role in (Role.GCM, Role.HOST)),
    *((ChaosKind.MUTE, role) for role in (Role.EXCHANGE, Role.MONITOR, Role.GCM)),
)
PROCESS_FAULTS = tuple((kind, role) for kind in (ChaosKind.KILL, ChaosKind.PAUSE) for role in Role)
ON_LOOPBACK = tuple(pair for pair in PROCESS_FAULTS if pair != (ChaosKind.KILL, Role.ZOOKEEPER))
IN_CONTAINERS = (*PROCESS_FAULTS, *NETWORK)


def schedule(
    possible: tuple[tuple[ChaosKind, Role], ...],
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


def _deck(possible: tuple[tuple[ChaosKind, Role], ...], *, with_long: bool) -> list[tuple[ChaosKind, Role, bool]]:
    """Everything that can happen: each fault short, and long where it lasts."""
    deck = [(kind, role, False) for kind, role in possible]
    if with_long:
        deck += [(kind, role, True) for kind, role in possible if kind is not ChaosKind.KILL or role in LASTING]
    return deck

"""What goes wrong in a run, and what an administrator does meanwhile: drawn from its seed before it begins, and done while it
runs. Every fault ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random

SWAPS_SHARE, STORMS_SHARE = 0.2, 0.4  # of the seeds with a work queue
RECORDED_SWAPS_SHARE, RECORDED_LOSSLESS_SHARE = 0.2, 0.4  # of the seeds with a recorded queue
CLEAN_SECONDS = 4.0  # at the begin: the cluster comes up, everybody joins
BETWEEN_SECONDS = 2.5  # from one fault to the next, on average
TASKS_BETWEEN_SECONDS = 2.5


class FaultKind(StrEnum):
    """One kind of fault."""

    KILL_CHILD = "kill a process of the queue"
    STOP_CHILD = "stop a process of the queue"
    KILL_HCM = "kill an HCM"
    KILL_GCM = "kill a GCM"
    LOSE_POWER = "a host loses power"
    CUT_HOST = "a host is cut off from everybody"
    CUT_HOST_ONE_WAY = "nobody hears a host"
    CUT_COORDINATOR = "a host is cut off from the coordinator"
    CUT_CLIENT = "a client is cut off from a host"
    EXPIRE = "a session expires"
    STOP_CLIENT = "a client is stopped"
    KILL_CLIENT = "a client is killed, another one comes"
    NEW_CLIENT = "a client comes"
    SLOW_HOST = "a host's network is slow"
    STEP_CLOCK = "wall clocks step"
    ADD_EXCHANGE = "an Exchange is added"
    MOVE_PUBLISHERS = "publishers are moved"
    REMOVE_EXCHANGE = "an Exchange is drained and removed"
    LOSE_ALL_POWER = "all hosts lose power"
    DISK_ERROR = "a read, a write or a sync fails"
    DISK_FULL = "a disk is full"
    SLOW_DISK = "a disk is slow"
    BIT_ROT = "bytes on a disk rot"
    SWAP_DISK = "a disk is replaced by an empty one"
    JOIN_HOST = "a host joins, or is drained or taken back"
    REBALANCE = "a shuffle is cut anew"
    SWITCH_RECORDING = "recording is switched off, and on again"
    LEAVE_HOST = "a host is drained, or evacuated, and taken back"  # in no plan of a seed; see `plan_leaving`
    REJECT_CLIENTS = "a host and all clients answer each other with resets"  # in no plan; see test_resets.py
    LEAP_CLOCK = "a host's clock is a day ahead"  # in no plan: more than what is promised of moves


WEIGHTS: dict[FaultKind, int] = {
    FaultKind.KILL_CHILD: 6,
    FaultKind.STOP_CHILD: 2,
    FaultKind.KILL_HCM: 3,
    FaultKind.KILL_GCM: 2,
    FaultKind.LOSE_POWER: 2,
    FaultKind.CUT_HOST: 2,
    FaultKind.CUT_HOST_ONE_WAY: 1,
    FaultKind.CUT_COORDINATOR: 2,
    FaultKind.CUT_CLIENT: 2,
    FaultKind.EXPIRE: 1,
    FaultKind.STOP_CLIENT: 2,
    FaultKind.KILL_CLIENT: 2,
    FaultKind.NEW_CLIENT: 2,
    FaultKind.SLOW_HOST: 1,
    FaultKind.STEP_CLOCK: 1,
    FaultKind.ADD_EXCHANGE: 3,
    FaultKind.MOVE_PUBLISHERS: 4,
    FaultKind.REMOVE_EXCHANGE: 2,
}


TASK_WEIGHTS: dict[FaultKind, int] = {
    FaultKind.KILL_CHILD: 6,
    FaultKind.STOP_CHILD: 3,
    FaultKind.KILL_HCM: 2,
    FaultKind.KILL_GCM: 1,
    FaultKind.LOSE_POWER: 4,
    FaultKind.LOSE_ALL_POWER: 2,
    FaultKind.CUT_HOST: 3,
    FaultKind.CUT_HOST_ONE_WAY: 1,
    FaultKind.CUT_COORDINATOR: 2,
    FaultKind.CUT_CLIENT: 2,
    FaultKind.EXPIRE: 2,
    FaultKind.STOP_CLIENT: 2,
    FaultKind.KILL_CLIENT: 2,
    FaultKind.NEW_CLIENT: 1,
    FaultKind.SLOW_HOST: 1,
    FaultKind.STEP_CLOCK: 1,
    FaultKind.DISK_ERROR: 4,
    FaultKind.DISK_FULL: 2,
    FaultKind.SLOW_DISK: 2,
    FaultKind.BIT_ROT: 2,
    FaultKind.SWAP_DISK: 3,
}


SHUFFLE_WEIGHTS: dict[FaultKind, int] = {
    FaultKind.KILL_CHILD: 6,
    FaultKind.STOP_CHILD: 3,
    FaultKind.KILL_HCM: 2,
    FaultKind.KILL_GCM: 4,
    FaultKind.LOSE_POWER: 3,
    FaultKind.LOSE_ALL_POWER: 2,
    FaultKind.CUT_HOST: 3,
    FaultKind.CUT_HOST_ONE_WAY: 1,
    FaultKind.CUT_COORDINATOR: 2,
    FaultKind.CUT_CLIENT: 2,
    FaultKind.EXPIRE: 2,
    FaultKind.STOP_CLIENT: 2,
    FaultKind.KILL_CLIENT: 3,
    FaultKind.SLOW_HOST: 1,
    FaultKind.STEP_CLOCK: 1,
    FaultKind.DISK_ERROR: 4,
    FaultKind.DISK_FULL: 2,
    FaultKind.SLOW_DISK: 2,
    FaultKind.JOIN_HOST: 3,
    FaultKind.REBALANCE: 3,
}


RECORDED_WEIGHTS: dict[FaultKind, int] = {
    FaultKind.KILL_CHILD: 8,
    FaultKind.STOP_CHILD: 3,
    FaultKind.KILL_HCM: 2,
    FaultKind.KILL_GCM: 2,
    FaultKind.LOSE_POWER: 3,
    FaultKind.LOSE_ALL_POWER: 1,
    FaultKind.CUT_HOST: 3,
    FaultKind.CUT_HOST_ONE_WAY: 1,
    FaultKind.CUT_COORDINATOR: 2,
    FaultKind.CUT_CLIENT: 2,
    FaultKind.EXPIRE: 1,
    FaultKind.STOP_CLIENT: 2,
    FaultKind.KILL_CLIENT: 3,
    FaultKind.NEW_CLIENT: 2,
    FaultKind.SLOW_HOST: 1,
    FaultKind.STEP_CLOCK: 2,
    FaultKind.ADD_EXCHANGE: 4,
    FaultKind.MOVE_PUBLISHERS: 5,
    FaultKind.REMOVE_EXCHANGE: 4,
    FaultKind.DISK_ERROR: 3,
    FaultKind.DISK_FULL: 2,
    FaultKind.SLOW_DISK: 2,
    FaultKind.SWAP_DISK: 2,
    FaultKind.SWITCH_RECORDING: 1,
}


GENTLE = {
    FaultKind.KILL_GCM,
    FaultKind.NEW_CLIENT,
    FaultKind.SLOW_HOST,
    FaultKind.STEP_CLOCK,
    FaultKind.ADD_EXCHANGE,
    FaultKind.MOVE_PUBLISHERS,
    FaultKind.REMOVE_EXCHANGE,
    FaultKind.LEAVE_HOST,
}
# No message may be lost for these: what was killed comes back, and so do connections.
LOSSLESS = GENTLE | {FaultKind.KILL_CHILD, FaultKind.KILL_HCM, FaultKind.REJECT_CLIENTS}
LOSSLESS_RECORDED = LOSSLESS | {
    FaultKind.KILL_CLIENT,
    FaultKind.DISK_ERROR,
    FaultKind.DISK_FULL,
    FaultKind.SLOW_DISK,
    FaultKind.SWITCH_RECORDING,
}
HARMFUL = {FaultKind.KILL_CHILD, FaultKind.KILL_HCM, FaultKind.LOSE_POWER, FaultKind.CUT_HOST, FaultKind.EXPIRE}
FOLLOWED_SHARE, FOLLOWED_SECONDS = 0.5, 6.0  # of these a client follows, that soon
GENTLE_SHARE, LOSSLESS_SHARE = 0.15, 0.35  # of the seeds have no other faults


@dataclass(frozen=True)
class Fault:
    """at: seconds from the begin. seconds: how long it lasts, where it lasts. choice: which of those there are, 0 to 1."""

    at: float
    kind: FaultKind
    seconds: float
    choice: float
    second: float  # another draw, for a second choice

    def __str__(self) -> str:
        return f"{self.at:6.2f} s  {self.kind} for {self.seconds:.2f} s ({self.choice:.3f}, {self.second:.3f})"


def plan_tasks(random: Random, seconds: float) -> list[Fault]:
    """The faults of a run with a work queue, by time."""
    drawn = random.random()
    faults = _swaps(random, seconds) if drawn < SWAPS_SHARE else []
    if drawn > 1 - STORMS_SHARE:
        faults += storm(random, CLEAN_SECONDS + random.random() * seconds / 4)
        faults += storm(random, seconds / 2 + random.random() * seconds / 4)
    return sorted([*faults, *_drawn(random, seconds, TASK_WEIGHTS)], key=lambda fault: fault.at)


def plan_shuffles(random: Random, seconds: float) -> list[Fault]:
    """The faults of a run with shuffles, by time."""
    return list(_drawn(random, seconds, SHUFFLE_WEIGHTS))


def plan_recorded(random: Random, seconds: float) -> list[Fault]:
    """The faults of a run with a recorded queue, by time."""
    drawn = random.random()
    faults = _swaps(random, seconds) if drawn < RECORDED_SWAPS_SHARE else []
    chosen = LOSSLESS_RECORDED if drawn > 1 - RECORDED_LOSSLESS_SHARE else RECORDED_WEIGHTS.keys()
    weights = {kind: weight for kind, weight in RECORDED_WEIGHTS.items() if kind in chosen}
    return sorted([*faults, *_drawn(random, seconds, weights)], key=lambda fault: fault.at)


def plan_leaving(random: Random, seconds: float, others: Collection[FaultKind] = ()) -> list[Fault]:
    """Hosts are left one after the other, a few seconds each. others: what happens beside it."""
    weights = {FaultKind.LEAVE_HOST: 1} | dict.fromkeys(others, 1)
    return list(_drawn(random, seconds, weights))


def _drawn(random: Random, seconds: float, weights: dict[FaultKind, int]) -> Iterator[Fault]:
    at = CLEAN_SECONDS
    while True:
        at += random.expovariate(1 / TASKS_BETWEEN_SECONDS) if random.random() < 0.7 else random.random() * 0.05
        if at > seconds:
            return
        kind = random.choices(list(weights), list(weights.values()))[0]
        length = random.choice((0.05, 0.5, 2.0, 5.0, 9.0)) * (0.5 + random.random())
        yield Fault(at, kind, length, random.random(), random.random())


def storm(random: Random, at: float, damage: FaultKind | None = None) -> list[Fault]:
    """One host is away, the disk of another one fails or rots, all lose power, and the third one is the last to come back: what
    was acknowledged meanwhile was on that disk, or it will be missed."""
    away, hurt, late = random.sample((1 / 6, 3 / 6, 5 / 6), 3)  # choices of three hosts
    kind = random.choice((FaultKind.LOSE_POWER, FaultKind.CUT_HOST))
    damage = damage or random.choice((FaultKind.DISK_ERROR, FaultKind.DISK_ERROR, FaultKind.BIT_ROT))
    dark = at + 2.0 + random.random() * 2.0
    return [
        Fault(at, kind, dark - at + random.random(), away, 0.0),
        *(Fault(at + (dark - at) * part, damage, 0.0, hurt, 1.0 - random.random() / 2) for part in (0.3, 0.6, 0.9)),
        Fault(dark, FaultKind.LOSE_ALL_POWER, 4.0 + random.random() * 6.0, late, 0.0),
    ]


def _swaps(random: Random, seconds: float) -> list[Fault]:
    """Disk after disk is replaced, as soon as `roq doctor` allows it; then nobody has anything but what is on disks."""
    times = [CLEAN_SECONDS + 2.0 * number for number in range(int((seconds - CLEAN_SECONDS) / 2.0))]
    first = random.randrange(3)
    swaps = [
        Fault(at, FaultKind.SWAP_DISK, random.random(), (first + place) % 3 / 3 + 1 / 6, 0.0) for place, at in enumerate(times)
    ]
    return [*swaps, Fault(seconds - 1.0, FaultKind.LOSE_ALL_POWER, random.random(), random.random(), 0.0)]


def plan(random: Random, seconds: float) -> list[Fault]:
    """The faults of a run, by time."""
    drawn = random.random()
    allowed = GENTLE if drawn < GENTLE_SHARE else LOSSLESS if drawn < GENTLE_SHARE + LOSSLESS_SHARE else set(FaultKind)
    chosen = [kind for kind in WEIGHTS if kind in allowed]
    faults, at = [], CLEAN_SECONDS
    while True:
        at += random.expovariate(1 / BETWEEN_SECONDS) if random.random() < 0.7 else random.random() * 0.05
        if at > seconds:
            break
        kind = random.choices(chosen, [WEIGHTS[kind] for kind in chosen])[0]
        length = random.choice((0.05, 0.5, 2.0, 5.0, 9.0)) * (0.5 + random.random())
        faults.append(Fault(at, kind, length, random.random(), random.random()))
        if (
            kind in HARMFUL and random.random() < FOLLOWED_SHARE
        ):  # whoever comes just then is served by those who don't know yet
            soon = at + random.random() * FOLLOWED_SECONDS
            faults.append(Fault(soon, FaultKind.NEW_CLIENT, 0.0, random.random(), random.random()))
    return sorted(faults, key=lambda fault: fault.at)

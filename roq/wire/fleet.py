"""Hosts that the GCM has a provider make and take back: what an operator allows, and what is known of each machine.

Credentials are in the GCM's own configuration and never here: these records are in ZooKeeper.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from roq.errors import InvalidConfiguration
from roq.wire.assignment import Leaving

MACHINES_MAX = 1_000  # of one fleet: each is a node in ZooKeeper, and a line of the provider's answer
SECONDS_MIN, SECONDS_MAX = 1.0, 7 * 86_400.0


class FleetLimits(msgspec.Struct, frozen=True, array_like=True):
    """What an operator allows. least, most: machines at any time. cost: of one machine for an hour, in whatever currency;
    budget: for all of them, 0: not bounded. boot_seconds: a machine that has not registered by then is destroyed.
    idle_seconds: one that runs no Exchange for so long is given back."""

    least: int = 0
    most: int = 0
    cost: float = 0.0
    budget: float = 0.0
    boot_seconds: float = 300.0
    idle_seconds: float = 600.0

    @property
    def affordable(self) -> int:
        """Machines at any time, by `most` and by what the budget pays for."""
        paid = math.floor(self.budget / self.cost + 1e-9) if self.budget and self.cost else self.most
        return min(self.most, paid)

    def check(self) -> FleetLimits:
        """The limits themselves. Raises InvalidConfiguration."""
        if not 0 <= self.least <= self.most <= MACHINES_MAX:
            raise InvalidConfiguration(f"a fleet has 0 <= min <= max <= {MACHINES_MAX}, got {self.least} and {self.most}")
        for name, value in (("cost", self.cost), ("budget", self.budget)):
            if not 0 <= value < math.inf:
                raise InvalidConfiguration(f"{name} is not negative, got {value}")
        if self.budget and not self.cost:
            raise InvalidConfiguration("a budget bounds nothing without the cost of a machine: set --cost too")
        if self.least > self.affordable:
            raise InvalidConfiguration(f"the budget pays for {self.affordable} machines, fewer than min {self.least}")
        for name, seconds in (("boot time-out", self.boot_seconds), ("idle time", self.idle_seconds)):
            if not SECONDS_MIN <= seconds <= SECONDS_MAX:
                raise InvalidConfiguration(f"the {name} is {SECONDS_MIN:g} to {SECONDS_MAX:g} seconds, got {seconds}")
        return self


class FleetRecord(msgspec.Struct, frozen=True):
    """JSON of `cloud/fleet`. id: part of every machine's name, so that two clusters can share a provider. number: of the newest
    machine; none is ever used again."""

    id: str
    limits: FleetLimits
    number: int = 0


class MachineState(StrEnum):
    """How far a machine has got."""

    CREATING = "creating"  # the provider is being asked, or was when the leader died
    BOOTING = "booting"  # it has been made; no host has registered yet
    SERVING = "serving"  # it is a host like any other
    RETURNING = "returning"  # idle: nothing new is placed there
    DESTROYING = "destroying"  # the provider is asked to take it back until it is no longer listed
    GONE = "gone"  # remembered for a while: a late creation is destroyed again


class MachineRecord(msgspec.Struct, frozen=True):
    """JSON of `cloud/machines/<name>`. created: seconds since 1970, for people only. reason: of its state. cordon: what
    somebody wanted to leave its host before it was to be given back; None: it was not cordoned."""

    name: str
    state: MachineState
    created: float
    reason: str = ""
    cordon: Leaving | None = None


class SetFleet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These limits from now on."""

    limits: FleetLimits
    transaction: str


class GetFleet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What is allowed, what there is, and what can't be met."""


class MachineView(msgspec.Struct, frozen=True, array_like=True):
    """One machine. alive: a host of its name is registered. processes: assigned to it."""

    name: str
    state: MachineState
    created: float
    alive: bool
    processes: int
    reason: str


class FleetInfo(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to both. provider: of the leading GCM, "" if it has none. prefix: what all names begin with. limits None: none
    were ever set. unmet: queues that want an Exchange and find no slot. problem: why what is wanted is not being made, or what
    the provider does that it should not; "" if all is well."""

    provider: str
    prefix: str
    limits: FleetLimits | None
    machines: tuple[MachineView, ...]
    unmet: tuple[str, ...]
    problem: str

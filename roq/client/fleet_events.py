"""What happened to the fleet between two looks at it: machines ordered, serving, given back, gone; problems. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from roq.wire.fleet import FleetInfo, MachineState, MachineView

FLEET_ROUNDS = 15  # a cluster that has no fleet is asked for one in each so many rounds
# What people see of a machine's states.
SHOWN = {
    MachineState.CREATING: "machine-ordered",
    MachineState.BOOTING: "machine-ordered",
    MachineState.SERVING: "machine-serving",
    MachineState.RETURNING: "machine-returning",
    MachineState.DESTROYING: "machine-returning",
    MachineState.GONE: "machine-gone",
}


class FleetChange(NamedTuple):
    """kind: the value of an EventKind. machine: which is its host's name, too; "" for the fleet. detail: why, or ""."""

    kind: str
    machine: str
    detail: str


def asks_fleet(number: int, before: FleetInfo | None) -> bool:
    """Whether round `number`, from 0, asks for the fleet: each if there is one, else a few. before: the last answer; None:
    there was none, and a leader of an older version never gives one. Pure."""
    return number % FLEET_ROUNDS == 0 or (before is not None and bool(before.provider or before.machines))


def fleet_changes(before: FleetInfo, after: FleetInfo) -> Iterator[FleetChange]:
    """In no order of time: nobody tells when within the two looks it was."""
    old = {machine.name: machine for machine in before.machines}
    for machine in after.machines:
        was = old.pop(machine.name, None)
        if was is None or SHOWN[was.state] != SHOWN[machine.state]:
            yield _change(machine, SHOWN[machine.state])
    for machine in old.values():  # forgotten by now
        if machine.state is not MachineState.GONE:
            yield _change(machine, SHOWN[MachineState.GONE])
    if before.problem != after.problem:
        yield FleetChange("fleet-problem" if after.problem else "fleet-well", "", after.problem)


def _change(machine: MachineView, kind: str) -> FleetChange:
    return FleetChange(kind, machine.name, f": {machine.reason}" if machine.reason else "")

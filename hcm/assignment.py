"""What the GCM wants against what the HCM has: the actions that make the host match, and whether what runs may go on. Pure;
whole states in, actions out.

Not covered: how an action is carried out (`hcm.host`), and how a single process stays alive (`hcm.supervisor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roq.coordination.session import SessionState
from roq.errors import CallError, StaleEpoch
from roq.wire.assignment import Assignment, MonitorRole, ProcessKind, ProcessSpec


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Not here yet."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class Keep:
    """Here, and unchanged; one that was given up gets another chance."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Here, and the change can be taken while it runs."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class Replace:
    """Here, and it must be restarted for the change."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True)
class Stop:
    """Here, and not wanted."""

    name: str


Action = StartProcess | Keep | Reconfigure | Replace | Stop


def admit(assignment: Assignment, host: str, highest_epoch: int) -> None:
    """Raises StaleEpoch for an assignment of a deposed GCM, CallError for one of another host or with one name twice."""
    if assignment.host != host:
        raise CallError(f"an assignment for host {assignment.host!r} reached host {host!r}")
    if assignment.epoch < highest_epoch:
        raise StaleEpoch(f"assignment of epoch {assignment.epoch}, this host has obeyed epoch {highest_epoch}")
    names = [spec.name for spec in assignment.processes]
    if len(set(names)) != len(names):
        raise CallError("an assignment names a process twice")


def plan(wanted: tuple[ProcessSpec, ...], present: Mapping[str, ProcessSpec]) -> list[Action]:
    """Actions that turn `present` (specification by name) into `wanted`. Stops come first: they free ports and memory;
    Monitors are started before what asks them."""
    names = {spec.name for spec in wanted}
    actions: list[Action] = [Stop(name) for name in present if name not in names]
    monitors_first = sorted(wanted, key=lambda spec: spec.kind is not ProcessKind.MONITOR)
    return actions + [_action(spec, present.get(spec.name)) for spec in monitors_first]


def _action(spec: ProcessSpec, present: ProcessSpec | None) -> Action:
    if present is None:
        return StartProcess(spec)
    if spec == present:
        return Keep(spec)
    same_settings = spec.settings == present.settings
    demoted = present.role is MonitorRole.ACTIVE and spec.role is MonitorRole.BACKUP  # it begins anew: it knows old things
    return Reconfigure(spec) if same_settings and not demoted else Replace(spec)


def may_go_on(state: SessionState | None, *, registered: bool, lease_over: bool, unanswered: bool) -> bool:
    """Whether the HCM renews the lease of this host's Monitors, ScalingProcesses and Exchanges (roq/runtime/liveness.py);
    decided once a second.

    state: of the session, None while there is none yet; registered: in this session; unanswered: no ZooKeeper answered at our
    start. They go on while we are registered, and while ZooKeeper is away: nothing is replaced then. Not between a lost session
    and its new registration: what is not wanted here any more must be stopped first. Nor, until then, once the lease is over.
    """
    if state is None:
        return unanswered
    if state is SessionState.CONNECTED:
        return registered
    return not lease_over

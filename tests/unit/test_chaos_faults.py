"""Which faults `roq chaos` can inject where: by their names, the kind of cluster, its disks and the loads."""

from __future__ import annotations

import pytest

from roq.errors import CallError
from roq.tools.chaos.result import ChaosOptions
from roq.tools.chaos.schedule import (
    EVERY_FAULT,
    IN_CONTAINERS,
    ON_LOOPBACK,
    ChaosKind,
    LoadKind,
    Role,
    choose_faults,
    fault_name,
    needs_small_disks,
    schedule,
)

ALL = frozenset(LoadKind)


def test_every_fault_has_a_name_of_its_own() -> None:
    assert len({fault_name(pair) for pair in EVERY_FAULT}) == len(EVERY_FAULT)
    assert fault_name((ChaosKind.KILL, Role.MASTER)) == "kill-master"


def test_without_names_it_is_all_that_can_be_done_here() -> None:
    assert choose_faults((), ALL, containers=True) == IN_CONTAINERS
    assert choose_faults((), ALL, containers=False) == ON_LOOPBACK
    assert not needs_small_disks(IN_CONTAINERS)


@pytest.mark.parametrize(
    ("load", "there", "away"),
    [
        (LoadKind.PUBSUB, {Role.EXCHANGE, Role.MONITOR, Role.HOST, Role.GCM}, {Role.MASTER, Role.STORE, Role.WORKER}),
        (LoadKind.TASKS, {Role.MASTER, Role.STORE, Role.WORKER, Role.HOST}, {Role.EXCHANGE, Role.MONITOR, Role.RECORDER}),
        (LoadKind.GROUPS, {Role.MASTER, Role.STORE, Role.WORKER, Role.RECORDER, Role.EXCHANGE}, set[Role]()),
        (LoadKind.SHUFFLE, {Role.STORE, Role.HOST}, {Role.MASTER, Role.WORKER, Role.EXCHANGE, Role.RECORDER}),
    ],
)
def test_only_what_the_loads_use_is_hit(load: LoadKind, there: set[Role], away: set[Role]) -> None:
    roles = {role for _, role in choose_faults((), frozenset({load}), containers=True)}
    assert there <= roles
    assert not away & roles


def test_names_choose() -> None:
    chosen = choose_faults(("kill-master", "pause-store", "kill-master"), ALL, containers=False)
    assert chosen == ((ChaosKind.KILL, Role.MASTER), (ChaosKind.PAUSE, Role.STORE))
    found = schedule(chosen, seed=1, seconds=600.0, every=10.0, session_seconds=4.0)
    assert {(one.kind, one.role) for one in found} == {*chosen}
    assert needs_small_disks(choose_faults(("fill-disk-host",), ALL, containers=True))


@pytest.mark.parametrize(
    ("names", "loads", "containers", "says"),
    [
        (("kill-everybody",), ALL, True, "there are kill-exchange, "),
        (("partition-host",), ALL, False, "--docker"),
        (("delay-host",), ALL, False, "--docker"),
        (("fill-disk-host",), ALL, False, "--docker"),
        (("move-clock-gcm",), ALL, False, "--docker"),
        (("kill-zookeeper",), ALL, False, "--docker"),
        (("kill-master",), frozenset({LoadKind.PUBSUB}), True, "groups or tasks"),
        (("pause-recorder",), frozenset({LoadKind.TASKS}), True, "groups"),
        (("fill-disk-host", "kill-host"), ALL, True, "not both"),
        (("move-clock-host", "fill-disk-host"), ALL, True, "not both"),
    ],
)
def test_what_is_not_possible_is_refused(
    names: tuple[str, ...], loads: frozenset[LoadKind], containers: bool, says: str
) -> None:
    with pytest.raises(CallError, match=says):
        choose_faults(names, loads, containers=containers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (ChaosOptions(loads=()), "no load"),
        (ChaosOptions(loads=(LoadKind.TASKS,), soak=True), "pubsub"),
    ],
)
def test_loads_that_make_no_run_are_refused(options: ChaosOptions, says: str) -> None:
    with pytest.raises(CallError, match=says):
        options.check()

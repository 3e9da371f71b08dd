"""Wanted against present: which actions make a host match, and which assignments are refused."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from hcm.assignment import Keep, Reconfigure, Replace, StartProcess, Stop, admit, plan
from roq.errors import CallError, StaleEpoch
from roq.wire.assignment import Assignment, MonitorAddress, MonitorRole, ProcessKind, ProcessSpec, QueueSettings
from roq.wire.policy import Bounds, Policy
from roq.wire.recording import Record, Recording

MONITOR = ProcessSpec(ProcessKind.MONITOR, "orders")
EXCHANGE = ProcessSpec(ProcessKind.EXCHANGE, "orders", "e1")
BACKUP = ProcessSpec(ProcessKind.MONITOR, "orders", role=MonitorRole.BACKUP)
ELSEWHERE = MonitorAddress("h2", "10.0.0.2", 7000, 7001, 2)
SCALING = ProcessSpec(ProcessKind.SCALING, "orders", policy=Policy())


def present(*specs: ProcessSpec) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in specs}


def test_an_empty_host_starts_everything_monitors_first() -> None:
    assert plan((EXCHANGE, SCALING, MONITOR), {}) == [StartProcess(MONITOR), StartProcess(EXCHANGE), StartProcess(SCALING)]


def test_stops_come_before_starts() -> None:
    assert plan((EXCHANGE,), present(MONITOR)) == [Stop("monitor/orders"), StartProcess(EXCHANGE)]


def test_unchanged_is_kept() -> None:
    assert plan((MONITOR, EXCHANGE), present(EXCHANGE, MONITOR)) == [Keep(MONITOR), Keep(EXCHANGE)]


def test_a_new_policy_is_taken_while_running() -> None:
    changed = msgspec.structs.replace(SCALING, policy=Policy(bounds=Bounds(max_exchanges=9)))
    assert plan((changed,), present(SCALING)) == [Reconfigure(changed)]


def test_recording_is_switched_while_running() -> None:
    on, changed, off = (Recording(Record(days), "t", on) for days, on in ((7, True), (1, True), (1, False)))
    steps = [EXCHANGE, *(msgspec.structs.replace(EXCHANGE, recording=one) for one in (on, changed, off)), EXCHANGE]
    for before, after in pairwise(steps):
        assert plan((after,), present(before)) == [Reconfigure(after)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EXCHANGE, msgspec.structs.replace(EXCHANGE, term=2, monitor=ELSEWHERE)),
        (SCALING, msgspec.structs.replace(SCALING, term=2, policy=None, monitor=ELSEWHERE)),
        (BACKUP, msgspec.structs.replace(MONITOR, term=2)),
        (BACKUP, msgspec.structs.replace(BACKUP, monitors=(ELSEWHERE,))),
        (MONITOR, msgspec.structs.replace(MONITOR, monitors=(ELSEWHERE,))),
    ],
)
def test_fail_over_is_taken_while_running(before: ProcessSpec, after: ProcessSpec) -> None:
    assert plan((after,), present(before)) == [Reconfigure(after)]


def test_other_settings_restart_and_so_does_a_demotion() -> None:
    changed = msgspec.structs.replace(EXCHANGE, settings=QueueSettings(max_frame_bytes=5000))
    assert plan((changed,), present(EXCHANGE)) == [Replace(changed)]
    assert plan((BACKUP,), present(MONITOR)) == [Replace(BACKUP)]


def test_carrying_the_plan_out_leaves_nothing_to_do() -> None:
    wanted = (MONITOR, SCALING)
    after = present(*wanted)
    assert all(isinstance(action, Keep) for action in plan(wanted, after))


def test_refused_assignments() -> None:
    admit(Assignment("h", epoch=4, revision=1), "h", highest_epoch=4)
    with pytest.raises(StaleEpoch, match="epoch 3"):
        admit(Assignment("h", epoch=3, revision=9), "h", highest_epoch=4)
    with pytest.raises(CallError, match="'other'"):
        admit(Assignment("other", epoch=4, revision=1), "h", highest_epoch=4)
    with pytest.raises(CallError, match="twice"):
        admit(Assignment("h", 4, 1, (MONITOR, MONITOR)), "h", highest_epoch=4)

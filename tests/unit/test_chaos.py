"""roq chaos without a cluster: schedules, and the verdict on histories made up to hold each kind of violation."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from roq.chaos import invariants
from roq.chaos.history import STAMP, Done, Heard, Sent, Told
from roq.chaos.numbers import Numbers, count
from roq.chaos.picture import timeline
from roq.chaos.result import Options
from roq.chaos.schedule import CALM_SECONDS, IN_CONTAINERS, ON_LOOPBACK, Fault, Kind, Role, schedule
from roq.chaos.verdict import Verdict, judge
from roq.errors import CallError
from roq.testing import HostProcess
from roq.wire.assignment import (
    HostReport,
    MonitorAddress,
    MonitorRole,
    ProcessKind,
    ProcessState,
    QueueRecord,
    QueueSettings,
    RunningProcess,
)
from roq.wire.gcm import ClusterView, HostInfo, QueueInfo
from roq.wire.policy import Policy

SESSION = 4.0


def faults(seed: int = 1, seconds: float = 3600.0, every: float = 10.0, longest: float | None = None) -> list[Fault]:
    return schedule(IN_CONTAINERS, seed=seed, seconds=seconds, every=every, session_seconds=SESSION, longest=longest)


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert faults(7) == faults(7)
    assert faults(7) != faults(8)


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_one_after_the_other_and_a_quarter_of_the_periods_is_quiet(seed: int) -> None:
    found = faults(seed)
    assert all(one.at + one.seconds <= later.at for one, later in pairwise(found))
    assert found[-1].at + found[-1].seconds <= 3600
    assert 0.65 < len(found) / 360 < 0.85
    assert max(one.seconds for one in found) <= 10.0 - CALM_SECONDS


def test_everything_possible_happens_short_and_long() -> None:
    found = faults()
    assert {(one.kind, one.role) for one in found} == set(IN_CONTAINERS)
    for kind, role in IN_CONTAINERS:
        lengths = [one.seconds for one in found if (one.kind, one.role) == (kind, role)]
        if kind is Kind.KILL and role in (Role.EXCHANGE, Role.MONITOR, Role.SCALING):
            assert set(lengths) == {0.0}
        else:
            assert min(lengths) < SESSION < max(lengths)


def test_longest_bounds_every_fault_and_every_has_limits() -> None:
    assert max(one.seconds for one in faults(longest=2.0)) <= 2.0
    assert (Kind.KILL, Role.ZOOKEEPER) not in ON_LOOPBACK
    assert any(faults(seed, seconds=6.0) for seed in range(5)), "a short run has one period"
    for seconds in (6.0, 20.0):
        assert all(one.at + one.seconds <= seconds + 0.01 for seed in range(50) for one in faults(seed, seconds=seconds))
    for every, seconds in ((1.0, 3600.0), (10.0, 3.0)):
        with pytest.raises(CallError):
            faults(every=every, seconds=seconds)
    for refused in (Options(publishers=0), Options(rate=0.0)):
        with pytest.raises(CallError):
            refused.check()


def test_numbers_are_a_set() -> None:
    ours, truth = Numbers(), set[int]()
    for first, last in ((5, 9), (1, 2), (20, 30), (8, 12), (3, 4), (40, 39), (13, 19), (32, 32)):
        assert ours.overlap(first, last) == len(truth & set(range(first, last + 1)))
        missing = ours.missing(first, last)
        assert count(missing) == len(set(range(first, last + 1)) - truth)
        ours.add(first, last)
        truth |= set(range(first, last + 1))
        assert len(ours) == len(truth)
    assert ours.ranges() == [(1, 30), (32, 32)]
    assert ours.missing(25, 40) == [(31, 31), (33, 40)]


def verdict(order: list[int], told: list[Told] | None = None, published: int = 10, acked: int = 10) -> Verdict:
    heard = Heard(1)
    for number in order:
        heard.arrived(0, number)
    heard.told = told or []
    return judge([Sent(published, acked)], [heard])


def test_all_well() -> None:
    found = verdict([*range(1, 11)])
    assert (found.published, found.acked, found.delivered, found.adds_up) == (10, 10, 10, True)
    assert found.problems() == []


def test_a_message_lost_in_silence() -> None:
    found = verdict([1, 2, 3, 5, 6, 7, 8, 9, 10])
    assert (found.lost, found.delivered, found.adds_up) == (1, 9, False)
    assert any("lost 4..4" in line for line in found.problems())


def test_a_gap_that_was_told_is_no_loss() -> None:
    found = verdict([1, 2, 6, 7, 8, 9, 10], [Told(0, 3, 5, 3)])
    assert (found.lost, found.reported_gaps, found.adds_up, found.problems()) == (0, 3, True, [])


def test_told_but_delivered_does_not_add_up() -> None:
    found = verdict([*range(1, 11)], [Told(0, 3, 4, 2)])
    assert not found.adds_up
    assert any("told as lost but delivered 3..4" in line for line in found.problems())
    assert not verdict([1, 2, 6, 7, 8, 9, 10], [Told(0, 3, 5, 3), Told(0, 3, 5, 3)]).adds_up, "told twice"


def test_duplicated_and_reordered() -> None:
    found = verdict([1, 2, 3, 2, 3, *range(4, 11)])
    assert (found.duplicated, found.reordered, found.lost) == (2, 0, 0)
    found = verdict([1, 2, 5, 3, 4, *range(6, 11)])
    assert (found.duplicated, found.reordered, found.lost) == (0, 2, 0)
    assert found.adds_up
    assert found.problems()[0] == "2 messages reordered"
    found = verdict([1, 2, 5, 6, 3, 4, 5, 7, 8, 9, 10])
    assert (found.duplicated, found.reordered) == (1, 2)


def test_what_was_not_acknowledged_is_unknown_not_lost() -> None:
    found = verdict([*range(1, 9)], acked=7)
    assert (found.lost, found.unknown, found.adds_up) == (0, 2, False)


def test_every_subscriber_counts() -> None:
    whole, half = Heard(2), Heard(2)
    for publisher in (0, 1):
        for number in range(1, 5):
            whole.arrived(publisher, number)
    for number in range(1, 5):
        half.arrived(1, number)
    found = judge([Sent(4, 4), Sent(4, 4)], [whole, half])
    assert (found.published, found.delivered, found.lost) == (8, 12, 4)
    assert [share.lost for share in found.subscribers] == [0, 4]


def test_damaged_and_unknown_messages_are_foreign() -> None:
    heard = Heard(1)
    good = STAMP.pack(0, 1) + bytes(8)
    heard.take([(1, good), (2, good), (1, good[:-1]), (1, STAMP.pack(3, 1) + bytes(8))], len(good), 1.5)
    assert (heard.foreign, heard.runs, dict(heard.per_second), heard.silence_seconds) == (3, [[(1, 1)]], {1: 1}, 1.5)
    found = judge([Sent(1, 1)], [heard])
    assert (found.foreign, found.adds_up) == (3, False)


def cluster(*running: RunningProcess, monitors: tuple[MonitorAddress, ...] | None = None, ready: bool = True) -> ClusterView:
    report = HostReport("h", "127.0.0.1", "1", 1, 1, running)
    host = HostInfo("h", "127.0.0.1", 1, True, False, 1, 8, 1, 0.0, 0.0, report)
    record = QueueRecord("q", QueueSettings(), True, "h", 1, {"e": "h"}, 0.0)
    active = (MonitorAddress("h", "127.0.0.1", 1, 2),)
    return ClusterView(1, "g", 0.0, (host,), (QueueInfo(record, active if monitors is None else monitors, ready, Policy()),))


def process(kind: ProcessKind, pid: int, exchange: str = "") -> RunningProcess:
    name = f"{kind}/q/{exchange}" if exchange else f"{kind}/q"
    return RunningProcess(name, kind, "q", exchange, ProcessState.RUNNING, pid, {})


RIGHT = (process(ProcessKind.MONITOR, 1), process(ProcessKind.SCALING, 2), process(ProcessKind.EXCHANGE, 3, "e"))
SEEN = {"h": [HostProcess(one.name, one.pid) for one in RIGHT]}


def test_the_invariants_of_a_quiet_cluster() -> None:
    assert invariants.violations(cluster(*RIGHT), SEEN) == []
    assert any("should run" in line for line in invariants.violations(cluster(*RIGHT[:2]), SEEN))
    assert any("active Monitors" in line for line in invariants.violations(cluster(*RIGHT, monitors=(), ready=False), SEEN))
    two = tuple(MonitorAddress("h", "127.0.0.1", port, 2, 1, MonitorRole.ACTIVE) for port in (1, 3))
    assert any("2 active Monitors" in line for line in invariants.violations(cluster(*RIGHT, monitors=two), SEEN))
    orphan = {"h": [*SEEN["h"], HostProcess("roq-exchange", 9, orphan=True)]}
    assert invariants.violations(cluster(*RIGHT), orphan) == ["C4: orphan roq-exchange (pid 9) on h"]
    assert any("gone" in line for line in invariants.violations(cluster(*RIGHT), {"h": SEEN["h"][:2]}))


def test_the_picture_is_well_formed() -> None:
    heard = Heard(1)
    heard.per_second.update({0: 100, 1: 50, 3: 100})
    heard.told = [Told(0, 3, 5, 3)]
    text = timeline("seed 1 <&>", [heard, heard], [Done(1.0, "kill", "host-1:exchange/q/3f", 0.0, "exchange")], 4.0)
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "kill exchange/q" in text
    assert "3 told lost" in text

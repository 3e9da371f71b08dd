"""roq chaos without a cluster: schedules, and the verdict on histories made up to hold each kind of violation."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from roq.errors import CallError
from roq.testing import HostProcess
from roq.tools.chaos import invariants
from roq.tools.chaos.history import STAMP, FaultDone, GapReported, Sent, SubscriberHistory
from roq.tools.chaos.invariants import EpochWritten, HostReported, Order, Seen, Term, history_violations, unsettled
from roq.tools.chaos.result import ChaosOptions, timeline
from roq.tools.chaos.schedule import (
    CALM_SECONDS,
    IN_CONTAINERS,
    NETWORK,
    ON_LOOPBACK,
    PROCESSES,
    ChaosFault,
    ChaosKind,
    FaultPair,
    Role,
    fault_name,
    schedule,
)
from roq.tools.chaos.verdict import Numbers, Verdict, count, gaps, judge, together
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


def faults(seed: int = 1, seconds: float = 3600.0, every: float = 10.0, longest: float | None = None) -> list[ChaosFault]:
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
    rejected = {(ChaosKind.REJECT, role) for kind, role in IN_CONTAINERS if kind is ChaosKind.PARTITION}
    assert {(one.kind, one.role) for one in found} == {*IN_CONTAINERS, *rejected}
    for kind, role in IN_CONTAINERS:
        lengths = [one.seconds for one in found if (one.kind, one.role) == (kind, role)]
        if kind is ChaosKind.KILL and role in PROCESSES:
            assert set(lengths) == {0.0}
        else:
            assert min(lengths) < SESSION < max(lengths)


def test_longest_bounds_every_fault_and_every_has_limits() -> None:
    assert max(one.seconds for one in faults(longest=2.0)) <= 2.0
    assert (ChaosKind.KILL, Role.ZOOKEEPER) not in ON_LOOPBACK
    assert any(faults(seed, seconds=6.0) for seed in range(5)), "a short run has one period"
    for seconds in (6.0, 20.0):
        assert all(one.at + one.seconds <= seconds + 0.01 for seed in range(50) for one in faults(seed, seconds=seconds))
    for every, seconds in ((1.0, 3600.0), (10.0, 3.0)):
        with pytest.raises(CallError):
            faults(every=every, seconds=seconds)
    for refused in (ChaosOptions(publishers=0), ChaosOptions(rate=0.0)):
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


def verdict(order: list[int], told: list[GapReported] | None = None, published: int = 10, acked: int = 10) -> Verdict:
    heard = SubscriberHistory(1)
    for number in order:
        heard.arrived(0, number)
    heard.reported = told or []
    return judge([Sent(published, acked)], [heard])


def test_all_well() -> None:
    found = verdict([*range(1, 11)])
    assert (found.published, found.acked, found.delivered, found.adds_up) == (10, 10, 10, True)
    assert found.problems() == []


def test_a_message_lost_in_silence() -> None:
    found = verdict([1, 2, 3, 5, 6, 7, 8, 9, 10])
    assert (found.lost, found.delivered, found.adds_up) == (1, 9, False)
    assert any("lost 4..4" in line for line in found.problems())


def test_a_gap_that_was_reported_is_no_loss() -> None:
    found = verdict([1, 2, 6, 7, 8, 9, 10], [GapReported(0, 3, 5, 3)])
    assert (found.lost, found.reported_gaps, found.adds_up, found.problems()) == (0, 3, True, [])


def test_reported_but_delivered_does_not_add_up() -> None:
    found = verdict([*range(1, 11)], [GapReported(0, 3, 4, 2)])
    assert not found.adds_up
    assert any("reported as lost but delivered 3..4" in line for line in found.problems())
    assert not verdict([1, 2, 6, 7, 8, 9, 10], [GapReported(0, 3, 5, 3), GapReported(0, 3, 5, 3)]).adds_up, "reported twice"


def test_a_gap_needs_a_fault_that_cuts_for_longer_than_the_ring() -> None:
    heard = SubscriberHistory(1)
    heard.reported = [GapReported(0, 3, 5, 3, 12.0), GapReported(0, 7, 8, 2, 41.0), GapReported(0, 9, 9, 1, 9.0)]
    faults = [
        FaultDone(4.0, "kill", "host-1", 1.2, "host"),
        FaultDone(10.0, "partition", "host-2", 5.5, "monitor"),
        *(FaultDone(39.0, kind, "host-3", 6.0, "monitor") for kind in ("pause", "cut-from-zookeeper")),
        FaultDone(40.0, "kill", "host-3", 4.9, "host"),
    ]
    found, problems = gaps([heard], faults, ring_seconds=5.0)
    assert [(gap.t, gap.messages, gap.fault) for gap in found] == [(12.0, 3, 10.0), (41.0, 2, None), (9.0, 1, None)]
    assert problems == [
        "subscriber 0: 2 messages reported lost at 41.0 s, no long fault was on",
        "subscriber 0: 1 messages reported lost at 9.0 s, no long fault was on",
    ]


@pytest.mark.parametrize("pair", NETWORK, ids=fault_name)
def test_what_cuts_a_machine_off_for_long_explains_a_gap(pair: FaultPair) -> None:
    kind, role = pair
    heard = SubscriberHistory(1)
    heard.reported = [GapReported(0, 3, 5, 3, 12.0)]
    _, problems = gaps([heard], [FaultDone(10.0, kind, "machine", 6.0, role)], ring_seconds=5.0)
    expected = kind is not ChaosKind.CUT_FROM_ZOOKEEPER and role not in (Role.GCM, Role.ZOOKEEPER)
    assert bool(problems) is not expected


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
    whole, half = SubscriberHistory(2), SubscriberHistory(2)
    for publisher in (0, 1):
        for number in range(1, 5):
            whole.arrived(publisher, number)
    for number in range(1, 5):
        half.arrived(1, number)
    found = judge([Sent(4, 4), Sent(4, 4)], [whole, half])
    assert (found.published, found.delivered, found.lost) == (8, 12, 4)
    assert [share.lost for share in found.subscribers] == [0, 4]


def test_damaged_and_unknown_messages_are_foreign() -> None:
    heard = SubscriberHistory(1)
    good = STAMP.pack(0, 1) + bytes(8)
    heard.take([(1, good), (2, good), (1, good[:-1]), (1, STAMP.pack(3, 1) + bytes(8))], len(good), 1.5)
    assert (heard.foreign, heard.runs, list(heard.per_second), heard.silence_seconds) == (3, [[(1, 1)]], [0, 1], 1.5)
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


def test_two_loads_have_one_verdict() -> None:
    whole, broken = verdict([*range(1, 11)]), verdict([1, 2, 4, 4, 3, *range(5, 10)])
    both = together([whole, broken])
    assert (both.published, both.delivered, both.lost, both.duplicated, both.reordered, both.adds_up) == (
        20,
        19,
        1,
        1,
        1,
        False,
    )
    assert "subscriber 1: publisher 0: lost 10..10" in both.problems()
    assert together([whole]) == whole


NOW: list[Seen] = [
    EpochWritten(10, 3),
    Order(12, "h", 3, 9),
    HostReported(13, "h", 3, 9),
    Order(5, "g", 2, 4),
    HostReported(6, "g", 2, 4),
]


def test_epochs_that_do_not_mix() -> None:
    seen = [*NOW, EpochWritten(3, 2), Order(11, "g", 3, 5), Term(4, "q", 1, "h"), Term(12, "q", 2, "g"), Term(13, "q", 2, "g")]
    assert history_violations(seen) == []
    assert unsettled(NOW, []) == []


def test_a_write_of_an_epoch_that_is_over_is_found() -> None:
    late = history_violations([EpochWritten(3, 2), EpochWritten(10, 3), Order(11, "h", 2, 9)])
    assert late == ["C1: assignment of h: epoch 2 wrote after epoch 3 had begun (zxid b)"]
    assert "before it began" in history_violations([EpochWritten(10, 3), Order(9, "h", 3, 1)])[0]
    assert "gcm/epoch" in history_violations([EpochWritten(10, 3), EpochWritten(11, 2)])[0]


def test_a_host_that_takes_an_older_order_is_found() -> None:
    assert history_violations([HostReported(5, "h", 3, 4), HostReported(9, "h", 4, 1)]) == []
    assert history_violations([HostReported(5, "h", 3, 4), HostReported(9, "h", 2, 7)]) == ["C1: h went from 3/4 back to 2/7"]
    assert history_violations([HostReported(9, "h", 3, 3), HostReported(5, "h", 3, 4)]) == ["C1: h went from 3/4 back to 3/3"]


def test_a_term_with_two_active_monitors_is_found() -> None:
    found = history_violations([Term(4, "q", 1, "h"), Term(5, "q", 1, "g"), Term(5, "r", 1, "g")])
    assert found == ["C2: in term 1 queue q had active Monitors on g, h"]


def test_what_is_unsettled_is_found() -> None:
    assert unsettled(NOW, ["transactions/queue/t"]) == ["C1: transaction transactions/queue/t is left"]
    assert unsettled([*NOW, Order(14, "i", 4, 1), HostReported(15, "i", 4, 1)], []) == [
        "C1: assignment of i has epoch 4, the epoch is 3"
    ]
    assert unsettled([*NOW, Order(14, "i", 3, 2), HostReported(15, "i", 3, 1)], []) == [
        "C1: i has obeyed 3/1, its assignment is 3/2"
    ]
    assert "obeyed nothing" in unsettled([EpochWritten(1, 3), Order(2, "i", 3, 2)], [])[0]


def test_the_picture_is_well_formed() -> None:
    heard = SubscriberHistory(1)
    heard.per_second.extend([100, 50, 0, 100])
    heard.reported = [GapReported(0, 3, 5, 3)]
    text = timeline("seed 1 <&>", [heard, heard], [FaultDone(1.0, "kill", "host-1:exchange/q/3f", 0.0, "exchange")], 4.0)
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "kill exchange/q" in text
    assert "3 reported lost" in text

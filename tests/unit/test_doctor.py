"""`roq doctor`: what it makes of ZooKeeper's answer, of the leader's view and of this machine.

Not covered: a whole cluster, see tests/integration/test_doctor.py.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter

import msgspec
import pytest
from typer.testing import CliRunner, Result

from roq.cli.doctor import check_local, check_machine
from roq.cli.doctor_cluster import (
    CopiesOf,
    HostsState,
    HostState,
    check_clock,
    check_copies,
    check_hosts,
    check_overview,
    check_security,
    clock_skew_seconds,
    judge_srvr,
    shuffle_copies,
)
from roq.cli.finding import Finding, Severity
from roq.cli.main import app
from roq.cli.status import host_state
from roq.cli.tape_copies import tape_shortages
from roq.cli.which import DEFAULT_ADDRESS
from roq.client import overview as overview_module
from roq.client.cluster import Cluster
from roq.client.overview import (
    MONITORS_ASKED_AT_ONCE,
    MONITORS_SILENT_MAX,
    NOT_ASKED,
    FailedProcess,
    HostRow,
    Overview,
    QueueRow,
    read_overview,
)
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.runtime.installation import SOURCE, installed_version
from roq.tools.local.leftovers import Origin
from roq.tools.local.starter import FoundCluster
from roq.wire import gcm, hcm, shuffle
from roq.wire import master as wire
from roq.wire.assignment import MonitorAddress, Overflow, QueueRecord, QueueSettings, to_json
from roq.wire.card import CardRole, new_card
from roq.wire.monitor import QueueView
from roq.wire.policy import Policy
from roq.wire.zookeeper import COORDINATOR_VERSION

NOWHERE = "127.0.0.1:1"  # nothing listens there


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


SRVR = "Zookeeper version: {}-abc, built on 2025\nLatency min/avg/max: 0/0.0/0\nMode: standalone\nNode count: 5\n"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (SRVR.format("3.9.5"), Severity.GOOD),
        (SRVR.format("3.10.0"), Severity.GOOD),
        (SRVR.format("3.8.4"), Severity.WRONG),
        (SRVR.format("3.9.3"), Severity.WRONG),
        (SRVR.format(COORDINATOR_VERSION), Severity.GOOD),
        ("This ZooKeeper instance is not currently serving requests\n", Severity.WRONG),
        ("srvr is not executed because it is not in the whitelist.\n", Severity.WARNING),
        ("", Severity.WARNING),
    ],
)
def test_what_zookeeper_tells_of_itself(answer: str, verdict: Severity) -> None:
    assert judge_srvr("ZooKeeper", answer).verdict == verdict


HOST = HostRow("h1", "127.0.0.1", True, False, 1, 8, 1, 3, 0, 0, 0.1, 0.1)
QUEUE = QueueRow("q", True, True, 1, "drop", "h1", 1)
HEALTHY = Overview(1000.0, "127.0.0.1:5500", 1, (HOST,), (QUEUE,), (), ())
replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("overview", "about"),
    [
        (replace(HEALTHY, hosts=()), "Hosts"),
        (replace(HEALTHY, hosts=(replace(HOST, alive=False),)), "Host h1"),
        (replace(HEALTHY, hosts=(replace(HOST, exchanges=8),)), "Hosts"),
        (replace(HEALTHY, failed=(FailedProcess("h1", "exchange/q/e", 5, "port taken"),)), "Process exchange/q/e on h1"),
        (replace(HEALTHY, queues=(replace(QUEUE, ready=False),)), "Queue q"),
        (replace(HEALTHY, queues=(replace(QUEUE, problem="its Monitor does not answer"),)), "Queue q"),
    ],
)
def test_what_is_wrong_in_a_cluster_is_found_with_advice(overview: Overview, about: str) -> None:
    wrong = [finding for finding in check_overview(overview) if finding.verdict == Severity.WRONG]
    assert about in {finding.subject for finding in wrong}
    assert all(finding.advice for finding in wrong)


def test_a_host_that_was_stopped_has_no_address_to_look_at() -> None:
    stopped = replace(HEALTHY, hosts=(HOST, replace(HOST, host="h2", address="", alive=False)))
    [finding] = [finding for finding in check_overview(stopped) if finding.verdict is Severity.WRONG]
    assert finding.advice == "Start its `roq-hcm`, or read its log"


@pytest.mark.parametrize(("days", "verdict"), [(3, Severity.WARNING), (-1, Severity.WARNING), (100, Severity.GOOD)])
def test_a_hosts_card_that_ends_soon_is_told(days: int, verdict: Severity) -> None:
    found = check_overview(replace(HEALTHY, hosts=(replace(HOST, card_expires=HEALTHY.time + days * 86400),)))
    assert {finding.verdict for finding in found} == {verdict, Severity.GOOD}
    assert all("roq ca sign host h1" in finding.advice for finding in found if finding.verdict is Severity.WARNING)


def test_what_hurts_is_a_warning() -> None:
    overview = replace(HEALTHY, hosts=(HOST, replace(HOST, host="h2", draining=True)), queues=(replace(QUEUE, lost=3),))
    assert {finding.subject for finding in check_overview(overview) if finding.verdict == Severity.WARNING} == {
        "Host h2",
        "Queue q",
    }


def test_nobody_is_to_call_off_that_a_host_stops() -> None:
    stopping = replace(HOST, host="h2", draining=True, stopping=True)
    (found,) = (one for one in check_overview(replace(HEALTHY, hosts=(HOST, stopping))) if one.subject == "Host h2")
    assert (found.verdict, found.found) == (Severity.WARNING, "is about to end, and hands over")
    assert "uncordon" not in found.advice
    assert host_state(stopping) == "stopping"


def test_nothing_is_wrong_with_a_healthy_cluster_or_a_stopped_queue() -> None:
    stopped = replace(HEALTHY, queues=(replace(QUEUE, running=False, ready=False),))
    for overview in (HEALTHY, stopped):
        assert {finding.verdict for finding in check_overview(overview)} == {Severity.GOOD}


@pytest.mark.parametrize(
    ("told", "skew"),
    [(1000.5, 0.0), (1000.0, 0.0), (1001.0, 0.0), (1003.0, 2.0), (998.0, -2.0)],
)
def test_a_clock_is_wrong_only_if_the_round_trip_can_not_explain_it(told: float, skew: float) -> None:
    assert clock_skew_seconds(told, asked=1000.0, answered=1001.0) == skew


@pytest.mark.parametrize(
    ("skew", "verdict", "told"),
    [
        (40.0, Severity.WRONG, "is 40.0 s behind the leader's"),
        (-40.0, Severity.WRONG, "is 40.0 s ahead of the leader's"),
        (2.0, Severity.WARNING, "is 2.0 s behind"),
    ],
)
def test_the_clock_of_this_machine(skew: float, verdict: Severity, told: str) -> None:
    (finding,) = check_clock(skew)
    assert finding.verdict == verdict
    assert told in finding.found
    assert check_clock(0.9) == []


CAPACITY = hcm.Capacity(0, 8, 0.1, 0.1, 1, 1000.0, installed_version(), 10**10)
STATE = HostState("h1", "127.0.0.1", CAPACITY)


@pytest.mark.parametrize(
    ("state", "verdict", "told"),
    [
        (replace(STATE, capacity=None, error="no answer"), Severity.WRONG, "does not answer here: no answer"),
        (replace(STATE, skew_seconds=100.0), Severity.WRONG, "its clock is 60.0 s ahead of the leader's"),
        (replace(STATE, skew_seconds=38.0), Severity.WARNING, "its clock is 2.0 s behind the leader's"),
        (replace(STATE, capacity=replace(CAPACITY, disk_free_bytes=0)), Severity.WRONG, "the disk is full: 0 MiB"),
        (replace(STATE, capacity=replace(CAPACITY, disk_free_bytes=10**8)), Severity.WARNING, "95 MiB are free"),
        (replace(STATE, capacity=replace(CAPACITY, version="0.0.9")), Severity.WRONG, "runs RoQ 0.0.9, this is"),
        (replace(STATE, capacity=replace(CAPACITY, version="")), Severity.WRONG, "a version that does not report it"),
        (replace(STATE, shuffles=False), Severity.WRONG, "takes no part in shuffles, pyarrow or numpy is missing there"),
    ],
)
def test_what_is_wrong_with_one_host(state: HostState, verdict: Severity, told: str) -> None:
    state = state if state.skew_seconds else replace(state, skew_seconds=40.0)  # as the leader's
    (finding,) = check_hosts(HostsState([state], shuffles=1), leader_skew_seconds=40.0)
    assert (finding.subject, finding.verdict) == ("Host h1", verdict)
    assert told in finding.found
    assert finding.advice


def test_hosts_without_faults_and_an_hcm_that_tells_neither_clock_nor_disk() -> None:
    old = replace(CAPACITY, time=0.0, disk_free_bytes=-1)
    tree = replace(CAPACITY, version=SOURCE)
    for states in ([STATE], [replace(STATE, capacity=old)], [replace(STATE, capacity=tree)], [replace(STATE, shuffles=False)]):
        assert {finding.verdict for finding in check_hosts(HostsState(states, shuffles=0), 0.0)} == {Severity.GOOD}
    assert check_hosts(HostsState([], shuffles=0), 0.0) == []


UP, ORPHAN = (
    FoundCluster(Origin(f"/tmp/{name}", 7, 8, "roq up"), "t", f"127.0.0.1:{port}/RoQ", orphan, 1000)
    for name, port, orphan in (("up", 2181, False), ("orphan", 40000, True))
)


@pytest.mark.parametrize(
    ("found", "address", "chosen", "wrong"),
    [
        ([], DEFAULT_ADDRESS, False, []),
        ([UP], DEFAULT_ADDRESS, False, []),
        ([UP], "localhost:2181", True, []),
        ([UP], "127.0.0.1:40000", True, []),
        ([UP], "127.0.0.1:40000", False, ["and `roq up` runs elsewhere: /tmp/up (127.0.0.1:2181/RoQ)"]),
        ([ORPHAN], DEFAULT_ADDRESS, False, ["a cluster at 127.0.0.1:40000/RoQ outlived roq up, pid 7, that started it"]),
        ([UP, ORPHAN], "127.0.0.1:40000", True, ["the cluster that is looked at here outlived"]),
    ],
)
def test_the_local_clusters_of_this_machine(found: list[FoundCluster], address: str, chosen: bool, wrong: list[str]) -> None:
    told = [one for one in check_local(found, address, chosen=chosen) if one.verdict == Severity.WRONG]
    assert len(told) == len(wrong)
    assert all(part in one.found and one.advice for part, one in zip(wrong, told, strict=True))


def test_doctor_looks_at_this_machine() -> None:
    result = roq("doctor", "--json")
    told = json.loads(result.stdout)
    findings = msgspec.convert(told["findings"], list[Finding])
    subjects = {finding.subject for finding in findings}
    assert {"Python", "Java", "File descriptors", "Loopback addresses", "Clock"} <= subjects
    assert result.exit_code == (0 if told["healthy"] else 1)


def test_doctor_says_that_zookeeper_is_away() -> None:
    result = roq("doctor", "-c", NOWHERE, "--json")
    assert result.exit_code == 1
    wrong = [finding for finding in json.loads(result.stdout)["findings"] if finding["verdict"] == "wrong"]
    assert f"ZooKeeper {NOWHERE}" in {finding["subject"] for finding in wrong}


SHORT = wire.Shortage("snapshot s", 2, 3, ("a",))


@pytest.mark.parametrize(
    ("found", "verdict", "told"),
    [
        (
            [CopiesOf("work queue q"), CopiesOf("shuffle s")],
            Severity.GOOD,
            "2 queues and shuffles have all of theirs: one disk may be replaced now",
        ),
        (
            [CopiesOf("work queue q"), CopiesOf("recorded queue r", by_hosts=True)],
            Severity.GOOD,
            "2 queues and shuffles have all of theirs: one disk may be replaced now, unless one was a short time ago",
        ),
        ([CopiesOf("work queue q", [SHORT])], Severity.WARNING, "snapshot s: 2 of 3 copies, missing on a"),
        ([CopiesOf("work queue q", [SHORT] * 7)], Severity.WARNING, "; and 2 more"),
        ([CopiesOf("q", [wire.Shortage("snapshot s", 1, 3, ())])], Severity.WARNING, "1 of 3 copies, no further host has one"),
        ([CopiesOf("q", error="no answer")], Severity.WARNING, "are not known: no answer"),
        ([CopiesOf("q", error="entry 7 is gone", lost=True)], Severity.WRONG, "entry 7 is gone"),
    ],
)
def test_whether_a_disk_may_be_replaced(found: list[CopiesOf], verdict: Severity, told: str) -> None:
    (finding,) = check_copies(found)
    assert finding.verdict == verdict
    assert told in finding.found
    assert verdict == Severity.GOOD or "replace no" in finding.advice


def test_the_copies_of_a_recorded_queue_are_those_of_hosts_that_are_there() -> None:
    def segment(first: int, *hosts: str) -> SegmentMetadata:
        return SegmentMetadata(f"s{first}", first, SegmentState.CLOSED, (Fragment(first, hosts),), first + 9)

    meta = LogMeta(write_quorum=3, ack_quorum=2, segments=(segment(0, "a", "b", "c"), segment(10, "b", "c", "d")))
    views = [gcm.TapeView("log", "exchange-7", True, to_json(meta))]
    assert tape_shortages(views, {"a", "b", "c", "d"}) == []
    (short,) = tape_shortages(views, {"b", "c", "d"})
    assert (short.copies, short.wanted, short.hosts) == (2, 3, ("a",))
    assert short.what.startswith("1 of 2 stretches of the tape of Exchange exchange")
    (short,) = tape_shortages(views, {"d"})
    assert (short.copies, short.hosts) == (0, ("a", "b", "c"))


def test_nothing_is_said_of_copies_where_there_are_none() -> None:
    assert check_copies([]) == []


def test_the_copies_of_a_shuffle_are_those_of_followers_that_answer_and_have_compared() -> None:
    def view(host: str, lacking: tuple[str, ...] = (), compared: bool = True) -> shuffle.FollowerView:
        return shuffle.FollowerView(host, 0, 1, False, 0, {}, {}, lacking, compared)

    interval = shuffle.Interval(None, None)
    holders = [("a", "b"), ("b", "c"), ("c", "d")]
    ranges = tuple(shuffle.Range(number, number, interval, holders=some) for number, some in enumerate(holders))
    spec = shuffle.Spec(("k",), b"s", 2)
    described = shuffle.Description("s", "i", spec, shuffle.ShuffleState.SEALED, 0.0, 1, ranges, (), {}, 0, 0, 0, 0, 0)
    info = gcm.ShuffleInfo(described, dict.fromkeys("abcd", "tcp://x"))
    views = {host: view(host) for host in "abcd"}
    assert shuffle_copies(info, views) == CopiesOf("shuffle s", [])
    assert shuffle_copies(info, {**views, "a": view("a", ("i",))}).shortages == [wire.Shortage("1 ranges", 1, 2, ("a",))]
    assert shuffle_copies(info, {**views, "a": view("a", compared=False), "b": None}).shortages == [
        wire.Shortage("1 ranges", 0, 2, ("a", "b")),
        wire.Shortage("1 ranges", 1, 2, ("b",)),
    ]


class Silent(Cluster):
    """Of these queues; the Monitors of `healthy` answer, all others never do."""

    def __init__(self, queues: int, healthy: set[str]) -> None:
        super().__init__(NOWHERE)
        self.asked: list[str] = []
        self._queues, self._healthy = queues, healthy

    async def view(self) -> gcm.ClusterView:
        monitor = MonitorAddress("h1", "127.0.0.1", 1, 2)
        records = [QueueRecord(f"q{number:04}", QueueSettings(), True, "h1", 1, {}, 0.0) for number in range(self._queues)]
        return gcm.ClusterView(1, "g", 0.0, (), tuple(gcm.QueueInfo(one, (monitor,), True, Policy()) for one in records))

    async def inspect(self, queue: str) -> QueueView:
        self.asked.append(queue)
        if queue not in self._healthy:
            await asyncio.Event().wait()
        return QueueView(queue, 1, Overflow.DROP, (), (), (), None, {})


async def test_thousands_of_silent_monitors_take_bounded_time_and_it_is_told_who_was_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overview_module, "MONITOR_SECONDS", 0.1)
    cluster = Silent(2000, {"q0000", "q0033"})
    async with asyncio.timeout(2.0):
        found = await read_overview(cluster)
    told = Counter(queue.problem for queue in found.queues)
    assert told == {"": 2, "its Monitor does not answer": len(cluster.asked) - 2, NOT_ASKED: 2000 - len(cluster.asked)}
    assert len(cluster.asked) <= MONITORS_SILENT_MAX + MONITORS_ASKED_AT_ONCE
    wrong = [finding for finding in check_overview(found) if finding.subject.startswith("Queue")]
    assert len(wrong) == len(cluster.asked) - 1
    assert wrong[-1].found.startswith(f"{2000 - len(cluster.asked)} were not looked at")
    assert wrong[-1].verdict is Severity.WRONG


async def test_a_few_silent_monitors_keep_nobody_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_module, "MONITOR_SECONDS", 0.1)
    cluster = Silent(500, {f"q{number:04}" for number in range(50, 500)})
    found = await read_overview(cluster)
    assert [queue.queue for queue in found.queues if queue.problem] == [f"q{number:04}" for number in range(50)]


@pytest.mark.parametrize(
    ("limits", "told"),
    [((1024, 65536), "at most 1024 open, may be raised to 65536"), ((20000, 20000), "at most 20000 open")],
)
def test_the_limit_of_open_files_is_told_as_one(limits: tuple[int, int], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    [found] = [finding for finding in check_machine() if finding.subject == "File descriptors"]
    assert found.found == told


@pytest.mark.parametrize(
    ("days", "leader", "verdict", "told"),
    [
        (None, "127.1.2.3", Severity.GOOD, "bound to this machine"),
        (None, "192.0.2.7", Severity.WARNING, "whoever reaches 192.0.2.7"),
        (300.0, "192.0.2.7", Severity.GOOD, "card is that of alice, good for 300 days"),
        (3.0, "192.0.2.7", Severity.WARNING, "good for 3 days"),
    ],
)
def test_security(days: float | None, leader: str, verdict: Severity, told: str) -> None:
    now = 1e9
    card = None if days is None else new_card("alice", CardRole.CLIENT, bytes(32), (), now, now + days * 86400)
    found = check_security(card, leader, now)
    assert found.verdict is verdict
    assert told in found.found
    assert bool(found.advice) == (verdict is Severity.WARNING)

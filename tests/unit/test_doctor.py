"""`roq doctor`: what it makes of ZooKeeper's answer, of the leader's view and of this machine.

Not covered: a whole cluster, see tests/integration/test_cli.py.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner, Result

from roq.cli.doctor_cluster import check_overview, judge_srvr
from roq.cli.doctor_copies import CopiesOf, check_copies, shuffle_copies
from roq.cli.finding import Finding, Verdict
from roq.cli.main import app
from roq.client.overview import FailedProcess, HostRow, Overview, QueueRow
from roq.wire import gcm, shuffle
from roq.wire import master as wire

NOWHERE = "127.0.0.1:1"  # nothing listens there


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


SRVR = "Zookeeper version: {}-abc, built on 2025\nLatency min/avg/max: 0/0.0/0\nMode: standalone\nNode count: 5\n"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (SRVR.format("3.9.5"), Verdict.GOOD),
        (SRVR.format("3.10.0"), Verdict.GOOD),
        (SRVR.format("3.8.4"), Verdict.WRONG),
        (SRVR.format("3.9.3"), Verdict.WRONG),
        ("Zookeeper version: 3.9.5-abc\nThis ZooKeeper instance is not currently serving requests\n", Verdict.WRONG),
        ("srvr is not executed because it is not in the whitelist.\n", Verdict.WARNING),
        ("", Verdict.WARNING),
    ],
)
def test_what_zookeeper_tells_of_itself(answer: str, verdict: Verdict) -> None:
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
    wrong = [finding for finding in check_overview(overview, 1000.0) if finding.verdict == Verdict.WRONG]
    assert about in {finding.subject for finding in wrong}
    assert all(finding.advice for finding in wrong)


def test_what_hurts_is_a_warning() -> None:
    overview = replace(HEALTHY, hosts=(HOST, replace(HOST, host="h2", draining=True)), queues=(replace(QUEUE, lost=3),))
    assert {finding.subject for finding in check_overview(overview, 1005.0) if finding.verdict == Verdict.WARNING} == {
        "Clock",
        "Host h2",
        "Queue q",
    }


def test_nothing_is_wrong_with_a_healthy_cluster_or_a_stopped_queue() -> None:
    stopped = replace(HEALTHY, queues=(replace(QUEUE, running=False, ready=False),))
    for overview in (HEALTHY, stopped):
        assert {finding.verdict for finding in check_overview(overview, 1000.0)} == {Verdict.GOOD}


def test_doctor_looks_at_this_machine() -> None:
    result = roq("doctor", "--json")
    told = json.loads(result.stdout)
    findings = msgspec.convert(told["findings"], list[Finding])
    subjects = {finding.subject for finding in findings}
    assert {"Python", "ZeroMQ", "Java", "File descriptors", "Loopback addresses", "Clock"} <= subjects
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
            Verdict.GOOD,
            "2 work queues and shuffles have all of theirs: one disk may",
        ),
        ([CopiesOf("work queue q", [SHORT])], Verdict.WARNING, "snapshot s: 2 of 3 copies, missing on a"),
        ([CopiesOf("work queue q", [SHORT] * 7)], Verdict.WARNING, "; and 2 more"),
        ([CopiesOf("q", [wire.Shortage("snapshot s", 1, 3, ())])], Verdict.WARNING, "1 of 3 copies, no further host has one"),
        ([CopiesOf("q", error="no answer")], Verdict.WARNING, "are not known: no answer"),
        ([CopiesOf("q", error="entry 7 is gone", lost=True)], Verdict.WRONG, "entry 7 is gone"),
    ],
)
def test_whether_a_disk_may_be_replaced(found: list[CopiesOf], verdict: Verdict, told: str) -> None:
    (finding,) = check_copies(found)
    assert finding.verdict == verdict
    assert told in finding.found
    assert verdict == Verdict.GOOD or "replace no" in finding.advice


def test_nothing_is_said_of_copies_where_there_are_none() -> None:
    assert check_copies([]) == []


def test_the_copies_of_a_shuffle_are_those_of_followers_that_answer_and_have_compared() -> None:
    def view(host: str, lacking: tuple[str, ...] = (), compared: bool = True) -> shuffle.FollowerView:
        return shuffle.FollowerView(host, 0, 1, False, 0, {}, {}, lacking, compared)

    interval = shuffle.Interval(None, None)
    holders = [("a", "b"), ("b", "c"), ("c", "d")]
    ranges = tuple(shuffle.Range(number, number, interval, holders=some) for number, some in enumerate(holders))
    spec = shuffle.Spec(("k",), b"s", 2)
    described = shuffle.Description("s", "i", spec, shuffle.State.SEALED, 0.0, 1, ranges, (), {}, 0, 0, 0, 0, 0)
    info = gcm.ShuffleInfo(described, dict.fromkeys("abcd", "tcp://x"))
    views = {host: view(host) for host in "abcd"}
    assert shuffle_copies(info, views) == CopiesOf("shuffle s", [])
    assert shuffle_copies(info, {**views, "a": view("a", ("i",))}).shortages == [wire.Shortage("1 ranges", 1, 2, ("a",))]
    assert shuffle_copies(info, {**views, "a": view("a", compared=False), "b": None}).shortages == [
        wire.Shortage("1 ranges", 0, 2, ("a", "b")),
        wire.Shortage("1 ranges", 1, 2, ("b",)),
    ]

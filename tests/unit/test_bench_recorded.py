"""The benchmark of recorded queues: what it takes for wrong, and what its report says. No process is started."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pytest

from benchmarks.machine import disk_of
from benchmarks.recorded.report import full, live_ratios
from benchmarks.recorded.run import SCENARIOS, Measured, takes_part
from benchmarks.recorded.systems import SYSTEMS
from benchmarks.recorded.workload import (
    SIZE,
    Found,
    Scenario,
    Wrong,
    check_sequence,
    check_shared,
    numbers,
    payloads,
    published_ns,
    windows,
    without_repeats,
)


def test_payloads_say_their_number_and_time() -> None:
    made = payloads(7, 3, 99)
    assert {len(payload) for payload in made} == {SIZE}
    assert list(numbers(made)) == [7, 8, 9]
    assert {published_ns(payload) for payload in made} == {99}
    assert [list(numbers(window)) for window in windows(1001)] == [list(range(1000)), [1000]]


def test_a_payload_of_another_size_is_wrong() -> None:
    with pytest.raises(Wrong, match="99 bytes"):
        numbers([payloads(0, 1)[0][:-1]])


def test_a_sequence_that_is_complete_is_right() -> None:
    check_sequence(array("Q", [3, 4, 5]), 3, 3)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([0, 1], "2 messages of 3 came"),
        ([], "0 messages of 3 came"),
        ([0, 2, 1], "2 came where 1 was due"),
        ([0, 0, 1], "0 came where 1 was due"),
        ([0, 1, 2, 3], "3 came where 3 was due"),
        ([1, 2, 3], "1 came where 0 was due"),
    ],
)
def test_a_sequence_that_is_not_is_wrong(found: list[int], said: str) -> None:
    with pytest.raises(Wrong, match=said):
        check_sequence(array("Q", found), 0, 3)


def test_members_share_every_message() -> None:
    check_shared([array("Q", [2, 0]), array("Q"), array("Q", [1])], 3)
    with pytest.raises(Wrong, match="1 are missing and 0 came again"):
        check_shared([array("Q", [0, 2])], 3)
    with pytest.raises(Wrong, match="1 are missing and 1 came again"):
        check_shared([array("Q", [0, 2]), array("Q", [2])], 3)
    with pytest.raises(Wrong, match="0 are missing and 1 came again"):
        check_shared([array("Q", [0, 1, 2, 1])], 3)


@pytest.mark.parametrize(
    ("before", "after", "together"),
    [
        ([0, 1], [2, 3], [0, 1, 2, 3]),
        ([0, 1, 2], [1, 2, 3], [0, 1, 2, 3]),
        ([0, 1], [3, 4], [0, 1, 3, 4]),  # a gap stays a gap
        ([0, 1], [1, 2, 1], [0, 1, 2, 1]),  # what comes again later stays wrong
        ([], [0, 1], [0, 1]),
        ([0, 1], [0, 1], [0, 1]),
    ],
)
def test_only_what_is_around_the_position_may_come_again(before: list[int], after: list[int], together: list[int]) -> None:
    assert list(without_repeats(array("Q", before), array("Q", after))) == together


def test_what_is_stored_in_memory_is_refused() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    memory = [fields[1] for fields in mounts if fields[2] == "tmpfs" and Path(fields[1]).is_dir()]
    assert memory, "no tmpfs is mounted here"
    with pytest.raises(RuntimeError, match="TMPDIR"):
        disk_of(Path(memory[0]))


def test_every_scenario_can_be_run_and_every_system_has_its_ways() -> None:
    assert set(SCENARIOS) == set(Scenario)
    for system in SYSTEMS.values():
        clients = system.clients
        assert clients.publish
        assert clients.one_by_one
        assert clients.replay
        assert bool(clients.member) == bool(clients.member_singly)
        assert clients.once or clients.reader
        assert clients.once or clients.writer


def test_the_ratios_of_recording_are_of_medians() -> None:
    def at(way: str, rate: int, p99: float | None = None) -> Found:
        return Found(way, rate, 1.0, p99, p99)

    ways = {
        "one by one, not recorded": [at("", rate) for rate in (100, 200, 900)],
        "one by one, recorded": [at("", rate) for rate in (50, 150, 160)],
        "10,000/s, not recorded": [at("", 10_000, 100.0)],
        "10,000/s, recorded": [at("", 10_000, 150.0)],
    }
    rows = live_ratios(Measured(Scenario.LIVE, {"RoQ": ways}, []))
    assert rows == [
        ["one by one", "messages/s", "200 [100 to 900]", "150 [50 to 160]", "0.75"],
        ["10,000/s", "p50, us", "100", "150", "1.50"],
        ["10,000/s", "p99, us", "100", "150", "1.50"],
    ]


def test_who_has_nothing_to_show_in_a_scenario_does_not_take_part() -> None:
    everybody = {Scenario.PUBLISH, Scenario.ONE_BY_ONE}
    groups = {Scenario.GROUP, Scenario.GROUP_SINGLY}
    assert {scenario for scenario in Scenario if takes_part("RoQ", scenario)} == set(Scenario)
    assert {scenario for scenario in Scenario if takes_part("RabbitMQ quorum queue", scenario)} == everybody | groups
    streams = {scenario for scenario in Scenario if takes_part("RabbitMQ streams", scenario)}
    assert streams == everybody | {Scenario.REPLAY, Scenario.AWAY}


def test_the_report_names_the_disk_the_absent_and_the_failed() -> None:
    found = Found("XADD", 3000, 1.5, 10.0, 20.0, 0.25)
    runs = {"Redis Streams, everysec": {"XADD": [found, msgspec.structs.replace(found, seconds=3.0)]}}
    measured = Measured(Scenario.ONE_BY_ONE, runs, ["one did not run"])
    away = Measured(Scenario.AWAY, {"RoQ": {"away for 60 s": [Found("", 1000, 2.5)]}}, [])
    report = full([measured, away], {"JetStream, default": "not installed"}, "/dev/sda (ext4)", ["Redis 7"])
    assert "/dev/sda (ext4)" in report
    assert "| Redis Streams, everysec | XADD | 1,500 [1,000 to 2,000] | 10 [10 to 10] | 20 [20 to 20] |" in report
    assert "not yet on the disk" in report
    assert "| RoQ | away for 60 s | 2.5 | 1,000 | 400 |" in report
    assert "Not taking part: JetStream, default (not installed)." in report
    assert "Failed: one did not run." in report

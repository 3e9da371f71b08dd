"""Names of the nodes that say where stores serve."""

from __future__ import annotations

import pytest

from roq.wire.assignment import HostReport, ProcessKind, ProcessState, RunningProcess
from roq.wire.stores import StoreRegistration, StoreState, parse_registration, store_of


@pytest.mark.parametrize("state", StoreState)
@pytest.mark.parametrize(("host", "address"), [("a", "10.0.0.1"), ("a=b=running", "host-1.example"), ("ü, x", "::1")])
def test_a_name_says_all(host: str, address: str, state: StoreState) -> None:
    store = StoreRegistration(host, address, 7003, state)
    assert parse_registration(store.node_name) == store


@pytest.mark.parametrize("name", ["", "a", "a=b", "a=10.0.0.1=running", "a=10.0.0.1:x=running", "a=10.0.0.1:7=asleep"])
def test_what_a_later_version_may_write_is_passed_over(name: str) -> None:
    assert parse_registration(name) is None


@pytest.mark.parametrize(
    ("process", "leaving", "state"),
    [
        (ProcessState.RUNNING, False, StoreState.RUNNING),
        (ProcessState.RUNNING, True, StoreState.LEAVING),
        (ProcessState.STARTING, True, StoreState.AWAY),
        (ProcessState.FAILED, False, StoreState.AWAY),
    ],
)
def test_a_report_says_the_same(process: ProcessState, leaving: bool, state: StoreState) -> None:
    runs = (
        RunningProcess("monitor/q", ProcessKind.MONITOR, "q", "", ProcessState.RUNNING, 1, {"clients": 1}),
        RunningProcess("store", ProcessKind.STORE, "", "", process, 2, {"clients": 7003, "control": 2}),
    )
    report = HostReport("a", "10.0.0.1", "i", 1, 1, runs, leaving=leaving)
    assert store_of(report) == StoreRegistration("a", "10.0.0.1", 7003, state)


def test_a_host_without_a_store_says_nothing_of_it() -> None:
    process = RunningProcess("store", ProcessKind.STORE, "", "", ProcessState.STARTING, 0, {})
    assert store_of(HostReport("a", "10.0.0.1", "i", 1, 1)) is None
    assert store_of(HostReport("a", "10.0.0.1", "i", 1, 1, (process,))) is None

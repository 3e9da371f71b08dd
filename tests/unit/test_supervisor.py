"""The child process as a state machine: restarts, back-off, giving up, hangs, stopping, replacing."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcm import supervisor as sup
from hcm.supervisor import Child, Phase


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child("exchange/orders/1")
    yield made
    made.check()


def kinds(instructions: list[sup.Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def serve(child: Child, pid: int, now: float) -> None:
    assert kinds(child.handle(sup.ProcessWanted(), now)) == ["Fork", "Changed"]
    child.handle(sup.Forked(pid), now)
    assert kinds(child.handle(sup.ProcessReady(pid), now)) == ["Changed"]
    assert child.phase is Phase.RUNNING


def test_a_process_that_served_is_restarted_at_once(child: Child) -> None:
    serve(child, 10, 100.0)
    assert kinds(child.handle(sup.Exited(10, "killed by SIGKILL"), 200.0)) == ["Fork", "Changed"]
    assert (child.phase, child.restarts, child.error) == (Phase.STARTING, 1, "killed by SIGKILL")


def test_back_off_grows_to_its_bound_and_then_it_is_given_up(child: Child) -> None:
    now, waits = 0.0, []
    child.handle(sup.ProcessWanted(), now)
    for pid in range(1, sup.QUICK_DEATHS_MAX + 1):
        child.handle(sup.Forked(pid), now)
        instructions = child.handle(sup.Exited(pid, f"exit code {pid}"), now)
        if child.phase is Phase.WAITING:
            due = next(instruction.time for instruction in instructions if isinstance(instruction, sup.WakeAt))
            waits.append(round(due - now, 3))
            assert child.handle(sup.Due(due - 0.5), now) == []
            now = due
            assert kinds(child.handle(sup.Due(due), now)) == ["Fork", "Changed"]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert child.phase is Phase.FAILED
    assert "10 quick deaths" in child.error
    assert "exit code 10" in child.error


def test_wanted_again_gives_a_failed_process_another_chance(child: Child) -> None:
    child.handle(sup.ProcessWanted(), 0.0)
    for _ in range(sup.QUICK_DEATHS_MAX):
        wakes = [step for step in child.handle(sup.ForkFailed("no memory"), 0.0) if isinstance(step, sup.WakeAt)]
        for wake in wakes:
            child.handle(sup.Due(wake.time), wake.time)
    assert child.phase is Phase.FAILED
    assert kinds(child.handle(sup.ProcessWanted(), 1.0)) == ["Fork", "Changed"]
    child.handle(sup.Forked(5), 1.0)
    assert kinds(child.handle(sup.Exited(5, "exit code 1"), 1.0)) == ["Fork", "Changed"]  # counted anew


def test_deaths_after_a_while_of_service_are_not_counted(child: Child) -> None:
    serve(child, 1, 0.0)
    for pid in range(2, 50):
        now = pid * (sup.QUICK_SECONDS + 1)
        assert kinds(child.handle(sup.Exited(pid - 1, "killed"), now)) == ["Fork", "Changed"]
        child.handle(sup.Forked(pid), now)
        child.handle(sup.ProcessReady(pid), now)


def test_a_late_process_is_killed_and_restarted_when_its_exit_is_seen(child: Child) -> None:
    serve(child, 7, 10.0)
    assert child.handle(sup.Beat(12.9), 13.5) == []
    assert child.handle(sup.Beat(12.9), 15.9) == []
    instructions = child.handle(sup.Beat(12.9), 16.0)
    assert sup.Signal(7, signal.SIGKILL) in instructions
    assert child.phase is Phase.KILLING
    assert child.handle(sup.Beat(12.9), 17.0) == []
    assert "Fork" in kinds(child.handle(sup.Exited(7, "killed by SIGKILL"), 17.1))
    assert "no heartbeat" in child.error


def test_a_running_process_without_any_heartbeat_is_killed_after_three_beats(child: Child) -> None:
    serve(child, 7, 10.0)
    assert child.handle(sup.Beat(0.0), 12.9) == []
    assert kinds(child.handle(sup.Beat(0.0), 13.5)) == ["Signal", "Changed"]


def test_one_that_never_gets_ready_is_killed(child: Child) -> None:
    child.handle(sup.ProcessWanted(), 0.0)
    child.handle(sup.Forked(3), 0.5)
    assert child.handle(sup.Beat(0.0), 10.0) == []
    assert child.handle(sup.Beat(0.0), 10.6)[0] == sup.Signal(3, signal.SIGKILL)


def test_a_beating_process_whose_ready_datagram_was_lost_counts_as_running(child: Child) -> None:
    child.handle(sup.ProcessWanted(), 0.0)
    child.handle(sup.Forked(3), 0.0)
    assert child.handle(sup.Beat(1.0), 1.5) == []
    assert kinds(child.handle(sup.Beat(2.0), 2.5)) == ["Changed"]
    assert child.phase is Phase.RUNNING


def test_ready_of_a_predecessor_is_ignored(child: Child) -> None:
    child.handle(sup.ProcessWanted(), 0.0)
    child.handle(sup.Forked(3), 0.0)
    assert child.handle(sup.ProcessReady(2), 0.1) == []
    assert child.handle(sup.Exited(2, "late news"), 0.1) == []
    assert child.phase is Phase.STARTING


def test_stopping_asks_then_terminates_then_kills(child: Child) -> None:
    serve(child, 4, 0.0)
    assert kinds(child.handle(sup.Unwanted(), 10.0)) == ["AskShutdown", "Changed"]
    assert child.handle(sup.Beat(10.0), 11.0) == []
    assert child.handle(sup.Beat(0.0), 12.0) == [sup.Signal(4, signal.SIGTERM)]
    assert child.handle(sup.Beat(0.0), 13.0) == []
    assert child.handle(sup.Beat(0.0), 14.0) == [sup.Signal(4, signal.SIGKILL)]
    assert kinds(child.handle(sup.Exited(4, "killed by SIGKILL"), 14.1)) == ["Forget", "Changed"]
    assert child.phase is Phase.GONE


def test_unwanted_between_fork_order_and_fork_is_terminated_when_it_appears(child: Child) -> None:
    child.handle(sup.ProcessWanted(), 0.0)
    child.handle(sup.Unwanted(), 0.0)
    assert child.handle(sup.Forked(9), 0.1) == [sup.Signal(9, signal.SIGTERM)]
    assert kinds(child.handle(sup.Exited(9, ""), 0.2)) == ["Forget", "Changed"]


def test_wanted_again_while_stopping_starts_anew_after_the_exit(child: Child) -> None:
    serve(child, 4, 0.0)
    child.handle(sup.Unwanted(), 10.0)
    assert child.handle(sup.ProcessWanted(), 10.1) == []
    assert kinds(child.handle(sup.Exited(4, ""), 10.2)) == ["Fork", "Changed"]
    assert child.restarts == 0


def test_replacing_stops_and_starts(child: Child) -> None:
    serve(child, 4, 0.0)
    assert kinds(child.handle(sup.SpecificationReplaced(), 10.0)) == ["AskShutdown", "Changed"]
    assert kinds(child.handle(sup.Exited(4, "exit code 0"), 10.1)) == ["Fork", "Changed"]


def test_adopted_and_beating_is_running(child: Child) -> None:
    child.handle(sup.Adopted(44, started=50.0), 100.0)
    child.handle(sup.Beat(99.5), 100.0)
    assert (child.phase, child.pid) == (Phase.RUNNING, 44)
    assert "Fork" in kinds(child.handle(sup.Exited(44, "ended"), 101.0))


def test_an_adopted_process_is_judged_by_its_heartbeats_from_then_on(child: Child) -> None:
    """While no HCM watched, the machine may have stood still, or had no time for anybody: that is no reason to kill."""
    child.handle(sup.Adopted(44, started=50.0), 100.0)
    assert child.handle(sup.Beat(90.0), 100.0) == []
    assert child.handle(sup.Beat(90.0), 103.0) == []
    assert kinds(child.handle(sup.Beat(103.0), 103.5)) == ["Changed"]
    assert child.phase is Phase.RUNNING


def test_an_adopted_process_that_never_beats_is_killed(child: Child) -> None:
    child.handle(sup.Adopted(44, started=50.0), 100.0)
    assert child.handle(sup.Beat(90.0), 103.0) == []
    assert kinds(child.handle(sup.Beat(90.0), 103.1)) == ["Signal", "Changed"]


EVENTS = st.sampled_from(
    ["wanted", "unwanted", "replaced", "forked", "fork failed", "ready", "tick", "beat", "due", "exited", "stale exit", "time"]
)


@given(st.lists(EVENTS, max_size=60))
def test_any_history_keeps_the_invariants(history: list[str]) -> None:
    """A world that answers instructions as the fork server and the kernel would: never two processes at a time."""
    child, now, pid, alive, ordered, due, beat = Child("x"), 0.0, 0, False, False, 0.0, 0.0
    for step in history:
        event: sup.Event | None = None
        match step:
            case "wanted" | "unwanted" | "replaced" if child.phase is not Phase.GONE:
                wishes: dict[str, sup.Event] = {
                    "wanted": sup.ProcessWanted(),
                    "unwanted": sup.Unwanted(),
                    "replaced": sup.SpecificationReplaced(),
                }
                event = wishes[step]
            case "forked" if ordered:
                pid, ordered, alive = pid + 1, False, True
                event = sup.Forked(pid)
            case "fork failed" if ordered:
                ordered, event = False, sup.ForkFailed("no memory")
            case "ready" if alive:
                event = sup.ProcessReady(pid)
            case "beat" if alive:
                beat = now
                event = sup.Beat(beat)
            case "tick":
                event = sup.Beat(beat)
            case "due":
                event = sup.Due(due)
            case "exited" if alive:
                alive, beat, event = False, 0.0, sup.Exited(pid, "exit code 1")
            case "stale exit":
                event = sup.Exited(pid - 1, "stale")
            case "time":
                now += 1.7
        if event is None:
            continue
        for instruction in child.handle(event, now):
            match instruction:
                case sup.Fork():
                    assert not alive, "forked beside a living predecessor"
                    assert not ordered, "two orders at a time"
                    ordered = True
                case sup.WakeAt(time):
                    due = time
                case sup.Signal(target, _):
                    assert target == pid
                    assert alive
                case sup.Forget():
                    assert not alive, "forgotten while alive"
                    assert not ordered
        child.check()

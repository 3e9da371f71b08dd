"""The clock of a log: its processes agree on the time whatever their wall clocks say, and it goes on after a reboot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roq.log.local import LocalLog
from roq.log.local.shared import Clock, MappedHeader, Word
from roq.wire.task import LeasedTask, NewTask
from roq.wire.work_queue import TaskSettings
from roq.workqueue.log_queue import LogQueue

HOUR_MS = 3_600_000


class Machine:
    """A machine whose wall clock can be stepped, and that can be booted. Times in ms."""

    def __init__(self, folder: Path) -> None:
        self.header = MappedHeader(folder / "header", 0o600)
        self.boot, self.up, self.step = 1, 1_000, 1_700_000_000_000

    def clock(self) -> Clock:
        """As a process gets it that opens the log now."""
        return Clock(self.header, lambda: (self.step + self.up) * 1_000_000, lambda: self.up * 1_000_000, self.boot)


def stepped(milliseconds: int) -> Callable[[], int]:
    return lambda: time.time_ns() + milliseconds * 1_000_000


@pytest.mark.parametrize("step", [HOUR_MS, -HOUR_MS])
def test_a_step_of_the_wall_clock_reaches_nobody(tmp_path: Path, step: int) -> None:
    machine = Machine(tmp_path)
    first = machine.clock()
    began = first.now()
    assert began == machine.step + machine.up
    machine.step += step
    second = machine.clock()
    machine.up += 500
    assert first.now() == second.now() == began + 500


def test_after_a_reboot_it_goes_on_and_never_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    last = machine.clock().now()
    machine.boot, machine.up, machine.step = 2, 10, machine.step + 60_000
    assert machine.clock().now() == machine.step + 10 > last, "the wall clock says how long it was off"
    machine.boot, machine.step = 3, machine.step - HOUR_MS
    clock, other = machine.clock(), machine.clock()
    assert clock.now() < last
    clock.reach(last)  # which a process reads in the log
    assert clock.now() == other.now() == last
    clock.reach(last - 1000)
    machine.up += 7
    assert clock.now() == other.now() == machine.clock().now() == last + 7


def test_what_version_0_1_left_in_the_header_counts_for_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.clock()
    machine.boot, machine.up = 2, 0  # 0.1 starts the header anew in this boot, and leaves these words
    machine.header.rebuild(7, first=0, active=0, end=0)
    assert machine.header.words[Word.CLOCK_OFFSET] != 0
    machine.step += HOUR_MS
    assert machine.clock().now() == machine.step


def lease(queue: LogQueue, seconds: float = 60, wait_seconds: float = 0) -> list[LeasedTask[bytes]]:
    return queue.lease(seconds, 1, wait_seconds)[1]


def open_at(folder: Path, step: int) -> LogQueue:
    """As by a process that is started when the wall clock is `step` ms off."""
    return LogQueue(folder, TaskSettings(max_attempts=2), log=LocalLog(folder, wall=stepped(step)))


def leases_at_once(folder: Path) -> int:
    """How many are given the one task that there is, by processes before and after steps of the wall clock."""
    queues = [open_at(folder, 0)]
    queues[0].put([NewTask(b"once"), NewTask(b"later", delay_seconds=600)])
    leased = 0
    for step in (0, HOUR_MS, -HOUR_MS, 2 * HOUR_MS):
        queues.append(open_at(folder, step))
        leased += len(lease(queues[-1])) + len(lease(queues[0]))
    for queue in queues:
        queue.close()
    return leased


def test_a_stepped_clock_leases_nothing_twice(tmp_path: Path) -> None:
    assert leases_at_once(tmp_path / "log") == 1


def test_clocks_of_their_own_would_lease_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLog, "now", lambda self, known=0: max(self._own_clock(), known))
    made = LocalLog.__init__

    def make(self: LocalLog, folder: Path, *, wall: Callable[[], int]) -> None:
        made(self, folder)
        self._own_clock = lambda: wall() // 1_000_000  # type: ignore[attr-defined]

    monkeypatch.setattr(LocalLog, "__init__", make)
    assert leases_at_once(tmp_path / "log") > 1


@pytest.mark.parametrize("step", [HOUR_MS, -HOUR_MS])
def test_no_lease_is_stuck(tmp_path: Path, step: int) -> None:
    holder = open_at(tmp_path / "log", 0)
    holder.put([NewTask(b"x")])
    assert lease(holder, seconds=0.1)
    other = open_at(tmp_path / "log", step)
    assert [task.attempt for task in lease(other, wait_seconds=5)] == [2]
    holder.close()
    other.close()

"""The clock of a master: it never steps back, and one that is far ahead ends no lease."""

from __future__ import annotations

import time

import pytest

from roq.wire.work_queue import TaskSettings
from roq.workqueue.fold import Fold
from roq.workqueue.master.process import GRACE_MS
from roq.workqueue.master.recent import Recent
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import SteadyClock
from roq.workqueue.records import Configure, Pop, Push

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def wall() -> int:
    return round(time.time() * 1000)


def ahead(milliseconds: int) -> SteadyClock:
    """Of a host whose clock is that much ahead."""
    return SteadyClock(lambda: time.time() + milliseconds / 1000)


def test_it_goes_on_where_its_predecessor_was() -> None:
    clock = SteadyClock()
    assert abs(clock.now() - wall()) < 1000
    logged = wall() + HOUR_MS
    clock.take_over(logged, wall())
    assert 0 <= clock.now() - logged < 1000
    clock.take_over(logged + 5, wall() - DAY_MS)
    assert 0 <= clock.now() - logged - 5 < 1000


@pytest.mark.parametrize(("own", "witness"), [(DAY_MS, 0), (0, DAY_MS), (-DAY_MS, 0), (0, -DAY_MS)])
def test_a_clock_that_is_wrong_alone_takes_the_log_s_time_nowhere(own: int, witness: int) -> None:
    clock, logged = ahead(own), wall() - 10_000
    clock.take_over(logged, wall() + witness)
    assert 0 <= clock.now() - logged <= 15_000, "at most by how long nobody led"


@pytest.mark.parametrize("witness", [0, DAY_MS])
def test_a_master_whose_clock_is_a_day_ahead_ends_no_lease_and_buries_no_task(witness: int) -> None:
    """With a witness that is as far ahead as itself, as without one, it does."""
    fold, began = Fold(), wall() - 10_000
    for record in (
        Configure(began, TaskSettings(max_attempts=1), 0),
        Push(began, 1, 1, b"leased"),
        Pop(began, 5, 1, 1, 60_000),
        Push(began, 1, 2, b"delayed", delay_ms=60_000),
    ):
        fold.apply(record)
    clock = ahead(DAY_MS)
    clock.take_over(fold.clock, wall() + witness)
    quiet_until = clock.now() + GRACE_MS
    service = MasterService(fold, Recent(), 2, 65_536, lambda hosts: (), quiet_until)
    service.tick(quiet_until)
    status = fold.status(clock.now())
    assert (status.leased, status.delayed, status.dead) == ((1, 1, 0) if witness == 0 else (0, 0, 1))
    fold.check()

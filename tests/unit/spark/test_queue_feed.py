"""A feed and its ledger when something is in the way: leases that give nothing, acks that fail, folders of others.

Not covered: what a driver that died leaves to the next one (test_queue_protocol.py).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import roq.blocking
from roq.errors import ManifestGone, RoqError, StorageFull
from roq.spark import queue_feed, queue_ledger
from roq.spark.queue_feed import LeaseFeed
from roq.spark.queue_ledger import DoneTasks
from roq.spark.queue_options import queue_options
from roq.wire.task import ACK, Settlement, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import open_backend, same_queue
from roq.workqueue.contract import Backend, RoundTrip
from tests.unit.spark.queue_feeding import LIMIT, address_in, die, drain, feed, payloads, renewed, status

WAIT_SECONDS = 20.0


class Troubled:
    """A work queue with something in the way of its leases or settlements."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.settings: TaskSettings = backend.settings
        self.put, self.peek, self.status, self.close = backend.put, backend.peek, backend.status, backend.close
        self.release_all, self.purge = backend.release_all, backend.purge
        self.requeue_dead, self.remove_dead = backend.requeue_dead, backend.remove_dead

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        return self._backend.lease(seconds, count, wait_seconds, settle)

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        return self._backend.settle(settlements)


class Gives(Troubled):
    """No tasks for some leases: they were lost races ("nothing"), or their payloads could not be read ("unread")."""

    def __init__(self, backend: Backend, what: str, times: int) -> None:
        super().__init__(backend)
        self._what, self._times = what, times

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        self._times -= 1
        if self._times < 0:
            return super().lease(seconds, count, wait_seconds, settle)
        if self._what == "unread":
            self.settle([Settlement.release(task.token, 0.3) for task in super().lease(seconds, 1000, 0).tasks])
        return RoundTrip([], [])


class Full(Troubled):
    """No room for acks, while it is full."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.full = True

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        if self.full and any(one.kind == ACK for one in settlements):
            raise StorageFull("no space left")
        return super().settle(settlements)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- trigger(once=True) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["log", "file"])
def test_whoever_asks_once_gets_all_that_is_ready_however_many(scheme: str, tmp_path: Path) -> None:
    address = address_in(scheme, tmp_path, 950)
    read = LeaseFeed(queue_options({"address": address, "maxRowsPerBatch": "100"}))  # 950 rows are more than four batches
    start = read.first()
    end = read.plan(start, ReadAllAvailable())
    with roq.blocking.open_queue(address) as queue:
        queue.put(b"950")
    assert sorted(payloads(read, start, end)) == list(range(950))
    read.close()
    assert status(address) == (1, 950, 0), "nobody asked what comes next"
    again = LeaseFeed(queue_options({"address": address, "maxRowsPerBatch": "100"}))
    assert payloads(again, end, again.plan(end, ReadAllAvailable())) == [950]
    assert again._ledger.wait_acked(WAIT_SECONDS)
    again.close()
    assert status(address) == (0, 1, 950)


# --- leases that give nothing ------------------------------------------------------------------------------------------


def troubled(monkeypatch: pytest.MonkeyPatch, what: str, times: int) -> None:
    monkeypatch.setattr(
        queue_feed, "open_backend", lambda address, settings: Gives(open_backend(address, settings), what, times)
    )


@pytest.mark.parametrize(("what", "times"), [("nothing", 3), ("unread", 2)])
def test_a_lease_that_gives_nothing_is_not_the_end(
    what: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_in("log", tmp_path, 150)
    troubled(monkeypatch, what, times)
    read = feed(address)
    assert sorted(drain(read, read.first())) == list(range(150))
    read.close()
    assert status(address) == (0, 0, 150)


def test_leases_that_give_nothing_for_long_are_the_end_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = address_in("log", tmp_path, 150)
    monkeypatch.setattr(queue_feed, "EMPTY_SECONDS", 0.5)
    troubled(monkeypatch, "nothing", 1_000_000)
    read = feed(address)
    with caplog.at_level(logging.WARNING):
        assert drain(read, read.first()) == []
    read.close()
    assert "150 of the tasks that were ready could not be leased and are left: Status(ready=150" in caplog.text


def test_what_another_reader_has_taken_is_not_waited_for(tmp_path: Path) -> None:
    address = address_in("log", tmp_path, 150)
    read = feed(address)
    with roq.blocking.open_queue(address) as queue:
        assert len(queue.lease(60, 150)) == 150
        began = time.monotonic()
        assert drain(read, read.first()) == []
        assert time.monotonic() < began + queue_feed.EMPTY_SECONDS / 2
    read.close()


# --- whose manifests they are -------------------------------------------------------------------------------------------


def test_manifests_of_another_queue_are_refused(tmp_path: Path) -> None:
    ours, theirs = (address_in("log", folder, 10) for folder in (tmp_path / "a", tmp_path / "b"))
    manifests = str(tmp_path / "manifests")
    first = feed(ours, manifests=manifests)
    first.plan(first.first(), LIMIT)
    die(first, ours, "hold")
    with pytest.raises(ManifestGone, match=rf"holds the manifests of a stream of {ours}, not of {theirs}: give each stream"):
        feed(theirs, manifests=manifests)
    (tmp_path / "alias").symlink_to(tmp_path / "a")
    again = feed(f"log://{tmp_path}/alias/queue", manifests=manifests)  # and the folder is free at once
    assert drain(again, again.first()) == list(range(10))
    again.close()
    assert status(theirs) == (10, 0, 0)


def test_manifests_within_a_queue_move_with_it(tmp_path: Path) -> None:
    first = feed(address_in("log", tmp_path / "a", 10))
    first.plan(first.first(), LIMIT)
    die(first, "", "hold")
    os.rename(tmp_path / "a", tmp_path / "b")
    moved = feed(f"log://{tmp_path}/b/queue")
    assert drain(moved, moved.first()) == list(range(10))
    moved.close()
    with pytest.raises(ManifestGone, match="b/queue, not of"):
        feed(address_in("log", tmp_path / "c", 1), manifests=f"{tmp_path}/b/queue/spark/manifests")


def test_the_same_queue_has_many_addresses() -> None:
    def name(address: str) -> str:
        return queue_options({"address": address}).queue

    mine = name("roq://zk1:2181,zk2:2181/prod/tasks")
    for address, same in {
        "roq://ZK2,zk1:2181/prod/tasks": True,
        "roq://zk2:2181,zk3:2181,zk4:2181/prod/tasks": True,
        "roq://zk1:2181,zk2:2181/prod/others": False,
        "roq://zk1:2181,zk2:2181/test/tasks": False,
        "roq://zk1:2181,zk2:2181/tasks": False,
        "roq://zk1:2182,zk9:2181/prod/tasks": False,
        "log:///prod/tasks": False,
    }.items():
        assert same_queue(mine, name(address)) is same, address
    assert same_queue(name("log:///data/x%20y"), name("log:///data//z/../x y/"))
    assert not same_queue(name("log:///data/tasks"), name("file:///data/tasks"))


# --- leases and acks ---------------------------------------------------------------------------------------------------


def failed(error: RoqError) -> None:
    raise AssertionError(error)


def test_leases_of_a_former_driver_are_renewed_at_once_on_a_machine_that_has_just_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_in("log", tmp_path, 20)
    first = feed(address, leaseSeconds="300")
    first.plan(first.first(), LIMIT)
    die(first, address, "hold")
    backend = open_backend(address, None)
    before = max(task.due for task in backend.peek(TaskState.LEASED, 20))
    uptime = SimpleNamespace(monotonic=lambda: 5.0, time=time.time, sleep=time.sleep)
    monkeypatch.setattr(queue_ledger, "time", uptime)
    ledger = queue_ledger.Ledger(tmp_path / "queue/spark/manifests", address, backend, 300.0, failed)
    until(lambda: min(task.due for task in backend.peek(TaskState.LEASED, 20)) > before)
    ledger.close()
    backend.close()


def test_leases_are_renewed_while_acks_fail_and_acked_when_they_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_ledger, "RENEW_SHARE", 60)  # each second
    address = address_in("log", tmp_path, 20)
    backend = Full(open_backend(address, None))
    ledger = queue_ledger.Ledger(tmp_path / "manifests", address, backend, 60.0, failed)
    for _ in range(2):
        ledger.add(backend.lease(60.0, 10, 0.0)[1], time.monotonic())
    ledger.commit(1)
    renewed(backend, 20)
    assert backend.status().leased == 20
    backend.full = False
    assert ledger.wait_acked(WAIT_SECONDS)
    assert (backend.status().leased, backend.status().completed) == (10, 10)
    ledger.close()
    backend.close()


def test_acks_that_fail_for_long_end_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_ledger, "FAIL_SECONDS", 0.5)
    address = address_in("log", tmp_path, 20)
    backend, told, news = Full(open_backend(address, None)), list[RoqError](), threading.Event()

    def fail(error: RoqError) -> None:
        told.append(error)
        news.set()

    ledger = queue_ledger.Ledger(tmp_path / "manifests", address, backend, 60.0, fail)
    ledger.add(backend.lease(60.0, 20, 0.0)[1], time.monotonic())
    ledger.commit(1)
    assert news.wait(WAIT_SECONDS)
    assert [type(error) for error in told] == [StorageFull]
    ledger.close()
    backend.close()


def test_ids_of_late_acks_are_kept_until_they_are_acked(tmp_path: Path) -> None:
    address = address_in("log", tmp_path, 100)
    first = feed(address)
    end = first.plan(first.first(), LIMIT)
    die(first, address, "over")
    second = LeaseFeed(queue_options({"address": address, "maxRowsPerBatch": "100"}))
    second.done(end)
    assert second._ledger.wait_acked(WAIT_SECONDS)
    notes = tmp_path / "queue/spark/manifests"
    assert len(second._ledger._done) == 100
    assert [path.name for path in notes.glob("done-*")] == ["done-1.json"]
    second.freeze()
    assert drain(second, end) == []
    assert len(second._ledger._done) == 0
    assert not list(notes.glob("done-*")), "nothing of it is kept"
    second.close()
    assert status(address) == (0, 0, 100)


def test_ids_that_nobody_leases_again_go_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = DoneTasks(tmp_path)
    done.add(1, ["a", "b"])
    done.add(2, ["c"])
    done.acked(["a", "x"])
    assert ("a" in done, "b" in done, "c" in done) == (False, True, True)
    old = time.time() - queue_ledger.KEEP_SECONDS - 60
    os.utime(tmp_path / "done-1.json", (old, old))
    read = DoneTasks(tmp_path)
    assert ("b" in read, "c" in read) == (False, True)
    monkeypatch.setattr(queue_ledger, "KEEP_SECONDS", -60.0)  # what was noted just now is old
    read.add(3, ["d"])
    assert (len(read), list(tmp_path.iterdir())) == (0, []), "a stream that runs for long forgets too"

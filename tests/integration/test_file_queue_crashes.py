"""The file queue's processes killed at every change they make to the folder; and what a loss of power would undo."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roq.wire.task import LeasedTask, NewTask, Settlement, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.folder import LITTER_SECONDS
from roq.workqueue.file_queue.queue import FileQueue
from tests.harness.crash_points import crash_points, trace, unsynced

RUNNABLE = json.dumps({"txt": "x" * 300, "class": "PrintTask"}).encode()
PAYLOADS = {"json": RUNNABLE, "data": b"\x00\x01" * 200}


def later(seconds: float = 1000.0) -> Callable[[], float]:
    """A clock for which every lease of now is over."""
    return lambda: time.time() + seconds


def count(queue: FileQueue) -> int:
    """Tasks in any state."""
    found = queue.status()
    return found.ready + found.delayed + found.leased + found.dead


def drain(folder: Path) -> list[bytes]:
    """Every payload, leased and acked when all old leases are over; then nothing may be left."""
    queue = FileQueue(folder, clock=later())
    queue.requeue_dead(None)
    found: list[bytes] = []
    while leases := queue.lease(60, 100, 0)[1]:
        found += [lease.payload for lease in leases]
        assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * len(leases)
    assert count(queue) == 0
    assert not any((folder / "queue").iterdir())
    assert not any((folder / "data/queue").iterdir())
    return found


def assert_only_old_litter(folder: Path) -> None:
    """What a crash leaves is outside queue/, and gone after a while."""
    old = time.time() - 2 * LITTER_SECONDS
    for part in ("tmp", "movement", "data/movement"):
        for path in (folder / part).iterdir():
            os.utime(path, (old, old))
    FileQueue(folder).close()
    for part in ("tmp", "movement", "data/movement"):
        assert not any((folder / part).iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def prepared(
    folder: Path, payload: bytes, act: Callable[[FileQueue, LeasedTask[bytes]], object]
) -> Callable[[], Callable[[], object]]:
    """One leased task in a new folder, and what a child does with it."""

    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        queue = FileQueue(folder)
        queue.put([NewTask(payload)])
        _, (lease,), _ = queue.lease(60, 1, 0)
        return lambda: act(queue, lease)

    return prepare


def test_a_put_killed_anywhere_leaves_whole_tasks_or_none(folder: Path) -> None:
    payloads = [RUNNABLE, b"data", RUNNABLE]

    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        queue = FileQueue(folder)
        return lambda: queue.put([NewTask(payload) for payload in payloads])

    points = 0
    for point, finished in crash_points(prepare):
        points += 1
        assert all(names.parse(path.name) for path in (folder / "queue").iterdir()), point
        found = drain(folder)
        assert set(found) <= set(payloads), point
        assert len(found) == 3 if finished else len(found) <= 3, point
        assert_only_old_litter(folder)
    assert points > 20


def test_opening_a_new_folder_killed_anywhere_can_be_repeated(folder: Path) -> None:
    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        return lambda: FileQueue(folder, TaskSettings(max_attempts=3))

    for point, _ in crash_points(prepare):
        assert FileQueue(folder, TaskSettings(max_attempts=3)).settings.max_attempts == 3, point


def test_a_put_with_a_key_killed_anywhere_and_repeated_is_one_task(folder: Path) -> None:
    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        queue = FileQueue(folder)
        queue.put([NewTask(b"first", dedup_key="first")])
        return lambda: queue.put([NewTask(RUNNABLE, dedup_key="key"), NewTask(b"two", dedup_key="two")])

    for point, _ in crash_points(prepare):
        queue = FileQueue(folder)
        again = queue.put(
            [NewTask(RUNNABLE, dedup_key="key"), NewTask(b"two", dedup_key="two"), NewTask(b"first", dedup_key="first")]
        )
        assert len(set(again)) == 3
        assert sorted(drain(folder)) == sorted([b"first", RUNNABLE, b"two"]), point


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_lease_killed_anywhere_comes_back(folder: Path, kind: str) -> None:
    def prepare() -> Callable[[], object]:
        shutil.rmtree(folder, ignore_errors=True)
        queue = FileQueue(folder)
        queue.put([NewTask(PAYLOADS[kind])])
        return lambda: queue.lease(60, 1, 0)

    for point, _ in crash_points(prepare):
        assert count(FileQueue(folder)) == 1, point
        assert drain(folder) == [PAYLOADS[kind]], point
        assert_only_old_litter(folder)


@pytest.mark.parametrize("kind", PAYLOADS)
def test_an_ack_killed_anywhere_removes_the_task_or_not(folder: Path, kind: str) -> None:
    def ack(queue: FileQueue, lease: LeasedTask[bytes]) -> None:
        assert queue.settle([Settlement.ack(lease.token)]) == [""]

    for point, finished in crash_points(prepared(folder, PAYLOADS[kind], ack)):
        left = drain(folder)
        assert left == [] if finished else left in ([], [PAYLOADS[kind]]), point
        assert_only_old_litter(folder)


@pytest.mark.parametrize(
    "settlement",
    [
        lambda lease: Settlement.extend(lease.token, 60),
        lambda lease: Settlement.release(lease.token, 5.0, "failed"),
        lambda lease: Settlement.release(lease.token),
        lambda lease: Settlement.reject(lease.token, "never"),
    ],
    ids=["extend", "release with error", "release", "reject"],
)
def test_a_settlement_killed_anywhere_keeps_the_task(
    folder: Path, settlement: Callable[[LeasedTask[bytes]], Settlement]
) -> None:
    def settle(queue: FileQueue, lease: LeasedTask[bytes]) -> None:
        assert queue.settle([settlement(lease)]) != [None]

    for point, _ in crash_points(prepared(folder, RUNNABLE, settle)):
        assert count(FileQueue(folder)) == 1, point
        assert drain(folder) == [RUNNABLE], point


def test_a_requeue_and_a_purge_killed_anywhere(folder: Path) -> None:
    def dead(act: Callable[[FileQueue], object]) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            shutil.rmtree(folder, ignore_errors=True)
            queue = FileQueue(folder)
            queue.put([NewTask(RUNNABLE)])
            _, (lease,), _ = queue.lease(60, 1, 0)
            queue.settle([Settlement.reject(lease.token, "no")])
            return lambda: act(queue)

        return prepare

    for point, finished in crash_points(dead(lambda queue: queue.requeue_dead(None))):
        queue = FileQueue(folder)
        assert count(queue) == 1, point
        assert queue.status().ready == 1 or not finished, point
        assert drain(folder) == [RUNNABLE], point
    for point, _ in crash_points(dead(lambda queue: queue.purge())):
        assert FileQueue(folder).peek(TaskState.DEAD, 1)[0].error == "no", point


def test_attempts_survive_kills_between_leases(folder: Path) -> None:
    queue = FileQueue(folder, TaskSettings(max_attempts=3))
    queue.put([NewTask(RUNNABLE)])
    for attempt in range(1, 4):
        _, (lease,), _ = FileQueue(folder, clock=later(attempt * 100)).lease(60, 1, 0)
        assert lease.attempt == attempt
    last = FileQueue(folder, clock=later(1000))
    assert last.lease(60, 1, 0)[:2] == ([], [])
    assert [(view.attempts, view.state) for view in last.peek(TaskState.DEAD, 9)] == [(3, TaskState.DEAD)]


def queue_changes(folder: Path, act: Callable[[], object]) -> list[str]:
    """What power loss after `act` could undo, of what makes or unmakes a task."""
    left = unsynced(trace(act))
    kept = (f"{folder}/queue", f"{folder}/data/queue", f"{folder}/dead")
    return [f"{change}" for change in left if (change.target or change.path).startswith(kept)]


@pytest.mark.quick
def test_what_was_answered_survives_a_loss_of_power(folder: Path) -> None:
    queue = FileQueue(folder)
    tasks = [NewTask(RUNNABLE), NewTask(b"data"), NewTask(b"keyed", dedup_key="k"), NewTask(RUNNABLE, 5.0)]
    assert queue_changes(folder, lambda: queue.put(tasks)) == []
    assert queue_changes(folder, lambda: queue.put([NewTask(RUNNABLE)])) == []
    _, leases, _ = queue.lease(60, 4, 0)
    acks: list[Settlement] = [
        Settlement.ack(leases[0].token),
        Settlement.reject(leases[1].token, "no"),
        Settlement.release(leases[2].token, 0.0, "later"),
        Settlement.extend(leases[3].token, 9),
    ]
    assert queue_changes(folder, lambda: queue.settle(acks)) == []
    assert queue_changes(folder, lambda: queue.requeue_dead(None)) == []
    assert queue_changes(folder, queue.purge) == []


def test_the_watch_for_power_loss_sees_an_unsynced_put(folder: Path) -> None:
    queue = FileQueue(folder)

    def careless() -> None:
        path = f"{queue.path}/tmp/x"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, b"x")
        os.close(fd)
        os.rename(path, f"{queue.path}/queue/0--x.json")

    assert len(queue_changes(folder, careless)) == 2

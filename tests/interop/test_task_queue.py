"""Our file queue and python-task-queue 2.14 on one folder at the same time, each reading what the other writes."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from roq.wire.task import NewTask, Settlement, TaskState
from roq.workqueue.file_queue.queue import FileQueue
from tests.interop.conftest import Upstream

Start = Callable[[Path], Upstream]
Worker = Callable[[Path, float], subprocess.Popen[str]]
Ptq = Callable[..., str]


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """Where tasks that ran leave a file."""
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def mark(marks: Path, number: int) -> bytes:
    """A task both programs can run."""
    return json.dumps({"folder": str(marks), "number": number, "class": "MarkTask"}).encode()


def runs(marks: Path) -> Counter[int]:
    """How often each task ran."""
    return Counter(int(path.name.split("--")[0]) for path in marks.iterdir())


def numbers(leases: list[bytes]) -> list[int]:
    return sorted(json.loads(payload)["number"] for payload in leases)


def test_we_run_what_it_inserts(folder: Path, marks: Path, upstream: Start) -> None:
    other = upstream(folder)
    assert other("insert", str(marks), 0, 30) == 30
    queue = FileQueue(folder)
    assert queue.status().ready == queue.status().inserted == 30
    _, leases, _ = queue.lease(60, 100, 0)
    assert numbers([lease.payload for lease in leases]) == list(range(30))
    assert {lease.attempt for lease in leases} == {1}
    assert all(abs(lease.inserted_ms / 1000 - time.time()) < 60 for lease in leases)
    assert other("lease", 60, 1) == []
    assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * 30
    assert other("numbers") == {"inserted": 30, "enqueued": 0, "leased": 0, "done": 30}
    assert other("empty") is True
    assert not any((folder / "movement").iterdir())


def test_it_runs_what_we_put(folder: Path, marks: Path, upstream: Start) -> None:
    queue = FileQueue(folder)
    ids = queue.put([NewTask(mark(marks, number), priority=number % 3) for number in range(30)])
    function = [["upstream", "mark_function"], [str(marks)], {"number": 30}, -1]
    function[0] = ["__main__", "mark_function"]  # as the program that runs it calls its module
    ids += FileQueue(folder, trust_functions=True).put([NewTask(json.dumps(function).encode())])
    other = upstream(folder)
    assert other("poll", 3.0, 60) == 31
    assert runs(marks) == Counter(range(31))
    assert queue.status().completed == 31
    assert queue.status().ready == queue.status().leased == 0
    assert not any((folder / "movement").iterdir())


def test_a_function_it_queued_is_leased_by_us_and_run_by_it_after_a_release(folder: Path, marks: Path, upstream: Start) -> None:
    other = upstream(folder)
    other("insert function", str(marks), 7)
    queue = FileQueue(folder)
    _, (lease,), _ = queue.lease(60, 1, 0)
    assert json.loads(lease.payload)[:3] == [["__main__", "mark_function"], [str(marks)], {"number": 7}]
    assert queue.settle([Settlement.release(lease.token, 0.0, "not here")]) == [""]
    assert other("poll", 3.0, 60) == 1
    assert runs(marks) == Counter([7])


def test_its_lease_is_ours_to_see_and_expires_for_us(folder: Path, marks: Path, upstream: Start) -> None:
    other = upstream(folder)
    other("insert", str(marks), 0, 1)
    (id,) = other("lease", 2, 1)
    queue = FileQueue(folder)
    assert queue.status().leased == 1
    assert queue.lease(60, 1, 0)[:2] == ([], [])
    (seen,) = queue.peek(TaskState.LEASED, 10)
    assert (seen.id, seen.attempts) == (id, 1)
    other("renew", id, 4)
    assert queue.lease(60, 1, 1.5)[:2] == ([], [])
    _, (lease,), _ = queue.lease(60, 1, 10)
    assert lease.id == id
    assert lease.attempt > 1
    assert other("lease", 60, 1) == []


def test_its_delayed_task_is_delayed_for_us(folder: Path, marks: Path, upstream: Start) -> None:
    other = upstream(folder)
    other("insert delayed", str(marks), 0, 5)
    queue = FileQueue(folder)
    assert (queue.status().delayed, queue.status().leased) == (1, 0)
    assert [view.attempts for view in queue.peek(TaskState.DELAYED, 10)] == [0]
    _, (lease,), _ = queue.lease(60, 1, 10)
    assert lease.attempt == 1


def test_our_delay_lease_and_extension_hold_for_it(folder: Path, marks: Path, upstream: Start) -> None:
    queue = FileQueue(folder)
    other = upstream(folder)
    queue.put([NewTask(mark(marks, 0), delay_seconds=4), NewTask(mark(marks, 1))])
    _, (lease,), _ = queue.lease(1, 1, 0)
    (token,) = queue.settle([Settlement.extend(lease.token, 60)])
    assert other("numbers")["leased"] == 2
    assert other("lease", 60, 1) == []
    leased: list[str] = []
    deadline = time.monotonic() + 10
    while not leased and time.monotonic() < deadline:
        leased = other("lease", 60, 10)
    (id,) = leased
    assert id != lease.id
    assert queue.settle([Settlement.ack(token or "")]) == [""]
    other("execute", id)
    other("delete", id)
    assert runs(marks) == Counter([0])
    assert other("empty") is True


def test_a_lease_it_took_over_is_lost_for_us(folder: Path, marks: Path, upstream: Start) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(mark(marks, 0))])
    _, (lease,), _ = queue.lease(1, 1, 0)
    other = upstream(folder)
    time.sleep(2.1)
    assert other("lease", 60, 1) == [lease.id]
    assert (
        queue.settle(
            [
                Settlement.ack(lease.token),
                Settlement.extend(lease.token, 9),
                Settlement.release(lease.token),
                Settlement.reject(lease.token, "x"),
            ]
        )
        == [None] * 4
    )
    assert other("numbers")["leased"] == 1
    assert queue.status().dead == 0


def test_what_it_cancels_is_ready_for_us(folder: Path, marks: Path, upstream: Start) -> None:
    other = upstream(folder)
    other("insert", str(marks), 0, 1)
    (id,) = other("lease", 600, 1)
    other("cancel", id)
    _, (lease,), _ = FileQueue(folder).lease(60, 1, 3)
    assert (lease.id, lease.attempt) == (id, 2)


def test_payloads_it_cannot_run_are_left_alone(folder: Path, marks: Path, upstream: Start) -> None:
    queue = FileQueue(folder)
    odd = [b"\x00\xff", b"", b'{"a": 1}', b"[]", b'"text"', b' {"class": "MarkTask"}', b"[1, 2, 3, 4]", b'{"class": 5}']
    queue.put([NewTask(payload) for payload in odd])
    other = upstream(folder)
    other("insert", str(marks), 0, 3)
    assert other("poll", 3.0, 60) == 3
    assert sorted(lease.payload for lease in queue.lease(60, 100, 0)[1]) == sorted(odd)


def test_dead_letters_are_out_of_its_reach_until_requeued(folder: Path, marks: Path, upstream: Start) -> None:
    other = upstream(folder)
    other("insert", str(marks), 0, 1)
    queue = FileQueue(folder)
    _, (lease,), _ = queue.lease(60, 1, 0)
    queue.settle([Settlement.reject(lease.token, "no good")])
    assert other("numbers")["enqueued"] == 0
    assert queue.requeue_dead([lease.id]) == 1
    assert other("poll", 3.0, 60) == 1
    assert runs(marks) == Counter([0])


def test_two_of_each_kind_work_400_tasks_once_each(folder: Path, marks: Path, upstream: Start, our_worker: Worker) -> None:
    queue = FileQueue(folder)
    theirs = [upstream(folder) for _ in range(2)]
    theirs[0]("insert", str(marks), 0, 200)
    queue.put([NewTask(mark(marks, number)) for number in range(200, 400)])
    for one in theirs:
        one.tell("poll", 3.0, 60)
    ours = [our_worker(folder, 3.0) for _ in range(2)]
    ran = [int(process.communicate(timeout=50)[0]) for process in ours] + [int(one.answer()) for one in theirs]
    assert runs(marks) == Counter(range(400))
    assert sum(ran) == 400
    assert all(count > 0 for count in ran)
    found = queue.status()
    assert (found.ready, found.leased, found.completed, found.inserted) == (0, 0, 400, 400)


def test_ptq_status_and_rezero(folder: Path, marks: Path, ptq: Ptq) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(mark(marks, number)) for number in range(10)])
    _, leases, _ = queue.lease(60, 4, 0)
    queue.settle([Settlement.ack(leases[0].token)])
    said = ptq("status", folder)
    for line in ("Inserted: 10", "Enqueued: 9 (90.0% left)", "Completed: 1 (10.0%)", "Leased: 3 (33.3% of queue)"):
        assert line in said
    ptq("rezero", folder)
    assert (queue.status().inserted, queue.status().completed) == (0, 0)
    queue.put([NewTask(mark(marks, 11))])
    assert queue.status().inserted == 1


def test_ptq_release_takes_our_leases(folder: Path, marks: Path, ptq: Ptq) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(mark(marks, number)) for number in range(3)])
    _, leases, _ = queue.lease(600, 3, 0)
    ptq("release", folder)
    assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [None] * 3
    _, again, _ = queue.lease(600, 3, 3)
    assert {lease.id for lease in again} == {lease.id for lease in leases}
    assert {lease.attempt for lease in again} == {2}


def test_ptq_purge_leaves_our_dead_letters(folder: Path, marks: Path, ptq: Ptq) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(mark(marks, number)) for number in range(3)])
    _, leases, _ = queue.lease(600, 2, 0)
    queue.settle([Settlement.reject(leases[0].token, "bad")])
    ptq("purge", folder)
    assert queue.settle([Settlement.ack(leases[1].token)]) == [None]
    found = queue.status()
    assert (found.ready, found.leased, found.dead) == (0, 0, 1)
    queue.put([NewTask(mark(marks, 9))])
    assert numbers([lease.payload for lease in queue.lease(60, 9, 0)[1]]) == [9]


@pytest.mark.parametrize("verb", ["cp", "mv"])
def test_ptq_cp_and_mv_between_our_folders(folder: Path, marks: Path, tmp_path: Path, ptq: Ptq, verb: str) -> None:
    queue, target = FileQueue(folder), FileQueue(tmp_path / "target")
    queue.put([NewTask(json.dumps({"txt": str(number), "class": "PrintTask"}).encode()) for number in range(12)])
    ptq(verb, folder, target.path)
    assert queue.status().ready == (12 if verb == "cp" else 0)
    _, leases, _ = target.lease(60, 100, 0)
    assert sorted(int(json.loads(lease.payload)["txt"]) for lease in leases) == list(range(12))
    assert target.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * 12

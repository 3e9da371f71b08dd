"""The file queue against a real folder: races of processes and threads, order and tokens, foreign and torn files.

What every work queue promises is tested for all of them together; disks, clocks and network file systems:
test_file_queue_faults.py; kills: test_file_queue_crashes.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from roq.errors import CallError, Closed, InvalidConfiguration, PayloadTooLarge, UnknownFormat, WorkQueueConflict
from roq.wire.task import NewTask, Settlement, TaskState
from roq.wire.work_queue import TaskSettings
from roq.workqueue.file_queue.publication import FilePublication
from roq.workqueue.file_queue.queue import FileQueue

ROOT = Path(__file__).parents[2]
NOBODY = 65_534
RUNNABLE = json.dumps({"txt": "x", "class": "PrintTask"}).encode()
STALL_SECONDS = 0.5  # a busy machine may stand still, too


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def payloads(queue: FileQueue, count: int = 100) -> list[bytes]:
    """Lease and ack up to `count`."""
    _, leases, _ = queue.lease(60, count, 0)
    assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * len(leases)
    return [lease.payload for lease in leases]


# --- several at once ----------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, threading, time
from roq.wire.task import Settlement
from roq.workqueue.file_queue.queue import FileQueue
queue = FileQueue(sys.argv[1])
main, sleep, naps = threading.get_ident(), time.sleep, []
def nap(seconds):
    if threading.get_ident() == main:
        naps.append(seconds)
    sleep(seconds)
time.sleep = nap
print("ready", flush=True)
sys.stdin.readline()
while True:
    naps.clear()
    begun = time.perf_counter()
    _, leases, _ = queue.lease(60, 1, 0)
    took, napped = time.perf_counter() - begun, len(naps)
    if not leases:
        break
    answer = queue.settle([Settlement.ack(leases[0].token)])
    print(leases[0].id, answer[0], took, napped, flush=True)
"""


@pytest.mark.quick
def test_four_processes_share_400_tasks_without_a_stall(folder: Path) -> None:
    queue = FileQueue(folder)
    ids = queue.put([NewTask(RUNNABLE if number % 2 else b"data") for number in range(400)])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, folder], stdin=-1, stdout=-1, text=True, env=environment)
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    lines = [line.split() for worker in workers for line in worker.communicate(timeout=40)[0].splitlines()]
    assert Counter(line[0] for line in lines) == Counter(ids)
    assert {line[-1] for line in lines} == {"0"}, "a race costs no wait"
    took = sorted(float(line[-2]) for line in lines)
    assert took[len(took) * 99 // 100] < STALL_SECONDS


def test_threads_of_one_process_share_tasks(folder: Path) -> None:
    queues = [FileQueue(folder) for _ in range(2)]
    ids = queues[0].put([NewTask(RUNNABLE) for _ in range(200)])
    seen: list[str] = []

    def work(queue: FileQueue) -> None:
        while leases := queue.lease(60, 3, 0)[1]:
            seen.extend(lease.id for lease in leases)
            assert queue.settle([Settlement.ack(lease.token) for lease in leases]) == [""] * len(leases)

    threads = [threading.Thread(target=work, args=(queues[number % 2],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert Counter(seen) == Counter(ids)
    assert queues[0].status().completed == 200


def test_a_waiting_lease_gets_what_another_process_puts_and_ends_on_close(folder: Path) -> None:
    queue, other = FileQueue(folder), FileQueue(folder)
    timer = threading.Timer(0.2, lambda: other.put([NewTask(b"late")]))
    timer.start()
    begun = time.monotonic()
    _, (lease,), _ = queue.lease(60, 1, 10)
    assert lease.payload == b"late"
    assert time.monotonic() - begun < 2
    timer.join()
    closer = threading.Timer(0.2, queue.close)
    closer.start()
    with pytest.raises(Closed):
        queue.lease(60, 1, 10)
    closer.join()
    with pytest.raises(Closed):
        queue.put([NewTask(b"x")])
    assert other.status().leased == 1


def test_a_dead_lock_holder_frees_the_task(folder: Path) -> None:
    queue = FileQueue(folder)
    (id,) = queue.put([NewTask(RUNNABLE)])
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys\nf = open(sys.argv[1], 'a')\nfcntl.lockf(f, fcntl.LOCK_EX)\nprint()\ninput()",
         folder / "movement" / id], stdin=-1, stdout=-1, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    begun = time.monotonic()
    assert queue.lease(60, 1, 0)[:2] == ([], [])
    assert time.monotonic() - begun < 1
    holder.kill()
    holder.communicate()
    _, (lease,), _ = queue.lease(60, 1, 5)
    assert lease.id == id


# --- order, names, tokens -----------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_priority_then_insertion_across_both_kinds_of_payload(folder: Path) -> None:
    queue = FileQueue(folder)
    for number in range(6):
        queue.put([NewTask(RUNNABLE if number % 2 else b"%d" % number, priority=number // 2)])
    assert payloads(FileQueue(folder)) == [b"4", RUNNABLE, b"2", RUNNABLE, b"0", RUNNABLE]


def test_a_higher_priority_put_later_overtakes_what_was_listed_before(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(b"low") for _ in range(5)])
    assert payloads(queue, 1) == [b"low"]
    queue.put([NewTask(b"high", priority=1)])
    assert payloads(queue, 2) == [b"high", b"low"]
    FileQueue(folder).put([NewTask(b"others'", priority=2)])
    candidates = "roq.workqueue.file_queue.candidates"  # however long the last listing took
    with mock.patch(f"{candidates}.RELIST_SECONDS", 0), mock.patch(f"{candidates}.LISTING_SHARE", 0):
        assert payloads(queue, 1) == [b"others'"]


def test_a_name_is_never_the_token_of_two_leases(folder: Path) -> None:
    queue = FileQueue(folder, clock=lambda: 1_000_000.0)
    queue.put([NewTask(b"x")])
    tokens = []
    for _ in range(5):
        _, (lease,), _ = queue.lease(10, 1, 0)
        assert lease.expires_ms >= 1_000_010_000
        tokens.append(lease.token)
        (extended,) = queue.settle([Settlement.extend(lease.token, 10)])
        tokens.append(extended or "")
        assert queue.settle([Settlement.ack(lease.token)]) == [None]
        assert queue.settle([Settlement.release(tokens[-1])]) == [""]
    assert len(set(tokens)) == 10
    assert queue.settle([Settlement.ack(token) for token in tokens]) == [None] * 10
    assert queue.status().ready == 1


@pytest.mark.parametrize("token", ["", "x", "../../etc/passwd", "1--../../x.json", "1700000000--00000000.json"])
def test_what_is_no_token_is_a_call_error(folder: Path, token: str) -> None:
    queue = FileQueue(folder)
    with pytest.raises(CallError):
        queue.settle([Settlement.ack(token)])


def test_a_function_that_others_would_call_is_refused_unless_it_is_trusted(folder: Path) -> None:
    """Also beside other tasks, with a key, and from Spark: nothing of it is done."""
    function = b'[["os", "system"], ["touch /tmp/owned"], {}, -1]'
    queue, trusting = FileQueue(folder), FileQueue(folder, trust_functions=True)
    harmless = [NewTask(b'[["os"], [], {}]'), NewTask(b'{"class": "Known"}')]
    publication = FilePublication(str(folder), "publishing", "job", 1_000_000)
    for tasks in ([NewTask(function)], [*harmless, NewTask(function)], [NewTask(function, dedup_key="a")]):
        with pytest.raises(InvalidConfiguration, match="trust_functions=True"):
            queue.put(tasks)
        with pytest.raises(InvalidConfiguration, match="trust_functions=True"):
            publication.put(0, tasks)
    assert queue.status().ready == queue.status().inserted == 0
    queue.put(harmless)
    assert trusting.put([NewTask(function, dedup_key="a")]) == trusting.put([NewTask(function, dedup_key="a")])
    assert sorted(payloads(queue, 9)) == sorted([function, *(task.payload for task in harmless)])
    publication.close()


def test_wrong_calls_change_nothing(folder: Path) -> None:
    queue = FileQueue(folder, TaskSettings(payload_bytes_max=10))
    with pytest.raises(PayloadTooLarge):
        queue.put([NewTask(b"good"), NewTask(b"12345678901")])
    for task in (NewTask(b"x", delay_seconds=-1), NewTask(b"x", priority=128), NewTask(b"x", dedup_key="x" * 300)):
        with pytest.raises(CallError):
            queue.put([NewTask(b"good"), task])
    with pytest.raises(CallError):
        queue.lease(0, 1, 0)
    with pytest.raises(CallError):
        queue.requeue_dead(["no id"])
    assert queue.requeue_dead(["00000000-0000-8000-9fc0-000000000000"]) == 0
    never_leased = f"0--{queue.put([NewTask(b'x')])[0]}.data"
    assert queue.settle([Settlement.ack(never_leased), Settlement.reject(never_leased, "")]) == [None, None]
    assert queue.status().ready == queue.status().inserted == 1


def test_settings_are_the_folders(folder: Path) -> None:
    FileQueue(folder, TaskSettings(max_attempts=3))
    assert FileQueue(folder).settings.max_attempts == 3
    with pytest.raises(WorkQueueConflict):
        FileQueue(folder, TaskSettings(max_attempts=4))
    (folder / "roq.json").write_text('{"version":2,"settings":{}}')
    with pytest.raises(UnknownFormat):
        FileQueue(folder)
    (folder / "roq.json").write_text('{"vers')
    with pytest.raises(UnknownFormat):
        FileQueue(folder)


# --- what else lies there -----------------------------------------------------------------------------------------------


def test_foreign_files_are_left_alone(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(RUNNABLE), NewTask(b"data")])
    strange = [".tmpfile", "0--x.json", "readme", "nan--00000000-0000-4000-8000-000000000000.json", "--.json", "é--.json"]
    for part in ("queue", "movement", "data/queue", "dead", "meta", "tmp"):
        for name in strange:
            (folder / part / name).write_text("?")
    (folder / "queue" / "a folder").mkdir()
    queue = FileQueue(folder)
    assert (queue.status().ready, queue.status().dead) == (2, 0)
    assert sorted(payloads(queue)) == sorted([RUNNABLE, b"data"])
    assert queue.release_all() == queue.purge() == 0
    assert {path.name for path in (folder / "queue").iterdir()} == {*strange, "a folder"}


def test_a_torn_file_harms_no_other_task_and_ends_as_a_dead_letter(folder: Path) -> None:
    queue = FileQueue(folder)
    torn = "0--00000000-0000-4000-8000-00000000000a.json"
    (folder / "queue" / torn).write_bytes(b'{"payload": {"cla')
    assert queue.lease(60, 1, 0)[:2] == ([], []), "without a movement file it is being inserted"
    (folder / "movement" / torn[3:-5]).write_text(f"{torn}\n")
    queue.put([NewTask(RUNNABLE)])
    assert payloads(queue) == [RUNNABLE]
    assert queue.lease(60, 1, 0)[:2] == ([], [])
    assert queue.status().delayed == 1, "its writer may still be at it"
    (path,) = (folder / "queue").iterdir()
    os.utime(path, (1, 1))
    assert FileQueue(folder, clock=lambda: time.time() + 10).lease(60, 1, 0)[:2] == ([], [])
    (view,) = queue.peek(TaskState.DEAD, 10)
    assert (view.id, view.payload) == (torn[3:-5], b'{"payload": {"cla')
    assert "no task" in view.error


def test_a_task_without_movement_file_is_leased_after_a_while(folder: Path) -> None:
    queue = FileQueue(folder)
    (id,) = queue.put([NewTask(RUNNABLE)])
    (folder / "movement" / id).unlink()
    assert queue.lease(60, 1, 0)[:2] == ([], [])
    os.utime(folder / "queue" / f"0--{id}.json", (1, 1))
    _, (lease,), _ = queue.lease(60, 1, 10)
    assert (lease.id, lease.attempt) == (id, 1)


def test_spoilt_movement_files_and_counters(folder: Path) -> None:
    queue = FileQueue(folder)
    (id,) = queue.put([NewTask(RUNNABLE)])
    (folder / "movement" / id).write_bytes(b"\0\0\xff junk\n0--half")
    (folder / "insertions").write_text("many")
    assert queue.status().inserted == 0
    _, (lease,), _ = queue.lease(60, 1, 0)
    (token,) = queue.settle([Settlement.extend(lease.token, 60)])
    assert queue.settle([Settlement.ack(token or "")]) == [""]
    assert queue.put([NewTask(b"x")])
    assert queue.status().inserted == 1


# --- many ---------------------------------------------------------------------------------------------------------------


def test_a_window_smaller_than_the_queue_serves_all_in_order_of_priority(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(b"%d" % (number % 2), priority=number % 2) for number in range(9000)])
    with mock.patch("roq.workqueue.file_queue.candidates.WINDOW_NAMES", 1000):
        found = [payload for _ in range(30) for payload in payloads(queue, 500)]
    assert len(found) == 9000
    assert set(found[:4000]) == {b"1"}
    assert queue.lease(60, 1, 0)[:2] == ([], [])


def test_status_tells_the_oldest_of_both_programs(folder: Path) -> None:
    queue = FileQueue(folder)
    queue.put([NewTask(b"new")])
    other = "00000000-0000-4000-8000-00000000000b"
    (folder / "queue" / f"0--{other}.json").write_text('{"payload": {"class": "PrintTask"}}')
    os.utime(folder / "queue" / f"0--{other}.json", (time.time() - 500, time.time() - 500))
    oldest = queue.status().oldest_seconds
    assert oldest is not None
    assert 499 < oldest < 600

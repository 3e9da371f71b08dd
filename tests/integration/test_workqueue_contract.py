"""The contract of work queues: every verb, on every kind of address and through the asynchronous and the plain face.

Not covered: wrong calls (test_workqueue_bad_input.py), several processes and their deaths (test_workqueue_processes.py),
what the faces add (test_workqueue_faces.py).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from roq.errors import Closed, InvalidHeaders, LeaseLost, WorkQueueConflict
from roq.wire.headers import HEADERS_BYTES_MAX, MARK
from roq.wire.task import ERROR_BYTES_MAX, NewTask, TaskState
from roq.workqueue.contract import LEASE_COUNT_MAX
from tests.integration.workqueue_rig import BRIEF, COMES, EVERY_VERB, LONG, Faces, counts, one

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize(("work_address", "faces"), EVERY_VERB, indirect=True)]


# --- put, lease, ack --------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_task_is_put_leased_and_acked(work_queue: Any) -> None:
    before = time.time()
    task_id = work_queue.put(b"\x00 any bytes \xff")
    assert counts(work_queue) == (1, 0, 0, 0)
    task = one(work_queue)
    assert (task.id, task.payload, task.attempt, task.priority) == (task_id, b"\x00 any bytes \xff", 1, 0)
    assert before - 2 <= task.inserted <= time.time() + 1
    assert task.expires == pytest.approx(time.time() + LONG, abs=3)
    assert counts(work_queue) == (0, 0, 1, 0)
    assert work_queue.lease(LONG) == []
    task.ack()
    assert task.settled
    status = work_queue.status()
    assert (status.ready, status.leased, status.completed, status.inserted) == (0, 0, 1, 1)


def test_a_second_settlement_of_a_lease_is_refused(work_queue: Any) -> None:
    work_queue.put(b"")
    task = one(work_queue)
    assert task.payload == b""
    task.ack()
    with pytest.raises(LeaseLost):
        task.ack()
    with pytest.raises(LeaseLost):
        work_queue.extend(task.token, LONG)
    assert work_queue.status().completed == 1


def test_order_is_by_priority_then_by_insertion(work_queue: Any) -> None:
    for number, priority in enumerate((0, -128, 5, 127, 0, 5)):
        work_queue.put(str(number).encode(), priority=priority)
    assert [task.payload for task in work_queue.lease(LONG, 10)] == [b"3", b"2", b"5", b"0", b"4", b"1"]


def test_a_task_has_headers_until_it_is_gone(work_queue: Any) -> None:
    headers: dict[str, str | bytes] = {"traceparent": "00-1-2-01", "digest": b"\x00\xff"}
    lookalike = MARK + b"\x03\x00" + b"nothing of ours"
    work_queue.put(b"with", headers=headers, priority=3)
    work_queue.put_many([NewTask(b"", priority=2, headers={"n": "2"}), NewTask(lookalike, 0.0, 1), b"bare"])
    headers["n"] = "changed afterwards"
    wanted = [
        (b"with", {"traceparent": "00-1-2-01", "digest": b"\x00\xff"}),
        (b"", {"n": "2"}),
        (lookalike, {}),
        (b"bare", {}),
    ]
    assert sorted((view.payload, view.headers) for view in work_queue.peek(count=10)) == sorted(wanted, key=lambda one: one[0])
    tasks = work_queue.lease(LONG, 10)
    assert [(task.payload, task.headers) for task in tasks] == wanted
    for task in tasks:
        task.reject("no")
    assert sorted((view.payload, view.headers) for view in work_queue.dead()) == sorted(wanted, key=lambda one: one[0])
    work_queue.requeue_dead()
    assert [(task.payload, task.headers) for task in work_queue.lease(LONG, 10)] == wanted


def test_wrong_headers_are_refused_and_nothing_is_stored(work_queue: Any) -> None:
    refused: list[Any] = [{"": "x"}, {"a": 1}, {"roq-own": "x"}, {"a": "x" * HEADERS_BYTES_MAX}]
    for wrong in refused:
        with pytest.raises(InvalidHeaders):
            work_queue.put(b"x", headers=wrong)
        with pytest.raises(InvalidHeaders):
            work_queue.put_many([b"fits", NewTask(b"x", headers=wrong)])
    assert counts(work_queue) == (0, 0, 0, 0)


def test_batches_are_put_leased_and_acked(work_queue: Any) -> None:
    payloads = [f"task {number}".encode() for number in range(2500)]
    ids = work_queue.put_many([*payloads[:-1], NewTask(payloads[-1], priority=-1)])
    assert len(set(ids)) == 2500
    seen = []
    while tasks := work_queue.lease(LONG, LEASE_COUNT_MAX):
        seen += [(task.id, task.payload) for task in tasks]
        assert work_queue.ack_many(tasks) == []
        assert {task.id for task in work_queue.ack_many(tasks)} == {task.id for task in tasks}  # all lost: acked before
    assert sorted(seen) == sorted(zip(ids, payloads, strict=True))
    assert work_queue.status().completed == 2500


@pytest.mark.quick
def test_what_was_put_outlives_the_opening(faces: Faces) -> None:
    first = faces.open()
    ids = first.put_many([b"a", b"b"])
    token = one(first).token
    first.close()
    with pytest.raises(Closed):
        first.put(b"c")
    second = faces.open()
    assert counts(second) == (1, 0, 1, 0)
    second.ack(token)  # `lease` leaves the lease to whoever knows its token
    assert [task.id for task in second.lease(LONG, 10)] == [ids[1]]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_an_expired_lease_is_given_to_the_next_and_its_token_is_stale(faces: Faces) -> None:
    queue, other = faces.open(), faces.open()
    task_id = queue.put(b"x")
    first = one(queue, BRIEF)
    second = one(other, LONG, COMES)
    assert (second.id, second.attempt) == (task_id, 2)
    assert second.token != first.token
    for settle in (first.ack, lambda: first.extend(LONG), first.release, lambda: first.reject("no")):
        with pytest.raises(LeaseLost):
            settle()
    assert first.lost
    assert counts(queue) == (0, 0, 1, 0)
    second.ack()
    assert queue.status().completed == 1


def test_an_extended_lease_holds(faces: Faces) -> None:
    queue, other = faces.open(), faces.open()
    queue.put(b"x")
    task = one(queue, BRIEF)
    task.extend(LONG)
    assert task.expires == pytest.approx(time.time() + LONG, abs=3)
    assert other.lease(LONG, 1, 2.5) == []
    assert not task.lost
    task.ack()


def test_a_released_task_comes_back_at_once_or_later(work_queue: Any) -> None:
    work_queue.put(b"x")
    one(work_queue).release()
    task = one(work_queue)
    assert task.attempt == 2
    task.release(BRIEF, "the disk was full")
    assert work_queue.lease(LONG) == []
    assert counts(work_queue) == (0, 1, 0, 0)
    [view] = work_queue.peek("delayed")
    assert (view.error, view.attempts, view.state) == ("the disk was full", 2, TaskState.DELAYED)
    assert one(work_queue, LONG, COMES).attempt == 3


def test_many_are_extended_and_released(work_queue: Any) -> None:
    work_queue.put_many([b"a", b"b", b"c"])
    tasks = work_queue.lease(BRIEF, 3)
    assert work_queue.extend_many(tasks, LONG) == []
    assert work_queue.lease(LONG, 1, 2.5) == []
    assert work_queue.release_many(tasks) == []
    assert len(work_queue.lease(LONG, 3)) == 3


def test_a_lease_waits_and_wakes_at_once(faces: Faces) -> None:
    queue, other = faces.open(), faces.open()
    began = time.monotonic()
    assert queue.lease(LONG, 1, 0.5) == []
    assert 0.4 < time.monotonic() - began < 3.0
    put_at = []

    def put_later() -> None:
        time.sleep(0.5)
        other.put(b"now")
        put_at.append(time.monotonic())

    with_thread = threading.Thread(target=put_later)
    with_thread.start()
    task = one(queue, LONG, 20.0)
    woken = time.monotonic()
    with_thread.join()
    assert task.payload == b"now"
    assert woken - put_at[0] < 1.5


# --- delays, keys, settings --------------------------------------------------------------------------------------------


def test_a_delayed_task_waits_its_time(work_queue: Any) -> None:
    work_queue.put(b"later", delay_seconds=BRIEF)
    assert counts(work_queue) == (0, 1, 0, 0)
    assert work_queue.lease(LONG) == []
    [view] = work_queue.peek(TaskState.DELAYED)
    assert view.due == pytest.approx(time.time() + BRIEF, abs=2)
    assert one(work_queue, LONG, COMES).payload == b"later"


def test_a_dedup_key_put_again_is_the_same_task(faces: Faces) -> None:
    queue, other = faces.open(dedup_seconds=2.0), faces.open()
    first = queue.put(b"a", dedup_key="key")
    assert other.put(b"b", dedup_key="key") == first
    assert queue.put(b"c", dedup_key="other") != first
    assert counts(queue) == (2, 0, 0, 0)
    task = next(task for task in queue.lease(LONG, 10) if task.id == first)
    assert task.payload == b"a"
    task.ack()
    assert queue.put(b"d", dedup_key="key") == first  # done, and still known
    deadline = time.monotonic() + COMES
    while (again := queue.put(b"e", dedup_key="key")) == first:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert one(queue).id == again


def test_the_settings_belong_to_the_queue(faces: Faces) -> None:
    queue = faces.open(max_attempts=2, dedup_seconds=7.0, payload_bytes_max=100)
    other = faces.open()
    assert other.settings == queue.settings
    assert (other.settings.max_attempts, other.settings.dedup_seconds, other.settings.payload_bytes_max) == (2, 7.0, 100)
    faces.open(max_attempts=2, dedup_seconds=7.0, payload_bytes_max=100)
    faces.open(dedup_seconds=7.0)
    faces.open(max_attempts=2, payload_bytes_max=100)
    with pytest.raises(WorkQueueConflict):
        faces.open(max_attempts=3)


# --- dead letters -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_too_many_failed_attempts_make_a_dead_letter(faces: Faces) -> None:
    queue = faces.open(max_attempts=2)
    task_id = queue.put(b"poison", priority=3)
    one(queue).release(error="first")
    task = one(queue)
    task.release(error="second")
    assert queue.lease(LONG) == []
    assert counts(queue) == (0, 0, 0, 1)
    [letter] = queue.dead()
    assert (letter.id, letter.payload, letter.attempts, letter.priority) == (task_id, b"poison", 2, 3)
    assert (letter.error, letter.state) == ("second", TaskState.DEAD)
    with pytest.raises(LeaseLost):
        task.ack()
    assert queue.requeue_dead([task_id]) == 1
    assert queue.dead() == []
    again = one(queue)
    assert (again.id, again.attempt, again.payload) == (task_id, 1, b"poison")


def test_a_lease_that_ends_is_an_attempt_that_failed(faces: Faces) -> None:
    queue = faces.open(max_attempts=1)
    queue.put(b"kills its worker")
    one(queue, BRIEF)
    assert queue.lease(LONG, 1, 3.5) == []
    assert counts(queue) == (0, 0, 0, 1)


def test_an_untried_task_does_not_die(faces: Faces) -> None:
    queue = faces.open(max_attempts=1)
    queue.put(b"x")
    one(queue).release()
    one(queue).ack()


def test_a_rejected_task_is_dead_and_can_be_removed(work_queue: Any) -> None:
    ids = work_queue.put_many([b"a", b"b", b"c"])
    for task in work_queue.lease(LONG, 3):
        task.reject("é" * ERROR_BYTES_MAX)
    letters = work_queue.dead()
    assert sorted(letter.id for letter in letters) == sorted(ids)
    assert all(0 < len(letter.error.encode()) <= ERROR_BYTES_MAX for letter in letters)
    assert len(work_queue.dead(2)) == 2
    assert work_queue.remove_dead([ids[0]]) == 1
    assert work_queue.remove_dead([ids[0]]) == 0
    assert work_queue.requeue_dead([ids[1]]) == 1
    assert work_queue.remove_dead() == 1
    assert counts(work_queue) == (1, 0, 0, 0)
    assert one(work_queue).id == ids[1]


def test_all_dead_letters_come_back(work_queue: Any) -> None:
    work_queue.put_many([b"a", b"b"])
    for task in work_queue.lease(LONG, 2):
        task.reject("no")
    assert work_queue.requeue_dead() == 2
    assert sorted(task.payload for task in work_queue.lease(LONG, 2)) == [b"a", b"b"]


# --- the whole work_queue --------------------------------------------------------------------------------------------------


def test_status_counts_and_tells_the_oldest_age(work_queue: Any) -> None:
    assert work_queue.status().oldest_seconds is None
    work_queue.put_many([b"old", NewTask(b"delayed", delay_seconds=LONG)])
    time.sleep(1.2)
    work_queue.put(b"new")
    status = work_queue.status()
    assert (status.ready, status.delayed, status.inserted) == (2, 1, 3)
    assert status.oldest_seconds is not None
    assert 0.1 < status.oldest_seconds < 10.0
    work_queue.lease(LONG, 10)
    assert work_queue.status().oldest_seconds is None


def test_peek_shows_and_leases_nothing(work_queue: Any) -> None:
    work_queue.put_many([NewTask(b"low", priority=-1), NewTask(b"high", priority=1), NewTask(b"later", delay_seconds=LONG)])
    views = work_queue.peek()
    assert [view.payload for view in views] == [b"high", b"low"]
    assert [view.state for view in views] == [TaskState.READY] * 2
    assert len(work_queue.peek("ready", 1)) == 1
    assert work_queue.peek("leased") == []
    task = one(work_queue)
    [leased] = work_queue.peek("leased")
    assert (leased.id, leased.state, leased.attempts) == (task.id, TaskState.LEASED, 1)
    assert leased.due == pytest.approx(task.expires, abs=1.5)
    assert leased.holder
    assert counts(work_queue) == (1, 1, 1, 0)


def test_release_all_makes_everything_ready(work_queue: Any) -> None:
    work_queue.put_many([NewTask(b"a"), NewTask(b"b"), NewTask(b"later", delay_seconds=LONG)])
    tasks = work_queue.lease(LONG, 2)
    assert work_queue.release_all() == 3
    assert counts(work_queue) == (3, 0, 0, 0)
    with pytest.raises(LeaseLost):
        tasks[0].ack()
    assert len(work_queue.lease(LONG, 10)) == 3
    assert work_queue.release_all() == 3


def test_purge_removes_everything_but_dead_letters(work_queue: Any) -> None:
    work_queue.put_many([b"dead", b"leased", b"ready", NewTask(b"later", delay_seconds=LONG)])
    first, second = work_queue.lease(LONG, 2)
    first.reject("no")
    assert work_queue.purge() == 3
    with pytest.raises(LeaseLost):
        second.ack()
    assert counts(work_queue) == (0, 0, 0, 1)
    assert work_queue.purge() == 0
    work_queue.put(b"after")
    assert one(work_queue).payload == b"after"

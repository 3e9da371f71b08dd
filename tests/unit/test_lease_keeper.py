"""Renewal of leases: when, with which token, what is retried, what is told as lost. The queue behind it is a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from roq.errors import Closed, LogUnavailable
from roq.wire.task import EXTEND, LeasedTask, Settlement
from roq.workqueue.contract import RoundTrip
from roq.workqueue.lease_keeper import DONE, HeldTask, LeaseKeeper, given_back

SECONDS = 0.9
Answer = Callable[[Sequence[Settlement]], list[str | None]]


class Script:
    """Answers every settlement as told, a new token per extension; keeps what was asked."""

    def __init__(self) -> None:
        self.calls: list[list[Settlement]] = []
        self.answer: Answer = self.renew
        self.asked = threading.Semaphore(0)

    def renew(self, settlements: Sequence[Settlement]) -> list[str | None]:
        return [f"{one.token}+" if one.kind == EXTEND else "" for one in settlements]

    def __call__(self, settlements: Sequence[Settlement]) -> list[str | None]:
        self.calls.append(list(settlements))
        self.asked.release()
        return self.answer(settlements)

    def wait(self, calls: int) -> None:
        for _ in range(calls):
            assert self.asked.acquire(timeout=10)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def keeper(script: Script) -> Iterator[LeaseKeeper]:
    made = LeaseKeeper(script)
    yield made
    made.close()


def held(name: str = "t", seconds: float = SECONDS) -> HeldTask:
    leased = LeasedTask(name, name, b"", 1, 0, 0, 0)
    return HeldTask(leased, seconds, time.monotonic())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_lease_is_renewed_at_a_third_with_the_newest_token(script: Script, keeper: LeaseKeeper) -> None:
    task, began = held(), time.monotonic()
    keeper.hold([task])
    script.wait(1)
    assert SECONDS / 3 - 0.01 < time.monotonic() - began < SECONDS
    script.wait(3)
    assert [call[0].token for call in script.calls[:4]] == ["t", "t+", "t++", "t+++"]
    assert not task.lost
    keeper.settle([(task, DONE)])
    assert task.settled
    assert script.calls[-1] == [Settlement.ack(task.token)]
    asked = len(script.calls)
    time.sleep(SECONDS)
    assert len(script.calls) == asked


def test_leases_of_one_moment_are_renewed_together(script: Script, keeper: LeaseKeeper) -> None:
    tasks = [held(str(number)) for number in range(50)]
    for task in tasks:
        keeper.hold([task])
    script.wait(1)
    assert len(script.calls[0]) == 50


def test_a_failed_renewal_is_tried_again_until_the_lease_is_over(script: Script, keeper: LeaseKeeper) -> None:
    def fail(_: Sequence[Settlement]) -> list[str | None]:
        raise LogUnavailable

    script.answer = fail
    task = held()
    keeper.hold([task])
    script.wait(2)
    assert not task.lost
    script.answer = script.renew
    script.wait(2)
    assert not task.lost
    lost = threading.Event()
    task.watcher = lost.set
    script.answer = fail
    assert lost.wait(10)
    assert task.lost


def test_a_refused_renewal_is_told_and_not_repeated(script: Script, keeper: LeaseKeeper) -> None:
    tasks = [held("a"), held("b")]
    script.answer = lambda settlements: [None if one.token.startswith("a") else f"{one.token}+" for one in settlements]
    keeper.hold(tasks)
    until(lambda: tasks[0].lost)
    script.wait(3)
    assert [one.token for one in script.calls[-1]] != []
    assert all(not one.token.startswith("a") for call in script.calls[1:] for one in call)
    assert not tasks[1].lost


def test_a_settlement_waits_for_the_renewal_under_way_and_has_its_token(script: Script, keeper: LeaseKeeper) -> None:
    go_on = threading.Event()

    def slow(settlements: Sequence[Settlement]) -> list[str | None]:
        go_on.wait(10)
        return script.renew(settlements)

    script.answer = slow
    task = held(seconds=3.0)
    keeper.hold([task])
    script.wait(1)
    answers: list[list[str | None]] = []
    acking = threading.Thread(target=lambda: answers.append(keeper.settle([(task, DONE)])))
    acking.start()
    time.sleep(0.1)
    assert len(script.calls) == 1
    go_on.set()
    acking.join(10)
    assert answers == [[""]]
    assert script.calls[1] == [Settlement.ack("t+")]


def test_a_failed_settlement_leaves_the_task_renewed(script: Script, keeper: LeaseKeeper) -> None:
    def fail(_: Sequence[Settlement]) -> list[str | None]:
        raise LogUnavailable

    task = held()
    keeper.hold([task])
    with pytest.raises(LogUnavailable):
        keeper.settle([(task, DONE)], fail)
    time.sleep(2 * SECONDS)
    assert not task.lost
    assert not task.settled


def test_an_extension_changes_the_lease_time(script: Script, keeper: LeaseKeeper) -> None:
    task = held()
    assert keeper.settle([(task, Settlement.extend("", 50.0)), ("bare", Settlement.release(""))]) == ["t+", ""]
    assert task.seconds == 50.0
    assert task.expires == pytest.approx(time.time() + 50, abs=1)
    assert task.ends_in(time.monotonic()) > 49


def test_closing_tells_what_is_still_held(script: Script) -> None:
    keeper = LeaseKeeper(script)
    tasks = [held(name, 5.0) for name in ("begun", "spare", "left", "done", "forgotten")]
    tasks[0].begun = tasks[2].begun = True
    keeper.hold(tasks)
    keeper.let_go(tasks[2])
    keeper.settle([(tasks[3], DONE)])
    left = keeper.close()
    assert {task.id for task in left} == {"begun", "spare", "left", "forgotten"}
    wanted = given_back(left, "why")
    assert {settlement.error for settlement in keeper.begin(wanted) if settlement.token in ("begun", "left")} == {"why"}
    with pytest.raises(Closed):
        keeper.hold(tasks)


def test_what_is_kept_besides_is_renewed_in_time_and_no_loops_afterwards(script: Script) -> None:
    keeper = LeaseKeeper(script)
    loops, own, late = held("loops"), held("own"), held("late", 3.0)
    late._until -= 2.5
    keeper.hold([loops])
    keeper.let_go(loops)
    for task in (loops, own, late):
        keeper.keep(task)
    script.wait(1)
    assert [one.token for one in script.calls[0]] == ["late"], "it is over soon"
    until(lambda: loops.token != "loops" and own.token != "own")
    time.sleep(SECONDS)
    assert not any(task.lost for task in (loops, own, late))
    for task in (loops, own):
        keeper.let_go(task)
    assert keeper.close() == [loops], "what `lease` gave stays leased"
    with pytest.raises(Closed):
        keeper.keep(own)


def test_a_failed_ack_does_not_hasten_renewal(script: Script, keeper: LeaseKeeper) -> None:
    task = held()
    keeper.hold([task])
    keeper.abandon([(task, DONE)])
    time.sleep(SECONDS / 6)
    assert not script.calls
    script.wait(2)


def test_a_lease_nobody_renews_is_lost_with_its_time() -> None:
    task = held(seconds=0.05)
    assert not task.lost
    until(lambda: task.lost)


@pytest.mark.parametrize("answer", [lambda settlements: [], lambda settlements: [7 / 0], lambda settlements: None])
def test_an_answer_nobody_thought_of_does_not_end_renewal(script: Script, keeper: LeaseKeeper, answer: Answer) -> None:
    task = held(seconds=1.5)
    script.answer = answer
    keeper.hold([task])
    script.wait(2)
    assert not task.lost
    script.answer = script.renew
    script.wait(5)
    assert task.token == "t" + "+" * (len(task.token) - 1)
    assert not task.lost


def test_a_watcher_that_fails_keeps_no_other_task_from_being_renewed(script: Script, keeper: LeaseKeeper) -> None:
    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    tasks = [held("a"), held("b")]
    tasks[0].watcher = closed
    script.answer = lambda settlements: [None if one.token.startswith("a") else f"{one.token}+" for one in settlements]
    keeper.hold(tasks)
    script.wait(8)
    assert tasks[0].lost
    assert not tasks[1].lost


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_tells_the_tasks_and_others_get_a_new_one(script: Script, keeper: LeaseKeeper) -> None:
    def end(_: Sequence[Settlement]) -> list[str | None]:
        raise SystemExit

    task, told = held(seconds=3.0), threading.Event()
    task.watcher = told.set
    script.answer = end
    keeper.hold([task])
    assert told.wait(2.0), "long before its time is over"
    script.answer = script.renew
    after = held("after")
    keeper.hold([after])
    script.wait(6)
    assert not after.lost


def test_a_lease_counts_from_its_begin_and_not_from_the_answer(keeper: LeaseKeeper) -> None:
    def began(tasks: int, told: float, wait_seconds: float) -> float:
        """As the keeper has it, of what a backend tells."""
        given = [LeasedTask("t", "t", b"", 1, 0, 0, 0)] * tasks
        return keeper.lease(lambda *_: RoundTrip([], given, told), SECONDS, 9, wait_seconds).began

    now = time.monotonic()
    assert began(2, now - 3, 10.0) == now - 3
    assert now <= began(1, now - 3, 0.0) <= time.monotonic(), "it did not wait"
    assert now <= began(0, now - 3, 10.0) <= time.monotonic()
    after = began(1, 0.0, 10.0)
    assert now <= after <= time.monotonic(), "a backend that can't tell"

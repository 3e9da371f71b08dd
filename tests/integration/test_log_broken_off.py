"""log: work queues when a call is broken off by a signal handler that raises, or by close; forked children."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roq.errors import Closed
from roq.log.local import LocalLog
from roq.wire.task import LeasedTask, NewTask, Settlement
from roq.workqueue import codec
from roq.workqueue.contract import RoundTrip
from roq.workqueue.log_queue import LogQueue
from roq.workqueue.records import Pop, decode, encode
from roq.workqueue.state import State
from tests.harness.breaking_off import Stop, broken_off
from tests.integration.log_queue_rig import lease_one

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # broken off in a generator's end
]
ROOT = Path(__file__).parents[2]
POINTS_MAX = 2000
AGAIN_SECONDS = 0.5  # after an alarm that came in a generator's end, where Python lets nothing be raised
LOCKS = ("append", "disk", "clerk", "upkeep", "round-0", "round-1", "round-2", "round-3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tasks"


@pytest.fixture
def queues(folder: Path) -> Iterator[list[LogQueue]]:
    """Two that have leased before. Each is a process of its own to the other."""
    opened = [LogQueue(folder) for _ in range(2)]
    opened[0].put([NewTask(b"x") for _ in range(3000)])
    for queue in opened:
        queue.settle([Settlement.ack(lease_one(queue).token)])
    yield opened
    for queue in opened:
        queue.close()


def agree(one: LogQueue, other: LogQueue) -> bool:
    """Whether both have the same state of the same log."""
    for queue in (one, other, one):  # what one writes, a death perhaps, the other has not read
        queue.status()
    other._replica.catch_up()
    one._replica.state.check()
    return (one._replica.position, one._replica.state.digest()) == (other._replica.position, other._replica.state.digest())


def held_locks(folder: Path) -> list[str]:
    """Locks that somebody has: as another process finds them."""
    found = []
    for name in LOCKS:
        descriptor = os.open(folder / "locks" / name, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(name)
        finally:
            os.close(descriptor)
    return found


def every_point(call: Callable[[int], bool]) -> int:
    """Break `call` off at each point it has; how many there were."""
    point = 0
    while call(point):
        point += 1
        assert point < POINTS_MAX
    return point


@pytest.mark.parametrize("verb", ["put", "lease and settle", "wait in line"])
def test_a_call_broken_off_anywhere_leaves_no_lock_no_lease_and_the_right_state(
    folder: Path, queues: list[LogQueue], verb: str
) -> None:
    victim, other = queues
    if verb == "wait in line":
        other.purge()

    def once(point: int) -> bool:
        answers: list[RoundTrip] = []
        if verb == "put":
            broken = broken_off(lambda: victim.put([NewTask(b"y")]), point)
        elif verb == "wait in line":
            broken = broken_off(lambda: victim.lease(60, 1, 0.002), point)
        else:
            held = lease_one(victim)
            others = lease_one(other)
            broken = broken_off(lambda: answers.append(victim.lease(60, 1, 0, [Settlement.ack(held.token)])), point)
        assert held_locks(folder) == [], point
        assert not victim._publisher, point
        assert agree(victim, other), point
        state = other._replica.state
        if verb == "lease and settle":
            leased = {codec.token(task.delivery, task.instance) for task in state.fold.leased.values()}
            got = {task.token for trip in answers for task in trip.tasks}
            assert leased - {held.token} == got | {others.token}, point
        assert not state.waiters, point
        victim.release_all()
        return broken

    assert every_point(once) > 15


def test_a_request_on_the_list_broken_off_anywhere_leases_to_nobody(queues: list[LogQueue]) -> None:
    victim, combiner = queues
    stop = threading.Event()

    def serve() -> None:
        publications = combiner._list
        assert publications is not None
        numbers = iter(range(10**6, 2 * 10**6))
        while not stop.is_set():
            try:
                if not publications.begin():
                    continue
                until = time.monotonic() + 0.005
                while not publications.count() and time.monotonic() < until:
                    time.sleep(0)
                records = [Pop(combiner._replica.now(), combiner._codec.id, next(numbers), 0, 1000)]
                combiner._serve(publications, (encode(records), records))
            finally:
                publications.end()

    def once(point: int) -> bool:
        held = lease_one(victim)
        tasks: list[LeasedTask[bytes]] = []
        broken = broken_off(lambda: tasks.extend(victim.lease(60, 1, 0, [Settlement.ack(held.token)])[1]), point)
        leased = {codec.token(task.delivery, task.instance) for task in state_after(victim).fold.leased.values()}
        assert leased - {held.token} == {task.token for task in tasks}, point
        victim.release_all()
        return broken

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert every_point(once) > 15
    finally:
        stop.set()
        thread.join(10)
    assert agree(victim, combiner)


def state_after(queue: LogQueue) -> State:
    queue.status()
    return queue._replica.state


def test_a_first_fold_broken_off_anywhere_is_done_again_and_goes_into_no_snapshot(folder: Path, queues: list[LogQueue]) -> None:
    dice = random.Random(11)
    for point in sorted(dice.sample(range(200, 9000), 12)):
        late = LogQueue(folder, replay_bytes=1)
        assert broken_off(lambda late=late: late.lease(60, 1, 0), point)  # type: ignore[misc]
        assert agree(late, queues[0]), point
        late.close()
        gone = LogQueue(folder, replay_bytes=1)
        broken_off(lambda gone=gone: gone.lease(60, 1, 0), point)  # type: ignore[misc]
        gone._replica.hand_over()
        gone.close()
        found = gone._log.load_snapshot()
        if found is not None:
            assert State.load(found[1]).digest() == folded(queues[0]._log, found[0]).digest(), point


def folded(log: LocalLog, end: int) -> State:
    state, at = State(), 0
    while at < end:
        entries = [(position, entry) for position, entry in log.read(at) if position <= end]
        for record in (record for _, entry in entries for record in decode(entry)):
            state.apply(record)
        at = entries[-1][0]
    return state


WORKER = """
import sys, time
from pathlib import Path
from roq.wire.task import NewTask, Settlement
from roq.workqueue.log_queue import LogQueue
queue = LogQueue(Path(sys.argv[1]))
print("up", flush=True)
acks = []
for line in range(10**9):
    _, tasks, _ = queue.lease(60, 1, 0, acks)
    acks = [Settlement.ack(task.token) for task in tasks]
    queue.put([NewTask(b"y")])
    print(line, flush=True)
"""


@pytest.mark.quick
def test_alarms_that_raise_hold_up_nobody(folder: Path, queues: list[LogQueue]) -> None:
    """Others work on beside a process that is broken off again and again, and has both all the tasks there are."""
    victim = queues[0]
    dice, broken = random.Random(3), 0

    def stop(*_: object) -> None:
        raise Stop

    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        before = signal.signal(signal.SIGALRM, stop)
        try:
            other.stdout.readline()
            for _ in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.0001, 0.004), AGAIN_SECONDS)
                    for _ in range(10_000):
                        victim.settle([Settlement.ack(task.token) for task in victim.lease(60, 1, 0)[1]])
                except Stop:
                    broken += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                other.stdout.readline()  # it goes on
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            other.kill()
    assert broken == 150
    assert held_locks(folder) == []
    assert agree(victim, queues[1])


def test_a_task_that_comes_while_a_waiting_queue_closes_goes_back(folder: Path, queues: list[LogQueue]) -> None:
    feeder, closing = queues
    feeder.purge()
    ended: list[BaseException] = []
    plain = closing._leave_list

    def wait() -> None:
        try:
            closing.lease(600, 1, 20)
        except Closed as error:
            ended.append(error)

    def close() -> None:
        plain()
        feeder.put([NewTask(b"x")])
        waiter.join(10)  # it sees the entry, and that the queue is closed

    waiter = threading.Thread(target=wait)
    waiter.start()
    until = time.monotonic() + 10
    while not feeder_sees_waiter(feeder):
        assert time.monotonic() < until
    closing._leave_list = close  # type: ignore[method-assign]
    closing.close()
    assert len(ended) == 1
    status = feeder.status()
    assert (status.ready, status.leased) == (1, 0)


def feeder_sees_waiter(feeder: LogQueue) -> bool:
    return bool(state_after(feeder).waiters)


def test_a_forked_child_can_do_nothing_and_takes_nothing_from_its_parent(folder: Path, queues: list[LogQueue]) -> None:
    """Not even while another thread of its parent is at work, whose mutexes never come free in the child."""
    parent = queues[0]
    names = sorted(os.listdir(folder / "instances"))
    with parent._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            with contextlib.suppress(BaseException):
                code = in_child(parent)
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(os.listdir(folder / "instances")) == names
    assert parent.settle([Settlement.ack(lease_one(parent).token)]) == [""]


def in_child(queue: LogQueue) -> int:
    """0: every call ended with Closed."""
    codes: list[int] = []

    def run() -> None:
        calls = (lambda: queue.lease(60, 1, 0), queue.status, queue.purge, lambda: queue.put([NewTask(b"x")]))
        for call in calls:
            with contextlib.suppress(Closed):
                call()
                codes.append(1)
        queue.close()
        queue._replica.end_life()
        codes.append(0)

    thread = threading.Thread(target=run, daemon=True)  # for which the parent's thread holds the lock
    thread.start()
    thread.join(10)
    return codes[0] if codes else 2

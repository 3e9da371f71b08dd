"""log: work queues whose processes leave their requests to one of them: it dies or fails at each of its steps, those who
ask are interrupted, everybody asks at once. The list by itself: tests/unit/test_log_publication.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roq.errors import StorageFull
from roq.log.local import LocalLog
from roq.log.local.publication import UNKNOWN, PublicationList, PublishedRequest
from roq.wire.task import NewTask, Settlement
from roq.workqueue.fold import Effects
from roq.workqueue.log_queue import LogQueue
from roq.workqueue.records import Record, decode
from tests.integration.log_queue_rig import lease_one

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
ASKERS = 3

COMBINER = """
import itertools, os, signal, sys, time
from pathlib import Path
from roq.errors import StorageFailed, StorageFull
from roq.log.local import LocalLog
from roq.log.local.publication import PublicationList
from roq.workqueue.log_queue import LogQueue
folder, askers, name, number, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
queue = LogQueue(Path(folder))

def hurt(owner):
    plain, calls = getattr(owner, name), itertools.count(1)
    def call(*arguments, **keywords):
        hit = next(calls) == number
        if hit and moment == "dies before":
            os.kill(os.getpid(), signal.SIGKILL)
        if hit and moment == "fails before":
            raise StorageFull("as the test wants it")
        result = plain(*arguments, **keywords)
        if hit and moment == "dies after":
            os.kill(os.getpid(), signal.SIGKILL)
        if hit and moment == "fails after":
            raise StorageFailed("as the test wants it")
        return result
    setattr(owner, name, call)

take = PublicationList.take
def take_all(publications):
    os.write(1, b"serves\\n")
    while publications.count() < askers:
        time.sleep(0.001)
    hurt(PublicationList if hasattr(PublicationList, name) else LocalLog)
    return take(publications)
PublicationList.take = take_all
try:
    queue.lease(60, 1, 0)
except (StorageFull, StorageFailed):
    os.write(1, b"failed\\n")
    time.sleep(60)
"""
STEPS = [
    ("append", 1, "dies before"),
    ("append", 1, "dies after"),
    ("append", 1, "fails before"),
    ("append", 1, "fails after"),
    ("sync", 1, "dies before"),
    ("sync", 1, "dies after"),
    ("sync", 1, "fails before"),
    ("reply", 1, "dies before"),
    ("reply", 1, "dies after"),
    ("reply", 2, "dies after"),
    ("reply", 2, "fails before"),
    ("reply", 3, "dies after"),
    ("end", 1, "dies before"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tasks"


@pytest.fixture
def queues(folder: Path) -> Iterator[list[LogQueue]]:
    """Each is a process of its own to the others."""
    opened = [LogQueue(folder) for _ in range(ASKERS)]
    yield opened
    for queue in opened:
        queue.close()


def serving(folder: Path, *step: object) -> subprocess.Popen[str]:
    """A process that is the combiner and waits for everybody's request."""
    command = [sys.executable, "-c", COMBINER, str(folder), str(ASKERS), *map(str, step)]
    combiner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert combiner.stdout is not None
    assert combiner.stdout.readline() == "serves\n"
    return combiner


def waits(condition: Callable[[], bool], seconds: float = 10) -> None:
    ended = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ended
        time.sleep(0.01)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: " ".join(map(str, step)))
def test_whatever_happens_to_the_combiner_every_request_takes_effect_once_and_is_answered(
    folder: Path, queues: list[LogQueue], step: tuple[str, int, str]
) -> None:
    queues[0].put([NewTask(b"%d" % number) for number in range(10)])
    held = [lease_one(queue) for queue in queues]
    combiner = serving(folder, *step)
    try:
        with ThreadPoolExecutor(ASKERS) as threads:
            asked = [
                threads.submit(queue.lease, 60, 1, 0, [Settlement.ack(task.token)])
                for queue, task in zip(queues, held, strict=True)
            ]
            answers = [one.result(20) for one in asked]
    finally:
        combiner.kill()
        combiner.communicate()
    assert [settled for settled, _, _ in answers] == [[""]] * ASKERS, "each ack took effect, and nobody doubts it"
    tasks = [task for _, leased, _ in answers for task in leased]
    assert len({task.id for task in (*tasks, *held)}) == 2 * ASKERS, "and each has a task of its own"
    waits(lambda: queues[0].status().leased == ASKERS)  # the dead combiner's comes back
    assert queues[1].status().completed == ASKERS
    for queue, task in zip(queues, tasks, strict=True):
        assert queue.settle([Settlement.ack(task.token), Settlement.ack(task.token)]) == ["", None]
    fresh = LogQueue(folder)
    fresh.status()
    queues[2].status()
    queues[2]._replica.state.check()
    fresh._ready_replica().catch_up()
    assert fresh._replica.state.digest() == queues[2]._replica.state.digest()
    fresh.close()


@pytest.mark.quick
def test_who_is_served_by_another_folds_nothing(folder: Path, queues: list[LogQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    plain = PublicationList.take

    def take(publications: PublicationList) -> list[PublishedRequest]:
        requests = plain(publications)
        rounds.append(len(requests))
        return requests

    monkeypatch.setattr(PublicationList, "take", take)
    count = 300
    queues[0].put([NewTask(b"x") for _ in range(ASKERS * count)])
    done: list[str] = []

    def work(queue: LogQueue) -> None:
        acks: list[Settlement] = []
        for _ in range(count):
            settled, [task], _ = queue.lease(60, 1, 0, acks)
            assert settled == [""] * len(acks)
            done.append(task.id)
            acks = [Settlement.ack(task.token)]
        assert queue.settle(acks) == [""]

    with ThreadPoolExecutor(ASKERS) as threads:
        for one in [threads.submit(work, queue) for queue in queues]:
            one.result(30)
    assert len(set(done)) == len(done) == ASKERS * count
    assert sum(rounds) > count // 2, "many requests travelled with another's"
    assert queues[0].status().completed == ASKERS * count


def test_an_interrupted_request_leaves_no_lease_behind(
    folder: Path, queues: list[LogQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The combiner has it already when the asker's signal comes; the asker gives back what it is given."""
    queues[0].put([NewTask(b"x")])
    asked, go_on = threading.Event(), threading.Event()
    plain = PublicationList.take

    def take(publications: PublicationList) -> list[PublishedRequest]:
        if publications.place == queues[1]._list.place and not asked.is_set():  # type: ignore[union-attr]
            asked.set()
            deadline = time.monotonic() + 10
            while not publications.count() and time.monotonic() < deadline:
                time.sleep(0.001)
            if publications.count():  # the other one's request, which will be handed out
                os.kill(os.getpid(), signal.SIGUSR1)
            go_on.wait(10)
        return plain(publications)

    def interrupt(*_: object) -> None:
        go_on.set()
        raise InterruptedError

    queues[0].lease(60, 1, 0, [])  # everybody has a place on the list
    queues[1].lease(60, 1, 0, [])
    queues[1].release_all()
    monkeypatch.setattr(PublicationList, "take", take)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(queues[1].lease, 60, 1, 0)
            assert asked.wait(10)
            queues[0].put([NewTask(b"y")])
            with pytest.raises(InterruptedError):
                queues[0].lease(60, 1, 0)
            assert len(first.result(10)[1]) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    status = queues[2].status()
    assert (status.leased, status.ready) == (1, 1)
    assert lease_one(queues[2]).attempt == 2, "it had been handed out"


def test_big_answers_many_settlements_and_a_full_list_take_the_long_way(folder: Path, queues: list[LogQueue]) -> None:
    big = bytes(100_000)
    queues[0].put([NewTask(big) for _ in range(200)])
    held = [task for queue in queues for task in queue.lease(60, 50, 0)[1]]
    assert len(held) == 50 * ASKERS
    crowd = [LocalLog(folder) for _ in range(64)]
    lists = [log.open_list() for log in crowd]
    assert lists[-1] is None
    late = LogQueue(folder)
    try:
        with ThreadPoolExecutor(ASKERS + 1) as threads:
            asked = [
                threads.submit(queue.lease, 60, 2, 0, [Settlement.ack(task.token) for task in held[index::ASKERS]])
                for index, queue in enumerate(queues)
            ]
            outside = threads.submit(late.lease, 60, 1, 0)
            assert outside.result(20)[1][0].payload == big
            for one in asked:
                settled, tasks, _ = one.result(20)
                assert settled == [""] * 50
                assert [task.payload for task in tasks] == [big] * 2
        assert late.status().completed == len(held)
    finally:
        late.close()
        for log in crowd:
            log.close()


def test_all_settlements_and_waits_go_over_the_list(folder: Path, queues: list[LogQueue]) -> None:
    """While one of them is held up as the combiner, so that the others have to ask."""
    queues[0].put([NewTask(b"%d" % number) for number in range(2)])
    first, second = lease_one(queues[0]), lease_one(queues[1])
    queues[2].lease(60, 1, 0)
    publications = queues[2]._list
    assert publications is not None
    assert publications.begin()
    with ThreadPoolExecutor(2) as threads:
        extended = threads.submit(queues[0].settle, [Settlement.extend(first.token, 90)])
        waiting = threads.submit(queues[1].lease, 60, 1, 10, [Settlement.release(second.token, 0.2, "later")])
        waits(lambda: publications.count() == 2)
        requests = publications.take()
        assert len(requests) == 2
        publications.end()  # answers UNKNOWN: they look for themselves
        assert extended.result(10) == [first.token]
        settled, [again], _ = waiting.result(10)
    assert settled == [""]
    assert (again.id, again.attempt) == (second.id, 2)


def test_a_full_disk_leaves_no_list_and_the_queue_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(log: LocalLog) -> PublicationList | None:
        raise StorageFull("as the test wants it")

    monkeypatch.setattr(LocalLog, "open_list", refuse)
    queue = LogQueue(folder)
    queue.put([NewTask(b"x")])
    assert queue.settle([Settlement.ack(lease_one(queue).token)]) == [""]
    queue.close()


def test_a_combiner_that_closes_leaves_a_snapshot_to_who_comes_next(folder: Path) -> None:
    queues = [LogQueue(folder) for _ in range(2)]
    for _ in range(20):
        queues[0].put([NewTask(bytes(100)) for _ in range(500)])
        queues[0].settle([Settlement.ack(task.token) for task in queues[0].lease(60, 500, 0)[1]])
    assert queues[0]._log.newest_snapshot() == (0, 0)
    queues[1].lease(60, 1, 0)
    publications = queues[1]._list
    assert publications is not None
    publications.publish(b"\x01\x90")  # nothing that can be served, but company
    queues[0].lease(60, 1, 0)
    assert publications.answer() == UNKNOWN
    queues[0].close()
    position, size = queues[1]._log.newest_snapshot()
    assert position > 1024 * 1024 > size
    assert queues[1].status().completed == 10_000
    queues[1].close()


def test_what_the_combiner_answers_is_durable_before(
    folder: Path, queues: list[LogQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    queues[0].put([NewTask(b"x") for _ in range(4)])
    held = lease_one(queues[0])
    queues[2].lease(60, 1, 0)
    durable: list[bool] = []
    plain = PublicationList.reply

    def reply(publications: PublicationList, request: PublishedRequest, text: bytes) -> None:
        durable.append(queues[2]._log.durable == queues[2]._log.end)
        plain(publications, request, text)

    monkeypatch.setattr(PublicationList, "reply", reply)
    monkeypatch.setattr("roq.workqueue.log_replica.PATIENCE_SECONDS", (5.0, 5.0))
    monkeypatch.setattr("roq.log.local.publication.COMBINER_SECONDS", 60.0)  # nobody else serves, however long it takes to ask
    with ThreadPoolExecutor(2) as threads:
        acked = threads.submit(queues[0].settle, [Settlement.ack(held.token)])
        publications = queues[2]._list
        assert publications is not None
        waits(lambda: publications.count() == 1)
        leased = threads.submit(queues[1].lease, 60, 1, 0)
        waits(lambda: publications.count() == 2)
        queues[2].lease(60, 1, 0)
        assert acked.result(10) == [""]
        assert len(leased.result(10)[1]) == 1
    assert durable == [False, True], "a lease is handed out at once, an ack when it is on the disk"


def combiners_list(queue: LogQueue) -> PublicationList:
    queue.lease(60, 1, 0)
    publications = queue._list
    assert publications is not None
    return publications


def test_an_answer_of_a_newer_program_is_looked_up_in_the_log(queues: list[LogQueue]) -> None:
    queues[0].put([NewTask(b"x")])
    held = lease_one(queues[0])
    publications = combiners_list(queues[2])
    assert publications.begin()
    with ThreadPoolExecutor(1) as threads:
        acked = threads.submit(queues[0].settle, [Settlement.ack(held.token)])
        waits(lambda: publications.count() == 1)
        for answer, request in zip((b"\xc1",), publications.take(), strict=True):
            publications.reply(request, answer)
        publications.end()
        assert acked.result(10) == [""]
    assert queues[1].status().completed == 1


def test_what_became_of_one_request_is_not_told_of_the_next(queues: list[LogQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread folds the first one just as its answer comes, and is not through when the second one is asked."""
    asker, combiner = queues[:2]
    asker.put([NewTask(b"%d" % number) for number in range(2)])
    first, second = lease_one(asker), lease_one(asker)
    publications = combiners_list(combiner)
    folding, go_on = threading.Event(), threading.Event()
    plain = asker._replica._apply

    def slowly(record: Record) -> Effects:  # where the interpreter may go on with another thread
        if not folding.is_set():
            folding.set()
            assert go_on.wait(10)
        return plain(record)

    assert publications.begin()
    with ThreadPoolExecutor(3) as threads:
        acked = threads.submit(asker.settle, [Settlement.ack(first.token)])
        waits(lambda: publications.count() == 1)
        [request] = publications.take()
        with combiner._lock:
            combiner._replica.write_requests([(request.text, decode(request.text))])
        monkeypatch.setattr(asker._replica, "_apply", slowly)
        other = threads.submit(asker.status)
        assert folding.wait(10)
        publications.reply(request, b"\x93\x91\xc3\x90\xc2")  # settled
        assert acked.result(10) == [""]
        go_on.set()
        other.result(10)
        again = threads.submit(asker.settle, [Settlement.ack(second.token)])
        waits(lambda: publications.count() == 1)
        publications.take()
        publications.end()  # breaks off: nobody knows, and nothing was written
        assert again.result(10) == [""]
    assert combiner.status().completed == 2


def test_who_found_no_place_on_the_list_tries_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [LocalLog(folder) for _ in range(64)]
    assert None not in [log.open_list() for log in crowd]
    late = LogQueue(folder)
    late.lease(60, 1, 0)
    assert late._list is None
    for log in crowd:
        log.close()
    late._list_at = 0.0
    late.lease(60, 1, 0)
    assert late._list is not None
    late.close()

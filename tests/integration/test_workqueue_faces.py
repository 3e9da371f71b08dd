"""What the two faces of a queue add to a backend: loops that renew, workers, cancellation, calls that travel together.

Not covered: the verbs themselves (test_workqueue_contract.py), signals to real workers (test_workqueue_processes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.errors import Closed, InvalidConfiguration, LeaseLost, PayloadTooLarge
from roq.workqueue import batcher
from tests.integration.workqueue_rig import new_address

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def queue() -> AsyncIterator[roq.WorkQueue]:
    async with roq.open_queue("memory:") as opened:
        yield opened


# --- waiting ----------------------------------------------------------------------------------------------------------


async def test_a_short_wait_does_not_sit_behind_a_long_one(queue: roq.WorkQueue) -> None:
    long = asyncio.create_task(queue.lease(60, wait_seconds=30))
    while not (batcher := queue._lease_batcher(60, 0))._waiting:
        await asyncio.sleep(0)
    for wait_seconds in (0.0, 0.05, 0.1):
        begun = time.monotonic()
        assert await queue.lease(60, wait_seconds=wait_seconds) == []
        assert wait_seconds <= time.monotonic() - begun < wait_seconds + 0.9, "less than the call that waits takes"
        assert batcher._waiting
    await queue.put(b"x")
    [task] = await long
    assert task.payload == b"x"


async def test_what_was_leased_is_not_kept_by_those_who_waited(queue: roq.WorkQueue) -> None:
    """A worker waits for ever, again and again: what it was given must not live as long as it would have waited."""
    first = asyncio.create_task(queue.lease(60, wait_seconds=600))
    while not queue._lease_batcher(60, 0)._waiting:
        await asyncio.sleep(0)
    others = [asyncio.create_task(queue.lease(60, wait_seconds=wait)) for wait in (0.9, 600)]
    await asyncio.sleep(0)
    await queue.put_many(b"%d" % number for number in range(3))
    assert [len(tasks) for tasks in await asyncio.gather(first, *others)] == [1, 1, 1]
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is batcher._LeaseRequest]


# --- loops over leases ------------------------------------------------------------------------------------------------


async def test_a_body_that_blocks_the_loop_keeps_its_lease(work_address: str) -> None:
    async with roq.open_queue(work_address) as queue:
        await queue.put(b"long")
        with blocking.open_queue(work_address) as other:
            stolen: list[blocking.Task] = []
            thief = threading.Thread(target=lambda: stolen.extend(other.lease(60, 1, 3.5)))
            async for task in queue.leases(1.5, wait_seconds=5):
                thief.start()
                time.sleep(3.5)  # noqa: ASYNC251  that is the point
                assert not task.lost
                await task.ack()
                break
            thief.join()
            assert not stolen
        assert (await queue.status()).completed == 1


@pytest.mark.parametrize("work_address", ["memory"], indirect=True)  # on the others: test_workqueue_processes.py
def test_the_plain_loop_renews_too(work_address: str) -> None:
    with blocking.open_queue(work_address) as queue, blocking.open_queue(work_address) as other:
        queue.put(b"long")
        for task in queue.leases(1.5, wait_seconds=0):
            assert other.lease(60, 1, 3.5) == []
            task.ack()
        assert queue.status().completed == 1


async def test_a_loop_ends_when_nothing_came_for_so_long(queue: roq.WorkQueue) -> None:
    await queue.put_many([b"%d" % number for number in range(5)])
    seen = []
    async for task in queue.leases(wait_seconds=0, count=2):
        seen.append(task.payload)
        await task.ack()
    assert seen == [b"0", b"1", b"2", b"3", b"4"]
    began = time.monotonic()
    assert [task async for task in queue.leases(wait_seconds=0.4)] == []
    assert 0.35 < time.monotonic() - began < 2.0


async def test_a_loop_that_is_left_gives_back_what_it_had_not_begun(queue: roq.WorkQueue) -> None:
    await queue.put_many([b"%d" % number for number in range(4)])
    async for task in queue.leases(60, count=2):
        await task.ack()
        if task.payload == b"1":  # the ack brought two more
            break
    async with asyncio.timeout(5):
        while (status := await queue.status()).leased:
            await asyncio.sleep(0.01)
    assert (status.ready, status.completed) == (2, 2)


async def test_a_task_left_unsettled_comes_back_when_its_lease_ends(queue: roq.WorkQueue) -> None:
    await queue.put_many([b"first", b"second"])
    attempts = []
    async for task in queue.leases(0.3, wait_seconds=1.5):
        attempts.append((task.payload, task.attempt))
        if task.attempt == 2:
            await task.ack()
    assert sorted(attempts) == [(b"first", 1), (b"first", 2), (b"second", 1), (b"second", 2)]


async def fail_asynchronously(address: str) -> None:
    async with roq.open_queue(address) as queue:
        async for task in queue.leases(600):
            assert 1 // (task.attempt - 1)


async def fail_plainly(address: str) -> None:
    with blocking.open_queue(address) as queue:
        for task in queue.leases(600):
            assert 1 // (task.attempt - 1)


@pytest.mark.parametrize("face", ["asynchronous", "blocking"])
async def test_an_error_in_the_body_is_kept_and_the_task_is_back_at_once(tmp_path: Path, face: str) -> None:
    address = new_address("log", tmp_path)
    with blocking.open_queue(address) as other:
        other.put_many([b"a", b"b"])
        with pytest.raises(ZeroDivisionError):
            await (fail_asynchronously if face == "asynchronous" else fail_plainly)(address)
        assert other.status().ready == 2
        assert "ZeroDivisionError" in next(view.error for view in other.peek("ready") if view.payload == b"a")


async def test_a_task_learns_that_its_lease_was_lost(queue: roq.WorkQueue) -> None:
    await queue.put(b"x")
    async for task in queue.leases(0.6):
        waiting = asyncio.create_task(task.wait_lost())
        await queue.purge()
        await asyncio.wait_for(waiting, 5)
        assert task.lost
        with pytest.raises(LeaseLost):
            await task.ack()
        break


# --- travelling together ----------------------------------------------------------------------------------------------


async def test_puts_of_one_moment_share_their_fate_only_where_they_must(work_address: str) -> None:
    async with roq.open_queue(work_address, payload_bytes_max=100) as queue:
        results = await asyncio.gather(
            *(queue.put(b"x" * (101 if number == 50 else 10)) for number in range(100)),
            queue.put(b"y", priority=1000),
            return_exceptions=True,
        )
        refused = [result for result in results if isinstance(result, BaseException)]
        assert [type(error) for error in refused] == [PayloadTooLarge, InvalidConfiguration]
        assert (await queue.status()).ready == 99
        tasks = await queue.lease(60, 200)
        outcomes = await asyncio.gather(*(task.ack() for task in tasks), queue.ack(tasks[0].token), return_exceptions=True)
        assert [type(one) for one in outcomes if one is not None] == [LeaseLost]


async def test_many_coroutines_lease_and_no_task_goes_to_two(work_address: str) -> None:
    async with roq.open_queue(work_address) as queue:
        ids = await queue.put_many(b"%d" % number for number in range(300))

        async def drain(seconds: float) -> list[str]:
            mine = []
            while tasks := await queue.lease(seconds, 3, 0.2):
                mine += [task.id for task in tasks]
                await asyncio.gather(*(task.ack() for task in tasks))
            return mine

        took = await asyncio.gather(*(drain(60.0 + number % 3) for number in range(20)))
        assert sorted(one for mine in took for one in mine) == sorted(ids)


# --- cancellation and closing -----------------------------------------------------------------------------------------


async def test_a_cancelled_lease_leaks_no_task(work_address: str) -> None:
    chance = random.Random(4)
    async with roq.open_queue(work_address) as queue:
        put, held = 0, 0
        for _ in range(60):
            leasing = asyncio.create_task(queue.lease(60, 2, 0.5 if chance.random() < 0.5 else 0.0))
            await asyncio.sleep(chance.random() * 0.004)
            putting = asyncio.create_task(queue.put(b"x"))
            put += 1
            await asyncio.sleep(chance.random() * 0.004)
            leasing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                held += len(await leasing)
            await putting
        async with asyncio.timeout(10):
            while (status := await queue.status()).leased > held:  # given back behind the cancelled caller's back
                await asyncio.sleep(0.02)
        assert (status.leased, status.ready) == (held, put - held)


async def test_a_cancelled_put_hangs_nothing(queue: roq.WorkQueue) -> None:
    putting = [asyncio.create_task(queue.put(b"x")) for _ in range(50)]
    await asyncio.sleep(0)
    for one in putting[::2]:
        one.cancel()
    results = await asyncio.wait_for(asyncio.gather(*putting, return_exceptions=True), 5)
    assert all(isinstance(result, str) for result in results[1::2])
    assert 25 <= (await queue.status()).ready <= 50


async def test_closing_gives_back_what_comes_too_late(work_address: str) -> None:
    chance = random.Random(5)
    with blocking.open_queue(work_address) as other:
        for _ in range(8):
            queue = roq.open_queue(work_address)
            await queue.open()
            waiting = [asyncio.create_task(queue.lease(600, 1, 10.0)) for _ in range(3)]
            await asyncio.sleep(0.02)
            putting = asyncio.create_task(asyncio.to_thread(other.put_many, [b"x"] * 3))
            await asyncio.sleep(chance.random() * 0.01)
            await queue.close()
            await putting
            got = sum(len(one) for one in await asyncio.gather(*waiting, return_exceptions=True) if isinstance(one, list))
            status = await asyncio.to_thread(other.status)
            assert (status.leased, status.ready) == (got, 3 - got)
            await asyncio.to_thread(other.purge)


async def test_closing_ends_what_waits(work_address: str) -> None:
    queue = roq.open_queue(work_address)
    with pytest.raises(Closed):
        await queue.put(b"x")
    await queue.open()
    waiting = asyncio.create_task(queue.lease(60, 1, 30.0))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(queue.close(), 5)
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 5)
    for call in (queue.put(b"x"), queue.lease(), queue.status()):
        with pytest.raises(Closed):
            await call
    await queue.close()


# --- workers ----------------------------------------------------------------------------------------------------------


async def test_a_worker_runs_many_handlers_and_fails_without_harm(work_address: str) -> None:
    async with roq.open_queue(work_address, max_attempts=2) as queue:
        await queue.put_many(b"%d" % number for number in range(20))
        at_once = most = 0

        async def handler(task: roq.Task) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.02)
            at_once -= 1
            if task.payload in (b"3", b"4"):
                raise ValueError(f"can't do {task.payload.decode()}\nsecond line")
            if task.payload == b"5":
                await task.reject("not mine")  # the handler may settle by itself

        work = await queue.run(handler, concurrency=4, wait_seconds=2.5, retry_seconds=0.2)
        assert (work.done, work.failed, work.lost, work.stopped) == (18, 4, 0, False)
        assert most == 4
        letters = {letter.payload: letter for letter in await queue.dead()}
        assert set(letters) == {b"3", b"4", b"5"}
        assert letters[b"3"].error.startswith("ValueError: can't do 3\n")
        assert "in handler" in letters[b"3"].error
        assert (letters[b"3"].attempts, letters[b"5"].error) == (2, "not mine")


@pytest.mark.parametrize("work_address", ["memory"], indirect=True)  # on the others: test_workqueue_processes.py
def test_a_plain_worker_does_the_same(work_address: str) -> None:
    with blocking.open_queue(work_address, max_attempts=1) as queue:
        queue.put_many(b"%d" % number for number in range(20))
        threads = set()

        def handler(task: blocking.Task) -> None:
            threads.add(threading.get_ident())
            time.sleep(0.02)
            if task.payload == b"3":
                raise ValueError("can't do 3")

        work = queue.run(handler, concurrency=4, wait_seconds=0.5, retry_seconds=0.0)
        assert (work.done, work.failed, work.lost, work.stopped) == (19, 1, 0, False)
        assert len(threads) == 4
        assert [letter.payload for letter in queue.dead()] == [b"3"]


FAILING = """
import asyncio, roq
from roq import blocking

def fails(task):
    raise ValueError(task.payload.decode())

async def fails_too(task):
    fails(task)

with blocking.open_queue("memory:plain", max_attempts=1) as queue:
    queue.put_many([b"one", b"x" * 100_000])
    queue.run(fails, wait_seconds=0)
    [huge] = [letter.error for letter in queue.dead() if len(letter.payload) > 3]
    assert "in fails" in huge, huge

async def main():
    async with roq.open_queue("memory:other", max_attempts=1) as queue:
        print(await queue.put(b"two"))
        await queue.run(fails_too, wait_seconds=0)

asyncio.run(main())
"""


def test_a_failing_handler_is_logged_with_its_traceback() -> None:
    """As a program sees it that has set up no logging."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=50, check=True)
    said = done.stderr
    assert said.count("handler failed: queue=memory:") == said.count("Traceback (most recent call last)") == 3
    assert said.count("queue=memory:plain, task=") == 2
    assert f"queue=memory:other, task={done.stdout.strip()}, attempt=1, error=ValueError: two\n" in said
    assert said.count("in fails_too") == 1
    assert said.count("in fails\n") == 3
    assert len(said) < 20_000


async def test_a_cancelled_worker_gives_back(queue: roq.WorkQueue) -> None:
    await queue.put_many([b"a", b"b", b"c"])
    begun = asyncio.Event()

    async def handler(task: roq.Task) -> None:
        begun.set()
        await asyncio.sleep(100)

    running = asyncio.create_task(queue.run(handler, concurrency=2))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    status = await queue.status()
    assert (status.ready, status.leased) == (3, 0)


async def test_a_handler_whose_lease_was_lost_is_counted(queue: roq.WorkQueue) -> None:
    await queue.put(b"x")

    async def handler(task: roq.Task) -> None:
        await queue.purge()

    assert (await queue.run(handler, wait_seconds=0)).lost == 1


async def test_wrong_rules_are_refused(queue: roq.WorkQueue) -> None:
    async def handler(task: roq.Task) -> None: ...

    for wrong in ({"concurrency": 0}, {"seconds": 0.0}, {"grace_seconds": -1.0}, {"retry_seconds": float("nan")}):
        with pytest.raises(InvalidConfiguration):
            await queue.run(handler, **wrong)


def test_one_plain_queue_serves_many_threads(work_address: str) -> None:
    with blocking.open_queue(work_address) as queue:
        done: list[str] = []

        def work(name: str) -> None:
            queue.put_many(f"{name} {number}".encode() for number in range(20))
            for task in queue.leases(60, wait_seconds=0.3):
                task.ack()
                done.append(task.id)

        threads = [threading.Thread(target=work, args=(str(number),)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == len(set(done)) == 100

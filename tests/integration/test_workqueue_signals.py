"""Several `run` in one process, and its SIGTERM and SIGINT: one stops all, the second ends all at once, or they are left alone.

Real processes and signals; the queues are in their memory, since what is told to stop does not depend on the backend. One `run`
per process on every backend: test_workqueue_processes.py.
"""

from __future__ import annotations

import select
import signal
import time
from typing import Any

import pytest

from tests.integration.workqueue_rig import program

pytestmark = pytest.mark.timeout(90)
SPEAKS_SECONDS = 30.0

COMMON = """
import asyncio, contextlib, os, signal, sys, threading, time
import roq
from roq import blocking
lock = threading.RLock()  # a second signal may come while the first one is told
def say(*words):
    with lock:
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())
async def async_run(name, task_seconds, **rules):
    async def handler(task):
        say("begun", name)
        await asyncio.sleep(task_seconds)
    async with roq.open_queue("memory:") as queue:
        await queue.put(b"x")
        work = await queue.run(handler, **rules)
        status = await queue.status()
        say("ended", name, work.done, work.returned, work.stopped, status.ready)
def blocking_run(name, task_seconds, **rules):
    def handler(task):
        say("begun", name)
        time.sleep(task_seconds)
    with blocking.open_queue("memory:") as queue:
        queue.put(b"x")
        work = queue.run(handler, **rules)
        say("ended", name, work.done, work.returned, work.stopped, queue.status().ready)
def in_thread(*arguments, **rules):
    thread = threading.Thread(target=blocking_run, args=arguments, kwargs=rules)
    thread.start()
    return thread
def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
"""

TWO_ASYNC = """
async def main():
    before = handlers()
    await asyncio.gather(async_run("a", SECONDS, grace_seconds=60), async_run("b", SECONDS, grace_seconds=60))
    say("restored", handlers() == before)
asyncio.run(main())
"""
TWO_ASYNC_UVLOOP = "import uvloop\n" + TWO_ASYNC.replace("asyncio.run(", "uvloop.run(")
TWO_BLOCKING = """
before = handlers()
thread = in_thread("a", SECONDS, grace_seconds=60)
blocking_run("b", SECONDS, grace_seconds=60)
thread.join()
say("restored", handlers() == before)
"""
MIXED = """
async def main():
    before = handlers()
    await asyncio.gather(
        asyncio.to_thread(blocking_run, "a", SECONDS, grace_seconds=60), async_run("b", SECONDS, grace_seconds=60)
    )
    say("restored", handlers() == before)
asyncio.run(main())
"""
ASYNC_IN_A_THREAD = """
before = handlers()
thread = threading.Thread(target=lambda: asyncio.run(async_run("a", SECONDS, grace_seconds=60)))
thread.start()
blocking_run("b", SECONDS, grace_seconds=60)
thread.join()
say("restored", handlers() == before)
"""
PAIRS = {
    "two asynchronous": TWO_ASYNC,
    "two on uvloop": TWO_ASYNC_UVLOOP,
    "two blocking": TWO_BLOCKING,
    "blocking beside asynchronous": MIXED,
    "asynchronous in a thread": ASYNC_IN_A_THREAD,
}


def line(process: Any) -> str:
    """The next line a program prints; fails rather than hangs."""
    assert select.select([process.stdout], [], [], SPEAKS_SECONDS)[0], "nothing was said in time"
    return bytes(process.stdout.readline()).decode().strip()


def lines(process: Any, count: int) -> set[str]:
    return {line(process) for _ in range(count)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("pair", PAIRS)
def test_one_signal_stops_every_run_of_the_process(pair: str, number: signal.Signals) -> None:
    with program(COMMON + PAIRS[pair].replace("SECONDS", "1.0")) as worker:
        assert lines(worker, 2) == {"begun a", "begun b"}
        worker.send_signal(number)
        assert lines(worker, 2) == {"ended a 1 0 True 0", "ended b 1 0 True 0"}, "both finish what they had begun"
        assert line(worker) == "restored True"
        assert worker.wait(SPEAKS_SECONDS) == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_a_second_signal_ends_every_run_at_once(pair: str) -> None:
    with program(COMMON + PAIRS[pair].replace("SECONDS", "40")) as worker:
        assert lines(worker, 2) == {"begun a", "begun b"}
        began = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.3)  # two that come as one are one
        worker.send_signal(signal.SIGINT)
        assert lines(worker, 2) == {"ended a 0 1 True 1", "ended b 0 1 True 1"}, "both give back what they had begun"
        assert time.monotonic() - began < 25, "neither waits for its grace time or its handler"


LEFT_ALONE = """
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, say, "the program's own")
    before = handlers()
    running = asyncio.create_task(async_run("a", 40, handle_signals=False))
    await asyncio.to_thread(sys.stdin.readline)
    say("same", handlers() == before, "stopped", running.done())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
asyncio.run(main())
"""
LEFT_ALONE_BLOCKING = """
signal.signal(signal.SIGTERM, lambda *_: say("the program's own"))
before = handlers()
def ask():
    sys.stdin.readline()
    say("same", handlers() == before, "stopped", False)
    os._exit(0)
threading.Thread(target=ask).start()
blocking_run("a", 40, handle_signals=False)
"""


@pytest.mark.parametrize("source", [LEFT_ALONE, LEFT_ALONE_BLOCKING], ids=["asynchronous", "blocking"])
def test_a_run_that_leaves_signals_alone(source: str) -> None:
    with program(COMMON + source) as worker:
        assert line(worker) == "begun a"
        for _ in range(2):
            worker.send_signal(signal.SIGTERM)
            assert line(worker) == "the program's own"
        assert worker.stdin is not None
        worker.stdin.write(b"\n")
        assert line(worker) == "same True stopped False"


ONE_OF_EACH = """
async def main():
    alone = asyncio.create_task(async_run("alone", 40, handle_signals=False))
    await async_run("other", 40, grace_seconds=0)
    await asyncio.sleep(0.3)
    say("alone goes on", not alone.done())
    os._exit(0)
asyncio.run(main())
"""


def test_a_run_that_leaves_signals_alone_is_not_stopped_by_those_another_takes() -> None:
    with program(COMMON + ONE_OF_EACH) as worker:
        assert lines(worker, 2) == {"begun alone", "begun other"}
        worker.send_signal(signal.SIGTERM)
        assert line(worker) == "ended other 0 1 True 1"
        assert line(worker) == "alone goes on True"


ONE_AFTER_ANOTHER = """
async def main():
    def own(*_):
        say("the program's own")
    signal.signal(signal.SIGTERM, own)
    long = asyncio.create_task(async_run("long", 40, grace_seconds=60))
    await async_run("short", 0.0, wait_seconds=0)
    await asyncio.to_thread(sys.stdin.readline)
    say("asked")
    stopped = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await stopped
    await async_run("late", 40, grace_seconds=60)
    await long
    say("restored", signal.getsignal(signal.SIGTERM) is own)
    await async_run("fresh", 0.0, wait_seconds=0)
asyncio.run(main())
"""


def test_a_run_that_ends_leaves_signals_to_the_others_and_who_begins_after_one_is_told() -> None:
    with program(COMMON + ONE_AFTER_ANOTHER) as worker:
        assert worker.stdin is not None
        assert lines(worker, 3) == {"begun long", "begun short", "ended short 1 0 False 0"}
        worker.stdin.write(b"\n")
        assert line(worker) == "asked"
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.3)  # the handler has run
        worker.stdin.write(b"\n")
        assert line(worker) == "ended late 0 0 True 1", "the process was asked to stop: no more work is begun"
        worker.send_signal(signal.SIGTERM)
        assert line(worker) == "ended long 0 1 True 1"
        assert line(worker) == "restored True"
        assert lines(worker, 2) == {"begun fresh", "ended fresh 1 0 False 0"}, "later work has nothing to do with it"

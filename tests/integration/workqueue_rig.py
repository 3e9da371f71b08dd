"""What the work queue tests share: every kind of address, both faces behind plain calls, and programs in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import roq
from roq import blocking
from roq.errors import WorkQueueNotFound
from roq.workqueue.prefetch import Task
from tests.integration.running import RunningCluster

ROOT = Path(__file__).parents[2]
KINDS = ("memory", "file", "log", "roq", "postgresql", "jetstream")
SHARED_BY_PROCESSES = tuple(kind for kind in KINDS if kind != "memory")
FACES = ("asynchronous", "blocking")
# What a face adds does not depend on the kind of queue behind it, nor what that does on the face: both faces where a queue is
# cheap, one on every other kind. Between the two lists every pair is there; test_workqueue_processes.py has all of them again.
EVERY_VERB = [
    *(("memory", face) for face in FACES),
    ("file", "blocking"),
    ("log", "asynchronous"),
    ("roq", "asynchronous"),
    ("postgresql", "blocking"),
    ("jetstream", "asynchronous"),
]
EVERY_WRONG_CALL = [
    *(("memory", face) for face in FACES),
    ("file", "asynchronous"),
    ("log", "blocking"),
    ("roq", "blocking"),
    ("postgresql", "asynchronous"),
    ("jetstream", "blocking"),
]
LONG = 60.0  # a lease that does not end within a test
BRIEF = 1.0  # a lease that does
COMES = 8.0  # by then something due in BRIEF has come; files count in whole seconds
CALL_SECONDS = 30.0  # bound of every call of a test


def new_address(kind: str, place: Path | str) -> str:
    """A queue nobody has opened yet; several openings of it share it. place: a folder, or where the cluster's ZooKeeper is."""
    name = f"w-{uuid.uuid4().hex[:12]}"
    return f"memory:{name}" if kind == "memory" else f"{kind}://{place}/{name}"


@contextlib.contextmanager
def removed_at_the_end(cluster: RunningCluster, address: str) -> Iterator[str]:
    """A cluster's queue, with its processes gone after the test."""
    yield address

    async def remove() -> None:
        async with roq.connect(cluster.zookeeper) as client:
            with contextlib.suppress(WorkQueueNotFound):
                await client.remove_work_queue(address.rpartition("/")[2])

    cluster.call(remove())


class _AsyncTask:
    """An asynchronous task behind plain calls."""

    def __init__(self, task: Task, call: Callable[[Any], Any]) -> None:
        self.task, self._call = task, call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.task, name)
        return _plain(value, self._call) if callable(value) else value


def _plain(method: Callable[..., Any], call: Callable[[Any], Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        def inner(value: Any) -> Any:
            if isinstance(value, list):
                return [inner(one) for one in value]
            return value.task if isinstance(value, _AsyncTask) else value

        result = call(method(*map(inner, arguments), **named))
        if isinstance(result, list):
            return [_AsyncTask(one, call) if isinstance(one, Task) else one for one in result]
        return result

    return wrapped


class _AsyncQueue:
    """An asynchronous queue behind plain calls: its verbs are called on a loop in another thread."""

    def __init__(self, queue: roq.WorkQueue, call: Callable[[Any], Any]) -> None:
        self._queue, self._call = queue, call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._queue, name)
        return _plain(value, self._call) if inspect.iscoroutinefunction(value) else value


class Faces:
    """Opens queues with one of the two faces; closes them all at the end."""

    def __init__(self, face: str, address: str) -> None:
        self.face, self.address = face, address
        self._stack = contextlib.ExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def open(self, **settings: Any) -> Any:
        """One more opening of the queue, in this process."""
        if self.face == "blocking":
            return self._stack.enter_context(blocking.open_queue(self.address, **settings))
        queue = roq.open_queue(self.address, **settings)
        self.call(queue.open())
        self._stack.callback(lambda: self.call(queue.close()))
        return _AsyncQueue(queue, self.call)

    def close(self) -> None:
        self._stack.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def program(source: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program in a process of its own; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # a line that was printed can be waited for with select
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def one(queue: Any, seconds: float = LONG, wait_seconds: float = 0.0) -> Any:
    """The only task there is to lease."""
    [task] = queue.lease(seconds, 1, wait_seconds)
    return task


def counts(queue: Any) -> tuple[int, int, int, int]:
    """Ready, delayed, leased, dead."""
    status = queue.status()
    return status.ready, status.delayed, status.leased, status.dead

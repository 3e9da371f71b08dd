"""Shuffles under faults: one after the other is made, written by several writers, sealed and read to the end, every row held
against what was written (shuffle_work.py). Needs the extra `shuffle`.

A writer whose attempt is lost, because a store died that took it, writes the partition again. Nothing is kept of a shuffle that
was removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random
from types import TracebackType

from roq.tools.chaos.edn import OperationType
from roq.tools.chaos.loads import LOOK_SECONDS, LoadContext, end_tasks
from roq.tools.chaos.schedule import LoadKind
from roq.tools.chaos.shuffle_work import ShuffleBooks, drive, read, unsealed, write
from roq.tools.chaos.verdict import LoadVerdict, decide

WRITERS, READERS = 2, 1
STOP_SECONDS = 60.0  # a call of a client has patience of its own


class ShuffleLoad:
    """See loads.ChaosLoad."""

    def __init__(self, context: LoadContext) -> None:
        self._context = context
        self.books = ShuffleBooks(lambda _: False, time.sleep, lambda *_: None, self._tell)
        self.failures: list[str] = []
        self._stop = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> ShuffleLoad:
        address = f"roq://{self._context.zookeeper}"
        programs = [("shuffle driver", drive), *((f"shuffle writer {at}", write) for at in range(WRITERS))]
        programs += [(f"shuffle reader {at}", read) for at in range(READERS)]
        for label, program in programs:
            random = Random(f"{self._context.seed} {label}")
            self._clients.append(asyncio.create_task(program(self.books, address, label, random, self._stop), name=label))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self.failures += await end_tasks(self._clients, STOP_SECONDS)
        self._clients.clear()

    def _tell(self, client: str, type: OperationType, operation: str, value: object) -> None:
        """From any thread."""
        history, now = self._context.history, time.monotonic()
        call: Callable[[], None]
        if type is OperationType.INVOKE:
            call = lambda: history.invoke(client, operation, value, now)  # noqa: E731
        else:
            call = lambda: history.complete(client, type, now, value)  # noqa: E731
        self._loop.call_soon_threadsafe(call)

    def unhealthy(self) -> list[str]:
        """None: whoever works on a shuffle tries again."""
        return []

    async def stop(self, timeout_seconds: float) -> None:
        """No more shuffles; those there are are finished."""
        self.books.ending = True

    async def drain(self, timeout_seconds: float) -> None:
        """Until all are sealed and read."""
        until = time.monotonic() + timeout_seconds
        while time.monotonic() < until and not self._is_done():
            if any(task.done() for task in self._clients):
                break  # it failed, which is told
            await asyncio.sleep(LOOK_SECONDS)
        self._stop.set()
        self.failures += await end_tasks(self._clients, STOP_SECONDS)
        self._clients.clear()

    def _is_done(self) -> bool:
        return all(job.sealed and job.read for job in self.books.living())

    def verdict(self) -> LoadVerdict:
        """See loads.ChaosLoad."""
        return shuffle_verdict(self.books)


def shuffle_verdict(books: ShuffleBooks) -> LoadVerdict:
    """Pure. When nobody works any more."""
    receipts, rows, sealed = books.counts()
    undecided = unsealed(books)
    undecided += [f"{job.name} was not read to the end in time" for job in books.living() if job.sealed and not job.read]
    if not rows:
        undecided.append("no shuffle was read")
    counts = {"shuffles sealed": sealed, "attempts written": receipts, "rows read": rows, "read wrong": len(books.wrong)}
    return decide(LoadKind.SHUFFLE, counts, books.wrong, undecided)

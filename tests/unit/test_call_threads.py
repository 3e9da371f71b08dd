"""Threads of a work queue: what is opened for somebody who does not wait any more."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from roq.errors import InvalidAddress
from roq.workqueue.batcher import CallThreads
from roq.workqueue.log_queue import LogQueue
from roq.workqueue.queue import WorkQueue

WAIT_SECONDS = 20.0


@pytest.mark.parametrize("when", ["before it is open", "once it is open"])
async def test_what_was_opened_for_who_was_cancelled_is_closed(tmp_path: Path, when: str) -> None:
    may_open, begun, made, closed = (threading.Event() for _ in range(4))

    def open_it() -> LogQueue:
        begun.set()
        assert may_open.wait(WAIT_SECONDS)
        queue = LogQueue(tmp_path / "jobs")
        made.set()
        return queue

    def close(queue: LogQueue) -> None:
        queue.close()
        closed.set()

    opening = asyncio.create_task(CallThreads().opened(open_it, close=close))
    assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
    if when == "once it is open":
        may_open.set()
        assert made.wait(WAIT_SECONDS)  # in the loop's thread: it is not told before this is cancelled
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    may_open.set()
    assert await asyncio.to_thread(closed.wait, WAIT_SECONDS)


async def test_what_cannot_be_opened_raises_and_closes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = set(threading.enumerate())
    with pytest.raises(InvalidAddress, match="file"):
        await WorkQueue(f"log://{tmp_path}/file/jobs").open()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "threads end with the opening"

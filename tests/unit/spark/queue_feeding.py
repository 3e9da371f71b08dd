"""What tests of a feed share: a queue in a folder, a frozen feed over it, its death, everything it gives."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pyspark.sql.streaming.datasource import ReadMaxRows

import roq.blocking
from roq.spark.queue_feed import LeaseFeed, Offset
from roq.spark.queue_files import ManifestPartition
from roq.spark.queue_options import queue_options
from roq.wire.task import TaskState
from roq.workqueue.contract import Backend

LIMIT = ReadMaxRows(100)
WAIT_SECONDS = 30.0


def address_in(scheme: str, folder: Path, count: int) -> str:
    address = f"{scheme}://{folder}/queue"
    with roq.blocking.open_queue(address) as queue:
        queue.put_many(b"%d" % number for number in range(count))
    return address


def feed(address: str, **options: str) -> LeaseFeed:
    made = LeaseFeed(queue_options({"address": address, "maxRowsPerBatch": "100", **options}))
    made.freeze()
    return made


def renewed(backend: Backend, count: int) -> None:
    """Wait until so many leases were all renewed, twice."""
    deadline = time.monotonic() + WAIT_SECONDS
    for _ in range(2):
        before = max(task.due for task in backend.peek(TaskState.LEASED, count))
        while len(found := backend.peek(TaskState.LEASED, count)) < count or min(task.due for task in found) <= before:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def die(dead: LeaseFeed, address: str, leases: str) -> None:
    """Let go as a killed process does: nothing is given back, the folder's lock goes; its leases hold or are over."""
    ledger = dead._ledger
    with ledger._news:
        dead._closed = ledger._closed = True
        ledger._news.notify_all()
    ledger._keeper.join()
    if dead._thread is not None:
        dead._thread.join()
    os.close(ledger._lock_file)
    dead._backend.close()
    if leases == "over":
        with roq.blocking.open_queue(address) as queue:
            queue.release_all()


def payloads(read: LeaseFeed, start: Offset, end: Offset) -> list[int]:
    parts: list[ManifestPartition] = list(read.parts(start, end))
    return [int(value.as_py()) for part in parts for batch in part.rows() for value in batch["payload"]]


def drain(read: LeaseFeed, start: Offset) -> list[int]:
    """Batch after batch, until nothing is left."""
    seen: list[int] = []
    while (end := read.plan(start, LIMIT)) != start:
        rows = payloads(read, start, end)
        assert len(rows) <= LIMIT.max_rows
        seen += rows
        start = end
    return seen


def status(address: str) -> tuple[int, int, int]:
    with roq.blocking.open_queue(address) as queue:
        now = queue.status()
        return now.ready, now.leased, now.completed

"""Where a stream's rows come from: the Feed protocol, and the feed that leases from a work queue.

A log that is read by offset range is a Feed too: `plan` looks how far it goes, `parts` cuts the interval, `done` does nothing.

LeaseFeed keeps a thread that leases ahead of Spark while Spark works on what it has: at most one batch ahead, and no more than
BATCHES_OPEN batches that are not acked yet. What it leased becomes durable manifests (queue_ledger.py); an offset
{"stream", "n"} stands for all manifests up to n. Spark asks for a plan only after it committed everything before its start, so
what is below a start is acked; the calls `commit` and `stop`, which the last batch never sees, are not needed for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from roq.errors import Closed, ManifestGone, RoqError, StorageFailed, StorageFull, TemporaryError
from roq.runtime.backoff import delays
from roq.spark.queue_crash import crash_point
from roq.spark.queue_files import ManifestPartition, parts
from roq.spark.queue_ledger import FAIL_SECONDS, Ledger
from roq.spark.queue_options import QueueOptions
from roq.wire.task import LeasedTask, Settlement
from roq.workqueue.address import open_backend
from roq.workqueue.contract import LEASE_COUNT_MAX

Offset = dict[str, str | int]  # what Spark keeps as JSON
MANIFEST_ROWS = 50_000
MANIFEST_BYTES = 16 * 1024 * 1024
MANIFEST_SECONDS = 0.2  # a manifest that does not get full is closed then
ROW_BYTES = 256 * 1024.0  # of a task, as long as none was seen
LEASE_BYTES = 1024 * 1024 * 1024  # of one trip, if all payloads were as large as they may be
AHEAD_BYTES = 256 * 1024 * 1024
BATCHES_OPEN = 4
PLAN_SECONDS = 0.1  # Spark's other calls wait while it plans
LEASE_WAIT_SECONDS = 1.0
EMPTY_SECONDS = 10.0  # a frozen feed asks again for so long while the queue has tasks and gives none
ACK_SECONDS = 60.0  # to wait for acks when a stream of what is available ends
log = logging.getLogger(__name__)


class Feed(Protocol):
    """A replayable source of rows. Offsets are opaque to who uses it; `end` is from `plan`, `start` from `plan` or `first`."""

    def first(self) -> Offset:
        """Where a stream without a checkpoint starts."""

    def plan(self, start: Offset, limit: ReadLimit) -> Offset:
        """How far one batch may go from `start`; `start` itself if there is nothing. All before `start` is done."""

    def parts(self, start: Offset, end: Offset) -> Sequence[ManifestPartition]:
        """What the tasks of a batch read: for the same interval always the same rows."""

    def done(self, end: Offset) -> None:
        """Spark has committed everything up to `end`."""

    def freeze(self) -> None:
        """From now on `plan` goes no further than what is there now."""

    def close(self) -> None:
        """Let go."""


class LeaseFeed:
    """A Feed over a work queue. On the driver, in the one process that runs the stream."""

    def __init__(self, options: QueueOptions) -> None:
        self._batch_rows, self._lease_seconds = options.batch_rows, float(options.lease_seconds)
        self._queue = options.queue
        self._news = threading.Condition()
        self._failure: RoqError | None = None
        self._closed = self._exhausted = self._asked = False
        self._budget: int | None = None  # tasks that may still be leased
        self._whole = False  # Spark asks once and wants everything in one batch
        self._empty_since, self._pauses = 0.0, delays(0.05, 1.0)  # of leases in a row that gave nothing; monotonic
        self._planned = 0  # the highest number Spark knows
        self._row_bytes = ROW_BYTES  # of the tasks leased last, on average
        self._thread: threading.Thread | None = None
        folder = options.manifests_folder()
        self._backend = open_backend(options.address, None)
        try:
            self._ledger = Ledger(folder, options.queue, self._backend, self._lease_seconds, self._fail)
            self._found = self._ledger.highest  # what may be in Spark's checkpoint though we did not name it
        except BaseException:
            self._backend.close()
            raise

    # --- what Spark asks ----------------------------------------------------------------------------------------------

    def first(self) -> Offset:
        """See Feed. What a driver leased that died before Spark wrote a checkpoint comes next."""
        return self._offset(self._ledger.committed)

    def plan(self, start: Offset, limit: ReadLimit) -> Offset:
        """See Feed. Waits for tasks for PLAN_SECONDS; a frozen feed until there are tasks, or no more. ReadAllAvailable is what
        trigger(once=True) asks for, once: everything that is ready now, in one batch."""
        number = self._number(start)
        self._ledger.commit(number)
        self._plans(number)
        if isinstance(limit, ReadAllAvailable):
            self._whole = True
            if self._budget is None:
                self.freeze()
        self._begin()
        deadline = time.monotonic() + PLAN_SECONDS
        with self._news:
            self._asked = True
            while not (self._exhausted if self._budget is not None else time.monotonic() >= deadline):
                if self._failure is not None:
                    raise self._failure
                if not self._whole and self._reach(number, limit) > number:
                    break
                self._news.wait(PLAN_SECONDS)
            end = self._reach(number, limit)
            self._asked = False
        if end == number:
            if self._exhausted and not self._ledger.wait_acked(ACK_SECONDS):
                log.warning(
                    "work queue %s: not everything is acked yet; the rest will be when this stream restarts", self._queue
                )
            if self._failure is not None:
                raise self._failure
            return start
        self._plans(end)
        crash_point("source.planned")
        return self._offset(end)

    def _plans(self, number: int) -> None:
        with self._news:
            self._planned = max(self._planned, number)
            self._news.notify_all()

    def _reach(self, number: int, limit: ReadLimit) -> int:
        """The last manifest that fits into the limit; at least one if there is any: a manifest is never divided."""
        rows = size = 0
        waiting = self._ledger.after(number)
        if isinstance(limit, ReadMinRows) and self._budget is None:
            enough = sum(manifest.file.rows for manifest in waiting) >= limit.min_rows
            return waiting[-1].number if enough and waiting else number
        for manifest in waiting:
            rows, size = rows + manifest.file.rows, size + manifest.file.size
            over = (isinstance(limit, ReadMaxRows) and rows > limit.max_rows) or (
                isinstance(limit, ReadMaxBytes) and size > limit.max_bytes
            )
            if over and manifest is not waiting[0]:
                break
            number = manifest.number
        return number

    def parts(self, start: Offset, end: Offset) -> Sequence[ManifestPartition]:
        """See Feed. Raises ManifestGone."""
        last = self._number(end)
        first = self._number(start) if start["stream"] == end["stream"] else 0
        self._ledger.commit(first)
        self._plans(last)
        crash_point("source.parts")
        return parts(self._ledger.between(first, last))

    def done(self, end: Offset) -> None:
        """See Feed."""
        self._ledger.commit(self._number(end))

    def freeze(self) -> None:
        """See Feed. Counts what is ready; of tasks put later with a higher priority, so many less of these are taken."""
        status = self._backend.status()
        self._budget = status.ready + max(status.lag, 0)  # of a group: it reads the rest of its messages as they are asked for

    def close(self) -> None:
        """See Feed. What was leased ahead goes back to the queue."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(2 * LEASE_WAIT_SECONDS)
        try:
            self._ledger.drop(max(self._planned, self._found))
        except (RoqError, OSError) as error:
            log.warning("what was leased ahead could not be given back and comes back by itself: %s", error)
        self._ledger.close()
        self._backend.close()

    def _offset(self, number: int) -> Offset:
        return {"stream": self._ledger.stream, "n": number}

    def _number(self, offset: Mapping[str, str | int]) -> int:
        if offset.get("stream") != self._ledger.stream:
            raise ManifestGone(
                f"Spark's checkpoint belongs to manifests of stream {offset.get('stream')}, but {self._ledger.folder} holds "
                f"those of {self._ledger.stream}: name the folder it was begun with, or begin with a new checkpoint"
            )
        return int(offset["n"])

    # --- the thread that leases ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="roq-lease-ahead", daemon=True)
            self._thread.start()

    def _fail(self, error: RoqError) -> None:
        with self._news:
            self._failure = error
            self._news.notify_all()

    def _run(self) -> None:
        pauses, away_since = delays(0.05, 2.0), 0.0
        try:
            while self._wait_for_room():
                try:
                    self._fill()
                    pauses, away_since = delays(0.05, 2.0), 0.0
                except (StorageFailed, StorageFull):
                    raise
                except TemporaryError as error:
                    away_since = away_since or time.monotonic()
                    if time.monotonic() > away_since + FAIL_SECONDS:
                        raise
                    log.warning("work queue %s: no tasks for now: %s", self._queue, error)
                    with self._news:
                        self._news.wait_for(lambda: self._closed, next(pauses))
        except Closed:
            pass
        except RoqError as error:
            self._fail(error)
        except Exception as error:  # the thread's boundary: the query must not wait for it in vain
            log.exception("work queue %s: the thread that leases ends", self._queue)
            self._fail(RoqError(f"leasing failed: {error!r}"))

    def _wait_for_room(self) -> bool:
        """False: there is nothing more to be done."""
        with self._news:
            while not self._closed and not self._exhausted:
                ahead = self._ledger.after(self._planned)
                rows, size = sum(one.file.rows for one in ahead), sum(one.file.size for one in ahead)
                room = rows < self._batch_rows and size < AHEAD_BYTES
                if self._whole or (room and (not ahead or self._ledger.rows() < BATCHES_OPEN * self._batch_rows)):
                    return True
                self._news.wait(PLAN_SECONDS / 2)
            return False

    def _fill(self) -> None:
        """Lease until a manifest is full, or nothing more is there, and write it."""
        tasks: list[LeasedTask[bytes]] = []
        began, last = time.monotonic(), False
        try:
            last = self._gather(tasks, began)
        finally:
            if tasks:
                crash_point("source.leased")
                self._ledger.add(tasks, began)
            with self._news:
                self._exhausted = last
                self._news.notify_all()

    def _gather(self, tasks: list[LeasedTask[bytes]], began: float) -> bool:
        """Whether there will be no more: a frozen feed has leased all it may."""
        done: list[LeasedTask[bytes]] = []
        last, size, rows_max = False, 0, min(MANIFEST_ROWS, self._batch_rows)
        while len(tasks) < rows_max and size < MANIFEST_BYTES and not self._closed:
            count = self._count(rows_max - len(tasks), MANIFEST_BYTES - size)
            if not count:
                last = True
                break
            wait = 0.0 if done or self._budget is not None else self._patience(began, LEASE_WAIT_SECONDS if not tasks else 0.0)
            acks = [Settlement.ack(task.token) for task in done]
            answers, leased, _ = self._backend.lease(self._lease_seconds, count, wait, acks)
            self._ledger.acked(done, answers)
            new, done = self._ledger.sift(leased)
            tasks += new
            size += sum(len(task.payload) for task in new)
            self._row_bytes = size / len(tasks) if tasks else ROW_BYTES
            if self._budget is not None:
                self._budget -= len(leased)
            if not leased:
                last = self._budget is not None and not tasks and self._no_more()
                break
            self._empty_since = 0.0
            if time.monotonic() > began + MANIFEST_SECONDS and len(leased) < count:
                break
        if done:
            self._ledger.acked(done, self._backend.settle([Settlement.ack(task.token) for task in done]))
        return last

    def _no_more(self) -> bool:
        """Of a frozen feed that was given nothing. The queue may have tasks all the same: a race was lost, a file was busy, a
        payload could not be read and is delayed for a moment. Then this waits a little, and not for ever."""
        status, now = self._backend.status(), time.monotonic()
        if not status.ready and not status.delayed and status.lag <= 0:
            log.info("%d of the tasks that were ready are taken by others: %s", self._budget, status)
            return True
        if not self._empty_since:
            self._empty_since, self._pauses = now, delays(0.05, 1.0)
        if now > self._empty_since + EMPTY_SECONDS:
            log.warning("%d of the tasks that were ready could not be leased and are left: %s", self._budget, status)
            return True
        with self._news:
            self._news.wait_for(lambda: self._closed, next(self._pauses))
        return False

    def _patience(self, began: float, least: float) -> float:
        """How long to wait for more: while Spark works on something else, one manifest is better than many."""
        return least if self._asked else max(least, began + MANIFEST_SECONDS - time.monotonic())

    def _count(self, rows: int, size: int) -> int:
        """How many to lease at once, so that a manifest stays near its size."""
        most = LEASE_BYTES // max(1, self._backend.settings.payload_bytes_max)
        count = min(rows, LEASE_COUNT_MAX, max(1, int(size / max(self._row_bytes, 1.0))), max(1, most))
        return count if self._budget is None else min(count, self._budget)

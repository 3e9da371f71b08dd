"""Writing a DataFrame to a queue: tasks stage their rows, the driver's commit publishes them, each batch of a query once.

    {staging}/{job}/done.json                  the highest batch that is published
    {staging}/{job}/{batch}/{partition}-{attempt}-{k}.….arrow
    {staging}/{job}/{batch}/plan.json          the files that count, in order, and when that was decided

A job is a streaming query (its id lives as long as its checkpoint), or one save. Which files count is decided once, durably,
before the first row is public. A batch that Spark runs again stages again, perhaps in another order; once there is a plan,
the plan's files are what is published, and the new ones are litter. Row k of the plan has number (batch << 32) + k + 1 for
ever, which is how a queue knows what it has (queue_outlets.py).

Spark builds a writer anew for planning, for each commit and each abort, so all a writer knows is its options; which query and
batch a task works for stands in Spark's local properties, and travels to the commit in the task's message.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from roq.errors import DataLost, PayloadTooLarge, RoqError
from roq.ids import check_name
from roq.spark.errors import option_error, spark_errors
from roq.spark.queue_crash import crash_point
from roq.spark.queue_files import ArrowFile, Values, create_note, read_arrow, write_arrow, write_note
from roq.spark.queue_options import QueueOptions
from roq.spark.queue_outlets import SAVE, Outlet, check_columns, largest_payload, opened, staged, staged_schema

FILE_BYTES = 64 * 1024 * 1024  # of staged rows, before another file is begun: bounds a task's memory
LITTER_SECONDS = 86_400.0  # what was staged by batches that never came to a plan, or by a save that nobody will repeat
DONE_KEEP_SECONDS = 90 * 86_400.0  # a query that rests for longer loses its notes here; its queue's memory is shorter
QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"  # Spark's names; a test pins them
NUMBER_SHIFT = 32  # rows of one batch
log = logging.getLogger(__name__)


class BatchPlan(msgspec.Struct, frozen=True):
    """The files of a batch that count. decided: Unix milliseconds. largest: bytes of their largest payload; 0: not known."""

    files: list[Values]
    decided: int
    largest: int = 0


class HighestPublished(msgspec.Struct, frozen=True):
    """The highest batch that is published."""

    batch: int


def stage(folder: Path, stem: str, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> list[ArrowFile]:
    """In a task: rows into files, durable on return."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[ArrowFile] = []
    kept: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        kept.append(batch)
        size += batch.nbytes
        if size >= FILE_BYTES:
            files.append(write_arrow(folder, f"{stem}-{len(files)}", kept, schema))
            kept, size = [], 0
    if kept:
        files.append(write_arrow(folder, f"{stem}-{len(files)}", kept, schema))
    return files


class Publication:
    """Of one batch of one job."""

    def __init__(self, staging: Path, job: str, batch: int) -> None:
        self.job = job
        self._staging, self._job, self._batch = staging, staging / job, batch
        self.folder = self._job / str(batch)

    @property
    def done(self) -> bool:
        """Whether it is published."""
        try:
            return msgspec.json.decode((self._job / "done.json").read_bytes(), type=HighestPublished).batch >= self._batch
        except FileNotFoundError:
            return False

    @property
    def planned(self) -> bool:
        """Whether it is decided which files count: some of their rows may be public."""
        return (self.folder / "plan.json").exists()

    def decide(self, files: Sequence[ArrowFile], largest: int = 0) -> tuple[BatchPlan, bool]:
        """The plan there is, or one with these files; whether it is a new one."""
        path = self.folder / "plan.json"
        plan = BatchPlan([file.values() for file in files], time.time_ns() // 1_000_000, largest)
        if not (new := create_note(path, plan)):
            plan = msgspec.json.decode(path.read_bytes(), type=BatchPlan)
        crash_point("sink.planned")
        return plan, new

    def undecide(self) -> None:
        """A new plan can't be carried out, and none of its rows is public: if the batch comes again, other files may count."""
        (self.folder / "plan.json").unlink(missing_ok=True)

    def publish(self, plan: BatchPlan, outlet: Outlet) -> None:
        """All rows of the plan, those that are public already not again. Raises DataLost if staged rows are gone."""
        number = (self._batch << NUMBER_SHIFT) + 1
        for place, values in enumerate(plan.files):
            for batch in _checked(ArrowFile(*values)):
                outlet.publish(number, batch)
                number += batch.num_rows
            if place == 0:
                crash_point("sink.half")
        outlet.flush()
        crash_point("sink.published")

    def note(self) -> None:
        """It is published."""
        write_note(self._job / "done.json", HighestPublished(self._batch))
        crash_point("sink.noted")

    def clear(self) -> None:
        """Its staged rows go."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self) -> None:
        """Nobody will ask for this job again."""
        shutil.rmtree(self._job, ignore_errors=True)

    def abandon(self, files: Iterable[ArrowFile]) -> None:
        """Remove these staged files, unless they are, or may be, published; and folders that are empty then."""
        if not self.done and not self.planned:
            for file in files:
                Path(file.path).unlink(missing_ok=True)
            with suppress(OSError):  # a task that does not know yet is still at it
                self.folder.rmdir()
                self._job.rmdir()

    def sweep(self) -> None:
        """Remove what others left here long ago: whole jobs that nobody touched, and what never came to a plan."""
        now = time.time()
        for job in _folders(self._staging):
            batches = _folders(job)
            touched = max(
                (at for path in (job, job / "done.json", *batches) if (at := _changed(path)) is not None), default=now
            )
            if touched < now - (LITTER_SECONDS if job.name.startswith(SAVE) else DONE_KEEP_SECONDS):
                shutil.rmtree(job, ignore_errors=True)
                continue
            for folder in batches:
                at = _changed(folder)
                if at is not None and at < now - LITTER_SECONDS and not (folder / "plan.json").exists():
                    shutil.rmtree(folder, ignore_errors=True)


def _checked(file: ArrowFile) -> Iterator[pa.RecordBatch]:
    try:
        yield from read_arrow(file)
    except DataLost as error:
        raise DataLost(f"staged rows that were to be published are gone: {error}") from error


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _changed(path: Path) -> float | None:
    """Unix seconds; None if there is no such path."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver. files: ArrowFile in plain values. largest: bytes of the largest payload."""

    job: str
    partition: int
    files: tuple[Values, ...]
    largest: int


@dataclass(frozen=True)
class _Writer:
    options: QueueOptions
    columns: tuple[str, ...]
    job: str  # of a save

    def stage(self, iterator: Iterator[pa.RecordBatch], job: str, batch: int, task: TaskContext) -> Staged:
        """In a task: one attempt at one partition."""
        schema, largest = staged_schema(list(self.columns)), 0

        def checked() -> Iterator[pa.RecordBatch]:
            nonlocal largest
            for rows in iterator:
                if rows.num_rows:
                    made = staged(rows, schema)
                    largest = max(largest, largest_payload(made))
                    yield made

        with spark_errors(address=self.options.address):
            folder = Publication(self.options.staging_folder(), job, batch).folder
            files = stage(folder, f"{task.partitionId()}-{task.taskAttemptId()}", checked(), schema)
        crash_point("sink.staged")
        return Staged(job, task.partitionId(), tuple(file.values() for file in files), largest)

    def publish(self, messages: Sequence[WriterCommitMessage | None], batch: int, *, once: bool) -> None:
        """On the driver. once: the same batch may come again, and its note is kept. A batch that has no rows this time is
        published too if it had some when it was planned: a part of them may be public."""
        done = sorted((m for m in messages if isinstance(m, Staged)), key=lambda message: message.partition)
        if not done:
            return
        files = _files(done)
        with spark_errors(address=self.options.address):
            publication = Publication(self.options.staging_folder(), done[0].job, batch)
            if not publication.done and (files or publication.planned):
                plan, new = publication.decide(files, max(message.largest for message in done))
                try:
                    target = opened(self.options, done[0].job, plan.decided, plan.largest, publication.folder)
                except PayloadTooLarge:  # nothing is published; a stream may leave the row out next time
                    if new:
                        publication.undecide()
                    raise
                with target as outlet:
                    publication.publish(plan, outlet)
                    publication.note()
                    outlet.end()
            publication.clear() if once else publication.forget()
            publication.sweep()

    def abandon(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        """On the driver, perhaps after a commit that did its work and failed then."""
        staged = [m for m in messages if isinstance(m, Staged)]
        try:
            if staged:
                Publication(self.options.staging_folder(), staged[0].job, batch).abandon(_files(staged))
        except (RoqError, OSError) as error:  # Spark shows why the batch failed, not what its abort says
            log.warning("what a failed batch staged could not be removed: %s", error)


class QueueBatchWriter(_Writer, DataSourceArrowWriter):
    """Of one save: all rows or none are published, and once if it has a .option("publication", name)."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """In a task."""
        return self.stage(iterator, self.job, 0, _task())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: publish."""
        self.publish(messages, 0, once=bool(self.options.publication))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver."""
        self.abandon(messages, 0)


class QueueStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Of a streaming query: each batch is published once, however often Spark runs it."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """In a task."""
        task = _task()
        query, batch = task.getLocalProperty(QUERY_PROPERTY), task.getLocalProperty(BATCH_PROPERTY)
        if not query or not batch:
            raise RuntimeError(f"Spark does not say which query's batch this is ({QUERY_PROPERTY}, {BATCH_PROPERTY})")
        return self.stage(iterator, query, int(batch), task)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver: publish."""
        self.publish(messages, batchId, once=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver."""
        self.abandon(messages, batchId)


W = TypeVar("W", QueueBatchWriter, QueueStreamWriter)


def writer_of(kind: type[W], options: QueueOptions, schema: StructType, overwrite: bool) -> W:
    """A writer, after a look at the columns. Raises errors in Spark's style."""
    if overwrite:
        raise option_error("mode", 'a queue can be added to only: .mode("append"), or outputMode("append" or "update")')
    with spark_errors(address=options.address):
        check_columns(schema, options.kind)
        named = f"publication-{check_name(options.publication, 'publication')}" if options.publication else ""
    options.staging_folder()
    options.make_folder()
    return kind(options, tuple(schema.names), named or f"{SAVE}{uuid4().hex}")


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise RuntimeError("this runs in a Spark task")
    return task


def _files(messages: Iterable[Staged]) -> list[ArrowFile]:
    return [ArrowFile(*values) for message in messages for values in message.files]

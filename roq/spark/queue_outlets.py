"""The columns a queue is written from, and where published rows go. Columns are checked when the write is planned, and row by
row in the tasks:

payload        binary or string; required, never null
priority       whole number, -128 to 127; null: 0                        work queues only
delay_seconds  number, at least 0; null: 0                               work queues only
dedup_key      string, at most 256 bytes; null: none                     work queues only
topic          string, 1 to 255 bytes; required, never null              publish/subscribe queues only

A row's number says whether the queue has it already:

log:, roq:    the queue's own memory of its producers (records.py): a Spark job is a producer that lasts
file:         task files are prepared, then renamed into the queue: what is not there any more is published
recorded      with confirm "stored" a job is a producer of the queue: what is stored is not published again
queues        other publish/subscribe queues keep nothing: rows published before a crash are published again
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

import roq.blocking
from roq.errors import InvalidConfiguration, InvalidTopic, PayloadTooLarge, SchemaMismatch
from roq.pubsub.publisher import STORED
from roq.spark.queue_files import create_note
from roq.spark.queue_options import SPARK_FOLDER, QueueOptions, TargetKind
from roq.wire.headers import PRIORITIES, with_headers
from roq.wire.task import SECONDS_MAX, NewTask
from roq.workqueue.address import open_backend
from roq.workqueue.contract import DEDUP_KEY_BYTES_MAX, PUT_COUNT_MAX, Backend
from roq.workqueue.file_queue.publication import FilePublication
from roq.workqueue.records import lasting

_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_NUMBER = (*_WHOLE, FloatType, DoubleType, DecimalType)
_ALLOWED: dict[str, tuple[type[DataType], ...]] = {
    "payload": (BinaryType, StringType),
    "priority": _WHOLE,
    "delay_seconds": _NUMBER,
    "dedup_key": (StringType,),
    "topic": (StringType,),
}
_COLUMNS = {
    TargetKind.WORK_QUEUE: ("payload", "priority", "delay_seconds", "dedup_key"),
    TargetKind.QUEUE: ("payload", "topic"),
}
_REQUIRED = {TargetKind.WORK_QUEUE: ("payload",), TargetKind.QUEUE: ("payload", "topic")}
_TYPES = {
    "payload": pa.binary(),
    "priority": pa.int64(),
    "delay_seconds": pa.float64(),
    "dedup_key": pa.string(),
    "topic": pa.string(),
}
TOPIC_BYTES_MAX = 255
SAVE = "save-"  # how the jobs begin that nobody will repeat
JOB_CHARACTERS_MAX = 90  # of its name within a producer's
PUT_BYTES = 4 * 1024 * 1024  # of payloads put at once


def check_columns(schema: StructType, kind: TargetKind) -> None:
    """Raises SchemaMismatch for a column that is missing, unknown, twice there, or of another type."""
    allowed, names = _COLUMNS[kind], schema.names
    for name in _REQUIRED[kind]:
        if name not in names:
            raise SchemaMismatch(
                f"a {kind.replace('-', ' ')} is written from a column {name!r}; there are {', '.join(names) or 'none'}"
            )
    for field in schema.fields:
        if field.name not in allowed or names.count(field.name) > 1:
            raise SchemaMismatch(
                f"column {field.name!r} has no meaning for a {kind.replace('-', ' ')}, which takes {', '.join(allowed)}: "
                "select the columns to write"
            )
        if not isinstance(field.dataType, _ALLOWED[field.name]):
            wanted = " or ".join(kind().simpleString() for kind in _ALLOWED[field.name])
            raise SchemaMismatch(f"column {field.name!r} is {field.dataType.simpleString()}, not {wanted}")


def staged_schema(names: list[str]) -> pa.Schema:
    """Of staged rows of these columns."""
    return pa.schema([(name, _TYPES[name]) for name in _TYPES if name in names])


def staged(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of Spark's as it is staged. Raises SchemaMismatch, InvalidConfiguration, InvalidTopic for values."""
    arrays = []
    for field in schema:
        try:
            array = batch.column(field.name).cast(field.type)
        except pa.ArrowInvalid as error:
            raise SchemaMismatch(f"column {field.name!r} does not fit: {error}") from error
        _CHECKS[field.name](array)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _no_nulls(array: pa.Array, name: str) -> None:
    if array.null_count:
        raise SchemaMismatch(f"column {name!r} is null in {array.null_count} rows")


def _outside(array: pa.Array, least: float, most: float) -> bool:
    found = pc.min_max(array)
    low, high = found["min"].as_py(), found["max"].as_py()
    return low is not None and not (least <= low and high <= most)


def _check_payload(array: pa.Array) -> None:
    _no_nulls(array, "payload")


def _check_priority(array: pa.Array) -> None:
    if _outside(array, PRIORITIES[0], PRIORITIES[-1]):
        raise InvalidConfiguration(f"a priority is {PRIORITIES[0]} to {PRIORITIES[-1]}; a row has another")


def _check_delay(array: pa.Array) -> None:
    if pc.any(pc.is_nan(array)).as_py() or _outside(array, 0, SECONDS_MAX):
        raise InvalidConfiguration(f"delay_seconds is 0 to {SECONDS_MAX:.0f}; a row has another")


def _check_dedup_key(array: pa.Array) -> None:
    if _outside(pc.binary_length(array), 0, DEDUP_KEY_BYTES_MAX):
        raise InvalidConfiguration(f"a dedup_key has at most {DEDUP_KEY_BYTES_MAX} bytes; a row has a longer one")


def _check_topic(array: pa.Array) -> None:
    _no_nulls(array, "topic")
    if _outside(pc.binary_length(array), 1, TOPIC_BYTES_MAX) or pc.any(pc.match_substring(array, "\0")).as_py():
        raise InvalidTopic()


_CHECKS = {
    "payload": _check_payload,
    "priority": _check_priority,
    "delay_seconds": _check_delay,
    "dedup_key": _check_dedup_key,
    "topic": _check_topic,
}


def largest_payload(batch: pa.RecordBatch) -> int:
    """Bytes."""
    return pc.max(pc.binary_length(batch.column("payload"))).as_py() or 0


def tasks(batch: pa.RecordBatch) -> list[NewTask]:
    """Staged rows as tasks."""
    payloads = batch.column("payload").to_pylist()
    names = batch.schema.names
    if names == ["payload"]:
        return [NewTask(with_headers(payload, None)) for payload in payloads]
    count = len(payloads)
    delays = batch.column("delay_seconds").to_pylist() if "delay_seconds" in names else [0.0] * count
    priorities = batch.column("priority").to_pylist() if "priority" in names else [0] * count
    keys = batch.column("dedup_key").to_pylist() if "dedup_key" in names else [""] * count
    return [
        NewTask(with_headers(payload, None), delay or 0.0, priority or 0, key or "")
        for payload, delay, priority, key in zip(payloads, delays, priorities, keys, strict=True)
    ]


def messages(batch: pa.RecordBatch) -> Iterator[tuple[str, list[bytes]]]:
    """Staged rows as (topic, payloads), neighbours of one topic together."""
    topics, payloads = batch.column("topic").to_pylist(), batch.column("payload").to_pylist()
    start = 0
    for end in range(1, len(topics) + 1):
        if end == len(topics) or topics[end] != topics[start]:
            yield topics[start], payloads[start:end]
            start = end


class Outlet(Protocol):
    """An open queue to publish to."""

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """Rows with the numbers from `number` on."""

    def flush(self) -> None:
        """Return when all that was published is as durable as the queue makes it."""

    def end(self) -> None:
        """Everything is published and noted: none of it will be repeated."""

    def close(self) -> None:
        """Let go."""


class NumberedBackend(Backend, Protocol):
    """A backend whose puts can be repeated."""

    def put_numbered(self, producer: int, first: int, tasks: Sequence[NewTask]) -> None:
        """Store tasks as number first, first + 1, … of this producer; a number it has stored before is not stored again."""


class NumberedOutlet:
    """A work queue that remembers the numbers of its producers."""

    def __init__(self, address: str, job: str, largest: int) -> None:
        producer = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8]) or 1
        self._producer = producer if job.startswith(SAVE) else lasting(producer)
        self._backend = cast(NumberedBackend, open_backend(address, None))
        _check_size(self._backend, largest)

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        for part in _parts(batch):
            self._backend.put_numbered(self._producer, number, tasks(part))
            number += part.num_rows

    def flush(self) -> None:
        """See Outlet."""

    def end(self) -> None:
        """See Outlet."""

    def close(self) -> None:
        """See Outlet."""
        self._backend.close()


class FileOutlet:
    """A file: work queue. decided: Unix milliseconds when the plan was made: the time of insertion in the tasks' ids."""

    def __init__(self, options: QueueOptions, job: str, decided: int, largest: int) -> None:
        backend = open_backend(options.address, None)  # which counts what a killed driver had put, before the rest of it is
        backend.close()
        _check_size(backend, largest)
        work, trusted = f"{SPARK_FOLDER}/publishing/{job}", options.place.options.trust_functions is True
        self._publication = FilePublication(options.place.path, work, job, decided, trust_functions=trusted)

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        for part in _parts(batch):
            self._publication.put(number, tasks(part))
            number += part.num_rows

    def flush(self) -> None:
        """See Outlet."""

    def end(self) -> None:
        """See Outlet."""
        self._publication.end()

    def close(self) -> None:
        """See Outlet."""
        self._publication.close()


class BegunBehind(msgspec.Struct, frozen=True):
    """number: of the job's producer before the first row of a batch was published."""

    number: int


class TopicOutlet:
    """A publish/subscribe queue. Raises PayloadTooLarge when made, if `largest` is."""

    def __init__(self, options: QueueOptions, largest: int, producer: str | None = None) -> None:
        self._cluster = roq.blocking.connect(options.place.zookeeper)
        self._cluster.__enter__()
        try:
            self._publisher = self._cluster.publisher(options.place.path, confirm=options.confirm, producer=producer)
            self._publisher.__enter__()
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise
        if largest > (limit := self._publisher.payload_bytes_max):
            self.close()
            raise PayloadTooLarge(f"a payload has at most {limit} bytes in this queue, and a row has {largest}")

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        for topic, payloads in messages(batch):
            self._publisher.publish_many(topic, payloads)

    def flush(self) -> None:
        """See Outlet: it has passed the Exchanges, or is stored."""
        self._publisher.flush()

    def end(self) -> None:
        """See Outlet."""

    def close(self) -> None:
        """See Outlet."""
        try:
            self._publisher.__exit__(None, None, None)
        finally:
            self._cluster.__exit__(None, None, None)


class RecordedOutlet(TopicOutlet):
    """A recorded queue of which the job is a producer, over all its batches. folder: of the batch, whose plan has the same rows
    in the same order whenever it is carried out."""

    def __init__(self, options: QueueOptions, job: str, largest: int, folder: Path) -> None:
        super().__init__(options, largest, f"spark-{job}" if len(job) <= JOB_CHARACTERS_MAX else _digest(job))
        try:
            begun, path = BegunBehind(self._publisher.number), folder / "begun.json"
            if not create_note(path, begun):  # by a driver that was killed
                begun = msgspec.json.decode(path.read_bytes(), type=BegunBehind)
        except BaseException:
            self.close()
            raise
        self._stored = max(0, self._publisher.number - begun.number)  # rows, the first ones, that need not be published again

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        skipped = min(self._stored, batch.num_rows)
        self._stored -= skipped
        if skipped < batch.num_rows:
            super().publish(number + skipped, batch.slice(skipped))


def _digest(job: str) -> str:
    return f"spark-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


class opened:  # noqa: N801  a context manager, as contextlib.closing
    """The outlet of these options, for a `with`. largest: bytes of the largest payload, checked before any is published.
    folder: of the batch."""

    def __init__(self, options: QueueOptions, job: str, decided: int, largest: int, folder: Path) -> None:
        if options.kind is TargetKind.QUEUE and options.confirm == STORED and not job.startswith(SAVE):
            self._outlet: Outlet = RecordedOutlet(options, job, largest, folder)
        elif options.kind is TargetKind.QUEUE:
            self._outlet = TopicOutlet(options, largest)
        elif options.place.scheme == "file":
            self._outlet = FileOutlet(options, job, decided, largest)
        else:
            self._outlet = NumberedOutlet(options.address, job, largest)

    def __enter__(self) -> Outlet:
        return self._outlet

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._outlet.close()


def _check_size(backend: Backend, largest: int) -> None:
    if largest > (limit := backend.settings.payload_bytes_max):
        backend.close()
        raise PayloadTooLarge(f"a payload has at most {limit} bytes in this work queue, and a row has {largest}")


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows as they can be put at once, cut alike whenever the same rows come again."""
    size = pc.sum(pc.binary_length(batch.column("payload"))).as_py() or 0
    step = max(1, min(PUT_COUNT_MAX, int(PUT_BYTES / max(1.0, size / max(1, batch.num_rows)))))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)

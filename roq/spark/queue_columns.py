"""The columns a queue is written from: checked when the write is planned, and row by row in the tasks.

payload        binary or string; required, never null
priority       whole number, -128 to 127; null: 0                        work queues only
delay_seconds  number, at least 0; null: 0                               work queues only
dedup_key      string, at most 256 bytes; null: none                     work queues only
topic          string, 1 to 255 bytes; required, never null              publish/subscribe queues only
"""

from __future__ import annotations

from collections.abc import Iterator

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

from roq.errors import InvalidConfiguration, InvalidTopic, SchemaMismatch
from roq.spark.queue_options import TargetKind
from roq.workqueue.contract import DEDUP_KEY_BYTES_MAX, PRIORITIES, NewTask
from roq.workqueue.desk import SECONDS_MAX

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
        return [NewTask(payload) for payload in payloads]
    count = len(payloads)
    delays = batch.column("delay_seconds").to_pylist() if "delay_seconds" in names else [0.0] * count
    priorities = batch.column("priority").to_pylist() if "priority" in names else [0] * count
    keys = batch.column("dedup_key").to_pylist() if "dedup_key" in names else [""] * count
    return [
        NewTask(payload, delay or 0.0, priority or 0, key or "")
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

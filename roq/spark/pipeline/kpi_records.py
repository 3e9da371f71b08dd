"""KPI records as rows: their schema, lines of JSON to rows, rows back to records. Runs in Spark's tasks.

A row is a record as it is, with `day` and `at` (its time in UTC) added. Ids of publishers and subscribers are unsigned 64-bit
numbers, which Spark does not have: they are 16 hexadecimal digits, as `roq status` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from roq.errors import FrameError
from roq.pubsub.scaling.what_if import what_if
from roq.spark.schema import arrow_schema
from roq.wire.kpi import PublisherKpi, QueueKpi, SubscriberKpi, from_json_line
from roq.wire.policy import Policy

PLAIN: dict[type, DataType] = {str: StringType(), int: LongType(), float: DoubleType(), bool: BooleanType()}
HEXADECIMAL = (PublisherKpi, SubscriberKpi)  # their `id`
ROWS_MAX = 512  # of one Arrow batch: a record of a large queue has thousands of members
TIME_MAX = 253_402_300_799.0  # the last second of the year 9999


def struct_type(kind: type[msgspec.Struct]) -> StructType:
    """The Spark type of a Struct of plain fields, such Structs, and tuples of them."""
    fields = []
    for name, hint in get_type_hints(kind).items():
        if name == "id" and kind in HEXADECIMAL:
            fields.append(StructField(name, StringType()))
        elif get_origin(hint) is tuple:
            fields.append(StructField(name, ArrayType(struct_type(get_args(hint)[0]))))
        elif issubclass(hint, msgspec.Struct):
            fields.append(StructField(name, struct_type(hint)))
        else:
            fields.append(StructField(name, PLAIN[hint]))
    return StructType(fields)


RECORD = struct_type(QueueKpi)
HISTORY = StructType([StructField("day", DateType()), StructField("at", TimestampType()), *RECORD.fields])
READ = StructType([*HISTORY.fields, StructField("unreadable", StringType())])  # the reason, for a line that is no record
COURSE = StructType(
    [
        StructField("queue", StringType()),
        StructField("time", DoubleType()),
        StructField("exchanges", IntegerType()),
        StructField("busiest_exchange", DoubleType()),  # messages per second
        StructField("over", BooleanType()),
        StructField("recorded_over", BooleanType()),
        StructField("decisions", ArrayType(StringType())),  # "action: cause"
    ]
)


def row_of(kpi: QueueKpi) -> dict[str, Any]:
    """The row of a record."""
    row: dict[str, Any] = msgspec.to_builtins(kpi)
    for members in ("publishers", "subscribers"):
        for member in row[members]:
            member["id"] = f"{member['id']:016x}"
    at = datetime.fromtimestamp(kpi.time, UTC)
    return row | {"at": at, "day": at.date()}


def record_of(row: dict[str, Any]) -> QueueKpi:
    """The record of a row; columns that are no part of it are ignored, what an older history does not have has its default."""
    values = {name: row[name] for name in RECORD.names if row.get(name) is not None}
    for members in ("publishers", "subscribers"):
        values[members] = [member | {"id": int(member["id"], 16)} for member in values[members]]
    return msgspec.convert(values, QueueKpi)


def read_lines(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: lines (column `value`) to rows of READ. What is no record becomes a row with the reason only."""
    for batch in batches:
        rows = [_row_of_line(line) for line in batch.column("value").to_pylist() if line and line.strip()]
        for start in range(0, len(rows), ROWS_MAX):
            yield _batch(rows[start : start + ROWS_MAX], READ_ARROW)


def _row_of_line(line: str) -> dict[str, Any]:
    try:
        kpi = from_json_line(line)
    except FrameError as error:
        return {"unreadable": f"{error}: {line[:80]}"}
    if not 0 <= kpi.time <= TIME_MAX:
        return {"unreadable": f"not a time: {kpi.time:g}"}
    return row_of(kpi)


def run_courses(batches: Iterable[pa.RecordBatch], policy: Policy) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: rows of HISTORY in order of queue and time to rows of COURSE under `policy`."""
    records = (record_of(row) for batch in batches for row in batch.to_pylist())
    rows: list[dict[str, Any]] = []
    for _, records_of_queue in groupby(records, key=lambda kpi: kpi.queue):
        for step in what_if(records_of_queue, policy):
            kpi = step.kpi
            rows.append(
                {
                    "queue": kpi.queue,
                    "time": kpi.time,
                    "exchanges": len(kpi.exchanges),
                    "busiest_exchange": max((each.messages_per_second for each in kpi.exchanges), default=0.0),
                    "over": step.over,
                    "recorded_over": step.recorded_over,
                    "decisions": [f"{each.action}: {each.cause}" for each in step.decisions],
                }
            )
            if len(rows) == ROWS_MAX:
                yield _batch(rows, COURSE_ARROW)
                rows = []
    if rows:
        yield _batch(rows, COURSE_ARROW)


READ_ARROW, COURSE_ARROW = arrow_schema(READ), arrow_schema(COURSE)


def _batch(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=schema)

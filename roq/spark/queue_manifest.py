"""A manifest: what one stretch of leasing gave, rows and leases, in one immutable file. Offsets of a stream name manifests.

Spark's rows are all but the last column; the token is the right to ack. A replay reads the file and never the queue, so it
gives the same rows, whatever became of the leases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType, TimestampType

from roq.errors import DataLost, ManifestGone
from roq.spark.queue_files import ArrowFile, column, listed, read_arrow, write_arrow
from roq.workqueue.contract import Leased, TaskView

SCHEMA = StructType([
    StructField("id", StringType()),
    StructField("payload", BinaryType()),
    StructField("attempt", IntegerType()),
    StructField("priority", IntegerType()),
    StructField("inserted", TimestampType()),
])  # fmt: skip
VIEW_SCHEMA = StructType([
    *SCHEMA.fields,
    StructField("state", StringType()),
    StructField("due", TimestampType()),
    StructField("error", StringType()),
    StructField("holder", StringType()),
])  # fmt: skip
_TIME = pa.timestamp("us", tz="UTC")
_FIELDS = [
    ("id", pa.string()),
    ("payload", pa.binary()),
    ("attempt", pa.int32()),
    ("priority", pa.int32()),
    ("inserted", _TIME),
]
ARROW = pa.schema(_FIELDS)
ARROW_VIEW = pa.schema([*_FIELDS, ("state", pa.string()), ("due", _TIME), ("error", pa.string()), ("holder", pa.string())])
_ARROW_KEPT = pa.schema([*_FIELDS, ("token", pa.string())])
PART_ROWS = 25_000  # below this, and PART_BYTES, manifests share a Spark task
PART_BYTES = 8 * 1024 * 1024


class Manifest(NamedTuple):
    """The manifest of a number, and its file."""

    number: int
    file: ArrowFile

    def ids(self) -> list[str]:
        """Of its tasks, in the order of the rows. Raises ManifestGone."""
        return _gone(self, "id")

    def tokens(self) -> list[str]:
        """The leases as they were when it was written. Raises ManifestGone."""
        return _gone(self, "token")


def _gone(manifest: Manifest, name: str) -> list[str]:
    try:
        return column(manifest.file, name)
    except DataLost as error:
        raise ManifestGone(str(error)) from error


class ManifestPartition(InputPartition):
    """What one Spark task reads: some manifests. Plain values."""

    def __init__(self, files: Sequence[ArrowFile]) -> None:
        self.files = [file.values() for file in files]

    def rows(self) -> Iterator[pa.RecordBatch]:
        """In a task. Raises ManifestGone."""
        for values in self.files:
            try:
                yield from read_arrow(ArrowFile(*values), ARROW.names)
            except DataLost as error:
                raise ManifestGone(f"rows that Spark's checkpoint names can't be read again: {error}") from error


def manifests(folder: Path) -> dict[int, Manifest]:
    """All in a folder, by number, ascending."""
    return {int(file.stem): Manifest(int(file.stem), file) for file in listed(folder) if file.stem.isdigit()}


def write(folder: Path, number: int, tasks: Sequence[Leased]) -> Manifest:
    """A new manifest, durable on return."""
    arrays = [
        pa.array([task.id for task in tasks], pa.string()),
        pa.array([task.payload for task in tasks], pa.binary()),
        pa.array([task.attempt for task in tasks], pa.int32()),
        pa.array([task.priority for task in tasks], pa.int32()),
        _times([task.inserted for task in tasks]),
        pa.array([task.token for task in tasks], pa.string()),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=_ARROW_KEPT)
    return Manifest(number, write_arrow(folder, f"{number:012d}", [batch], _ARROW_KEPT))


def _times(seconds: Sequence[float | None]) -> pa.Array:
    """Unix seconds as Spark's timestamps."""
    return pc.round(pc.multiply(pa.array(seconds, pa.float64()), 1e6)).cast(pa.int64()).cast(_TIME)


def parts(chosen: Sequence[Manifest]) -> list[ManifestPartition]:
    """Manifests as Spark tasks: in order, small ones together."""
    groups: list[list[ArrowFile]] = []
    rows = size = 0
    for manifest in chosen:
        file = manifest.file
        if not groups or rows + file.rows > PART_ROWS or size + file.size > PART_BYTES:
            groups.append([])
            rows = size = 0
        groups[-1].append(file)
        rows, size = rows + file.rows, size + file.size
    return [ManifestPartition(group) for group in groups]


def views(seen: Sequence[TaskView]) -> pa.RecordBatch:
    """Tasks as a batch reader shows them."""
    arrays = [
        pa.array([task.id for task in seen], pa.string()),
        pa.array([task.payload for task in seen], pa.binary()),
        pa.array([task.attempts for task in seen], pa.int32()),
        pa.array([task.priority for task in seen], pa.int32()),
        _times([task.inserted for task in seen]),
        pa.array([str(task.state) for task in seen], pa.string()),
        _times([task.due or None for task in seen]),
        pa.array([task.error for task in seen], pa.string()),
        pa.array([task.holder for task in seen], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_VIEW)

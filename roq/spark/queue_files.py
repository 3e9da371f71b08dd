"""Files that are complete and durable, or not there: Arrow files with a checksum in their names, small notes in JSON.

    {stem}.{rows}.{bytes}.{crc32}.arrow        {stem} is the caller's: a manifest's number, a task's attempt

The name is given when the content is on stable storage, and says what the content must be, so a listing of the folder is all
the index there is.

A manifest is such a file: what one stretch of leasing gave, rows and leases. Offsets of a stream name manifests. Spark's rows
are all but the last column; the token is the right to ack. A replay reads the file and never the queue, so it gives the same
rows, whatever became of the leases. Not covered: what staged rows mean (queue_write.py).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType, TimestampType

from roq.errors import DataLost, ManifestGone
from roq.ids import new_id
from roq.runtime.files import DISK, storage_errors
from roq.wire.headers import split_headers
from roq.wire.task import LeasedTask, TaskView

CHUNK_ROWS = 16_384  # of one record batch
_NAME = re.compile(r"(?P<stem>[0-9A-Za-z_-]+)\.(?P<rows>\d+)\.(?P<size>\d+)\.(?P<crc>[0-9a-f]{8})\.arrow", re.ASCII)


Values = tuple[str, str, int, int, int]  # an ArrowFile as it is pickled or kept in JSON


class ArrowFile(NamedTuple):
    """A durable file. size: bytes."""

    path: str
    stem: str
    rows: int
    size: int
    crc: int

    def values(self) -> Values:
        """As plain values."""
        return (self.path, self.stem, self.rows, self.size, self.crc)


def parse(path: Path) -> ArrowFile | None:
    """What a file's name says; None for any other file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return ArrowFile(str(path), match["stem"], int(match["rows"]), int(match["size"]), int(match["crc"], 16))


def listed(folder: Path) -> list[ArrowFile]:
    """The Arrow files of a folder, by their stems; none if there is no folder."""
    try:
        found = [file for name in os.listdir(folder) if (file := parse(folder / name)) is not None]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda file: file.stem)


def write_arrow(folder: Path, stem: str, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> ArrowFile:
    """A new file, durable on return. Raises StorageFull, StorageFailed, StorageDenied."""
    sink, rows = pa.BufferOutputStream(), 0
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                writer.write_batch(batch.slice(start, CHUNK_ROWS))
            rows += batch.num_rows
    data = sink.getvalue()
    crc = zlib.crc32(data)
    path = folder / f"{stem}.{rows}.{data.size}.{crc:08x}.arrow"
    _write_durable(path, memoryview(data))
    return ArrowFile(str(path), stem, rows, data.size, crc)


def read_arrow(file: ArrowFile, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The batches, not copied. Raises DataLost if the file is gone or is not what its name says."""
    try:
        with pa.memory_map(file.path) as source:
            data = source.read_buffer()
    except OSError as error:
        raise DataLost(f"{file.path} can't be read: {error}") from error
    if data.size != file.size or zlib.crc32(data) != file.crc:
        raise DataLost(f"{file.path} is damaged: {data.size} bytes that do not match its checksum")
    reader = pa.ipc.open_file(pa.BufferReader(data))
    for place in range(reader.num_record_batches):
        batch = reader.get_batch(place)
        yield batch if columns is None else batch.select(columns)


def column(file: ArrowFile, name: str) -> list[str]:
    """One column of strings, all of it. Raises DataLost."""
    return [value for batch in read_arrow(file, [name]) for value in batch.column(0).to_pylist()]


def write_note(path: Path, note: object) -> None:
    """A small file in JSON, new or instead of the one that was there; durable on return."""
    _write_durable(path, msgspec.json.encode(note))


def create_note(path: Path, note: object) -> bool:
    """The same, unless there is one: of all who try, one succeeds."""
    temporary = f"{path}.{new_id():016x}.tmp"
    with storage_errors(path):
        DISK.create_files([(temporary, msgspec.json.encode(note))])
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        DISK.sync_folder(path.parent)
    return True


def _write_durable(path: Path, data: bytes | memoryview) -> None:
    with storage_errors(path):
        DISK.write_file(path, data, f"{path}.{new_id():016x}.tmp")


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


def write_manifest(folder: Path, number: int, tasks: Sequence[LeasedTask[bytes]]) -> Manifest:
    """A new manifest, durable on return."""
    arrays = [
        pa.array([task.id for task in tasks], pa.string()),
        pa.array([split_headers(task.payload)[0] for task in tasks], pa.binary()),
        pa.array([task.attempt for task in tasks], pa.int32()),
        pa.array([task.priority for task in tasks], pa.int32()),
        _times([task.inserted_ms for task in tasks]),
        pa.array([task.token for task in tasks], pa.string()),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=_ARROW_KEPT)
    return Manifest(number, write_arrow(folder, f"{number:012d}", [batch], _ARROW_KEPT))


def _times(milliseconds: Sequence[int | None]) -> pa.Array:
    """Milliseconds since 1970 as Spark's timestamps."""
    return pc.multiply(pa.array(milliseconds, pa.int64()), 1000).cast(_TIME)


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
        pa.array([split_headers(task.payload)[0] for task in seen], pa.binary()),
        pa.array([task.attempts for task in seen], pa.int32()),
        pa.array([task.priority for task in seen], pa.int32()),
        _times([task.inserted_ms for task in seen]),
        pa.array([str(task.state) for task in seen], pa.string()),
        _times([task.due_ms or None for task in seen]),
        pa.array([task.error for task in seen], pa.string()),
        pa.array([task.holder for task in seen], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=ARROW_VIEW)

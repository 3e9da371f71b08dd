"""Files that are whole and durable, or not there: Arrow files with a checksum in their names, small notes in JSON.

    {stem}.{rows}.{bytes}.{crc32}.arrow        {stem} is the caller's: a manifest's number, a task's attempt

The name is given when the content is on stable storage, and says what the content must be, so a listing of the folder is all
the index there is. Not covered: what the rows mean (queue_manifest.py, queue_staging.py).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from roq.errors import DataLost
from roq.ids import new_id
from roq.workqueue.file_queue.storage import create_durable, storage, sync_folder

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
    _write_whole(path, memoryview(data))
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
    _write_whole(path, msgspec.json.encode(note))


def create_note(path: Path, note: object) -> bool:
    """The same, unless there is one: of all who try, one succeeds."""
    temporary = f"{path}.{new_id():016x}.tmp"
    with storage(str(path)):
        create_durable([(temporary, msgspec.json.encode(note))])
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        sync_folder(str(path.parent))
    return True


def _write_whole(path: Path, data: bytes | memoryview) -> None:
    temporary = f"{path}.{new_id():016x}.tmp"
    with storage(str(path)):
        create_durable([(temporary, data)])  # type: ignore[list-item]  # what os.write takes
        os.replace(temporary, path)
        sync_folder(str(path.parent))

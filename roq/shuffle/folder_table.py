"""The table of a shuffle in a folder: who won, where the ranges are cut, and where in each run. Cutting reads the samples and,
at each border, the one block of a run that the border lies in; data stays where it is.

Not covered: locks and files around it (folder.py), how borders are chosen (sampling.py, ranges.py).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa

from roq.errors import DataLost
from roq.runtime.files import Disk
from roq.shuffle.attempt_file import AttemptFile, RunBlocks, read_block
from roq.shuffle.blocks import decode_block, row_bytes
from roq.shuffle.keys import KeyEncoder
from roq.shuffle.ranges import borders_of, even_borders, identities, imbalance, overlaps, range_count, rows_before, table_of
from roq.shuffle.sampling import Distribution, coarser
from roq.wire.shuffle import Position, Range, RunSample, RunSlice

MAGIC = b"RoQtab\x00\x01"
POINTS_MAX = 200_000  # of all samples together: more take seconds and much memory, and seldom tell more
IMBALANCE_MAX = 1.15  # else all points are taken
POINTS_PER_RUN_MIN = 16
CUTTERS = min(4, os.cpu_count() or 1)
_head = Struct("<8sI")


class RunBorders(msgspec.Struct, frozen=True, array_like=True):
    """A committed run. at: its first row in each range, and the number of its rows at the end."""

    partition: int
    attempt: str
    run: int
    at: list[int]


class Table(msgspec.Struct, frozen=True, array_like=True):
    """A sealed shuffle. epoch: grows with each new cut."""

    epoch: int
    committed: dict[int, str]
    ranges: tuple[Range, ...]
    cuts: list[RunBorders]
    rows: int
    size: int

    def slices(self, number: int) -> list[RunSlice]:
        """The runs' rows in a range."""
        pieces = ((each, each.at[number], each.at[number + 1]) for each in self.cuts)
        return [RunSlice(run.partition, run.attempt, run.run, first, end - first) for run, first, end in pieces if end > first]


def encode_table(table: Table) -> bytes:
    """The table's file: magic, crc32 u32, msgpack."""
    data = msgspec.msgpack.encode(table)
    return _head.pack(MAGIC, crc32(data)) + data


def decode_table(data: bytes) -> Table:
    """Raises DataLost."""
    if len(data) < _head.size or _head.unpack_from(data) != (MAGIC, crc32(data[_head.size :])):
        raise DataLost("the shuffle's table is damaged")
    return msgspec.msgpack.decode(memoryview(data)[_head.size :], type=Table)


def make_table(disk: Disk, files: Sequence[AttemptFile], encoder: KeyEncoder, wanted: int, former: Table | None) -> Table:
    """Cut the committed attempts' files into ranges. wanted: how many, 0 for as many as fit. Raises DataLost, OSError."""
    samples = [run.sample for file in files for run in file.runs]
    coarse = _thinned(samples)
    table = _cut_by(disk, files, encoder, coarse, wanted, former)
    if coarse != samples and imbalance([each.size for each in table.ranges]) > IMBALANCE_MAX:
        table = _cut_by(disk, files, encoder, samples, wanted, former)
    return table


def _cut_by(
    disk: Disk,
    files: Sequence[AttemptFile],
    encoder: KeyEncoder,
    samples: Sequence[RunSample],
    wanted: int,
    former: Table | None,
) -> Table:
    distribution = Distribution.of(samples)
    rows, size = sum(sample.rows for sample in samples), sum(sample.size for sample in samples)
    borders = even_borders(distribution, range_count(size, 1, wanted))
    table = table_of(borders)
    if former is not None:
        old, new = [each.interval for each in former.ranges], [each.interval for each in table]
        fresh = max(each.identity for each in former.ranges) + 1
        table = table_of(borders, identities(former.ranges, new, overlaps(old, new, distribution), fresh))
    runs = [(file, number) for file in files for number in range(len(file.runs))]
    with ThreadPoolExecutor(CUTTERS, "roq-shuffle-cut") as pool:
        places = list(pool.map(lambda run: _cut_run(disk, run[0], run[1], borders, encoder), runs))
    ranges = []
    for number, each in enumerate(table):
        counted = sum(rows_at[number + 1] - rows_at[number] for rows_at, _ in places)
        weighed = sum(bytes_at[number + 1] - bytes_at[number] for _, bytes_at in places)
        ranges.append(msgspec.structs.replace(each, rows=counted, size=weighed))
    cuts = [
        RunBorders(file.owner.partition, file.owner.attempt, number, rows_at)
        for (file, number), (rows_at, _) in zip(runs, places, strict=True)
    ]
    committed = {file.owner.partition: file.owner.attempt for file in files}
    return Table(former.epoch + 1 if former else 1, committed, tuple(ranges), cuts, rows, size)


def same_borders(one: Table, other: Table) -> bool:
    """Whether both have the same borders."""
    return borders_of(one.ranges) == borders_of(other.ranges)


def _cut_run(
    disk: Disk, file: AttemptFile, number: int, borders: Sequence[Position], encoder: KeyEncoder
) -> tuple[list[int], list[int]]:
    """Rows, and about how many bytes, of a run before each border; 0 before and everything behind."""
    run, partition = file.runs[number], file.owner.partition
    blocks = range(len(run.starts))
    bytes_before = [0, *run.lengths.cumsum().tolist()]
    rows_at, bytes_at = [0], [0]
    inside: _Inside | None = None
    for border in borders:
        found = bisect_left(blocks, border, key=lambda block: _last(run, block, partition, number))
        if found == len(blocks):
            rows_at.append(run.rows)
            bytes_at.append(run.size)
            continue
        place = run.place(found)
        within = 0
        if Position(place.first_key, partition, number, place.first) < border:
            if inside is None or inside.number != found:  # many borders may lie in one block
                inside = _Inside(found, decode_block(encoder.schema, read_block(disk, file.path, place)), encoder)
            within = rows_before(inside.keys, place.first, (partition, number), border)
        rows_at.append(place.first + within)
        share = inside.share(within) if inside is not None and within else 0.0
        bytes_at.append(bytes_before[found] + int(place.length * share))
    return [*rows_at, run.rows], [*bytes_at, run.size]


class _Inside:
    """A block that a border lies in."""

    def __init__(self, number: int, batch: pa.RecordBatch, encoder: KeyEncoder) -> None:
        self.number, self.keys = number, encoder.encode(batch)
        _, sizes = row_bytes(batch)
        self._ends = np.cumsum(np.ones(batch.num_rows, np.int64) if sizes is None else sizes)

    def share(self, rows: int) -> float:
        """The part of the block's bytes that its first rows have."""
        return float(self._ends[rows - 1] / self._ends[-1])


def _last(run: RunBlocks, block: int, partition: int, number: int) -> Position:
    return Position(run.last_keys[block], partition, number, int(run.ends[block]) - 1)


def _thinned(samples: Sequence[RunSample]) -> list[RunSample]:
    """The samples, coarser if they are very many."""
    most = max(POINTS_PER_RUN_MIN, POINTS_MAX // max(1, len(samples)))
    return [coarser(sample, -(-len(sample.keys) // most)) for sample in samples]

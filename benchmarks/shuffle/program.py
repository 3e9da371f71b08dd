"""A process that writes or reads a shuffle: `python -m benchmarks.shuffle.program write|read …`; one line of JSON out."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import roq.shuffle
from benchmarks.shuffle.data import BATCH_ROWS, SCHEMA, batches
from roq.shuffle.writer import MEMORY_BYTES_MIN
from roq.wire.shuffle import Receipt


def resident_bytes(what: str) -> int:
    """Memory of this process: VmRSS now, VmHWM at most so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def baseline_bytes(source: str) -> int:
    """What the interpreter, Arrow and a shuffle of a thousand rows have resident, with a source of rows ("": none) at work."""
    with tempfile.TemporaryDirectory() as folder, roq.shuffle.open(f"file://{folder}") as shuffles:
        shuffles.create("small", ["key"], SCHEMA)
        shuffles.commit("small", write(shuffles, "small", MEMORY_BYTES_MIN, ["0=uniform:1000"]))
        read(shuffles, "small", MEMORY_BYTES_MIN, 0, 1)
    begin_peak()
    for _ in batches(source, 3 * BATCH_ROWS, 0) if source else ():
        pass
    found = resident_bytes("VmHWM")
    begin_peak()
    return found


def begin_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def parquet(path: str) -> Iterator[pa.RecordBatch]:
    """A file's rows."""
    with pq.ParquetFile(path, pre_buffer=False) as file:
        yield from file.iter_batches(BATCH_ROWS, use_threads=False)


def write(shuffles: roq.shuffle.Shuffles, name: str, memory_bytes: int, inputs: list[str]) -> list[Receipt]:
    """One attempt per input, which is PARTITION=FILE or PARTITION=KIND:ROWS."""
    receipts = []
    for each in inputs:
        partition, _, what = each.partition("=")
        kind, colon, rows = what.partition(":")
        with shuffles.writer(name, int(partition), memory_bytes=memory_bytes) as writer:
            for batch in batches(kind, int(rows), int(partition)) if colon else parquet(what):
                writer.write(batch)
            receipts.append(writer.finish())
    return receipts


def read(shuffles: roq.shuffle.Shuffles, name: str, memory_bytes: int, part: int, parts: int) -> int:
    """Every parts-th range; how many rows."""
    rows = 0
    for each in shuffles.describe(name).ranges[part::parts]:
        for batch in shuffles.read(name, each.number, memory_bytes=memory_bytes):
            rows += batch.num_rows
    return rows


def main() -> None:
    """The command line: write|read[-measured] ADDRESS NAME MEMORY_BYTES …; measured: with the memory before."""
    what, address, name, memory, *rest = sys.argv[1:]
    found: dict[str, object] = {}
    if what.endswith("-measured"):
        found["before"] = baseline_bytes("uniform" if what.startswith("write") else "")
    with roq.shuffle.open(address) as shuffles:
        if what.startswith("write"):
            receipts = write(shuffles, name, int(memory), rest)
            found["receipts"] = [[each.partition, each.attempt, each.rows, each.size, each.runs] for each in receipts]
        else:
            found["rows"] = read(shuffles, name, int(memory), int(rest[0]), int(rest[1]))
    print(json.dumps(found | {"peak": resident_bytes("VmHWM"), "cpu": time.process_time()}))


if __name__ == "__main__":
    main()

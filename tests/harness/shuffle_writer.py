"""A process that writes one attempt of a shuffle, to be killed: `ADDRESS NAME PARTITION ROWS` in, its receipt as JSON out."""

from __future__ import annotations

import random
import sys

import msgspec
import pyarrow as pa

import roq.shuffle
from roq.shuffle.writer import MEMORY_BYTES_MIN

SCHEMA = pa.schema([("k", pa.binary()), ("id", pa.int64()), ("v", pa.binary())])
BATCH_ROWS = 2000
VALUE = b"v" * 200


def batches(partition: int, rows: int) -> list[pa.RecordBatch]:
    """Always the same rows for a partition."""
    draw = random.Random(partition)
    found = []
    for begin in range(0, rows, BATCH_ROWS):
        numbers = range(begin, min(begin + BATCH_ROWS, rows))
        columns = [[draw.randbytes(draw.randrange(8)) for _ in numbers], [partition * rows + at for at in numbers]]
        arrays = [pa.array(columns[0], pa.binary()), pa.array(columns[1]), pa.array([VALUE] * len(numbers))]
        found.append(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return found


def tell(line: str) -> None:
    """To whoever started this."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Write all of it."""
    address, name, partition, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with (
        roq.shuffle.open(address) as shuffles,
        shuffles.writer(name, partition, memory_bytes=MEMORY_BYTES_MIN) as writer,
    ):
        tell("writing")
        for batch in batches(partition, rows):
            writer.write(batch)
        tell(msgspec.json.encode(writer.finish()).decode())


if __name__ == "__main__":
    main()

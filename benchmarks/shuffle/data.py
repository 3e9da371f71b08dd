"""Rows to sort: a 16-byte key and a 100-byte value, made batch by batch from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KEY_BYTES, VALUE_BYTES = 16, 100
BATCH_ROWS = 65536
SCHEMA = pa.schema([("key", pa.binary()), ("value", pa.binary())])
ZIPF = 1.1


def batches(kind: str, rows: int, seed: int) -> Iterator[pa.RecordBatch]:
    """kind: uniform or zipf."""
    random = np.random.default_rng(seed)
    for begin in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - begin)
        keys = random.bytes(KEY_BYTES * count)
        if kind == "zipf":
            numbers = np.zeros((count, 2), ">u8")
            numbers[:, 0] = np.minimum(random.zipf(ZIPF, count), 1 << 40)
            keys = numbers.tobytes()
        values = random.bytes(VALUE_BYTES * count)
        yield pa.RecordBatch.from_arrays([_column(keys, KEY_BYTES), _column(values, VALUE_BYTES)], schema=SCHEMA)


def make_files(folder: Path, kind: str, rows: int, files: int) -> list[Path]:
    """So many rows in so many Parquet files, not compressed (they are random) and without dictionaries."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(files):
        paths.append(folder / f"{number:03}.parquet")
        with pq.ParquetWriter(paths[-1], SCHEMA, compression="none", use_dictionary=False, write_statistics=False) as file:
            for batch in batches(kind, rows // files, number):
                file.write_batch(batch)
    return paths


def _column(data: bytes, width: int) -> pa.Array:
    rows = len(data) // width
    offsets = np.arange(0, rows * width + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])

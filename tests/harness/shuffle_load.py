"""A data set that is written to a shuffle by many tasks and read back by many readers, with every row counted.

A task whose attempt is lost is run again as a new attempt, as Spark would. Keys are drawn from a seed; one in five rows has the
same key. Not covered: who hurts what meanwhile (the tests).
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa

import roq.shuffle
from roq.errors import AttemptLost
from roq.wire.shuffle import Description, Receipt

SCHEMA = pa.schema([("key", pa.int64()), ("id", pa.int64()), ("pad", pa.binary())])
BATCH_ROWS = 2000
WRITER_BYTES = 8 * 1024 * 1024
ATTEMPTS_MAX = 20


@dataclass
class Verdict:
    """What became of the rows. unsorted: places where a key is smaller than the one before."""

    rows: int
    missing: int
    repeated: int
    unexpected: int
    unsorted: int
    attempts: int
    write_seconds: float
    read_seconds: float
    errors: Counter[str] = field(default_factory=Counter)

    def line(self, fault: str, **figures: object) -> str:
        """One line of JSON."""
        return json.dumps({"fault": fault, **self.__dict__, **figures})

    def check(self) -> None:
        """Raises AssertionError."""
        assert self.rows > 0
        assert (self.missing, self.repeated, self.unexpected, self.unsorted) == (0, 0, 0, 0), self.line("")


class ShuffleLoad:
    """address: roq://…; so many rows of about `pad` bytes per partition."""

    def __init__(self, address: str, name: str, partitions: int = 6, rows: int = 20_000, pad: int = 100) -> None:
        self.shuffles = roq.shuffle.open(address)
        self.name, self.partitions, self.rows, self._pad = name, partitions, rows, pad
        self.receipts: list[Receipt] = []
        self.errors: Counter[str] = Counter()
        self.written = 0  # rows given to writers, those of lost attempts included
        self.attempts = 0
        self.write_seconds = self.read_seconds = 0.0
        self.pause_seconds = 0.0  # between two batches
        self._began = 0.0
        self._threads = ThreadPoolExecutor(partitions)
        self._tasks: list[Future[Receipt]] = []
        self._lock = threading.Lock()

    def create(self, replicas: int = 2, ranges: int = 0) -> Description:
        """The shuffle."""
        return self.shuffles.create(self.name, ["key"], SCHEMA, replicas, ranges)

    def start(self, pause_seconds: float = 0.0) -> None:
        """Write all partitions at once."""
        self.pause_seconds, self._began = pause_seconds, time.monotonic()
        self._tasks = [self._threads.submit(self._task, partition) for partition in range(self.partitions)]

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """The same each time."""
        source = random.Random(partition)
        for first in range(0, self.rows, BATCH_ROWS):
            count = min(BATCH_ROWS, self.rows - first)
            keys = [source.randrange(1 << 40) if source.random() < 0.8 else 1 << 39 for _ in range(count)]
            begin = partition * self.rows + first
            pads = pa.array([source.randbytes(self._pad) for _ in range(count)], pa.binary())
            columns = [pa.array(keys, pa.int64()), pa.array(range(begin, begin + count), pa.int64()), pads]
            yield pa.record_batch(columns, schema=SCHEMA)

    def _task(self, partition: int) -> Receipt:
        for number in range(ATTEMPTS_MAX):
            with self._lock:
                self.attempts += 1
            try:
                return self._attempt(partition, f"{partition}-{number}")
            except AttemptLost as error:
                self.errors["AttemptLost"] += 1
                last = error
        raise last

    def _attempt(self, partition: int, attempt: str) -> Receipt:
        with self.shuffles.writer(self.name, partition, attempt, WRITER_BYTES) as writer:
            for batch in self.batches(partition):
                writer.write(batch)
                with self._lock:
                    self.written += batch.num_rows
                time.sleep(self.pause_seconds)  # the load's own pace
            return writer.finish()

    def finished(self, seconds: float = 120.0) -> list[Receipt]:
        """Wait for all tasks. Raises what one of them raised."""
        self.receipts = [task.result(seconds) for task in self._tasks]
        self.write_seconds = time.monotonic() - self._began
        return self.receipts

    @property
    def writing(self) -> bool:
        """Some task isn't finished."""
        return any(not task.done() for task in self._tasks)

    def commit(self) -> Description:
        """Seal it."""
        return self.shuffles.commit(self.name, self.receipts)

    def read(self, readers: int = 3) -> Verdict:
        """All ranges, by several readers; the verdict."""
        began = time.monotonic()
        ranges = self.shuffles.describe(self.name).ranges
        with ThreadPoolExecutor(readers) as threads:
            found = list(threads.map(lambda one: self._read_range(one.number), ranges))
        self.read_seconds = time.monotonic() - began
        seen: Counter[int] = Counter()
        unsorted, last = 0, -1
        for first, highest, ids, wrong in found:
            unsorted += wrong + (bool(ids) and first < last)
            last = highest if ids else last
            seen.update(ids)
        expected = self.partitions * self.rows
        return Verdict(
            rows=sum(seen.values()),
            missing=sum(id not in seen for id in range(expected)),
            repeated=sum(count - 1 for count in seen.values()),
            unexpected=sum(not 0 <= id < expected for id in seen),
            unsorted=unsorted,
            attempts=self.attempts,
            write_seconds=round(self.write_seconds, 2),
            read_seconds=round(self.read_seconds, 2),
            errors=self.errors,
        )

    def _read_range(self, number: int) -> tuple[int, int, list[int], int]:
        """(first key, last key, ids, places out of order)."""
        keys: list[int] = []
        ids: list[int] = []
        for batch in self.shuffles.read(self.name, number):
            keys += batch.column(0).to_pylist()
            ids += batch.column(1).to_pylist()
            time.sleep(self.pause_seconds)
        wrong = sum(after < before for before, after in pairwise(keys))
        return (keys[0] if keys else 0), (keys[-1] if keys else 0), ids, wrong

    def remove(self) -> None:
        """The shuffle."""
        self.shuffles.remove(self.name)

    def close(self) -> None:
        """End the tasks, whatever they wait for."""
        self.shuffles.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

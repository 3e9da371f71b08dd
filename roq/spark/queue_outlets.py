"""Where published rows go: a row's number says whether the queue has it already.

log:, roq:    the queue's own memory of its producers (senders.py): a Spark job is a producer that lasts
file:         task files are prepared, then renamed into the queue: what is not there any more is published
queues        publish/subscribe queues keep nothing: rows published before a crash are published again
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, cast

import pyarrow as pa
import pyarrow.compute as pc

import roq.blocking
from roq.errors import PayloadTooLarge
from roq.spark.queue_columns import messages, tasks
from roq.spark.queue_options import SPARK_FOLDER, QueueOptions, TargetKind
from roq.workqueue.address import open_backend
from roq.workqueue.contract import PUT_COUNT_MAX, Backend, NewTask
from roq.workqueue.file_queue.publication import FilePublication
from roq.workqueue.senders import lasting

SAVE = "save-"  # how the jobs begin that nobody will repeat
PUT_BYTES = 4 * 1024 * 1024  # of payloads put at once


class Outlet(Protocol):
    """An open queue to publish to."""

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """Rows with the numbers from `number` on."""

    def flush(self) -> None:
        """Return when all that was published is as durable as the queue makes it."""

    def end(self) -> None:
        """Everything is published and noted: none of it will be repeated."""

    def close(self) -> None:
        """Let go."""


class NumberedBackend(Backend, Protocol):
    """A backend whose puts can be repeated."""

    def put_numbered(self, producer: int, first: int, tasks: Sequence[NewTask]) -> None:
        """Store tasks as number first, first + 1, … of this producer; a number it has stored before is not stored again."""


class NumberedOutlet:
    """A work queue that remembers the numbers of its producers."""

    def __init__(self, address: str, job: str, largest: int) -> None:
        producer = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8]) or 1
        self._producer = producer if job.startswith(SAVE) else lasting(producer)
        self._backend = cast(NumberedBackend, open_backend(address, None))
        _check_size(self._backend, largest)

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        for part in _parts(batch):
            self._backend.put_numbered(self._producer, number, tasks(part))
            number += part.num_rows

    def flush(self) -> None:
        """See Outlet."""

    def end(self) -> None:
        """See Outlet."""

    def close(self) -> None:
        """See Outlet."""
        self._backend.close()


class FileOutlet:
    """A file: work queue. decided: Unix milliseconds when the plan was made: the time of insertion in the tasks' ids."""

    def __init__(self, options: QueueOptions, job: str, decided: int, largest: int) -> None:
        backend = open_backend(options.address, None)  # which counts what a killed driver had put, before the rest of it is
        backend.close()
        _check_size(backend, largest)
        self._publication = FilePublication(options.place.path, f"{SPARK_FOLDER}/publishing/{job}", job, decided)

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        for part in _parts(batch):
            self._publication.put(number, tasks(part))
            number += part.num_rows

    def flush(self) -> None:
        """See Outlet."""

    def end(self) -> None:
        """See Outlet."""
        self._publication.end()

    def close(self) -> None:
        """See Outlet."""
        self._publication.close()


class TopicOutlet:
    """A publish/subscribe queue."""

    def __init__(self, options: QueueOptions) -> None:
        self._cluster = roq.blocking.connect(options.place.zookeeper)
        self._cluster.__enter__()
        try:
            self._publisher = self._cluster.publisher(options.place.path)
            self._publisher.__enter__()
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise

    def publish(self, number: int, batch: pa.RecordBatch) -> None:
        """See Outlet."""
        for topic, payloads in messages(batch):
            self._publisher.publish_many(topic, payloads)

    def flush(self) -> None:
        """See Outlet: it has passed the Exchanges."""
        self._publisher.flush()

    def end(self) -> None:
        """See Outlet."""

    def close(self) -> None:
        """See Outlet."""
        try:
            self._publisher.__exit__(None, None, None)
        finally:
            self._cluster.__exit__(None, None, None)


class opened:  # noqa: N801  a context manager, as contextlib.closing
    """The outlet of these options, for a `with`. largest: bytes of the largest payload, checked before any is published."""

    def __init__(self, options: QueueOptions, job: str, decided: int, largest: int) -> None:
        if options.kind is TargetKind.QUEUE:
            self._outlet: Outlet = TopicOutlet(options)
        elif options.place.scheme == "file":
            self._outlet = FileOutlet(options, job, decided, largest)
        else:
            self._outlet = NumberedOutlet(options.address, job, largest)

    def __enter__(self) -> Outlet:
        return self._outlet

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._outlet.close()


def _check_size(backend: Backend, largest: int) -> None:
    if largest > (limit := backend.settings.payload_bytes_max):
        backend.close()
        raise PayloadTooLarge(f"a payload has at most {limit} bytes in this work queue, and a row has {largest}")


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows as they can be put at once, cut alike whenever the same rows come again."""
    size = pc.sum(pc.binary_length(batch.column("payload"))).as_py() or 0
    step = max(1, min(PUT_COUNT_MAX, int(PUT_BYTES / max(1.0, size / max(1, batch.num_rows)))))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)

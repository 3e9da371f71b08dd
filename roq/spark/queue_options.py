"""The options of format("roq"), checked: which queue, where manifests and staged rows lie, how much at once.

A reader wants a work queue that exists: a folder mistyped would else be an empty queue for ever. A writer makes a work queue
that does not exist, as `roq.open_queue` does. Not covered: columns (queue_outlets.py), reading recorded queues
(tape_options.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import roq.blocking
from roq.errors import InvalidAddress, InvalidConfiguration, WorkQueueNotFound
from roq.pubsub.publisher import ROUTED, STORED
from roq.spark.errors import address_of, name_of, option_error, refuse_unknown, spark_errors, whole_number
from roq.wire.task import TaskState
from roq.workqueue.address import LOGS, QueueAddress, open_backend, parse, zookeepers

EXAMPLE = '.option("address", "log:///data/tasks")'
ROWS_MAX = 100_000_000
BATCH_ROWS = 200_000  # of one micro-batch, unless maxRowsPerBatch says otherwise
LEASE_SECONDS = 300
LEASE_SECONDS_MAX = 7 * 86_400
KNOWN = (
    "address", "cluster", "kind", "queue", "confirm", "manifests", "maxRowsPerBatch", "leaseSeconds", "state", "rows",
    "staging", "publication", "checkpointLocation", "queryName",
)  # fmt: skip
FOLDERS = {"log": "settings.json", "file": "roq.json"}  # what a queue's folder has
SPARK_FOLDER = "spark"  # in a queue's folder
E = TypeVar("E", bound=StrEnum)


class TargetKind(StrEnum):
    """What is written to."""

    WORK_QUEUE = "work-queue"
    QUEUE = "queue"


class PublishedWhen(StrEnum):
    """When rows count as published."""

    ROUTED = ROUTED
    STORED = STORED


@dataclass(frozen=True)
class QueueOptions:
    """Options as they were given, and their defaults. place: of the queue. manifests, staging: "" to be asked for. confirm:
    what a publish/subscribe queue's publisher waits for."""

    kind: TargetKind
    address: str
    place: QueueAddress
    manifests: str
    staging: str
    batch_rows: int
    lease_seconds: int
    state: TaskState
    rows: int | None
    publication: str
    confirm: str

    @property
    def queue(self) -> str:
        """The address in one form, whatever it was written like: folders without detours, ZooKeepers in order."""
        place = self.place
        if place.scheme in FOLDERS:
            return f"{place.scheme}://{quote(os.path.normpath(place.path))}"
        hosts, chroot = zookeepers(place)
        return f"{place.scheme}://{','.join(hosts)}{chroot}/{quote(place.path, safe='')}"

    def manifests_folder(self) -> Path:
        """Raises Spark's error for a missing option."""
        return _folder(self.manifests, "manifests", "what the stream has leased")

    def staging_folder(self) -> Path:
        """One per queue. A stream's job has a name that is unique in the world, so its cluster may get other ZooKeepers between
        a crash and the batch's next run; a publication is named by people. Raises Spark's error for a missing option."""
        folder = _folder(self.staging, "staging", "rows until they are published")
        queue = self.queue
        if self.place.scheme not in FOLDERS and not self.publication:
            queue = f"{self.place.scheme}:{zookeepers(self.place)[1]}/{self.place.path}"
        return folder / hashlib.sha256(f"{self.kind} {queue}".encode()).hexdigest()[:16]

    def check_exists(self) -> None:
        """Raises, in Spark's style, WorkQueueNotFound."""
        place = self.place
        with spark_errors(address=self.address):
            if place.scheme == "roq":
                with roq.blocking.connect(place.zookeeper) as cluster:
                    cluster.work_queue(place.path)
            elif not self._has_folder() and not (Path(place.path) / "queue").is_dir():
                raise WorkQueueNotFound(f"there is no work queue at {self.address}")

    def make_folder(self) -> None:
        """A queue in a folder, unless it is there: before anything else is put into the folder."""
        if self.place.scheme in FOLDERS and not self._has_folder():
            with spark_errors(address=self.address):
                open_backend(self.address, None).close()

    def _has_folder(self) -> bool:
        return (Path(self.place.path) / FOLDERS[self.place.scheme]).exists()


def lies_within(folder: Path, queue: str) -> bool:
    """Whether a folder is part of a queue's own, and goes where the queue goes. queue: as for `same_queue`."""
    place = parse(queue)
    return place.scheme in FOLDERS and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(place.path))


def queue_options(options: Mapping[str, str]) -> QueueOptions:
    """Raises errors in Spark's style, naming the option."""
    refuse_unknown(options, KNOWN)
    kind = _one_of(options, "kind", TargetKind, TargetKind.QUEUE if "queue" in options else TargetKind.WORK_QUEUE)
    address, place = _place(options, kind)
    inside = f"{place.path}/{SPARK_FOLDER}" if place.scheme in FOLDERS else ""
    rows = options.get("rows")
    return QueueOptions(
        kind=kind,
        address=address,
        place=place,
        manifests=options.get("manifests", "").strip() or (inside and f"{inside}/manifests"),
        staging=options.get("staging", "").strip() or (inside and f"{inside}/staging"),
        batch_rows=whole_number(options, "maxRowsPerBatch", BATCH_ROWS, 1, ROWS_MAX),
        lease_seconds=whole_number(options, "leaseSeconds", LEASE_SECONDS, 5, LEASE_SECONDS_MAX),
        state=_one_of(options, "state", TaskState, TaskState.READY),
        rows=None if rows is None else whole_number(options, "rows", 0, 1, ROWS_MAX),
        publication=options.get("publication", "").strip(),
        confirm=_one_of(options, "confirm", PublishedWhen, PublishedWhen.ROUTED),
    )


def _place(options: Mapping[str, str], kind: TargetKind) -> tuple[str, QueueAddress]:
    """The address of a work queue, or of a queue of a cluster, which is written the same way."""
    address, named = address_of(options, EXAMPLE), options.get("queue", "").strip()
    if kind is TargetKind.WORK_QUEUE and ("queue" in options or "confirm" in options):
        raise option_error("kind", "queue and confirm are of publish/subscribe queues")
    if named and options.get("path"):
        raise option_error("queue", "names the queue already; leave the path out")
    if named:
        address = f"{address}/{quote(named, safe='')}"
    elif "cluster" in options or (kind is TargetKind.QUEUE and options.get("path")):
        address = f"{address}/{quote(name_of(options, 'queue'), safe='')}"
    elif options.get("path"):
        raise option_error("path", "address names the queue already; a name goes with cluster")
    try:
        place = parse(address)
    except (InvalidAddress, InvalidConfiguration) as error:
        raise option_error("cluster" if "cluster" in options else "address", str(error)) from None
    if place.scheme == "memory":
        raise option_error("address", "memory: is a queue of one process, and Spark has many; take log:///folder")
    if place.scheme in LOGS:
        raise option_error(
            "address", f"{place.scheme}: addresses are not for Spark; take log:///folder or roq://zookeeper/name"
        )
    if kind is TargetKind.QUEUE and place.scheme != "roq":
        raise option_error("kind", f"publish/subscribe queues are in clusters only, not at {address}")
    return address, place


def _folder(path: str, option: str, what: str) -> Path:
    if not path:
        raise option_error(
            option,
            f"is missing: name a folder for {what}, which the driver and all executors share (NFS, or one machine's disk)",
        )
    folder = Path(path.removeprefix("file://"))
    if not folder.is_absolute():
        raise option_error(option, f"{path!r} is not an absolute path: driver and executors would mean different folders")
    return folder


def _one_of(options: Mapping[str, str], option: str, kind: type[E], default: E) -> E:
    text = options.get(option, default).strip().lower()
    try:
        return kind(text)
    except ValueError:
        raise option_error(option, f"{text!r} is none of {', '.join(kind)}") from None

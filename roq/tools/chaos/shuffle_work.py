"""Drivers, writers and readers of shuffles, and what their accounts add up to: for roq-sim and for a real cluster.

As a Spark job has it: a driver makes a shuffle, tasks write its partitions, some of them several times (their writer was
killed, their buffer was lost, or somebody else was quicker), the driver names one attempt of each, tasks read the ranges. Every
row says which attempt it is of. What a reader gets to the end is exactly the rows of the committed attempts, in the promised
order. A receipt holds: its attempt can be committed, whatever happened since. Disks lose nothing that was synced, so nothing
may be reported as lost, except of a shuffle that a store had to put aside, as its disk failed when it read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pyarrow as pa

import roq.shuffle
from roq.errors import (
    AttemptLost,
    CallError,
    DataLost,
    ShuffleNotFound,
    ShuffleNotSealed,
    ShuffleSealed,
    TemporaryError,
)
from roq.shuffle.service import Shuffles
from roq.tools.chaos.edn import OperationType
from roq.wire.shuffle import Description, Receipt, ShuffleState

SCHEMA = pa.schema([(name, pa.int32()) for name in ("key", "partition", "row", "attempt")] + [("pad", pa.binary())])
pa.array([0])  # loads pandas if it is installed, which draws random numbers: none of a run
KEYS = 60  # different ones, so that many rows have the same
PAD_BYTES = 40
BATCHES = 3  # of an attempt
AGAIN_SECONDS, IDLE_SECONDS = 0.3, 0.5
OPEN_MAX = 2  # shuffles at a time that are not sealed yet
LIVING_MAX = 6  # … and in all: where readers are slow, nothing new is made
AGAIN_SHARE = 0.15  # of the looks for work: a partition that somebody else writes, or has written
READS = 2  # of a shuffle to the end, before it is removed
TOLD_MAX = 5
Row = tuple[int, int, int, int]  # key, partition, row, attempt


@dataclass(eq=False)
class AttemptAccount:
    """One try at a partition. over: its writer is done with it, or dead."""

    partition: int
    number: int
    label: str  # of its writer
    receipt: Receipt | None = None
    over: bool = False


@dataclass(eq=False)
class ShuffleAccount:
    """One shuffle. chosen: attempts that were named; sealed: that was answered. cuts: times that it was asked to be cut anew.
    read: times to the end."""

    name: str
    partitions: int
    rows: int
    ranges: int
    replicas: int
    id: str = ""  # since it was created
    attempts: list[AttemptAccount] = field(default_factory=list)
    chosen: dict[int, AttemptAccount] = field(default_factory=dict)
    sealed: bool = False
    cuts: int = 0
    read: int = 0
    removing: bool = False

    def written(self, partition: int) -> list[AttemptAccount]:
        """Attempts with a receipt."""
        return [one for one in self.attempts if one.partition == partition and one.receipt is not None]

    def rows_of(self, attempt: AttemptAccount) -> list[Row]:
        """As its writer gives them."""
        random = Random(f"{self.name} {attempt.partition}")
        return [(random.randrange(KEYS), attempt.partition, row, attempt.number) for row in range(self.rows)]

    def expected(self) -> list[Row]:
        """What is read: by key, equal ones by partition and row."""
        rows = [row for partition in sorted(self.chosen) for row in self.rows_of(self.chosen[partition])]
        return sorted(rows, key=lambda row: row[:3])


@dataclass
class ShuffleBooks:
    """The accounts of a run: of the shuffles that there are, and sums over all.

    put_aside(id): a store could not read what it has of a shuffle, and began without it. sleep(seconds): of a thread.
    note(what, …): something happened, for a trace. tell(client, type, operation, value): one begins or ends, for a history.
    ending: no more shuffles are made, and those there are are finished and kept."""

    put_aside: Callable[[str], bool]
    sleep: Callable[[float], object]
    note: Callable[..., object]
    tell: Callable[[str, OperationType, str, object], object] = lambda *_: None
    lock: threading.Lock = field(default_factory=threading.Lock)  # writers are threads, and draw numbers
    jobs: list[ShuffleAccount] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    made: int = 0
    receipts: int = 0
    sealed: int = 0
    rows_read: int = 0
    ending: bool = False

    def living(self) -> list[ShuffleAccount]:
        """Those that are neither removed nor about to be."""
        return [job for job in self.jobs if not job.removing]

    def new_attempt(self, label: str, random: Random) -> tuple[ShuffleAccount, AttemptAccount] | None:
        """What a writer should do next: mostly a partition that nobody has written or is writing."""
        with self.lock:
            return self._new_attempt(label, random)

    def _new_attempt(self, label: str, random: Random) -> tuple[ShuffleAccount, AttemptAccount] | None:
        some = [(job, partition) for job in self.living() if job.id and not job.chosen for partition in range(job.partitions)]
        free = [
            (job, partition)
            for job, partition in some
            if not any(one.partition == partition and (one.receipt or not one.over) for one in job.attempts)
        ]
        again = random.random() < AGAIN_SHARE
        if not (chosen := some if again and not self.ending else free):
            return None
        job, partition = random.choice(chosen)
        attempt = AttemptAccount(partition, len(job.attempts) + 1, label)
        job.attempts.append(attempt)
        return job, attempt

    def take_receipt(self, attempt: AttemptAccount, receipt: Receipt) -> None:
        """It is stored."""
        with self.lock:
            attempt.receipt = receipt
            self.receipts += 1

    def forget(self, job: ShuffleAccount) -> None:
        """It was removed."""
        with self.lock:
            self.jobs = [one for one in self.jobs if one is not job]  # others may be going through the one there was

    def refused(self, what: str, job: ShuffleAccount, error: BaseException) -> None:
        """A client was told an error that nothing explains."""
        if not (isinstance(error, DataLost) and self.put_aside(job.id)):
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")

    def counts(self) -> tuple[int, int, int]:
        """Attempts with a receipt, rows that were read, shuffles that were sealed."""
        return self.receipts, self.rows_read, self.sealed


async def again(books: ShuffleBooks, address: str, stop: asyncio.Event, step: Callable[[Shuffles], bool]) -> None:
    """In a thread, do one step after the other until `stop`; False: nothing was to be done just now."""

    def life() -> None:
        with roq.shuffle.open(address) as shuffles:
            while not stop.is_set():
                if not step(shuffles):
                    books.sleep(IDLE_SECONDS)

    while not stop.is_set():
        try:
            await asyncio.to_thread(life)
        except TemporaryError:
            await asyncio.sleep(AGAIN_SECONDS)


# --- writers ----------------------------------------------------------------------------------------------------------------


async def write(books: ShuffleBooks, address: str, label: str, random: Random, stop: asyncio.Event) -> None:
    """Write partitions until `stop`."""

    def step(shuffles: Shuffles) -> bool:
        found = books.new_attempt(label, random)
        if found is None:
            return False
        job, attempt = found
        books.tell(label, OperationType.INVOKE, "write", [job.name, attempt.partition, attempt.number])
        try:
            _write(books, shuffles, job, attempt, random)
        except (AttemptLost, ShuffleSealed, ShuffleNotFound, TemporaryError) as error:
            over = job.chosen if isinstance(error, ShuffleSealed) else job.removing
            if isinstance(error, ShuffleSealed | ShuffleNotFound) and not over:
                books.refused(f"writing {job.name}", job, error)
            books.sleep(AGAIN_SECONDS)
        finally:
            attempt.over = True
            books.tell(label, OperationType.OK if attempt.receipt is not None else OperationType.INFO, "write", None)
        return True

    await again(books, address, stop, step)


def _write(books: ShuffleBooks, shuffles: Shuffles, job: ShuffleAccount, attempt: AttemptAccount, random: Random) -> None:
    rows, pause = job.rows_of(attempt), random.choice((0.0, 0.05, 0.5))
    with shuffles.writer(job.name, attempt.partition, f"{attempt.number}") as writer:
        for part in range(BATCHES):
            some = rows[len(rows) * part // BATCHES : len(rows) * (part + 1) // BATCHES]
            writer.write(_batch(some))
            if pause:
                books.sleep(pause * random.random())
        if random.random() < 0.05:
            return  # it gives up
        books.take_receipt(attempt, writer.finish())
    books.note("written", job.name, attempt.partition, attempt.number)


def _batch(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = [pa.array(column, pa.int32()) for column in zip(*rows, strict=True)]
    return pa.record_batch([*columns, pa.array([b"x" * (row[2] % PAD_BYTES) for row in rows], pa.binary())], schema=SCHEMA)


# --- drivers ----------------------------------------------------------------------------------------------------------------


async def drive(books: ShuffleBooks, address: str, label: str, random: Random, stop: asyncio.Event) -> None:
    """Make shuffles, name their attempts, remove them, until `stop`. Another driver may go on with them."""

    def step(shuffles: Shuffles) -> bool:
        for job in books.living():
            if not job.id:
                return _create(books, shuffles, job)
            if not job.sealed and (job.chosen or all(job.written(each) for each in range(job.partitions))):
                return _commit(books, shuffles, job, label, random)
        for job in books.jobs:
            if job.removing:
                return _remove(books, shuffles, job)
            lost = job.sealed and books.put_aside(job.id)  # it will never be read to the end
            if (job.read >= READS or lost) and not books.ending:
                job.removing = True
                return True
        living = books.living()
        being_filled = sum(not job.sealed for job in living)
        if being_filled < OPEN_MAX and len(living) < LIVING_MAX and not books.ending:
            rows, ranges = random.choice((30, 150)), random.choice((2, 3, 6))
            books.made += 1
            job = ShuffleAccount(f"s{books.made}", random.choice((1, 4, 6)), rows, ranges, random.choice((2, 2, 3)))
            books.jobs.append(job)
            return True
        return False

    await again(books, address, stop, step)


def _remove(books: ShuffleBooks, shuffles: Shuffles, job: ShuffleAccount) -> bool:
    with contextlib.suppress(ShuffleNotFound):  # the driver before had it removed, and died
        shuffles.remove(job.name)
    books.forget(job)
    return True


def _create(books: ShuffleBooks, shuffles: Shuffles, job: ShuffleAccount) -> bool:
    job.id = shuffles.create(job.name, ["key"], SCHEMA, job.replicas, job.ranges).id
    return True


def _commit(books: ShuffleBooks, shuffles: Shuffles, job: ShuffleAccount, label: str, random: Random) -> bool:
    if not job.chosen:
        job.chosen = {partition: random.choice(job.written(partition)) for partition in range(job.partitions)}
    receipts = [one.receipt for one in job.chosen.values() if one.receipt is not None]
    books.tell(label, OperationType.INVOKE, "commit", [job.name, {each: one.number for each, one in job.chosen.items()}])
    try:
        found = shuffles.commit(job.name, receipts)
    except (CallError, DataLost) as error:  # receipts were given
        books.refused(f"committing {job.name}", job, error)
        job.removing = True
        return True
    job.sealed = True
    books.sealed += 1
    books.tell(label, OperationType.OK, "commit", None)
    books.note("sealed", job.name, found.epoch)
    if {each: one.receipt.attempt for each, one in job.chosen.items() if one.receipt} != found.winners:
        books.wrong.append(f"{job.name} was sealed with other attempts than those that were named")
    return True


# --- readers ----------------------------------------------------------------------------------------------------------------


async def read(books: ShuffleBooks, address: str, label: str, random: Random, stop: asyncio.Event) -> None:
    """Read what is sealed until `stop`."""

    def step(shuffles: Shuffles) -> bool:
        some = [job for job in books.living() if job.sealed and not (books.ending and job.read)]
        if not some:
            return False
        job = random.choice(some)
        books.tell(label, OperationType.INVOKE, "read-rows", [job.name])
        try:
            read_one(books, shuffles, job, random)
            books.tell(label, OperationType.OK, "read-rows", [job.name, job.partitions * job.rows])
            books.sleep(random.random())
        except (CallError, DataLost) as error:
            gone = isinstance(error, ShuffleNotFound) and job.removing
            cut = not isinstance(error, ShuffleNotFound | ShuffleNotSealed | DataLost) and job.cuts
            if not (gone or cut):
                books.refused(f"reading {job.name}", job, error)
            books.sleep(AGAIN_SECONDS)
        return True

    await again(books, address, stop, step)


def read_one(books: ShuffleBooks, shuffles: Shuffles, job: ShuffleAccount, random: Random) -> Description:
    """All of a shuffle, which is held against what was written. Raises what reading raises."""
    planned = shuffles.describe(job.name)
    if planned.state is not ShuffleState.SEALED:
        raise ShuffleNotSealed(f"{job.name} is {planned.state}")
    parts: dict[int, list[Row]] = {}
    for number in random.sample(range(len(planned.ranges)), len(planned.ranges)):
        parts[number] = [row for batch in shuffles.read(job.name, number, planned=planned) for row in _rows(batch)]
        books.sleep(random.random() * 0.05)
    rows = [row for number in sorted(parts) for row in parts[number]]
    job.read += 1
    books.rows_read += len(rows)
    books.note("read", job.name, len(rows))
    books.wrong += differences(job, rows)
    return planned


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = [batch.column(number).to_pylist() for number in range(4)]
    return zip(*columns, strict=True)


def differences(job: ShuffleAccount, rows: list[Row]) -> list[str]:
    """What is wrong with all rows of a shuffle, as a reader got them."""
    if rows == (expected := job.expected()):
        return []
    there, wanted = set(rows), set(expected)
    return [
        f"{job.name} reads otherwise than it was written: {len(rows)} rows instead of {len(expected)}, "
        f"{len(wanted - there)} are missing, {len(there - wanted)} are of no committed attempt, {len(rows) - len(there)} are "
        f"repeated, {'all' if sorted(rows) == rows else 'not all'} in order"
    ]


# --- the end ----------------------------------------------------------------------------------------------------------------


def judge_shuffles(books: ShuffleBooks) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    return books.wrong[:TOLD_MAX] + unsealed(books)


def unsealed(books: ShuffleBooks) -> list[str]:
    """Shuffles that were not finished."""
    return [
        f"{job.name} was never sealed, {sum(not job.written(each) for each in range(job.partitions))} of {job.partitions} "
        "partitions were never written"
        for job in books.living()
        if not job.sealed
    ]

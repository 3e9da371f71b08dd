"""What a record did, told to the shell that applied it. Pure.

An effect of a Push, a settlement or a command concerns the record that was just applied, so whoever wrote that record takes it
from what `State.apply` returned for it. `Delivered` names the Pop it answers and may come out of any record.
"""

from __future__ import annotations

from typing import NamedTuple

from roq.workqueue.ready import StoredTask
from roq.workqueue.records import BlobRef, TaskKey


class Handed(NamedTuple):
    """A task as it was when it was leased. due: ms when the lease ends."""

    delivery: int
    attempt: int
    due: int
    task: StoredTask


class TasksDelivered(NamedTuple):
    """The answer to a Pop; nothing in it: there was no task in time. A Pop may be answered twice when its record was written
    twice; the second answer has what it still leases of the first."""

    instance: int
    nonce: int
    handed: tuple[Handed, ...]


class Settled(NamedTuple):
    """Whether the record with a delivery, or Configure or Replaced, did anything."""

    applied: bool


class Known(NamedTuple):
    """The Push added nothing: it is this task, by its number or its dedup key."""

    task: TaskKey


class RecordRefused(NamedTuple):
    """The record did nothing, and whether one like it did before is not known: a Push or Pop with a number from too long ago,
    or a Pop of an instance that was declared dead."""


class TasksChanged(NamedTuple):
    """How many tasks a command changed."""

    tasks: int


class Dropped(NamedTuple):
    """No task has this blob any more."""

    blob: BlobRef


Effect = TasksDelivered | Settled | Known | RecordRefused | TasksChanged | Dropped

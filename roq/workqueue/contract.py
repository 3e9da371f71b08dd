"""What every work queue does, whatever its address: the verbs of a backend and the values they take and give.

A backend is plain blocking code that any thread may call; `roq.workqueue.queue` puts the asynchronous API on top of it and
`roq.blocking` the plain one. Not covered here: how an address finds its backend (address.py).

Promises of every backend: what `put` returned is leased until it is acked; `put` and `settle` return when their effect is on
stable storage (except `memory:`); at most one lease of a task is valid at any time; a settlement with the token of an older
lease changes nothing and is answered None; order is by priority (higher first), then by insertion, and only nearly so with
`file:`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from roq.wire.work_queue import TaskSettings

LEASE_COUNT_MAX = 1000  # tasks handed out at once
PUT_COUNT_MAX = 10_000  # tasks taken at once; `WorkQueue.put_many` cuts longer lists
ERROR_BYTES_MAX = 4096  # of the text kept with a failed task; longer ones are cut
PRIORITIES = range(-128, 128)  # 0 is the default, higher goes first
DEDUP_KEY_BYTES_MAX = 256


class TaskState(StrEnum):
    """Where a task is."""

    READY = "ready"
    DELAYED = "delayed"
    LEASED = "leased"
    DEAD = "dead"


Asked = Mapping[str, float]  # settings by name; who leaves one out takes what the queue has, and for a new one the default


def asked_for(settings: TaskSettings | Asked | None) -> Asked:
    """What is asked of a queue; Settings ask for all of theirs."""
    if isinstance(settings, TaskSettings):
        return {name: getattr(settings, name) for name in TaskSettings.__struct_fields__}
    return settings or {}


def of_new(asked: Asked) -> TaskSettings:
    """The settings of a new queue."""
    return msgspec.convert(dict(asked), TaskSettings)


def conflict(asked: Asked, found: TaskSettings) -> str:
    """How a queue differs from what is asked of it: `name value, not value, …`; "" if it does not."""
    differing = ((name, getattr(found, name), value) for name, value in asked.items())
    return ", ".join(f"{name} {has}, not {value}" for name, has, value in differing if has != value)


class ClusterSettings(TaskSettings, frozen=True):
    """What a work queue of a cluster is created with.

    write_quorum: stores that keep each task; ack_quorum: that must have synced it before it counts. Where nobody chose them
    they grow as hosts join. standbys: masters in waiting that are wanted. inline_bytes: payloads from this size on go straight
    to a store.
    """

    write_quorum: int = 0
    ack_quorum: int = 0
    standbys: int = 0
    inline_bytes: int = 0


class NewTask(msgspec.Struct, frozen=True):
    """A task to put. dedup_key: "" for none."""

    payload: bytes
    delay_seconds: float = 0.0
    priority: int = 0
    dedup_key: str = ""


class Leased(msgspec.Struct, frozen=True):
    """A task and the right to work on it until `expires`. attempt: 1 for the first lease. inserted, expires: Unix seconds.
    since: monotonic seconds of this process; the lease began then or later; 0: not known."""

    id: str
    token: str
    payload: bytes
    attempt: int
    priority: int
    inserted: float
    expires: float
    since: float = 0.0


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The task is done."""

    token: str


class Extend(msgspec.Struct, frozen=True, tag=True):
    """Keep the lease for `seconds` from now."""

    token: str
    seconds: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """Give the task back, to be leased again after `delay_seconds`. error: why, "" if it was not tried."""

    token: str
    delay_seconds: float = 0.0
    error: str = ""


class Reject(msgspec.Struct, frozen=True, tag=True):
    """Never try this task again: it becomes a dead letter with this error."""

    token: str
    error: str


Settlement = Ack | Extend | Release | Reject


class Status(msgspec.Struct, frozen=True):
    """Counts of tasks. completed, inserted: since the queue exists. oldest_seconds: age of the oldest ready task, None if none
    is ready."""

    ready: int
    delayed: int
    leased: int
    dead: int
    completed: int
    inserted: int
    oldest_seconds: float | None


class TaskView(msgspec.Struct, frozen=True):
    """A task as `peek` shows it. attempts: leases so far. due: Unix seconds when it is ready (DELAYED) or its lease ends
    (LEASED), 0 otherwise. error: of the last failed attempt. holder: who leases it, as far as known."""

    id: str
    payload: bytes
    state: TaskState
    attempts: int
    priority: int
    inserted: float
    due: float
    error: str
    holder: str


class Backend(Protocol):
    """One open work queue. Blocking; any thread. Every call may raise Closed, CallError or a TemporaryError.

    CallError itself, InvalidConfiguration and PayloadTooLarge mean that nothing was done; after any other error it is unknown.
    """

    settings: TaskSettings

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none as far as the medium can; their ids. At most PUT_COUNT_MAX."""

    def lease(
        self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()
    ) -> tuple[list[str | None], list[Leased]]:
        """First `settle`, then up to `count` tasks, in one trip where the backend can. Waits up to `wait_seconds` for the first
        task; none: an empty list. The first list is that of `settle`."""

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """Per settlement: the token valid from now on ("" when the lease is over), or None: that lease was lost before."""

    def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """The first tasks of a state, without leasing them."""

    def purge(self) -> int:
        """Remove every task that is not dead, leased ones too (their workers get LeaseLost); how many."""

    def status(self) -> Status:
        """Counts, as of now."""

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """Make dead letters ready again with attempts at 0 (None: all); how many."""

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """Forget dead letters (None: all); how many."""

    def close(self) -> None:
        """Let go; a lease() that waits in another thread ends with Closed. What is leased stays leased until it expires."""

"""What every work queue does, whatever its address: the verbs of a backend, and the limits of what they take.

A backend is plain blocking code that any thread may call; `roq.workqueue.queue` puts the asynchronous API on top of it and
`roq.blocking` the plain one. Not covered here: the values of tasks (roq/wire/task.py), how an address finds its backend
(address.py).

Promises of every backend: what `put` returned is leased until it is acked; `put` and `settle` return when their effect is on
stable storage (except `memory:`); at most one lease of a task is valid at any time; a settlement with the token of an older
lease changes nothing and is answered None; order is by priority (higher first), then by insertion, and only nearly so with
`file:`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from roq.errors import InvalidConfiguration, PayloadTooLarge
from roq.wire.headers import PRIORITIES, Headers, with_headers
from roq.wire.task import LeasedTask, NewTask, Settlement, Status, TaskState, TaskView, check_delay, check_lease_seconds
from roq.wire.work_queue import TaskSettings

LEASE_COUNT_MAX = 1000  # tasks handed out at once
PUT_COUNT_MAX = 10_000  # tasks taken at once; `WorkQueue.put_many` cuts longer lists
DEDUP_KEY_BYTES_MAX = 256

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


class RoundTrip(NamedTuple):
    """What one `lease` gave: the answers to its settlements, and tasks. began: monotonic seconds of this process; their leases
    began then or later; 0: not known."""

    settled: list[str | None]
    tasks: list[LeasedTask[bytes]]
    began: float = 0.0


def check_lease(seconds: float, count: int = 1, wait_seconds: float | None = 0.0) -> None:
    """Raises InvalidConfiguration."""
    check_lease_seconds(seconds)
    if not 1 <= count <= LEASE_COUNT_MAX:
        raise InvalidConfiguration(f"1 to {LEASE_COUNT_MAX} tasks can be leased at once, got {count}")
    if wait_seconds is not None and not wait_seconds >= 0:
        raise InvalidConfiguration(f"wait_seconds is at least 0, got {wait_seconds}")


def check_peek(count: int) -> None:
    """Raises InvalidConfiguration."""
    if count < 0:
        raise InvalidConfiguration(f"count is at least 0, got {count}")


def check_put(tasks: Sequence[NewTask], settings: TaskSettings) -> None:
    """Raises InvalidConfiguration or PayloadTooLarge."""
    if len(tasks) > PUT_COUNT_MAX:
        raise InvalidConfiguration(f"at most {PUT_COUNT_MAX} tasks can be put at once, got {len(tasks)}")
    limit = settings.payload_bytes_max
    for task in tasks:
        if len(task.payload) > limit:
            raise PayloadTooLarge(f"a payload has at most {limit} bytes, got {len(task.payload)}")
        if task.delay_seconds:
            check_delay(task.delay_seconds)
        if task.priority and (type(task.priority) is not int or task.priority not in PRIORITIES):
            raise InvalidConfiguration(f"a priority is {PRIORITIES[0]} to {PRIORITIES[-1]}, got {task.priority}")
        if task.dedup_key:
            _check_dedup_key(task.dedup_key)


def _check_dedup_key(key: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidConfiguration(f"a dedup_key is text, got {key!r}") from error
    if size > DEDUP_KEY_BYTES_MAX:
        raise InvalidConfiguration(f"a dedup_key has at most {DEDUP_KEY_BYTES_MAX} bytes of UTF-8, got {size}")


class Backend(Protocol):
    """One open work queue. Blocking; any thread. Every call may raise Closed, CallError or a TemporaryError.

    CallError itself, InvalidConfiguration and PayloadTooLarge mean that nothing was done; after any other error it is unknown.
    """

    settings: TaskSettings

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """Store tasks, all or none as far as the medium can; their ids. At most PUT_COUNT_MAX."""

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """First `settle`, then up to `count` tasks, in one trip where the backend can. Waits up to `wait_seconds` for the first
        task."""

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


def open_shards(backend: Backend) -> int:
    """How many shards of it take tasks; 1 of one that has none. None is to wait for another."""
    return int(getattr(backend, "open_shards", 1))


# --- what callers give, for both faces ---------------------------------------------------------------------------------

PUT_BYTES = 4 * 1024 * 1024  # payload bytes that travel together; more only for one payload larger than this


def new_task(payload: bytes, delay_seconds: float, priority: int, dedup_key: str, headers: Headers | None) -> NewTask:
    """A task to put, its headers in the payload. Raises TypeError for a payload that is not bytes, InvalidHeaders."""
    if type(payload) is not bytes:
        payload = _as_bytes(payload)
    return NewTask(with_headers(payload, headers), delay_seconds, priority, dedup_key)


def _as_bytes(payload: object) -> bytes:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return bytes(payload)
    raise TypeError(f"a payload is bytes, got {type(payload).__name__}")


def put_parts(tasks: Iterable[NewTask | bytes]) -> Iterator[list[NewTask]]:
    """Any number of tasks in parts that travel together."""
    part: list[NewTask] = []
    size = 0
    for given in tasks:
        if isinstance(given, NewTask):
            task = new_task(given.payload, given.delay_seconds, given.priority, given.dedup_key, given.headers)
        else:
            task = NewTask(with_headers(_as_bytes(given), None))
        if part and (len(part) == PUT_COUNT_MAX or size + len(task.payload) > PUT_BYTES):
            yield part
            part, size = [], 0
        part.append(task)
        size += len(task.payload)
    if part:
        yield part

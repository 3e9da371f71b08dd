"""The values of a task, one set for all: what backends take and give, what travels to a master and back, what users see.

Times inside are whole milliseconds, times of day since 1970. Users give and get seconds: `NewTask` and the constructors of
`Settlement` take them, the properties of `TaskView` and `Status` and the attributes of a leased `Task` give them. Most values
are written to the wire as they are (roq/wire/master.py): arrays, in the order of their fields. Not covered: what a queue's
settings are (work_queue.py), what is done with a task (roq/workqueue/contract.py).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from roq.errors import InvalidConfiguration
from roq.wire.headers import Headers, split_headers

ERROR_BYTES_MAX = 4096  # of the text kept with a failed task; longer ones are cut
SECONDS_MAX = 10 * 366 * 86_400.0  # of a delay or a lease; more is a mistake


def milliseconds(seconds: float) -> int:
    """Rounded up, so that nothing ends early."""
    return math.ceil(seconds * 1000 - 1e-6)


def check_lease_seconds(seconds: float) -> None:
    """Raises InvalidConfiguration."""
    if not 0 < seconds <= SECONDS_MAX:
        raise InvalidConfiguration(f"a lease lasts more than 0 and at most {SECONDS_MAX:.0f} seconds, got {seconds}")


def check_delay(seconds: float) -> None:
    """Raises InvalidConfiguration."""
    if not 0 <= seconds <= SECONDS_MAX:
        raise InvalidConfiguration(f"a delay is 0 to {SECONDS_MAX:.0f} seconds, got {seconds}")


def cut_error(text: str) -> str:
    """At most ERROR_BYTES_MAX bytes of an error's text."""
    data = text.encode(errors="replace")
    return data[:ERROR_BYTES_MAX].decode(errors="ignore")


class TaskState(StrEnum):
    """Where a task is."""

    READY = "ready"
    DELAYED = "delayed"
    LEASED = "leased"
    DEAD = "dead"


# --- payloads that stores keep --------------------------------------------------------------------------------------------


class StoreAddress(msgspec.Struct, frozen=True, array_like=True):
    """A store: its host and the ZeroMQ endpoint of its request socket."""

    host: str
    endpoint: str


class PayloadReference(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A payload that stores keep. crc: CRC-32 of its bytes. stores: in the order to be tried."""

    blob: str
    size: int
    crc: int
    stores: tuple[StoreAddress, ...]


PayloadT_co = TypeVar(
    "PayloadT_co", bound=bytes | PayloadReference, covariant=True
)  # a reference only between a master and its client


# --- tasks --------------------------------------------------------------------------------------------------------------


class NewTask(msgspec.Struct, frozen=True):
    """A task to put. dedup_key: "" for none. headers: see headers.py."""

    payload: bytes
    delay_seconds: float = 0.0
    priority: int = 0
    dedup_key: str = ""
    headers: Headers | None = None


class TaskToPut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A NewTask on its way to a master."""

    payload: bytes
    delay_ms: int = 0
    priority: int = 0
    dedup_key: str = ""


class LeasedTask(msgspec.Struct, Generic[PayloadT_co], frozen=True, array_like=True, gc=False):
    """A task and the right to work on it until `expires_ms`. attempt: 1 for the first lease. topic: of a group's message, which
    was inserted when it was published; "" for a task that was put."""

    id: str
    token: str
    payload: PayloadT_co
    attempt: int
    priority: int
    inserted_ms: int
    expires_ms: int
    topic: str = ""


class TaskView(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task as `peek` shows it. attempts: leases so far. error: of the last failed attempt. holder: who leases it, as far as
    known. due_ms: see `due`. topic: as a LeasedTask has it."""

    id: str
    payload: bytes
    state: TaskState
    attempts: int
    priority: int
    inserted_ms: int
    due_ms: int
    error: str
    holder: str
    _headers: dict[str, Any] | None = None  # between master and client they are in the payload
    topic: str = ""

    def __hash__(self) -> int:
        return hash((self.id, self.state, self.attempts))

    @property
    def headers(self) -> dict[str, str | bytes]:
        """What whoever put it said of it, {} if nothing."""
        return self._headers or {}

    def opened(self) -> TaskView:
        """Of one as it is stored: the payload alone, and its headers."""
        payload, headers = split_headers(self.payload)
        return self if payload is self.payload else msgspec.structs.replace(self, payload=payload, _headers=headers)

    @property
    def inserted(self) -> float:
        """Unix seconds."""
        return self.inserted_ms / 1000

    @property
    def due(self) -> float:
        """Unix seconds when it is ready (DELAYED) or its lease ends (LEASED), 0 otherwise."""
        return self.due_ms / 1000


class Status(msgspec.Struct, frozen=True, tag=6, array_like=True, gc=False):
    """Counts of tasks. completed, inserted, expired: since the queue exists. oldest_ms: see `oldest_seconds`, behind_ms:
    `behind_seconds`; -1 for None. expired: messages of a group whose `roq-ttl` was over before anybody was done with them. lag:
    messages on the tapes of a group's queue that are not in the group yet, whether or not it wants them; -1: it is no group, or
    that is not known. outgoing: messages of committed transactions that are not on the tapes of their queues yet. missed: gaps
    in what came into a group: ranges that had expired, or could not be read, before it had them; its master's log has them."""

    ready: int
    delayed: int
    leased: int
    dead: int
    completed: int
    inserted: int
    oldest_ms: int = -1
    behind_ms: int = -1
    expired: int = 0
    lag: int = -1
    outgoing: int = 0
    missed: int = 0

    @property
    def behind_seconds(self) -> float | None:
        """Of a group: how long ago the message was written that comes into it next; 0.0: all of them are in it. None: it is no
        group, or that is not known yet."""
        return self.behind_ms / 1000 if self.behind_ms >= 0 else None

    @property
    def oldest_seconds(self) -> float | None:
        """Age of the oldest ready task, None if none is ready."""
        return self.oldest_ms / 1000 if self.oldest_ms >= 0 else None


# --- settlements ----------------------------------------------------------------------------------------------------------

ACK, EXTEND, RELEASE, REJECT = range(4)


class Settlement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end or extension of a lease. milliseconds: of an extension, or the delay of a release.

    The constructors below raise InvalidConfiguration; a token may be left out until it is known (`of`)."""

    kind: int
    token: str
    milliseconds: int = 0
    error: str = ""

    @classmethod
    def ack(cls, token: str = "") -> Settlement:
        """The task is done."""
        return cls(ACK, token)

    @classmethod
    def extend(cls, token: str, seconds: float) -> Settlement:
        """Keep the lease for `seconds` from now."""
        check_lease_seconds(seconds)
        return cls(EXTEND, token, milliseconds(seconds))

    @classmethod
    def release(cls, token: str, delay_seconds: float = 0.0, error: str = "") -> Settlement:
        """Give the task back, to be leased again after `delay_seconds`. error: why, "" if it was not tried."""
        check_delay(delay_seconds)
        return cls(RELEASE, token, milliseconds(delay_seconds), cut_error(error))

    @classmethod
    def reject(cls, token: str, error: str) -> Settlement:
        """Never try this task again: it becomes a dead letter with this error."""
        return cls(REJECT, token, 0, cut_error(error))

    def of(self, token: str) -> Settlement:
        """The same for this lease."""
        return Settlement(self.kind, token, self.milliseconds, self.error)

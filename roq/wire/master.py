"""Conversation between clients and the master of a work queue (its ROUTER ↔ DEALER).

    [1, kind, id, body]   as in envelope.py; requests and replies are decoded in one go, bodies are the arrays below

A request that got no answer is sent again, to whoever is the active master then, with the same numbers: (producer, sequence)
names a put task for ever, (instance, nonce) a lease request, and `again` tells that it may have been done before. A standby,
and a master that was replaced, answer NotLeader. What tasks, settlements and views are is in task.py.
Payloads from `blob_bytes` on travel beside this conversation (roq/wire/store.py): Reserve, upload to the store that was named,
Stored; a lease names the stores to fetch from.
"""

from __future__ import annotations

from typing import Any

import msgspec

from roq.wire.envelope import VERSION, EnvelopeKind
from roq.wire.task import LeasedTask, PayloadReference, Settlement, Status, StoreAddress, TaskToPut, TaskView
from roq.wire.work_queue import TaskSettings

# --- requests ----------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Are you the active master?"""


class Put(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Add tasks, numbered from `sequence` on."""

    producer: int
    sequence: int
    tasks: list[TaskToPut]


class Lease(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Settle, then hand out up to `count` tasks; wait up to wait_ms for the first one."""

    instance: int
    nonce: int
    again: int
    lease_ms: int
    count: int
    wait_ms: int
    settle: list[Settlement]


class SettleAll(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """Settle."""

    instance: int
    again: int
    settle: list[Settlement]


class ReleaseEvery(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """Make every leased and delayed task ready."""


class PurgeQueue(msgspec.Struct, frozen=True, tag=6, array_like=True, gc=False):
    """Remove every task that is not dead."""


class RequeueLetters(msgspec.Struct, frozen=True, tag=7, array_like=True, gc=False):
    """Make dead letters ready again; None: all."""

    ids: list[str] | None


class RemoveLetters(msgspec.Struct, frozen=True, tag=8, array_like=True, gc=False):
    """Forget dead letters; None: all."""

    ids: list[str] | None


class Peek(msgspec.Struct, frozen=True, tag=9, array_like=True, gc=False):
    """The first tasks of a state."""

    state: str
    count: int


class GetStatus(msgspec.Struct, frozen=True, tag=10, array_like=True, gc=False):
    """Counts."""


class Reserve(msgspec.Struct, frozen=True, tag=11, array_like=True, gc=False):
    """Where may I store the payload of task (producer, sequence)? (Blizzard's pending enqueue.) avoid: hosts that failed."""

    producer: int
    sequence: int
    size: int
    crc: int
    avoid: list[str]


class PayloadStored(msgspec.Struct, frozen=True, tag=12, array_like=True, gc=False):
    """The payload of task (producer, sequence) is stored as `blob`. task: its payload is empty. Answered with Added when
    enough stores have copies and the task is in the log."""

    producer: int
    sequence: int
    blob: str
    task: TaskToPut


class GetCopies(msgspec.Struct, frozen=True, tag=13, array_like=True, gc=False):
    """Has everything that stores keep for this queue all of its copies? They are asked now."""


# --- replies -----------------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """I am."""

    term: int
    settings: TaskSettings
    blob_bytes: int


class TasksAdded(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """The tasks are in the log. known: (place in the request, id) of those that are another, earlier task, by their key.
    repeated: places of those whose numbers were used before, so that this request changed nothing."""

    known: list[tuple[int, str]] = []
    repeated: list[int] = []


class Leases(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Per settlement the token valid now, "" if the lease is over, None if it was lost before; and tasks. waited: ms from the
    request's coming to the leases' begin, at least."""

    settled: list[str | None]
    tasks: list[LeasedTask[bytes | PayloadReference]]
    waited: int = 0


class Counted(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """How many tasks were changed."""

    count: int


class PeekedTask(TaskView, frozen=True, array_like=True, gc=False):
    """A task as peek shows it, whose payload stores may keep."""

    payload: bytes | PayloadReference  # type: ignore[assignment]


class PeekedTasks(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """Answer to Peek."""

    tasks: list[PeekedTask]


class Reserved(msgspec.Struct, frozen=True, tag=7, array_like=True, gc=False):
    """Upload it there, as this blob, soon."""

    blob: str
    store: StoreAddress


class Shortage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something with fewer copies than it should have. hosts: named for one that is not complete, or can't be asked."""

    what: str
    copies: int
    wanted: int
    hosts: tuple[str, ...]


class Copies(msgspec.Struct, frozen=True, tag=8, array_like=True, gc=False):
    """Answer to GetCopies. shortages: at most SHORTAGES_MAX, none if everything is complete."""

    shortages: list[Shortage]


SHORTAGES_MAX = 100

Request = (
    Hello
    | Put
    | Lease
    | SettleAll
    | ReleaseEvery
    | PurgeQueue
    | RequeueLetters
    | RemoveLetters
    | Peek
    | GetStatus
    | Reserve
    | PayloadStored
    | GetCopies
)
Reply = Welcome | TasksAdded | Leases | Counted | PeekedTasks | Status | Reserved | Copies


class Call(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request with its envelope."""

    version: int
    kind: int
    id: int
    body: Request


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reply with its envelope."""

    version: int
    kind: int
    id: int
    body: Reply


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def seal_call(id: int, body: Request) -> bytes:
    """The bytes of a request."""
    return _encode((VERSION, int(EnvelopeKind.REQUEST), id, body))


def seal_answer(id: int, body: Any) -> bytes:
    """The bytes of a reply."""
    return _encode((VERSION, int(EnvelopeKind.REPLY), id, body))


def open_call(message: bytes) -> Call:
    """Raises msgspec's errors or UnicodeDecodeError (UNDECODABLE) for anything but a well-formed request."""
    call = _decode_call(message)
    if call.version != VERSION or call.kind != EnvelopeKind.REQUEST or call.id < 0:
        raise msgspec.ValidationError(f"message of version {call.version}, kind {call.kind}")
    return call


def open_answer(message: bytes) -> Answer:
    """Raises as open_call for anything but a well-formed reply; errors are opened with envelope.error_of."""
    answer = _decode_answer(message)
    if answer.version != VERSION or answer.kind != EnvelopeKind.REPLY:
        raise msgspec.ValidationError(f"message of version {answer.version}, kind {answer.kind}")
    return answer

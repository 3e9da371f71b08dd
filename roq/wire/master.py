"""Conversation between clients and the master of a work queue (its ROUTER ↔ DEALER).

    [1, kind, id, body]   as in envelope.py; requests and replies are decoded in one go, bodies are the arrays below

A request that got no answer is sent again, to whoever is the active master then, with the same numbers: (producer, sequence)
names a put task for ever, (instance, nonce) a lease request, and `again` tells that it may have been done before. A standby,
and a master that was replaced, answer NotLeader. What tasks, settlements and views are is in task.py.
Payloads from `blob_bytes` on travel beside this conversation (roq/wire/store.py): Reserve, upload to the store that was named,
Stored; a lease names the stores to fetch from. A transaction is acks and messages that take effect together (CommitAll);
masters of version 0.2 and before don't understand it, and say so.
"""

from __future__ import annotations

from typing import Any

import msgspec

from roq.ids import RESERVED
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


class OutgoingMessages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a transaction publishes to one recorded queue, in this order: topic, and payload behind its headers."""

    queue: str
    messages: list[tuple[str, bytes]]


class TransactionToCommit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """(producer, sequence) names it for ever. tokens: of the leases that it acks. One destination per queue."""

    producer: int
    sequence: int
    tokens: list[str]
    outgoing: list[OutgoingMessages]


class CommitAll(msgspec.Struct, frozen=True, tag=14, array_like=True, gc=False):
    """Commit transactions, each by itself."""

    transactions: list[TransactionToCommit]


class CountHeld(msgspec.Struct, frozen=True, tag=15, array_like=True, gc=False):
    """How many payloads are to be on this host, or on their way there? Answered with Counted."""

    host: str


class FindKeys(msgspec.Struct, frozen=True, tag=16, array_like=True, gc=False):
    """Which tasks do these dedup keys stand for? Answered by a closed shard, so that nobody puts them there meanwhile."""

    keys: list[str]


class CountLeft(msgspec.Struct, frozen=True, tag=17, array_like=True, gc=False):
    """How much keeps a closed shard from being removed: tasks of every state, payloads on their way, dedup keys that are still
    remembered? Answered with Counted."""


class EndWaits(msgspec.Struct, frozen=True, tag=18, array_like=True, gc=False):
    """These lease requests of an instance wait no longer: each that still does is answered, with nothing. Answered: Counted."""

    instance: int
    nonces: list[int]


# --- replies -----------------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """I am. shards: version of the list of shards."""

    term: int
    settings: TaskSettings
    blob_bytes: int
    shards: int = 0


class TasksAdded(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """The tasks are in the log. known: (place in the request, id) of those that are another, earlier task, by their key.
    repeated: places of those whose numbers were used before, so that this request changed nothing. refused: of a closed shard,
    places of those that it did not take. shards: version of the list of shards."""

    known: list[tuple[int, str]] = []
    repeated: list[int] = []
    refused: list[int] = []
    shards: int = 0


class Leases(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Per settlement the token valid now, "" if the lease is over, None if it was lost before; and tasks. waited: ms from the
    request's coming to the leases' begin, at least. shards: version of the list of shards."""

    settled: list[str | None]
    tasks: list[LeasedTask[bytes | PayloadReference]]
    waited: int = 0
    shards: int = 0


class Counted(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """How many tasks were changed. shards: version of the list of shards."""

    count: int
    shards: int = 0


class PeekedTask(TaskView, frozen=True, array_like=True, gc=False):
    """A task as peek shows it, whose payload stores may keep."""

    payload: bytes | PayloadReference  # type: ignore[assignment]


class PeekedTasks(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """Answer to Peek. shards: version of the list of shards."""

    tasks: list[PeekedTask]
    shards: int = 0


class MasterStatus(Status, frozen=True, tag=6, array_like=True, gc=False):
    """Answer to GetStatus. shards: version of the list of shards."""

    shards: int = 0

    def counts(self) -> Status:
        """What programs see of it."""
        return Status(*msgspec.structs.astuple(self)[: len(Status.__struct_fields__)])


class Reserved(msgspec.Struct, frozen=True, tag=7, array_like=True, gc=False):
    """Upload it there, as this blob, soon."""

    blob: str
    store: StoreAddress


class KeysFound(msgspec.Struct, frozen=True, tag=10, array_like=True, gc=False):
    """Answer to FindKeys: ids of the tasks, None for keys that stand for nothing."""

    ids: list[str | None]


class Shortage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something with fewer copies than it should have. hosts: named for one that is not complete, or can't be asked."""

    what: str
    copies: int
    wanted: int
    hosts: tuple[str, ...]


class Copies(msgspec.Struct, frozen=True, tag=8, array_like=True, gc=False):
    """Answer to GetCopies. shortages: at most SHORTAGES_MAX, none if everything is complete."""

    shortages: list[Shortage]


class TransactionOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one transaction. repeated: its number was used before, and took effect then. Else nothing was done if there are lost:
    places of tokens whose lease is over; or an error: name and text of why it was refused."""

    repeated: bool = False
    lost: list[int] = []
    error: tuple[str, str] = ("", "")


class Committed(msgspec.Struct, frozen=True, tag=9, array_like=True, gc=False):
    """Answer to CommitAll: an outcome for each."""

    outcomes: list[TransactionOutcome]


SHORTAGES_MAX = 100
TRANSACTIONS = RESERVED + "transactions"  # the work queue that commits what acks nothing
OUTBOX_PREFIX = RESERVED + "outbox."  # and the id of a work queue's log: the producer that publishes its transactions
TRANSACTIONS_AT_ONCE = 1_000  # in one request
TRANSACTION_ACKS_MAX = 1_000
TRANSACTION_MESSAGES_MAX = 10_000
TRANSACTION_QUEUES_MAX = 100
TRANSACTION_BYTES_MAX = 2 * 1024 * 1024  # topics and payloads behind their headers: one entry of a log holds it

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
    | CommitAll
    | CountHeld
    | FindKeys
    | CountLeft
    | EndWaits
)
Reply = Welcome | TasksAdded | Leases | Counted | PeekedTasks | MasterStatus | Reserved | Copies | Committed | KeysFound


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

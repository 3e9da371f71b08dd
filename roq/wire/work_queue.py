"""Work queues as the GCM keeps them: the JSON of `work-queues/<q>`, what a master is told, and where masters serve.

The conversation with a master is in roq/wire/master.py. A work queue and a publish/subscribe queue may have the same name.
Shards of a work queue are in shards.py.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from roq.wire.shards import ShardList, shard_name

PAYLOAD_BYTES_MAX = 1024 * 1024  # default limit of one payload
QUORUM_MAX = 9  # stores of one segment
STANDBYS_MAX = 15
INLINE_BYTES = 64 * 1024  # payloads from here on do not pass the master, unless its queue was made with another number
INLINE_BYTES_MAX = 1024 * 1024  # a log's entry may hold one beside a full batch


def in_words(value: msgspec.Struct) -> str:
    """Values in the text of errors: `name value, name value …`, as people write them, without the names of our classes."""
    return ", ".join(f"{name} {getattr(value, name)}" for name in value.__struct_fields__)


class TaskSettings(msgspec.Struct, frozen=True):
    """What a work queue is created with; kept with the queue, so that every process that opens it obeys the same.

    max_attempts: a task leased this often and not acked is dead, unless it was released without an error; 0: never.
    dedup_seconds: a `dedup_key` put again within this time is the same task.
    """

    max_attempts: int = 0
    dedup_seconds: float = 300.0
    payload_bytes_max: int = PAYLOAD_BYTES_MAX

    def __str__(self) -> str:
        return in_words(self)


class GroupOrder(StrEnum):
    """In which order a group's members get its messages."""

    TOPIC = "topic"  # of a topic one at a time, in each publisher's order
    NONE = "none"  # whoever asks gets the next one


class GroupSource(msgspec.Struct, frozen=True):
    """Where the tasks of a group come from: messages of a recorded queue. tapes: the queue's part of their names, see
    recording.py. topics: filters. start: "earliest", a time (ISO 8601) or the text of a TapePosition; only for the first time.
    where: a condition on the content, "" for none."""

    queue: str
    tapes: str = ""
    topics: tuple[str, ...] = (">",)
    order: GroupOrder = GroupOrder.TOPIC
    start: str = "earliest"
    where: str = ""


class WorkQueueSpec(msgspec.Struct, frozen=True):
    """What every master and standby of a work queue is told. `log`: id of its replicated log, which no other queue ever has,
    not even one of the same name. Quorums: stores that keep each entry, and that must have it before it counts. inline_bytes:
    payloads from this size on go straight to a store. source: it is a group of a recorded queue, filled from there. shards: the
    version of its list of shards, which its clients are told; 0: it never had any. closed: a shard that takes no more tasks."""

    log: str
    write_quorum: int
    ack_quorum: int
    settings: TaskSettings = TaskSettings()
    inline_bytes: int = INLINE_BYTES
    source: GroupSource | None = None
    shards: int = 0
    closed: bool = False


class WorkQueueRecord(msgspec.Struct, frozen=True):
    """JSON of `work-queues/<q>`. standbys: wanted ones; standby_hosts: where they are. term: of the active master. grows: its
    quorums were not chosen, so they grow up to the default ones as hosts join. shards: None: it is one shard and always was."""

    name: str
    spec: WorkQueueSpec
    standbys: int
    master_host: str
    term: int
    standby_hosts: tuple[str, ...]
    created: float  # seconds since 1970, for people only
    transaction: str  # id of the request that created it
    grows: bool = False
    shards: ShardList | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of its active master (first) and its standbys."""
        return (self.master_host, *self.standby_hosts)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Its shards but the first, as work queues."""
        return tuple(shard_name(self.name, number) for number in self.shards.numbers if number) if self.shards else ()


class MasterAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a running master or standby serves."""

    host: str
    address: str  # IP address or DNS name
    port: int
    term: int
    active: bool

    def endpoint(self) -> str:
        """ZeroMQ endpoint of its request socket."""
        return f"tcp://{self.address}:{self.port}"

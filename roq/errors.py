"""Every error RoQ raises on purpose. One root, subclasses by what the caller can do; the docstring is the default message.

Not covered here: programming mistakes inside RoQ, which stay ordinary Python exceptions.
"""

from __future__ import annotations


class RoqError(Exception):
    """Something RoQ was asked to do could not be done."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


# --- fix the call -----------------------------------------------------------------------------------------------------


class CallError(RoqError):
    """The call itself is wrong: repeating it unchanged can't help."""


class InvalidName(CallError):
    """The name is empty, too long, or has characters that are not allowed."""


class InvalidTopic(CallError):
    """A topic is 1 to 255 bytes of UTF-8 without NUL."""


class PayloadTooLarge(CallError):
    """The payload is larger than the queue's frame limit."""


class InvalidHeaders(CallError):
    """Headers are names with text or bytes, 4 KiB for one message at most."""


class IncompatibleVersion(CallError):
    """Somebody in the queue runs a version of RoQ that can't read this."""


class InvalidPolicy(CallError):
    """The scaling policy has unknown, missing or contradictory fields."""


class InvalidConfiguration(CallError):
    """A configuration value is missing, unknown or out of range."""


class InvalidFilter(InvalidConfiguration):
    """A condition (`where`) can't be read, or compares what can't be compared."""

    def __init__(self, message: str | None = None, column: int = 0) -> None:
        super().__init__(message)
        self.column = column  # from 1 on; 0: not known


class InvalidPosition(CallError):
    """A position is what a Receipt or a subscriber of the same queue gave."""


class NotRecorded(CallError):
    """The queue is not recorded: `roq queue record` switches that on."""


class ProducerNotFound(CallError):
    """The queue has no producer of this name."""


class DurableNotFound(CallError):
    """The queue has no durable subscriber of this name."""


class QueueNotFound(CallError):
    """No queue of this name exists."""


class QueueConflict(CallError):
    """A queue of this name exists with other settings."""


class QueueStopped(CallError):
    """The queue is stopped: start it first."""


class HostNotFound(CallError):
    """No host of this name is in the cluster."""


class HostConflict(CallError):
    """Another live host is registered under this name."""


class ExchangeNotFound(CallError):
    """The queue has no such Exchange."""


class PublisherNotFound(CallError):
    """The queue has no such publisher."""


class LastExchange(CallError):
    """A queue keeps at least one Exchange."""


class WorkQueueNotFound(CallError):
    """No work queue of this name exists."""


class GroupNotFound(WorkQueueNotFound):
    """The queue has no group of this name."""


class WorkQueueConflict(CallError):
    """A work queue of this name exists with other settings."""


class ShardClosed(CallError):
    """This shard of a work queue takes no more tasks: put them into another one, as whoever opens the whole queue does."""


class InvalidAddress(CallError):
    """A work queue's address is memory:, log:///dir, file:///dir, roq://zookeeper:port/name, postgresql://host/database?queue=name
    or jetstream://host:port/name."""


class TransactionTooLarge(CallError):
    """A transaction has limits: fewer messages, or smaller ones, in each."""


class TaskNotFound(CallError):
    """The work queue has no such task."""


class ShuffleNotFound(CallError):
    """No shuffle of this name exists."""


class ShuffleConflict(CallError):
    """A shuffle of this name exists with other keys, columns or settings."""


class ShuffleSealed(CallError):
    """The shuffle is sealed: its committed attempts are named and nothing can be written any more."""


class ShuffleNotSealed(CallError):
    """The shuffle is not sealed yet: commit it before it is read."""


class AttemptConflict(CallError):
    """This attempt was reported twice, or two attempts of one partition are to win."""


class AttemptNotFound(CallError):
    """No attempt of this id was stored."""


class SchemaMismatch(CallError):
    """The columns are not those that were agreed on."""


class UnknownFormat(CallError):
    """The stored data was written by another version and can't be read by this one."""


class StorageDenied(CallError):
    """The folder can't be read or written by this user."""


class AccessDenied(CallError):
    """The cluster takes only who shows a card, and the card has no right to this."""


class CardRevoked(AccessDenied):
    """The card was revoked: who goes on needs another one."""


class ProofRefused(AccessDenied):
    """The card does not prove that this publisher or subscriber is its own: open it again."""


class PortTaken(CallError):
    """A port this process must bind is in use by another program."""


# --- try again, perhaps elsewhere -------------------------------------------------------------------------------------


class TemporaryError(RoqError):
    """It did not work now; the same call may work later."""


class Unavailable(TemporaryError):
    """The cluster can't be reached: ZooKeeper or every Global Configuration Manager is away."""


class ZooKeeperUnavailable(Unavailable):
    """ZooKeeper can't be reached."""


class ClusterNotFound(Unavailable):
    """ZooKeeper answers, but no RoQ cluster lives under this chroot."""


class NotLeader(TemporaryError):
    """This Global Configuration Manager does not lead; ask the leader."""

    def __init__(self, message: str | None = None, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader  # "host:port" of the leader, empty while none is known


class StaleEpoch(TemporaryError):
    """The order comes from a Global Configuration Manager that no longer leads."""


class DeadlineExceeded(TemporaryError):
    """No answer came in time; whether the request took effect is unknown."""


class NotConfirmed(TemporaryError):
    """Messages left the replay buffer unconfirmed before their path broke: whether subscribers get them is unknown."""

    def __init__(self, message: str | None = None, first: int = 0, last: int = 0) -> None:
        super().__init__(message)
        self.first, self.last = first, last  # numbers of the publisher's messages


class HostFull(TemporaryError):
    """No host has a free Exchange slot."""


class NoHosts(TemporaryError):
    """No host is registered in the cluster."""


class NotReady(TemporaryError):
    """What was asked for exists but is not serving yet."""


class StorageFull(TemporaryError):
    """The disk is full; nothing that was acknowledged is lost."""


class StorageFailed(TemporaryError):
    """Stable storage failed; what was not acknowledged may be lost, nothing that was."""


class LogFenced(TemporaryError):
    """Another writer has taken this log over; whether the last appends took effect is unknown."""


class LogUnavailable(TemporaryError):
    """Too few of the log's stores can be reached."""


class AppendUnknown(TemporaryError):
    """The log's server did not say whether it took this entry: read on to see, or append it again."""


class NoResponder(TemporaryError):
    """Nobody serves this topic just now."""


class ResponderLost(TemporaryError):
    """The server left or died with the request: it may have been carried out or not."""


class Overloaded(TemporaryError):
    """No room just now; ask again later, or elsewhere."""


class WinnersUnknown(TemporaryError):
    """This follower does not know which attempts of the shuffle are committed: send it their names, and ask again."""


class AttemptLost(TemporaryError):
    """What was written of this attempt is gone: write it again as a new attempt."""


class DataLost(RoqError):
    """No replica has what was stored any more, or what it has is damaged."""


class ManifestGone(DataLost):
    """A manifest of leased tasks that Spark's checkpoint names is gone or damaged: its rows can't be read again."""


class ManifestsTaken(TemporaryError):
    """Another stream is using this folder of manifests."""


class LogTrimmed(TemporaryError):
    """What was asked for is no longer in the log: load the snapshot and go on behind it."""


# --- what happened to a lease ------------------------------------------------------------------------------------------


class LeaseLost(RoqError):
    """The lease of this task ended before: another worker may have it, or has done it."""


class TransactionAborted(LeaseLost):
    """The lease of a message that this transaction acks was lost: another member has it, or has done it. Nothing was published
    and nothing acked."""


# --- what became of a request -----------------------------------------------------------------------------------------


class RequestFailed(RoqError):
    """The server got the request and says that it could not do it."""


# --- what happened to a stream ----------------------------------------------------------------------------------------


class Closed(RoqError):
    """The object was closed."""


class SlowSubscriber(RoqError):
    """This subscriber stopped reading and was disconnected so that the others could go on."""


class ProducerFenced(RoqError):
    """This producer was opened elsewhere since, or forgotten: this publisher publishes nothing more. What it had not been told
    to be stored may be stored or not; whoever opened it since knows by its `number`."""


class DurableTaken(RoqError):
    """This durable subscriber was opened elsewhere since, or forgotten: what was taken here is not kept any more."""


class MessagesLost(RoqError):
    """Messages of one publisher on one topic did not arrive and can't be had any more. count 0: it is not known whether any
    are missing: what was known of the topic had to be forgotten (bounded memory), or the publisher was heard of first after the
    subscriber had stood still while an Exchange was replaced, or was not attached to all when the Monitor was, or an Exchange
    had dropped some of it before anything came."""

    def __init__(self, publisher: int, topic: str, first: int, last: int, count: int) -> None:
        what = f"lost {count} messages" if count else "may have lost messages (nobody knows)"
        super().__init__(f"{what} within {first}..{last} of publisher {publisher:016x} on topic {topic!r}")
        self.publisher, self.topic, self.count = publisher, topic, count
        self.first, self.last = first, last  # sequence numbers; other topics' messages may lie between them


class FrameError(RoqError):
    """Bytes from the network are not a frame of this protocol."""


class ProcessFailed(RoqError):
    """A process of the cluster could not be started or did not stay alive."""


_BY_NAME: dict[str, type[RoqError]] = {}


def _index(kind: type[RoqError]) -> None:
    _BY_NAME[kind.__name__] = kind
    for child in kind.__subclasses__():
        _index(child)


_index(RoqError)


def from_wire(name: str, message: str, detail: str = "") -> RoqError:
    """The error a peer sent as (class name, message, detail). An unknown name becomes a plain RoqError."""
    kind = _BY_NAME.get(name)
    if kind is NotLeader:
        return NotLeader(message, leader=detail)
    if kind is None or kind is MessagesLost:
        return RoqError(f"{name}: {message}")
    return kind(message)

"""The work queue of a cluster (`roq://zk1:2181,zk2:2181/name`): every verb is one request to its master.

Puts carry numbers of this client, lease requests numbers of this instance of it, so that a request sent again after silence or
a fail-over takes effect once. Payloads from the queue's `blob_bytes` on go straight to a store (big_payloads.py). Not covered:
which master (master_link.py), what it does (roq/workqueue/master), queues of several shards (sharded.py).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import msgspec

from roq.errors import (
    CallError,
    Closed,
    DataLost,
    InvalidConfiguration,
    ShardClosed,
    TemporaryError,
)
from roq.ids import new_id
from roq.runtime.observe import logger
from roq.wire import master as wire
from roq.wire.task import (
    LeasedTask,
    NewTask,
    PayloadReference,
    Settlement,
    Status,
    TaskState,
    TaskToPut,
    TaskView,
    milliseconds,
)
from roq.wire.work_queue import TaskSettings, WorkQueueRecord
from roq.workqueue.big_payloads import BigPayloads
from roq.workqueue.commit_sender import CommitSender
from roq.workqueue.contract import Asked, ClusterSettings, RoundTrip, asked_for, check_lease, check_put, of_new
from roq.workqueue.master_link import PATIENCE_SECONDS, MasterLink

UNREAD_SECONDS = 1.0  # until a task whose payload could not be had is leased again
log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
PutElsewhere = Callable[[int, Sequence[TaskToPut]], list[str]]  # their ids; of tasks whose numbers were not ours alone
PUT_BYTES_AT_ONCE = 2 * 1024 * 1024  # of one request; longer lists travel as several
IDS_AT_ONCE = 10_000  # dead letters or keys named in one request
REFUSED = ""  # in place of the id of a task that a closed shard did not take
WAIT_SLICE_SECONDS = 2.0  # longest wait asked of the master at once: a lost request costs no more than this


class RemoteQueue:
    """A Backend (contract.py). `zookeeper`: "h1:p,h2:p[/chroot]". settings: those that are asked for; others are taken as
    they are, or as the defaults if the queue is new; so with the rest, where 0 says nothing (address.py has their meaning)."""

    def __init__(
        self,
        zookeeper: str,
        name: str,
        settings: TaskSettings | Asked | None = None,
        *,
        write_quorum: int = 0,
        ack_quorum: int = 0,
        standbys: int | None = None,
        inline_bytes: int = 0,
        shards: int = 0,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        link = MasterLink(zookeeper, name, patience_seconds)
        try:
            chosen = asked_for(settings)
            wanted = of_new(chosen) if chosen else None
            self.record = link.open(wanted, write_quorum, ack_quorum, standbys, inline_bytes, tuple(chosen), shards)
            welcome = link.ask(lambda again: wire.Hello(), wire.Welcome)
        except BaseException:
            link.close()
            raise
        kept = ClusterSettings(
            **msgspec.structs.asdict(welcome.settings),
            write_quorum=self.record.spec.write_quorum,
            ack_quorum=self.record.spec.ack_quorum,
            standbys=self.record.standbys,
            inline_bytes=welcome.blob_bytes,
        )
        self._begin(zookeeper, link, kept, welcome.blob_bytes)
        self._hear(welcome.shards)

    def _begin(self, zookeeper: str, link: MasterLink, settings: TaskSettings, blob_bytes: int) -> None:
        self.settings: TaskSettings = settings
        self._zookeeper, self._link, self._blob_bytes = zookeeper, link, blob_bytes
        self._producer, self._instance = new_id(), new_id()
        self._sequence = 0
        self._nonces = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._big = BigPayloads(link)
        self.transactions = CommitSender(link)
        self.shards, self.heard = 0, time.monotonic()  # version of the list of shards that its master told last, and when
        self.wait_slice_seconds = WAIT_SLICE_SECONDS
        self._waiting: set[int] = set()  # nonces

    def beside(self, name: str) -> RemoteQueue:
        """Another shard of this queue, which is there and has its settings. Nobody is asked yet. Closed before this one."""
        other = object.__new__(RemoteQueue)
        other.record = self.record
        link = MasterLink(self._zookeeper, name, self._link.patience_seconds, self._link)
        other._begin(self._zookeeper, link, self.settings, self._blob_bytes)
        return other

    def describe(self) -> WorkQueueRecord:
        """Its record, as the GCM has it now. Raises WorkQueueNotFound, Unavailable."""
        return self._link.describe()

    def hello(self, patience_seconds: float) -> None:
        """Hear from its master: `shards` and `heard` are new then."""
        self._check_open()
        self._hear(self._link.ask(lambda again: wire.Hello(), wire.Welcome, patience_seconds=patience_seconds).shards)

    def _hear(self, shards: int) -> None:
        self.heard = time.monotonic()
        self.shards = max(self.shards, shards)

    # --- put ----------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """See Backend. Longer lists travel as several requests, big payloads one by one, all in the order of the list. Raises
        also ShardClosed."""
        ids = self.put_open(tasks)
        if REFUSED in ids:
            raise ShardClosed
        return ids

    def put_open(self, tasks: Sequence[NewTask]) -> list[str]:
        """As `put`; REFUSED for those that were not taken, as this is a closed shard."""
        self._check_open()
        check_put(tasks, self.settings)
        return self._put(*self._numbers(len(tasks)), tasks, self._put_elsewhere)

    def find_keys(self, keys: Sequence[str]) -> list[str | None]:
        """Of a closed shard: the ids of the tasks that these dedup keys stand for, None for those that stand for nothing."""
        parts = [list(keys[first : first + IDS_AT_ONCE]) for first in range(0, len(keys), IDS_AT_ONCE)]
        return [id for part in parts for id in self._ask(wire.FindKeys(part), wire.KeysFound).ids]

    def _numbers(self, count: int, taken: int = 0) -> tuple[int, int]:
        """Our producer and the first of `count` numbers that are used once. taken: a producer that somebody else is, too."""
        with self._lock:
            if self._producer == taken:
                self._producer, self._sequence = new_id(), 0
            first = self._sequence + 1
            self._sequence += count
            return self._producer, first

    def _put_elsewhere(self, producer: int, tasks: Sequence[TaskToPut]) -> list[str]:
        """Put these under other numbers: those they had were used before, and not by us. A program that was forked with its
        queue open does so, or one that means harm; taken for repeats, these tasks would be lost."""
        log.warning(
            "somebody else puts under this producer's id: going on under a new one", extra={"fields": {"old": producer}}
        )
        ids: list[str] = []
        for task in tasks:
            other, number = self._numbers(1, taken=producer)
            big = len(task.payload) >= self._blob_bytes
            ids += [self._put_big(other, number, task)] if big else self._put_small(other, number, [task])
        return ids

    def put_numbered(self, producer: int, first: int, tasks: Sequence[NewTask]) -> None:
        """Store tasks under the caller's numbers, first, first + 1, … of this producer; what it has put before, not again."""
        self._check_open()
        check_put(tasks, self.settings)
        self._put(producer, first, tasks, None)

    def _put(self, producer: int, first: int, tasks: Sequence[NewTask], elsewhere: PutElsewhere | None) -> list[str]:
        made = [_task(task) for task in tasks]
        size = sum(len(task.payload) for task in tasks)
        largest = max((len(task.payload) for task in tasks), default=0)
        if largest < self._blob_bytes and size <= PUT_BYTES_AT_ONCE:
            return self._put_small(producer, first, made, elsewhere) if made else []
        ids: list[str] = []
        for part in _parts(made, self._blob_bytes):
            number, small = first + len(ids), len(part[0].payload) < self._blob_bytes
            try:
                if small:
                    ids += self._put_small(producer, number, part, elsewhere)
                else:
                    ids.append(self._put_big(producer, number, part[0], elsewhere))
            except CallError as error:
                if not ids:
                    raise
                raise TemporaryError(f"{len(ids)} of {len(made)} tasks were put, then one was refused: {error}") from error
        return ids

    def _put_small(self, producer: int, first: int, tasks: list[TaskToPut], elsewhere: PutElsewhere | None = None) -> list[str]:
        request, sent_again = wire.Put(producer, first, tasks), False

        def make(again: int) -> wire.Put:
            nonlocal sent_again
            sent_again = again > 0
            return request

        added = self._link.ask(make, wire.TasksAdded)
        self._hear(added.shards)
        ids = [f"{producer:016x}-{first + place}" for place in range(len(tasks))]
        for place in added.refused:
            ids[place] = REFUSED
        for place, id in added.known:
            ids[place] = id
        if added.repeated and elsewhere is not None and not sent_again:
            for place, id in zip(added.repeated, elsewhere(producer, [tasks[place] for place in added.repeated]), strict=True):
                ids[place] = id
        return ids

    def _put_big(self, producer: int, sequence: int, task: TaskToPut, elsewhere: PutElsewhere | None = None) -> str:
        try:
            added = self._big.put(producer, sequence, task)
        except ShardClosed:
            return REFUSED
        self._hear(added.shards)
        if added.repeated and elsewhere is not None:
            return elsewhere(producer, [task])[0]
        return added.known[0][1] if added.known else f"{producer:016x}-{sequence}"

    # --- lease and settle -----------------------------------------------------------------------------------------------

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """See Backend. Ends early, with nothing, when the master tells of another list of shards."""
        self._check_open()
        check_lease(seconds, count, wait_seconds)
        deadline, shards = time.monotonic() + wait_seconds, self.shards
        lease_ms, settled, left = milliseconds(seconds), list[str | None](), list(settle)
        while True:
            asked = time.monotonic()
            wait = min(max(deadline - asked, 0.0), self.wait_slice_seconds)
            leases = self._lease_once(lease_ms, count, wait, left)
            if left:
                settled, left = leases.settled, []
            if leases.tasks:
                began = asked + leases.waited / 1000  # not when the answer came: the log may have been slow
                return RoundTrip(settled, self._with_payloads(leases.tasks), began)
            if time.monotonic() >= deadline or self.shards != shards:
                return RoundTrip(settled, [])

    def _lease_once(self, lease_ms: int, count: int, wait: float, settle: list[Settlement]) -> wire.Leases:
        nonce, instance = next(self._nonces), self._instance

        def make(again: int) -> wire.Lease:
            return wire.Lease(instance, nonce, again, lease_ms, count, 0 if again else round(wait * 1000), settle)

        if not wait:
            leases = self._link.ask(make, wire.Leases)
        else:
            self._waiting.add(nonce)
            try:
                leases = self._link.ask(make, wire.Leases, wait)
            finally:
                self._waiting.discard(nonce)
        self._hear(leases.shards)
        return leases

    def end_waits(self) -> None:
        """Have leases that wait in other threads end now, with what they have."""
        if nonces := list(self._waiting):
            self._ask(wire.EndWaits(self._instance, nonces), wire.Counted)

    def _with_payloads(self, tasks: list[LeasedTask[bytes | PayloadReference]]) -> list[LeasedTask[bytes]]:
        """Those whose payload is there. A task whose payload no store gives just now was not tried, so it must not die of it;
        one whose payload is damaged everywhere is of no use to any worker: it becomes a dead letter that says so."""
        found: list[LeasedTask[bytes]] = []
        back: list[Settlement] = []
        for task in tasks:
            try:
                payload = task.payload if isinstance(task.payload, bytes) else self._big.get(task.payload)
            except DataLost as error:
                log.error("task %s becomes a dead letter: %s", task.id, error)
                back.append(Settlement.reject(task.token, str(error)))
                continue
            if payload is not None:
                whole = task if payload is task.payload else msgspec.structs.replace(task, payload=payload)
                found.append(cast(LeasedTask[bytes], whole))
            else:
                log.warning("the payload of task %s can't be had now: it is released for %g s", task.id, UNREAD_SECONDS)
                back.append(Settlement.release(task.token, UNREAD_SECONDS))
        if back:
            with contextlib.suppress(TemporaryError):  # then their leases end by themselves
                self.settle(back)
        return found

    def settle(self, settlements: Sequence[Settlement]) -> list[str | None]:
        """See Backend."""
        self._check_open()
        settle, instance = list(settlements), self._instance
        return self._link.ask(lambda again: wire.SettleAll(instance, again, settle), wire.Leases).settled

    # --- administration -------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """See Backend."""
        return self._count(wire.ReleaseEvery())

    def _count(self, request: wire.Request) -> int:
        counted = self._ask(request, wire.Counted)
        self._hear(counted.shards)
        return counted.count

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """See Backend."""
        if count < 1:
            raise InvalidConfiguration(f"at least 1 task can be peeked at, got {count}")
        seen = self._ask(wire.Peek(str(TaskState(state)), count), wire.PeekedTasks)
        self._hear(seen.shards)
        return [self._view(one) for one in seen.tasks]

    def _view(self, seen: wire.PeekedTask) -> TaskView:
        payload = seen.payload
        if isinstance(payload, PayloadReference):
            seen = msgspec.structs.replace(seen, payload=self._big.peek(payload))
        return TaskView(*msgspec.structs.astuple(seen))

    def purge(self) -> int:
        """See Backend."""
        return self._count(wire.PurgeQueue())

    def status(self) -> Status:
        """See Backend."""
        status = self._ask(wire.GetStatus(), wire.MasterStatus)
        self._hear(status.shards)
        return status.counts()

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """See Backend."""
        return sum(self._count(wire.RequeueLetters(part)) for part in _letters(ids))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """See Backend."""
        return sum(self._count(wire.RemoveLetters(part)) for part in _letters(ids))

    def _ask(self, request: wire.Request, expect: type[T]) -> T:
        self._check_open()
        return self._link.ask(lambda again: request, expect)

    def close(self) -> None:
        """See Backend."""
        if not self._closed:
            self._closed = True
            self._link.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"work queue {self._link.name!r} is closed")


def _letters(ids: Sequence[str] | None) -> list[list[str] | None]:
    if ids is None:
        return [None]
    return [list(ids[first : first + IDS_AT_ONCE]) for first in range(0, len(ids), IDS_AT_ONCE)]


def _task(task: NewTask) -> TaskToPut:
    return TaskToPut(task.payload, milliseconds(task.delay_seconds), task.priority, task.dedup_key)


def _parts(tasks: list[TaskToPut], blob_bytes: int) -> Iterator[list[TaskToPut]]:
    """The tasks in order: small ones as they fit into a request, each big one alone."""
    part: list[TaskToPut] = []
    size = 0
    for task in tasks:
        length = len(task.payload)
        if part and (length >= blob_bytes or size + length > PUT_BYTES_AT_ONCE):
            yield part
            part, size = [], 0
        if length >= blob_bytes:
            yield [task]
        else:
            part.append(task)
            size += length
    if part:
        yield part

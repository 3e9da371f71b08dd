"""The work queue of a cluster (`roq://zk1:2181,zk2:2181/name`): every verb is one request to its master.

Puts carry numbers of this client, lease requests numbers of this instance of it, so that a request sent again after silence or
a fail-over takes effect once. Payloads from the queue's `blob_bytes` on go straight to a store (Blizzard):

    put   Reserve at the master ─► upload to the store it named ─► Stored at the master, which has it copied and then logged
    get   the lease names the stores ─► fetch from the first one that has it whole

An upload that breaks is begun again elsewhere; what it left is removed by the master. Not covered: which master
(master_link.py), what it does (roq/workqueue/master).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast
from zlib import crc32

import msgspec

from roq.errors import (
    CallError,
    Closed,
    DataLost,
    DeadlineExceeded,
    FrameError,
    InvalidConfiguration,
    RoqError,
    StorageFailed,
    TaskNotFound,
    TemporaryError,
    Unavailable,
)
from roq.ids import new_id
from roq.runtime.backoff import delays
from roq.runtime.blocking_connection import BlockingConnection
from roq.runtime.observe import logger
from roq.wire import master as wire
from roq.wire import store as store_wire
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import EnvelopeKind, error_of, open_envelope, seal
from roq.wire.task import (
    LeasedTask,
    NewTask,
    PayloadReference,
    Settlement,
    Status,
    StoreAddress,
    TaskState,
    TaskToPut,
    TaskView,
    milliseconds,
)
from roq.wire.work_queue import TaskSettings
from roq.workqueue.contract import Asked, ClusterSettings, RoundTrip, asked_for, check_lease, check_put, of_new
from roq.workqueue.master_link import PATIENCE_SECONDS, MasterLink

UNREAD_SECONDS = 1.0  # until a task whose payload could not be had is leased again
log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
PutElsewhere = Callable[[int, Sequence[TaskToPut]], list[str]]  # their ids; of tasks whose numbers were not ours alone
PUT_BYTES_AT_ONCE = 2 * 1024 * 1024  # of one request; longer lists travel as several
IDS_AT_ONCE = 10_000  # dead letters named in one request
WAIT_SLICE_SECONDS = 2.0  # longest wait asked of the master at once: a lost request costs no more than this
PART_SECONDS = 5.0  # one part, on stable storage
TURN_SECONDS = 15.0  # until a store that is sent many parts takes ours
COPY_SECONDS = 30.0  # the stores among themselves
UPLOADS_MIN = 5  # of one payload, each to another store, before it is given up, whatever they took
DAMAGE = (DataLost, StorageFailed, TaskNotFound)  # a store that says so has no copy that is of use

_decode_reply = msgspec.msgpack.Decoder(store_wire.Reply).decode


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
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._link = MasterLink(zookeeper, name, patience_seconds)
        self._producer, self._instance = new_id(), new_id()
        self._sequence = 0
        self._nonces = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        try:
            chosen = asked_for(settings)
            wanted = of_new(chosen) if chosen else None
            record = self._link.open(wanted, write_quorum, ack_quorum, standbys, inline_bytes, tuple(chosen))
            welcome = self._link.ask(lambda again: wire.Hello(), wire.Welcome)
        except BaseException:
            self._link.close()
            raise
        self.settings: TaskSettings = ClusterSettings(
            **msgspec.structs.asdict(welcome.settings),
            write_quorum=record.spec.write_quorum,
            ack_quorum=record.spec.ack_quorum,
            standbys=record.standbys,
            inline_bytes=welcome.blob_bytes,
        )
        self._blob_bytes = welcome.blob_bytes
        self._big = BigPayloads(self._link)

    # --- put ----------------------------------------------------------------------------------------------------------

    def put(self, tasks: Sequence[NewTask]) -> list[str]:
        """See Backend. Longer lists travel as several requests, big payloads one by one, all in the order of the list."""
        self._check_open()
        check_put(tasks, self.settings)
        return self._put(*self._numbers(len(tasks)), tasks, self._put_elsewhere)

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
        ids = [f"{producer:016x}-{first + place}" for place in range(len(tasks))]
        for place, id in added.known:
            ids[place] = id
        if added.repeated and elsewhere is not None and not sent_again:
            for place, id in zip(added.repeated, elsewhere(producer, [tasks[place] for place in added.repeated]), strict=True):
                ids[place] = id
        return ids

    def _put_big(self, producer: int, sequence: int, task: TaskToPut, elsewhere: PutElsewhere | None = None) -> str:
        added = self._big.put(producer, sequence, task)
        if added.repeated and elsewhere is not None:
            return elsewhere(producer, [task])[0]
        return added.known[0][1] if added.known else f"{producer:016x}-{sequence}"

    # --- lease and settle -----------------------------------------------------------------------------------------------

    def lease(self, seconds: float, count: int, wait_seconds: float, settle: Sequence[Settlement] = ()) -> RoundTrip:
        """See Backend."""
        self._check_open()
        check_lease(seconds, count, wait_seconds)
        deadline = time.monotonic() + wait_seconds
        lease_ms, settled, left = milliseconds(seconds), list[str | None](), list(settle)
        while True:
            asked = time.monotonic()
            wait = min(max(deadline - asked, 0.0), WAIT_SLICE_SECONDS)
            leases = self._lease_once(lease_ms, count, wait, left)
            if left:
                settled, left = leases.settled, []
            if leases.tasks:
                began = asked + leases.waited / 1000  # not when the answer came: the log may have been slow
                return RoundTrip(settled, self._with_payloads(leases.tasks), began)
            if time.monotonic() >= deadline:
                return RoundTrip(settled, [])

    def _lease_once(self, lease_ms: int, count: int, wait: float, settle: list[Settlement]) -> wire.Leases:
        nonce, instance = next(self._nonces), self._instance

        def make(again: int) -> wire.Lease:
            return wire.Lease(instance, nonce, again, lease_ms, count, 0 if again else round(wait * 1000), settle)

        return self._link.ask(make, wire.Leases, wait)

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
        return self._ask(wire.ReleaseEvery(), wire.Counted).count

    def peek(self, state: TaskState, count: int) -> list[TaskView]:
        """See Backend."""
        if count < 1:
            raise InvalidConfiguration(f"at least 1 task can be peeked at, got {count}")
        seen = self._ask(wire.Peek(str(TaskState(state)), count), wire.PeekedTasks).tasks
        return [self._view(one) for one in seen]

    def _view(self, seen: wire.PeekedTask) -> TaskView:
        payload = seen.payload
        if isinstance(payload, PayloadReference):
            seen = msgspec.structs.replace(seen, payload=self._big.peek(payload))
        return TaskView(*msgspec.structs.astuple(seen))

    def purge(self) -> int:
        """See Backend."""
        return self._ask(wire.PurgeQueue(), wire.Counted).count

    def status(self) -> Status:
        """See Backend."""
        return self._ask(wire.GetStatus(), Status)

    def requeue_dead(self, ids: Sequence[str] | None) -> int:
        """See Backend."""
        return sum(self._ask(wire.RequeueLetters(part), wire.Counted).count for part in _letters(ids))

    def remove_dead(self, ids: Sequence[str] | None) -> int:
        """See Backend."""
        return sum(self._ask(wire.RemoveLetters(part), wire.Counted).count for part in _letters(ids))

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


class BigPayloads:
    """Any thread."""

    def __init__(self, link: MasterLink) -> None:
        self._link = link
        self._ids = itertools.count(1)

    def put(self, producer: int, sequence: int, task: TaskToPut) -> wire.TasksAdded:
        """Store the payload and add the task. What is told as repeated was used by somebody else.

        Raises Unavailable, or why the last upload broke: several did, and for the queue's patience.
        """
        payload, crc = task.payload, crc32(task.payload)
        pauses, deadline = delays(0.02, 0.5), time.monotonic() + self._link.patience_seconds
        bare = msgspec.structs.replace(task, payload=b"")
        avoid: dict[str, None] = {}
        sent_again = False

        def make(request: wire.Request) -> Callable[[int], wire.Request]:
            def made(again: int) -> wire.Request:
                nonlocal sent_again
                sent_again = sent_again or again > 0
                return request

            return made

        for attempt in itertools.count(1):
            request = wire.Reserve(producer, sequence, len(payload), crc, list(avoid))
            reserved = self._link.ask(make(request), wire.Reserved)
            try:
                self._upload(reserved, payload, crc)
                done = wire.PayloadStored(producer, sequence, reserved.blob, bare)
                added = self._link.ask(make(done), wire.TasksAdded, COPY_SECONDS)
                return wire.TasksAdded(added.known) if sent_again or attempt > 1 else added
            except (TemporaryError, TaskNotFound) as error:  # TaskNotFound: the reservation is gone with its master
                pause = next(pauses)
                if attempt >= UPLOADS_MIN and time.monotonic() + pause >= deadline:
                    if isinstance(error, TemporaryError):
                        raise
                    raise Unavailable(f"a payload was lost {attempt} times on its way; the last time: {error}") from error
                log.warning("upload retried", extra={"fields": {"host": reserved.store.host, "reason": str(error)}})
                if not isinstance(error, TaskNotFound):
                    avoid[reserved.store.host] = None
                self._link.pause(pause)
        raise AssertionError("the loop returns or raises")

    def _upload(self, reserved: wire.Reserved, payload: bytes, crc: int) -> None:
        connection = self._link.connections.take(reserved.store.endpoint)
        try:
            for offset in range(0, len(payload), store_wire.BLOB_PART_BYTES):
                part = payload[offset : offset + store_wire.BLOB_PART_BYTES]
                self._ask(connection, store_wire.PutBlob(reserved.blob, offset, len(payload), crc, part), store_wire.StoreDone)
        finally:
            self._link.connections.give(connection)

    def get(self, where: PayloadReference) -> bytes | None:
        """The payload; None if it can't be had from any store just now. Raises DataLost: every store that should have it says
        that it is damaged or gone."""
        damaged: list[str] = []
        for store in where.stores:
            try:
                return self._download(store, where)
            except RoqError as error:
                fields = {"blob": where.blob, "host": store.host, "reason": str(error)}
                log.warning("payload could not be fetched", extra={"fields": fields})
                if isinstance(error, DAMAGE):
                    damaged.append(f"{store.host} ({error})")
        if not where.stores or len(damaged) < len(where.stores):
            return None
        raise DataLost(f"payload {where.blob} of {where.size} bytes is damaged or missing on every host: {', '.join(damaged)}")

    def peek(self, where: PayloadReference) -> bytes:
        """The payload, empty if it can't be had: a view of a task is not to fail for that."""
        try:
            return self.get(where) or b""
        except DataLost as error:
            log.warning("payload could not be fetched for peek: %s", error)
            return b""

    def _download(self, store: StoreAddress, where: PayloadReference) -> bytes:
        connection, parts, size = self._link.connections.take(store.endpoint), list[bytes](), 0
        try:
            while size < where.size:
                request = store_wire.GetBlob(where.blob, size, min(store_wire.BLOB_PART_BYTES, where.size - size))
                part = self._ask(connection, request, store_wire.BlobPart)
                if not part.data or part.total != where.size:
                    raise DataLost(f"{part.total} bytes instead of {where.size}")
                parts.append(part.data)
                size += len(part.data)
        finally:
            self._link.connections.give(connection)
        payload = b"".join(parts)
        if crc32(payload) != where.crc:
            raise DataLost("its check sum is another one")
        return payload

    def _ask(self, connection: BlockingConnection, request: store_wire.Request, expect: type[T]) -> T:
        id, until = next(self._ids), time.monotonic() + TURN_SECONDS
        connection.send(seal(EnvelopeKind.REQUEST, id, request), lambda: time.monotonic() < until)
        deadline = time.monotonic() + PART_SECONDS
        while True:
            parts = connection.receive(deadline)
            if parts is None:
                raise DeadlineExceeded(f"no answer to {type(request).__name__} from {connection.endpoint}")
            envelope = open_envelope(parts[-1])
            if envelope.id != id:
                continue
            if envelope.kind == EnvelopeKind.ERROR:
                raise error_of(envelope.body)
            try:
                reply = _decode_reply(envelope.body)
            except UNDECODABLE as error:
                raise FrameError(f"undecodable answer: {error}") from None
            if isinstance(reply, expect):
                return reply
            raise FrameError(f"{type(reply).__name__} in reply to {type(request).__name__}")

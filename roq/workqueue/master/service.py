"""What the active master answers: requests in, records for the log and answers out. Pure: no IO, no clock; times come in as ms.

Records are applied at once and answers made at once, but an answer belongs to the batch that was open when it was made and is
sent only when that batch, and so all before it, is on stable storage. Nothing that a crash could undo is ever seen: not by
the one who asked for it, nor by others who read. If an append fails, this whole object is thrown away and the state is read
from the log again.

    request ──► records ──► fold.apply ───► answer ──┐
                   └──────► batch ──► log ── durable ┴──► sent

A client sends a request again when the log is slow, or when its answer was lost. While what it did the first time is on its way
to the log, a second one is not logged: it joins the first and gets the same answer. So what waits for a log that stands still
grows with new requests only, and those are refused from WAITING_BYTES_MAX on. Later, numbers of Pushes and Pops tell the fold,
and deliveries that were ended lately tell the master (recent.py), that it was done before.

A lease request that finds nothing waits here (waiters.py), not in the log: a Pop is written when there is a task for it. What
no client of ours would send is refused before anything is applied: others may ask too. Not covered: sockets (process.py), when
a batch goes to the log (term.py), payloads kept by stores (registry.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any

import msgspec

from roq.errors import CallError, InvalidConfiguration, PayloadTooLarge, RoqError, TemporaryError
from roq.wire import master as wire
from roq.wire.headers import PRIORITIES
from roq.wire.task import EXTEND, LeasedTask, PayloadReference, Settlement, Status, StoreAddress, TaskState, TaskToPut
from roq.workqueue import codec
from roq.workqueue.contract import DEDUP_KEY_BYTES_MAX, LEASE_COUNT_MAX, PUT_COUNT_MAX
from roq.workqueue.fold import (
    APPLIED,
    Dropped,
    Effect,
    Fold,
    Known,
    ManySettled,
    RecordRefused,
    Settled,
    TasksChanged,
    TasksDelivered,
)
from roq.workqueue.master import closed, committing
from roq.workqueue.master.recent import Recent
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import (
    BlobRef,
    CompleteMany,
    FeedMessages,
    FeedPosition,
    HoldersReplaced,
    OutboxForwarded,
    Pop,
    Purge,
    Push,
    Record,
    ReleaseAll,
    RemoveDead,
    Requeue,
    RequeueDead,
    TaskKey,
    Tick,
    Use,
)
from roq.workqueue.waiters import Waiters

ENTRY_BYTES = 1024 * 1024  # a batch with so many takes no more; a record has far less than a store takes as one entry
ENTRY_RECORDS = 10_000
NUMBERS_BYTES = 20  # of two numbers in a record: a run of deliveries, a dead letter
REPLY_BYTES = 4 * 1024 * 1024  # of payloads in one reply: it must pass as one frame
EXPIRED_AT_ONCE = 1_000
WAITERS_MAX = 100_000  # lease requests that wait; more are answered at once, with nothing
WAIT_MS_MAX = 10_000  # a client asks again
PEEK_MAX = 10_000
PROOF_MS = 5_000
RECORD_BYTES = 64  # of a record without what users gave
RECORD_COST = 256  # of memory, beyond that: as an object, and as the task that it made
ANSWER_BYTES = 64  # of an answer; payloads in it are the queue's own
WAITING_BYTES_MAX = 64 * 1024 * 1024  # seconds of a busy queue; the log takes no more either (LogSettings.window_bytes)
IDS_MAX = 20_000  # dead letters named at once
ID_MAX, NUMBER_MAX = (1 << 64) - 1, (1 << 62) - 1
Locate = Callable[[tuple[str, ...]], tuple[StoreAddress, ...]]
Body = wire.Reply | RoqError
Name = tuple[int, int | str]


# --- batches: what becomes one entry of the log -----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class EntryBatch:
    """What becomes one entry of the log, and what is due when it is durable. No records: only something to wait for.

    asked: by the request's name, what was asked for in detail and its answer.
    """

    records: list[Record] = field(default_factory=list)
    answers: list[tuple[bytes, int, Body]] = field(default_factory=list)  # peer, id of the request
    asked: dict[Name, tuple[Any, wire.Reply]] = field(default_factory=dict)
    dropped: list[BlobRef] = field(default_factory=list)
    then: list[Callable[[], object]] = field(default_factory=list)
    size: int = 0


def name_of(request: wire.Request) -> tuple[Name, Any] | None:
    """What a request that is sent again has in common with the first one, and with nobody else's; None: it may as well be done
    again. Tasks are part of it: the records hold the same objects, so that costs nothing."""
    if isinstance(request, wire.Put):
        return (request.producer, request.sequence), request.tasks
    if isinstance(request, wire.Lease):
        return (request.instance, -request.nonce), 0
    if isinstance(request, wire.SettleAll):
        return ((request.instance, request.settle[0].token), request.settle) if request.settle else None
    if isinstance(request, wire.PayloadStored):
        return (request.producer, request.sequence), request.blob
    return None


class PendingBatches:
    """The batches that are not durable yet, the open one included. bytes: of all of them, nearly."""

    def __init__(self) -> None:
        self.bytes = 0
        self.open = EntryBatch()
        self._all: dict[EntryBatch, None] = {self.open: None}  # in their order

    @property
    def full(self) -> bool:
        """So much waits for the log that nothing new should."""
        return self.bytes > WAITING_BYTES_MAX

    def answer(self, peer: bytes, id: int, body: Body) -> None:
        """Due when all is durable that there is now."""
        self.open.answers.append((peer, id, body))
        self.bytes += ANSWER_BYTES

    def tell(self, peer: bytes, id: int, name: Name, detail: Any, body: wire.Reply) -> None:
        """As `answer`; also for those who send the request again. name, detail: as `name_of` gives them."""
        batch = self.open
        batch.asked[name] = (detail, body)
        batch.answers.append((peer, id, body))
        self.bytes += ANSWER_BYTES

    def join(self, peer: bytes, id: int, request: wire.Request) -> bool:
        """Give it the answer of the one that it repeats, if that is on its way."""
        if (named := name_of(request)) is None:
            return False
        name, detail = named
        for batch in self._all:
            found = batch.asked.get(name)
            if found is not None and found[0] == detail:
                batch.answers.append((peer, id, found[1]))
                self.bytes += ANSWER_BYTES
                return True
        return False

    def close(self) -> EntryBatch | None:
        """The open batch, if there is anything in it; the next one is open then."""
        batch = self.open
        if not (batch.records or batch.answers):
            return None
        self.open = EntryBatch()
        self._all[self.open] = None
        return batch

    def follow(self, batch: EntryBatch, before: EntryBatch) -> None:
        """This one without records is as durable as the one before."""
        before.answers += batch.answers
        before.asked |= batch.asked
        batch.answers = []
        self.durable(batch)

    def durable(self, batch: EntryBatch) -> None:
        """It waits no longer."""
        if batch in self._all:
            del self._all[batch]
            self.bytes -= batch.size + RECORD_COST * len(batch.records) + ANSWER_BYTES * len(batch.answers)


# --- requests ---------------------------------------------------------------------------------------------------------


def check_put(request: wire.Put) -> None:
    """Raises InvalidConfiguration."""
    if not 0 < request.producer <= ID_MAX or not 0 < request.sequence <= NUMBER_MAX or len(request.tasks) > PUT_COUNT_MAX:
        raise InvalidConfiguration(f"not a put of 1 to {PUT_COUNT_MAX} tasks")


def check_task(task: TaskToPut, length: int, limit: int, blob_bytes: int) -> None:
    """Raises InvalidConfiguration. length: of its payload, from `blob_bytes` on it belongs to the stores."""
    if length > limit or length >= blob_bytes or (task.priority and task.priority not in PRIORITIES):
        raise InvalidConfiguration(f"not a task: {length} bytes, priority {task.priority}")
    if not 0 <= task.delay_ms <= codec.MILLISECONDS_MAX or len(task.dedup_key) > DEDUP_KEY_BYTES_MAX:
        raise InvalidConfiguration("not a task: its delay or its dedup_key is out of range")


def check_stored(request: wire.PayloadStored) -> None:
    """Raises InvalidConfiguration. The payload is elsewhere."""
    check_put(wire.Put(request.producer, request.sequence, [request.task]))
    check_task(request.task, len(request.task.payload), 0, 1)


def check_lease(request: wire.Lease) -> None:
    """Raises InvalidConfiguration."""
    if not 1 <= request.count <= LEASE_COUNT_MAX or not 1 <= request.lease_ms <= codec.MILLISECONDS_MAX or request.wait_ms < 0:
        raise InvalidConfiguration(f"can't lease {request.count} tasks for {request.lease_ms} ms")
    if not 0 < request.nonce <= NUMBER_MAX or not 0 < request.instance <= ID_MAX:
        raise InvalidConfiguration("not a lease request")


def letters(ids: list[str] | None) -> tuple[TaskKey, ...] | None:
    """The dead letters of these ids; None: all. Raises CallError."""
    if ids is not None and len(ids) > IDS_MAX:
        raise InvalidConfiguration(f"at most {IDS_MAX} dead letters can be named at once, got {len(ids)}")
    return codec.chosen(ids)


# --- the service ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LongPoll:
    """A lease request that waits for a task. pop.now: ms when it came; until: ms."""

    peer: bytes
    id: int
    pop: Pop
    until: int


def _everybody(peer: bytes) -> bool:
    return True


class MasterService:
    """One term over one state. locate: hosts of a blob's holders to the places a client can fetch from. quiet_until (ms): no
    lease ends before; after a take-over those who hold one must find the new master first. here(peer): is it still connected?
    Whoever takes batches tells `waiting` when they are durable."""

    def __init__(
        self,
        fold: Fold,
        recent: Recent,
        term: int,
        blob_bytes: int,
        locate: Locate,
        quiet_until: int = 0,
        here: Callable[[bytes], bool] = _everybody,
    ) -> None:
        self.fold, self.recent = fold, recent
        self._term, self._blob_bytes, self._locate, self._quiet_until = term, blob_bytes, locate, quiet_until
        self._here = here
        self.batches: deque[EntryBatch] = deque()  # to be appended, in order
        self.waiting = PendingBatches()
        self._waiters: Waiters[LongPoll] = Waiters(WAITERS_MAX)
        self._largest = max(fold.inline_bytes(), default=1) or 1  # payload bytes in one task, at most
        self.freed: Callable[[], None] | None = None  # to be called when tasks may have gone
        self.asked: Callable[[int], int] | None = None  # of a group, at `now`: for how many ms who finds nothing waits at least
        self.unfed: Callable[[int], tuple[int, int]] | None = None  # of a group, behind_ms at `now`, and lag
        self.committed: Callable[[dict[str, int]], None] | None = None  # to be called when messages up to these are durable
        self.shards, self.closed = 0, False  # as in the WorkQueueSpec
        self._proved = 0  # ms of the newest record

    # --- what the shell asks ------------------------------------------------------------------------------------------

    def cut(self) -> deque[EntryBatch]:
        """Close the open batch if there is anything in it; everything to be appended."""
        if (batch := self.waiting.close()) is not None:
            self.batches.append(batch)
        return self.batches

    def unanswered(self) -> list[tuple[bytes, int]]:
        """(peer, id) of every request that still waits here; they are forgotten."""
        found = [(one.peer, one.id) for one in self._waiters.values()]
        found += [(peer, id) for batch in self.cut() for peer, id, _ in batch.answers]
        self._waiters = Waiters(WAITERS_MAX)
        self.batches.clear()
        self.waiting = PendingBatches()
        return found

    def is_waited_for(self) -> bool:
        """Does a lease request wait for a task?"""
        return bool(self._waiters)

    def due(self) -> int | None:
        """When `tick` has something to do (ms), None: never by itself."""
        end, due = self._waiters.next_end(), self.fold.next_due()
        if due is None:
            return end
        due = max(due, self._quiet_until)
        return due if end is None else min(due, end)

    def tick(self, now: int) -> None:
        """End what is over."""
        if now >= self._quiet_until:
            for record in self.fold.expired(now, EXPIRED_AT_ONCE):
                self.apply(record)
            self._may_be_free()
        if (due := self.fold.next_due()) is not None and due <= now and now > self.fold.clock:
            self.apply(Tick(now))
        self._serve_waiters(now)
        for _, one in self._waiters.over(now):
            self._nothing(one.peer, one.id, now)

    def _prove(self, now: int) -> None:
        """Have this batch go through the log: what is answered with it is told by one who still owns it."""
        if not self.waiting.open.records:
            self.apply(Tick(now))

    def after(self, call: Callable[[], object], now: int) -> None:
        """Call when all that was applied is durable."""
        self._prove(now)
        self.waiting.open.then.append(call)

    def _nothing(self, peer: bytes, id: int, now: int) -> None:
        """There is no task. Mostly said without a proof: a master that was replaced says so no longer than PROOF_MS."""
        if now - self._proved > PROOF_MS:
            self._prove(now)
        self.waiting.answer(peer, id, wire.Leases([], [], 0, self.shards))

    def apply(self, record: Record, size: int = 0) -> Sequence[Effect]:
        """One more record of this term, for the log and at once for the state. size: bytes of what users gave."""
        waiting = self.waiting
        if waiting.open.size >= ENTRY_BYTES or len(waiting.open.records) >= ENTRY_RECORDS:
            self.cut()
        batch, size = waiting.open, RECORD_BYTES + size
        batch.size += size
        waiting.bytes += size + RECORD_COST
        batch.records.append(record)
        self._proved = record.now
        fold = self.fold
        lapsed = fold.lapsed
        effects = fold.apply(record)
        if fold.lapsed != lapsed:
            self._may_be_free()
        self.recent.note(record, effects)
        if effects is APPLIED:
            return effects
        for effect in effects:
            if type(effect) is Dropped:
                batch.dropped.append(effect.blob)
        return effects

    # --- requests -----------------------------------------------------------------------------------------------------

    def take(self, peer: bytes, id: int, request: wire.Request, now: int) -> None:
        """Answer a request, now or when there is a task. Its error is an answer too."""
        try:
            kind = type(request)
            if kind is wire.Put:
                self._put(peer, id, request, now)  # type: ignore[arg-type]
            elif kind is wire.Lease:
                self._lease(peer, id, request, now)  # type: ignore[arg-type]
            elif kind is wire.SettleAll:
                self._settle_all(peer, id, request, now)  # type: ignore[arg-type]
            elif kind is wire.CommitAll:
                self._commit_all(peer, id, request, now)  # type: ignore[arg-type]
            elif kind is wire.EndWaits:
                self._end_waits(peer, id, request, now)  # type: ignore[arg-type]
            else:
                self._rare(peer, id, request, now)
        except RoqError as error:
            self.refuse(peer, id, error)

    def refuse(self, peer: bytes, id: int, error: RoqError) -> None:
        """An error as an answer."""
        self.waiting.answer(peer, id, error)

    def _put(self, peer: bytes, id: int, request: wire.Put, now: int) -> None:
        producer, sequence, tasks = request.producer, request.sequence, request.tasks
        check_put(request)
        limit = self.fold.settings.payload_bytes_max
        for task in tasks:
            length = len(task.payload)
            check_task(task, length, limit, self._blob_bytes)
            self._largest = max(self._largest, length)
        before = self.fold.producers.known.get(producer)
        if before is not None and sequence <= before.highest and self.waiting.join(peer, id, request):
            return  # it was sent before, and is on its way to the log
        if self.closed:
            self._prove(now)  # one who was replaced must not refuse what another has taken
            self.waiting.answer(peer, id, closed.put_again(self.fold, request, self.shards))
            return
        known, repeated = list[tuple[int, str]](), list[int]()
        for place, task in enumerate(tasks):
            push = Push(now, producer, sequence + place, task.payload, task.priority, task.delay_ms, task.dedup_key)
            effects = self.apply(push, len(task.payload) + 4 * len(task.dedup_key))
            if effects and (other := self._known(push, effects)):
                known.append((place, other))
            if effects and _is_repeated(push, effects):
                repeated.append(place)
        if repeated:  # the answer to the first one stays what it was
            self.waiting.answer(peer, id, wire.TasksAdded(known, repeated, [], self.shards))
        else:
            self.waiting.tell(peer, id, (producer, sequence), tasks, wire.TasksAdded(known, [], [], self.shards))
        if self._waiters and self.fold.ready.count:
            self._serve_waiters(now)

    @staticmethod
    def _known(push: Push, effects: Iterable[Effect]) -> str:
        """The id of the task this Push stands for, if that is another one. TemporaryError: it is not known what it did."""
        for effect in effects:
            if type(effect) is Known and effect.task != (push.producer, push.sequence):
                return codec.task_id(effect.task)
            if type(effect) is RecordRefused:
                raise TemporaryError("this put was repeated too late: whether it took effect is unknown")
        return ""

    def check_big(self, size: int) -> None:
        """Raises PayloadTooLarge."""
        if not 0 <= size <= self.fold.settings.payload_bytes_max:
            raise PayloadTooLarge(f"a payload has at most {self.fold.settings.payload_bytes_max} bytes, got {size}")

    def reserved(self, peer: bytes, id: int, reserved: wire.Reserved) -> None:
        """A store was named for a payload."""
        self.waiting.answer(peer, id, reserved)

    def add_big(self, waiting: Iterable[tuple[bytes, int]], push: Push) -> None:
        """A task whose payload is stored as often as it has to be; (peer, id) of those who wait for it."""
        blob, size = push.payload, 4 * len(push.dedup_key)
        effects = self.apply(push, size + (_blob_bytes(blob) if isinstance(blob, BlobRef) else len(blob)))
        task = self.fold.blobs.get((push.producer, push.sequence))
        if isinstance(blob, BlobRef) and (task is None or task.payload != blob) and not _dropped(effects, blob):
            self.waiting.open.dropped.append(blob)  # it was put before, with another copy
        for peer, id in waiting:
            try:
                other = self._known(push, effects)
                known = [(0, other)] if other else []
                if _is_repeated(push, effects) or not isinstance(blob, BlobRef):
                    self.waiting.answer(peer, id, wire.TasksAdded(known, [0], [], self.shards))
                else:
                    added = wire.TasksAdded(known, [], [], self.shards)
                    self.waiting.tell(peer, id, (push.producer, push.sequence), blob.blob, added)
            except RoqError as error:
                self.refuse(peer, id, error)
        self._serve_waiters(push.now)

    def feed(self, messages: Iterable[FeedMessages], now: int) -> None:
        """Messages for this group."""
        for record in messages:
            sizes = [len(payload) for _, payload in record.messages]
            self._largest = max(self._largest, *sizes)
            self.apply(record, sum(sizes) + RECORD_BYTES * len(sizes) + len(record.topic.encode()))
        self._serve_waiters(now)

    def feed_position(self, done: dict[str, int], now: int, missed: int = 0) -> None:
        """Up to where the tapes are in this group. missed: gaps since the position before."""
        self.apply(FeedPosition(now, done, missed), sum(NUMBERS_BYTES + len(exchange) for exchange in done))

    # --- leases -------------------------------------------------------------------------------------------------------

    def _lease(self, peer: bytes, id: int, request: wire.Lease, now: int) -> None:
        count, lease_ms, nonce, instance = request.count, request.lease_ms, request.nonce, request.instance
        check_lease(request)
        wait_ms = max(request.wait_ms, self.asked(now) if self.asked is not None else 0)
        if request.again and self.waiting.join(peer, id, request):
            return
        settled = self._settle(request.settle, request.again, now) if request.settle else []
        if request.again:  # it may have been done, or still wait here
            self._waiters.remove((instance, nonce))
        elif not self.fold.ready.count:
            if settled:  # the news of a settlement does not wait
                self.waiting.tell(peer, id, (instance, -nonce), 0, wire.Leases(settled, [], 0, self.shards))
            elif not wait_ms or self._waiters.full:
                self._nothing(peer, id, now)
            else:
                pop = Pop(now, instance, nonce, count, lease_ms)  # how many fit is seen when there are some
                self._waiters.add((instance, nonce), LongPoll(peer, id, pop, now + min(wait_ms, WAIT_MS_MAX)))
            return
        self._hand(peer, id, Pop(now, instance, nonce, self._fitting(count), lease_ms), settled, now)
        self._serve_waiters(now)  # what was settled may have made more tasks ready than this request takes

    def _fitting(self, count: int) -> int:
        """So many of the tasks that come next, or fewer, whose payloads go into one reply."""
        if count * self._largest <= REPLY_BYTES:
            return count
        if self.fold.fed is None:
            return max(1, REPLY_BYTES // self._largest)
        # of a group one may be as large as thousands of others, and all have their payloads here
        sizes = accumulate(len(task.payload) for task in self.fold.ready.upcoming(count) if isinstance(task.payload, bytes))
        return max(1, sum(size <= REPLY_BYTES for size in sizes))

    def _hand(self, peer: bytes, id: int, pop: Pop, settled: list[str | None], asked: int) -> None:
        """asked: ms when it came."""
        tasks: list[LeasedTask[bytes | PayloadReference]] = []
        for effect in self.apply(pop):
            if type(effect) is RecordRefused:
                raise CallError("this instance of a client was declared dead, or asks again too late: open the queue again")
            if type(effect) is TasksDelivered:
                tasks += codec.leased(effect.handed, effect.instance, self._payload)
        leases = wire.Leases(settled, tasks, pop.now - asked, self.shards)
        self.waiting.tell(peer, id, (pop.instance, -pop.nonce), 0, leases)

    def give_back(self, tasks: Iterable[LeasedTask[bytes | PayloadReference]], now: int) -> None:
        """Nobody got to know of these leases."""
        for one in tasks:
            delivery, instance = codec.parse_token(one.token)
            self.apply(Requeue(now, delivery, instance))
        self._serve_waiters(now)

    def _payload(self, task: StoredTask) -> bytes | PayloadReference:
        """As a client gets it: where to fetch it, if stores keep it."""
        payload = task.payload
        if isinstance(payload, BlobRef):
            return PayloadReference(payload.blob, payload.size, payload.crc, self._locate(payload.holders))
        return payload

    def _serve_waiters(self, now: int) -> None:
        """Those who are gone get nothing: their tasks would be nobody's for a whole lease."""
        waiters, ready = self._waiters, self.fold.ready
        while waiters and ready.count:
            _, one = waiters.take()
            if not self._here(one.peer):
                continue
            try:
                pop = msgspec.structs.replace(one.pop, now=now, count=self._fitting(one.pop.count))
                self._hand(one.peer, one.id, pop, [], one.pop.now)
            except RoqError as error:
                self.refuse(one.peer, one.id, error)

    def _end_waits(self, peer: bytes, id: int, request: wire.EndWaits, now: int) -> None:
        ended = [self._waiters.remove((request.instance, nonce)) for nonce in request.nonces]
        for one in ended:
            if one is not None:
                self._nothing(one.peer, one.id, now)
        self.waiting.answer(peer, id, wire.Counted(len(ended) - ended.count(None)))

    def _settle_all(self, peer: bytes, id: int, request: wire.SettleAll, now: int) -> None:
        if request.again and self.waiting.join(peer, id, request):
            return
        answer = wire.Leases(self._settle(request.settle, request.again, now), [], 0, self.shards)
        if (named := name_of(request)) is not None:
            self.waiting.tell(peer, id, *named, answer)
        else:
            self.waiting.answer(peer, id, answer)
        if self._waiters and self.fold.ready.count:
            self._serve_waiters(now)

    def _settle(self, settle: list[Settlement], again: int, now: int) -> list[str | None]:
        """All are understood before the first one is applied."""
        if len(settle) > 1 and self.fold.fed is not None and (acks := codec.acks(settle, now)) is not None:
            return self._ack_all(acks, settle, again)
        settled: list[str | None] = []
        for one, record in [(one, codec.settlement(one, now)) for one in settle]:
            token = codec.settled(one, self.apply(record, 4 * len(one.error)))
            if token is None and again and one.kind != EXTEND and record.delivery in self.recent:
                token = ""  # done when it was asked for first
            settled.append(token)
        self._may_be_free()
        return settled

    def _ack_all(self, acks: CompleteMany, settle: list[Settlement], again: int) -> list[str | None]:
        """Of a group, whose masters all know this record. Tokens as `_settle` answers."""
        (done, *_) = self.apply(acks, NUMBERS_BYTES * len(acks.runs))
        assert isinstance(done, ManySettled)
        self._may_be_free()
        if all(done.applied):
            return [""] * len(settle)
        recent = self.recent if again else ()
        deliveries = chain.from_iterable(range(first, first + count) for first, count in acks.runs)
        return ["" if one or delivery in recent else None for one, delivery in zip(done.applied, deliveries, strict=True)]

    # --- transactions -------------------------------------------------------------------------------------------------

    def _commit_all(self, peer: bytes, id: int, request: wire.CommitAll, now: int) -> None:
        if len(request.transactions) > wire.TRANSACTIONS_AT_ONCE:
            raise InvalidConfiguration(f"at most {wire.TRANSACTIONS_AT_ONCE} transactions travel together")
        outcomes = [self._commit(one, now) for one in request.transactions]
        self._prove(now)  # one who was replaced must not say that a lease is lost
        self.waiting.answer(peer, id, wire.Committed(outcomes))
        self._may_be_free()
        if self._waiters and self.fold.ready.count:
            self._serve_waiters(now)

    def _commit(self, one: wire.TransactionToCommit, now: int) -> wire.TransactionOutcome:
        """What was committed before is said once more; what was refused before finds its leases lost once more."""
        try:
            record = committing.commit_record(one, now)
            match self.fold.transactions.seen(one.producer, one.sequence):
                case Use.KNOWN:
                    return wire.TransactionOutcome(repeated=True)
                case Use.FORGOTTEN:
                    raise TemporaryError("this transaction was repeated too late: whether it took effect is unknown")
            if lost := self.fold.lost(record.deliveries):
                return wire.TransactionOutcome(lost=lost)
            committing.check_room(self.fold.outbox, one)
        except RoqError as error:
            return wire.TransactionOutcome(error=(type(error).__name__, str(error)))
        self.apply(record, committing.logged_bytes(record))
        if self.committed is not None and one.outgoing:
            numbers = {part.queue: self.fold.outbox.destinations[part.queue].last for part in one.outgoing}
            self.waiting.open.then.append(partial(self.committed, numbers))
        return wire.TransactionOutcome()

    def forwarded(self, queue: str, tapes: str, number: int, stored: int, now: int) -> None:
        """Messages of transactions are dealt with; see OutboxForwarded."""
        self.apply(OutboxForwarded(now, queue, tapes, number, stored), len(queue.encode()) + len(tapes.encode()))

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _rare(self, peer: bytes, id: int, request: wire.Request, now: int) -> None:
        body: wire.Reply
        self._prove(now)
        match request:
            case wire.Hello():
                body = wire.Welcome(self._term, self.fold.settings, self._blob_bytes, self.shards)
            case wire.GetStatus():
                self.tick(now)
                body = wire.MasterStatus(**msgspec.structs.asdict(self._status(now)), shards=self.shards)
            case wire.Peek():
                self.tick(now)
                body = self._peek(request)
            case wire.ReleaseEvery():
                body = self._count(ReleaseAll(now))
            case wire.PurgeQueue():
                body = self._count(Purge(now))
            case wire.RequeueLetters(ids):
                body = self._count(RequeueDead(now, letters(ids)))
            case wire.RemoveLetters(ids):
                body = self._count(RemoveDead(now, letters(ids)))
            case wire.FindKeys(keys):
                closed.check(self.closed)
                body = closed.keys_found(self.fold, keys)
            case wire.CountLeft():
                closed.check(self.closed)
                self.tick(now)
                body = closed.left(self.fold)
            case _:
                raise CallError(f"no such request: {type(request).__name__}")
        self.waiting.answer(peer, id, body)
        self._serve_waiters(now)

    def _status(self, now: int) -> Status:
        status = self.fold.status(now)
        if self.unfed is None:
            return status
        behind_ms, lag = self.unfed(now)
        return msgspec.structs.replace(status, behind_ms=behind_ms, lag=lag)

    def _count(self, command: Record) -> wire.Counted:
        size = NUMBERS_BYTES * len(command.tasks or ()) if isinstance(command, RequeueDead | RemoveDead) else 0
        count = sum(effect.tasks for effect in self.apply(command, size) if type(effect) is TasksChanged)
        self._may_be_free()
        return wire.Counted(count, self.shards)

    def _may_be_free(self) -> None:
        if self.freed is not None:
            self.freed()

    def _peek(self, request: wire.Peek) -> wire.PeekedTasks:
        try:
            state = TaskState(request.state)
        except ValueError:
            raise InvalidConfiguration(f"no task is ever {request.state!r}") from None
        seen: list[wire.PeekedTask] = []
        size = 0
        for task in self.fold.first(state, min(max(request.count, 0), PEEK_MAX)):
            size += len(task.payload) if isinstance(task.payload, bytes) else 0
            if size > REPLY_BYTES and seen:
                break
            seen.append(codec.view(wire.PeekedTask, task, state, self._payload(task)))
        return wire.PeekedTasks(seen, self.shards)

    def replace(self, task: tuple[int, int], blob: BlobRef, holders: tuple[str, ...], now: int) -> bool:
        """A blob has other holders from now on, unless its task is gone."""
        record, blob = HoldersReplaced(now, task, blob.blob, holders), msgspec.structs.replace(blob, holders=holders)
        effects = self.apply(record, _blob_bytes(blob))
        return any(type(effect) is Settled and effect.applied for effect in effects)


def _blob_bytes(blob: BlobRef) -> int:
    return len(blob.blob) + sum(NUMBERS_BYTES + len(host.encode()) for host in blob.holders)


def _dropped(effects: Iterable[Effect], blob: BlobRef) -> bool:
    return any(type(effect) is Dropped and effect.blob == blob for effect in effects)


def _is_repeated(push: Push, effects: Iterable[Effect]) -> bool:
    """Whether this number was used before."""
    return any(type(effect) is Known and effect.task == (push.producer, push.sequence) for effect in effects)

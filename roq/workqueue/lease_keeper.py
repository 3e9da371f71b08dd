"""Leases in hand: the task objects' common part, and one plain thread per open queue that renews them.

The thread knows no event loop, so a handler that blocks its loop, or computes for an hour, keeps its lease. It extends at a
third of the lease and retries until the lease would have ended. A renewal may change a task's token: settlements therefore
go through `begin` (which waits for a renewal of the same task that is under way) and `finish`.

A queue of several shards has a keeper for each, so that a shard that does not answer keeps no other's tasks from being renewed
and settled. Any token says which shard it is of, and those of a queue without others are all of shard 0: then its LeaseKeepers
are a LeaseKeeper as any. Not covered: how settlements travel together (batcher.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from roq.errors import CallError, Closed, LeaseLost, TemporaryError
from roq.wire.headers import split_headers
from roq.wire.shards import unmarked
from roq.wire.task import EXTEND, LeasedTask, Settlement
from roq.workqueue.contract import LEASE_COUNT_MAX, RoundTrip

logger = logging.getLogger(__name__)
RENEWALS = 3  # a lease is renewed when a third of it has passed, so two failed renewals cost nothing
RETRY_SECONDS = 1.0  # at most, between tries of a renewal that failed
LEFT_MAX = 1000  # tasks let go unsettled, before those whose lease is over are forgotten
JOIN_SECONDS = 1.0  # bounded wait for the thread at the end; it holds nothing

DONE = Settlement.ack()


class HeldTask:
    """A leased task. `attempt`: 1 for the first lease. `inserted`, `expires`: Unix seconds; `expires` moves with renewals.
    `topic`: of a group's message, "" otherwise."""

    __slots__ = (
        "__weakref__",
        "_lost",
        "_settled",
        "_until",
        "attempt",
        "begun",
        "claimed",
        "expires",
        "headers",
        "id",
        "inserted",
        "looped",
        "payload",
        "priority",
        "seconds",
        "token",
        "topic",
        "watcher",
    )

    def __init__(self, leased: LeasedTask[bytes], seconds: float, asked: float) -> None:
        self.id, self.attempt, self.priority, self.topic = leased.id, leased.attempt, leased.priority, leased.topic
        self.payload, self.headers = split_headers(leased.payload)
        self.inserted, self.expires, self.token = leased.inserted_ms / 1000, leased.expires_ms / 1000, leased.token
        self.seconds = seconds  # of the lease
        self._until = asked + seconds  # monotonic; the lease holds at least until here
        self._lost = self._settled = False
        self.begun = False  # handed to a loop's body or a handler
        self.claimed = False  # an open transaction acks it, so it is renewed until that ends
        self.looped = False  # a loop's or handler's: what is left of it when the queue is closed is given back
        self.watcher: Callable[[], object] | None = None  # called once, in the keeper's thread, when the lease is lost

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} attempt {self.attempt}, {len(self.payload)} bytes>"

    @property
    def publisher(self) -> int:
        """Who published it, of a group's message; else 0."""
        return int(self.id.partition("-")[0], 16) if self.topic else 0

    @property
    def sequence(self) -> int:
        """Its number at its publisher, of a group's message; else 0."""
        return int(self.id.partition("-")[2]) if self.topic else 0

    @property
    def timestamp(self) -> int:
        """As `inserted`, in nanoseconds, as roq.Message has it: of a group's message, when it was published."""
        return round(self.inserted * 1000) * 1_000_000

    @property
    def settled(self) -> bool:
        """Acked, released or rejected by this object."""
        return self._settled

    @property
    def lost(self) -> bool:
        """Whether the lease ended without us: its time passed unrenewed, or the queue said so. Stop working on it."""
        return self._lost or (not self._settled and time.monotonic() > self._until)

    def mark_lost(self) -> None:
        """The queue does not know this lease any more."""
        if not self._lost:
            self._lost = True
            if self.watcher is not None:
                try:
                    self.watcher()
                except Exception:  # its loop may be closed: the other tasks' leases have nothing to do with that
                    logger.exception("task %s: its worker can't be notified that its lease is lost", self.id)

    def answered(self, settlement: Settlement, token: str | None, asked: float) -> bool:
        """Take in the queue's answer; False: the lease was lost."""
        if token is None:
            self.mark_lost()
            return False
        if settlement.kind == EXTEND:
            self.token, self.seconds = token, settlement.milliseconds / 1000
            self._until, self.expires = asked + self.seconds, time.time() + self.seconds
        else:
            self._settled = True
        return True

    def ends_in(self, now: float) -> float:
        """Seconds of lease left, on the monotonic clock."""
        return self._until - now

    def renewal(self, now: float) -> float:
        """Monotonic time at which it is to be renewed: when a third of the lease has passed, or now."""
        return max(now, self._until - self.seconds * (RENEWALS - 1) / RENEWALS)


Target = HeldTask | str  # a task, or a bare token
Settlements = Sequence[tuple[Target, Settlement]]  # the token of the moment is filled in when they are sent
Settle = Callable[[Sequence[Settlement]], list[str | None]]
Places = list[int]  # in what was given
Lease = Callable[[float, int, float, Sequence[Settlement]], RoundTrip]


def given_back(tasks: Iterable[HeldTask], error: str) -> Settlements:
    """Releases at the end of everything; `error` only for those that were worked on."""
    return [(task, Settlement.release("", 0.0, error if task.begun else "")) for task in tasks]


def raise_lost(target: Target) -> NoReturn:
    """LeaseLost with the task's name."""
    name = f"with token {target!r}" if isinstance(target, str) else target.id
    raise LeaseLost(f"the lease of task {name} ended before: another worker may have it, or has done it")


class LeaseKeeper:
    """Renews the leases it is told to hold; safe for any thread. `settle`: Backend.settle."""

    def __init__(self, settle: Settle) -> None:
        self._settle = settle
        self._changed = threading.Condition(threading.Lock())
        self._due: dict[HeldTask, float] = {}  # monotonic time of the next renewal
        self._under_way: frozenset[HeldTask] = frozenset()  # its tokens may be changing
        self._left: set[HeldTask] = set()  # let go unsettled; their leases may still hold
        self._wake = float("inf")  # when the thread looks again; it may find nothing
        self._thread: threading.Thread | None = None
        self._closed = False

    def hold(self, tasks: Iterable[HeldTask]) -> None:
        """Renew these until they are settled, lost or let go."""
        now = time.monotonic()
        with self._changed:
            if self._closed:
                raise Closed("this work queue is closed")
            for task in tasks:
                task.looped = True
                self._put(task, now + task.seconds / RENEWALS)

    def keep(self, task: HeldTask) -> None:
        """Renew this one too, whoever leased it, until it is settled, lost or let go."""
        with self._changed:
            if self._closed:
                raise Closed("this work queue is closed")
            self._left.discard(task)
            if task not in self._due:
                self._put(task, task.renewal(time.monotonic()))

    def _put(self, task: HeldTask, due: float) -> None:
        self._due[task] = due
        if due < self._wake:
            self._wake = due
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="roq-leases", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def let_go(self, task: HeldTask) -> None:
        """Renew no more; the lease ends by itself, or a loop's with `close`."""
        with self._changed:
            if self._due.pop(task, None) is not None and task.looped and not task.settled:
                if len(self._left) >= LEFT_MAX:
                    self._left = {left for left in self._left if not (left.settled or left.lost)}
                self._left.add(task)

    def begin(self, wanted: Settlements) -> list[Settlement]:
        """The settlements with the tokens of this moment; renewal stops until `finish` or `abandon`."""
        with self._changed:
            if self._under_way:
                tasks = {target for target, _ in wanted if isinstance(target, HeldTask)}
                while self._under_way & tasks:
                    self._changed.wait()
            if self._due:
                for target, _ in wanted:
                    if isinstance(target, HeldTask) and target in self._due:
                        self._due[target] = float("inf")
        return [one.of(target if isinstance(target, str) else target.token) for target, one in wanted]

    def finish(
        self, wanted: Settlements, settlements: Sequence[Settlement], tokens: Sequence[str | None], asked: float
    ) -> list[str | None]:
        """Take in the answers of `begin`'s settlements; the answers."""
        with self._changed:
            for (target, _), settlement, token in zip(wanted, settlements, tokens, strict=True):
                if isinstance(target, HeldTask):
                    if not target.answered(settlement, token, asked) or target.settled:
                        self._due.pop(target, None)
                    elif target in self._due:
                        self._put(target, asked + target.seconds / RENEWALS)
        return list(tokens)

    def abandon(self, wanted: Settlements) -> None:
        """The settlements failed, or nobody knows: go on renewing."""
        with self._changed:
            now = time.monotonic()
            for target, settlement in wanted:
                if isinstance(target, HeldTask) and target in self._due:
                    self._put(target, now if settlement.kind == EXTEND else target.renewal(now))

    def settle(self, wanted: Settlements, call: Settle | None = None) -> list[str | None]:
        """begin, `call` (Backend.settle unless told), finish."""
        settlements, asked = self.begin(wanted), time.monotonic()
        try:
            tokens = (call or self._settle)(settlements)
        except BaseException:
            self.abandon(wanted)
            raise
        return self.finish(wanted, settlements, tokens, asked)

    def lease(self, lease: Lease, seconds: float, count: int, wait_seconds: float, wanted: Settlements = ()) -> RoundTrip:
        """One lease (`lease`: Backend.lease), after these settlements. It tells when the leases began, as far as is known:
        rather too early than too late."""
        settlements, asked = self.begin(wanted) if wanted else [], time.monotonic()
        try:
            settled, tasks, began = lease(seconds, count, wait_seconds, settlements)
        except BaseException:
            self.abandon(wanted)
            raise
        if wanted:
            self.finish(wanted, settlements, settled, asked)
        if not wait_seconds or not tasks:
            return RoundTrip(settled, tasks, asked)
        return RoundTrip(settled, tasks, began or time.monotonic())  # after a wait, `asked` may be much too early

    def close(self) -> list[HeldTask]:
        """Renew nothing any more; what was held for loops, or let go, and is neither settled nor lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        with self._changed:
            held = [task for task in (*self._due, *self._left) if task.looped and not (task.settled or task.lost)]
            self._due.clear()
            self._left.clear()
        return held

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (tasks := self._next()) is not None:
                try:
                    for start in range(0, len(tasks), LEASE_COUNT_MAX):
                        self._renew(tasks[start : start + LEASE_COUNT_MAX])
                except Exception as error:  # the thread's boundary: a renewal that breaks once is tried again
                    logger.exception("renewing %d leases failed", len(tasks))
                    self._retry(tasks, error)
                with self._changed:
                    self._under_way = frozenset()
                    self._changed.notify_all()
        except BaseException:
            logger.critical("the thread that renews leases ends: %d leases are lost", len(self._due), exc_info=True)
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Tell the tasks; whatever is held from now on gets another thread."""
        with self._changed:
            tasks = list(self._due)
            self._due.clear()
            self._under_way, self._wake, self._thread = frozenset(), float("inf"), None
            self._changed.notify_all()
            for task in tasks:
                task.mark_lost()

    def _next(self) -> list[HeldTask] | None:
        """Wait until renewals are due; None: closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._wake > now:
                    self._changed.wait(min(self._wake - now, threading.TIMEOUT_MAX))
                    continue
                # Those that come due a little later travel with the first: one trip per third of a lease, not one per task.
                due = [task for task, at in self._due.items() if at <= now + task.seconds / (4 * RENEWALS)]
                self._wake = min((self._due[task] for task in self._due.keys() - due), default=float("inf"))
                if due:
                    self._under_way = frozenset(due)
                    return due
            return None

    def _renew(self, tasks: list[HeldTask]) -> None:
        asked = time.monotonic()
        settlements = [Settlement.extend(task.token, task.seconds) for task in tasks]
        try:
            tokens = self._settle(settlements)
        except Closed:
            tokens = [None] * len(tasks)
        except (TemporaryError, CallError, OSError) as error:
            self._retry(tasks, error)
            return
        with self._changed:
            for task, settlement, token in zip(tasks, settlements, tokens, strict=True):
                if not task.answered(settlement, token, asked):
                    self._due.pop(task, None)
                elif task in self._due:
                    self._put(task, asked + task.seconds / RENEWALS)

    def _retry(self, tasks: list[HeldTask], error: Exception) -> None:
        now = time.monotonic()
        logger.warning("renewing %d leases failed, will be tried again: %s", len(tasks), error)
        with self._changed:
            for task in tasks:
                if task.ends_in(now) <= 0:
                    self._due.pop(task, None)
                    task.mark_lost()
                elif task in self._due:
                    self._put(task, now + min(RETRY_SECONDS, task.seconds / (4 * RENEWALS)))


# --- several shards ----------------------------------------------------------------------------------------------------


def shard_of(target: Target) -> int:
    """Of a task, or a token."""
    return unmarked(target if isinstance(target, str) else target.token)[0]


def by_shard(wanted: Settlements) -> dict[int, Places]:
    """Which are of which shard."""
    parts: dict[int, Places] = {}
    for place, (target, _) in enumerate(wanted):
        parts.setdefault(shard_of(target), []).append(place)
    return parts


class LeaseKeepers(LeaseKeeper):
    """A LeaseKeeper, itself that of shard 0; others are made when a task of theirs comes."""

    def __init__(self, settle: Settle) -> None:
        super().__init__(settle)
        self._others: dict[int, LeaseKeeper] = {}
        self._making = threading.Lock()
        self._ended = False

    def _other(self, shard: int) -> LeaseKeeper:
        with self._making:
            if shard not in self._others:
                if self._ended:
                    raise Closed("this work queue is closed")
                self._others[shard] = LeaseKeeper(self._settle)
            return self._others[shard]

    def hold(self, tasks: Iterable[HeldTask]) -> None:
        """See LeaseKeeper."""
        parts: dict[int, list[HeldTask]] = {}
        for task in tasks:
            parts.setdefault(shard_of(task), []).append(task)
        for shard, some in parts.items():
            if shard:
                self._other(shard).hold(some)
            else:
                super().hold(some)

    def keep(self, task: HeldTask) -> None:
        """See LeaseKeeper."""
        if shard := shard_of(task):
            self._other(shard).keep(task)
        else:
            super().keep(task)

    def let_go(self, task: HeldTask) -> None:
        """See LeaseKeeper."""
        if not (shard := shard_of(task)):
            super().let_go(task)
        elif (other := self._others.get(shard)) is not None:
            other.let_go(task)

    def begin(self, wanted: Settlements) -> list[Settlement]:
        """See LeaseKeeper."""
        begun = [one for _, one in wanted]
        for shard, places in by_shard(wanted).items():
            some, other = [wanted[place] for place in places], self._others.get(shard)
            given = super().begin(some) if other is None else other.begin(some)
            for place, settlement in zip(places, given, strict=True):
                begun[place] = settlement
        return begun

    def finish(
        self, wanted: Settlements, settlements: Sequence[Settlement], tokens: Sequence[str | None], asked: float
    ) -> list[str | None]:
        """See LeaseKeeper."""
        for shard, places in by_shard(wanted).items():
            some, other = [wanted[place] for place in places], self._others.get(shard)
            finish = super().finish if other is None else other.finish
            finish(some, [settlements[place] for place in places], [tokens[place] for place in places], asked)
        return list(tokens)

    def abandon(self, wanted: Settlements) -> None:
        """See LeaseKeeper."""
        for shard, places in by_shard(wanted).items():
            some, other = [wanted[place] for place in places], self._others.get(shard)
            if other is None:
                super().abandon(some)
            else:
                other.abandon(some)

    def settle(self, wanted: Settlements, call: Settle | None = None) -> list[str | None]:
        """See LeaseKeeper. At each shard by itself, side by side: what some have done is taken in, whatever others do. Raises
        what the first of those raised that did not."""
        parts = by_shard(wanted)
        if len(parts) < 2:
            return super().settle(wanted, call)
        tokens: list[str | None] = [None] * len(wanted)
        with ThreadPoolExecutor(len(parts), thread_name_prefix="roq-settle") as pool:
            one_shard = super().settle
            calls = [(places, pool.submit(one_shard, [wanted[place] for place in places], call)) for places in parts.values()]
        for places, done in calls:
            for place, token in zip(places, done.result(), strict=True):
                tokens[place] = token
        return tokens

    def close(self) -> list[HeldTask]:
        """See LeaseKeeper."""
        with self._making:
            self._ended = True
            others = list(self._others.values())
        held = super().close()
        for other in others:
            held += other.close()
        return held

"""WorkQueue: what `roq.open_queue` gives, the asynchronous face of any backend.

    async with roq.open_queue("file:///data/tasks") as tasks:
        await tasks.put(b"...")
        async for task in tasks.leases(seconds=60):
            ...
            await task.ack()

An awaited call that returned has taken effect on stable storage (except with `memory:`). Calls of one loop travel together
(batcher.py), so many coroutines are faster than one. Not covered: a worker process around it (handling.py), what an address
means (address.py), plain code (blocking_queue.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

from roq.errors import Closed, TemporaryError, WorkQueueNotFound
from roq.wire.headers import Headers
from roq.wire.task import LeasedTask, NewTask, Settlement, Status, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import Options, open_backend, without_password
from roq.workqueue.batcher import Batcher, CallThreads, LeaseBatcher
from roq.workqueue.contract import (
    LEASE_COUNT_MAX,
    PUT_BYTES,
    PUT_COUNT_MAX,
    Backend,
    RoundTrip,
    check_lease,
    new_task,
    open_shards,
    put_parts,
)
from roq.workqueue.handling import GRACE_SECONDS, Rules, Work, reason, work
from roq.workqueue.lease_keeper import (
    DONE,
    HeldTask,
    LeaseKeeper,
    LeaseKeepers,
    Settlements,
    Target,
    by_shard,
    given_back,
    raise_lost,
    shard_of,
)
from roq.workqueue.prefetch import Prefetch, Task, awaited
from roq.workqueue.transaction import CollectedTransaction, Failure, commit_all, commit_steps, committing

logger = logging.getLogger(__name__)
Held = TypeVar("Held", bound=HeldTask | str)  # a task, or its token
T = TypeVar("T")
CLOSE_SECONDS = 2.0  # that calls under way have to end before they are cut off; longer than a waiting one takes
COMMITS_AT_ONCE, COMMIT_BYTES = 200, 2 * 1024 * 1024  # transactions in one request
ANY_SHARD = -1  # what is leased behind no settlement is no shard's
LEASE_BATCHERS_MAX = 32  # lease times whose batchers are kept though idle


class WorkQueue:
    """Use as an async context manager, in one event loop. Any number of coroutines may use it at the same time."""

    def __init__(self, address: str, options: Options | None = None) -> None:
        self.address, self._full_address = without_password(address), address
        self._asked = options.checked() if options is not None else None
        self._opened: Backend | None = None
        self._closed = False

    # --- opening and closing --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> WorkQueue:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close(reason(error) if isinstance(error, Exception) else "")

    async def open(self) -> None:
        """Open, and create it if it is new. Raises InvalidAddress, WorkQueueConflict, WorkQueueNotFound, OSError."""
        self._threads = CallThreads()
        self._opened = backend = await self._threads.opened(
            open_backend, self._full_address, self._asked, close=lambda opened: opened.close()
        )
        self._keeper: LeaseKeeper = LeaseKeepers(backend.settle)
        at_once = partial(open_shards, backend)
        self._puts = Batcher[NewTask, str](self._threads, backend.put, PUT_COUNT_MAX, PUT_BYTES, at_once)
        self._settlements: dict[int, Batcher[tuple[Target, Settlement], str | None]] = {}  # by shard
        self._commits = Batcher[CollectedTransaction, Failure](self._threads, self._commit_all, COMMITS_AT_ONCE, COMMIT_BYTES)
        self._leases: dict[tuple[float, int], LeaseBatcher] = {}  # by lease time, and the shard of what is settled first
        self._unclaimed: list[LeasedTask[bytes]] = []  # came while the queue was being closed

    async def close(self, error: str = "") -> None:
        """Let go. What `leases` and `run` still hold is given back, with `error` if it was worked on; what `lease` gave stays
        leased until it expires."""
        if self._opened is None or self._closed:
            return
        self._closed = True
        self._puts.close()
        self._commits.close()
        for settlements in self._settlements.values():
            settlements.close()
        for batcher in self._leases.values():
            batcher.close()
        try:
            # What a waiting call leases while we leave would be nobody's until its lease ends: so it may end.
            await self._threads.settle_down(CLOSE_SECONDS)
            held = await self._threads.start(self._keeper.close)
            settle = [*given_back(held, error), *((task.token, Settlement.release("")) for task in self._unclaimed)]
            for start in range(0, len(settle), LEASE_COUNT_MAX):
                await self._threads.start(self._keeper.settle, settle[start : start + LEASE_COUNT_MAX])
        except TemporaryError as failure:
            logger.warning("%s: what was held could not be given back and comes back by itself: %s", self.address, failure)
        except WorkQueueNotFound:
            logger.info("%s was removed meanwhile, and with it what was held", self.address)
        finally:
            await self._threads.start(self._opened.close)
            await self._threads.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def settings(self) -> TaskSettings:
        """What the queue has, whoever chose it; that of a cluster's queue (`roq:`) is a ClusterSettings, as of the opening."""
        return self._backend.settings

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        return await self._threads.start(call, *arguments)

    @property
    def _backend(self) -> Backend:
        if self._opened is None or self._closed:
            raise Closed("this work queue is closed" if self._closed else "open this work queue first: async with …")
        return self._opened

    # --- putting --------------------------------------------------------------------------------------------------------

    async def put(
        self,
        payload: bytes,
        *,
        delay_seconds: float = 0.0,
        priority: int = 0,
        dedup_key: str = "",
        headers: Headers | None = None,
    ) -> str:
        """Put a task; its id. It can be leased after `delay_seconds`; higher priority goes first (-128 to 127). A `dedup_key`
        put again within the queue's `dedup_seconds` is the same task. headers: {name: text or bytes}, 4 KiB at most, its
        worker has them as `task.headers`. Raises CallError, or a TemporaryError: the outcome is unknown then."""
        self._backend  # noqa: B018  raises Closed
        task = new_task(payload, delay_seconds, priority, dedup_key, headers)
        return (await self._puts.add((task,), len(task.payload)))[0]

    async def put_many(self, tasks: Iterable[NewTask | bytes]) -> list[str]:
        """Put any number of payloads or `roq.NewTask`s; their ids. Together in parts of up to 10,000 or 4 MiB."""
        self._backend  # noqa: B018
        ids: list[str] = []
        for part in put_parts(tasks):
            ids += await self._puts.add(part, sum(len(task.payload) for task in part))
        return ids

    # --- leasing --------------------------------------------------------------------------------------------------------

    async def lease(self, seconds: float = 60.0, count: int = 1, wait_seconds: float = 0.0) -> list[Task]:
        """Up to `count` tasks for `seconds`, waiting up to `wait_seconds` for the first. Not renewed, but by a
        transaction that acks them: `extend`."""
        trip = await self._lease(seconds, count, wait_seconds)
        return [Task(leased, seconds, trip.began, self) for leased in trip.tasks]

    async def leases(
        self, seconds: float = 60.0, *, count: int = 1, wait_seconds: float | None = None
    ) -> AsyncGenerator[Task, None]:
        """Tasks one by one, each renewed while the loop's body works on it. count: tasks leased per trip. wait_seconds: end
        when none came for so long; None: never; 0: when none is ready.

        An ack in the body fetches the next task in the same trip. A task that the body leaves unsettled comes back when its
        lease ends. While the queue can't be reached, it is tried again.
        """
        check_lease(seconds, count, wait_seconds)
        prefetch = Prefetch(self, seconds, count, wait_seconds)
        try:
            while (task := await prefetch.next()) is not None:
                yield task
                prefetch.leave()
        finally:
            await prefetch.close()

    async def run(
        self,
        handler: Callable[[Task], Awaitable[object]],
        *,
        concurrency: int = 1,
        seconds: float = 60.0,
        wait_seconds: float | None = None,
        grace_seconds: float = GRACE_SECONDS,
        retry_seconds: float = 1.0,
        handle_signals: bool = True,
    ) -> Work:
        """Be a worker: `await handler(task)` for up to `concurrency` tasks at a time, until SIGTERM or SIGINT.

        A handler that returns acks its task; one that raises gives it back with the error, after `retry_seconds` doubled per
        attempt. A signal stops leasing; handlers have `grace_seconds` to finish, then they are cancelled and their tasks given
        back; a second signal ends that time. A signal is for every `run` of the process, whatever its thread; it is seen while
        one of them runs in the main thread. handle_signals=False: signals are left alone, and don't stop this one.
        wait_seconds: end when there was nothing to do for so long.
        """
        self._backend  # noqa: B018
        rules = Rules(concurrency, seconds, wait_seconds, grace_seconds, retry_seconds, handle_signals).check()
        return await work(self.address, lambda: Prefetch(self, seconds, 1, wait_seconds), handler, rules)

    async def _lease(self, seconds: float, count: int, wait_seconds: float, settle: Settlements = ()) -> RoundTrip:
        """One lease, after these settlements. Cancelled, it holds nothing."""
        check_lease(seconds, count, wait_seconds)
        shard = shard_of(settle[0][0]) if settle else ANY_SHARD if open_shards(self._backend) > 1 else 0
        future = self._lease_batcher(seconds, shard).add(count, wait_seconds, settle)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result().tasks)
            raise

    def _lease_batcher(self, seconds: float, shard: int) -> LeaseBatcher:
        batcher = self._leases.get((seconds, shard))
        if batcher is None:
            if len(self._leases) >= LEASE_BATCHERS_MAX:
                self._leases = {kept: batcher for kept, batcher in self._leases.items() if not batcher.idle}
            batcher = LeaseBatcher(self._threads, seconds, self._lease_blocking, self._give_back)
            self._leases[seconds, shard] = batcher
        return batcher

    def _lease_blocking(self, seconds: float, count: int, wait_seconds: float, settle: Settlements) -> RoundTrip:
        """In a thread."""
        backend = self._backend
        trip = self._keeper.lease(backend.lease, seconds, count, wait_seconds, settle)
        if trip.tasks and self._closed:  # nobody is there any more to take them
            backend.settle([Settlement.release(task.token) for task in trip.tasks])
            trip.tasks.clear()
        return trip

    def _give_back(self, tasks: Sequence[LeasedTask[bytes]]) -> None:
        """Release tasks that nobody took; they were not tried."""
        if self._closed:
            self._unclaimed.extend(tasks)
        elif tasks:
            wanted: Settlements = [(task.token, Settlement.release("")) for task in tasks]
            for shard, places in by_shard(wanted).items():
                given = self._settlement_batcher(shard).add([wanted[place] for place in places])
                given.add_done_callback(_log_failure)

    # --- settling -------------------------------------------------------------------------------------------------------

    def _settlement_batcher(self, shard: int) -> Batcher[tuple[Target, Settlement], str | None]:
        """One per shard: none waits for another."""
        batcher = self._settlements.get(shard)
        if batcher is None:
            batcher = Batcher(self._threads, self._keeper.settle, LEASE_COUNT_MAX)
            self._settlements[shard] = batcher
        return batcher

    async def _settle_part(self, wanted: Settlements) -> list[str | None]:
        """The answers; those of each shard travel by themselves."""
        parts, tokens = by_shard(wanted), list[str | None]([None] * len(wanted))
        calls = [self._settlement_batcher(shard).add([wanted[place] for place in some]) for shard, some in parts.items()]
        for places, answers in zip(parts.values(), await asyncio.gather(*calls), strict=True):
            for place, token in zip(places, answers, strict=True):
                tokens[place] = token
        return tokens

    async def _settle_one(self, target: Target, settlement: Settlement) -> str:
        """Settle by task or token; the token from now on. Raises LeaseLost."""
        self._backend  # noqa: B018
        token = (await self._settlement_batcher(shard_of(target)).add(((target, settlement),)))[0]
        return raise_lost(target) if token is None else token

    def _commit_all(self, transactions: list[CollectedTransaction]) -> list[Failure]:
        """In a thread."""
        return commit_all(self._keeper, self._backend, transactions)

    async def _commit(self, transaction: CollectedTransaction) -> None:
        """Raises TransactionAborted, DeadlineExceeded, Overloaded, CallError."""
        patience = committing(self._backend).patience_seconds
        await awaited(
            commit_steps(transaction, patience, lambda: self._commits.add((transaction,), transaction.bytes), asyncio.sleep)
        )

    async def _settle_many(self, tasks: Iterable[Held], settlement: Settlement) -> list[Held]:
        self._backend  # noqa: B018
        wanted = list(tasks)
        parts = [wanted[start : start + LEASE_COUNT_MAX] for start in range(0, len(wanted), LEASE_COUNT_MAX)]
        calls = [self._settle_part([(task, settlement) for task in part]) for part in parts]
        tokens = [token for part in await asyncio.gather(*calls) for token in part]
        return [task for task, token in zip(wanted, tokens, strict=True) if token is None]

    async def ack(self, task: Task | str) -> None:
        """A task, or the token of one, is done. Raises LeaseLost."""
        await (task.ack() if isinstance(task, Task) else self._settle_one(task, DONE))

    async def extend(self, task: Task | str, seconds: float) -> str:
        """Keep a lease for `seconds` from now; the token from now on. Raises LeaseLost."""
        return await self._settle_one(task, Settlement.extend("", seconds))

    async def release(self, task: Task | str, delay_seconds: float = 0.0, error: str = "") -> None:
        """Give a task back. Raises LeaseLost."""
        await self._settle_one(task, Settlement.release("", delay_seconds, error))

    async def reject(self, task: Task | str, error: str) -> None:
        """Make a task a dead letter. Raises LeaseLost."""
        await self._settle_one(task, Settlement.reject("", error))

    async def ack_many(self, tasks: Iterable[Held]) -> list[Held]:
        """Ack all of these tasks or tokens; those whose lease was lost before."""
        return await self._settle_many(tasks, DONE)

    async def extend_many(self, tasks: Iterable[Held], seconds: float) -> list[Held]:
        """Extend all; those whose lease was lost before."""
        return await self._settle_many(tasks, Settlement.extend("", seconds))

    async def release_many(self, tasks: Iterable[Held], delay_seconds: float = 0.0, error: str = "") -> list[Held]:
        """Give all back; those whose lease was lost before."""
        return await self._settle_many(tasks, Settlement.release("", delay_seconds, error))

    async def reject_many(self, tasks: Iterable[Held], error: str) -> list[Held]:
        """Make all dead letters; those whose lease was lost before."""
        return await self._settle_many(tasks, Settlement.reject("", error))

    # --- the whole queue ------------------------------------------------------------------------------------------------

    async def status(self) -> Status:
        """Counts, and the age of the oldest ready task."""
        return await self._in_thread(self._backend.status)

    async def peek(self, state: TaskState | str = TaskState.READY, count: int = 10) -> list[TaskView]:
        """The first tasks of a state ("ready", "delayed", "leased", "dead"), without leasing them."""
        return [view.opened() for view in await self._in_thread(self._backend.peek, TaskState(state), count)]

    async def release_all(self) -> int:
        """Make every leased and delayed task ready; how many."""
        return await self._in_thread(self._backend.release_all)

    async def purge(self) -> int:
        """Remove every task that is not dead, leased ones too; how many."""
        return await self._in_thread(self._backend.purge)

    async def dead(self, count: int = 100) -> list[TaskView]:
        """The first dead letters, each with its last error."""
        return await self.peek(TaskState.DEAD, count)

    async def requeue_dead(self, ids: Sequence[str] | None = None) -> int:
        """Make dead letters ready again with attempts at 0 (None: all); how many."""
        return await self._in_thread(self._backend.requeue_dead, ids)

    async def remove_dead(self, ids: Sequence[str] | None = None) -> int:
        """Forget dead letters (None: all); how many."""
        return await self._in_thread(self._backend.remove_dead, ids)


def _log_failure(given: asyncio.Future[list[str | None]]) -> None:
    if not given.cancelled() and (error := given.exception()) is not None:
        logger.warning("tasks nobody took could not be given back and come back by themselves: %s", error)


def open_queue(  # noqa: PLR0913  one argument per option
    address: str,
    *,
    max_attempts: int | None = None,
    dedup_seconds: float | None = None,
    payload_bytes_max: int | None = None,
    write_quorum: int | None = None,
    ack_quorum: int | None = None,
    standbys: int | None = None,
    inline_bytes: int | None = None,
    patience_seconds: float | None = None,
    ack_sync_seconds: float | None = None,
    trust_functions: bool | None = None,
    shards: int | None = None,
) -> WorkQueue:
    """The work queue at `memory:`, `file:///dir`, `log:///dir`, `roq://zk1:2181,zk2:2181/name`,
    `postgresql://user@host/database?queue=name` or `jetstream://host:4222/name`; made if it is new.

    Each option may stand in the address too: `log:///dir?max_attempts=5`. Raises InvalidConfiguration for a wrong one.

    Kept with the queue; what another program chose stays, and asking for other values raises WorkQueueConflict:
    max_attempts: a task leased this often and not acked becomes a dead letter (default 0: never). dedup_seconds: how long a
    `dedup_key` is remembered (300). payload_bytes_max: of one task (1 MiB).

    Kept with a queue of a cluster (`roq:`): write_quorum: stores that keep each task (3, or as many as there are hosts).
    ack_quorum: that must have synced it before a put returns (the majority). standbys: masters in waiting, on other hosts (1).
    inline_bytes: payloads from here on go straight to a store (64 KiB). shards: masters that share the tasks of a new one (1).

    Of this opening: patience_seconds (`roq:`, `postgresql:`, `jetstream:`): a call that nobody answers for longer raises
    Unavailable, or LogUnavailable (30). ack_sync_seconds (`file:`): above 0, an ack returns before it is synced, and is synced
    so much later at most: acks are two to three times as fast, but a loss of power may bring back tasks that were acked just
    before (0). trust_functions (`file:`): take payloads that are function calls to workers of python-task-queue, which carry
    out any that they find there (False).
    """
    return WorkQueue(
        address,
        Options(
            max_attempts,
            dedup_seconds,
            payload_bytes_max,
            write_quorum,
            ack_quorum,
            standbys,
            inline_bytes,
            patience_seconds,
            ack_sync_seconds,
            trust_functions,
            shards,
        ),
    )

"""What a leader does by itself in one term: it finishes transactions, and repairs queues when hosts are lost or join.

A *transaction* is a request that is recorded and under way: one task each waits until the hosts have done their part, then
clears the record. It makes no difference whether this leader or one before it wrote it. A creation that failed is rolled back;
a removal stays known for a while, so that its repetition gets the same answer; what stores keep of its logs is deleted.

A *lost host* is recorded as `transactions/host/<host>` before anything is done about it, and forgotten when nothing is left to
do: the next leader finds both the record and what is still missing. The repairer looks whenever a host is lost or joins, and
when room may have appeared. What is to be done is decided in transactions.py, work_queues.py and recovery.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from functools import partial

from gcm import recovery, transactions, work_queues
from gcm.cluster import (
    STORE_NAME,
    Action,
    ClientTransaction,
    ClusterState,
    differing,
    exchange_name,
    is_running,
    store_endpoints,
)
from gcm.crash import crash_point
from gcm.reconcile import lacking_stores
from gcm.term import Decide, LeaderTerm
from roq.errors import ExchangeNotFound, NotLeader, NotReady, ProcessFailed, QueueNotFound, RoqError, WorkQueueNotFound
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.runtime.observe import logger
from roq.wire import store as wire
from roq.wire.assignment import STORES

log = logger(__name__)

QUEUES_AT_ONCE = 256  # repaired at the same time; the term writes as many of them together as fit
LAST_EPOCH = 1 << 62  # after every writer of a log there was, and every copy
LOOK_SECONDS = 1.0  # between two looks for what nobody is waiting for: a slot that was freed, a backup that was given up


class Finisher:
    """All transactions under way in one term."""

    def __init__(self, term: LeaderTerm) -> None:
        self._term = term
        self._tasks: dict[str, asyncio.Task[None]] = {}
        term.view.on_change.append(self._changed)
        self._start(term.view.cluster.transactions.values())

    async def settle(self, id: str, seconds: float) -> None:
        """Wait until the transaction is done (at once if there is none). Raises why it failed, NotReady, or NotLeader."""
        task = self._tasks.get(id)
        if task is None:
            return
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise NotReady(f"the hosts are not done after {seconds:g} s; repeat the request with the same transaction id")
        if task.cancelled():
            raise NotLeader("this Global Configuration Manager leads no longer")
        task.result()

    async def stop(self) -> None:
        """Leave the rest to the next leader."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        if before.transactions is after.transactions:
            return
        self._start(entry for id, entry in after.transactions.items() if id not in before.transactions)
        for id in before.transactions.keys() - after.transactions.keys():
            self._tasks.pop(id, None)  # it has ended, or is just ending, by itself

    def _start(self, entries: Iterable[ClientTransaction]) -> None:
        for entry in entries:
            task = asyncio.get_running_loop().create_task(self._finish(entry), name=f"{entry.action} {entry.subject}")
            task.add_done_callback(_log_failure)
            self._tasks[entry.id] = task

    async def _finish(self, entry: ClientTransaction) -> None:
        cluster = self._term.view.cluster
        revisions = {name: cluster.host(name).revision for name in entry.hosts}
        match entry.action:
            case Action.CREATE_QUEUE:
                await self._until_created(entry, revisions, lambda now: transactions.without_queue(now, entry.queue))
            case Action.CREATE_WORK_QUEUE:
                await self._until_created(entry, revisions, lambda now: transactions.without_work_queues(now, entry.queue))
            case Action.CREATE_EXCHANGE:
                await self._until_created(entry, revisions, lambda now: _without_exchange(now, entry))
            case Action.REMOVE_QUEUE | Action.REMOVE_EXCHANGE | Action.REMOVE_WORK_QUEUE:
                await self._until_gone(entry, revisions)
                await self._remove_logs(entry)
                self._forget_after(entry, entry.created + transactions.REMOVAL_KEPT_SECONDS - time.time())

    async def _until_created(self, entry: ClientTransaction, revisions: transactions.Revisions, roll_back: Decide) -> None:
        try:
            await self._term.view.until(entry.subject, lambda cluster: _created(cluster, entry, revisions))
        except ProcessFailed:
            await self._term.change(roll_back, *entry.subjects)
            raise
        except (QueueNotFound, ExchangeNotFound, WorkQueueNotFound):
            self._forget_after(entry, 0)
            raise
        self._forget_after(entry, 0)

    async def _until_gone(self, entry: ClientTransaction, revisions: transactions.Revisions) -> None:
        if transactions.without_orphans(self._term.view.cluster, entry) is not self._term.view.cluster:
            await self._term.change(lambda now: transactions.without_orphans(now, entry), *entry.subjects)
        for subject in entry.subjects:
            gone = partial(transactions.none_left, entry=entry, subject=subject, revisions=revisions)
            await self._term.view.until(subject, gone)

    async def _remove_logs(self, entry: ClientTransaction) -> None:
        """Of what is gone: the log of a work queue, or of a recorded queue the tapes, and the logs of its groups. Their data
        goes behind the answer."""
        logs = [*([entry.log] if entry.log else ()), *entry.groups.values()]
        prefixes = [prefix for log_id in logs for prefix in (f"{log_id}~", f"{log_id}/")]
        if entry.tapes:
            logs += await self._term.logs(entry.tapes)
            prefixes.append(entry.tapes)
        for log_id in logs:
            await self._term.remove_log(log_id)
        if prefixes:
            self._term.tasks.start(erase(self._term.view.cluster, *prefixes), f"erase logs of {entry.subject}")

    def _forget_after(self, entry: ClientTransaction, seconds: float) -> None:
        """Remove the record, behind the answer to the client."""
        seconds = min(max(seconds, 0), transactions.REMOVAL_KEPT_SECONDS)  # the clock of the leader before may have been wrong
        step = entry.action.replace("-", "_")
        self._term.tasks.start(self._forget(entry.id, step, seconds), f"forget {entry.id}")

    async def _forget(self, id: str, step: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await self._term.change_when_it_fits(lambda cluster: transactions.end(cluster, id))
        except NotLeader:
            return  # the next leader does it
        crash_point(f"{step}.forgotten")


def _created(cluster: ClusterState, entry: ClientTransaction, revisions: transactions.Revisions) -> bool:
    """The hosts run what was created. Raises ProcessFailed, or that it is not found if it is unwanted again."""
    if entry.action is Action.CREATE_WORK_QUEUE:
        return work_queues.created(cluster, entry, revisions)
    record = cluster.queues.get(entry.queue)
    if record is None or (not entry.exchange and record.transaction != entry.id):
        raise QueueNotFound(f"queue {entry.queue!r} was removed while it was being created")
    if not entry.exchange:
        return transactions.serves(cluster, record, revisions)
    host = record.exchanges.get(entry.exchange)
    if host is None:
        raise ExchangeNotFound(f"Exchange {entry.exchange!r} was removed while it was being created")
    name = exchange_name(record.name, entry.exchange)
    return not record.running or transactions.all_run(cluster, [(host, name)], revisions)


def _without_exchange(cluster: ClusterState, entry: ClientTransaction) -> ClusterState:
    if entry.queue in cluster.queues:
        cluster = transactions.without_exchange(cluster, entry.queue, entry.exchange)
    return transactions.end(cluster, entry.id)


def _log_failure(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    fields = {"transaction": task.get_name(), "error": type(error).__name__, "reason": str(error)}
    known = isinstance(error, RoqError)
    log.log(logging.WARNING if known else logging.ERROR, "transaction failed", extra={"fields": fields})


class NextLook:
    """When a task that runs as long as a term does looks again for something to do: the earliest of what was asked for."""

    def __init__(self) -> None:
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def within(self, seconds: float) -> None:
        """Look so soon. After `close`: nothing."""
        loop = asyncio.get_running_loop()
        if self._closed or (self._timer is not None and self._timer.when() <= loop.time() + seconds):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._due.set) if seconds > 0 else None
        if self._timer is None:
            self._due.set()

    async def due(self) -> None:
        """Wait until then; what is asked for from now on is for the look after this one."""
        await self._due.wait()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """No looks any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()


class HostRepairer:
    """Made once per term; ends with it."""

    def __init__(self, term: LeaderTerm) -> None:
        self._term = term
        self._chance = random.Random()
        self._next = NextLook()
        term.view.on_change.append(self._changed)

    def start(self) -> None:
        """Look now, and from now on."""
        self._next.within(0)
        self._term.tasks.start(self._run(), "repairer")

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        changed = [(before.host(name), after.host(name)) for name in differing(before.hosts, after.hosts)]
        if any((old.alive, old.draining) != (new.alive, new.draining) for old, new in changed):
            self._next.within(0)
        elif changed or before.queues is not after.queues or before.work_queues is not after.work_queues:
            self._next.within(LOOK_SECONDS)

    async def _run(self) -> None:
        try:
            while True:
                await self._next.due()
                await self._once()
        except NotLeader:
            return  # the next leader goes on
        finally:
            self._next.close()

    async def _once(self) -> None:
        term = self._term
        lost = recovery.lost_hosts(term.view.cluster)
        if fresh := sorted(lost.keys() - term.view.cluster.recoveries.keys()):
            crash_point("recover_host.seen")
            await term.change(lambda cluster: recovery.begin(cluster, fresh, time.time()))
            crash_point("recover_host.recorded")
        started = time.monotonic()
        if lost:
            await self._each(recovery.fail_over, dict.fromkeys(subject for subjects in lost.values() for subject in subjects))
            crash_point("recover_host.activated")
        if lacking_stores(term.view.cluster):
            await self._each(lambda cluster, subject, chance: cluster, (STORES,))
        await self._each(recovery.repair, recovery.lacking(term.view.cluster))
        if lost:
            crash_point("recover_host.repaired")
        if done := recovery.finished(term.view.cluster):
            await term.change(lambda cluster: recovery.end(cluster, done))
            crash_point("recover_host.forgotten")
        if fresh:
            left = {name: len(queues) for name, queues in recovery.lost_hosts(term.view.cluster).items()}
            fields = {"hosts": fresh, "seconds": round(time.monotonic() - started, 3), "queues_left": left}
            log.warning("queues of lost hosts were recovered", extra={"fields": fields})

    async def _change(self, step: recovery.Step, subject: str) -> None:
        await self._term.change(lambda cluster: step(cluster, subject, self._chance), subject)

    async def _each(self, step: recovery.Step, subjects: Iterable[str]) -> None:
        """One change per queue: they are written together as far as they fit, and one that can't be harms no other."""
        names = list(subjects)
        for first in range(0, len(names), QUEUES_AT_ONCE):
            part = names[first : first + QUEUES_AT_ONCE]
            outcomes = await asyncio.gather(*(self._change(step, queue) for queue in part), return_exceptions=True)
            for queue, outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, NotLeader):
                    raise outcome
                if isinstance(outcome, BaseException):
                    log.error(
                        "queue was not recovered: trying again when hosts change",
                        extra={"fields": {"queue": queue, "reason": str(outcome)}},
                    )


async def erase(cluster: ClusterState, *prefixes: str) -> None:
    """Delete what the stores keep of a queue or work queue that is gone: segments of its logs, snapshots, payloads of its
    tasks; all whose names begin like one of these. Done once, as well as it goes: a store that is away keeps its part."""
    running = {host: at for host, at in store_endpoints(cluster).items() if is_running(cluster, host, STORE_NAME)}
    stores = Stores(StaticDirectory(running))
    try:
        await asyncio.gather(*(_erase_on(stores, host, prefixes) for host in sorted(running)))
    finally:
        stores.close()


async def _erase_on(stores: Stores, host: str, prefixes: Iterable[str]) -> None:
    for prefix in prefixes:
        count = 0
        try:
            for segment in await stores.segments(host, prefix):
                await stores.request(host, wire.DeleteSegment(segment, LAST_EPOCH), wire.StoreDone)
                count += 1
            for blob in await stores.inventory(host, prefix):
                await stores.request(host, wire.DeleteBlob(blob.blob), wire.StoreDone)
                count += 1
        except RoqError as error:
            log.warning("host %s keeps part of removed log %s…, %d items were deleted: %s", host, prefix, count, error)
            return

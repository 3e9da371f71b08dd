"""Finishing what was begun: one task per transaction waits until the hosts have done their part, then clears the record.

It makes no difference whether this leader or one before it wrote the transaction. A creation that failed is rolled back; a
removal stays known for a while, so that its repetition gets the same answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from gcm import transactions, work_queues
from gcm.cluster import Action, ClientTransaction, ClusterState, exchange_name
from gcm.crash import crash_point
from gcm.erase import erase
from gcm.reign import Decide, Reign
from roq.errors import ExchangeNotFound, NotLeader, NotReady, ProcessFailed, QueueNotFound, RoqError, WorkQueueNotFound
from roq.runtime.observe import logger

log = logger(__name__)


class Finisher:
    """All transactions under way in one reign."""

    def __init__(self, reign: Reign) -> None:
        self._reign = reign
        self._tasks: dict[str, asyncio.Task[None]] = {}
        reign.on_change.append(self._changed)
        self._start(reign.cluster.transactions.values())

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
        cluster = self._reign.cluster
        revisions = {name: cluster.host(name).revision for name in entry.hosts}
        match entry.action:
            case Action.CREATE_QUEUE:
                await self._until_created(entry, revisions, lambda now: transactions.without_queue(now, entry.queue))
            case Action.CREATE_WORK_QUEUE:
                await self._until_created(entry, revisions, lambda now: work_queues.without(now, entry.queue))
            case Action.CREATE_EXCHANGE:
                await self._until_created(entry, revisions, lambda now: _without_exchange(now, entry))
            case Action.REMOVE_QUEUE | Action.REMOVE_EXCHANGE | Action.REMOVE_WORK_QUEUE:
                await self._reign.until(entry.subject, lambda now: transactions.none_left(now, entry, revisions))
                if entry.log:
                    await self._reign.remove_log(entry.log)
                    self._reign.tasks.start(erase(self._reign.cluster, entry.log), f"erase log {entry.log}")
                self._forget_after(entry, entry.created + transactions.REMOVAL_KEPT_SECONDS - time.time())

    async def _until_created(self, entry: ClientTransaction, revisions: transactions.Revisions, roll_back: Decide) -> None:
        try:
            await self._reign.until(entry.subject, lambda cluster: _created(cluster, entry, revisions))
        except ProcessFailed:
            await self._reign.change(roll_back, entry.subject)
            raise
        except (QueueNotFound, ExchangeNotFound, WorkQueueNotFound):
            self._forget_after(entry, 0)
            raise
        self._forget_after(entry, 0)

    def _forget_after(self, entry: ClientTransaction, seconds: float) -> None:
        """Remove the record, behind the answer to the client."""
        seconds = min(max(seconds, 0), transactions.REMOVAL_KEPT_SECONDS)  # the clock of the leader before may have been wrong
        step = entry.action.replace("-", "_")
        self._reign.tasks.start(self._forget(entry.id, step, seconds), f"forget {entry.id}")

    async def _forget(self, id: str, step: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await self._reign.change(lambda cluster: transactions.end(cluster, id))
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

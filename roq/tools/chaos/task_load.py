"""A work queue under faults: producers in this process, workers as processes that are killed and frozen; every task counted.

A put that had no answer is repeated under its `dedup_key` until it is confirmed, so it is known in the end what was put. The
queue's own counts say at the end whether all is done: what was confirmed and is neither acked nor there is lost.
"""

from __future__ import annotations

import asyncio
import time
from random import Random

import roq
from roq.errors import TemporaryError
from roq.tools.chaos.edn import OperationType
from roq.tools.chaos.ledger import LeaseLedger
from roq.tools.chaos.loads import AGAIN_SECONDS, ClientsLoad, LoadContext, await_empty, end_tasks, is_empty, write_event
from roq.tools.chaos.promises import count_violations
from roq.tools.chaos.schedule import LoadKind
from roq.tools.chaos.verdict import LoadVerdict, Numbers, count, decide, ranges_text
from roq.tools.chaos.worker import WorkerEvent, WorkerPlan, task_payload

WORK_QUEUE = "chaos-tasks"
TASKS_PER_SECOND = 20.0
PRODUCERS, WORKERS = 4, 2
PATIENCE_SECONDS = 5.0  # of a put, which is repeated then
DELAYED_SHARE, DELAY_SECONDS, URGENT_SHARE = 0.1, 0.5, 0.2
STANDBYS, WRITE_QUORUM, ACK_QUORUM = 1, 3, 2


class WorkQueueLoad(ClientsLoad):
    """See loads.ChaosLoad."""

    def __init__(self, context: LoadContext) -> None:
        super().__init__()
        self._context = context
        self._address = f"roq://{context.zookeeper}/{WORK_QUEUE}"
        self._handed_over = 0
        self._confirmed = Numbers()
        self.ledger = LeaseLedger(lambda _: self._handed_over, clocks_move=context.clocks_move)
        self._status: roq.Status | None = None

    async def __aenter__(self) -> WorkQueueLoad:
        admin = self._context.client
        await admin.create_work_queue(WORK_QUEUE, write_quorum=WRITE_QUORUM, ack_quorum=ACK_QUORUM, standbys=STANDBYS)
        queue = await self._open.enter_async_context(roq.open_queue(self._address, patience_seconds=PATIENCE_SECONDS))
        self._producing = [
            asyncio.create_task(self._produce(queue, f"producer {number}", number), name=f"producer {number}")
            for number in range(1, PRODUCERS + 1)
        ]
        for number in range(1, WORKERS + 1):
            plan = WorkerPlan(self._address, f"tasks/{number}", self._context.seed * 1000 + number * 100)
            self._context.pool.add(plan, self._hear)
        return self

    def _hear(self, event: WorkerEvent) -> None:
        self.ledger.take(event)
        write_event(self._context.history, event, messages=False)

    async def _produce(self, queue: roq.WorkQueue, producer: str, seed: int) -> None:
        random = Random(f"{self._context.seed} {seed}")
        while not self._ending.is_set():
            self._handed_over += 1
            await self._put(queue, producer, self._handed_over, random)
            await asyncio.sleep(random.expovariate(TASKS_PER_SECOND / PRODUCERS))

    async def _put(self, queue: roq.WorkQueue, producer: str, number: int, random: Random) -> None:
        """Until it is confirmed."""
        history = self._context.history
        delay = DELAY_SECONDS if random.random() < DELAYED_SHARE else 0.0
        priority = 1 if random.random() < URGENT_SHARE else 0
        while True:
            history.invoke(producer, "enqueue", number, time.monotonic())
            try:
                payload, key = task_payload(number), f"task {number}"
                await queue.put(payload, delay_seconds=delay, priority=priority, dedup_key=key)
            except TemporaryError:
                history.complete(producer, OperationType.INFO, time.monotonic())
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            history.complete(producer, OperationType.OK, time.monotonic())
            self._confirmed.add(number, number)
            return

    async def stop(self, timeout_seconds: float) -> None:
        """See loads.ChaosLoad."""
        self._ending.set()
        self.failures += await end_tasks(self._producing, timeout_seconds)

    async def drain(self, timeout_seconds: float) -> None:
        """See loads.ChaosLoad."""

        def nothing_missing() -> bool:
            return not _lost(self.ledger, self._confirmed)

        self._status = await await_empty(self._address, timeout_seconds, nothing_missing, group=False)

    def verdict(self) -> LoadVerdict:
        """The workers have ended, and everything that they wrote was heard."""
        if self._status is not None and is_empty(self._status, group=False):
            # The queue says that these are done, although their acks had no answer.
            history, now = self._context.history, time.monotonic()
            history.invoke("drainer", "drain", None, now)
            history.complete("drainer", OperationType.OK, now, sorted(number for _, number in self.ledger.doubted()))
        return task_verdict(self.ledger, self._confirmed, self._handed_over, self._status)


def task_verdict(ledger: LeaseLedger, confirmed: Numbers, handed_over: int, status: roq.Status | None) -> LoadVerdict:
    """Pure. confirmed: puts; status: of the queue after the drain, None if it gave none."""
    problems, undecided = ledger.judge(), []
    left = _lost(ledger, confirmed)
    if status is not None and is_empty(status, group=False):
        if left:
            problems.append(f"{count(left)} tasks were confirmed and are neither acked nor there: {ranges_text('lost', left)}")
        problems += count_violations(status, len(confirmed), handed_over)
    elif status is None:
        undecided.append("the work queue gave no answer after everything was healed")
    else:
        undecided.append(f"the work queue was not empty in time: {status}")
    if not len(confirmed):
        undecided.append("no put was confirmed")
    counts = {
        "put": handed_over,
        "confirmed": len(confirmed),
        "acked": ledger.acked_count(),
        "acks without an answer": len(ledger.doubted()),
        "leases": ledger.leases,
        "leased again": ledger.again,
        "leases lost": ledger.lost,
        "lost": count(left) if status is not None and is_empty(status, group=False) else 0,
        "invented": ledger.invented,
    }
    return decide(LoadKind.TASKS, counts, problems, undecided)


def _lost(ledger: LeaseLedger, confirmed: Numbers) -> list[tuple[int, int]]:
    """Confirmed, and nobody may have acked them."""
    return [part for first, last in confirmed.ranges() for part in ledger.undone(0, first, last)]

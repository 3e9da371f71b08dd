"""All loads of a run: brought up together, ended together, and the verdict on each."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

from roq.errors import CallError
from roq.runtime.installation import install
from roq.testing import TestedCluster
from roq.tools.chaos.load import PubSubLoad
from roq.tools.chaos.loads import ChaosLoad, JudgedLoad, LoadContext
from roq.tools.chaos.recorded_load import GROUP, RECORDED, RecordedLoad
from roq.tools.chaos.result import ChaosOptions
from roq.tools.chaos.schedule import LoadKind
from roq.tools.chaos.task_load import WORK_QUEUE, WorkQueueLoad
from roq.tools.chaos.verdict import LoadVerdict, Verdict, judge, together

QUEUE, SECOND = "chaos", "second"  # a soak has both
EXCHANGES, REPLICATION = 2, 2
DRAIN_SECONDS = 90.0
FLUSH_LAST_SECONDS = 30.0
SHUFFLE_MODULE = "roq.tools.chaos.shuffle_load"


def check_extras(options: ChaosOptions) -> None:
    """Raises CallError if a load needs what is not installed."""
    if LoadKind.SHUFFLE in options.loads:
        try:
            importlib.import_module(SHUFFLE_MODULE)
        except ImportError:
            raise CallError(f"the load shuffle needs pyarrow: {install('shuffle')}") from None


class LoadSet:
    """`async with LoadSet(cluster, context, options) as loads`: flows from then on until `end()`; then the verdicts."""

    def __init__(self, cluster: TestedCluster, context: LoadContext, options: ChaosOptions) -> None:
        self._cluster, self._context, self._options = cluster, context, options
        self.queues = [QUEUE, SECOND] if options.soak else [QUEUE] * (LoadKind.PUBSUB in options.loads)
        self.pubsub: list[PubSubLoad] = []
        self._judged: list[JudgedLoad] = []
        self._open = AsyncExitStack()

    @property
    def all(self) -> list[ChaosLoad]:
        """Every one."""
        return [*self.pubsub, *self._judged]

    async def __aenter__(self) -> LoadSet:
        try:
            for judged in self._wanted():
                self._judged.append(await self._open.enter_async_context(judged))
            for at, queue in enumerate(self.queues):
                await self._make_queue(queue, at)
                options = self._options
                counts = {"publishers": options.publishers, "subscribers": options.subscribers, "size": options.size}
                load = PubSubLoad(self._context.client, self._context.history, queue, rate=options.rate, **counts)
                self.pubsub.append(await self._open.enter_async_context(load))
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self._open.aclose()

    def _wanted(self) -> list[JudgedLoad]:
        found: list[JudgedLoad] = []
        if LoadKind.TASKS in self._options.loads:
            found.append(WorkQueueLoad(self._context))
        if LoadKind.GROUPS in self._options.loads:
            found.append(RecordedLoad(self._context))
        if LoadKind.SHUFFLE in self._options.loads:
            found.append(importlib.import_module(SHUFFLE_MODULE).ShuffleLoad(self._context))
        return found

    async def _make_queue(self, queue: str, first: int) -> None:
        """A queue whose processes begin on the host with this number, from 0."""
        client, cluster = self._context.client, self._cluster
        hosts = [*cluster.hosts[first:], *cluster.hosts[:first]]
        await client.create_queue(queue, replication=min(REPLICATION, len(hosts)), overflow="block", host=hosts[0])
        for number in range(1, EXCHANGES):
            await client.create_exchange(queue, host=hosts[number % len(hosts)])
        await cluster.wait_queue_ready(queue, exchanges=EXCHANGES)

    async def serve(self, timeout_seconds: float) -> None:
        """Wait until everything that the loads use serves, and every client is ready. Raises RoqError."""
        groups = LoadKind.GROUPS in self._options.loads
        for queue in [*self.queues, *[RECORDED] * groups]:
            await self._cluster.wait_queue_ready(queue, timeout_seconds=timeout_seconds)
        work_queues = [*[WORK_QUEUE] * (LoadKind.TASKS in self._options.loads), *[f"{RECORDED}@{GROUP}"] * groups]
        for name in work_queues:
            await self._cluster.wait_for(partial(self._served, name), f"{name} has its masters", timeout_seconds)

        async def is_ready() -> bool:
            return not self.unhealthy()

        await self._cluster.wait_for(is_ready, "every client is ready", timeout_seconds)

    async def _served(self, work_queue: str) -> bool:
        info = await self._context.client.work_queue(work_queue)
        return info.ready and len(info.masters) == 1 + info.record.standbys

    def unhealthy(self) -> list[str]:
        """Clients that are not ready now."""
        return [text for load in self.all for text in load.unhealthy()]

    async def end(self) -> None:
        """No more work; what there is is done, as far as the time goes, and the workers end."""
        await asyncio.gather(*(load.stop(FLUSH_LAST_SECONDS) for load in self.all))
        await asyncio.gather(*(load.drain(DRAIN_SECONDS) for load in self.all))
        await self._context.pool.stop()

    def pubsub_verdict(self) -> Verdict:
        """On publish/subscribe, all queues together."""
        return together([judge(load.sent(), load.heard) for load in self.pubsub])

    def verdicts(self) -> list[LoadVerdict]:
        """On all others."""
        return [load.verdict() for load in self._judged]

    def failures(self) -> list[str]:
        """What clients and workers met that they should not have."""
        return [*(text for load in self.all for text in load.failures), *self._context.pool.failures]

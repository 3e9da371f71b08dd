"""What goes on beside load and nemesis: the resource watch, the witness and the administration; at the end, what they found."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType

from roq.client.cluster import Cluster
from roq.errors import RoqError
from roq.testing import TestedCluster
from roq.tools.chaos import invariants
from roq.tools.chaos.administration import Administration
from roq.tools.chaos.watch import ResourceWatch
from roq.tools.chaos.witness import Witness


class Beside:
    """`async with Beside(cluster, started, every) as beside`: goes on until `stop()`; then `violations`.

    started: monotonic seconds; every: seconds between two rounds of administration.
    """

    def __init__(self, cluster: TestedCluster, started: float, every_seconds: float) -> None:
        self._cluster, self._started, self._every = cluster, started, every_seconds
        self.watch = ResourceWatch(cluster)
        self.administration = Administration(cluster.zookeeper)
        self._witness = Witness(cluster.zookeeper)
        self._tasks: list[asyncio.Task[None]] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Beside:
        await self._open.enter_async_context(self._witness)
        self._open.callback(self.administration.close)
        works = (self.watch.run(self._started), self._witness.run(), self.administration.run(self._every))
        self._tasks = [asyncio.create_task(work) for work in works]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._open.aclose()

    async def stop(self) -> None:
        """End the three. What one of them failed with is raised here."""
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def violations(self, client: Cluster, within_seconds: float) -> list[str]:
        """Everything that is wrong: with the history, with administration, and with the quiet cluster when it had its time."""
        try:
            found = list(await self.administration.check())
        except RoqError as error:
            found = [*self.administration.violations, f"C5: {type(error).__name__}: {error}"]
        found += await self._unsettled(client, within_seconds)
        try:
            await self.administration.clear()
        except RoqError as error:
            found.append(f"C6: {type(error).__name__}: {error}")
        return found + invariants.history_violations(self._witness.seen)

    async def _unsettled(self, client: Cluster, within_seconds: float) -> list[str]:
        found: list[str] = []

        async def right() -> bool:
            view = await client.view()
            processes = {host: await self._cluster.processes(host) for host in self._cluster.hosts}
            now, transactions = await self._witness.look(), await self._witness.transactions()
            found[:] = [*invariants.violations(view, processes), *invariants.unsettled(now, transactions)]
            return not found

        try:
            await self._cluster.wait_for(right, "the invariants hold", within_seconds)
        except RoqError as error:
            return found or [str(error)]
        return []

"""The cluster looked at again and again with bounded work, however many queues there are: what `roq top` shows.

A look asks the leading GCM once for the whole cluster, and at most ASKED_PER_LOOK Monitors and masters: those of what is shown,
then the others in turn, so that each of 1,000 queues is asked every 16 looks or so. What was not asked is as it was told
last. `look_at_work` asks the masters of all work queues at once, for who shows them all. Not covered: one look at everything
else (overview.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

import msgspec

from roq.client.cluster import Cluster
from roq.client.events import in_turn
from roq.client.overview import (
    MASTER_SECONDS,
    MONITOR_SECONDS,
    HostRow,
    Overview,
    QueueRow,
    WorkQueueRates,
    host_rows,
    queue_row,
    read_overview,
    with_counts,
)
from roq.client.shard_answers import status_of
from roq.errors import RoqError
from roq.runtime.rpc import RpcPool
from roq.wire import master, monitor
from roq.wire.gcm import ClusterView, QueueInfo, WorkQueueInfo
from roq.wire.monitor import QueueView
from roq.wire.task import Status

ASKED_PER_LOOK = 128
ASKED_AT_ONCE = 32
WORK_SECONDS = 3 * MASTER_SECONDS  # for the masters of all work queues: of those that hang the rest is not asked
NOT_YET = "not asked yet"


class RollingOverview:
    """Made on a running loop, closed by `close`. clock: seconds, for rates."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster, self._clock = cluster, clock
        self._monitors, self._masters = RpcPool(monitor.Reply, MONITOR_SECONDS), RpcPool(master.Reply, MASTER_SECONDS)
        self._gate = asyncio.Semaphore(ASKED_AT_ONCE)
        self._looks = 0
        self._answers: dict[str, QueueView | str] = {}
        self._rows: dict[str, tuple[float, WorkQueueRates]] = {}
        self.view: ClusterView | None = None
        self.asked = 0  # in the last look

    async def look(self, shown: Collection[str] = (), *, work: bool = False) -> None:
        """Once more. shown: names whose rows people see; work: they are work queues. Raises RoqError: no GCM answers."""
        view = self.view = await self._cluster.view()
        known = {info.record.name: info for info in view.queues}
        work_known = {info.record.name: info for info in view.work_queues}
        self._answers = {name: answer for name, answer in self._answers.items() if name in known}
        self._rows = {name: row for name, row in self._rows.items() if name in work_known}
        for_queues = ASKED_PER_LOOK // 4 if work else ASKED_PER_LOOK * 3 // 4
        queues = in_turn(list(known), () if work else shown, self._looks, for_queues)
        works = in_turn(list(work_known), shown if work else (), self._looks, ASKED_PER_LOOK - for_queues)
        self._looks, self.asked = self._looks + 1, len(queues) + len(works)
        await asyncio.gather(
            *(self._ask_monitor(known[name]) for name in queues), *(self._ask_master(work_known[name]) for name in works)
        )

    async def look_at_work(self) -> None:
        """Every work queue, and no Monitor. Raises RoqError: no GCM answers."""
        view = self.view = await self._cluster.view()
        names = {info.record.name for info in view.work_queues}
        self._rows = {name: row for name, row in self._rows.items() if name in names}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORK_SECONDS):
                await asyncio.gather(*map(self._ask_master, view.work_queues))

    async def _ask_monitor(self, info: QueueInfo) -> None:
        self._answers[info.record.name] = await self._answer(info)

    async def _answer(self, info: QueueInfo) -> QueueView | str:
        if not info.record.running:
            return ""
        if not info.monitors:
            return "no Monitor serves"
        async with self._gate:
            try:
                return await self._monitors.request(info.monitors[0].clients_endpoint(), monitor.Describe(), QueueView)
            except RoqError as error:
                return str(error)

    async def _ask_master(self, info: WorkQueueInfo) -> None:
        name, source = info.record.name, info.record.spec.source
        at, row = self._rows.get(name, (0.0, WorkQueueRates(name, "", False, "")))
        row = msgspec.structs.replace(
            row, queue=source.queue if source else "", ready=info.ready, master=info.record.master_host, problem=""
        )
        if not info.masters or not info.masters[0].active:
            self._rows[name] = at, msgspec.structs.replace(row, problem="no master serves", completed_per_second=0.0)
            return
        async with self._gate:
            try:
                status = await status_of(self._masters, info)
            except RoqError as error:
                self._rows[name] = at, msgspec.structs.replace(row, problem=str(error), completed_per_second=0.0)
                return
        now = self._clock()
        self._rows[name] = now, counted_row(row, status, now - at if at else 0.0)

    def queues(self) -> list[QueueRow]:
        """All of them, by name."""
        infos = self.view.queues if self.view is not None else ()
        return [queue_row(info, self._answers.get(info.record.name, NOT_YET)) for info in infos]

    def work_queues(self) -> list[WorkQueueRates]:
        """All of them, by name."""
        infos = self.view.work_queues if self.view is not None else ()
        unknown = (0.0, WorkQueueRates("", "", False, "", problem=NOT_YET))
        return [msgspec.structs.replace(self._rows.get(info.record.name, unknown)[1], name=info.record.name) for info in infos]

    def hosts(self) -> list[HostRow]:
        """All of them, by name."""
        return list(host_rows(self.view.hosts)) if self.view is not None else []

    def close(self) -> None:
        """No more looks."""
        self._monitors.close()
        self._masters.close()


async def read_cluster(cluster: Cluster, rolling: RollingOverview) -> Overview:
    """Everything, work queues and groups with it. rolling: where they are remembered, for their rates."""
    overview, _ = await asyncio.gather(read_overview(cluster), rolling.look_at_work())
    return msgspec.structs.replace(overview, work_queues=tuple(rolling.work_queues()))


def counted_row(row: WorkQueueRates, status: Status, seconds: float) -> WorkQueueRates:
    """seconds: since it was counted last, 0.0: never. Pure."""
    done = status.completed - row.completed
    per_second = max(0, done) / seconds if seconds else 0.0
    return msgspec.structs.replace(with_counts(row, status), completed_per_second=per_second)

"""How a queue's groups are doing, for policies with rules for them: their masters are asked, every few seconds.

It never holds up the scaling: what is known stands in `newest`, and of a group whose master is silent only that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from roq.coordination.locate import GcmClient
from roq.errors import RoqError
from roq.ids import GROUP_MARK
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.wire import gcm, master
from roq.wire.kpi import GroupKpi
from roq.wire.task import Status

log = logger(__name__)
ASK_SECONDS = 5.0  # lags that matter last longer
GCM_SECONDS, MASTER_SECONDS = 5.0, 3.0
OLD_SECONDS = 20.0  # a master that is being replaced is silent for less


class GroupWatch:
    """Of one queue; off until it is switched on. `run` it beside the scaling."""

    def __init__(self, queue: str, connect: Callable[[], GcmClient], clock: Callable[[], float] = time.monotonic) -> None:
        self._queue, self._connect, self._clock = queue, connect, clock
        self._wanted = asyncio.Event()
        self._found: dict[str, tuple[GroupKpi, float]] = {}  # and when: told, or first seen
        self._failing: set[str] = set()  # groups whose masters don't answer; "": nor does the GCM

    def switch(self, on: bool) -> None:
        """Ask from now on, or no more."""
        if on:
            self._wanted.set()
        else:
            self._wanted.clear()
            self._found.clear()

    def newest(self) -> tuple[GroupKpi, ...]:
        """What is known, by name."""
        ages = ((name, kpi, self._clock() - at) for name, (kpi, at) in sorted(self._found.items()))
        return tuple(kpi if age <= OLD_SECONDS else GroupKpi(name, -1, silent_seconds=age) for name, kpi, age in ages)

    def note(self, names: Collection[str], told: Iterable[GroupKpi]) -> None:
        """These groups there are, and this was told of some."""
        now = self._clock()
        known = {name: self._found.get(name, (GroupKpi(name, -1), now)) for name in names}
        self._found = known | {kpi.name: (kpi, now) for kpi in told}

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._wanted.wait()
            try:
                await self._watch()
                continue
            except RoqError as error:
                self._tell("groups can't be looked up", "", error)
            except Exception:  # a defect here must not end the scaling
                log.exception("defect in watching groups; retrying", extra={"fields": {"queue": self._queue}})
            await asyncio.sleep(ASK_SECONDS)

    async def _watch(self) -> None:
        """Ask as long as it is wanted. Raises what stands in the way of asking at all."""
        client, masters = self._connect(), RpcPool(master.Reply, MASTER_SECONDS)
        try:
            while self._wanted.is_set():
                await self._ask(client, masters)
                await asyncio.sleep(ASK_SECONDS)
        finally:
            masters.close()
            client.close()

    async def _ask(self, client: GcmClient, masters: RpcPool) -> None:
        """Every group once. One whose master does not answer stays as it was known."""
        listed = await client.request(gcm.ListGroups(self._queue), gcm.WorkQueues, GCM_SECONDS)
        self._failing.discard("")
        infos = {info.record.name.removeprefix(self._queue + GROUP_MARK): info for info in listed.work_queues}
        told = await asyncio.gather(*(self._told(name, info, masters) for name, info in infos.items()))
        if self._wanted.is_set():
            self.note(infos.keys(), [kpi for kpi in told if kpi is not None])

    async def _told(self, name: str, info: gcm.WorkQueueInfo, masters: RpcPool) -> GroupKpi | None:
        """What its master says; None if it says nothing."""
        endpoint = next((one.endpoint() for one in info.masters if one.active), None)
        if endpoint is None:
            return None
        try:
            status = await masters.request(endpoint, master.GetStatus(), Status)
        except RoqError as error:
            self._tell("a group's master does not answer", name, error)
            return None
        self._failing.discard(name)
        return kpi_of(name, status)

    def _tell(self, what: str, group: str, error: RoqError) -> None:
        """Once, until it works again."""
        if group not in self._failing:
            self._failing.add(group)
            fields = {"queue": self._queue, "group": group, "error": type(error).__name__, "reason": str(error)}
            log.warning("%s; retrying", what, extra={"fields": fields})


def kpi_of(name: str, status: Status) -> GroupKpi:
    """A group as its master told."""
    seconds = (-1.0 if each is None else each for each in (status.behind_seconds, status.oldest_seconds))
    return GroupKpi(name, status.ready + status.delayed, status.lag, *seconds)

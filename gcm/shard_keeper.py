"""What a leader does in one term about shards: asks the masters of those that are closing whether anything is left, removes
those that are empty, and completes what a leader before left half written. Nothing is remembered: all of it stands in the
record of their queue, so the next leader goes on. What is written is decided in shards.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial

from gcm import shards
from gcm.background import NextLook
from gcm.cluster import ClusterState, work_queue_info
from gcm.crash import crash_point
from gcm.term import LeaderTerm
from roq.errors import NotLeader, RoqError, TemporaryError
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.wire import master
from roq.wire.assignment import work_subject
from roq.wire.shards import ClosingShard, shard_name
from roq.wire.work_queue import WorkQueueRecord

ASK_SECONDS = 5.0  # a master, what is left
LOOK_SECONDS = 2.0  # between two looks while shards are closing
LOOK_PART, LOOK_MAX_SECONDS = 1 / 30, 60.0  # of the time that one is closing for, until it is asked again; at most so long
ASKED_AT_ONCE = 32
log = logger(__name__)


def pause(closing_seconds: float) -> float:
    """From one question to the next of what is left in a shard that is closing for so long: each is an entry of its log, and a
    dead letter in it may be left for weeks."""
    return min(max(LOOK_SECONDS, closing_seconds * LOOK_PART), LOOK_MAX_SECONDS)


class ShardKeeper:
    """Made once per term; ends with it. kept_seconds: from the closing on, before which no shard is removed."""

    def __init__(self, term: LeaderTerm, kept_seconds: float, clock: Callable[[], float] = time.time) -> None:
        self._term, self._kept_seconds, self._clock = term, kept_seconds, clock
        self._masters = RpcPool(master.Reply, ASK_SECONDS)
        self._gate = asyncio.Semaphore(ASKED_AT_ONCE)
        self._next, self._chance = NextLook(), random.Random()
        self._asked: dict[str, float] = {}  # by log of a closing shard, when
        term.view.on_change.append(self._changed)

    def start(self) -> None:
        """Look now, and from now on."""
        self._next.within(0)
        self._term.tasks.start(self._run(), "closing shards")

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        if before.work_queues is not after.work_queues:
            self._next.within(LOOK_SECONDS)

    async def _run(self) -> None:
        try:
            while True:
                await self._next.due()
                await self._complete()
                found = shards.closing(self._term.view.cluster)
                await asyncio.gather(*(self._look(record, one) for record, one in found))
                if not found:
                    self._asked.clear()
                if shards.closing(self._term.view.cluster):
                    self._next.within(LOOK_SECONDS)
        except NotLeader:
            return  # the next leader goes on
        finally:
            self._next.close()
            self._masters.close()

    async def _complete(self) -> None:
        for name in shards.lacking(self._term.view.cluster):
            await self._change(partial(self._completed, name), name)

    async def _change(self, decide: Callable[[ClusterState], ClusterState], *names: str) -> bool:
        """Whether it was written; if not, it is tried again soon. Raises NotLeader."""
        try:
            await self._term.change(decide, *map(work_subject, names))
        except TemporaryError as error:
            if isinstance(error, NotLeader):
                raise
            log.warning("the shards of %s can't be changed yet: %s", names[0], error)
            self._next.within(LOOK_SECONDS)
            return False
        return True

    def _completed(self, name: str, cluster: ClusterState) -> ClusterState:
        return shards.completed(cluster, name, self._clock(), self._chance)

    async def _look(self, record: WorkQueueRecord, one: ClosingShard) -> None:
        """Remove it if it is empty. Its master says so only when it takes nothing more."""
        cluster, name = self._term.view.cluster, shard_name(record.name, one.number)
        shard = cluster.work_queues.get(name)
        now = self._clock()
        if shard is None or now < one.since + self._kept_seconds:
            return
        if 0 <= now - self._asked.get(shard.spec.log, 0.0) < pause(now - one.since):
            return
        info = work_queue_info(cluster, shard)
        endpoint = next((address.endpoint() for address in info.masters if address.active), None)
        if endpoint is None:
            return
        self._asked[shard.spec.log] = now
        async with self._gate:
            try:
                left = (await self._masters.request(endpoint, master.CountLeft(), master.Counted)).count
            except RoqError as error:
                log.info("the master of %s does not say what is left: %s", name, error)
                return
        if left:
            return
        crash_point("remove_shard.emptied")
        log_id, at = shard.spec.log, self._clock()
        if not await self._change(
            lambda found: shards.without_shard(found, record.name, log_id, one.number, at), record.name, name
        ):
            self._asked.pop(log_id, None)
            return
        crash_point("remove_shard.recorded")
        log.info("an empty shard was removed", extra={"fields": {"work_queue": record.name, "shard": one.number}})

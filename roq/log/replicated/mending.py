"""When the open segment is closed before its time because some node of it misses entries, which only a closed one gets copied.

Only if the next one would have other nodes, or a node back that answers again: else a store that stays away would cost a
segment every few seconds. And ever more seldom: a store that takes nothing though it answers (its disk is full) would too.
"""

from __future__ import annotations

import asyncio

from roq.errors import RoqError
from roq.log.replicated.appending import Appending
from roq.log.replicated.health import Health
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import Stores
from roq.wire import store as wire

ANSWER_SECONDS = 1.0
PAUSE_MAX = 32  # times `mend_seconds`, between two segments


class SegmentRepair:
    """Of one writer's segments, one after the other."""

    def __init__(self, stores: Stores, settings: LogSettings) -> None:
        self._stores, self._mend_seconds = stores, settings.mend_seconds
        self._pause = settings.mend_seconds
        self._hosts: frozenset[str] = frozenset()

    async def due(self, appending: Appending, health: Health, write_quorum: int, now: float) -> bool:
        """Is it time, and would it help? `now`: monotonic seconds."""
        hosts = self._stores.directory.hosts()
        if hosts != self._hosts:
            self._hosts, self._pause = hosts, self._mend_seconds
        if not (health.entries or health.any_lost) or now - health.since <= self._pause:
            return False
        if health.whole(appending, min(write_quorum, len(hosts))):
            self._pause = self._mend_seconds
            return False
        sound, nodes = health.sound(appending), frozenset(appending.nodes)
        possible = sound | await self._answering(hosts - sound)
        if len(possible) < appending.ack_quorum or (possible <= sound == nodes and not health.any_lost):
            health.since = now
            return False
        self._pause = min(2 * self._pause, PAUSE_MAX * self._mend_seconds)
        return True

    async def _answering(self, hosts: frozenset[str]) -> frozenset[str]:
        """Those whose store does."""

        async def ask(host: str) -> bool:
            try:
                await self._stores.request(host, wire.DescribeStore(), wire.StoreView, ANSWER_SECONDS)
            except RoqError:
                return False
            return True

        named = sorted(hosts)
        answers = await asyncio.gather(*map(ask, named))
        return frozenset(host for host, answered in zip(named, answers, strict=True) if answered)

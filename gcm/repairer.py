"""The task of one reign that keeps queues whole: it looks whenever a host is lost or joins, and when room may have appeared.

A lost host is recorded as `transactions/host/<host>` before anything is done about it, and forgotten when nothing is left to
do: the next leader finds both the record and what is still missing. What is to be done is decided in recovery.py.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable

from gcm import recovery
from gcm.cluster import ClusterState
from gcm.crash import crash_point
from gcm.reconcile import lacking_stores
from gcm.reign import Reign
from roq.errors import NotLeader
from roq.runtime.observe import logger
from roq.wire.assignment import STORES

log = logger(__name__)

QUEUES_AT_ONCE = 256  # asked for at the same time; the reign writes as many of them together as fit
LOOK_SECONDS = 1.0  # between two looks for what nobody is waiting for: a slot that was freed, a backup that was given up


class HostRepairer:
    """Made once per reign; ends with it."""

    def __init__(self, reign: Reign) -> None:
        self._reign = reign
        self._chance = random.Random()
        self._work = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        reign.on_change.append(self._changed)

    def start(self) -> None:
        """Look now, and from now on."""
        self._work.set()
        self._reign.tasks.start(self._run(), "repairer")

    def _changed(self, before: ClusterState, after: ClusterState) -> None:
        changed = [(before.host(name), host) for name, host in after.hosts.items() if before.hosts.get(name) is not host]
        if any((old.alive, old.draining) != (new.alive, new.draining) for old, new in changed):
            self._work.set()
        elif self._later is None and (
            changed or before.queues is not after.queues or before.work_queues is not after.work_queues
        ):
            self._later = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._later = None
        self._work.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                await self._once()
        except NotLeader:
            return  # the next leader goes on
        finally:
            if self._later is not None:
                self._later.cancel()

    async def _once(self) -> None:
        reign = self._reign
        lost = recovery.lost_hosts(reign.cluster)
        if fresh := sorted(lost.keys() - reign.cluster.recoveries.keys()):
            crash_point("recover_host.seen")
            await reign.change(lambda cluster: recovery.begin(cluster, fresh, time.time()))
            crash_point("recover_host.recorded")
        started = time.monotonic()
        if lost:
            await self._each(recovery.fail_over, dict.fromkeys(subject for subjects in lost.values() for subject in subjects))
            crash_point("recover_host.activated")
        if lacking_stores(reign.cluster):
            await reign.change(lambda cluster: cluster, STORES)
        await self._each(recovery.repair, recovery.lacking(reign.cluster))
        if lost:
            crash_point("recover_host.repaired")
        if done := recovery.finished(reign.cluster):
            await reign.change(lambda cluster: recovery.end(cluster, done))
            crash_point("recover_host.forgotten")
        if fresh:
            left = {name: len(queues) for name, queues in recovery.lost_hosts(reign.cluster).items()}
            fields = {"hosts": fresh, "seconds": round(time.monotonic() - started, 3), "queues_left": left}
            log.warning("queues of lost hosts were recovered", extra={"fields": fields})

    async def _change(self, step: recovery.Step, subject: str) -> None:
        await self._reign.change(lambda cluster: step(cluster, subject, self._chance), subject)

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
                    log.error("queue could not be recovered", extra={"fields": {"queue": queue, "reason": str(outcome)}})

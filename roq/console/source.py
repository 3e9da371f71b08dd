"""The cluster as the console reads it: one connection, what several ask for at once read once, and whether it is there.

    view       the leader's view of the whole cluster, at most KEPT_SECONDS old
    live       that with every Monitor asked, read again and again while somebody looks (PAUSE_SHARE: large clusters less often)
    outage     since when the cluster can't be reached; meanwhile requests fail at once, but one in RECHECK_SECONDS, which looks

Not covered: what is made of it (summary.py), who is told (hub.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec

from roq.cli.doctor_cluster import check_cluster
from roq.cli.finding import Finding
from roq.client.cluster import Cluster, connect
from roq.client.overview import MASTER_SECONDS, Overview, read_overview
from roq.console.stores import StoreRow, read_stores
from roq.coordination.locate import GcmClient
from roq.coordination.parts import read_cluster
from roq.errors import AccessDenied, DeadlineExceeded, RoqError, TemporaryError, Unavailable
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.runtime.security import Security, process_security
from roq.wire import gcm, master
from roq.wire.access import AccessInfo, GetAccess

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
KEPT_SECONDS = 1.0
DOCTOR_SECONDS = 10.0  # a look at everything is given to all who ask within this time
ACCESS_SECONDS = 3.0  # the same of the list of revoked cards
READ_SECONDS = 6.0  # a change of leader is over by then; people wait no longer
CHANGE_SECONDS = 20.0  # the cluster answers when it is so
RECHECK_SECONDS = 1.0
PAUSE_SHARE = 4.0  # so much longer than a look took is the pause after it, and a second at least
log = logger(__name__)


class SharedRead(Generic[T]):
    """What takes time to read: once for all who ask while it is read, or within `seconds` after. A failure is told to those who
    waited, and to nobody else."""

    def __init__(self, read: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._task: asyncio.Task[T] | None = None
        self._ended = 0.0
        self._dropped = False

    async def get(self) -> T:
        """Now, or not long ago."""
        task = self._task
        if task is None or self._dropped or (task.done() and self._old(task)):
            self._dropped = False
            task = self._task = asyncio.create_task(self._once())
            task.add_done_callback(self._failed)  # all who waited may have gone
        return await asyncio.shield(task)

    def drop(self) -> None:
        """What was read, or is being read, is too old for who asks from now on."""
        self._dropped = True

    def _old(self, task: asyncio.Task[T]) -> bool:
        return self._failed(task) or time.monotonic() - self._ended > self._seconds

    @staticmethod
    def _failed(task: asyncio.Task[T]) -> bool:
        return task.cancelled() or task.exception() is not None

    async def _once(self) -> T:
        found = await self._read()
        self._ended = time.monotonic()
        return found

    async def close(self) -> None:
        """Nobody waits any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class ClusterOutage(msgspec.Struct, frozen=True):
    """since: Unix seconds. error: its class."""

    since: float
    error: str
    detail: str


class ConsoleSource:
    """Of one console. `changed` is set whenever `live` or `outage` are others than before."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.cluster: Cluster = connect(address)
        self.leader = GcmClient(address)
        self.masters = RpcPool(master.Reply, MASTER_SECONDS)
        self.live: Overview | None = None
        self.outage: ClusterOutage | None = None
        self.changed = asyncio.Event()
        self._error: RoqError = Unavailable()
        self._looked = 0.0
        self._view = SharedRead(self._read_view, KEPT_SECONDS)
        self._stores = SharedRead(self._read_stores, KEPT_SECONDS)
        self._doctor = SharedRead(lambda: check_cluster(self.address), DOCTOR_SECONDS)
        self._access = SharedRead(self._read_access, ACCESS_SECONDS)

    @property
    def security(self) -> Security | None:
        """The console's own card; None: the cluster has no security, as far as we are told."""
        return process_security()

    def has_changed(self) -> None:
        """By us, or as an event tells: the next view shows it."""
        self._view.drop()
        self._stores.drop()

    async def view(self) -> gcm.ClusterView:
        """Raises Unavailable and what the leader raised."""
        return await self.read(self._view.get())

    async def stores(self) -> tuple[StoreRow, ...]:
        """As each says of itself. Raises as `view`."""
        return await self._stores.get()

    async def findings(self) -> list[Finding]:
        """As `roq doctor` has them of the cluster. It tells what can't be reached, too."""
        return await self._doctor.get()

    async def ask(self, request: msgspec.Struct, expect: type[S]) -> S:
        """The leading GCM. Raises as `read`."""
        return await self.read(self.leader.request(request, expect, READ_SECONDS))

    async def read(self, work: Coroutine[Any, Any, T], seconds: float = READ_SECONDS) -> T:
        """What `work` gives. Raises Unavailable at once where the cluster is known to be away, or what `work` raises."""
        now = time.monotonic()
        if self.outage is not None and now - self._looked < RECHECK_SECONDS:
            work.close()
            raise self._error
        self._looked = now
        try:
            async with asyncio.timeout(seconds):
                found = await work
        except TimeoutError:
            error = Unavailable(f"the cluster at {self.address} did not answer within {seconds:.0f} s")
            self._away(error)
            raise error from None
        except (Unavailable, DeadlineExceeded) as error:
            self._away(error)
            raise
        if self.outage is not None:
            log.warning("cluster reachable again", extra={"fields": {"cluster": self.address}})
            self.outage = None
            self.changed.set()
        return found

    async def change(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, which may take longer than a look. Raises DeadlineExceeded, and what `work` raises."""
        try:
            async with asyncio.timeout(CHANGE_SECONDS):
                return await work
        except TimeoutError:
            told = f"the cluster did not answer within {CHANGE_SECONDS:.0f} s: whether it was done is unknown"
            raise DeadlineExceeded(told) from None

    def _away(self, error: RoqError) -> None:
        self._looked = time.monotonic()
        self._error = error if isinstance(error, Unavailable) else Unavailable(f"no GCM answers: {error}")
        if self.outage is None:
            log.warning("the cluster can't be reached", extra={"fields": {"reason": str(error)}})
            self.outage = ClusterOutage(time.time(), type(error).__name__, str(error))
            self.changed.set()

    async def _read_view(self) -> gcm.ClusterView:
        return await read_cluster(self.leader, READ_SECONDS)

    async def _read_stores(self) -> tuple[StoreRow, ...]:
        return await read_stores((await self.view()).hosts)

    async def take_access(self) -> None:
        """Which cards are revoked is known, or was not long ago. While the cluster is away, what was known counts."""
        if self.security is not None and self.outage is None:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self._access.get()
            except (RoqError, TimeoutError) as error:  # asked again by whoever comes next
                level = logging.INFO if isinstance(error, TemporaryError | TimeoutError) else logging.WARNING
                log.log(level, "the access list was not read", extra={"fields": {"reason": str(error)}})

    async def _read_access(self) -> None:
        found = await self.leader.request(GetAccess(), AccessInfo, READ_SECONDS)
        if self.security is not None and found.signed:
            try:
                self.security.take(found.signed)
            except AccessDenied as error:
                log.error("the access list is of no use", extra={"fields": {"reason": str(error)}})

    async def beat(self) -> None:
        """For ever: look whether it is there, and what the leader says of it."""
        while True:
            begun, took = time.monotonic(), 0.0
            with contextlib.suppress(RoqError):  # `outage` says it
                await self.view()
                took = time.monotonic() - begun
            self.changed.set()
            await asyncio.sleep(max(KEPT_SECONDS, PAUSE_SHARE * took))

    async def watch(self) -> None:
        """For ever: keep `live` up to date."""
        while True:
            begun, took = time.monotonic(), 0.0
            if self.outage is None:
                try:
                    self.live = await read_overview(self.cluster, await self.view())
                    self.changed.set()
                    took = time.monotonic() - begun
                except RoqError as error:
                    log.info("no overview was read", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(max(KEPT_SECONDS, PAUSE_SHARE * took))

    async def close(self) -> None:
        """Let go."""
        for shared in (self._stores, self._view, self._doctor, self._access):
            await shared.close()
        self.masters.close()
        self.leader.close()
        await self.cluster.close()

"""Big payloads: the shell of their registry. What that instructs is done here, and what came of it is told to it.

Not here: what is decided (registry.py), how a client stores and fetches a payload (big_payloads.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from roq.errors import LogUnavailable, RoqError, StorageFull, TemporaryError
from roq.ids import new_token
from roq.log.replicated.repair import Copy, Holding
from roq.log.replicated.repairer import Copier
from roq.log.replicated.stores import Stores
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.wire import master as wire
from roq.wire import store as store_wire
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.master import registry
from roq.workqueue.master.registry import BlobRegistry, RegistryPace
from roq.workqueue.master.service import MasterService
from roq.workqueue.records import BlobRef

COPY_SECONDS = 10.0  # a store that says nothing for so long is as good as dead …
COPY_BYTES_PER_SECOND = 10 * 1024 * 1024  # … and a large copy may take longer
log = logger(__name__)


class BlobStores:
    """All blobs of one term. turn(): look at the service; barrier(): until all that was applied is durable; now(): ms. token: a
    name that no other term ever has; drawn if none is given."""

    def __init__(
        self,
        spec: WorkQueueSpec,
        stores: Stores,
        service: MasterService,
        turn: Callable[[], None],
        barrier: Callable[[], Awaitable[None]],
        now: Callable[[], int],
        counters: Counters,
        pace: RegistryPace,
        token: str | None = None,
    ) -> None:
        self._stores, self._service, self._pace = stores, service, pace
        self._turn, self._barrier, self._ms, self._counters = turn, barrier, now, counters
        self._loop = asyncio.get_running_loop()
        directory, token = stores.directory, token or new_token()
        self.registry = BlobRegistry(spec, directory, service, counters, pace, token, self._loop.time())
        self.places = self.registry.places
        self._copier = Copier(self._fetch, pace.copies_at_once)
        self._first_copier = Copier(self._fetch, pace.first_copies_at_once)
        self._deletions = asyncio.Semaphore(pace.deletions_at_once)
        self._tasks = Tasks(lambda error: None)  # which logs the error; the registry is told, see _perform
        self._closed = False

    def start(self) -> None:
        """Watch over them until close(). Should that break, which is logged, it starts anew."""
        if not self._closed:
            self._tasks.start(self._watch(), "watch over blobs").add_done_callback(self._broke)

    def _broke(self, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled():
            self._counters["watches_broken"] += 1
            self._loop.call_later(self._pace.heartbeat_seconds, self.start)

    async def close(self) -> None:
        """Leave the rest to the next term."""
        self._closed = True
        await self._tasks.stop()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._pace.heartbeat_seconds)
            begun = self._handle(registry.WatchDue())
            await asyncio.gather(*(task for one, task in begun if isinstance(one, registry.AskStores)))

    # --- what happens ---------------------------------------------------------------------------------------------------

    def take(self, peer: bytes, id: int, request: wire.Reserve | wire.PayloadStored) -> None:
        """A request."""
        self._handle(registry.Asked(peer, id, request))

    def drop(self, blobs: Iterable[BlobRef]) -> None:
        """Their tasks are gone for good."""
        for blob in blobs:
            self._begin(self.registry.deletion(blob.blob, blob.holders))

    def _handle(self, event: registry.Event) -> list[tuple[registry.Instruction, asyncio.Task[None]]]:
        return [(one, self._begin(one)) for one in self.registry.handle(event, self._loop.time(), self._ms())]

    def _begin(self, instruction: registry.Instruction) -> asyncio.Task[None]:
        return self._tasks.start(self._perform(instruction), f"{type(instruction).__name__} {instruction[0]}")

    async def _perform(self, instruction: registry.Instruction) -> None:
        try:
            result = await self._do(instruction)
        except RoqError as error:
            log.info("%s failed: %s", type(instruction).__name__, error)
            result = error
        except Exception as error:
            self._handle(registry.Performed(instruction, TemporaryError(f"{type(error).__name__} in the master")))
            self._turn()
            raise
        self._handle(registry.Performed(instruction, result))
        self._turn()

    # --- what is done -----------------------------------------------------------------------------------------------------

    async def _do(self, instruction: registry.Instruction) -> Any:
        """What it says it brings."""
        match instruction:
            case registry.Verify(blob, host):
                head = await self._stores.request(host, store_wire.GetBlob(blob, 0, 0), store_wire.BlobPart)
                return head.total, head.crc
            case registry.MakeCopies(copy, first):
                return await (self._first_copier if first else self._copier).perform(copy)
            case registry.ListHeld(host):
                return await self._stores.inventory(host, self.registry.prefix)
            case registry.Confirm():
                await self._barrier()
            case registry.DeleteBlobs(blobs, hosts):
                for blob in blobs:
                    async with self._deletions:
                        self._counters["blobs_deleted"] += len(await self._stores.delete_blob(hosts, blob))
            case registry.AskStores(hosts):
                return dict(zip(hosts, await asyncio.gather(*map(self._life, hosts)), strict=True))
            case registry.Warn(text):
                log.warning(text)
        return None

    async def _life(self, host: str) -> tuple[str, str] | None:
        """Disk and life of the store that answers there."""
        if host not in self._stores.directory.hosts():
            return None
        seconds = self._pace.heartbeat_seconds
        try:
            view = await self._stores.request(host, store_wire.DescribeStore(), store_wire.StoreView, seconds)
        except RoqError:
            return None
        return view.disk, view.life

    async def _fetch(self, copy: Copy, source: str, target: str) -> None:
        """Have `target` fetch a payload from `source`."""
        if self.registry.health.dead(source):
            raise LogUnavailable(f"the store of host {source} does not answer")
        try:
            seconds = COPY_SECONDS + copy.holding.size / COPY_BYTES_PER_SECOND
            await self._stores.copy_blob(source, target, copy.holding.name, seconds)
        except StorageFull:
            self.registry.health.full(target)
            raise

    async def copies(self) -> list[wire.Shortage]:
        """Payloads that have not all of their copies now, those with the same number of them together; all stores are asked."""
        refs = [task.payload for task in self._service.fold.blobs.values() if isinstance(task.payload, BlobRef)]
        what = [Holding(ref.blob, ref.holders, size=ref.size) for ref in refs]
        found = await self._stores.compare(what, (), self._stores.directory.hosts())
        wanted, short = self.registry.spec.write_quorum, dict[int, list[Holding]]()
        for one in what:
            if (copies := len(found.good(one))) < wanted:
                short.setdefault(copies, []).append(one)
        return [
            wire.Shortage(
                f"{len(some)} payloads, {some[0].name} first",
                copies,
                wanted,
                tuple(sorted({host for one in some for host in one.nodes if host not in found.good(one)})),
            )
            for copies, some in sorted(short.items())
        ]

"""Big payloads (Blizzard): reserved, copied on the master's order, logged, then deleted when their task is gone.

    Reserve ─► pending(blob, store) ─► uploaded by the client ─► Stored ─► copied to n stores ─► in the log ─► answered
                    │ time-out                                     │ master gone
                    └─► deleted                                    └─► nobody knows it: an orphan, found by inventory

A blob belongs to a task from the log's Push on until the log says that the task is gone; only then it is deleted. A pending one
is not logged: its name is never used again, so whoever takes over may treat it as an orphan. Stores are asked for a heartbeat
and counted as dead after MISSED_BEATS; what they held is copied to others, and what they still hold when they come back is
removed. Nothing is deleted for being an orphan before the log has confirmed that we still own it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roq.errors import LogUnavailable, RoqError, StorageFull, TaskNotFound, TemporaryError
from roq.ids import new_token
from roq.log.replicated.health import StoreHealth, rank
from roq.log.replicated.repair import Copy, Holding, plan
from roq.log.replicated.repairer import Copier
from roq.log.replicated.stores import Stores
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.wire import master as wire
from roq.wire import store as store_wire
from roq.wire.task import StoreAddress
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.fold import StoredTask
from roq.workqueue.master.service import MasterService, check_stored
from roq.workqueue.records import BlobRef, Push, TaskKey

PENDING_MAX = 1_000
COPY_SECONDS = 10.0  # a store that says nothing for so long is as good as dead …
ROUNDS = 3  # of copies, until a put is given back to its client
COPY_BYTES_PER_SECOND = 10 * 1024 * 1024  # … and a large copy may take longer
log = logger(__name__)


@dataclass(frozen=True)
class RegistryPace:
    """When what is looked at. Tests take smaller numbers."""

    heartbeat_seconds: float = 3.0
    missed_beats: int = 3
    pending_seconds: float = 60.0  # from the reservation to the end of the upload
    inventory_seconds: float = 60.0
    orphan_seconds: float = 120.0  # a blob nobody knows is left alone for so long: its upload or copy may be under way
    copies_at_once: int = 8  # that make up for lost ones: they are not to slow down the rest
    first_copies_at_once: int = 64  # that somebody waits for
    deletions_at_once: int = 64


@dataclass(slots=True)
class _Pending:
    """An upload under way, or stored and being copied. waiting: who is to be answered."""

    host: str
    size: int
    crc: int
    deadline: float
    waiting: list[tuple[bytes, int]] = field(default_factory=list)


class BlobRegistry:
    """All blobs of one term. turn(): look at the service; barrier(): until all that was applied is durable; now(): ms."""

    def __init__(
        self,
        spec: WorkQueueSpec,
        stores: Stores,
        service: MasterService,
        turn: Callable[[], None],
        barrier: Callable[[], Awaitable[None]],
        now: Callable[[], int],
        counters: Counters,
        pace: RegistryPace = RegistryPace(),
        token: str | None = None,  # a name that no other term ever has; drawn if none is given
    ) -> None:
        self.spec, self._stores, self._service, self._pace = spec, stores, service, pace
        self._turn, self._barrier, self._now, self._counters = turn, barrier, now, counters
        self._loop = asyncio.get_running_loop()
        self._prefix = f"{spec.log}/"
        self._token = token or new_token()
        self._count = 0
        self._pending: dict[str, _Pending] = {}
        self._health = StoreHealth(stores.directory, self._loop.time, pace.missed_beats)
        self._copying: set[tuple[str, str]] = set()  # blob, target
        self._removing: set[tuple[str, str]] = set()  # blob, host: being deleted there as an orphan
        self._restoring: set[TaskKey] = set()
        self._counting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lives: dict[str, tuple[str, str]] = {}  # host -> (disk, life) of the store that answered last
        self._copier = Copier(self._fetch, pace.copies_at_once)
        self._first_copier = Copier(self._fetch, pace.first_copies_at_once)
        self._repairs = asyncio.Semaphore(pace.copies_at_once)
        self._deletions = asyncio.Semaphore(pace.deletions_at_once)
        self.repair_due = asyncio.Event()  # copies may lack
        self._tasks = Tasks(lambda error: None)  # which logs the error; who depends on it, see _keep_on and _complete
        self._closed = False

    def start(self) -> None:
        """Watch over them until close()."""
        self._keep_on(self._watch, "stores' heartbeats")
        self._keep_on(self._keep_copies, "copies of blobs")
        self._keep_on(self._look_for_orphans, "inventory")

    def _keep_on(self, watch: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run it for ever: should it break, which is logged, begin it again."""
        if not self._closed:
            self._tasks.start(watch(), name).add_done_callback(partial(self._broke, watch, name))

    def _broke(self, watch: Callable[[], Coroutine[Any, Any, None]], name: str, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled():
            self._counters["watches_broken"] += 1
            self._loop.call_later(self._pace.heartbeat_seconds, self._keep_on, watch, name)

    async def close(self) -> None:
        """Leave the rest to the next term."""
        self._closed = True
        await self._tasks.stop()

    def _wanted(self, live: int) -> int:
        """How many copies a blob has."""
        return max(self.spec.ack_quorum, min(self.spec.write_quorum, live))

    # --- put ----------------------------------------------------------------------------------------------------------

    def reserve(self, peer: bytes, id: int, request: wire.Reserve) -> None:
        """Name a store for a payload."""
        try:
            self._service.reserved(peer, id, self._reserve(request))
        except RoqError as error:
            self._service.refuse(peer, id, error)

    def _reserve(self, request: wire.Reserve) -> wire.Reserved:
        self._service.check_big(request.size)
        if len(self._pending) >= PENDING_MAX:
            raise TemporaryError("too many payloads are on their way: try again")
        self._count += 1
        blob = f"{self._prefix}{self._token}.{self._count}"
        roomy = self._health.roomy() or self._health.live()
        for host in rank(blob, [host for host in roomy if host not in request.avoid] or roomy):
            endpoint = self._stores.directory.endpoint(host)
            if endpoint is not None:
                deadline = self._loop.time() + self._pace.pending_seconds
                self._pending[blob] = _Pending(host, request.size, request.crc, deadline)
                return wire.Reserved(blob, StoreAddress(host, endpoint))
        raise LogUnavailable("no store answers")

    def stored(self, peer: bytes, id: int, request: wire.PayloadStored) -> None:
        """The client has stored it: have it copied, then logged, then answer."""
        try:
            check_stored(request)
        except RoqError as error:
            self._service.refuse(peer, id, error)
            return
        pending = self._pending.get(request.blob)
        if pending is None:
            if not self._service.waiting.join(peer, id, request):  # asked for before, and on its way to the log
                self._service.refuse(peer, id, TaskNotFound("this upload is not known: begin again"))
            return
        pending.waiting.append((peer, id))
        if len(pending.waiting) == 1:
            self._tasks.start(self._complete(request, pending), f"copies of {request.blob}")

    async def _complete(self, request: wire.PayloadStored, pending: _Pending) -> None:
        blob, task = request.blob, request.task
        try:
            holders = await self._copied(blob, pending)
        except RoqError as error:
            log.warning("payload could not be copied", extra={"fields": {"blob": blob, "reason": str(error)}})
            self._not_added(pending, error)
        except Exception as error:
            self._not_added(pending, TemporaryError(f"{type(error).__name__} while the payload was copied"))
            self._turn()
            raise
        else:
            del self._pending[blob]
            payload = BlobRef(blob, pending.size, pending.crc, holders)
            push = Push(self._now(), request.producer, request.sequence, payload, task.priority, task.delay_ms, task.dedup_key)
            self._service.add_big(pending.waiting, push)
            self._counters["blobs_added"] += 1
        self._turn()

    def _not_added(self, pending: _Pending, error: RoqError) -> None:
        while pending.waiting:
            self._service.refuse(*pending.waiting.pop(), error)

    async def _copied(self, blob: str, pending: _Pending) -> tuple[str, ...]:
        """The hosts that have it, enough of them. Raises LogUnavailable, or that the first one has not."""
        head = await self._stores.request(pending.host, store_wire.GetBlob(blob, 0, 0), store_wire.BlobPart)
        if (head.total, head.crc) != (pending.size, pending.crc):
            raise TaskNotFound("what was stored is not what was announced: begin again")
        wanted = self._wanted(len(self._health.roomy()))
        holders = await self._spread(blob, pending.size, (pending.host,), wanted, self._first_copier)
        if len(holders) < (wanted := self._wanted(len({*holders, *self._health.roomy()}))):  # some turned out to be full
            raise LogUnavailable(f"{wanted} stores are needed for a payload, {len(holders)} have it")
        return holders

    async def _spread(self, blob: str, size: int, holders: tuple[str, ...], wanted: int, copier: Copier) -> tuple[str, ...]:
        """Have it copied until `wanted` hosts have it; those that have. One that can't take it keeps no other from it."""
        tried = set(holders)
        for _ in range(ROUNDS):
            spare = set(self._health.roomy()) - tried - self._being_removed(blob)
            new: tuple[str, ...] = ()
            for copy in plan([Holding(blob, holders, size=size)], wanted, spare.union(holders), targets_max=wanted):
                tried.update(copy.targets)
                new = await copier.perform(copy)
            holders += new
            if len(holders) >= wanted or (not new and blob in self._pending):
                break  # of a new one it is more likely that the first copy is gone than all the others
        return holders

    async def _fetch(self, copy: Copy, source: str, target: str) -> None:
        """Have `target` fetch a payload from `source`."""
        blob, seconds = copy.holding.name, COPY_SECONDS + copy.holding.size / COPY_BYTES_PER_SECOND
        self._copying.add((blob, target))
        try:
            if self._health.dead(source):
                raise LogUnavailable(f"the store of host {source} does not answer")
            await self._stores.copy_blob(source, target, blob, seconds)
        except StorageFull:
            self._health.full(target)
            raise
        finally:
            self._loop.call_later(self._pace.orphan_seconds, self._copying.discard, (blob, target))

    # --- lease, delete ------------------------------------------------------------------------------------------------

    def places(self, hosts: tuple[str, ...]) -> tuple[StoreAddress, ...]:
        """Where a client finds a blob, the living first."""
        found = [(self._health.dead(host), host, self._stores.directory.endpoint(host)) for host in hosts]
        return tuple(StoreAddress(host, endpoint) for _, host, endpoint in sorted(found, key=lambda one: one[0]) if endpoint)

    def drop(self, blobs: Iterable[BlobRef]) -> None:
        """Their tasks are gone for good. What can't be deleted now is an orphan."""
        for blob in blobs:
            self._tasks.start(self._delete(blob.blob, blob.holders), f"delete {blob.blob}")

    async def _delete(self, blob: str, hosts: Iterable[str]) -> None:
        async with self._deletions:
            living = [host for host in hosts if not self._health.dead(host)]  # the others have orphans when they come back
            self._counters["blobs_deleted"] += len(await self._stores.delete_blob(living, blob))

    # --- watching -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Heartbeats, and the end of uploads that take too long. Nothing is asked while there is no blob."""
        while True:
            await asyncio.sleep(self._pace.heartbeat_seconds)
            now = self._loop.time()
            for blob in [blob for blob, one in self._pending.items() if one.deadline < now and not one.waiting]:
                one = self._pending.pop(blob)
                self._counters["uploads_discarded"] += 1
                self._tasks.start(self._delete(blob, (one.host,)), f"discard {blob}")
            if not self._service.fold.blobs and not self._pending:
                continue
            if self._health.changed():
                self.repair_due.set()
            hosts = sorted({*self._stores.directory.hosts(), *self._holders()})
            answers = await asyncio.gather(*(self._beats(host) for host in hosts))
            for host, beats in zip(hosts, answers, strict=True):
                if self._health.beat(host, beats):
                    log.warning("store dead" if self._health.dead(host) else "store back", extra={"fields": {"host": host}})
                    self.repair_due.set()

    def _holders(self) -> set[str]:
        return {host for task in self._service.fold.blobs.values() for host in task.payload.holders}  # type: ignore[union-attr]

    async def _beats(self, host: str) -> bool:
        if host not in self._stores.directory.hosts():
            return False
        seconds = self._pace.heartbeat_seconds
        try:
            view = await self._stores.request(host, store_wire.DescribeStore(), store_wire.StoreView, seconds)
        except RoqError:
            return False
        life = view.disk, view.life
        if self._lives.get(host) != life:  # its disk may be another one, or damaged: what it has is not what it had
            self._lives[host] = life
            self._tasks.start(self._take_inventory(host), f"inventory of {host}")
        return True

    # --- copies -------------------------------------------------------------------------------------------------------

    async def _keep_copies(self) -> None:
        """Blobs with too few living holders get others."""
        while True:
            self.repair_due.clear()
            live = self._health.live()
            for key, task in self._service.fold.blobs.items():
                if key not in self._restoring and self._lacks(task, live):
                    self._restoring.add(key)
                    self._tasks.start(self._restore(key), f"restore copies of {key}")
            try:
                async with asyncio.timeout(self._pace.inventory_seconds):
                    await self.repair_due.wait()
            except TimeoutError:
                continue

    def _lacks(self, task: StoredTask, live: list[str]) -> bool:
        alive = [host for host in task.payload.holders if host in live] if isinstance(task.payload, BlobRef) else []
        return bool(alive) and len(alive) < self._possible(alive)

    def _possible(self, alive: Iterable[str]) -> int:
        """How many copies there can be of what these hosts have."""
        return min(self.spec.write_quorum, len({*alive, *self._health.roomy()}))

    def _being_removed(self, blob: str) -> set[str]:
        return {host for removed, host in self._removing if removed == blob}

    async def _restore(self, key: TaskKey) -> None:
        """One round of copies, from what is known when its turn has come. What lacks still is tried again soon."""
        try:
            async with self._repairs:
                task, live = self._service.fold.blobs.get(key), self._health.live()
                if task is None or not self._lacks(task, live) or not isinstance(blob := task.payload, BlobRef):
                    return
                alive = tuple(host for host in blob.holders if host in live)
                wanted = self._possible(alive)
                holders = await self._spread(blob.blob, blob.size, alive, wanted, self._copier)
            if holders != alive and task.payload == blob and self._service.replace(key, blob, holders, self._now()):
                self._counters["blobs_restored"] += 1
                self._turn()
            if len(holders) < wanted:
                self._loop.call_later(self._pace.heartbeat_seconds, self.repair_due.set)
        finally:
            self._restoring.discard(key)

    # --- orphans ------------------------------------------------------------------------------------------------------

    async def _look_for_orphans(self) -> None:
        while True:
            await asyncio.sleep(self._pace.inventory_seconds)
            for host in self._health.live():
                await self._take_inventory(host)

    async def _take_inventory(self, host: str) -> None:
        """One at a time of each host: what one is deleting as an orphan the other must not have copied there."""
        try:
            async with self._counting[host]:
                await self._compare(host)
        except RoqError as error:
            log.info("store inventory could not be read", extra={"fields": {"host": host, "reason": str(error)}})

    async def _compare(self, host: str) -> None:
        """Delete what nobody needs on this host, note what it lost; what came or went while it was counting is neither."""
        before = self._wanted_on(host)
        held = await self._stores.inventory(host, self._prefix)
        old = [one.blob for one in held if one.age > self._pace.orphan_seconds]
        if self._orphans(host, old):
            await self._barrier()  # what we know to be gone is gone for good, and we are still the master
            await self._remove(host, self._orphans(host, old))
        count = 0
        for name in sorted(before.keys() - {one.blob for one in held}):
            key, lost = before[name]
            task = self._service.fold.blobs.get(key)
            if task is not None and task.payload == lost:
                await self._lost(host, key, lost)
                count += 1
        if count:
            log.warning("host %s lacks %d payloads of log %s: they are copied again", host, count, self.spec.log)

    def _wanted_on(self, host: str) -> dict[str, tuple[TaskKey, BlobRef]]:
        """What the host should have, by name."""
        return {
            task.payload.blob: (key, task.payload)
            for key, task in self._service.fold.blobs.items()
            if isinstance(task.payload, BlobRef) and host in task.payload.holders
        }

    def _orphans(self, host: str, blobs: list[str]) -> list[str]:
        wanted, pending, copying = self._wanted_on(host), self._pending, self._copying
        return [blob for blob in blobs if blob not in wanted and blob not in pending and (blob, host) not in copying]

    async def _remove(self, host: str, orphans: list[str]) -> None:
        """Delete them, and copy none of them there again before that is done."""
        places = {(blob, host) for blob in orphans}
        self._removing |= places
        try:
            for blob in orphans:
                await self._delete(blob, (host,))
        finally:
            self._removing -= places
        self._counters["orphans_deleted"] += len(orphans)

    async def _lost(self, host: str, key: TaskKey, blob: BlobRef) -> None:
        """A living store has lost its copy, or put a damaged one aside."""
        others = tuple(one for one in blob.holders if one != host)
        self._counters["copies_lost"] += 1
        if not others:
            log.error("payload %s was on host %s only, which lacks it: its task can't be worked on", blob.blob, host)
        if others and self._service.replace(key, blob, others, self._now()):
            self._turn()
            self.repair_due.set()

    async def copies(self) -> list[wire.Shortage]:
        """Payloads that have not all of their copies now, those with the same number of them together; all stores are asked."""
        refs = [task.payload for task in self._service.fold.blobs.values() if isinstance(task.payload, BlobRef)]
        what = [Holding(ref.blob, ref.holders, size=ref.size) for ref in refs]
        found = await self._stores.compare(what, (), self._stores.directory.hosts())
        short: dict[int, list[Holding]] = {}
        for one in what:
            if (copies := len(found.good(one))) < self.spec.write_quorum:
                short.setdefault(copies, []).append(one)
        return [
            wire.Shortage(
                f"{len(some)} payloads, {some[0].name} first",
                copies,
                self.spec.write_quorum,
                tuple(sorted({host for one in some for host in one.nodes if host not in found.good(one)})),
            )
            for copies, some in sorted(short.items())
        ]

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
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from roq.errors import LogUnavailable, RoqError, TaskNotFound, TemporaryError
from roq.ids import new_token
from roq.log.replicated.placement import rank
from roq.log.replicated.stores import Stores
from roq.master.requests import check_stored
from roq.master.service import Service
from roq.runtime.observe import Counters
from roq.runtime.run import Tasks
from roq.wire import master as wire
from roq.wire import store as store_wire
from roq.wire.work_queue import WorkQueueSpec
from roq.workqueue.ready import Task
from roq.workqueue.records import BlobRef, Push, TaskKey

PENDING_MAX = 1_000
COPY_SECONDS = 10.0  # a store that says nothing for so long is as good as dead …
ROUNDS = 3  # of copies, until a put is given back to its client
COPY_BYTES_PER_SECOND = 10 * 1024 * 1024  # … and a large copy may take longer
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
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


class Blobs:
    """All blobs of one reign. turn(): look at the service; barrier(): until all that was applied is durable; now(): ms."""

    def __init__(
        self,
        spec: WorkQueueSpec,
        stores: Stores,
        service: Service,
        turn: Callable[[], None],
        barrier: Callable[[], Awaitable[None]],
        now: Callable[[], int],
        counters: Counters,
        pace: Pace = Pace(),
        reign: str | None = None,  # a name that no other reign ever has; drawn if none is given
    ) -> None:
        self._spec, self._stores, self._service, self._pace = spec, stores, service, pace
        self._turn, self._barrier, self._now, self._counters = turn, barrier, now, counters
        self._loop = asyncio.get_running_loop()
        self._prefix = f"{spec.log}/"
        self._reign = reign or new_token()
        self._count = 0
        self._pending: dict[str, _Pending] = {}
        self._missed: dict[str, int] = {}
        self._copying: set[tuple[str, str]] = set()  # blob, target
        self._restoring: set[TaskKey] = set()
        self._slots = asyncio.Semaphore(pace.copies_at_once)
        self._first_slots = asyncio.Semaphore(pace.first_copies_at_once)
        self._repairs = asyncio.Semaphore(pace.copies_at_once)
        self._deletions = asyncio.Semaphore(pace.deletions_at_once)
        self._repair_due = asyncio.Event()
        self._tasks = Tasks(lambda error: None)

    def start(self) -> None:
        """Watch over them until close()."""
        self._tasks.start(self._watch(), "stores' heartbeats")
        self._tasks.start(self._keep_copies(), "copies of blobs")
        self._tasks.start(self._look_for_orphans(), "inventory")

    async def close(self) -> None:
        """Leave the rest to the next reign."""
        await self._tasks.stop()

    # --- which stores -------------------------------------------------------------------------------------------------

    def live(self) -> list[str]:
        """Hosts whose store answers."""
        return [host for host in self._stores.directory.hosts() if not self._dead(host)]

    def _dead(self, host: str) -> bool:
        return self._missed.get(host, 0) >= self._pace.missed_beats

    def _wanted(self, live: int) -> int:
        """How many copies a blob has."""
        return max(self._spec.ack_quorum, min(self._spec.write_quorum, live))

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
        blob = f"{self._prefix}{self._reign}.{self._count}"
        live = self.live()
        ranked = rank(blob, [host for host in live if host not in request.avoid] or live)
        for host in ranked:
            endpoint = self._stores.directory.endpoint(host)
            if endpoint is not None:
                deadline = self._loop.time() + self._pace.pending_seconds
                self._pending[blob] = _Pending(host, request.size, request.crc, deadline)
                return wire.Reserved(blob, wire.Place(host, endpoint))
        raise LogUnavailable("no store answers")

    def stored(self, peer: bytes, id: int, request: wire.Stored) -> None:
        """The client has stored it: have it copied, then logged, then answer."""
        try:
            check_stored(request)
        except RoqError as error:
            self._service.refuse(peer, id, error)
            return
        pending = self._pending.get(request.blob)
        if pending is None:
            self._service.refuse(peer, id, TaskNotFound("this upload is not known: begin again"))
            return
        pending.waiting.append((peer, id))
        if len(pending.waiting) == 1:
            self._tasks.start(self._complete(request, pending), f"copies of {request.blob}")

    async def _complete(self, request: wire.Stored, pending: _Pending) -> None:
        blob, task = request.blob, request.task
        try:
            holders = await self._copied(blob, pending)
        except RoqError as error:
            log.warning("payload not copied", extra={"fields": {"blob": blob, "reason": str(error)}})
            for peer, id in pending.waiting:
                self._service.refuse(peer, id, error)
            pending.waiting.clear()
        else:
            del self._pending[blob]
            payload = BlobRef(blob, pending.size, pending.crc, holders)
            push = Push(self._now(), request.producer, request.sequence, payload, task.priority, task.delay_ms, task.dedup_key)
            self._service.add_big(pending.waiting, push)
            self._counters["blobs_added"] += 1
        self._turn()

    async def _copied(self, blob: str, pending: _Pending) -> tuple[str, ...]:
        """The hosts that have it, enough of them. Raises LogUnavailable, or that the first one has not."""
        head = await self._stores.request(pending.host, store_wire.GetBlob(blob, 0, 0), store_wire.BlobPart)
        if (head.total, head.crc) != (pending.size, pending.crc):
            raise TaskNotFound("what was stored is not what was announced: begin again")
        return await self._spread(blob, pending.size, pending.host, self._wanted(len(self.live())))

    async def _spread(self, blob: str, size: int, first: str, wanted: int) -> tuple[str, ...]:
        """Have `first` copied until `wanted` hosts have it. Raises LogUnavailable if they can't be found soon."""
        tried = {first}
        holders: tuple[str, ...] = (first,)
        for _ in range(ROUNDS):
            spare = [host for host in rank(blob, self.live()) if host not in tried]
            targets = spare[: wanted - len(holders)]
            tried.update(targets)
            holders += await self._copy_to(blob, size, holders, targets, self._first_slots)
            if len(holders) >= wanted:
                return holders
        raise LogUnavailable(f"{wanted} stores are needed for a payload, {len(holders)} have it")

    async def _copy_to(
        self, blob: str, size: int, holders: tuple[str, ...], targets: list[str], slots: asyncio.Semaphore
    ) -> tuple[str, ...]:
        """Copy it to these hosts; those where that worked."""
        seconds = COPY_SECONDS + size / COPY_BYTES_PER_SECOND
        done = await asyncio.gather(*(self._copy(blob, holders, target, slots, seconds) for target in targets))
        return tuple(target for target, good in zip(targets, done, strict=True) if good)

    async def _copy(self, blob: str, holders: tuple[str, ...], target: str, slots: asyncio.Semaphore, seconds: float) -> bool:
        """From the first holder that can give it."""
        self._copying.add((blob, target))
        try:
            async with slots:
                for source in holders:
                    if self._dead(source):
                        continue
                    try:
                        await self._stores.copy_blob(source, target, blob, seconds)
                    except RoqError as error:
                        fields = {"blob": blob, "source": source, "target": target, "reason": str(error)}
                        log.warning("copy failed", extra={"fields": fields})
                    else:
                        return True
            return False
        finally:
            self._loop.call_later(self._pace.orphan_seconds, self._copying.discard, (blob, target))

    # --- lease, delete ------------------------------------------------------------------------------------------------

    def places(self, hosts: tuple[str, ...]) -> tuple[wire.Place, ...]:
        """Where a client finds a blob, the living first."""
        found = [(self._dead(host), host, self._stores.directory.endpoint(host)) for host in hosts]
        return tuple(wire.Place(host, endpoint) for _, host, endpoint in sorted(found, key=lambda one: one[0]) if endpoint)

    def drop(self, blobs: Iterable[BlobRef]) -> None:
        """Their tasks are gone for good. What can't be deleted now is an orphan."""
        for blob in blobs:
            self._tasks.start(self._delete(blob.blob, blob.holders), f"delete {blob.blob}")

    async def _delete(self, blob: str, hosts: Iterable[str]) -> None:
        async with self._deletions:
            living = [host for host in hosts if not self._dead(host)]  # the others have orphans when they come back
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
            if not self._service.state.blobs and not self._pending:
                continue
            hosts = {*self._stores.directory.hosts(), *self._holders()}
            answers = await asyncio.gather(*(self._beats(host) for host in hosts))
            for host, beats in zip(hosts, answers, strict=True):
                before = self._dead(host)
                self._missed[host] = 0 if beats else self._missed.get(host, 0) + 1
                if before != self._dead(host):
                    log.warning("store dead" if self._dead(host) else "store back", extra={"fields": {"host": host}})
                    self._repair_due.set()

    def _holders(self) -> set[str]:
        return {host for task in self._service.state.blobs.values() for host in task.payload.holders}  # type: ignore[union-attr]

    async def _beats(self, host: str) -> bool:
        if host not in self._stores.directory.hosts():
            return False
        try:
            await self._stores.request(host, store_wire.DescribeStore(), store_wire.StoreView, self._pace.heartbeat_seconds)
        except RoqError:
            return False
        return True

    # --- copies -------------------------------------------------------------------------------------------------------

    async def _keep_copies(self) -> None:
        """Blobs with too few living holders get others."""
        while True:
            self._repair_due.clear()
            live = self.live()
            for key, task in self._service.state.blobs.items():
                if key not in self._restoring and self._lacks(task, live):
                    self._restoring.add(key)
                    self._tasks.start(self._restore(key), f"restore copies of {key}")
            try:
                async with asyncio.timeout(self._pace.inventory_seconds):
                    await self._repair_due.wait()
            except TimeoutError:
                continue

    def _lacks(self, task: Task, live: list[str]) -> bool:
        if not isinstance(task.payload, BlobRef):
            return False
        alive = [host for host in task.payload.holders if host in live]
        return bool(alive) and len(alive) < min(self._spec.write_quorum, len(live))

    async def _restore(self, key: TaskKey) -> None:
        """One round of copies, from what is known when its turn has come. What lacks still is tried again soon."""
        try:
            async with self._repairs:
                task, live = self._service.state.blobs.get(key), self.live()
                if task is None or not self._lacks(task, live) or not isinstance(blob := task.payload, BlobRef):
                    return
                alive = tuple(host for host in blob.holders if host in live)
                spare = [host for host in rank(blob.blob, live) if host not in alive]
                wanted = min(self._spec.write_quorum, len(live)) - len(alive)
                new = await self._copy_to(blob.blob, blob.size, alive, spare[:wanted], self._slots)
            if new and self._service.replace(key, blob, (*alive, *new), self._now()):
                self._counters["blobs_restored"] += 1
                self._turn()
            if len(new) < wanted:
                self._loop.call_later(self._pace.heartbeat_seconds, self._repair_due.set)
        finally:
            self._restoring.discard(key)

    # --- orphans ------------------------------------------------------------------------------------------------------

    async def _look_for_orphans(self) -> None:
        while True:
            await asyncio.sleep(self._pace.inventory_seconds)
            for host in self.live():
                try:
                    await self._compare(host)
                except RoqError as error:
                    log.info("no inventory", extra={"fields": {"host": host, "reason": str(error)}})

    async def _compare(self, host: str) -> None:
        """Delete what no task of ours keeps on this host; note what it should have and has not."""
        held = await self._stores.inventory(host, self._prefix)
        wanted = {
            task.payload.blob: (key, task.payload)
            for key, task in self._service.state.blobs.items()
            if isinstance(task.payload, BlobRef) and host in task.payload.holders
        }
        orphans = [one.blob for one in held if one.age > self._pace.orphan_seconds and self._is_orphan(one.blob, host, wanted)]
        if orphans:
            await self._barrier()  # what we know to be gone is gone for good, and we are still the master
            for blob in orphans:
                await self._delete(blob, (host,))
            self._counters["orphans_deleted"] += len(orphans)
        missing = wanted.keys() - {one.blob for one in held}
        for key, lost in [wanted[name] for name in missing]:
            task = self._service.state.blobs.get(key)
            if task is not None and task.payload == lost:
                await self._lost(host, key, lost)

    def _is_orphan(self, blob: str, host: str, wanted: dict[str, tuple[TaskKey, BlobRef]]) -> bool:
        return blob not in wanted and blob not in self._pending and (blob, host) not in self._copying

    async def _lost(self, host: str, key: TaskKey, blob: BlobRef) -> None:
        """A living store has lost its copy, or put a damaged one aside."""
        others = tuple(one for one in blob.holders if one != host)
        self._counters["copies_lost"] += 1
        log.error("a store lost a payload", extra={"fields": {"host": host, "blob": blob.blob, "others": len(others)}})
        if others and self._service.replace(key, blob, others, self._now()):
            self._turn()
            self._repair_due.set()

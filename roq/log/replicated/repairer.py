"""The shell around repair.py, run by a log's owner (its master): copies what a lost host held, deletes what nobody names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from roq.errors import LogFenced, RoqError, StorageFailed
from roq.log.replicated import metadata
from roq.log.replicated.health import StoreHealth
from roq.log.replicated.repair import Copy, Holding, garbage, holdings, plan, under_replicated
from roq.log.replicated.settings import RepairSettings
from roq.log.replicated.writer import LogWriter
from roq.runtime.observe import Counters, logger
from roq.wire import store as wire
from roq.wire.master import Shortage

log = logger(__name__)
CHECK_SECONDS = 120.0  # a store reads a whole fragment
REFUSING_SECONDS = 60.0  # a node that could not be filled is not the first choice for so long


class LogRepairer:
    """Repairs of one log."""

    def __init__(self, writer: LogWriter, settings: RepairSettings, lost: Callable[[], None] | None = None) -> None:
        """lost: called when no store has something any more, and only a new snapshot can take its place."""
        self._writer, self._settings, self._lost = writer, settings, lost
        self.counters = Counters()
        self._health = StoreHealth(writer.stores.directory, time.monotonic)
        self._disks: dict[str, str] = {}  # host -> identity of the disk that answered last
        self._verified: dict[tuple[Holding, str], float] = {}
        self._lacking: set[tuple[Holding, str]] = set()
        self._refusing: dict[tuple[Holding, str], float] = {}  # could not be filled -> when
        self._unnamed: dict[tuple[str, str], float] = {}  # (host, name) -> since when nobody names it
        self._swept = time.monotonic()

    async def run(self) -> None:
        """Until the writer stops."""
        while self._writer.error is None:
            try:
                await self.round()
            except LogFenced:
                return
            except RoqError as error:
                log.info("repair postponed", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(self._settings.every_seconds)

    async def round(self) -> int:
        """Look once and repair what can be; how many copies were made. Raises LogFenced."""
        settings, meta = self._settings, self._writer.meta
        what = list(holdings(meta))
        live = frozenset(self._health.live())
        gone = self._health.away({node for one in what for node in one.nodes}, settings.gone_seconds)
        await self._compare(what, live)
        await self._verify(what, live)
        slots = asyncio.Semaphore(settings.copies_at_once)

        async def one(copy: Copy) -> bool:
            async with slots:
                return await self._copy(copy)

        copies = plan(what, meta.write_quorum, live, gone, self._lacking, self._refusing)
        done = await asyncio.gather(*map(one, copies))
        self._check_lost(what, live)
        if time.monotonic() - self._swept >= settings.garbage_every_seconds:
            self._swept = time.monotonic()
            await self.sweep()
        return sum(done)

    async def _compare(self, what: list[Holding], live: frozenset[str]) -> None:
        """What do live nodes hold of it, and of the open segment?"""
        known = {(one, node) for one in what for node in one.nodes}
        now = time.monotonic()
        self._verified = {key: when for key, when in self._verified.items() if key in known}
        self._refusing = {key: at for key, at in self._refusing.items() if key in known and now - at < REFUSING_SECONDS}
        self._lacking &= known
        found = await self._writer.stores.compare(what, self._writer.open_parts(), live)
        for host, disk in found.disks.items():
            if self._disks.get(host, disk) != disk:
                log.warning("host %s has another disk: what log %s keeps there is copied again", host, self._writer.log_id)
                self._verified = {key: when for key, when in self._verified.items() if key[1] != host}
            self._disks[host] = disk
        for holding, node in sorted(found.lacking - self._lacking, key=_order):
            self.counters["incomplete"] += 1
            log.warning("host %s lacks %s: it is copied again", node, holding)
        self._lacking = found.lacking | {key for key in self._lacking if key[1] not in found.disks}
        for part in found.parts:
            self._writer.lost(part)

    def _check_lost(self, what: list[Holding], live: frozenset[str]) -> None:
        """What no node has in full although all of them answer, and could not be put together: say so."""
        for holding in what:
            if all(node in live and (holding, node) in self._lacking for node in holding.nodes):
                self.counters["lost"] += 1
                hosts = ", ".join(holding.nodes)
                log.error("%s is damaged or missing on every host, %s: a new snapshot is made in its place", holding, hosts)
                if self._lost is not None:
                    self._lost()

    async def copies(self) -> list[Shortage]:
        """What has not all of its copies now, and where they are missing; all stores are asked. Empty: any one disk may go."""
        meta, writer = self._writer.meta, self._writer
        what, parts = list(holdings(meta)), writer.open_parts()
        found = await writer.stores.compare(what, parts, writer.stores.directory.hosts())
        return under_replicated(what, parts, meta.write_quorum, writer.behind(), found)

    async def _verify(self, what: list[Holding], live: frozenset[str]) -> None:
        """Have every live node of a closed fragment read and check what it holds: after it was closed, then now and then. As
        much as fits between two rounds: comparing must not wait for it."""
        began, every = time.monotonic(), self._settings.verify_seconds
        for holding, node in sorted({(one, node) for one in what for node in one.nodes} - self._lacking, key=_order):
            now = time.monotonic()
            due = now - self._verified.get((holding, node), -every) >= every
            if holding.is_blob or not due or node not in live:
                continue
            if now - began >= self._settings.every_seconds:
                return
            try:
                request = wire.Holes(holding.name, holding.first, holding.last)
                answer = await self._writer.stores.request(node, request, wire.Ranges, CHECK_SECONDS)
            except RoqError as error:
                log.info(
                    "copy could not be verified", extra={"fields": {"what": holding.name, "node": node, "reason": str(error)}}
                )
                continue
            self._verified[holding, node] = now
            if answer.ranges:
                self._lacking.add((holding, node))
                self.counters["incomplete"] += 1

    async def _copy(self, copy: Copy) -> bool:
        holding = copy.holding
        for source in copy.sources:
            try:
                await self._fetch(copy, source)
            except RoqError as error:
                reason = f"{type(error).__name__}: {error}"
                log.warning(
                    "copy failed",
                    extra={"fields": {"what": holding.name, "from": source, "to": copy.target, "reason": reason}},
                )
                continue
            self._lacking.discard((holding, copy.target))
            self._refusing.pop((holding, copy.target), None)
            self.counters["copies"] += 1
            if copy.after != holding.nodes:
                await self._rename(holding, copy.after)
            return True
        self._refusing[holding, copy.target] = time.monotonic()
        return False

    async def _fetch(self, copy: Copy, source: str) -> None:
        holding, stores = copy.holding, self._writer.stores
        if holding.is_blob:
            await stores.copy_blob(source, copy.target, holding.name, self._settings.copy_seconds)
            return
        endpoint = stores.directory.endpoint(source)
        if endpoint is None:
            raise StorageFailed(f"the store of host {source} is not known")
        order = wire.CopySegment(holding.name, self._writer.epoch, holding.first, holding.last, endpoint)
        await stores.request(copy.target, order, wire.StoreDone, self._settings.copy_seconds)

    async def _rename(self, holding: Holding, after: tuple[str, ...]) -> None:
        """The copy is durable: from now on these nodes are named."""
        meta = self._writer.meta
        log.info("copy completed", extra={"fields": {"what": holding.name, "first": holding.first, "nodes": after}})
        if not holding.is_blob:
            await self._writer.change(
                lambda meta: metadata.replace_nodes(meta, holding.name, holding.first, holding.nodes, after)
            )
        elif meta.snapshot is not None and meta.snapshot.blob == holding.name:
            await self._writer.change(lambda meta: metadata.move_snapshot(meta, holding.name, after))

    # --- what nobody names --------------------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Delete segments and snapshots that nobody has named for `garbage_seconds`; how many. Raises LogFenced."""
        writer, seen = self._writer, set()
        uploads = frozenset(writer.uploads)  # one that ends while we read is named by newer metadata than those read
        meta = await writer.own()  # read again: only the owner deletes
        now, deleted = time.monotonic(), 0
        for host in sorted(writer.stores.directory.hosts()):
            try:
                names = await self._inventory(host)
                for name in garbage(meta, writer.log_id, writer.epoch, names, host, uploads | writer.uploads):
                    seen.add((host, name))
                    if now - self._unnamed.setdefault((host, name), now) >= self._settings.garbage_seconds:
                        await self._delete(host, name)
                        deleted += 1
            except RoqError as error:
                log.info("store could not be swept", extra={"fields": {"host": host, "reason": str(error)}})
        self._unnamed = {key: since for key, since in self._unnamed.items() if key in seen}
        self.counters["deleted"] += deleted
        return deleted

    async def _inventory(self, host: str) -> list[str]:
        writer = self._writer
        request = wire.ListSegments(f"{writer.log_id}~")
        segments = (await writer.stores.request(host, request, wire.SegmentList)).segments
        blobs = await writer.stores.inventory(host, f"{writer.log_id}~snapshot-")
        return [one.segment for one in segments] + [one.blob for one in blobs]

    async def _delete(self, host: str, name: str) -> None:
        if "~snapshot-" in name:
            await self._writer.stores.request(host, wire.DeleteBlob(name), wire.StoreDone)
        else:
            await self._writer.stores.request(host, wire.DeleteSegment(name, self._writer.epoch), wire.StoreDone)


def _order(key: tuple[Holding, str]) -> tuple[str, int, str]:
    return key[0].name, key[0].first, key[1]

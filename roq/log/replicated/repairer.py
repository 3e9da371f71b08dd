"""The shell around repair.py, run by a log's owner (its master): copies what a lost host held, deletes what nobody names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from pydantic import BaseModel, ConfigDict, Field

from roq.errors import LogFenced, RoqError, StorageFailed
from roq.log.replicated import metadata
from roq.log.replicated.repair import Copy, Holding, garbage, holdings, plan
from roq.log.replicated.writer import LogWriter
from roq.runtime.observe import Counters
from roq.wire import store as wire

log = logging.getLogger(__name__)
CHECK_SECONDS = 120.0  # a store reads a whole fragment
Extra = Callable[[], Iterable[Holding]]
Moved = Callable[[Holding, tuple[str, ...]], Awaitable[None]]


class RepairSettings(BaseModel):
    """Times and bounds of repairs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_seconds: float = Field(default=5.0, gt=0)  # between two rounds
    gone_seconds: float = Field(default=30.0, ge=0)  # a host away for so long is given up
    copies_at_once: int = Field(default=2, ge=1)
    copy_seconds: float = Field(default=600.0, gt=0)
    verify_seconds: float = Field(default=3600.0, gt=0)  # every copy is read and checked again after so long
    garbage_seconds: float = Field(default=60.0, ge=0)  # what nobody names is kept for so long: readers may still be at it
    garbage_every_seconds: float = Field(default=60.0, ge=0)


class Repairer:
    """Repairs of one log. `extra`: more holdings (task payloads), whose new nodes go to `moved`."""

    def __init__(
        self, writer: LogWriter, settings: RepairSettings, extra: Extra | None = None, moved: Moved | None = None
    ) -> None:
        self._writer, self._settings, self._extra, self._moved = writer, settings, extra, moved
        self.counters = Counters()
        self._away: dict[str, float] = {}  # host -> since when
        self._verified: dict[tuple[Holding, str], float] = {}
        self._lacking: set[tuple[Holding, str]] = set()
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
                log.info("repairs wait", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(self._settings.every_seconds)

    async def round(self) -> int:
        """Look once and repair what can be; how many copies were made. Raises LogFenced."""
        settings, meta = self._settings, self._writer.meta
        what = [*holdings(meta), *(self._extra() if self._extra is not None else ())]
        live, gone = self._hosts({node for one in what for node in one.nodes})
        await self._verify(what, live)
        slots = asyncio.Semaphore(settings.copies_at_once)

        async def one(copy: Copy) -> bool:
            async with slots:
                return await self._copy(copy)

        done = await asyncio.gather(*map(one, plan(what, meta.write_quorum, live, gone, self._lacking)))
        if time.monotonic() - self._swept >= settings.garbage_every_seconds:
            self._swept = time.monotonic()
            await self.sweep()
        return sum(done)

    def _hosts(self, named: set[str]) -> tuple[frozenset[str], set[str]]:
        """(live, given up)"""
        live, now = self._writer.stores.directory.hosts(), time.monotonic()
        self._away = {host: self._away.get(host, now) for host in named - live}
        return live, {host for host, since in self._away.items() if now - since >= self._settings.gone_seconds}

    async def _verify(self, what: list[Holding], live: frozenset[str]) -> None:
        """Have every live node of a closed fragment read and check what it holds: after it was closed, then now and then."""
        now = time.monotonic()
        known = {(one, node) for one in what for node in one.nodes}
        self._verified = {key: when for key, when in self._verified.items() if key in known}
        self._lacking &= known
        for holding, node in sorted(known - self._lacking, key=lambda key: (key[0].name, key[0].first, key[1])):
            due = now - self._verified.get((holding, node), -self._settings.verify_seconds) >= self._settings.verify_seconds
            if holding.is_blob or not due or node not in live:
                continue
            try:
                request = wire.Holes(holding.name, holding.first, holding.last)
                answer = await self._writer.stores.request(node, request, wire.Ranges, CHECK_SECONDS)
            except RoqError as error:
                log.info("can't verify", extra={"fields": {"what": holding.name, "node": node, "reason": str(error)}})
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
                    "a copy failed",
                    extra={"fields": {"what": holding.name, "from": source, "to": copy.target, "reason": reason}},
                )
                continue
            self._lacking.discard((holding, copy.target))
            self.counters["copies"] += 1
            if copy.after != holding.nodes:
                await self._rename(holding, copy.after)
            return True
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
        await stores.request(copy.target, order, wire.Done, self._settings.copy_seconds)

    async def _rename(self, holding: Holding, after: tuple[str, ...]) -> None:
        """The copy is durable: from now on these nodes are named."""
        meta = self._writer.meta
        log.info("copied", extra={"fields": {"what": holding.name, "first": holding.first, "nodes": after}})
        if not holding.is_blob:
            await self._writer.change(
                lambda meta: metadata.replace_nodes(meta, holding.name, holding.first, holding.nodes, after)
            )
        elif meta.snapshot is not None and meta.snapshot.blob == holding.name:
            await self._writer.change(lambda meta: metadata.move_snapshot(meta, holding.name, after))
        elif self._moved is not None:
            await self._moved(holding, after)

    # --- what nobody names --------------------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Delete segments and snapshots that nobody has named for `garbage_seconds`; how many. Raises LogFenced."""
        writer, seen = self._writer, set()
        meta = await writer.own()  # read again: only the owner deletes
        now, deleted = time.monotonic(), 0
        for host in sorted(writer.stores.directory.hosts()):
            try:
                names = await self._inventory(host)
                for name in garbage(meta, writer.log_id, writer.epoch, names, host):
                    seen.add((host, name))
                    if now - self._unnamed.setdefault((host, name), now) >= self._settings.garbage_seconds:
                        await self._delete(host, name)
                        deleted += 1
            except RoqError as error:
                log.info("can't sweep", extra={"fields": {"host": host, "reason": str(error)}})
        self._unnamed = {key: since for key, since in self._unnamed.items() if key in seen}
        self.counters["deleted"] += deleted
        return deleted

    async def _inventory(self, host: str) -> list[str]:
        writer = self._writer
        request = wire.ListSegments(f"{writer.log_id}~")
        segments = (await writer.stores.request(host, request, wire.Segments)).segments
        blobs = await writer.stores.inventory(host, f"{writer.log_id}~snapshot-")
        return [one.segment for one in segments] + [one.blob for one in blobs]

    async def _delete(self, host: str, name: str) -> None:
        if "~snapshot-" in name:
            await self._writer.stores.request(host, wire.DeleteBlob(name), wire.Done)
        else:
            await self._writer.stores.request(host, wire.DeleteSegment(name, self._writer.epoch), wire.Done)

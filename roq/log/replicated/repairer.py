"""Performing repairs (repair.py): copies from the first source that can give them, then who is named, then what nobody names.

Copier        for everything that stores keep: segments, snapshots, task payloads. The target fetches, and answers when the copy
              is checked and durable there
from_sources  how sources are gone through; also by a follower of shuffles, which fetches rows and not files
LogRepairer   of one log, run by its owner (its master)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from roq.errors import LogFenced, RoqError, Unavailable
from roq.log.replicated import metadata
from roq.log.replicated.health import StoreHealth
from roq.log.replicated.owner import LogOwner
from roq.log.replicated.repair import Copy, Holding, garbage, holdings, plan, under_replicated
from roq.log.replicated.settings import RepairSettings
from roq.runtime.observe import Counters, logger
from roq.wire import store as wire
from roq.wire.master import Shortage

log = logger(__name__)
T = TypeVar("T")
CHECK_SECONDS = 120.0  # a store reads a whole fragment
REFUSING_SECONDS = 60.0  # a node that could not be filled is not the first choice for so long
Fetch = Callable[[Copy, str, str], Awaitable[None]]  # have `target` fetch the copy from `source`: (copy, source, target)


async def from_sources(
    what: object,
    sources: Sequence[str],
    fetch: Callable[[str], Awaitable[T]],
    retry_on: tuple[type[RoqError], ...] = (RoqError,),
    rounds: int = 1,
    pauses: Iterator[float] | None = None,
) -> T:
    """What the first source gives that can: one after the other, `rounds` times, after each round a pause.

    Raises the last error, and at once an error that no other source would help with (none of `retry_on`)."""
    failure: RoqError = Unavailable(f"there is no source to fetch {what} from")
    for number in range(rounds * len(sources)):
        source = sources[number % len(sources)]
        try:
            return await fetch(source)
        except retry_on as error:
            failure = error
            log.info("%s could not be fetched from %s: %s: %s", what, source, type(error).__name__, error)
        if pauses is not None and (number + 1) % len(sources) == 0:
            await asyncio.sleep(next(pauses))
    raise failure


class Copier:
    """Copies of one kind. at_once: of them under way at a time."""

    def __init__(self, fetch: Fetch, at_once: int) -> None:
        self._fetch, self._slots = fetch, asyncio.Semaphore(at_once)

    async def perform(self, copy: Copy) -> tuple[str, ...]:
        """The targets that have it now."""
        done = await asyncio.gather(*(self._copy(copy, target) for target in copy.targets))
        return tuple(target for target, good in zip(copy.targets, done, strict=True) if good)

    async def _copy(self, copy: Copy, target: str) -> bool:
        async with self._slots:
            try:
                await from_sources(copy.holding, copy.sources, lambda source: self._fetch(copy, source, target))
            except RoqError as error:
                hosts, reason = ", ".join(copy.sources), f"{type(error).__name__}: {error}"
                log.warning("%s could not be copied to host %s from any of %s: %s", copy.holding, target, hosts, reason)
                return False
        return True


class LogRepairer:
    """Repairs of one log."""

    def __init__(self, owner: LogOwner, settings: RepairSettings, lost: Callable[[], None] | None = None) -> None:
        """lost: called when no store has something any more, and only a new snapshot can take its place."""
        self._owner, self._settings, self._lost = owner, settings, lost
        self.counters = Counters()
        self._health = StoreHealth(owner.stores.directory, time.monotonic)
        self._disks: dict[str, str] = {}  # host -> identity of the disk that answered last
        self._verified: dict[tuple[Holding, str], float] = {}
        self._lacking: set[tuple[Holding, str]] = set()
        self._refusing: dict[tuple[Holding, str], float] = {}  # could not be filled -> when
        self._copier = Copier(self._fetch, settings.copies_at_once)
        self._unnamed: dict[tuple[str, str], float] = {}  # (host, name) -> since when nobody names it
        self._swept = time.monotonic()

    async def run(self) -> None:
        """Until the owner stops."""
        while self._owner.error is None:
            try:
                await self.round()
            except LogFenced:
                return
            except RoqError as error:
                log.info("log %s could not be repaired now, trying again: %s", self._owner.log_id, error)
            await asyncio.sleep(self._settings.every_seconds)

    async def round(self) -> int:
        """Look once and repair what can be; how many copies were made. Raises LogFenced."""
        settings, meta = self._settings, self._owner.meta
        what = list(holdings(meta))
        live = frozenset(self._health.live())
        parts = [part for part in self._owner.open_parts() if part.first <= part.last]
        named = {node for one in what for node in one.nodes} | {part.node for part in parts}
        gone = self._health.away(named, settings.gone_seconds)
        for part in parts:
            if part.node in gone:
                self._owner.lost(part)
        await self._compare(what, live)
        await self._verify(what, live)
        leaving = self._owner.stores.directory.leaving()
        copies = plan(what, meta.write_quorum, live, gone, self._lacking, self._refusing, leaving=leaving)
        done = await asyncio.gather(*map(self._copy, copies))
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
        held = set(what)
        self._refusing = {key: at for key, at in self._refusing.items() if key[0] in held and now - at < REFUSING_SECONDS}
        self._lacking &= known
        found = await self._owner.stores.compare(what, self._owner.open_parts(), live)
        for host, disk in found.disks.items():
            if self._disks.get(host, disk) != disk:
                log.warning("host %s has another disk: what log %s keeps there is copied again", host, self._owner.log_id)
                self._verified = {key: when for key, when in self._verified.items() if key[1] != host}
            self._disks[host] = disk
        for holding, node in sorted(found.lacking - self._lacking, key=_order):
            self.counters["incomplete"] += 1
            good, wanted = len(found.good(holding)), self._owner.meta.write_quorum
            log.warning(
                "%s is under-replicated, %d of %d copies: host %s lacks it, copying it again", holding, good, wanted, node
            )
        self._lacking = found.lacking | {key for key in self._lacking if key[1] not in found.disks}
        for part in found.parts:
            self._owner.lost(part)

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
        meta, owner = self._owner.meta, self._owner
        what, parts = list(holdings(meta)), owner.open_parts()
        found = await owner.stores.compare(what, parts, owner.stores.directory.hosts())
        return under_replicated(what, parts, meta.write_quorum, owner.behind(), found)

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
                answer = await self._owner.stores.request(node, request, wire.Ranges, CHECK_SECONDS)
            except RoqError as error:
                log.info("copy of %s on host %s could not be verified now, trying again: %s", holding, node, error)
                continue
            self._verified[holding, node] = now
            if answer.ranges:
                self._lacking.add((holding, node))
                self.counters["incomplete"] += 1

    async def _copy(self, copy: Copy) -> bool:
        """Perform it and name who has it now."""
        holding, done = copy.holding, await self._copier.perform(copy)
        now = time.monotonic()
        self._refusing.update({(holding, target): now for target in copy.targets if target not in done})
        for target in done:
            self._lacking.discard((holding, target))
            self._refusing.pop((holding, target), None)
        if not done:
            return False
        self.counters["copies"] += 1
        nodes = copy.nodes(done)
        log.info("%s copied to host %s: it is on %s now", holding, ", ".join(done), ", ".join(nodes))
        if nodes != holding.nodes:
            await self._owner.change(
                lambda meta: metadata.replace_copies(meta, holding.name, holding.first, holding.nodes, nodes)
            )
        return True

    async def _fetch(self, copy: Copy, source: str, target: str) -> None:
        holding, stores, seconds = copy.holding, self._owner.stores, self._settings.copy_seconds
        if holding.is_blob:
            await stores.copy_blob(source, target, holding.name, seconds)
            return
        order = wire.CopySegment(holding.name, self._owner.epoch, holding.first, holding.last, stores.endpoint(source))
        await stores.request(target, order, wire.StoreDone, seconds)

    # --- what nobody names --------------------------------------------------------------------------------------------

    async def sweep(self) -> int:
        """Delete segments and snapshots that nobody has named for `garbage_seconds`; how many. Raises LogFenced."""
        owner, seen = self._owner, set()
        uploads = frozenset(owner.uploads)  # one that ends while we read is named by newer metadata than those read
        meta = await owner.own()  # read again: only the owner deletes
        now, deleted = time.monotonic(), 0
        for host in sorted(owner.stores.directory.hosts()):
            try:
                names = await owner.stores.segments(host, f"{owner.log_id}~")
                names += [one.blob for one in await owner.stores.inventory(host, f"{owner.log_id}~snapshot-")]
                for name in garbage(meta, owner.log_id, owner.epoch, names, host, uploads | owner.uploads):
                    seen.add((host, name))
                    if now - self._unnamed.setdefault((host, name), now) >= self._settings.garbage_seconds:
                        is_blob = "~snapshot-" in name
                        request = wire.DeleteBlob(name) if is_blob else wire.DeleteSegment(name, owner.epoch)
                        await owner.stores.request(host, request, wire.StoreDone)
                        deleted += 1
            except RoqError as error:
                log.info("garbage of log %s stays on host %s until the next sweep: %s", owner.log_id, host, error)
        self._unnamed = {key: since for key, since in self._unnamed.items() if key in seen}
        self.counters["deleted"] += deleted
        return deleted


def _order(key: tuple[Holding, str]) -> tuple[str, int, str]:
    return key[0].name, key[0].first, key[1]

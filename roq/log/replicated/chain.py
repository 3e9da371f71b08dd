"""A log's metadata in ZooKeeper: read, and changed by compare-and-set. The outcome of a change is always found out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from roq.coordination import paths
from roq.coordination.link import Check, Create, NodeExists, NoNode, VersionConflict
from roq.coordination.session import Session, SessionState
from roq.errors import LogFenced, ZooKeeperUnavailable
from roq.ids import new_token
from roq.log.replicated.metadata import Change, LogMeta
from roq.wire.assignment import from_json, to_json

RETRY_SECONDS = 0.05
Guard = Callable[[], Awaitable[Check]]  # what must hold when a log is made; raises LogFenced if it never will again


class Chain:
    """The metadata of one log, as last read or written. One change at a time."""

    def __init__(self, session: Session, log_id: str, guard: Guard | None = None) -> None:
        self._session, self._path, self._guard = session, paths.log(log_id), guard
        self._lock = asyncio.Lock()
        self.meta = LogMeta()
        self._version = -1
        self._owner = new_token()  # tells our takes from the identical ones of another process

    @property
    def connected(self) -> bool:
        """Would a change have a chance now?"""
        return self._session.state is SessionState.CONNECTED

    async def read(self) -> LogMeta | None:
        """Read afresh; None if there is no such log. Raises ZooKeeperUnavailable."""
        node = await self._session.get(self._path)
        if node is None:
            return None
        self.meta, self._version = from_json(node.data, LogMeta), node.version
        return self.meta

    async def refresh(self) -> LogMeta | None:
        """As `read`, but not while a change is under way."""
        async with self._lock:
            return await self.read()

    async def create(self, meta: LogMeta) -> None:
        """Make the log unless it is there. Raises LogFenced if it is wanted no longer."""
        await self._session.ensure_path(paths.logs())
        while True:
            allowed = (await self._guard(),) if self._guard is not None else ()
            try:
                await self._session.multi((*allowed, Create(self._path, to_json(meta))))
            except NodeExists:
                return
            except NoNode:
                raise LogFenced("the log was removed") from None
            except VersionConflict:
                continue
            return

    async def change(self, change: Change) -> LogMeta:
        """Apply `change` to the newest metadata until it is done; `change` raises what ends it (LogFenced).

        Waits for ZooKeeper as long as it takes: once a write was sent, its outcome must be known.
        """
        async with self._lock:
            while True:
                after = change(self.meta)
                if after == self.meta:
                    return after
                if after.epoch != self.meta.epoch:
                    after = msgspec.structs.replace(after, owner=self._owner)
                after.check()
                try:
                    self._version = await self._session.set(self._path, to_json(after), self._version)
                    self.meta = after
                    return after
                except NoNode:
                    raise LogFenced("the log was removed") from None
                except (VersionConflict, ZooKeeperUnavailable) as error:
                    if await self._done(after, error):
                        return after

    async def _done(self, after: LogMeta, error: Exception) -> bool:
        """Was it our write? Reads the newest metadata."""
        tried = self._version + 1
        while True:
            try:
                if isinstance(error, ZooKeeperUnavailable):
                    await self._session.wait_connected()
                if await self.read() is None:
                    raise LogFenced("the log was removed") from None
                return self._version == tried and self.meta == after
            except ZooKeeperUnavailable:
                await asyncio.sleep(RETRY_SECONDS)

"""Who has taken a log over. Taking it fences every earlier owner; from then on only this one changes the metadata.

LogOwner    what writing and keeping have in common; what a LogRepairer needs
LogKeeper   of a log that nobody writes any more: what its writer left is recovered and closed, copies are kept, the rest goes
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from roq.coordination.session import Session
from roq.errors import Closed, LogFenced, LogUnavailable, RoqError
from roq.log.replicated import metadata
from roq.log.replicated.chain import Chain
from roq.log.replicated.metadata import Change, LogMeta
from roq.log.replicated.repair import OpenPart
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import Stores
from roq.log.replicated.takeover import TakeOver
from roq.runtime.observe import logger

log = logger(__name__)


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class LogOwner:
    """The log's owner in its epoch, until a later one takes it."""

    def __init__(self, log_id: str, chain: Chain, stores: Stores) -> None:
        self.log_id, self.stores, self._chain = log_id, stores, chain
        self.epoch = chain.meta.epoch
        self._error: RoqError | None = None
        self._failed = asyncio.Event()
        self.uploads: set[str] = set()  # snapshots under way: nobody names them yet, and they are no garbage

    @property
    def meta(self) -> LogMeta:
        """The log's metadata as this owner knows them."""
        return self._chain.meta

    @property
    def error(self) -> RoqError | None:
        """Why the owner stopped; None while it goes on."""
        return self._error

    async def failed(self) -> RoqError:
        """Wait until the owner stops; why."""
        await self._failed.wait()
        assert self._error is not None
        return self._error

    async def own(self) -> LogMeta:
        """The metadata, read now. Raises LogFenced if the log has another owner, ZooKeeperUnavailable."""
        meta = await self._chain.refresh()
        if meta is None or meta.epoch != self.epoch:
            error = LogFenced("the log has another owner")
            self._stop(error)
            raise error
        return meta

    async def change(self, change: Change) -> LogMeta:
        """Change the metadata as the log's owner. Raises LogFenced."""

        def checked(meta: LogMeta) -> LogMeta:
            return change(metadata.owned(meta, self.epoch))

        try:
            return await self._chain.change(checked)
        except LogFenced as error:
            self._stop(error)
            raise

    def open_parts(self) -> list[OpenPart]:
        """What the nodes of the open segment must have by now."""
        return []

    def behind(self) -> frozenset[str]:
        """Nodes of the open segment that miss some of it, for longer than it is under way."""
        return frozenset()

    def lost(self, part: OpenPart) -> None:
        """A node has not what `open_parts` said."""

    def _stop(self, error: RoqError) -> None:
        """For good."""
        if self._error is None:
            self._error = error
            self._failed.set()


class LogKeeper(LogOwner):
    """Made by `take_over`."""

    @classmethod
    async def take_over(cls, session: Session, log_id: str, stores: Stores, settings: LogSettings, term: int) -> LogKeeper:
        """Fence every earlier owner and close what it left. stores: the caller's, for all logs that it keeps; a take-over has
        connections of its own while it lasts. Raises LogFenced (also if there is no such log), LogUnavailable, DataLost."""
        chain, own = Chain(session, log_id), Stores(stores.directory)

        async def finish(taking: TakeOver) -> Change:
            return await taking.end()

        await take(log_id, chain, own, settings, term, finish)
        own.close()
        return cls(log_id, chain, stores)

    def close(self) -> None:
        """Stop; the log stays as it is."""
        self._stop(Closed("the log's keeper was closed"))


async def take(
    log_id: str,
    chain: Chain,
    stores: Stores,
    settings: LogSettings,
    term: int,
    finish: Callable[[TakeOver], Awaitable[Change]],
    make: LogMeta | None = None,
) -> None:
    """Take the log and perform what `finish` makes of it. make: the metadata of a log that is not there yet; None: it must be.
    The stores are closed if that fails: LogFenced, NoHosts, LogUnavailable, StorageFull, DataLost."""
    taking: TakeOver | None = None
    try:
        async with asyncio.timeout(settings.take_over_seconds):
            if await chain.read() is None:
                if make is None:
                    raise LogFenced("the log was removed")
                await chain.create(make)
                await chain.read()
            taking = TakeOver(log_id, stores, await chain.change(lambda meta: metadata.take(meta, term)))
            stores.on_notice = taking.notice
            await chain.change(await finish(taking))
    except TimeoutError:
        stores.close()
        waits_for = taking.waits_for() if taking is not None else "new stores"
        seconds = f"{settings.take_over_seconds:g} s"
        raise LogUnavailable(f"too few stores of log {log_id} answered in {seconds}: {waits_for}") from None
    except BaseException:
        stores.close()
        raise

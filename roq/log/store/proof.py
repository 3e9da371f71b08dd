"""Is this disk as new as it was? ZooKeeper is told from time to time which batch of the journal is durable here.

A disk that went back in time, an old image of it or one that forgot what it had synced, still has its cookie and all its
openings, and would call absent what it acknowledged. The number of its last batch shows it: it is lower than the one ZooKeeper
knows. Such a disk is believed in what it holds, and in nothing it does not hold (`Storage.prove`).

Until ZooKeeper has answered, absence is not sure; that matters in a take-over only, which needs ZooKeeper anyway. Entries are
taken before that if the disk was proved in this boot of the machine already: images are put back while the machine is down. A
disk that goes back by less than TELL_SECONDS is not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from roq.coordination import paths
from roq.coordination.errors import NoNode, VersionConflict
from roq.coordination.session import Session
from roq.errors import StorageFailed, ZooKeeperUnavailable
from roq.log.store.cookie import Cookie, register
from roq.log.store.storage import SegmentStorage
from roq.runtime.observe import logger
from roq.wire.assignment import to_json

log = logger(__name__)
TELL_SECONDS = 10.0
RETRY_SECONDS = 1.0  # while ZooKeeper can't be reached, or somebody else changed the node
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FILE = "proved"  # in the store's directory: the boot in which it was proved last; it may be lost


def proved_in_this_boot(directory: Path) -> bool:
    """Was this disk proved since the machine was started?"""
    try:
        return (directory / FILE).read_bytes() == BOOT_ID.read_bytes()
    except FileNotFoundError:
        return False


async def prove(zookeeper: str, directory: Path, cookie: Cookie, storage: SegmentStorage, changed: Callable[[], None]) -> None:
    """For ever: prove the disk, then tell ZooKeeper what is durable on it. changed: there is something to write.

    Raises InvalidConfiguration (the disk of another host), StorageFailed (the disk went back under this process)."""
    while True:
        try:
            session = await Session.connect(zookeeper)
            try:
                await _prove(session, directory, cookie, storage, changed)
            finally:
                await session.close()
        except (ZooKeeperUnavailable, VersionConflict, NoNode) as error:
            log.info("durable position could not be written to ZooKeeper", extra={"fields": {"reason": str(error)}})
            await asyncio.sleep(RETRY_SECONDS)


async def _prove(
    session: Session, directory: Path, cookie: Cookie, storage: SegmentStorage, changed: Callable[[], None]
) -> None:
    known, version = await register(session, directory, cookie.host, cookie)
    if storage.proved and known.synced > storage.synced:
        raise StorageFailed(
            f"{directory} had batch {known.synced} once and has {storage.synced} now: it went back, or is used twice"
        )
    if storage.prove(known.synced):
        _note(directory)
    changed()
    while True:
        if storage.synced > known.synced:
            known = msgspec.structs.replace(known, synced=storage.synced)
            version = await session.set(paths.store_cookie(cookie.host), to_json(known), version)
        await asyncio.sleep(TELL_SECONDS)


def _note(directory: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk: next time it waits for ZooKeeper
        (directory / FILE).write_bytes(BOOT_ID.read_bytes())

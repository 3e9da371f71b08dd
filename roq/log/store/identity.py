"""Whose disk is this, and is it as new as it was?

{host, uuid} is on the disk and in ZooKeeper, so that a lost, swapped or emptied disk is noticed. From time to time ZooKeeper is
also given the number of a batch of the journal that is durable here. A disk that went back in time, an old image of it or one
that forgot what it had synced, still has its cookie and all its openings, and would call absent what it acknowledged; but the
number of its last batch is lower than the one ZooKeeper knows. Such a disk is believed in what it holds, and in nothing it does
not hold (`SegmentStorage.prove`).

Until ZooKeeper has answered, absence is not sure; that matters in a take-over only, which needs ZooKeeper anyway. Entries are
taken before that if the disk was proved in this boot of the machine already: images are put back while the machine is down. A
disk that goes back by less than WRITE_SECONDS is not noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from roq.coordination import paths
from roq.coordination.link import NodeExists, NoNode, VersionConflict
from roq.coordination.session import Session
from roq.errors import InvalidConfiguration, StorageFailed, ZooKeeperUnavailable
from roq.log.store.storage import SegmentStorage
from roq.runtime.files import DISK, TEMPORARY
from roq.runtime.observe import logger
from roq.wire.assignment import from_json, to_json

log = logger(__name__)
COOKIE = "cookie"  # files in the store's directory
PROVED = "proved"  # the boot in which it was proved last; it may be lost
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
WRITE_SECONDS = 10.0  # between two writes of what is durable
RETRY_SECONDS = 1.0  # while ZooKeeper can't be reached, or somebody else changed the node


class Cookie(msgspec.Struct, frozen=True):
    """JSON of the file and of the znode. synced: in ZooKeeper, a batch of the journal that was durable on this disk."""

    host: str
    uuid: str
    synced: int = 0


def read_cookie(directory: Path, host: str) -> Cookie | None:
    """The disk's cookie, None if it is empty. Raises InvalidConfiguration if it is another host's, or lost its cookie."""
    path = directory / COOKIE
    if not path.exists():
        if any(directory.glob("journal/journal-*")):
            raise InvalidConfiguration(f"{directory} holds a store's data but no {COOKIE} file: it is not known whose it is")
        return None
    cookie = from_json(path.read_bytes(), Cookie)
    if cookie.host != host:
        raise InvalidConfiguration(f"{directory} is the store of host {cookie.host!r}, this is host {host!r}")
    return cookie


def make_cookie(directory: Path, host: str) -> Cookie:
    """Mark an empty disk."""
    cookie = Cookie(host, uuid.uuid4().hex)
    DISK.write_file(directory / COOKIE, to_json(cookie), directory / (COOKIE + TEMPORARY))
    return cookie


async def register(session: Session, directory: Path, host: str, cookie: Cookie | None) -> tuple[Cookie, int]:
    """The cookie that disk and ZooKeeper agree on, made if both have none, and its version there. Raises InvalidConfiguration
    if they don't agree, ZooKeeperUnavailable."""
    path = paths.store_cookie(host)
    node = await session.get(path)
    if node is None:
        cookie = cookie or make_cookie(directory, host)
        await session.ensure_path(paths.host_state(host))
        try:
            return cookie, (await session.create(path, to_json(cookie))).version
        except NodeExists:
            return await register(session, directory, host, cookie)
    known = from_json(node.data, Cookie)
    if cookie is not None and cookie.uuid == known.uuid:
        return known, node.version
    what = "is empty" if cookie is None else f"has the identity {cookie.uuid}"
    raise InvalidConfiguration(
        f"the store of host {host!r} has the disk {known.uuid}, but {directory} {what}. Mount the right disk; if it is lost "
        f"for good, `roq host new-disk {host}` lets an empty one be taken, and what it held is copied from others; "
        "`roq doctor` says when that is done"
    )


async def forget(session: Session, host: str) -> None:
    """The host's disk is lost for good: the next empty one is accepted."""
    try:
        await session.delete(paths.store_cookie(host))
    except NoNode:
        return


def proved_in_this_boot(directory: Path) -> bool:
    """Was this disk proved since the machine was started?"""
    try:
        return (directory / PROVED).read_bytes() == BOOT_ID.read_bytes()
    except FileNotFoundError:
        return False


async def prove(zookeeper: str, directory: Path, cookie: Cookie, storage: SegmentStorage, changed: Callable[[], None]) -> None:
    """For ever: prove the disk, then write to ZooKeeper what is durable on it. changed: there is something to write.

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
        await asyncio.sleep(WRITE_SECONDS)


def _note(directory: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk: next time it waits for ZooKeeper
        (directory / PROVED).write_bytes(BOOT_ID.read_bytes())

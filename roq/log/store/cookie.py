"""Which disk is a host's: {host, uuid} on the disk and in ZooKeeper, so that a lost, swapped or emptied disk is seen."""

from __future__ import annotations

import uuid
from pathlib import Path

import msgspec

from roq.coordination import paths
from roq.coordination.errors import NodeExists, NoNode
from roq.coordination.session import Session
from roq.errors import InvalidConfiguration
from roq.runtime.files import DISK, TEMPORARY
from roq.wire.assignment import from_json, to_json

FILE = "cookie"


class Cookie(msgspec.Struct, frozen=True):
    """JSON of the file and of the znode. synced: in ZooKeeper, a batch of the journal that was durable on this disk."""

    host: str
    uuid: str
    synced: int = 0


def read_cookie(directory: Path, host: str) -> Cookie | None:
    """The disk's cookie, None if it is empty. Raises InvalidConfiguration if it is another host's, or lost its cookie."""
    path = directory / FILE
    if not path.exists():
        if any(directory.glob("journal/journal-*")):
            raise InvalidConfiguration(f"{directory} holds a store's data but no {FILE} file: it is not known whose it is")
        return None
    cookie = from_json(path.read_bytes(), Cookie)
    if cookie.host != host:
        raise InvalidConfiguration(f"{directory} is the store of host {cookie.host!r}, this is host {host!r}")
    return cookie


def make_cookie(directory: Path, host: str) -> Cookie:
    """Mark an empty disk."""
    cookie = Cookie(host, uuid.uuid4().hex)
    DISK.write_file(directory / FILE, to_json(cookie), directory / (FILE + TEMPORARY))
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
        f"for good, remove the node {session.address.chroot}/{path} from ZooKeeper, and what it held is copied from others; "
        "`roq doctor` says when that is done"
    )


async def forget(session: Session, host: str) -> None:
    """The host's disk is lost for good: the next empty one is accepted."""
    try:
        await session.delete(paths.store_cookie(host))
    except NoNode:
        return

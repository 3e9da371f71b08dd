"""Where shuffles are: an address becomes an open service.

    file:///data/shuffles                  a folder, for the processes of one machine; no server
    roq://zk1:2181,zk2:2181/RoQ            a cluster; the chroot may be left out

A path is percent-decoded; relative ones and host parts are refused: two programs would mean different folders by them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from roq.errors import InvalidAddress
from roq.shuffle.folder import FolderService
from roq.shuffle.service import Shuffles

EXAMPLES = "file:///data/shuffles · roq://zk1:2181,zk2:2181"
PORT_MAX = 65535


class ShuffleAddress(NamedTuple):
    """An address in parts. where: the folder, or ZooKeeper's addresses as `roq.connect` takes them."""

    scheme: str
    where: str


def parse(address: str) -> ShuffleAddress:
    """The parts of an address. Raises InvalidAddress."""
    if not isinstance(address, str):
        raise InvalidAddress(f"an address is a string, got {type(address).__name__}")
    scheme, slashes, rest = address.partition("://")
    if not slashes or scheme not in ("file", "roq"):
        guess = f" Is file://{quote(address)} meant?" if address.startswith("/") else ""
        raise InvalidAddress(f"{address!r} is not the address of shuffles.{guess} Addresses look like {EXAMPLES}")
    return ShuffleAddress(scheme, _folder(address, rest) if scheme == "file" else _zookeeper(address, rest))


def open(address: str) -> Shuffles:
    """The shuffles of an address. Raises InvalidAddress; a cluster: Unavailable."""
    scheme, where = parse(address)
    if scheme == "file":
        return Shuffles(FolderService(Path(where)))
    cluster = import_module("roq.shuffle.cluster")  # with its network code, which a folder does not need
    return Shuffles(cluster.ClusterService(where))


def _folder(address: str, path: str) -> str:
    if not path.startswith("/"):
        raise InvalidAddress(f"{address!r}: the folder is written from the root, with three slashes: file:///data/shuffles")
    if "?" in path or "#" in path:
        raise InvalidAddress(f"{address!r}: '?' and '#' in a folder's name are written %3F and %23")
    folder = unquote(path)
    if "\0" in folder or not folder.strip("/"):
        raise InvalidAddress(f"{address!r} names no folder of its own")
    return folder


def _zookeeper(address: str, rest: str) -> str:
    for host in rest.partition("/")[0].split(","):
        name, colon, port = host.rpartition(":")
        name, port = (name, port) if colon else (host, "2181")
        if not name or not (port.isdigit() and 0 < int(port) <= PORT_MAX):
            raise InvalidAddress(f"{address!r}: {host!r} is not the host:port of a ZooKeeper")
    return rest

"""The ZooKeeper address people type: "zk1:2181,zk2:2181[/chroot]"."""

from __future__ import annotations

from typing import NamedTuple

from roq.errors import InvalidConfiguration

DEFAULT_CHROOT = "/RoQ"
DEFAULT_PORT = 2181
PORT_MAX = 65535


class ZooKeeperAddress(NamedTuple):
    """hosts: "host:port,host:port"; chroot: "/RoQ" or deeper, "" for ZooKeeper's own root."""

    hosts: str
    chroot: str

    def __str__(self) -> str:
        return self.hosts + (self.chroot or "/")


def parse_address(text: str) -> ZooKeeperAddress:
    """The address in `text`; without a chroot it is /RoQ, a lone "/" means ZooKeeper's root. Raises InvalidConfiguration."""
    hosts, slash, rest = text.strip().partition("/")
    chroot = "/" + rest.strip("/") if rest.strip("/") else "" if slash else DEFAULT_CHROOT
    if "//" in chroot or any(part in (".", "..") for part in chroot.split("/")):
        raise InvalidConfiguration(f"ZooKeeper address {text!r}: {chroot!r} is not a chroot")
    return ZooKeeperAddress(",".join(_host_port(part.strip(), text) for part in hosts.split(",")), chroot)


def _host_port(part: str, text: str) -> str:
    if part.startswith("["):  # IPv6
        host, _, port = part.partition("]")
        host, port = host + "]", port.removeprefix(":")
    else:
        host, _, port = part.partition(":")
    port = port or str(DEFAULT_PORT)
    if (
        not host
        or host == "[]"
        or any(blank in host for blank in " \t@?#")
        or not port.isdecimal()
        or not 0 < int(port) <= PORT_MAX
    ):
        raise InvalidConfiguration(
            f'ZooKeeper address {text!r}: {part!r} is not host:port (write "zk1:2181,zk2:2181[/chroot]")'
        )
    return f"{host}:{port}"

"""Where a work queue is: an address becomes an open backend. And what may be asked of it as it is opened, in the address behind
`?` or as arguments: one table for both.

    memory:                                a queue of this opening alone, gone with it
    memory:name                            shared by everything in this process, as long as the process lives
    file:///data/tasks                     a folder: no server, also on a network file system, open to python-task-queue
    log:///data/tasks                      a folder of one machine: fast and strict, any number of its processes
    roq://zk1:2181,zk2:2181/name           a replicated queue of a RoQ cluster; before the name its chroot, if it has one
    roq://zk1:2181,zk2:2181/queue@group    a group of a recorded queue
    …?max_attempts=5&write_quorum=3        any of them with options (see Options)

A path is percent-decoded; relative ones and host parts are refused: two programs would mean different folders by them.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote

import msgspec

from roq.errors import InvalidAddress, InvalidConfiguration
from roq.ids import GROUP_MARK, check_name
from roq.wire.work_queue import INLINE_BYTES_MAX, QUORUM_MAX, STANDBYS_MAX, TaskSettings
from roq.workqueue.contract import Asked, Backend

ANY = ("memory", "file", "log", "roq")
CLUSTER = ("roq",)
WHOLE_MAX = 2**53  # of whole numbers without a limit of their own
SECONDS_MAX = 10 * 365 * 86_400.0
ACK_SYNC_SECONDS_MAX = 60.0  # more would be no promise at all


class _Kind(NamedTuple):
    """schemes: of the addresses that have it."""

    number: type[int] | type[float]
    least: float
    most: float
    schemes: tuple[str, ...]


KINDS = {
    "max_attempts": _Kind(int, 0, WHOLE_MAX, ANY),
    "dedup_seconds": _Kind(float, 0, SECONDS_MAX, ANY),
    "payload_bytes_max": _Kind(int, 1, WHOLE_MAX, ANY),
    "write_quorum": _Kind(int, 1, QUORUM_MAX, CLUSTER),
    "ack_quorum": _Kind(int, 1, QUORUM_MAX, CLUSTER),
    "standbys": _Kind(int, 0, STANDBYS_MAX, CLUSTER),
    "inline_bytes": _Kind(int, 1, INLINE_BYTES_MAX, CLUSTER),
    "patience_seconds": _Kind(float, 0.001, SECONDS_MAX, CLUSTER),
    "ack_sync_seconds": _Kind(float, 0, ACK_SYNC_SECONDS_MAX, ("file",)),
}


class Options(msgspec.Struct, frozen=True):
    """None: not asked for. A new queue gets the default then, and an existing one is taken as it is.

    Kept with the queue: all but the last two. Of this opening: patience_seconds, ack_sync_seconds.
    """

    max_attempts: int | None = None
    dedup_seconds: float | None = None
    payload_bytes_max: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    standbys: int | None = None
    inline_bytes: int | None = None
    patience_seconds: float | None = None
    ack_sync_seconds: float | None = None

    def given(self) -> dict[str, float]:
        """Those that were asked for."""
        return {name: value for name in KINDS if (value := getattr(self, name)) is not None}

    def checked(self) -> Options:
        """The same, if each value is one the option can have. Raises InvalidConfiguration."""
        for name, value in self.given().items():
            _check(name, value)
        if self.write_quorum is not None and (self.ack_quorum or 0) > self.write_quorum:
            raise InvalidConfiguration(
                f"ack_quorum is at most write_quorum: {self.ack_quorum} stores can't acknowledge what {self.write_quorum} keep"
            )
        return self

    def of(self, scheme: str) -> Options:
        """The same, if these addresses have them all. Raises InvalidConfiguration."""
        for name in self.given():
            if scheme not in KINDS[name].schemes:
                owners = " and ".join(f"{one}:" for one in KINDS[name].schemes)
                raise InvalidConfiguration(f"{name} is an option of {owners} addresses; this one is {scheme}:")
        return self

    def joined(self, other: Options) -> Options:
        """What both ask for. Raises InvalidConfiguration where they contradict each other."""
        mine, its = self.given(), other.given()
        for name in mine.keys() & its.keys():
            if mine[name] != its[name]:
                raise InvalidConfiguration(f"{name} is {its[name]} in the address, but {mine[name]} is asked for beside it")
        return msgspec.convert({**mine, **its}, Options).checked()

    def settings(self) -> Asked:
        """Of what every queue keeps."""
        return {name: value for name, value in self.given().items() if name in TaskSettings.__struct_fields__}


def from_query(query: str) -> Options:
    """The options of an address, as they stand behind its `?`. Raises InvalidConfiguration."""
    values: dict[str, float] = {}
    for part in query.split("&"):
        name, equals, text = part.partition("=")
        if name not in KINDS or not equals:
            raise InvalidConfiguration(
                f"{part!r} is no option; options are {', '.join(f'{name}=' for name in KINDS)}; '?' in a name is %3F"
            )
        if name in values:
            raise InvalidConfiguration(f"{name} is given twice")
        values[name] = _number(name, unquote(text))
    return msgspec.convert(values, Options).checked()


def _number(name: str, text: str) -> float:
    try:
        return KINDS[name].number(text)
    except ValueError:
        raise InvalidConfiguration(f"{name} is {_range(name)}, got {text!r}") from None


def _check(name: str, value: object) -> None:
    kind = KINDS[name]
    right = isinstance(value, int) if kind.number is int else isinstance(value, int | float)
    if not right or isinstance(value, bool) or not kind.least <= value <= kind.most:  # type: ignore[operator]
        raise InvalidConfiguration(f"{name} is {_range(name)}, got {value!r}")


def _range(name: str) -> str:
    kind = KINDS[name]
    what = "a whole number" if kind.number is int else "a number"
    return (
        f"{what}, at least {kind.least:g}"
        if kind.most in (WHOLE_MAX, SECONDS_MAX)
        else (f"{what} from {kind.least:g} to {math.floor(kind.most)}")
    )


# --- addresses ------------------------------------------------------------------------------------------------------

# Imported when one is opened: all four together would make `import roq` a third slower, for every program and command.
BACKENDS = {
    "memory": ("roq.workqueue.memory", "open_memory"),
    "file": ("roq.workqueue.file_queue.queue", "FileQueue"),
    "log": ("roq.workqueue.log_queue", "LogQueue"),
    "roq": ("roq.workqueue.remote", "RemoteQueue"),
}
SCHEMES = tuple(BACKENDS)
EXAMPLES = "memory: · file:///data/tasks · log:///data/tasks · roq://zk1:2181,zk2:2181/name"


class QueueAddress(NamedTuple):
    """An address in parts. path: the folder (file, log) or the name (memory: "" for a private one; roq).
    zookeeper: what `roq.connect` takes (roq). options: behind the `?`."""

    scheme: str
    path: str
    zookeeper: str = ""
    options: Options = Options()


def parse(address: str) -> QueueAddress:
    """The parts of an address. Raises InvalidAddress, or InvalidConfiguration for an option."""
    if not isinstance(address, str):
        raise InvalidAddress(f"an address is a string, got {type(address).__name__}")
    where, marked, query = address.partition("?")
    scheme, colon, rest = where.partition(":")
    if not colon or scheme not in SCHEMES:
        guess = f"; is {folder_address(address)} meant?" if address.startswith(("/", "./", "../", "~")) else "."
        raise InvalidAddress(f"{address!r} is not the address of a work queue{guess} Addresses look like {EXAMPLES}")
    if scheme == "memory":
        place = _memory(address, rest)
    elif not rest.startswith("//"):
        raise InvalidAddress(f"{address!r}: after {scheme}: come two slashes. Addresses look like {EXAMPLES}")
    else:
        place = _cluster(address, rest[2:]) if scheme == "roq" else _folder(address, scheme, rest[2:])
    return place._replace(options=from_query(query).of(scheme)) if marked else place


def folder_address(path: str) -> str:
    """`file:///…` of a plain absolute path."""
    return "file://" + quote(path) if path.startswith("/") else "file:///absolute/path"


def _memory(address: str, name: str) -> QueueAddress:
    if name.startswith("/"):
        raise InvalidAddress(f"{address!r}: memory: stands alone, or is followed by a name without slashes")
    return QueueAddress("memory", check_name(name, "work queue") if name else "")


def _folder(address: str, scheme: str, path: str) -> QueueAddress:
    if not path.startswith("/"):
        raise InvalidAddress(f"{address!r}: the folder is written from the root, with three slashes: {scheme}:///data/tasks")
    if "#" in path:
        raise InvalidAddress(f"{address!r}: '#' in a folder's name is written %23, and '?' %3F")
    folder = unquote(path)
    if "\0" in folder or not folder.strip("/"):
        raise InvalidAddress(f"{address!r} names no folder of its own")
    return QueueAddress(scheme, folder)


def _cluster(address: str, rest: str) -> QueueAddress:
    zookeeper, slash, name = rest.rpartition("/")
    hosts = zookeeper.partition("/")[0]
    if not slash or not hosts or not name:
        raise InvalidAddress(f"{address!r}: ZooKeeper's addresses and a queue's name are needed: roq://zk1:2181,zk2:2181/name")
    for host in hosts.split(","):
        port = host.rpartition(":")[2] if ":" in host else "2181"
        if not host.rpartition(":")[0 if ":" in host else 2] or not (port.isdigit() and 0 < int(port) < 65536):
            raise InvalidAddress(f"{address!r}: {host!r} is not the host:port of a ZooKeeper")
    return QueueAddress("roq", check_name(unquote(name), "work queue"), zookeeper)


def queue_address(zookeeper: str, name: str) -> str:
    """Of a cluster's queue."""
    return f"roq://{zookeeper}/{quote(name, safe=GROUP_MARK)}"


def same_queue(one: str, other: str) -> bool:
    """Whether two addresses, are of the same queue. A folder may have several paths. A
    cluster may get other ZooKeepers, one by one: one that both name will do."""
    mine, its = parse(one), parse(other)
    if mine.scheme != its.scheme:
        return False
    if mine.scheme in ("file", "log"):
        return os.path.realpath(mine.path) == os.path.realpath(its.path)
    if mine.scheme == "memory":
        return mine.path == its.path != ""
    (hosts, chroot), (its_hosts, its_chroot) = zookeepers(mine), zookeepers(its)
    return (mine.path, chroot) == (its.path, its_chroot) and not set(hosts).isdisjoint(its_hosts)


def zookeepers(place: QueueAddress) -> tuple[list[str], str]:
    """A cluster's ZooKeepers, host:port, in order; its chroot, "" for none."""
    hosts, slash, chroot = place.zookeeper.partition("/")
    named = {host if ":" in host else f"{host}:2181" for host in hosts.lower().split(",")}
    return sorted(named), f"{slash}{chroot}".rstrip("/")


def open_backend(address: str, asked: Options | None) -> Backend:
    """Open a work queue with what is asked for, in the address or beside it; nothing: as it is, a new one with the defaults.
    Raises InvalidAddress, InvalidConfiguration, WorkQueueConflict."""
    place = parse(address)
    options = asked.of(place.scheme).joined(place.options) if asked is not None else place.options
    module, name = BACKENDS[place.scheme]
    kind, settings = getattr(import_module(module), name), options.settings()
    special: dict[str, Any] = {
        key: value for key, value in options.given().items() if key not in TaskSettings.__struct_fields__
    }
    match place.scheme:
        case "log":
            backend = kind(Path(place.path), settings)
        case "roq":
            backend = kind(place.zookeeper, place.path, settings, **special)
        case _:
            backend = kind(place.path, settings, **special)
    return cast(Backend, backend)

"""Where a work queue is: an address becomes an open backend. And what may be asked of it as it is opened, in the address behind
`?` or as arguments: one table for both.

    memory:                                a queue of this opening alone, gone with it
    memory:name                            shared by everything in this process, as long as the process lives
    file:///data/tasks                     a folder: no server, also on a network file system, open to python-task-queue
    log:///data/tasks                      a folder of one machine: fast and strict, any number of its processes
    roq://zk1:2181,zk2:2181/name           a replicated queue of a RoQ cluster; before the name its chroot, if it has one
    roq://zk1:2181,zk2:2181/queue@group    a group of a recorded queue
    postgresql://user@host/database?queue=name
                                           over a log in a database: several hosts, no daemon of RoQ
    jetstream://host1:4222,host2:4222/name over a stream of NATS JetStream: the same
    …?max_attempts=5&write_quorum=3        any of them with options (see Options)

A path is percent-decoded; relative ones and host parts are refused: two programs would mean different folders by them. Of a
server's address, what is no option of ours is the driver's (LOGS). No message shows the password that one may have.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote

import msgspec

from roq.errors import InvalidAddress, InvalidConfiguration
from roq.ids import GROUP_MARK, check_name
from roq.log.contract import SharedLog
from roq.runtime.installation import brought_by
from roq.wire.shards import SHARDS_MAX
from roq.wire.work_queue import INLINE_BYTES_MAX, QUORUM_MAX, STANDBYS_MAX, TaskSettings
from roq.workqueue.contract import Asked, Backend

ANY = ("memory", "file", "log", "roq", "postgresql", "jetstream")
CLUSTER = ("roq",)
NETWORK = ("roq", "postgresql", "jetstream")
WHOLE_MAX = 2**53  # of whole numbers without a limit of their own
SECONDS_MAX = 10 * 365 * 86_400.0
ACK_SYNC_SECONDS_MAX = 60.0  # more would be no promise at all
TRUTH = {"true": True, "false": False}


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
    "patience_seconds": _Kind(float, 0.001, SECONDS_MAX, NETWORK),
    "ack_sync_seconds": _Kind(float, 0, ACK_SYNC_SECONDS_MAX, ("file",)),
    "trust_functions": _Kind(bool, 0, 1, ("file",)),
    "shards": _Kind(int, 1, SHARDS_MAX, CLUSTER),
}


class Options(msgspec.Struct, frozen=True):
    """None: not asked for. A new queue gets the default then, and an existing one is taken as it is.

    Kept with the queue: all but three. Of this opening: patience_seconds, ack_sync_seconds, trust_functions. shards: of a new
    one; an existing one is taken with those it has.
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
    trust_functions: bool | None = None
    shards: int | None = None

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
                f"{name!r} is no option; options are {', '.join(f'{name}=' for name in KINDS)}; '?' in a name is %3F"
            )
        if name in values:
            raise InvalidConfiguration(f"{name} is given twice")
        values[name] = _number(name, unquote(text))
    return msgspec.convert(values, Options).checked()


def _number(name: str, text: str) -> float:
    try:
        return TRUTH[text] if KINDS[name].number is bool else KINDS[name].number(text)
    except (ValueError, KeyError):
        raise InvalidConfiguration(f"{name} is {_range(name)}, got {text!r}") from None


def _check(name: str, value: object) -> None:
    kind = KINDS[name]
    kinds = bool if kind.number is bool else int if kind.number is int else int | float
    right = isinstance(value, kinds) and isinstance(value, bool) is (kind.number is bool)
    if not right or not kind.least <= value <= kind.most:  # type: ignore[operator]
        raise InvalidConfiguration(f"{name} is {_range(name)}, got {value!r}")


def _range(name: str) -> str:
    kind = KINDS[name]
    if kind.number is bool:
        return "true or false"
    what = "a whole number" if kind.number is int else "a number"
    return (
        f"{what}, at least {kind.least:g}"
        if kind.most in (WHOLE_MAX, SECONDS_MAX)
        else (f"{what} from {kind.least:g} to {math.floor(kind.most)}")
    )


# --- addresses ------------------------------------------------------------------------------------------------------

# Imported when one is opened: all together would make `import roq` a third slower, for every program and command.
BACKENDS = {
    "memory": ("roq.workqueue.memory", "open_memory"),
    "file": ("roq.workqueue.file_queue.queue", "FileQueue"),
    "log": ("roq.workqueue.log_queue", "LogQueue"),
    "roq": ("roq.workqueue.sharded", "ShardedQueue"),
    "postgresql": ("roq.workqueue.shared_queue", "SharedQueue"),
    "jetstream": ("roq.workqueue.shared_queue", "SharedQueue"),
}
SCHEMES = tuple(BACKENDS)


class _Log(NamedTuple):
    """A kind of server that keeps logs. parameters: of its driver, that may stand behind the `?` as well."""

    module: str
    kind: str
    parameters: tuple[str, ...]


LOGS = {
    "postgresql": _Log(
        "roq.log.postgresql",
        "PostgresLog",
        ("sslmode", "sslrootcert", "sslcert", "sslkey", "channel_binding", "passfile", "host", "target_session_attrs"),
    ),
    "jetstream": _Log("roq.log.jetstream", "JetStreamLog", ("replicas", "credentials", "tls")),
}
EXAMPLES = (
    "memory: · file:///data/tasks · log:///data/tasks · roq://zk1:2181,zk2:2181/name · "
    "postgresql://user@host/database?queue=name · jetstream://host:4222/name"
)
_PASSWORD = re.compile(r"^([\w+]+:/*[^/@?:]*):.*@")  # greedy: it may have a slash that should have been written %2F
_TOKEN = re.compile(r"^(jetstream:/*)[^:@]+@")  # of who comes without a password: as secret as one
_NO_USERS = ("memory:", "file:", "log:", "roq:")


class QueueAddress(NamedTuple):
    """An address in parts. path: the folder (file, log) or the name (memory: "" for a private one; the others).
    zookeeper: what `roq.connect` takes (roq). options: behind the `?`. server: what its driver takes (postgresql, jetstream),
    maybe with a password; place: the same for people, without."""

    scheme: str
    path: str
    zookeeper: str = ""
    options: Options = Options()
    server: str = ""
    place: str = ""


def without_password(address: str) -> str:
    """An address as it may be shown."""
    if not isinstance(address, str) or address.startswith(_NO_USERS):
        return address
    return _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1:***@", address))


def parse(address: str) -> QueueAddress:
    """The parts of an address. Raises InvalidAddress, or InvalidConfiguration for an option."""
    if not isinstance(address, str):
        raise InvalidAddress(f"an address is a string, got {type(address).__name__}")
    where, marked, query = address.partition("?")
    scheme, colon, rest = where.partition(":")
    address = without_password(address)  # for messages
    if not colon or scheme not in SCHEMES:
        guess = f"; is {folder_address(address)} meant?" if address.startswith(("/", "./", "../", "~")) else "."
        raise InvalidAddress(f"{address!r} is not the address of a work queue{guess} Addresses look like {EXAMPLES}")
    if scheme == "memory":
        place = _memory(address, rest)
    elif not rest.startswith("//"):
        raise InvalidAddress(f"{address!r}: after {scheme}: come two slashes. Addresses look like {EXAMPLES}")
    elif scheme in LOGS:
        place, query = _server(address, scheme, rest[2:], query)
        return place._replace(options=from_query(query).of(scheme)) if query else place
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


def _server(address: str, scheme: str, rest: str, query: str) -> tuple[QueueAddress, str]:
    """Of a log on a server; and what of the query is ours."""
    parts = [part for part in query.split("&") if part]
    driver = [part for part in parts if part.partition("=")[0] in LOGS[scheme].parameters]
    names = [part.partition("=")[2] for part in parts if part.startswith("queue=")] if scheme == "postgresql" else []
    ours = [part for part in parts if part not in driver and not (names and part.startswith("queue="))]
    if any(part.startswith("password=") for part in parts):
        raise InvalidConfiguration("a password stands before the host, user:password@host, or where the driver looks for one")
    hosts, _, path = rest.partition("/")
    if "@" in path or any("@" in part.partition("=")[0] for part in parts):  # what is before it may be half a password
        raise InvalidAddress(f"{address!r}: in user, password and name, '/' is written %2F, '?' %3F, '@' %40")
    if scheme == "postgresql":
        if len(names) != 1 or not path or "/" in path:
            raise InvalidAddress(f"{address!r}: a database and a queue are needed: postgresql://user@host/database?queue=name")
        name, base = names[0], f"postgresql://{hosts}/{path}"
    else:
        if not hosts.rpartition("@")[2] or not path:
            raise InvalidAddress(f"{address!r}: a server and a queue's name are needed: jetstream://host1:4222,host2:4222/name")
        name, base = path, f"jetstream://{hosts}"
    for port in re.findall(r":([^:,\]]*)(?=,|$)", hosts.rpartition("@")[2]):
        if not (port.isdigit() and 0 < int(port) < 65536):
            raise InvalidAddress(f"{address!r}: {port!r} is not a port")
    server = base + ("?" + "&".join(driver) if driver else "")
    named = check_name(unquote(name), "work queue")
    return QueueAddress(scheme, named, server=server, place=without_password(base)), "&".join(ours)


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
    if mine.scheme in LOGS:
        (here, database), (there, its_database) = _servers(mine), _servers(its)
        return (mine.path, database) == (its.path, its_database) and not here.isdisjoint(there)
    (hosts, chroot), (its_hosts, its_chroot) = zookeepers(mine), zookeepers(its)
    return (mine.path, chroot) == (its.path, its_chroot) and not set(hosts).isdisjoint(its_hosts)


def _servers(place: QueueAddress) -> tuple[set[str], str]:
    """Hosts, whoever comes as which user; the database."""
    hosts, _, database = place.place.partition("//")[2].rpartition("@")[2].partition("/")
    port = {"postgresql": "5432", "jetstream": "4222"}[place.scheme]
    return {host if re.search(r":\d+$", host) else f"{host}:{port}" for host in hosts.lower().split(",")}, database


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
        case "postgresql" | "jetstream":
            log: Callable[[str, str, str], SharedLog] = getattr(_driver(place.scheme), LOGS[place.scheme].kind)
            backend = kind(lambda: log(place.server, place.path, place.place), settings, **special)
        case _:
            backend = kind(place.path, settings, **special)
    return cast(Backend, backend)


def log_exists(place: QueueAddress) -> bool:
    """Whether its server has this queue's log. Raises InvalidAddress, AccessDenied, LogUnavailable."""
    return bool(_driver(place.scheme).log_exists(place.server, place.path, place.place))


def _driver(scheme: str) -> Any:
    """The module of this kind of log. Raises InvalidConfiguration: the package it stands on is missing."""
    try:
        with brought_by(scheme, f"an address of {scheme}:"):
            return import_module(LOGS[scheme].module)
    except ModuleNotFoundError as error:
        raise InvalidConfiguration(str(error)) from error

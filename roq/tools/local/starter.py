"""Who started the local cluster of a directory, and which local clusters there are on this machine.

    <directory>/cluster.lock    held (flock) by the starter as long as it lives; holds a Record, as JSON

A starter is known by its pid *and* start time, which every process of its cluster carries (leftovers.py), and by being the
parent of one of them, of the same user: no other process is ever taken for it, whatever marks somebody writes, and a directory
that was removed hides nothing.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from roq.errors import CallError
from roq.runtime.liveness import parent, start_time
from roq.tools.local import leftovers
from roq.tools.local.leftovers import Leftover, Origin

LOCK = "cluster.lock"
MODE = 0o666  # less the umask
RECORD_BYTES_MAX = 64 * 1024
ZOOKEEPER = "zookeeper"  # what the marks call it
STOP_SECONDS = 30.0  # a starter stops hosts, GCMs and ZooKeeper within bounds of its own


class StarterRecord(msgspec.Struct, frozen=True):
    """token: the mark of its processes; zookeeper: the cluster's address, once it is known."""

    token: str
    zookeeper: str = ""


def origin(directory: Path, command: str) -> Origin:
    """Of a cluster that this process starts. command: what people call it."""
    return Origin(str(directory.resolve()), os.getpid(), start_time(os.getpid()) or 0, command)


def read(directory: Path) -> StarterRecord | None:
    """What the directory says; None if it never had a cluster."""
    try:
        with os.fdopen(_open(directory / LOCK, os.O_RDONLY), "rb") as file:
            text = file.read(RECORD_BYTES_MAX).decode().strip()
    except (OSError, ValueError, CallError):  # none, no text, no name of a directory, or no file
        return None
    if not text.startswith("{"):  # as RoQ 0.1 wrote it
        return StarterRecord(text) if text else None
    try:
        return msgspec.json.decode(text, type=StarterRecord)
    except msgspec.MsgspecError:
        return None


def _open(path: Path, flags: int) -> int:
    """Anybody may have put something else in its place: it is not waited for. Raises OSError; CallError: it is no file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, MODE)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise CallError(f"{path} is no file: remove it or take another directory")


class Claim:
    """The directory is ours until close(). Raises CallError if another cluster runs there, or it can't be had."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = os.fdopen(_open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a")
        except OSError as error:
            raise CallError(f"can't have the directory {directory}: {error.strerror}: {error.filename}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise CallError(f"another local cluster runs in {directory}: stop it or take another directory") from None

    def write(self, record: StarterRecord) -> None:
        """This cluster is the directory's from now on."""
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(record).decode())
        self._file.flush()

    def close(self) -> None:
        """Give the directory free."""
        self._file.close()


class FoundCluster(NamedTuple):
    """A local cluster of which something runs. address: what `--cluster` takes, "" if nobody knows; orphan: whoever started it
    is dead; user: id of whoever its processes belong to."""

    origin: Origin
    token: str
    address: str
    orphan: bool
    user: int


def clusters() -> list[FoundCluster]:
    """The local clusters of this user on this machine (of all users, for root), by directory."""
    found = []
    for (token, user), here in leftovers.origins().items():
        left = leftovers.find(token, user)
        orphan = start_time(here.pid) != here.started
        if left and (orphan or _started(here.pid, user, left)):  # it may have stopped meanwhile
            record = read(Path(here.directory))
            address = record.zookeeper if record is not None and record.token == token else ""
            found.append(FoundCluster(here, token, address, orphan, user))
    return sorted(found)


def _started(pid: int, user: int, left: Sequence[Leftover]) -> bool:
    """Whether this is the starter that these processes name: it is their user's, and one of them is its child."""
    return leftovers.user_of(pid) == user and any(parent(one.pid) == pid for one in left)


def with_zookeeper_at(server: str) -> FoundCluster | None:
    """The local cluster that runs a ZooKeeper of its own at this host:port; None if there is none."""
    there = (one for one in clusters() if one.address.partition("/")[0] == server)
    return next((one for one in there if any(left.owner == ZOOKEEPER for left in leftovers.find(one.token, one.user))), None)


def stop(found: FoundCluster) -> list[Leftover]:
    """Have the starter stop its cluster, end by force what it leaves; what was ended so. Of an orphan that is everything."""
    _stop_starter(found.origin, found.user)
    return leftovers.end(found.token, found.user)


def _stop_starter(here: Origin, user: int) -> None:
    try:
        descriptor = os.pidfd_open(here.pid)
    except ProcessLookupError:
        return
    try:
        # read after the pidfd was opened: this pid, this life
        if start_time(here.pid) != here.started or leftovers.user_of(here.pid) != user:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(descriptor, number)
            if select.select([descriptor], [], [], STOP_SECONDS)[0]:
                return
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)

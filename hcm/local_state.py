"""What an HCM must remember over its own death, in one JSON file of its state directory: the highest epoch it obeyed, and of
each child its specification, ports, slot, pid and start time. Whoever holds the directory's lock owns it.

    <state-dir>/lock          held (flock) by the one HCM of this directory
    <state-dir>/state.json    LocalState, replaced atomically and synced
    <state-dir>/heartbeats    the HeartbeatBoard
    <state-dir>/access        the cluster's access list
    <state-dir>/logs/         one log per child
    <state-dir>/store/        the store's data
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from roq.errors import CallError, InvalidConfiguration
from roq.runtime.files import DISK, FULL, TEMPORARY
from roq.runtime.liveness import SLOTS
from roq.runtime.observe import logger
from roq.wire.assignment import Assignment, Leaving, ProcessSpec

log = logger(__name__)

FULL_RETRY_SECONDS = 1.0  # on a full disk
LAST_SAVE_SECONDS = 5.0  # of an HCM that leaves
FILE_NAME_BYTES_MAX = 200  # file systems allow 255; a suffix must still fit
LOGS_KEPT = 200  # of processes that are no more
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ChildRecord(msgspec.Struct):
    """One child. pid 0: not forked, or not written yet; started: clock ticks since boot, which with the pid names one life."""

    spec: ProcessSpec
    ports: dict[str, int]
    slot: int
    pid: int = 0
    started: int = 0
    served: bool = False  # was ready on these ports once: from then on they are fixed
    stale: bool = False  # it runs with an older specification than `spec`


class LocalState(msgspec.Struct):
    """The file's content. next_port: where the search for free ports goes on (0: at the beginning); sessions: newest
    ZooKeeper sessions of this host, by which a restarted HCM knows its own registration."""

    host: str
    boot: str = ""
    sessions: list[int] = msgspec.field(default_factory=list)
    epoch: int = 0
    revision: int = 0
    draining: bool = False
    leaving: bool = False  # what the store keeps goes elsewhere, as the GCM wants
    next_port: int = 0
    card: str = ""  # id of the host's, with which the children were started; with a + behind it in a mixed cluster
    children: dict[str, ChildRecord] = msgspec.field(default_factory=dict)

    def take(self, assignment: Assignment) -> None:
        """What the host says of the assignment that it obeys now."""
        self.epoch, self.revision = assignment.epoch, assignment.revision
        self.leaving = assignment.leaving is Leaving.EVERYTHING

    def free_slot(self) -> int:
        """A heartbeat slot no child has. Raises CallError when the board is full."""
        used = {record.slot for record in self.children.values()}
        for slot in range(SLOTS):
            if slot not in used:
                return slot
        raise CallError(f"this host has {SLOTS} processes: no heartbeat slot is left")

    def ports_in_use(self) -> set[int]:
        """Every port promised to a child."""
        return {port for record in self.children.values() for port in record.ports.values()}


class StateDirectory:
    """The directory with its lock, and the state in it. Raises CallError if another HCM holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(PermissionError):  # somebody else has made it for us
            path.chmod(0o700)
        self.logs.mkdir(exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CallError(f"another HCM runs with the state directory {path}") from None
        self._writing = asyncio.Lock()

    @property
    def logs(self) -> Path:
        """Folder of the children's logs."""
        return self.path / "logs"

    @property
    def store(self) -> Path:
        """Folder of the store's data; the store makes it."""
        return self.path / "store"

    @property
    def access(self) -> Path:
        """The cluster's access list as it was told last."""
        return self.path / "access"

    @property
    def board(self) -> Path:
        """The heartbeat board."""
        return self.path / "heartbeats"

    def log_of(self, name: str) -> Path:
        """Log of the process of this name."""
        file = name.replace("/", "_")
        encoded = file.encode()
        if len(encoded) > FILE_NAME_BYTES_MAX:
            digest = hashlib.sha256(encoded).hexdigest()[:16]
            file = encoded[: FILE_NAME_BYTES_MAX - 17].decode(errors="ignore") + "-" + digest
        return self.logs / f"{file}.log"

    def prune_logs(self, present: Iterable[str]) -> None:
        """Remove the oldest logs of processes that are not `present`; LOGS_KEPT of them stay for the curious."""
        kept = {self.log_of(name).name for name in present}
        former = [file for file in self.logs.iterdir() if file.name.removesuffix(".1") not in kept]
        if len(former) > LOGS_KEPT:
            for file in sorted(former, key=lambda file: file.stat().st_mtime)[:-LOGS_KEPT]:
                file.unlink(missing_ok=True)

    def load(self, host: str) -> LocalState:
        """The remembered state, a fresh one if there is none. Pids of an earlier boot are forgotten.

        Raises InvalidConfiguration for an unreadable file (processes it knew may still run) or one of another host.
        """
        boot = BOOT_ID.read_text().strip()
        file = self.path / "state.json"
        try:
            state = msgspec.json.decode(file.read_bytes(), type=LocalState)
        except FileNotFoundError:
            return LocalState(host, boot)
        except msgspec.MsgspecError as error:
            raise InvalidConfiguration(f"{file} is damaged ({error}): stop this host's RoQ processes and remove it") from None
        if state.host != host:
            raise InvalidConfiguration(f"{file} is the state of host {state.host!r}, this is {host!r}")
        if state.boot != boot:
            state.boot = boot
            for record in state.children.values():
                record.pid = record.started = 0
        return state

    async def save(self, state: LocalState) -> None:
        """Returns when a successor will find what `state` is now; on a full disk, that is when there is room again.

        After a power cut it may find the state before, whole: the processes are dead then, and ZooKeeper's own fence keeps
        a deposed GCM from writing. So the folder entry itself is not synced.
        """
        write = asyncio.ensure_future(self._write(msgspec.json.encode(state)))
        await asyncio.shield(write)  # a cancelled caller must not set the next writer free while a thread still writes

    async def save_at_last(self, state: LocalState) -> None:
        """Save, but let no full disk keep the HCM from leaving: a successor finds out which processes are dead by itself."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SAVE_SECONDS):
                await self.save(state)

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            while not await asyncio.to_thread(self._replaced, data):  # noqa: ASYNC110 - nobody tells of new room
                await asyncio.sleep(FULL_RETRY_SECONDS)

    def _replaced(self, data: bytes) -> bool:
        """False: the disk is full. What runs on this host needs not die of that."""
        try:
            self._replace(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            fields = {"path": str(self.path)}
            log.error("no room to remember what this host runs: nothing new is started", extra={"fields": fields})
            return False
        return True

    def _replace(self, data: bytes) -> None:
        temporary = self.path / f"state.json{TEMPORARY}"
        DISK.write_synced(temporary, data)
        temporary.replace(self.path / "state.json")

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

"""Which attempts of a shuffle count, as this follower was told: kept beside the shuffle's spec, and named by a digest.

    <id>/winners-<digest>      crc32 u32 · msgpack {partition: attempt}

A digest has but one meaning, so it does not matter who tells it. Nothing is promised: what is not known here (any more, as the
disk was full or the file is damaged) is told again by whoever asks. Not covered: what is asked (queries.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from struct import Struct
from zlib import crc32

import msgspec

from roq.errors import FrameError, WinnersUnknown
from roq.runtime.files import DISK
from roq.runtime.observe import logger
from roq.shuffle.committed import CommittedAttempts, joined
from roq.shuffle.node.stored import StoredShuffle, write_durably
from roq.wire.decoding import UNDECODABLE
from roq.wire.shuffle import COMMITTED_AT_ONCE, PARTITIONS_MAX, NameCommitted

log = logger(__name__)
TELLING_MAX = 8  # digests that are being told at a time
KNOWN_MAX = 300_000  # names in memory, or a single shuffle's: some 45 MiB
PARTS_MAX = -(-PARTITIONS_MAX // COMMITTED_AT_ONCE)
_crc = Struct("<I")
_decode = msgspec.msgpack.Decoder(dict[int, str]).decode
Name = tuple[str, str]  # shuffle, digest


class CommittedRegistry:
    """On the follower's loop. free_bytes_min: of the disk, below which nothing is written."""

    def __init__(self, free_bytes_min: int) -> None:
        self._free_bytes_min = free_bytes_min
        self._known: OrderedDict[Name, CommittedAttempts] = OrderedDict()
        self._telling: OrderedDict[Name, dict[int, NameCommitted]] = OrderedDict()
        self._writing = asyncio.Lock()

    async def of(self, shuffle: str, stored: StoredShuffle | None, digest: str) -> CommittedAttempts:
        """The committed attempts of this digest. Raises WinnersUnknown."""
        name = (shuffle, digest)
        if name not in self._known and stored is not None:
            found = await asyncio.to_thread(_read, stored.directory, digest)
            if found is not None and found.digest == digest:
                self._keep(name, found)
        if name not in self._known:
            raise WinnersUnknown
        self._known.move_to_end(name)
        return self._known[name]

    def _keep(self, name: Name, committed: CommittedAttempts) -> None:
        self._known[name] = committed
        while len(self._known) > 1 and sum(map(len, self._known.values())) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def told(self, part: NameCommitted) -> CommittedAttempts | None:
        """One part came; the committed attempts when all have. Raises FrameError."""
        if not 0 <= part.number < PARTS_MAX:
            raise FrameError(f"part {part.number} of the committed attempts of shuffle {part.shuffle}")
        name = (part.shuffle, part.digest)
        if name in self._known:
            return self._known[name]
        parts = self._telling.setdefault(name, {})
        self._telling.move_to_end(name)
        parts[part.number] = part
        while len(self._telling) > TELLING_MAX:
            self._telling.popitem(last=False)
        if not parts[max(parts)].last or len(parts) <= max(parts):
            return None
        self._telling.pop(name, None)
        committed = await asyncio.to_thread(joined, [parts[number].committed for number in sorted(parts)])
        if committed.digest != part.digest:
            raise FrameError(f"the committed attempts of shuffle {part.shuffle} do not match their digest")
        self._keep(name, committed)
        return committed

    async def save(self, stored: StoredShuffle, committed: CommittedAttempts) -> None:
        """Also after a new start, if the disk has room."""
        async with self._writing:
            try:
                await asyncio.to_thread(_write, stored.directory, committed, self._free_bytes_min)
            except OSError as error:  # also when the shuffle was just forgotten
                log.warning(
                    "committed attempts could not be stored", extra={"fields": {"shuffle": stored.id, "reason": str(error)}}
                )

    def forget(self, shuffle: str) -> None:
        """Nothing of it is asked any more."""
        for names in (self._known, self._telling):
            for name in [name for name in names if name[0] == shuffle]:
                del names[name]


def _path(directory: Path, digest: str) -> Path | None:
    return directory / f"winners-{digest}" if digest.isalnum() and len(digest) <= 64 else None


def _read(directory: Path, digest: str) -> CommittedAttempts | None:
    path = _path(directory, digest)
    try:
        data = path.read_bytes() if path is not None else b""
        if data[: _crc.size] != _crc.pack(crc32(data[_crc.size :])):
            return None
        return CommittedAttempts(_decode(data[_crc.size :]))
    except (OSError, *UNDECODABLE):
        return None


def _write(directory: Path, committed: CommittedAttempts, free_bytes_min: int) -> None:
    """In place of others."""
    path = _path(directory, committed.digest)
    if path is None or path.exists():
        return
    data = msgspec.msgpack.encode(committed.by)
    if DISK.free(directory) < len(data) + free_bytes_min:
        raise OSError("no space")
    write_durably(path, _crc.pack(crc32(data)) + data)
    for old in directory.glob("winners-*"):
        if old != path:
            old.unlink(missing_ok=True)

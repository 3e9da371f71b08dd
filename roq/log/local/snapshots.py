"""Snapshots of what a log's records add up to: one file each, named by the position it covers; the newest counts.

magic 8 · version u32 · crc32 of the data u32 · cookie u64 · position u64 · data
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from pathlib import Path
from zlib import crc32

from roq.errors import StorageFailed, UnknownFormat
from roq.runtime.files import Disk

RESERVE = "reserve"  # what the next one is written over (room.py)
MAGIC = b"ROQ-SNP\n"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
_NAME = re.compile(r"([0-9a-f]{16})\.snapshot")


def _path(folder: Path, position: int) -> Path:
    return folder / f"{position:016x}.snapshot"


def positions(folder: Path) -> list[int]:
    """Positions of the snapshots there are, ascending."""
    return sorted(int(match[1], 16) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))


def newest(folder: Path) -> tuple[int, int]:
    """Position and bytes of the newest one; zeros if there is none."""
    while found := positions(folder):
        with contextlib.suppress(FileNotFoundError):  # a newer one was put in place meanwhile
            return found[-1], _path(folder, found[-1]).stat().st_size
    return 0, 0


def save(folder: Path, disk: Disk, cookie: int, position: int, data: bytes) -> None:
    """Write a snapshot durably, then remove the older ones. One process at a time. Raises OSError."""
    head = _HEAD.pack(MAGIC, VERSION, crc32(data), cookie, position)
    disk.write_over(folder / RESERVE, _path(folder, position), head + data)
    for older in positions(folder):
        if older < position:
            disk.remove(_path(folder, older))


def load(folder: Path, cookie: int) -> tuple[int, bytes] | None:
    """The newest snapshot as (position, data), None if there is none. Raises StorageFailed when it is damaged."""
    while found := positions(folder):
        path = _path(folder, found[-1])
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # a newer one was put in place meanwhile
        if len(content) < _HEAD.size or content[:8] != MAGIC:
            raise StorageFailed(f"{path} is not a snapshot, or its first bytes are damaged")
        _, version, crc, found_cookie, position = _HEAD.unpack_from(content)
        if version != VERSION:
            raise UnknownFormat(f"{path} has format {version}; this program reads format {VERSION}")
        data = content[_HEAD.size :]
        if crc != crc32(data) or (found_cookie, position) != (cookie, found[-1]):
            raise StorageFailed(f"{path} is damaged; put a good copy in place")
        return position, data
    return None

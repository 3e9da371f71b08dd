"""A small file that the processes of one folder map, to share words of memory. A cache: nothing in it outlives a boot.

Every word is 8 bytes and aligned, so that a reader without a lock sees an old or a new value, never a mixture. The first five
say whose cache it is. Not here: who may write which word (header.py, board.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

MAGIC = 0x0001_474F_4C51_4F52  # "ROQLOG", version 1
WORD = 8
IDENTITY_WORDS = 5  # magic, boot, device, inode, cookie
COOKIE_WORD = 4


def boot_number() -> int:
    """A number of this boot of the machine, never 0."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(text, 16) % (2**63) or 1


class Mapped:
    """The mapped file. words: its memory word by word; bytes: the same memory. Unmapped when nobody refers to it any more."""

    def __init__(self, path: Path, mode: int, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a hole could end the process when the disk is full
            self._map = mmap.mmap(descriptor, size)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._identity = (MAGIC, boot_number(), status.st_dev, status.st_ino)

    def is_current(self, cookie: int) -> bool:
        """Whether the words were written in this boot, in this very file, for this log."""
        return tuple(self.words[:IDENTITY_WORDS]) == (*self._identity, cookie)

    def adopt(self, cookie: int) -> None:
        """Say that the words are of this boot, file and log."""
        for word, value in enumerate((*self._identity, cookie)):
            self.words[word] = value

    def address(self, word: int) -> int:
        """Where the low half of a word is, for a futex."""
        return self._address + WORD * word + (4 if sys.byteorder == "big" else 0)

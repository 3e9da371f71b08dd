"""Whose bytes a server reads while messages come in from many peers, so that unfinished ones together stay within a limit.

    below the limit   everybody is read
    at the limit      who has begun a message waits, except one: whose message began first. It may go on to the end of its
                      message, whatever its size, so somebody always gets done; then the next one's turn comes
    small messages    a peer that has begun nothing is read on, READ_BYTES_MIN at a time: what is not larger never waits

Pure. Not covered: sockets, and how long a turn may take (router.py).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol

READ_BYTES_MIN = 4096
READ_BYTES_MAX = 256 * 1024  # at once
TURN_BYTES_MIN = 64 * 1024  # between two looks at whose turn it is, or that one is still
STILL_LOOKS_MAX = 4


class Reading(Protocol):
    """A peer's connection."""

    def pause(self) -> None:
        """Read nothing until `resume`."""

    def resume(self) -> None:
        """Read again."""


class Intake:
    """limit: bytes of unfinished messages. total: what there is. At most limit + one message + READ_BYTES_MIN per peer."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._begun: OrderedDict[Reading, int] = OrderedDict()  # bytes of an unfinished message; who began first comes first
        self._waiting: OrderedDict[Reading, None] = OrderedDict()
        self._resumed: set[Reading] = set()  # and not read since
        self._seen: tuple[Reading | None, int] = (None, 0)  # at the last look
        self._still = 0

    @property
    def first(self) -> Reading | None:
        """Whose turn it is while others wait; None: nobody waits."""
        return next(iter(self._begun)) if self._waiting else None

    def room(self, peer: Reading) -> int:
        """How many bytes to read of it at once."""
        if peer is next(iter(self._begun), None):
            return READ_BYTES_MAX
        return max(READ_BYTES_MIN, min(READ_BYTES_MAX, self.limit - self.total))

    def read(self, peer: Reading, unfinished: int, *, finished: bool) -> None:
        """Something of it was read. unfinished: bytes of its message that is not whole. finished: another one became whole."""
        self._resumed.discard(peer)
        self.total += unfinished - self._begun.get(peer, 0)
        if finished or not unfinished:
            self._begun.pop(peer, None)
        if unfinished:
            self._begun[peer] = unfinished
        if unfinished and self.total > self.limit and peer is not next(iter(self._begun)):
            self._waiting[peer] = None
            peer.pause()
        self._go_on()

    def gone(self, peer: Reading) -> None:
        """Its connection ended."""
        self.total -= self._begun.pop(peer, 0)
        self._waiting.pop(peer, None)
        self._resumed.discard(peer)
        self._go_on()

    def _go_on(self) -> None:
        """Whose turn it is, and as many others as there is room for."""
        if not self._waiting:
            return
        self._resume(next(iter(self._begun)))
        free = (self.limit - self.total) // READ_BYTES_MAX - len(self._resumed)
        for peer in list(islice(self._waiting, max(0, free))):
            self._resume(peer)

    def _resume(self, peer: Reading) -> None:
        if peer in self._waiting:
            del self._waiting[peer]
            self._resumed.add(peer)
            peer.resume()

    def late(self) -> Reading | None:
        """Called again and again while somebody waits: whose turn it is, if it was still STILL_LOOKS_MAX times in a row."""
        first = self.first
        size = self._begun[first] if first is not None else 0
        still = first is not None and first is self._seen[0] and size - self._seen[1] < TURN_BYTES_MIN
        self._still = self._still + 1 if still else 0
        self._seen = (first, size)
        return first if self._still >= STILL_LOOKS_MAX else None

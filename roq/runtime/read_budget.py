"""Whose bytes a server reads while messages come in from many peers, so that unfinished ones together stay within a limit.

    below 3/4 of the limit   everybody is read
    above                    who has begun a message that is not small waits, except one: whose message was the first to grow
                             large. It may go on to the end of its message, whatever its size, so somebody always gets done;
                             then the next one's turn comes. What is left of the limit is for messages of up to SMALL_BYTES
    at the limit             whoever has begun a message waits, except that one; where all are small, whoever began first
    smallest messages        a peer that has begun nothing is read on, READ_BYTES_MIN at a time: what is not larger never waits

While somebody waits, who is read and goes on too slowly is late: so all who stand still in small messages go at once. Those
in large ones go when their turn comes, at first one after the other, then more at a time.

Pure. Not covered: sockets, and how long a turn may take (connections.py).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import Protocol

READ_BYTES_MIN = 4096
READ_BYTES_MAX = 256 * 1024  # at once
SMALL_BYTES = 72 * 1024  # a task with a payload that passes the master, unless its queue has another `inline_bytes`
TURN_BYTES_MIN = 32 * 1024  # between two looks, of a large message whose turn it is, while others wait for that
STILL_BYTES_MIN = 4 * 1024  # between two looks, of everybody else who is read: their messages have room
STILL_LOOKS_MAX = 4  # with less than that, in a row


class IncomingPeer(Protocol):
    """A peer's connection."""

    def pause(self) -> None:
        """Read nothing until `resume`."""

    def resume(self) -> None:
        """Read again."""


class ReadBudget:
    """limit: bytes of unfinished messages. total: what there is. At most limit + one message + READ_BYTES_MIN per peer."""

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._large_limit = limit - limit // 4
        self._begun: OrderedDict[IncomingPeer, int] = (
            OrderedDict()
        )  # bytes of an unfinished message; who began first comes first
        self._large: OrderedDict[IncomingPeer, None] = OrderedDict()  # those above SMALL_BYTES, who was so first comes first
        self._waiting: OrderedDict[IncomingPeer, None] = OrderedDict()
        self._resumed: set[IncomingPeer] = set()  # and not read since
        self._seen: dict[IncomingPeer, tuple[int, int]] = {}  # bytes at the last look, and how many looks in a row it was late

    @property
    def first(self) -> IncomingPeer | None:
        """Whose turn it is while others wait; None: nobody waits."""
        return self._turn() if self._waiting else None

    def _turn(self) -> IncomingPeer:
        return next(iter(self._large or self._begun))

    def room(self, peer: IncomingPeer) -> int:
        """How many bytes to read of it at once."""
        if not self._begun or peer is self._turn():
            return READ_BYTES_MAX
        others, small = self._others(), SMALL_BYTES - self._begun.get(peer, 0)
        free = self._large_limit - others
        if free < small:
            free = min(small, self.limit - others)
        return max(READ_BYTES_MIN, min(READ_BYTES_MAX, free))

    def read(self, peer: IncomingPeer, unfinished: int, *, finished: bool) -> None:
        """Something of it was read. unfinished: bytes of its incomplete message. finished: another one became complete."""
        self._resumed.discard(peer)
        self.total += unfinished - self._begun.get(peer, 0)
        if finished or not unfinished:
            self._forget(peer)
        if unfinished:
            self._begun[peer] = unfinished
        if unfinished > SMALL_BYTES:
            self._large.setdefault(peer)
        limit = self.limit if unfinished <= SMALL_BYTES else self._large_limit
        if unfinished and self._others() > limit and peer is not self._turn():
            self._waiting[peer] = None
            peer.pause()
        self._go_on()

    def _others(self) -> int:
        """Bytes of all unfinished messages but the one whose turn it is."""
        return self.total - (self._begun[self._turn()] if self._begun else 0)

    def _forget(self, peer: IncomingPeer) -> int:
        self._large.pop(peer, None)
        self._seen.pop(peer, None)
        return self._begun.pop(peer, 0)

    def gone(self, peer: IncomingPeer) -> None:
        """Its connection ended."""
        self.total -= self._forget(peer)
        self._waiting.pop(peer, None)
        self._resumed.discard(peer)
        self._go_on()

    def _go_on(self) -> None:
        """Whose turn it is, and as many others as there is room for."""
        if not self._waiting:
            return
        self._resume(self._turn())
        free = (self._large_limit - self._others()) // READ_BYTES_MAX - len(self._resumed)
        for peer in list(islice(self._waiting, max(0, free))):
            self._resume(peer)

    def _resume(self, peer: IncomingPeer) -> None:
        if peer in self._waiting:
            del self._waiting[peer]
            self._resumed.add(peer)
            peer.resume()

    def late(self) -> list[IncomingPeer]:
        """Called again and again while somebody waits, and once more: who went on too slowly STILL_LOOKS_MAX times in a row."""
        if not self._waiting:
            self._seen.clear()
            return []
        turn = self._turn() if self._large else None
        late = []
        for peer, size in self._begun.items():
            if peer in self._waiting:
                self._seen.pop(peer, None)
                continue
            before, looks = self._seen.get(peer, (0, -1))
            slow = size - before < (TURN_BYTES_MIN if peer is turn else STILL_BYTES_MIN)
            looks = looks + 1 if slow or looks < 0 else 0
            self._seen[peer] = (size, looks)
            if looks >= STILL_LOOKS_MAX:
                late.append(peer)
        return late

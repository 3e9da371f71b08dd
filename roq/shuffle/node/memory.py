"""How many bytes of rows a follower holds in memory, and when it has to say no. One loop.

    coming     10 %   of unfinished messages (runtime/read_budget.py)
    held       60 %   blocks of attempts, keys and samples; above SPILL of it blocks go to temporary files, down to SPILLED
    pending    10 %   pieces that come to be stored and are not on the disk yet
    borrowed   10 %   blocks on their way to other followers or from them, as read and as sent
    reading    10 %   blocks for readers, until the network has taken them

One request of a kind always fits. Above PAUSE of `held` nothing new is taken until it is below RESUME; the rest is for blocks
that come back out of files to be cut.
"""

from __future__ import annotations

import asyncio

PAUSE, RESUME = 0.85, 0.70
SPILL, SPILLED = 0.50, 0.40
SHARE = 0.10


class Budget:
    """Bytes in memory. size: what they shall not be above. unsent(): bytes of answers that the network has not taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held_max = int((1 - 4 * SHARE) * size)
        self.coming_max = int(SHARE * size)
        self.held = self.pending = self.borrowed = self.reading = 0
        self._paused = False
        self._given_back = asyncio.Event()

    @property
    def used(self) -> int:
        """All of it."""
        return self.held + self.pending + self.borrowed + self.reading

    @property
    def paused(self) -> bool:
        """Nothing new can be taken."""
        self._paused = self.held > (RESUME if self._paused else PAUSE) * self.held_max
        return self._paused

    @property
    def spill(self) -> int:
        """Bytes that should go to a file now."""
        return int(self.held - SPILLED * self.held_max) if self.held > SPILL * self.held_max else 0

    def room_to_hold(self, size: int) -> bool:
        """Whether so much of attempts may be taken."""
        return not self.paused and self.held + size <= self.held_max

    def room_to_cut(self, size: int) -> bool:
        """Whether so much may come out of a file."""
        return self.held + size <= self.held_max

    def room_to_store(self, size: int) -> bool:
        """Whether storage may take so much more."""
        return not self.pending or self.pending + size <= SHARE * self.size

    def room_to_read(self, size: int, unsent: int) -> bool:
        """Whether so much more may be read for readers. unsent: what others have not taken yet."""
        there = self.reading + unsent
        return not there or there + size <= SHARE * self.size

    async def borrow(self, size: int) -> None:
        """Wait until so much may be on its way between followers."""
        while self.borrowed and self.borrowed + size > SHARE * self.size:
            self._given_back.clear()
            await self._given_back.wait()
        self.borrowed += size

    def give_back(self, size: int) -> None:
        """It is not in memory any more."""
        self.borrowed -= size
        self._given_back.set()

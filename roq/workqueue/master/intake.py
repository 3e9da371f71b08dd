"""How a group gets its messages: a room of limited size in its master, and a position on the tapes that is kept with them.

Who feeds it (roq/groups/feed.py) goes on behind `position` after a take-over and brings some messages again; their publishers'
numbers tell the fold. What was fed and is not done is limited, so a group that is far behind takes no more memory than another:
the rest stays on the tapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import MasterTerm
from roq.workqueue.records import FeedMessage

MESSAGES_MAX, BYTES_MAX = 50_000, 64 * 1024 * 1024  # fed and neither done nor dead
AGAIN_BELOW = 7 / 8  # of these, so that it is not filled message by message
ON_THEIR_WAY_MAX = 8 * 1024 * 1024  # bytes that wait for the log; more are fed when it has them


class GroupIntake:
    """Of one term. now: ms. waiting_since: when the message was published that comes next or came last (ms), 0: none is there
    to come; None: that is not known yet. taken: messages so far."""

    def __init__(self, service: MasterService, term: MasterTerm, now: Callable[[], int]) -> None:
        self.now = now
        self.waiting_since: int | None = None
        self.taken = 0
        self._service, self._term = service, term
        self._room = asyncio.Event()
        self._room.set()
        service.freed, service.unfed = self._freed, self._behind

    @property
    def position(self) -> dict[str, int] | None:
        """Entries of the tapes up to which everything is in the group, by Exchange. None: it was never fed."""
        return self._service.fold.fed

    @property
    def full(self) -> bool:
        """Whether somebody waits for room."""
        return not self._room.is_set()

    async def take(self, messages: Sequence[FeedMessage]) -> None:
        """Add messages, as soon as there is room. Raises NotLeader: the term has ended."""
        self.waiting_since = messages[0].published
        while self._filled() >= 1:
            self._room.clear()
            await self._room.wait()
        self.taken += len(messages)
        self._service.feed(messages, self.now())
        self._term.turn()
        if self._service.waiting.bytes > ON_THEIR_WAY_MAX:
            await self._term.barrier()

    def reached(self, done: dict[str, int]) -> None:
        """All that was taken lies up to these entries."""
        if done != self.position:
            self._service.feed_position(done, self.now())
            self._term.turn()

    def _filled(self) -> float:
        fold = self._service.fold
        count = fold.ready.count + fold.behind + len(fold.delayed) + len(fold.leased)
        return max(count / MESSAGES_MAX, fold.fed_bytes / BYTES_MAX)

    def _freed(self) -> None:
        if not self._room.is_set() and self._filled() < AGAIN_BELOW:
            self._room.set()

    def _behind(self, now: int) -> int:
        if self.waiting_since is None:
            return -1
        return max(now - self.waiting_since, 0) if self.waiting_since else 0

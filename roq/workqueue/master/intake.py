"""How a group gets its messages: a room of limited size in its master, and a position on the tapes that is kept with them.

Who feeds it (roq/groups/feed.py) goes on behind `position` after a take-over and brings some messages again; their publishers'
numbers tell the fold. What was fed and is not done is limited, so a group that is far behind takes no more memory than another:
the rest stays on the tapes. Dead letters have a limit of their own: a group whose messages all fail stands still at it.

A group that nobody asks for messages rests: it reads what whoever comes first gets at once, and no more. There may be a
thousand of them on a queue, and each would look at each message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from roq.runtime.observe import logger
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import MasterTerm
from roq.workqueue.records import FeedMessages

MESSAGES_MAX, DEAD_MAX = 50_000, 50_000  # fed and neither done nor dead; dead
BYTES_MAX = 64 * 1024 * 1024  # of both
AGAIN_BELOW = 7 / 8  # of these, so that it is not filled message by message
ON_THEIR_WAY_MAX = 8 * 1024 * 1024  # bytes that wait for the log; more are fed when it has them
ASKED_MS = 10_000  # nobody has asked for so long, nor did the term begin: a group rests
WAKING_MS = 500  # until it has read what is stored: who asks and finds nothing waits for that

log = logger(__name__)


def _nobody() -> None:
    """Reads."""


class GroupIntake:
    """Of one term. now: ms. waiting_since: when that was written which is stored and not in the group yet (ms); 0: there is no
    such; None: that is not known. lag: stored messages that are not in the group, -1: not known. read_on: to be called when
    the group rests no longer, or messages may be gone."""

    def __init__(self, service: MasterService, term: MasterTerm, now: Callable[[], int]) -> None:
        self.now = now
        self.waiting_since: int | None = None
        self.lag = -1
        self.read_on: Callable[[], None] = _nobody
        self._missed = 0  # since the newest position
        self._asked = now()  # when somebody asked last, or it began
        self._awake = 0  # … it will be
        self._service, self._term = service, term
        self._room = asyncio.Event()
        service.freed, service.unfed, service.asked = self._freed, self._unfed, self._asked_for

    @property
    def position(self) -> dict[str, int] | None:
        """Entries of the tapes up to which everything is in the group, by Exchange. None: it was never fed."""
        return self._service.fold.fed

    async def take(self, messages: Sequence[FeedMessages]) -> None:
        """Add messages, as soon as there is room. Raises NotLeader: the term has ended."""
        while self._filled() >= 1:
            self._room.clear()
            if len(self._service.fold.dead) >= DEAD_MAX:
                log.warning("the group takes no more messages: it has %s dead letters, requeue or remove them", DEAD_MAX)
            await self._room.wait()
        self._service.feed(messages, self.now())
        self._term.turn()
        if self._service.waiting.bytes > ON_THEIR_WAY_MAX:
            await self._term.barrier()

    def rests(self) -> bool:
        """Nobody has asked for messages lately; `read_on` is called when somebody does."""
        return self._asked < self.now() - ASKED_MS and not self._service.is_waited_for()

    def has_enough(self) -> bool:
        """Likewise, and there are some for whoever comes first."""
        return self._count() > 0 and self.rests()

    def missed(self) -> None:
        """Something does not come into the group. It counts with the next position, behind it: once, whoever is the master."""
        self._missed += 1

    def reached(self, done: dict[str, int]) -> None:
        """All that was taken lies up to these entries."""
        if done != self.position or self._missed:
            missed, self._missed = self._missed, 0
            self._service.feed_position(done, self.now(), missed)
            self._term.turn()

    def _asked_for(self, now: int) -> int:
        """Somebody asks; for so long (ms) at least, if there is nothing: all that is stored by now is to be found."""
        if self.rests():
            self._awake = now + WAKING_MS
        self._asked = now
        self.read_on()
        return max(0, self._awake - now)

    def _count(self) -> int:
        """Fed, and neither done nor dead."""
        fold = self._service.fold
        return fold.ready.count + fold.topics.behind + len(fold.delayed) + len(fold.leased)

    def _filled(self) -> float:
        fold = self._service.fold
        return max(self._count() / MESSAGES_MAX, len(fold.dead) / DEAD_MAX, fold.fed_bytes / BYTES_MAX)

    def _freed(self) -> None:
        self.read_on()
        if not self._room.is_set() and self._filled() < AGAIN_BELOW:
            self._room.set()

    def _unfed(self, now: int) -> tuple[int, int]:
        if self.waiting_since is None:
            return -1, self.lag
        return (max(now - self.waiting_since, 0) if self.waiting_since else 0), self.lag

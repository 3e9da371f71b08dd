"""Subscribers whose connection broke, as by a reset on the way: they live, and may not know of it yet.

An Exchange that takes publishers meanwhile, whose connections broke as well and which are quicker, would confirm what reaches
nobody. So who connects in front is welcomed when they are back, or after ABSENT_SECONDS: by then a subscriber that lives has
noticed, as it asks what is quiet for a sign of life (links.py). Who closes its connection, or is cut here, is not waited for;
who goes on publishing is not held up. Counted by address, as connections have no names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

ABSENT_SECONDS = 4.0  # a subscriber looks once a second; a publisher waits 5 s for its welcome
ABSENT_MAX = 10_000  # addresses; beyond them nobody more is waited for


class AbsentSubscribers:
    """Needs the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._absent = dict[str, deque[asyncio.TimerHandle]]()  # by address, the end of each one's time
        self._waiting: list[Callable[[], object]] = []

    def broke(self, address: str) -> None:
        """The connection of a subscriber there did."""
        if address in self._absent or len(self._absent) < ABSENT_MAX:
            self._absent.setdefault(address, deque()).append(self._loop.call_later(ABSENT_SECONDS, self.came, address))

    def came(self, address: str) -> None:
        """Somebody there has subscribed, or is not waited for any more."""
        if address not in self._absent:
            return
        self._absent[address].popleft().cancel()
        if not self._absent[address]:
            del self._absent[address]
        if not self._absent:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def when_back(self, call: Callable[[], object]) -> None:
        """Now, if nobody is waited for."""
        if self._absent:
            self._waiting.append(call)
        else:
            call()

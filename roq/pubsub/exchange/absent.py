"""Subscribers whose connection broke, as by a reset on the way: they live, and may not know of it yet.

An Exchange that takes publishers meanwhile, whose connections broke as well and which are quicker, would confirm what reaches
nobody. So who connects in front is welcomed when they are back, or after ABSENT_SECONDS: by then a subscriber that lives has
noticed, as it asks where it has become quiet (links.py). Who leaves in order, or is cut here, is not waited for (one that
leaves under load may look like one that broke), nor the Monitor, which gets no messages; who goes on publishing is not held up.
Counted by IP address, as connections have no names.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Hashable

from roq.wire.frame import CONTROL_PREFIX

ABSENT_SECONDS = 4.0  # a subscriber asks every two seconds; a publisher waits 5 s for its welcome
ABSENT_MAX = 10_000  # addresses; beyond them nobody more is waited for


class AbsentSubscribers:
    """Needs the running loop. held: publishers that had to wait so far."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._absent = dict[str, deque[asyncio.TimerHandle]]()  # by address, the end of each one's time
        self._waiting = dict[Hashable, tuple[asyncio.TimerHandle, Callable[[], object]]]()
        self.held = 0

    def broke(self, peer_address: str, prefixes: Collection[bytes]) -> None:
        """The connection of somebody there (host:port) did; "": it was not attached. prefixes: that it has subscribed to."""
        address = peer_address.rpartition(":")[0]
        if address and _is_subscriber(prefixes) and (address in self._absent or len(self._absent) < ABSENT_MAX):
            self._absent.setdefault(address, deque()).append(self._loop.call_later(ABSENT_SECONDS, self._one_less, address))

    def came(self, peer_address: str, prefixes: Collection[bytes]) -> None:
        """Somebody there has subscribed to these."""
        address = peer_address.rpartition(":")[0]
        if address in self._absent and _is_subscriber(prefixes):
            self._one_less(address)

    def _one_less(self, address: str) -> None:
        self._absent[address].popleft().cancel()
        if not self._absent[address]:
            del self._absent[address]
        if not self._absent:
            for publisher in list(self._waiting):
                self._let_go(publisher)

    def when_back(self, publisher: Hashable, call: Callable[[], object]) -> None:
        """Now, if nobody is waited for. However many break meanwhile, nobody waits for longer than for one."""
        if not self._absent:
            call()
            return
        self.held += 1
        self._waiting[publisher] = self._loop.call_later(ABSENT_SECONDS, self._let_go, publisher), call

    def _let_go(self, publisher: Hashable) -> None:
        timer, call = self._waiting.pop(publisher)
        timer.cancel()
        call()

    def left(self, publisher: Hashable) -> None:
        """Its connection ended."""
        if (waiting := self._waiting.pop(publisher, None)) is not None:
            waiting[0].cancel()


def _is_subscriber(prefixes: Collection[bytes]) -> bool:
    """It gets messages, and control frames, of which one that leaves takes no more."""
    controls = sum(prefix.startswith(CONTROL_PREFIX) for prefix in prefixes)
    return 0 < controls < len(prefixes)

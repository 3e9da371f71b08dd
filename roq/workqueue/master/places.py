"""Which stores of a cluster live, and which of them have room, as far as the master has seen. Pure: no clock of its own.

A store is dead after so many heartbeats that went unanswered. One that said that its disk is full gets nothing new for a while:
a put that insisted on it would be put off for as long as the disk is full.
"""

from __future__ import annotations

from collections.abc import Callable

from roq.log.replicated.directory import Directory

FULL_SECONDS = 10.0  # after a refusal for want of space


class Places:
    """clock: monotonic seconds."""

    def __init__(self, directory: Directory, missed_beats: int, clock: Callable[[], float]) -> None:
        self._directory, self._missed_beats, self._clock = directory, missed_beats, clock
        self._registered: frozenset[str] = frozenset()
        self._missed: dict[str, int] = {}
        self._full_until: dict[str, float] = {}

    def endpoint(self, host: str) -> str | None:
        """Where its store is."""
        return self._directory.endpoint(host)

    def registered(self) -> frozenset[str]:
        """Hosts that are said to live."""
        return self._directory.hosts()

    def changed(self) -> bool:
        """Are they others than at the last call?"""
        before, self._registered = self._registered, self._directory.hosts()
        return before != self._registered

    def dead(self, host: str) -> bool:
        """Its store is silent."""
        return self._missed.get(host, 0) >= self._missed_beats

    def live(self) -> list[str]:
        """Hosts whose store answers."""
        return [host for host in sorted(self._directory.hosts()) if not self.dead(host)]

    def roomy(self) -> list[str]:
        """Those of them that can take more."""
        now = self._clock()
        return [host for host in self.live() if self._full_until.get(host, 0.0) <= now]

    def beat(self, host: str, answered: bool) -> bool:
        """Note an answer, or none. Whether the store died or came back with that."""
        before = self.dead(host)
        self._missed[host] = 0 if answered else self._missed.get(host, 0) + 1
        return before != self.dead(host)

    def full(self, host: str) -> None:
        """Its disk is full."""
        self._full_until[host] = self._clock() + FULL_SECONDS

"""Which stores are fit for what, and which of them are chosen. Pure: time comes in, nothing is asked here.

StoreHealth     all stores of a cluster: which live, which have room, which are given up
rank, choose, candidates
                rendezvous hashing, so that a host more or less moves as little as possible
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from typing import Protocol

FULL_SECONDS = 10.0  # a store that refused for want of space gets nothing new for so long


def rank(key: str, hosts: Iterable[str]) -> list[str]:
    """All hosts, the best one for `key` first; the same everywhere."""
    return sorted(hosts, key=lambda host: (blake2b(f"{key}\0{host}".encode(), digest_size=8).digest(), host), reverse=True)


def choose(key: str, hosts: Iterable[str], count: int) -> tuple[str, ...]:
    """Up to `count` hosts, the best ones for `key`."""
    return tuple(rank(key, hosts)[:count])


class Directory(Protocol):
    """Finds stores."""

    def endpoint(self, host: str) -> str | None:
        """ZeroMQ endpoint of the host's store, None while it is not known."""

    def hosts(self) -> frozenset[str]:
        """Hosts that live and whose store runs."""

    def leaving(self) -> frozenset[str]:
        """Those of them that are being evacuated: they give what they have, and get nothing new where others can have it."""


def candidates(key: str, directory: Directory) -> list[str]:
    """Hosts for something new, the best one first: those that stay, then those that are being evacuated."""
    hosts, leaving = directory.hosts(), directory.leaving()
    return [*rank(key, hosts - leaving), *rank(key, hosts & leaving)]


class StoreHealth:
    """Stores as far as their user has seen. clock: monotonic seconds; missed_beats: heartbeats without an answer that make a
    store dead, for a user that asks for them (`beat`)."""

    def __init__(self, directory: Directory, clock: Callable[[], float], missed_beats: int = 1) -> None:
        self._directory, self._clock, self._missed_beats = directory, clock, missed_beats
        self._before: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._missed: dict[str, int] = {}  # host -> heartbeats in a row
        self._full_until: dict[str, float] = {}
        self._away_since: dict[str, float] = {}

    def changed(self) -> bool:
        """Are the hosts, or those that are being evacuated, others than at the last call?"""
        before, self._before = self._before, (self._directory.hosts(), self._directory.leaving())
        return before != self._before

    def staying(self, hosts: Iterable[str]) -> list[str]:
        """Those that are not being evacuated."""
        leaving = self._directory.leaving()
        return [host for host in hosts if host not in leaving]

    def dead(self, host: str) -> bool:
        """Did its store not answer the last heartbeats?"""
        return self._missed.get(host, 0) >= self._missed_beats

    def live(self) -> list[str]:
        """Hosts whose store answers."""
        return [host for host in sorted(self._directory.hosts()) if not self.dead(host)]

    def roomy(self) -> list[str]:
        """Those of them that can take more. A put that insisted on a full one would fail for as long as the disk is full."""
        now = self._clock()
        return [host for host in self.live() if self._full_until.get(host, 0.0) <= now]

    def beat(self, host: str, answered: bool) -> bool:
        """Note an answer to a heartbeat, or none. Whether the store died or came back with that."""
        before = self.dead(host)
        self._missed[host] = 0 if answered else self._missed.get(host, 0) + 1
        return before != self.dead(host)

    def full(self, host: str) -> None:
        """It refused for want of space."""
        self._full_until[host] = self._clock() + FULL_SECONDS

    def away(self, named: Collection[str], seconds: float) -> set[str]:
        """Those of `named` that were no live hosts at any call for `seconds`: they are given up."""
        now, live = self._clock(), set(self.live())
        self._away_since = {host: self._away_since.get(host, now) for host in set(named) - live}
        return {host for host, since in self._away_since.items() if now - since >= seconds}

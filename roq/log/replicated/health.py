"""Which stores are fit for what, and which of them are chosen. Pure: time comes in, nothing is asked here.

StoreHealth     all stores of a cluster: which live, which have room, which are given up
SegmentHealth   the nodes of the open segment: who is to be replaced, when to roll, when to give up
SegmentRepair   when the open segment is closed before its time, so that a node that misses entries gets them
rank, choose    rendezvous hashing, so that a host more or less moves as little as possible
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from typing import Protocol

from roq.errors import LogUnavailable, RoqError, StorageFull
from roq.log.replicated.appending import Appending
from roq.log.replicated.settings import LogSettings
from roq.runtime.liveness import FailureDetector
from roq.wire.store import Refusal

FULL_SECONDS = 10.0  # a store that refused for want of space gets nothing new for so long
PAUSE_MAX = 32  # times `repair_seconds`, between two segments


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


class StoreHealth:
    """Stores as far as their user has seen. clock: monotonic seconds; missed_beats: heartbeats without an answer that make a
    store dead, for a user that asks for them (`beat`)."""

    def __init__(self, directory: Directory, clock: Callable[[], float], missed_beats: int = 1) -> None:
        self._directory, self._clock, self._missed_beats = directory, clock, missed_beats
        self._before: frozenset[str] = frozenset()
        self._missed: dict[str, int] = {}  # host -> heartbeats in a row
        self._full_until: dict[str, float] = {}
        self._away_since: dict[str, float] = {}

    def changed(self) -> bool:
        """Are the hosts others than at the last call?"""
        before, self._before = self._before, self._directory.hosts()
        return before != self._before

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


class SegmentHealth:
    """Nodes of the segment that is being written, since `now` (monotonic seconds)."""

    def __init__(self, settings: LogSettings, appending: Appending, now: float) -> None:
        self._settings, self.appending, self.since = settings, appending, now
        self.entries = self.size = 0  # taken into this segment
        self._detector = FailureDetector(appending.nodes, now)  # heard: it confirmed something, or owed us nothing
        self._refused: dict[str, Refusal] = {}
        self._lost: set[str] = set()  # nodes that no longer have what they confirmed
        self._later: dict[str, float] = {}  # nobody could take this node's place: try again then

    def took(self, entry: bytes) -> None:
        """An entry more."""
        self.entries += 1
        self.size += len(entry)

    def heard(self, node: str, now: float) -> None:
        """The node confirmed something."""
        self._detector.heard(node, now)
        self._refused.pop(node, None)

    def before_sending(self, now: float) -> None:
        """Nodes that owe us nothing are not late."""
        for node in self.appending.nodes:
            if not self.appending.behind(node):
                self._detector.heard(node, now)

    def refused(self, node: str, reason: Refusal) -> None:
        """The node takes nothing."""
        self._refused[node] = reason

    def lost(self, node: str) -> None:
        """The node, of whichever fragment, no longer has what it confirmed."""
        self._lost.add(node)

    @property
    def any_lost(self) -> bool:
        """Must the segment be closed, whatever its nodes do, so that what was lost is copied again?"""
        return bool(self._lost)

    def changed(self, now: float) -> None:
        """The segment has other nodes now."""
        self._detector = FailureDetector(self.appending.nodes, now)
        self._refused.clear()

    def silent(self, seconds: float, now: float) -> list[str]:
        """Nodes that owe us an answer for longer than `seconds`."""
        appending = self.appending
        return [node for node in appending.nodes if appending.behind(node) and self._detector.silence(node, now) > seconds]

    def bad(self, now: float) -> list[str]:
        """Nodes to be replaced."""
        appending, silent = self.appending, self.silent(self._settings.store_seconds, now)
        return [node for node in appending.nodes if node in silent or (node in self._refused and appending.behind(node))]

    def due(self, bad: Iterable[str], now: float) -> list[str]:
        """Of those, the ones for which another try is due."""
        return [node for node in bad if now >= self._later.get(node, 0.0)]

    def postpone(self, nodes: Iterable[str], now: float) -> None:
        """Nobody could take their place."""
        self._later.update(dict.fromkeys(nodes, now + self._settings.store_seconds))

    @property
    def long(self) -> bool:
        """Is the segment long enough?"""
        return self.entries >= self._settings.segment_entries or self.size >= self._settings.segment_bytes

    @property
    def sound(self) -> frozenset[str]:
        """Nodes that miss nothing."""
        return frozenset(self.appending.nodes) - self.appending.holed - self._refused.keys() - self._lost

    def complete(self, wanted: int) -> bool:
        """Are there `wanted` nodes, and does none of them miss something that only a closed segment gets copied?"""
        return not self._lost and len(self.sound) == len(self.appending.nodes) >= wanted

    def failure(self, bad: list[str], spares: Collection[str], now: float) -> RoqError | None:
        """Why the writer can't go on; None if it can, or if waiting may help."""
        appending = self.appending
        if len(appending.nodes) - len(bad) >= appending.ack_quorum or appending.drained:
            return None
        full = [node for node in bad if self._refused.get(node) is Refusal.FULL]
        if len(appending.nodes) - len(full) < appending.ack_quorum and not spares:
            return StorageFull(f"the disks of {', '.join(full)} are full")
        seconds = self._settings.give_up_seconds
        if all(self._detector.silence(node, now) > seconds for node in bad):
            return LogUnavailable(f"{', '.join(bad)} did not answer for {seconds:g} s")
        return None


class SegmentRepair:
    """When an open segment is closed before its time because some node of it misses entries, which only a closed one gets
    copied; of one writer's segments, one after the other.

    Only if the next one would have other nodes, or a node back that answers again: else a store that stays away would cost a
    segment every few seconds. And ever more seldom: a store that takes nothing though it answers (its disk is full) would too.
    """

    def __init__(self, settings: LogSettings) -> None:
        self._pause = self._least_pause = settings.repair_seconds
        self._hosts: frozenset[str] = frozenset()

    def due(self, health: SegmentHealth, write_quorum: int, hosts: frozenset[str], now: float) -> frozenset[str] | None:
        """None unless it is time; then those of `hosts` that are to be asked whether they answer, for `helps`."""
        if hosts != self._hosts:
            self._hosts, self._pause = hosts, self._least_pause
        if not (health.entries or health.any_lost) or now - health.since <= self._pause:
            return None
        if health.complete(min(write_quorum, len(hosts))):
            self._pause = self._least_pause
            return None
        return hosts - health.sound

    def helps(self, health: SegmentHealth, answering: frozenset[str], now: float) -> bool:
        """Would another segment be better, when these hosts answer?"""
        sound, nodes = health.sound, frozenset(health.appending.nodes)
        possible = sound | answering
        if len(possible) < health.appending.ack_quorum or (possible <= sound == nodes and not health.any_lost):
            health.since = now
            return False
        self._pause = min(2 * self._pause, PAUSE_MAX * self._least_pause)
        return True

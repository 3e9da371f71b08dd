"""The nodes of the segment that is being written: who is late, who is replaced, when it ends. Pure: time comes in.

SegmentHealth   the nodes of the open segment: who is to be replaced, when to roll, when to give up
SegmentRepair   when the open segment is closed before its time, so that a node that misses entries gets them
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from roq.errors import LogUnavailable, RoqError, StorageFull
from roq.log.replicated.appending import Appending
from roq.log.replicated.settings import LogSettings
from roq.runtime.liveness import FailureDetector
from roq.wire.store import Refusal

PAUSE_MAX = 32  # times `repair_seconds`, between two segments


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


class SegmentLeave:
    """When an open segment is closed because hosts that keep it are being evacuated; of one writer's segments, one after the
    other. Only if there are others for the next one, and ever more seldom while none of them takes it."""

    def __init__(self, settings: LogSettings) -> None:
        self._pause = self._least_pause = settings.repair_seconds
        self._at = 0.0
        self._hosts = frozenset[str](), frozenset[str]()

    def due(self, nodes: frozenset[str], write_quorum: int, hosts: frozenset[str], leaving: frozenset[str], now: float) -> bool:
        """Is it time to try? nodes: of all of the segment; leaving: those of `hosts` that are being evacuated."""
        if (hosts, leaving) != self._hosts:
            self._hosts, self._pause = (hosts, leaving), self._least_pause
            self._at = min(self._at, now + self._pause)
        needed = max(0, write_quorum - len(hosts - leaving))
        if not leaving or len(nodes & leaving) <= needed:
            self._pause = self._least_pause
            return False
        if now < self._at:
            return False
        self._at = now + self._pause
        self._pause = min(2 * self._pause, PAUSE_MAX * self._least_pause)
        return True


class SegmentRepair:
    """When an open segment is closed before its time because some node of it misses entries, which only a closed one gets
    copied, or because it has too few nodes for what will come, also while it is empty; of one writer's segments, one after the
    other.

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
        if now - health.since <= self._pause:
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

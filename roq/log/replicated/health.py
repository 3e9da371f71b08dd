"""How the nodes of the open segment do, and what follows: who is to be replaced, when to roll, when to give up. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from roq.errors import LogUnavailable, RoqError, StorageFull
from roq.log.replicated.appending import Appending
from roq.log.replicated.settings import LogSettings
from roq.wire.store import Refusal


class Health:
    """Of one segment, since `now` (monotonic seconds)."""

    def __init__(self, settings: LogSettings, nodes: Iterable[str], now: float) -> None:
        self._settings, self.since = settings, now
        self.entries = self.size = 0  # taken into this segment
        self._heard = dict.fromkeys(nodes, now)  # when a node last confirmed something, or owed us nothing
        self._refused: dict[str, Refusal] = {}
        self._lost: set[str] = set()  # nodes that no longer have what they confirmed
        self._later: dict[str, float] = {}  # nobody could take this node's place: try again then

    def took(self, entry: bytes) -> None:
        """An entry more."""
        self.entries += 1
        self.size += len(entry)

    def heard(self, node: str, now: float) -> None:
        """The node confirmed something."""
        self._heard[node] = now
        self._refused.pop(node, None)

    def before_sending(self, appending: Appending, now: float) -> None:
        """Nodes that owe us nothing are not late."""
        for node in appending.nodes:
            if not appending.behind(node):
                self._heard[node] = now

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

    def changed(self, nodes: Iterable[str], now: float) -> None:
        """The segment has these nodes now."""
        self._heard = dict.fromkeys(nodes, now)
        self._refused.clear()

    def silent(self, appending: Appending, seconds: float, now: float) -> list[str]:
        """Nodes that owe us an answer for longer than `seconds`."""
        return [node for node in appending.nodes if appending.behind(node) and now - self._heard[node] > seconds]

    def bad(self, appending: Appending, now: float) -> list[str]:
        """Nodes to be replaced."""
        silent = self.silent(appending, self._settings.store_seconds, now)
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

    def sound(self, appending: Appending) -> frozenset[str]:
        """Nodes that miss nothing."""
        return frozenset(appending.nodes) - appending.holed - self._refused.keys() - self._lost

    def whole(self, appending: Appending, wanted: int) -> bool:
        """Are there `wanted` nodes, and does none of them miss something that only a closed segment gets copied?"""
        return not self._lost and len(self.sound(appending)) == len(appending.nodes) >= wanted

    def failure(self, appending: Appending, bad: list[str], spares: Collection[str], now: float) -> RoqError | None:
        """Why the writer can't go on; None if it can, or if waiting may help."""
        if len(appending.nodes) - len(bad) >= appending.ack_quorum or appending.drained:
            return None
        full = [node for node in bad if self._refused.get(node) is Refusal.FULL]
        if len(appending.nodes) - len(full) < appending.ack_quorum and not spares:
            return StorageFull(f"the disks of {', '.join(full)} are full")
        seconds = self._settings.give_up_seconds
        if all(now - self._heard[node] > seconds for node in bad):
            return LogUnavailable(f"{', '.join(bad)} did not answer for {seconds:g} s")
        return None

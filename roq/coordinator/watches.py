"""Who waits for a change of which node. Pure; a watcher is a number, that of a connection.

A watch fires once. Data watches are left by getData and exists, child watches by getChildren; both end with their connection.
"""

from __future__ import annotations

from enum import StrEnum

from roq.wire.zookeeper import EventType

Firing = tuple[int, EventType, str]  # watcher, what happened, path


class WatchKind(StrEnum):
    """What a watch waits for."""

    DATA = "data"
    CHILDREN = "children"


class Watches:
    """All watches of all connections."""

    def __init__(self) -> None:
        self._on: dict[tuple[WatchKind, str], dict[int, None]] = {}
        self._of: dict[int, set[tuple[WatchKind, str]]] = {}

    def add(self, kind: WatchKind, path: str, watcher: int) -> None:
        """Leave a watch; one that is there already stays one."""
        self._on.setdefault((kind, path), {})[watcher] = None
        self._of.setdefault(watcher, set()).add((kind, path))

    def count(self, watcher: int) -> int:
        """How many this connection has."""
        return len(self._of.get(watcher, ()))

    def total(self) -> int:
        """How many there are."""
        return sum(len(watches) for watches in self._of.values())

    def created(self, path: str, parent: str) -> list[Firing]:
        """A node was made."""
        return [
            *self._fire(WatchKind.DATA, path, EventType.CREATED),
            *self._fire(WatchKind.CHILDREN, parent, EventType.CHILDREN),
        ]

    def changed(self, path: str) -> list[Firing]:
        """A node's data was replaced."""
        return self._fire(WatchKind.DATA, path, EventType.CHANGED)

    def removed(self, path: str, parent: str) -> list[Firing]:
        """A node was removed. Who waited for its data and for its children is told once."""
        fired = self._fire(WatchKind.DATA, path, EventType.DELETED)
        told = {watcher for watcher, _, _ in fired}
        fired += [one for one in self._fire(WatchKind.CHILDREN, path, EventType.DELETED) if one[0] not in told]
        return fired + self._fire(WatchKind.CHILDREN, parent, EventType.CHILDREN)

    def drop(self, watcher: int) -> None:
        """The connection is gone."""
        for key in self._of.pop(watcher, set()):
            self._forget(key, watcher)

    def _fire(self, kind: WatchKind, path: str, event: EventType) -> list[Firing]:
        watchers = self._on.pop((kind, path), None)
        if watchers is None:
            return []
        for watcher in watchers:
            mine = self._of[watcher]
            mine.discard((kind, path))
            if not mine:
                del self._of[watcher]
        return [(watcher, event, path) for watcher in watchers]

    def _forget(self, key: tuple[WatchKind, str], watcher: int) -> None:
        watchers = self._on[key]
        del watchers[watcher]
        if not watchers:
            del self._on[key]

    def check(self) -> None:
        """Both tables say the same, and nothing empty is kept."""
        assert all(self._on.values())
        assert all(self._of.values())
        one = {(key, watcher) for key, watchers in self._on.items() for watcher in watchers}
        assert one == {(key, watcher) for watcher, keys in self._of.items() for key in keys}

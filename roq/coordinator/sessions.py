"""What the coordinator knows of sessions beside the tree: who waits for a change of which node, and when sessions end that are
not heard of. Pure: time comes in; a watcher is a number, that of a connection.

A watch fires once. Data watches are left by getData and exists, child watches by getChildren; both end with their connection.

A deadline is rounded up to the next tick, as ZooKeeper does, so a session lives for its time-out and up to a tick longer; all
that are due are found at one look per tick. Time in which the coordinator itself stood still does not count: clients could not
be heard then.
"""

from __future__ import annotations

import math
from enum import StrEnum

from roq.wire.zookeeper import EventType

LATE_TICKS_MAX = 2  # there is a look in every tick: if nothing was called for longer, the coordinator stood still
Firing = tuple[int, EventType, str]  # watcher, what happened, path


class WatchKind(StrEnum):
    """What a watch waits for."""

    DATA = "data"
    CHILDREN = "children"


class Watches:
    """All watches of all connections."""

    def __init__(self) -> None:
        self._on: dict[tuple[WatchKind, str], dict[int, None]] = {}  # the same watches in both; nothing empty in either
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


def negotiated(wanted_ms: int, least_ms: int, most_ms: int) -> int:
    """The time-out a client gets."""
    return max(least_ms, min(wanted_ms, most_ms))


class Expiry:
    """Deadlines by session. tick_seconds: between two looks. Seconds of any clock that only goes forward."""

    def __init__(self, tick_seconds: float, now: float) -> None:
        self._tick = tick_seconds
        self._seen = now
        self._stood = 0.0  # seconds that don't count
        self._deadline: dict[int, int] = {}  # session -> tick
        self._due: dict[int, set[int]] = {}  # tick -> sessions

    def touch(self, session: int, timeout_seconds: float, now: float) -> None:
        """The session was heard of. A new one begins to count."""
        self._advance(now)
        tick = math.floor((now - self._stood + timeout_seconds) / self._tick) + 1
        before = self._deadline.get(session)
        if before == tick:
            return
        if before is not None:
            self._drop(session, before)
        self._deadline[session] = tick
        self._due.setdefault(tick, set()).add(session)

    def forget(self, session: int) -> None:
        """The session ended otherwise."""
        tick = self._deadline.pop(session, None)
        if tick is not None:
            self._drop(session, tick)

    def look(self, now: float) -> list[int]:
        """The sessions that are over; they are forgotten."""
        self._advance(now)
        tick = math.floor((now - self._stood) / self._tick)
        over = sorted(session for due in [due for due in self._due if due <= tick] for session in self._due.pop(due))
        for session in over:
            del self._deadline[session]
        return over

    def _advance(self, now: float) -> None:
        self._stood += max(0.0, now - self._seen - LATE_TICKS_MAX * self._tick)
        self._seen = now

    def _drop(self, session: int, tick: int) -> None:
        sessions = self._due[tick]
        sessions.discard(session)
        if not sessions:
            del self._due[tick]

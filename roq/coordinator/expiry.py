"""When sessions end that are not heard of: deadlines that are looked at once in a tick. Pure: time comes in.

A deadline is rounded up to the next tick, as ZooKeeper does, so a session lives for its time-out and up to a tick longer. Time
in which the coordinator itself stood still does not count: clients could not be heard then.
"""

from __future__ import annotations

import math

TICKS_MIN, TICKS_MAX = 2, 20  # of a session's time-out, unless it is configured
LATE_TICKS_MAX = 2  # there is a look in every tick: if nothing was called for longer, the coordinator stood still


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

"""What a backup Monitor knows of the queue's subscribers, who report to it too: whom to expect when it is activated. Pure."""

from __future__ import annotations

KNOWN_SECONDS = 2.0  # after the first report everybody else has told a backup of itself too
HEARD_SECONDS = 5.0  # a subscriber that has been silent for longer is not waited for


class Roll:
    """The subscribers that have reported to a backup."""

    def __init__(self) -> None:
        self._first = 0.0
        self._last: dict[int, float] = {}

    def heard(self, subscriber: int, now: float) -> None:
        """A subscriber has reported."""
        self._first = self._first or now
        self._last[subscriber] = now

    def forget(self, now: float) -> None:
        """Once a second: whoever has been silent for long."""
        for subscriber in [one for one, last in self._last.items() if now - last > HEARD_SECONDS]:
            del self._last[subscriber]

    def expected(self, now: float) -> dict[int, float] | None:
        """Who will come back if this Monitor is activated now, and when each was heard last. None if this backup can't know."""
        if not self._first or now - self._first < KNOWN_SECONDS:
            return None
        self.forget(now)
        return dict(self._last) or None  # nobody at all: more likely this process stood still than that all have left

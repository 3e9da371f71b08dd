"""Which subscribers a Monitor that takes over expects, because somebody has named them: its own roll, if it was a backup
(backup.py), or the Monitor before it when it was fenced; or because they have reported, and not joined yet. Pure.

Those that were alive a moment ago are waited for, as long as a new publisher would be: a replay that begins without them is
lost to them. If whoever named them knew all that there are, nothing has to be waited for once they are back.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

EXPECTED_SECONDS = 5.0  # 3 s until a client looks for its Monitor, and two tries
LIVING_SECONDS = 2.5  # whoever has been silent for longer may be dead: the living don't wait for it


class Expected:
    """Named at `now` (monotonic seconds) by somebody who knew all; heard: when each was heard last, None if nobody has yet."""

    def __init__(self, heard: Mapping[int, float] | None = None, now: float = 0.0) -> None:
        self._named: set[int] = set()
        self._living: set[int] = set()
        self._until = 0.0
        self._all = False
        if heard is not None:
            self.add(heard, now)
            self._all = True

    @property
    def all(self) -> frozenset[int] | None:
        """Every one that there is, None if that is not known."""
        return frozenset(self._named) if self._all else None

    def add(self, heard: Mapping[int, float], now: float) -> None:
        """Named as well, by somebody who may not know all."""
        self._named.update(heard)
        self._living.update(one for one, last in heard.items() if now - last <= LIVING_SECONDS)
        self._until = now + EXPECTED_SECONDS

    def reported(self, subscriber: int, now: float) -> None:
        """It lives, and has been told to join. It is waited for once: one may report for ever and never join."""
        if subscriber not in self._named:
            self.add({subscriber: now}, now)

    def left(self, subscriber: int) -> None:
        """It has said good-bye."""
        self._named.discard(subscriber)
        self._living.discard(subscriber)

    def all_in(self, present: Container[int]) -> bool:
        """Whether they are known, and all of them are back."""
        return self._all and all(one in present for one in self._named)

    def awaited(self, present: Container[int], now: float) -> bool:
        """Whether one that lives is still to come back, and not too late."""
        return now < self._until and any(one not in present for one in self._living)

    def stood_still(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        self._until += seconds

"""What an earlier Monitor's host left behind: lives of Exchanges that are replaced and may still carry messages. Pure.

A host counts as lost when its HCM's session has ended; its processes may live on, with publishers that obey the old Monitor.
Such a life is over once it is known to be dead or has obeyed the higher term (fencing.py), or once its lease must have run
out: the processes of a host end by themselves when their HCM has not renewed it (runtime/lease.py). Time comes in as an
argument (monotonic seconds): only its own clock counts for either side.
"""

from __future__ import annotations

from collections.abc import Mapping


class FormerLives:
    """`lives`: seconds from now until the lease must be over, by what to call the life."""

    def __init__(self, lives: Mapping[str, float] | None = None, now: float = 0.0) -> None:
        self._until = {name: now + seconds for name, seconds in (lives or {}).items()}

    def gone(self, name: str) -> None:
        """It has ended, or takes no frames any more."""
        self._until.pop(name, None)

    def keep(self, names: frozenset[str]) -> None:
        """Only these are still meant: the hosts of the others are back, and stopped them before."""
        self._until = {name: until for name, until in self._until.items() if name in names}

    def left(self, now: float) -> tuple[str, ...]:
        """Those that may still carry messages."""
        return tuple(name for name, until in self._until.items() if now < until)

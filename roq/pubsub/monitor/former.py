"""What an earlier Monitor's host left behind: lives of Exchanges that are replaced and may still carry messages. Pure.

A host counts as lost when its HCM's session has ended; its processes may live on, with publishers that obey the old Monitor.
Such a life is over once it is known to have ended (fencing.py), or once its lease must have run out: the processes of a host
end by themselves when their HCM has not renewed it (HeartbeatBoard.renew_lease). Each side counts on its own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from roq.wire.assignment import FormerProcess


class FormerLives:
    """The Exchanges `lives`, whose leases end at most their lease_seconds from `now` (monotonic seconds)."""

    def __init__(self, lives: Iterable[FormerProcess] = (), now: float = 0.0) -> None:
        self._ends = {(life.exchange, life.host): now + life.lease_seconds for life in lives}

    def gone(self, exchange: str, host: str) -> None:
        """It has ended, or obeys this Monitor."""
        self._ends.pop((exchange, host), None)

    def keep(self, lives: Collection[tuple[str, str]]) -> None:
        """Only these (Exchange, host) are still meant: the hosts of the others are back, and stopped them before."""
        self._ends = {life: until for life, until in self._ends.items() if life in lives}

    def left(self, now: float) -> tuple[str, ...]:
        """Those that may still carry messages, in words."""
        return tuple(
            f"Exchange {exchange} of the lost host {host}, which may go on for {until - now:.0f} s"
            for (exchange, host), until in self._ends.items()
            if now < until
        )

"""How much cards with a quota may publish through this Exchange: a token bucket a name, for all its connections. Pure."""

from __future__ import annotations

from roq.wire.card import Card

BURST_SECONDS = 1.0  # so much of the rate may come at once, after a pause
NAMES_MAX = 1_000  # before those who have paid are forgotten


class PublishQuotas:
    """Times: monotonic seconds."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # by name: when all that was taken will be paid for

    def spend(self, card: Card, size: int, now: float) -> float:
        """These bytes were taken. Seconds for which no more are to be taken; 0.0: go on."""
        rate = card.quota.publish_bytes_per_second
        if not rate:
            return 0.0
        if card.name not in self._due and len(self._due) >= NAMES_MAX:
            self._due = {name: due for name, due in self._due.items() if due > now - BURST_SECONDS}
        due = max(self._due.get(card.name, 0.0), now - BURST_SECONDS) + size / rate
        self._due[card.name] = due
        return max(0.0, due - now)

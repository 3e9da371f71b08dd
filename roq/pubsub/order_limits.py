"""The order machine's bounds of time and memory, kept: waits that have become too long, publishers that have ended."""

from __future__ import annotations

import math
from collections.abc import Callable

from roq.pubsub.order import OrderMachine, Output
from roq.runtime.observe import Counters, logger
from roq.wire.assignment import Overflow

log = logger(__name__)
HOLD_SECONDS = 5.0  # how long a publisher's new path waits for the end of its old one when nothing lies unread
# and in any case: a reader that needs longer for what came before does without; with "drop" the end itself may not have come
HOLD_MAX_SECONDS = {Overflow.BLOCK: 600.0, Overflow.DROP: 60.0}
TAPE_HOLD_SECONDS = 15.0  # where tapes are read: by then it is known whether one was made just now
STORED_HOLD_SECONDS = 600.0  # where what is stored is read for ever: nobody waits for it, and a tape may be closed late
FULL_HOLD_SECONDS = 60.0  # the same while all else is not read, as too much waits
TELL_SECONDS = 60.0  # a wait is worth a word after that, and again
SWEEP_SECONDS = 60.0  # between two looks at who has ended
FORGET_SECONDS = 150.0  # after a publisher's end: the Monitor repeats its last watermark for 63 s, a busy one for longer


class OrderLimits:
    """Of one subscriber's machine. `now` is monotonic."""

    def __init__(self, order: OrderMachine, queue: str, counters: Counters, now: float) -> None:
        self._order, self._queue, self._counters = order, queue, counters
        self._swept = self._told = now

    def held_since(self) -> list[int]:
        """When what is held back was written, of each path the oldest, while tapes are read (milliseconds since 1970)."""
        firsts = [events[0] for id in self._order.waiting for events in self._order.publishers[id].held.values()]
        return [event.origin[1] for event in firsts if event.origin is not None]

    def end_holds(self, now: float, overflow: Overflow, unread_at: Callable[[str], float]) -> list[Output]:
        """Go on where the end of a path was awaited for too long. overflow: the queue's. unread_at: see OrderMachine.expire."""
        return self._order.expire(now, HOLD_SECONDS, HOLD_MAX_SECONDS[overflow], unread_at)

    def waits_for(self, exchange: str) -> bool:
        """Whether something that is held back waits for what comes from this Exchange, or may."""
        return not self._order.awaits().isdisjoint(("", exchange))

    def admits(self, exchange: str, full_bytes: int) -> bool:
        """Whether its tape may be read: less than that is held back, or some of it waits for this tape."""
        return self._order.held_bytes < full_bytes or self._order.waits_for_tape(exchange)

    def end_holds_of_tapes(self, now: float, unread_at: Callable[[str], float]) -> list[Output]:
        """The same while tapes are read, as fast as they can be: no wait is too long before the present was reached."""
        return self._order.expire(now, TAPE_HOLD_SECONDS, math.inf, unread_at)

    def end_holds_of_stored(self, now: float, unread_at: Callable[[str], float], full_bytes: int) -> list[Output]:
        """The same in the present of one that follows what is stored. full_bytes: if so many are held, little else is read."""
        self._tell_waits(now)
        hold_seconds = FULL_HOLD_SECONDS if self._order.held_bytes >= full_bytes else STORED_HOLD_SECONDS
        return self._order.expire(now, hold_seconds, math.inf, unread_at)

    def _tell_waits(self, now: float) -> None:
        since = [self._order.publishers[id].waiting_since for id in self._order.waiting]
        long = sum(one is not None and now - one > TELL_SECONDS for one in since)
        if long and now - self._told > TELL_SECONDS:
            self._told = now
            exchanges = sorted(exchange or "(not known which)" for exchange in self._order.awaits())
            fields = {"queue": self._queue, "publishers": long, "exchanges": exchanges, "bytes": self._order.held_bytes}
            log.warning("publishers' messages wait for what they sent before through other Exchanges", extra={"fields": fields})

    def forget(self, now: float, unread_at: Callable[[str], float]) -> None:
        """Once in a while, whoever has ended; and say aloud what had to be given up."""
        if now - self._swept > SWEEP_SECONDS:
            self._swept = now
            self._order.sweep(now, FORGET_SECONDS, unread_at(""))
        totals = self._order.given_up()
        if any(total != self._counters[name] for name, total in totals.items()):
            self._counters.update({name: total - self._counters[name] for name, total in totals.items()})
            fields = {"queue": self._queue, **totals}
            log.warning("ordering limits reached: gaps are reported", extra={"fields": fields})

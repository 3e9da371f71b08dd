"""The order machine's bounds of time and memory, looked after: waits that have become too long, publishers that have ended."""

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
TAPE_HOLD_MAX_SECONDS = HOLD_MAX_SECONDS[Overflow.BLOCK]
SWEEP_SECONDS = 60.0  # between two looks at who has ended
FORGET_SECONDS = 150.0  # after a publisher's end: the Monitor repeats its last watermark for 63 s, a busy one for longer


class OrderLimits:
    """Of one subscriber's machine. `now` is monotonic."""

    def __init__(self, order: OrderMachine, queue: str, counters: Counters, now: float) -> None:
        self._order, self._queue, self._counters = order, queue, counters
        self._swept = now

    def end_holds(self, now: float, overflow: Overflow, unread_at: Callable[[str], float]) -> list[Output]:
        """Go on where the end of a path was awaited for too long. overflow: the queue's. unread_at: see OrderMachine.expire."""
        return self._order.expire(now, HOLD_SECONDS, HOLD_MAX_SECONDS[overflow], unread_at)

    def end_holds_of_tapes(self, now: float, present_since: float, unread_at: Callable[[str], float]) -> list[Output]:
        """The same while tapes are read, as fast as they can be: no wait is too long before the present was reached.
        present_since: when that was, infinite before."""
        most = TAPE_HOLD_MAX_SECONDS if now - present_since > TAPE_HOLD_MAX_SECONDS else math.inf
        return self._order.expire(now, TAPE_HOLD_SECONDS, most, unread_at)

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

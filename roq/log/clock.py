"""What a process knows of a log's clock, which runs on a server: between which times it stands. Pure but for its lock.

A server's answer that has its time bounds the clock from below: it is not earlier, and goes on since. If the question was sent
before that time was taken, the clock is not later than so much after it either. Monotonic clocks drift: bounds loosen with age.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock

DRIFT = 0.001  # of two clocks, far above what computers have
TIMES_MAX = 256  # appends that wait for their other half
UNKNOWN = 1 << 62  # ms: no clock gets there


class LogClock:
    """Any thread. monotonic: for tests."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._low: tuple[float, float] | None = None  # seconds to add to our clock; when that was known
        self._high: tuple[float, float] | None = None

    def observe(self, ms: int, sent: float | None = None) -> None:
        """An answer says this time. sent: monotonic seconds before the time was taken; None: it may be an old one."""
        now = self._monotonic()
        with self._lock:
            low = ms / 1000 - now
            if self._low is not None:
                low = max(low, self._low[0] - (now - self._low[1]) * DRIFT)
            if sent is not None:
                high, at = (ms + 1) / 1000 - sent, sent  # it is cut to whole ms
                if self._high is not None:
                    aged = self._high[0] + max(sent - self._high[1], 0) * DRIFT
                    high, at = min((high, at), (aged, max(sent, self._high[1])))
                high = max(high, ms / 1000 - now)  # the server's clock was set
                self._high = high, at
                low = min(low, high + (now - at) * DRIFT)
            self._low = low, now

    def now(self) -> int:
        """ms: the log's clock shows this, or more. 0: nothing is known."""
        with self._lock:
            return 0 if self._low is None else int((self._monotonic() + self._aged(self._low, -1)) * 1000)

    def latest(self) -> int:
        """ms: the log's clock shows this, or less. UNKNOWN: no answer has said so yet."""
        with self._lock:
            return UNKNOWN if self._high is None else int((self._monotonic() + self._aged(self._high, 1)) * 1000) + 1

    def _aged(self, bound: tuple[float, float], direction: int) -> float:
        return bound[0] + direction * (self._monotonic() - bound[1]) * DRIFT


class AppendTimes:
    """Brings together when an append of ours was sent and which time the log gave it, for a log that tells the time only as it
    delivers the entry, before or after it confirms the append. One thread."""

    def __init__(self, clock: LogClock) -> None:
        self._clock = clock
        self._sent: deque[tuple[int, float]] = deque(maxlen=TIMES_MAX)  # position, monotonic
        self._came: deque[tuple[int, int]] = deque(maxlen=TIMES_MAX)  # position, ms

    def confirmed(self, position: int, sent: float) -> None:
        """An append of ours is there; `sent` before that."""
        for at, ms in reversed(self._came):
            if at == position:
                self._clock.observe(ms, sent)
                return
            if at < position:
                break
        self._sent.append((position, sent))

    def came(self, position: int, ms: int) -> None:
        """An entry, of anybody, was delivered. Positions ascend, but where a delivery begins anew."""
        while self._sent and self._sent[0][0] < position:
            self._sent.popleft()
        for at, sent in self._sent:  # few, and not in order
            if at == position:
                self._clock.observe(ms, sent)
                return
        self._came.append((position, ms))
        self._clock.observe(ms)

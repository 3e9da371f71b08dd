"""How a subscriber stands with its Monitor: what it was told, whether messages may have passed it by, whether it keeps up."""

from __future__ import annotations

from roq.wire import monitor as wire
from roq.wire.assignment import Overflow

SLOW_SECONDS = 10.0  # with overflow "block": no message taken for this long while the buffer is full


class Standing:
    """overflow, max_frame_bytes: the queue's, 0 until the first welcome. was_ready: at any time. waits: what the Monitor waits
    for before it says that we are ready. present_at: when all of the past was read: whom we had met by then we met where it
    begins for us. `now` is monotonic."""

    def __init__(self, now: float) -> None:
        self.overflow = Overflow.DROP
        self.max_frame_bytes = 0
        self.was_ready = False
        self.waits: tuple[str, ...] = ()
        self.present_at = 0.0
        self._passed_by = 0  # see wire.Heard
        self._well_at = 0.0  # when the last report was sent after which that had not grown
        self._progress = (0, now)

    def welcome(self, notice: wire.SubscriberWelcome) -> None:
        """It begins to count."""
        self.overflow, self.max_frame_bytes, self._passed_by = notice.overflow, notice.max_frame_bytes, 0

    def heard(self, notice: wire.Heard, ours: bool) -> float | None:
        """Since when messages may have passed us by, though we were ready; None if they have not. ours: whether they would have
        been, and lie on no tape that we read."""
        self.was_ready, self.waits = self.was_ready or notice.ready, notice.waits
        if not notice.answers:
            return None
        grown, self._passed_by = notice.passed_by > self._passed_by, notice.passed_by
        if grown and ours:
            return max(self._well_at, self.present_at)
        self._well_at = notice.answers
        return None

    def is_too_slow(self, taken: int, full: bool, now: float) -> bool:
        """Others wait for it, and that too long. taken: messages, ever. full: there is no room for more."""
        if not full or taken != self._progress[0]:
            self._progress = (taken, now)
        return self.overflow is Overflow.BLOCK and now - self._progress[1] > SLOW_SECONDS

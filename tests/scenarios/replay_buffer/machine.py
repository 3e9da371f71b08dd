"""The publisher's replay buffer for its scenarios: frames of one message each, and a clock."""

from __future__ import annotations

from roq.pubsub.replay_buffer import ENTRY_BYTES, ReplayBuffer
from roq.wire.frame import encode_data, parse

FRAME_BYTES = 1000  # as the buffer counts them


class Machine(ReplayBuffer):
    """It holds ten frames, and confirmed ones for five seconds."""

    def __init__(self) -> None:
        super().__init__(seconds=5.0, max_bytes=10 * FRAME_BYTES)
        self._now = 0.0

    def _frame(self, number: int) -> bytes:
        overhead = ENTRY_BYTES + len(encode_data(b"a", 7, 1, 1, 0, 0, [b"\0" * 300], 0)) - 300
        return encode_data(b"a", 7, 1, number, number - 1, number - 1, [b"\0" * (FRAME_BYTES - overhead)], 0)

    def send(self, first: int, last: int = 0) -> None:
        """These messages are handed to the link."""
        for number in range(first, (last or first) + 1):
            self.sent(self._frame(number), number, self._now)

    def wait(self, first: int, last: int = 0) -> str | None:
        """There is no link: these messages wait."""
        lost = sum(self.keep(self._frame(number), number, self._now) for number in range(first, (last or first) + 1))
        return f"{lost} messages given up" if lost else None

    def mark_of(self, path: int) -> str:
        """A MARK leaves."""
        return f"MARK {self.mark(path)}"

    def fin_of(self, path: int) -> None:
        """The FIN leaves."""
        self.mark(path, fin=True)

    def later(self, seconds: float) -> None:
        """Time passes; the buffer forgets what it may."""
        self._now += seconds
        self.prune(self._now)

    def replay(self, path: int, frames: int = 1000) -> str:
        """The next portion of what waits."""
        numbers = [parse(frame)[1].sequence for frame in self.take(path, frames * FRAME_BYTES)]
        return f"{numbers[0]}..{numbers[-1]} on path {path}"

    def state(self) -> str:
        """The positions."""
        unknown = f", unknown {self.unknown.first}..{self.unknown.last}" if self.unknown else ""
        return f"gone {self.gone}, confirmed {self.confirmed}, sent {self.sent_to}, last {self.last}{unknown}"

"""Publisher's ring: its recent frames, to be sent again when an Exchange dies. Bounded by time and bytes.

Frames not sent on any path yet (the link is lost) are kept as long as the bytes allow; what must go then is counted.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

from roq.wire.frame import HEADER, parse

RING_SECONDS = 5.0
RING_BYTES = 64 * 1024 * 1024
PATH_OFFSET = 10  # of the path number within the header
_path = struct.Struct("<I")


class Ring:
    """Append in the order of sending; oldest first."""

    def __init__(self, seconds: float = RING_SECONDS, max_bytes: int = RING_BYTES) -> None:
        self._nanoseconds, self._max_bytes = int(seconds * 1e9), max_bytes
        self._frames: deque[tuple[int, bytes]] = deque()
        self.bytes = 0
        self.unsent_bytes = 0  # at the young end: appended by `keep`

    def sent(self, frame: bytes, timestamp: int) -> None:
        """A frame that was handed to a link. timestamp: nanoseconds since 1970."""
        self._frames.append((timestamp, frame))
        self.bytes += len(frame)
        oldest = timestamp - self._nanoseconds
        while self.bytes > self._max_bytes or self._frames[0][0] < oldest:
            self.bytes -= len(self._frames.popleft()[1])

    def prune(self, now: int) -> None:
        """Forget what was sent too long ago. now: nanoseconds since 1970."""
        oldest = now - self._nanoseconds
        while self._frames and self.bytes > self.unsent_bytes and self._frames[0][0] < oldest:
            self.bytes -= len(self._frames.popleft()[1])

    def keep(self, frame: bytes, timestamp: int) -> int:
        """A frame that has no link to go to yet. How many unsent payloads had to be given up for it (0 while there is room)."""
        self._frames.append((timestamp, frame))
        self.bytes += len(frame)
        self.unsent_bytes += len(frame)
        lost = 0
        while self.bytes > self._max_bytes and len(self._frames) > 1:
            old = self._frames.popleft()[1]
            self.bytes -= len(old)
            if self.bytes < self.unsent_bytes:
                self.unsent_bytes = self.bytes
                lost += parse(old)[1].count
        return lost

    def first_sequence(self, otherwise: int) -> int:
        """Number of the oldest payload kept, or `otherwise`."""
        return parse(self._frames[0][1])[1].sequence if self._frames else otherwise

    def replay(self, path: int) -> Iterator[bytes]:
        """All frames, as frames of this path. They count as sent then."""
        self.unsent_bytes = 0
        number = _path.pack(path)
        for _, frame in self._frames:
            at = frame.index(0) + 1 + PATH_OFFSET
            yield b"".join((frame[:at], number, frame[at + 4 :]))


assert HEADER.format == "<BBQIQQQIQ", "PATH_OFFSET belongs to this layout"

"""What was dropped for one subscriber, so that it can be told: as the WATERMARK that its publisher might have sent, and with
the number of the first message of that path that was dropped. Pure.

It is on the tape all the same. So a subscriber that is told up to where everything is stored, and keeps that as its position,
is told of what it lacks before: else who goes on at that position would never get it, and nobody would have said so.
"""

from __future__ import annotations

from roq.errors import FrameError
from roq.wire.frame import FrameKind, bundle_body, encode_control, parse
from roq.wire.limits import WATERMARK_TOPICS_MAX

DROPPED_TOPICS_MAX = 10_000  # remembered for one subscriber: about 2 MB; when there are more it is told though it is full


class DroppedTopics:
    """Since it was told last, by publisher and path: of each topic the last number, and how many messages were sent on it by
    then."""

    def __init__(self) -> None:
        self._by_path: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        self._first: dict[tuple[int, int], int] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @property
    def is_full(self) -> bool:
        """It is to be told now."""
        return self._count >= DROPPED_TOPICS_MAX

    def add(self, frame: bytes) -> None:
        """Of a publisher's data, alone or a BUNDLE of them; of what can't be read nobody will say what is missing."""
        try:
            topic, header, body = parse(frame)
            if header.kind == FrameKind.BUNDLE:
                for part in bundle_body(body):
                    self.add(part)
                return
            name = topic.decode()
        except (FrameError, UnicodeDecodeError):
            return
        path = header.publisher, header.path
        self._first[path] = min(header.sequence, self._first.get(path, header.sequence))
        topics = self._by_path.setdefault(path, {})
        self._count += name not in topics
        last = header.sequence + header.count - 1
        if last > topics.get(name, (0, 0))[0]:
            topics[name] = last, header.index + header.count

    def watermarks(self, timestamp: int) -> list[bytes]:
        """Frames that say so; nothing was dropped from then on. timestamp: nanoseconds since 1970."""
        frames = []
        for (publisher, path), topics in self._by_path.items():
            named, dropped = list(topics.items()), self._first[publisher, path]
            for first in range(0, len(named), WATERMARK_TOPICS_MAX):
                some = dict(named[first : first + WATERMARK_TOPICS_MAX])
                last = max(number for number, _ in some.values())
                frames.append(encode_control(FrameKind.WATERMARK, publisher, path, last, some, timestamp, dropped))
        self._by_path, self._first, self._count = {}, {}, 0
        return frames

"""A publisher's watermarks: they reveal the last numbers of its topics, for a lost tail would not show otherwise.

They are kept until a MARK behind them is confirmed, and then as long as the replay buffer keeps what is: a watermark may be
lost, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from roq.ids import topic_bytes
from roq.pubsub.path_sender import PathSender
from roq.pubsub.replay_buffer import KEPT_SECONDS
from roq.wire.frame import FrameKind
from roq.wire.limits import WATERMARK_TOPICS_MAX

WATERMARK_ITEM_BYTES = 24  # what one topic adds to a watermark besides its name, at most
TOPICS_REMEMBERED = 100_000  # per publisher; gaps on topics unused for longer are not reported


class TopicRecord:
    """What a publisher's frames of one topic say about those before them: number of the last payload, payloads sent."""

    __slots__ = ("encoded", "last", "mark", "name", "reported", "revealed_at", "sent")

    def __init__(self, name: str) -> None:
        self.name, self.encoded = name, topic_bytes(name)
        self.last = self.sent = 0
        self.reported = 0  # `last` at the last report
        self.mark = 0  # the MARK behind its last watermark
        self.revealed_at = 0.0  # monotonic seconds at which that was sent


class TopicWatermarks:
    """Of one publisher. touched: topics used since their last watermark, by name; whoever uses one puts it there."""

    def __init__(self, sender: PathSender) -> None:
        self.touched: dict[str, TopicRecord] = {}
        self._sender = sender
        self._revealed: dict[str, TopicRecord] = {}  # named in a watermark that may yet have to be repeated; oldest first
        self._replays = 0

    def send_all(self, bytes_max: int) -> None:
        """Of every topic that was used. bytes_max: of one watermark."""
        self._send(list(self.touched.values()), bytes_max)

    def _send(self, topics: Iterable[TopicRecord], bytes_max: int) -> None:
        up_to = self._sender.reveals_up_to
        topics = [topic for topic in topics if topic.last <= up_to]
        if not self._sender.follows or not topics:
            return
        body: dict[str, tuple[int, int]] = {}
        size = 0
        for topic in topics:
            size += len(topic.encoded) + WATERMARK_ITEM_BYTES
            if body and (size > bytes_max or len(body) >= WATERMARK_TOPICS_MAX):
                self._sender.send_control(FrameKind.WATERMARK, body)
                body, size = {}, len(topic.encoded) + WATERMARK_ITEM_BYTES
            body[topic.name] = (topic.last, topic.sent)
        self._sender.send_control(FrameKind.WATERMARK, body)
        mark, now = self._sender.mark(), time.monotonic()
        for topic in topics:
            self.touched.pop(topic.name, None)
            self._revealed.pop(topic.name, None)
            topic.mark, topic.revealed_at = mark, now
            self._revealed[topic.name] = topic

    def look_after(self, bytes_max: int, *, closed: bool) -> None:
        """Forget those that have arrived; send again what may not have, and those of topics that have fallen quiet, or of all
        if the publisher is closed."""
        if self._replays != self._sender.replays:
            self._replays = self._sender.replays
            self.touched = {**self._revealed, **self.touched}
            self._revealed.clear()
        confirmed, old = self._sender.confirmed_mark, time.monotonic() - KEPT_SECONDS
        while self._revealed:
            oldest = next(iter(self._revealed.values()))
            if len(self._revealed) <= TOPICS_REMEMBERED and (oldest.mark > confirmed or oldest.revealed_at > old):
                break
            del self._revealed[oldest.name]
        every = closed or len(self.touched) >= TOPICS_REMEMBERED
        self._send([topic for topic in self.touched.values() if every or topic.last == topic.reported], bytes_max)
        for topic in self.touched.values():
            topic.reported = topic.last

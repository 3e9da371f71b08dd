"""Which topics are in which entries of a tape, as they are written; once in a while that goes onto the tape itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from roq.wire.tape_index import NAMES_BYTES_MAX, TOPICS_MAX, encode_index, group_of, is_index


class TopicIndexBuilder:
    """Of the entries since the last index, or since it was made."""

    def __init__(self) -> None:
        self._first = 0  # 0: there is none
        self._topics: dict[bytes, int] = {}  # groups
        self._bytes = 0  # of their names, as an index has them

    def add(self, position: int, topics: Iterable[bytes]) -> None:
        """The next entry. topics: see wire.recording.messages_in. One that stands where an index would be is in none."""
        if is_index(position) or self._is_too_much():
            return
        self._first = self._first or position
        known, group = self._topics, 1 << group_of(position)
        for topic in topics:
            if topic not in known:
                self._bytes += len(topic) + 1
            known[topic] = known.get(topic, 0) | group

    def finish(self, timestamp: int) -> bytes | None:
        """The frame that says so, and begin anew; None: there is nothing to be said, or too much. timestamp: nanoseconds since
        1970."""
        first, topics, too_much = self._first, self._topics, self._is_too_much()
        self._first, self._topics, self._bytes = 0, {}, 0
        return encode_index(first, topics, timestamp) if first and not too_much else None

    def _is_too_much(self) -> bool:
        return len(self._topics) > TOPICS_MAX or self._bytes > NAMES_BYTES_MAX

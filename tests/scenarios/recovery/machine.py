"""A SegmentRecovery for its scenarios: what a writer left on A, B and C, two of which acknowledged, is secured in epoch 2."""

from __future__ import annotations

from collections.abc import Iterator

from roq.log.replicated.metadata import Fragment, SegmentMetadata, SegmentState
from roq.log.replicated.recovery import SegmentRecovery
from roq.wire.store import Found, entry_crc
from tests.scenarios.appending.machine import frame_text

SEGMENT = SegmentMetadata("s", 1, SegmentState.OPEN, (Fragment(1, ("A", "B", "C")),))


class Machine:
    """Segment "s" from position 1 on."""

    def __init__(self) -> None:
        self._recovery = SegmentRecovery(SEGMENT, 2, 2)

    def check(self) -> None:
        """See Appending."""
        if self._recovery.writing is not None:
            self._recovery.writing.check()

    def fenced(self, node: str, confirmed: int = 0) -> Iterator[str]:
        """The node takes nothing of epoch 1 any more. confirmed: what it knows to be acknowledged."""
        self._recovery.node_fenced(node, confirmed)
        yield from self._told()

    def answers(self, node: str, first: int, *found: str) -> Iterator[str]:
        """What the node says of first, first+1, …: an entry, "none", or "?" for what it can't tell."""
        words = {"none": (Found.NO_SUCH, 0, b""), "?": (Found.UNKNOWN, 0, b"")}
        told = [
            words.get(word, (Found.ENTRY, entry_crc("s", position, word.encode()), word.encode()))
            for position, word in enumerate(found, first)
        ]
        self._recovery.answered(node, first, told)
        yield from self._told()

    def written(self, node: str, first: int, last: int = 0) -> Iterator[str]:
        """The node holds first..last again."""
        assert self._recovery.writing is not None
        self._recovery.writing.added(node, first, (last or first) + 1 - first)
        yield from self._told()

    def replace(self, *nodes: str) -> Iterator[str]:
        """Write to these from here on."""
        self._recovery.replace(nodes)
        yield from (f"from {one.first} on: {' '.join(one.nodes)}" for one in self._recovery.written)
        yield from self._told()

    def _told(self) -> Iterator[str]:
        one = self._recovery
        if one.writing is None:
            yield f"{one.coverage - len(one.fenced)} more to be fenced"
            return
        yield from (f"{node} <- {frame_text(frame)}" for node, frame in one.frames())
        if one.undecidable is not None:
            position, nodes = one.undecidable
            yield f"nobody can tell whether {position} was acknowledged: {', '.join(nodes)} lost something"
        elif one.end is None:
            yield f"{one.position} is open"
        else:
            yield f"ends with {one.end}, {'secured' if one.done else 'not secured yet'}"

"""What a writer that is gone may have left in its last segment: found, secured, and the segment's end decided. Pure.

Theory. Any `coverage` = nodes - ack_quorum + 1 nodes of a fragment share a node with every ack_quorum of them. So:
- when `coverage` nodes are fenced, the old writer can't acknowledge anything any more;
- an acknowledged entry is answered ENTRY by at least one node of any `coverage`: when that many say NO_SUCH, it never was.
  A negative answer fences too, so it stays true. UNKNOWN (damaged, or not sure) and silence prove nothing.
Positions are decided one after the other from the highest confirmed position on, but never from before the last fragment. An
entry that was found is written again to at least ack_quorum nodes, under this epoch; the first position proved absent ends
the segment. Entries beyond it may exist on some node and are never read.

Nodes that fail meanwhile are replaced in memory only: the metadata name the new fragments together with the end. Naming them
earlier would send the next recovery, should this one die, to nodes that lack what was not written again yet.

The segment is announced (OpenSegment) to none of the nodes that are asked, not even to one that is taken again after a silence:
one that lost something, and knows it, answers UNKNOWN, and would answer NO_SUCH from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from roq.log.replicated.appending import Appending
from roq.log.replicated.metadata import Fragment, SegmentMetadata
from roq.wire.store import Add, Found, entry_crc


class SegmentRecovery:
    """Recovery of one unfinished segment by `epoch`."""

    def __init__(self, segment: SegmentMetadata, epoch: int, ack_quorum: int) -> None:
        self.segment, self.epoch, self.ack_quorum = segment, epoch, ack_quorum
        self.fragment = segment.fragments[-1]
        self.coverage = len(self.fragment.nodes) - ack_quorum + 1
        self.fenced: dict[str, int] = {}  # node -> highest confirmed position that reached it
        self.writing: Appending | None = None  # once enough nodes are fenced
        self.end: int | None = None  # the last position, once it is decided
        self.written: tuple[Fragment, ...] = segment.fragments
        self._absent: dict[int, set[str]] = {}
        self._found: dict[int, bytes] = {}
        self._unknown: dict[int, set[str]] = {}  # nodes that can't say, for something of theirs was lost

    @property
    def nodes(self) -> tuple[str, ...]:
        """Whom to ask."""
        return self.fragment.nodes

    @property
    def position(self) -> int:
        """The next position to decide."""
        assert self.writing is not None
        return self.writing.next

    def node_fenced(self, node: str, confirmed: int) -> None:
        """The node refuses lower epochs durably."""
        if node in self.nodes:
            self.fenced[node] = confirmed
        if self.writing is None and len(self.fenced) >= self.coverage:
            start = max(*self.fenced.values(), self.fragment.first - 1) + 1
            self.writing = Appending(self.segment.id, self.epoch, self.nodes, self.ack_quorum, start)

    def answered(self, node: str, first: int, answers: Sequence[tuple[Found, int, bytes]]) -> None:
        """What the node, which has fenced itself by answering, knows of first, first+1, …"""
        if node not in self.nodes or self.writing is None or self.end is not None:
            return
        for position, (found, crc, entry) in enumerate(answers, first):
            if position < self.writing.next:
                continue
            if found == Found.ENTRY and entry_crc(self.segment.id, position, entry) == crc:
                self._found[position] = entry
            elif found == Found.NO_SUCH:
                self._absent.setdefault(position, set()).add(node)
            elif position == self.writing.next:
                self._unknown.setdefault(position, set()).add(node)
        self._decide()

    @property
    def undecidable(self) -> tuple[int, tuple[str, ...]] | None:
        """(position, nodes that can't say): every node has answered, none has the entry, too few know that it never was."""
        if self.writing is None or self.end is not None:
            return None
        position = self.writing.next
        unknown = self._unknown.get(position, set())
        if unknown | self._absent.get(position, set()) < set(self.nodes):
            return None
        return position, tuple(sorted(unknown))

    def frames(self) -> Iterator[tuple[str, Add]]:
        """(node, frame) of what is to be written again. They confirm nothing: the nodes that make it sure need not be named by
        the metadata yet, and the next recovery, should this one die, must not begin behind it."""
        assert self.writing is not None
        for node, frame in self.writing.frames():
            yield node, msgspec.structs.replace(frame, confirmed=0)

    def _decide(self) -> None:
        writing = self.writing
        assert writing is not None
        while self.end is None:
            position = writing.next
            entry = self._found.pop(position, None)
            if entry is not None:
                writing.append(entry)
            elif len(self._absent.get(position, ())) >= self.coverage:
                self.end = position - 1
            else:
                return

    def spares(self, hosts: Iterable[str]) -> frozenset[str]:
        """Of `hosts`, those to which the segment may be announced, so that they are written to: none that is asked."""
        assert self.writing is not None
        return frozenset(hosts).difference(self.writing.nodes, self.nodes)

    @property
    def returning(self) -> tuple[str, ...]:
        """Nodes that are asked and not written to any more. They may be again, as they are: without an announcement."""
        assert self.writing is not None
        return tuple(node for node in self.nodes if node not in self.writing.nodes)

    def replace(self, nodes: tuple[str, ...]) -> None:
        """Secure what is not secured yet on these nodes; whom to ask does not change."""
        assert self.writing is not None
        first = self.writing.begin_change()
        self.writing.finish_change(nodes)
        self.written = (*(one for one in self.written if one.first < first), Fragment(first, nodes))

    @property
    def done(self) -> bool:
        """Is the end decided and everything before it secured?"""
        return self.end is not None and self.writing is not None and self.writing.acked >= self.end

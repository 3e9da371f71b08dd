"""One writer and one open segment: numbers entries, decides what to send to whom, acknowledges in order. Pure.

Theory. Each node confirms frames; `upto[node]` is how far the node is known to hold everything that is not acknowledged yet.
An entry is acknowledged when `ack_quorum` nodes hold it and all entries before it: the ack_quorum-th highest `upto`. So an
acknowledgement never jumps over a hole, and what was acknowledged goes with every frame (`confirmed`).

Ensemble change: `begin_change` freezes acknowledging (an acknowledgement by nodes that are just being left would be missed by
a recovery that asks the new ones), the metadata are changed by compare-and-set, `finish_change` goes on with the new nodes.
What is not acknowledged is sent to the new ones from `first` on.

A node that refuses because too much waits for its disk, or that is silent, is *paced*: it gets one frame at a time, the next
when that is confirmed. What the others acknowledge meanwhile is forgotten here, and the node misses it: `holed`. It gets that
from a closed segment. So neither this side nor the node keeps more for a slow disk than a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roq.wire.store import FRAME_BYTES, Add, entry_crc

PACED_BYTES = 4 * FRAME_BYTES  # with no more than this to send, a paced node that confirms gets all of it again


@dataclass(frozen=True)
class AppendingSafeguards:
    """Rules that a model may switch off to see what they are for."""

    acks_in_order: bool = True
    freeze_while_changing: bool = True


class Appending:
    """Entries first, first+1, … of `segment`, written in `epoch`."""

    def __init__(
        self,
        segment: str,
        epoch: int,
        nodes: tuple[str, ...],
        ack_quorum: int,
        first: int,
        safeguards: AppendingSafeguards = AppendingSafeguards(),
    ) -> None:
        self.segment, self.epoch, self.nodes, self.ack_quorum = segment, epoch, nodes, ack_quorum
        self.acked = first - 1  # the highest acknowledged position
        self.next = first
        self.upto = dict.fromkeys(nodes, first - 1)  # how far each has what is not acknowledged, below `next`; all nodes
        self.sent = dict.fromkeys(nodes, first - 1)  # the same nodes
        self.holed: set[str] = set()  # nodes that will never get some acknowledged entries from here
        self.paced: dict[str, bool] = {}  # node -> may its next frame leave
        self._overloaded: set[str] = set()  # of these, the ones that refused one since the last `resume`
        self.changing = False
        self.bytes_pending = 0  # of all that is in _entries
        self._entries: dict[int, tuple[int, bytes]] = {}  # position -> (crc, entry), behind `acked` and before `next`
        self._safeguards = safeguards

    def append(self, entry: bytes) -> int:
        """Take one entry; its position."""
        position = self.next
        self._entries[position] = (entry_crc(self.segment, position, entry), entry)
        self.bytes_pending += len(entry)
        self.next = position + 1
        return position

    def frames(self) -> Iterator[tuple[str, Add]]:
        """(node, frame) of everything not sent yet; it counts as sent."""
        made: dict[int, Add] = {}
        for node in self.nodes:
            position = max(self.sent[node], self.acked) + 1
            end = self.next
            if self.paced and node in self.paced:
                if position == end or not self.paced[node]:
                    continue
                self.paced[node] = False
                end = position + 1  # one frame, however many entries it has
            if self.sent[node] < self.acked:
                self.holed.add(node)
            while position < end:
                frame = made.get(position)
                if frame is None:
                    frame = made[position] = self._frame(position)
                yield node, frame
                position += len(frame.entries)
            self.sent[node] = position - 1

    def _frame(self, position: int) -> Add:
        first, size = position, 0
        crcs: list[int] = []
        entries: list[bytes] = []
        while position < self.next and size < FRAME_BYTES:
            crc, entry = self._entries[position]
            crcs.append(crc)
            entries.append(entry)
            size += len(entry)
            position += 1
        return Add(self.segment, self.epoch, first, self.acked, crcs, entries)

    def confirmation(self) -> Add:
        """A frame without entries that only tells what is acknowledged."""
        return Add(self.segment, self.epoch, self.next, self.acked, [], [])

    def added(self, node: str, first: int, count: int) -> int:
        """The node holds these entries durably; the highest acknowledged position."""
        held = self.upto.get(node)
        last = min(first + count, self.next) - 1
        if held is not None and last > held and (first <= max(held, self.acked) + 1 or not self._safeguards.acks_in_order):
            self.upto[node] = last
        if self.paced and node in self.paced and held is not None and self.upto[node] >= self.sent[node]:
            if self.bytes_pending <= PACED_BYTES and node not in self._overloaded:
                del self.paced[node]
            else:
                self.paced[node] = True
        return self._advance()

    def _advance(self) -> int:
        if self.changing and self._safeguards.freeze_while_changing:
            return self.acked
        reached = sorted(self.upto.values(), reverse=True)[self.ack_quorum - 1]
        for position in range(self.acked + 1, reached + 1):
            self.bytes_pending -= len(self._entries.pop(position)[1])
        self.acked = max(self.acked, reached)
        return self.acked

    def behind(self, node: str) -> bool:
        """Has the node not confirmed all that was sent to it, be it acknowledged or not?"""
        return node in self.upto and self.upto[node] < (self.next - 1 if node in self.paced else self.sent[node])

    def overloaded(self, node: str, first: int) -> None:
        """The node refused entries from `first` on, for too much waits for its disk: it gets them after the next `resume`."""
        if node in self.sent:
            self.sent[node] = min(self.sent[node], max(first - 1, self.upto[node]))
            self.paced[node] = False
            self._overloaded.add(node)

    def resume(self) -> None:
        """It is time to try again what overloaded nodes refused."""
        self.paced.update(dict.fromkeys(self._overloaded, True))
        self._overloaded.clear()

    def send_again(self, node: str) -> None:
        """What the node has not confirmed is to be sent again, one frame first."""
        if node not in self.upto:
            return
        if self.upto[node] < self.acked:
            self.holed.add(node)
        if not self.drained:
            self.sent[node] = max(self.upto[node], self.acked)
            self.paced[node] = True

    # --- changing the ensemble ----------------------------------------------------------------------------------------

    def begin_change(self) -> int:
        """Nothing is acknowledged until `finish_change`; the first position that is not acknowledged."""
        self.changing = True
        return self.acked + 1

    def finish_change(self, nodes: tuple[str, ...]) -> int:
        """Go on with these nodes (the same ones: nothing was changed); the highest acknowledged position."""
        self.nodes = nodes
        self.upto = {node: self.upto.get(node, self.acked) for node in nodes}
        self.sent = {node: self.sent.get(node, self.acked) for node in nodes}
        self.holed &= set(nodes)
        self._overloaded &= set(nodes)
        self.paced = {node: may for node, may in self.paced.items() if node in nodes}
        self.changing = False
        return self._advance()

    @property
    def drained(self) -> bool:
        """Is everything acknowledged?"""
        return self.acked == self.next - 1

    def check(self) -> None:
        """Its invariants."""
        assert len(self.nodes) >= self.ack_quorum
        assert set(self.upto) == set(self.sent) == set(self.nodes)
        assert sorted(self._entries) == list(range(self.acked + 1, self.next))
        assert all(self.upto[node] < self.next for node in self.nodes)
        assert self.bytes_pending == sum(len(entry) for _, entry in self._entries.values())

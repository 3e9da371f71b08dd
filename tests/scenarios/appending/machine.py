"""A log's Appending for its scenarios: three nodes, two of which have to hold an entry; entries are named by their text."""

from __future__ import annotations

from collections.abc import Iterator

from roq.log.replicated.appending import Appending
from roq.wire.store import Add


class Machine:
    """Segment "s" of epoch 1 on A, B and C, from position 1 on."""

    def __init__(self) -> None:
        self._appending = Appending("s", 1, ("A", "B", "C"), 2, 1)
        self.check = self._appending.check

    def append(self, *entries: str) -> list[str]:
        """One after the other; their positions."""
        return [f"{entry} is {self._appending.append(str(entry).encode())}" for entry in entries]

    def send(self) -> list[str]:
        """What leaves now."""
        return [f"{node} <- {frame_text(frame)}" for node, frame in self._appending.frames()]

    def added(self, node: str, first: int, last: int = 0) -> str:
        """The node holds first..last."""
        before = self._appending.acked
        acked = self._appending.added(node, first, (last or first) + 1 - first)
        return f"acknowledged up to {acked}" if acked > before else "nothing new is acknowledged"

    def overloaded(self, node: str, first: int) -> None:
        """The node refused what begins there."""
        self._appending.overloaded(node, first)

    def resume(self) -> None:
        """It is time to try again."""
        self._appending.resume()

    def silent(self, node: str) -> None:
        """The node has not confirmed in time, and is asked again."""
        self._appending.send_again(node)

    def change(self) -> str:
        """The ensemble is about to be changed."""
        return f"what begins with {self._appending.begin_change()} goes to the new nodes"

    def changed(self, *nodes: str) -> str:
        """The metadata name these."""
        return f"acknowledged up to {self._appending.finish_change(nodes)}"

    def state(self) -> Iterator[str]:
        """Who lacks what."""
        one = self._appending
        yield f"acknowledged {one.acked} of {one.next - 1}"
        for node in one.nodes:
            words = [f"holds up to {one.upto[node]}", *["paced"] * (node in one.paced), *["misses some"] * (node in one.holed)]
            yield f"{node} {', '.join(words)}"


def frame_text(frame: Add) -> str:
    """Entries with their positions, and what is acknowledged."""
    entries = " ".join(f"{position}:{entry.decode()}" for position, entry in enumerate(frame.entries, frame.first))
    return f"{entries} (acknowledged {frame.confirmed})"

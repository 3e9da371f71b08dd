"""Producers that were opened anew: whose earlier paths every Exchange refuses from then on. Pure: no IO, no clock.

Whoever joins under the id of another one, with paths above its, is let in once each Exchange that lives takes nothing more of
the lower ones, and has stored what it took: what it then finds on the tapes is all there is of them. An Exchange that has not
reported for so long that it counts as gone is not waited for: the Monitor can't know what it does (docs/recorded-queues.md). A
Monitor that takes over waits for as long. Who is on a path already was let in before, and is let in again at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roq.errors import IncompatibleVersion, NotReady, ProducerFenced, RoqError
from roq.pubsub.monitor.records import Exchange
from roq.wire.monitor import SERVER_FENCES

FENCES_KEPT = 10_000  # the producers that were opened last; who fell out keeps nothing at the GCM, and so ends within its lease


class Fences:
    """Of one Monitor, for one term."""

    def __init__(self) -> None:
        self._paths: dict[int, int] = {}  # by publisher: those up to here are fenced; opened last comes last
        self._done: dict[int, set[str]] = {}  # lives of Exchanges that have done so

    def add(self, publisher: int, path: int) -> None:
        """Paths up to this one are over."""
        if path > self._paths.get(publisher, 0):
            self._done[publisher] = set()
            self._paths.pop(publisher, None)
            self._paths[publisher] = path
            if len(self._paths) > FENCES_KEPT:
                oldest = next(iter(self._paths))
                del self._paths[oldest], self._done[oldest]

    def refuses(self, publisher: int, above: int) -> bool:
        """Whether one whose paths are above this one was followed by another."""
        return above < self._paths.get(publisher, 0)

    def check_newest(self, publisher: int, above: int) -> None:
        """Raises ProducerFenced."""
        if self.refuses(publisher, above):
            raise ProducerFenced("this producer was opened elsewhere since")

    def done(self, publisher: int, path: int, token: str) -> None:
        """This Exchange takes nothing more of paths up to this one."""
        if path >= self._paths.get(publisher, path + 1):
            self._done[publisher].add(token)

    def open(self, publisher: int, tokens: Iterable[str]) -> list[str]:
        """Those of these Exchanges that have not done so yet."""
        done = self._done.get(publisher, set())
        return [token for token in tokens if token not in done]


def still_taking(unfenced: Sequence[Exchange]) -> RoqError:
    """Why a producer is not let in: one of an older version never ends what the life before still sends through it."""
    if old := [one for one in unfenced if one.protocol < SERVER_FENCES]:
        names = ", ".join(f"{one.address.id} on {one.host}" for one in old)
        return IncompatibleVersion(f"these Exchanges have a version without producers: upgrade their hosts: {names}")
    names = ", ".join(one.address.id for one in unfenced) or "those that have not reported to this Monitor yet"
    return NotReady(f"Exchanges that still take what this producer sent before it was opened anew: {names}")

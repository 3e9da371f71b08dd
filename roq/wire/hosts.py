"""What is asked about a host that is being left, as part of the conversation with the GCM (roq/wire/gcm.py)."""

from __future__ import annotations

import msgspec

from roq.wire.assignment import Leaving


class DescribeRemains(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What is still on this host."""

    host: str


class HostRemains(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What is still on a host: processes of queues and work queues that are assigned to it, by kind, its backup Monitors and
    standbys among them; and of what its store keeps, what something counts on. segments: stretches of logs that name it, and
    snapshots; payloads: of tasks, -1: it does not say; ranges: of shuffles. leaving: what is on its way elsewhere. waits: why
    some of that does not get on, for people. store: it is to run there; of an evacuated host it ends last."""

    host: str
    leaving: Leaving
    exchanges: int = 0
    monitors: int = 0
    masters: int = 0
    segments: int = 0
    payloads: int = 0
    ranges: int = 0
    waits: tuple[str, ...] = ()
    store: bool = False

    @property
    def processes(self) -> int:
        """All of them."""
        return self.exchanges + self.monitors + self.masters

    @property
    def data(self) -> bool:
        """Whether something counts on its store."""
        return bool(self.segments or self.payloads or self.ranges)

    @property
    def left(self) -> bool:
        """Whether everything that is to leave has left."""
        return not self.processes and (self.leaving is not Leaving.EVERYTHING or not (self.data or self.store))

"""The topology broadcast (DESIGN §4): a PUB socket that tells the whole cluster, soon after each change and every so often.

Only the leader broadcasts. Changes are coalesced, and telling never takes more than a tenth of the leader's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from gcm.cluster import ClusterState
from roq.errors import NotLeader, RoqError
from roq.runtime import sockets
from roq.wire.gcm import BROADCAST_TOPIC, ClusterView

SPACING_SECONDS = 0.2  # between two broadcasts, however much changes
BUSY_SHARE = 10  # a broadcast that took s seconds to make is followed by at least BUSY_SHARE * s of silence


class Topology:
    """Bound at `address:port` (0: any free port, see `port`). `view` raises NotLeader while there is nothing to tell."""

    def __init__(self, address: str, port: int, every_seconds: float, view: Callable[[], ClusterView]) -> None:
        socket = sockets.control_socket(zmq.PUB)
        try:
            self.port = sockets.bind(socket, address, port)
        except RoqError:
            socket.close()
            raise
        self._link = sockets.Link(socket)
        self._view, self._every_seconds = view, every_seconds
        self._news = asyncio.Event()

    def changed(self, before: ClusterState, after: ClusterState) -> None:
        """Tell soon, if this is more than a host's new load."""
        if _shape(before) != _shape(after) or any(
            before.hosts.get(name) is not host and _matters(before, after, name) for name, host in after.hosts.items()
        ):
            self._news.set()

    async def run(self) -> None:
        """Broadcast until cancelled."""
        while True:
            started = time.monotonic()
            with suppress(NotLeader):  # then the leader tells
                self._link.send((BROADCAST_TOPIC, msgspec.msgpack.encode(self._view())))
            await asyncio.sleep(max(SPACING_SECONDS, BUSY_SHARE * (time.monotonic() - started)))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every_seconds):  # wait_for of Python 3.11 may swallow our cancellation
                    await self._news.wait()
            self._news.clear()

    def close(self) -> None:
        """Close the socket."""
        self._link.close()


def _shape(cluster: ClusterState) -> tuple[int, int, int, int, int]:
    """Differs if the epoch, a queue, a work queue, a policy or the set of hosts does: these tables are replaced whole when
    they change."""
    return cluster.epoch, id(cluster.queues), id(cluster.work_queues), id(cluster.policies), len(cluster.hosts)


def _matters(before: ClusterState, after: ClusterState, name: str) -> bool:
    old, new = before.host(name), after.host(name)
    return (old.alive, old.draining, old.revision, old.report) != (new.alive, new.draining, new.revision, new.report)

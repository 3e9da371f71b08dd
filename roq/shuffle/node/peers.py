"""Connections to other followers by endpoint, closed when they were not used for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from roq.runtime.rpc import RpcClient
from roq.wire import shuffle as wire

T = TypeVar("T", bound=msgspec.Struct)
REQUEST_SECONDS = 20.0  # the disk of the other may be slow
IDLE_SECONDS = 60.0
LOOK_SECONDS = 10.0  # between two looks which are idle


class Peers:
    """On the running loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients: dict[str, RpcClient] = {}
        self._used: dict[str, float] = {}
        self._busy: dict[str, int] = {}
        self._looked = clock()

    async def request(self, endpoint: str, body: msgspec.Struct, expect: type[T], seconds: float = REQUEST_SECONDS) -> T:
        """One request. Raises what the other raised, Unavailable, DeadlineExceeded, Closed."""
        self._close_idle()
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = RpcClient(endpoint, wire.Reply, watched=True)
        self._busy[endpoint] = self._busy.get(endpoint, 0) + 1
        try:
            return await client.request(body, expect, seconds)
        finally:
            self._busy[endpoint] -= 1
            self._used[endpoint] = self._clock()

    def _close_idle(self) -> None:
        now = self._clock()
        if now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        for endpoint in [name for name, used in self._used.items() if now - used > IDLE_SECONDS and not self._busy[name]]:
            self._clients.pop(endpoint).close()
            del self._used[endpoint], self._busy[endpoint]

    def close(self) -> None:
        """Requests under way fail with Closed."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

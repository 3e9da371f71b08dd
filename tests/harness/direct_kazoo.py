"""A kazoo client whose watchers are called on its connection thread, in the order in which the server told them.

So whoever has the answer to a request also has every event that came before it.
"""

from __future__ import annotations

from typing import Any

from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.handlers.threading import SequentialThreadingHandler  # type: ignore[import-untyped]

CONNECT_SECONDS = 15.0


class _Direct(SequentialThreadingHandler):  # type: ignore[misc]
    def start(self) -> None:
        """No workers."""

    def stop(self) -> None:
        """No workers."""

    def dispatch_callback(self, callback: Any) -> None:
        """Call it now."""
        callback.func(*callback.args)


def connected(address: str, session_seconds: float = 10.0, **options: Any) -> Any:
    """A connected client; close it with `close`."""
    client = KazooClient(hosts=address, timeout=session_seconds, handler=_Direct(), **options)
    client.start(CONNECT_SECONDS)
    return client


def close(client: Any) -> None:
    """End its session and its thread."""
    client.stop()
    client.close()

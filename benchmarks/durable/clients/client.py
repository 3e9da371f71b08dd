"""What a client of a durable queue does here."""

from __future__ import annotations

from typing import Protocol


class Client(Protocol):
    """One connection, used by one process."""

    def put(self, payload: bytes) -> None:
        """One message; returns when it is acknowledged."""

    def take(self) -> bytes:
        """One message, read and acknowledged."""

    def put_many(self, count: int, payload: bytes, window: int) -> None:
        """`count` messages, at most `window` of them unacknowledged; returns when all are acknowledged."""

    def take_many(self, count: int, window: int) -> None:
        """Read and acknowledge `count` messages, at most `window` at a time."""

    def close(self) -> None:
        """Disconnect, once everything sent has arrived."""

"""ROUTER and DEALER: messages to a server and back, on connections of the loop's own (connections.py).

Not covered: what the messages mean (rpc.py, roq/workqueue/master); requests of blocking code (blocking_connection.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from roq.runtime.connections import WAITING_BYTES_MAX, BudgetedPeer, Client, Server
from roq.runtime.security import Security
from roq.wire import zmtp
from roq.wire.card import Card
from roq.wire.limits import CONTROL_BYTES_MAX, CONTROL_MESSAGES_QUEUED, UNFINISHED_BYTES_MAX


class Router(Server):
    """on_message([peer, part, …]); on_drained() once after those that came together."""

    def __init__(
        self,
        address: str,
        port: int,
        on_message: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
        unfinished_max: int = UNFINISHED_BYTES_MAX,
        security: Security | None = None,
        let_in: Callable[[Card], None] = lambda card: None,
    ) -> None:
        self.on_message, self._on_drained = on_message, on_drained
        self._draining = False
        super().__init__(
            address, port, b"ROUTER", CONTROL_BYTES_MAX, lambda: _RouterPeer(self), unfinished_max, security, let_in
        )

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is gone, or dropped because it does not read."""
        connection = self.peers.get(peer)
        return connection is not None and bool(connection.send(message))

    def drained(self) -> None:
        """A peer's messages were handed over; others may have sent some in the same turn of the loop."""
        if self._on_drained is None or self._draining:
            return
        if len(self.peers) == 1:
            self._on_drained()
        else:
            self._draining = True
            self._loop.call_soon(self._drained)

    def _drained(self) -> None:
        self._draining = False
        if not self.closed and self._on_drained is not None:
            self._on_drained()


class _RouterPeer(BudgetedPeer):
    """One connection of a Router."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._router = router

    def send(self, message: bytes) -> bool:
        if self.transport.is_closing():
            return False
        if self.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            self.transport.abort()
            return False
        self.transport.write(zmtp.frame(message))
        return True

    def data_received(self, data: bytes) -> None:
        router = self._router
        messages = self.take(self.opened(data))
        for parts in messages:
            if router.closed:
                return
            router.on_message([self.name, *parts])
        if messages:
            router.drained()
        self.have_read(self.unfinished, finished=bool(messages))


class Dealer(Client):
    """on_message([part, …]); on_ended(): the connection ended or was refused.

    What is sent while there is no connection waits, at most CONTROL_MESSAGES_QUEUED messages and about WAITING_BYTES_MAX bytes;
    what was on its way when a connection ended is lost.
    """

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[list[bytes]], None],
        on_ended: Callable[[], None],
        security: Security | None = None,
    ) -> None:
        self._on_message, self._on_ended = on_message, on_ended
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        super().__init__(endpoint, b"DEALER", security=security)

    def greeted(self) -> None:
        """What waited leaves."""
        self.transport.writelines([*map(zmtp.frame, self._backlog)])
        self._backlog.clear()
        self._backlog_bytes = 0

    def received(self, messages: list[list[bytes]]) -> None:
        """Replies and notices."""
        for parts in messages:
            if self.closed:
                return
            self._on_message(parts)

    def ended(self) -> None:
        """Tell."""
        self._on_ended()

    def send(self, message: bytes) -> bool:
        """Now, or when there is a connection; False if too much waits."""
        if self.closed:
            return False
        if not self.open:
            if len(self._backlog) >= CONTROL_MESSAGES_QUEUED or self._backlog_bytes > WAITING_BYTES_MAX:
                return False
            self._backlog.append(message)
            self._backlog_bytes += len(message)
            return True
        if self.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            return False
        self.transport.write(zmtp.frame(message))
        return True

"""The master's request socket: a ROUTER whose messages are decoded and handed over one by one, without a task for each."""

from __future__ import annotations

from collections.abc import Callable

from roq.errors import FrameError
from roq.runtime.connections import Router
from roq.runtime.observe import Counters, Refusals, logger
from roq.wire import master as wire
from roq.wire.decoding import UNDECODABLE
from roq.wire.envelope import EnvelopeKind, open_envelope, seal_error

log = logger(__name__)


class Door:
    """Bound at address:port (0: any free one). take(peer, id, request): must not block, nor raise; taken(): called once after
    those that came together."""

    def __init__(
        self,
        address: str,
        port: int,
        take: Callable[[bytes, int, wire.Request], None],
        taken: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._take, self._counters = take, counters
        self._refusals = Refusals(log, counters)
        self._router = Router(address, port, self._message, taken)
        self.port = self._router.port

    def _message(self, parts: list[bytes]) -> None:
        try:
            call = wire.open_call(parts[-1])
        except UNDECODABLE as error:
            self._refuse(parts, error)
            return
        if len(parts) != 2:
            self._refusals.note("undecodable", FrameError(f"{len(parts)} parts instead of 2"))
            return
        self._counters["requests"] += 1
        self._take(parts[0], call.id, call.body)

    def _refuse(self, parts: list[bytes], error: Exception) -> None:
        """Whoever can be answered is."""
        self._refusals.note("undecodable", error)
        try:
            envelope = open_envelope(parts[-1])
        except FrameError:
            return
        if envelope.kind == EnvelopeKind.REQUEST and len(parts) == 2:
            self.send(parts[0], seal_error(envelope.id, FrameError(f"undecodable request: {error}")))

    def send(self, peer: bytes, message: bytes) -> bool:
        """False if the peer is gone."""
        return self._router.send(peer, message)

    def connected(self, peer: bytes) -> bool:
        """Could it be sent something?"""
        return peer in self._router.peers

    def close(self) -> None:
        """Close the socket."""
        self._router.close()

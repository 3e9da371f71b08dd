"""Shutdown Monitor (thesis §6.4.4): the control endpoint through which a process is stopped cleanly, asked, or reconfigured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec

from roq.errors import CallError
from roq.runtime.observe import Counters, logger
from roq.runtime.rpc import RpcClient, RpcServer
from roq.runtime.security import process_security
from roq.wire import process as wire
from roq.wire.assignment import ProcessSpec

log = logger(__name__)


class ShutdownMonitor:
    """Serves Shutdown, Ping, Configure and Fence on `address:port` (0: any free port, see `port`). term: of a process that a
    higher one replaces; on_fenced(term): just before it stops for that; returns what a Monitor answers."""

    def __init__(
        self,
        name: str,
        address: str,
        port: int,
        stop: asyncio.Event,
        counters: Counters,
        configure: Callable[[ProcessSpec], None] | None = None,
        term: int | None = None,
        on_fenced: Callable[[int], wire.Named | None] | None = None,
    ) -> None:
        self._term, self._on_fenced = term, on_fenced
        self._name, self._stop, self._counters, self._configure = name, stop, counters, configure
        self._server = RpcServer(address, port, wire.Request, self._handle, counters=counters)
        self.port = self._server.port

    async def _handle(self, peer: bytes, request: wire.Request) -> msgspec.Struct:
        match request:
            case wire.Shutdown(reason):
                log.info("shutdown requested", extra={"fields": {"reason": reason}})
                asyncio.get_running_loop().call_soon(self._stop.set)
                return wire.ProcessDone()
            case wire.Ping():
                return wire.Pong(self._name, os.getpid(), dict(self._counters))
            case wire.ConfigureProcess(spec):
                if self._configure is None:
                    raise CallError(f"{self._name} takes no new configuration while it runs")
                self._configure(spec)
                if self._term is not None:
                    self._term = spec.term
                return wire.ProcessDone()
            case wire.FenceProcess(name, term):
                return self._fence(name, term)
            case wire.TakeAccess(signed):
                if (security := process_security()) is not None:
                    security.take(signed)
                return wire.ProcessDone()

    def _fence(self, name: str, term: int) -> msgspec.Struct:
        if name != self._name or self._term is None or term <= self._term:
            raise CallError(f"{self._name} of term {self._term} is not replaced by {name} of term {term}")
        log.warning("fenced by a higher term: stopping", extra={"fields": {"term": self._term, "higher": term}})
        named = self._on_fenced(term) if self._on_fenced is not None else None
        asyncio.get_running_loop().call_soon(self._stop.set)
        return wire.ProcessDone(named)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


async def ask(address: str, port: int, request: wire.Request, timeout_seconds: float = 2.0) -> wire.ProcessDone | wire.Pong:
    """Send one request to a process's Shutdown Monitor."""
    client = RpcClient(f"tcp://{address}:{port}", wire.Reply)
    try:
        expect: type[wire.ProcessDone] | type[wire.Pong] = wire.Pong if isinstance(request, wire.Ping) else wire.ProcessDone
        return await client.request(request, expect, timeout_seconds)
    finally:
        client.close()

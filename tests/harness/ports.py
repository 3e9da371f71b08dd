"""A loopback address of this test process's own, and free ports. Not covered: who takes a port before it is used (all that are
handed out here differ, and at an address of one's own nobody else looks for one)."""

from __future__ import annotations

import socket
from functools import cache

from roq.tools.local.loopback import LoopbackSubnet

_given: set[int] = set()


@cache
def _subnet() -> LoopbackSubnet:
    return LoopbackSubnet()


def own_address() -> str:
    """Where no other test process listens, and from where nobody connects: a port found free there stays free."""
    return _subnet().address(1)


def free_port(address: str) -> int:
    """A port that nobody listens at. Never the same twice in one run: what it is for may be started later."""
    while True:
        with socket.socket() as probe:  # not a ZeroMQ socket: those are closed a while after close() has returned
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port

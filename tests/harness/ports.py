"""Free ports of this machine. Not covered: who takes one before it is used (all that are handed out here differ)."""

from __future__ import annotations

import socket

_given: set[int] = set()


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens at. Never the same twice in one run: what it is for may be started later."""
    while True:
        with socket.socket() as probe:  # not a ZeroMQ socket: those are closed a while after close() has returned
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port

"""libzmq's own sockets: the other ends that RoQ's links and requests are tested against."""

from __future__ import annotations

import os

import zmq

QUEUED = 32  # messages
LINGER_MS = 500

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_pid = 0


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """This process's. After a fork the child gets its own."""
    global _context, _pid
    if _context is None or _pid != os.getpid():
        _context, _pid = zmq.Context(), os.getpid()
        _context.set(zmq.MAX_SOCKETS, 10_000)
        _context.set(zmq.BLOCKY, 0)
    return _context


def socket(kind: int, queued: int = QUEUED) -> zmq.Socket[bytes]:
    """Made, not connected."""
    made = context().socket(kind)
    made.set(zmq.LINGER, LINGER_MS)
    made.set(zmq.SNDHWM, queued)
    made.set(zmq.RCVHWM, queued)
    made.set(zmq.RECONNECT_IVL, 20)
    return made


def bind(made: zmq.Socket[bytes], address: str, port: int = 0) -> int:
    """The port; 0: any free one."""
    if port == 0:
        return made.bind_to_random_port(f"tcp://{address}")
    made.bind(f"tcp://{address}:{port}")
    return port

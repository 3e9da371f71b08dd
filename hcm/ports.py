"""Which ports a process gets: by role, chosen once by test-binding, then fixed."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from roq.errors import PortTaken
from roq.wire.assignment import ProcessKind

ROLES: dict[ProcessKind, tuple[str, ...]] = {
    ProcessKind.MONITOR: ("clients", "kpis", "control"),
    ProcessKind.EXCHANGE: ("front", "back", "control"),
    ProcessKind.SCALING: ("control",),
    ProcessKind.STORE: ("clients", "control"),
    ProcessKind.MASTER: ("clients", "control"),
}


def is_free(address: str, port: int) -> bool:
    """Can `address:port` be bound now? (As ZeroMQ binds: connections of a dead predecessor are no hindrance.)"""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def all_free(address: str, ports: Iterable[int]) -> bool:
    """Can all be bound now?"""
    return all(is_free(address, port) for port in ports)


def choose(kind: ProcessKind, address: str, base: int, count: int, start: int, used: set[int]) -> tuple[dict[str, int], int]:
    """(port by role, where to go on next time): free ports of base … base + count - 1 from `start` on, none of `used`.

    The search goes round, so that a port rests before another process gets it: peers of its last owner may still be
    connecting to it. Raises PortTaken if there are not enough.
    """
    ports: dict[str, int] = {}
    roles = list(ROLES[kind])
    first = start - base if base <= start < base + count else 0
    for step in range(count):
        port = base + (first + step) % count
        if port not in used and is_free(address, port):
            ports[roles[len(ports)]] = port
            if len(ports) == len(roles):
                return ports, base + (first + step + 1) % count
    raise PortTaken(f"no free ports for a {kind} on {address} between {base} and {base + count - 1}")

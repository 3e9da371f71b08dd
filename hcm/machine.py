"""What this machine has to give: ports (which roles a process needs; chosen once by test-binding, then fixed), and how loaded
its processor, memory and disk are, and what a process of it uses."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil

from roq.errors import PortTaken
from roq.wire.assignment import ProcessKind

SHUFFLE = ("pyarrow", "numpy")  # a store takes part in shuffles where these are installed
ROLES: dict[ProcessKind, tuple[str, ...]] = {
    ProcessKind.MONITOR: ("clients", "kpis", "control"),
    ProcessKind.EXCHANGE: ("front", "back", "control"),
    ProcessKind.SCALING: ("control",),
    ProcessKind.STORE: ("clients", "control", *(("shuffle",) if all(map(find_spec, SHUFFLE)) else ())),
    ProcessKind.MASTER: ("clients", "control"),
}
NOTICEABLE = 0.05  # a change of load by less is not worth a ZooKeeper write


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


def lacking(kind: ProcessKind, ports: dict[str, int]) -> tuple[str, ...]:
    """Roles without a port: all of a new process, those that an earlier version did not have."""
    return tuple(role for role in ROLES[kind] if role not in ports)


def choose_ports(
    kind: ProcessKind, address: str, base: int, count: int, start: int, used: set[int], wanted: Sequence[str] = ()
) -> tuple[dict[str, int], int]:
    """(port by role, where to go on next time): free ports of base … base + count - 1 from `start` on, none of `used`.
    wanted: the roles, if not all.

    The search goes round, so that a port rests before another process gets it: peers of its last owner may still be
    connecting to it. Raises PortTaken if there are not enough.
    """
    ports: dict[str, int] = {}
    roles = wanted or ROLES[kind]
    first = start - base if base <= start < base + count else 0
    for step in range(count):
        port = base + (first + step) % count
        if port not in used and is_free(address, port):
            ports[roles[len(ports)]] = port
            if len(ports) == len(roles):
                return ports, base + (first + step + 1) % count
    raise PortTaken(f"no free ports for a {kind} on {address} between {base} and {base + count - 1}")


class HostStats:
    """Asked about once a second; the processor fraction is the average since the call before."""

    def __init__(self) -> None:
        psutil.cpu_percent(None)  # the first call only starts the interval

    def sample(self) -> tuple[float, float]:
        """(processor fraction, memory fraction)."""
        return psutil.cpu_percent(None) / 100, psutil.virtual_memory().percent / 100


def memory_bytes() -> int:
    """Memory this host has."""
    return int(psutil.virtual_memory().total)


def disk_free_bytes(directory: Path) -> int:
    """Room on the file system of `directory`, -1 if it does not tell."""
    try:
        return int(psutil.disk_usage(str(directory)).free)
    except OSError:
        return -1


class ProcessUsage(NamedTuple):
    """cpu_seconds: since it began; started: when that was, seconds since 1970."""

    cpu_seconds: float
    resident_bytes: int
    started: float


def process_usage(pid: int) -> ProcessUsage | None:
    """What a process has used; None if there is none."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessUsage(times.user + times.system, process.memory_info().rss, process.create_time())
    except psutil.Error:
        return None


def noticeably_different(left: tuple[float, float], right: tuple[float, float]) -> bool:
    """Is either fraction off by NOTICEABLE?"""
    return any(abs(a - b) >= NOTICEABLE for a, b in zip(left, right, strict=True))

"""Telling systemd how a daemon is (sd_notify): one datagram to $NOTIFY_SOCKET. Does nothing without a service manager."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

READY = "READY=1"
WATCHDOG = "WATCHDOG=1"
STOPPING = "STOPPING=1"
EXIT_FOR_GOOD = 90  # of a daemon that was told to stop for good; RestartPreventExitStatus= of its unit


def notify(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send `state` (READY, WATCHDOG, STOPPING or any "KEY=value" lines); False if nobody listens."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # abstract socket
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        try:
            out.sendto(state.encode(), address)
        except OSError:
            return False  # the service manager is busy or restarting; the next call tells it again
    return True


def managed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a service manager started this process and will start it again."""
    return bool(environment.get("NOTIFY_SOCKET"))


def watchdog_seconds(environment: Mapping[str, str] = os.environ) -> float | None:
    """How often to send WATCHDOG: half of what systemd allows this process; None if it does not watch."""
    allowed_microseconds = environment.get("WATCHDOG_USEC", "")
    owner = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not allowed_microseconds.isdigit() or owner != str(os.getpid()):
        return None
    return int(allowed_microseconds) / 2e6

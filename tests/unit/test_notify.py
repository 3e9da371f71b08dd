"""Telling systemd: one datagram, and silence where nobody listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from roq.runtime.run import READY, notify, watchdog_seconds


def test_ready_reaches_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(2)
        assert notify(READY, {"NOTIFY_SOCKET": path})
        assert manager.recv(100) == b"READY=1"
    assert not notify(READY, {"NOTIFY_SOCKET": path})
    assert not notify(READY, {})


def test_watchdog_is_for_the_process_it_names() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}) == 5.0
    assert watchdog_seconds({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_seconds({}) is None

"""Running one process: uvloop, signals, exit codes, background tasks, and its service manager (sd_notify). Nothing of RoQ's
protocols here."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import uvloop

from roq.errors import RoqError
from roq.runtime.connections import send_rest
from roq.runtime.observe import logger

log = logger(__name__)
PR_SET_NAME = 15
READY = "READY=1"
WATCHDOG = "WATCHDOG=1"
STOPPING = "STOPPING=1"
EXIT_FOR_GOOD = 90  # of a daemon that was told to stop for good; RestartPreventExitStatus= of its unit


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main(stop)` to its end; SIGTERM and SIGINT set `stop`. 0: ended by itself or by stop, 1: a RoqError.

    What was imported is taken out of what Python looks through for circles: it looks for them everywhere only when a quarter
    as much as it then found has come since, and errors leave circles, so each process would keep megabytes of them.
    """

    async def body() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            await main(stop)
        except RoqError as error:
            log.error("process ends with an error", extra={"fields": {"error": type(error).__name__, "reason": str(error)}})
            return 1
        finally:
            await send_rest()  # whoever fenced a Monitor is told whom to wait for, its members to look elsewhere
        return 0

    gc.collect()
    gc.freeze()
    return uvloop.run(body())


def set_process_name(name: str) -> None:
    """What ps and top show (15 bytes at most)."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class Tasks:
    """Background tasks of one process: their failure is never silent, their end is awaited."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` beside the rest."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", extra={"fields": {"task": task.get_name()}}, exc_info=error)
            self._on_failure(error)

    async def stop(self) -> None:
        """Cancel all and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the service manager; nothing happens without one --------------------------------------------------------------------


def notify(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell systemd how this daemon is, by one datagram to $NOTIFY_SOCKET; False if nobody listens.

    state: READY, WATCHDOG, STOPPING or any "KEY=value" lines.
    """
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


def managed() -> bool:
    """Whether a service manager started this process and will start it again."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def watchdog_seconds(environment: Mapping[str, str] = os.environ) -> float | None:
    """How often to send WATCHDOG: half of what systemd allows this process; None if it does not watch."""
    allowed_microseconds = environment.get("WATCHDOG_USEC", "")
    owner = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not allowed_microseconds.isdigit() or owner != str(os.getpid()):
        return None
    return int(allowed_microseconds) / 2e6

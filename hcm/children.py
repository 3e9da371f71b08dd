"""The processes behind the state machines: forks through the fork server, exits through pidfds, ready datagrams.

Everything is told through one callback, `on_event(name, event)`. What to do about an event is decided in `hcm.supervisor`.
A child that its fork server forked has its exit code told by the fork server; an adopted one ends without a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hcm.fork_server import Died, ForkDone, ForkServerReady, NotForked, Report
from hcm.supervisor import Event, Exited, Forked, ForkFailed, ProcessReady
from roq.errors import InvalidConfiguration, ProcessFailed
from roq.runtime.backoff import delays
from roq.runtime.liveness import start_time
from roq.runtime.observe import Counters, logger
from roq.wire.process import ChildSpec

log = logger(__name__)

FORK_SERVER_START_SECONDS = 60.0  # imports, on a machine that has no time; nothing but new processes waits for them
FORK_SERVER_SILENT_SECONDS = 10.0  # with orders under way; then it hangs and is killed
FORK_SERVER_STOP_SECONDS = 2.0
CODE_WAIT_SECONDS = 2.0  # for the fork server to tell the exit code of whose end was seen: at once, unless it hangs
STARTS_AT_ONCE = 32  # forks that are not ready yet: hundreds at once would only make each other late
START_SETTLED_SECONDS = 2.0  # a start that is not ready by then no longer counts as under way
READY_BYTES_MAX = 4096
UNIX_PATH_BYTES_MAX = 100  # the kernel allows 107
EARLY_READY_MAX = 1000
TAIL_BYTES = 16 * 1024  # of a log, in which the reason of an exit is looked for
REASON_CHARACTERS_MAX = 400  # goes into a znode

_encode = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(Report).decode


@dataclass(slots=True)
class _Process:
    """One living child."""

    name: str
    pid: int
    descriptor: int | None  # a pidfd; None if the child was reaped before it could be opened
    log_path: Path
    forked: bool  # by the present fork server, which will tell the code
    over: bool = False  # its end was seen


class Children:
    """All children of this host. `directory`: for the ready socket; `programs`: module with PROGRAMS."""

    def __init__(self, directory: Path, programs: str, counters: Counters, on_event: Callable[[str, Event], None]) -> None:
        self.ready_path = _ready_path(directory)
        self._programs, self._counters, self._on_event = programs, counters, on_event
        self._processes: dict[int, _Process] = {}
        self._orders: dict[str, ChildSpec] = {}  # sent to the fork server, not answered
        self._pending: deque[ChildSpec] = deque()  # not sent yet
        self._starting: dict[str, float] = {}
        self._early_ready: set[int] = set()
        self._link: socket.socket | None = None
        self._fork_server: asyncio.subprocess.Process | None = None
        self._fork_server_heard = 0.0
        self._hello = asyncio.Event()
        self._closing = False
        self._starter: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.ready_path)
        self._ready_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._ready_socket.bind(self.ready_path)
        os.chmod(self.ready_path, 0o600)
        self._loop.add_reader(self._ready_socket.fileno(), self._read_ready)

    # --- the fork server ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the fork server. Raises ProcessFailed if it does not come up."""
        await self._start_fork_server()
        try:
            async with asyncio.timeout(FORK_SERVER_START_SECONDS):
                await self._hello.wait()
        except TimeoutError:
            raise ProcessFailed(f"the fork server was not ready after {FORK_SERVER_START_SECONDS:g} s") from None
        if self._link is None:
            raise ProcessFailed("the fork server ended while it started; its reason is on standard error")

    async def _start_fork_server(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with its:
            self._fork_server = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "hcm.fork_server", str(its.fileno()), self._programs),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                start_new_session=True,  # Ctrl-C at the terminal is for the HCM, which then ends its children in order
            )
        self._link = ours
        self._fork_server_heard = time.monotonic()
        self._loop.add_reader(ours.fileno(), self._read_fork_server, ours)

    def _read_fork_server(self, link: socket.socket) -> None:
        while link is self._link:
            try:
                message = link.recv(READY_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message = b""
            if not message:
                self._fork_server_lost()
                return
            self._fork_server_heard = time.monotonic()
            self._take(_decode_report(message))

    def _take(self, report: Report) -> None:
        match report:
            case ForkServerReady(pid):
                log.info("fork server is ready", extra={"fields": {"fork_server": pid}})
                self._hello.set()
                self._send_orders()
            case ForkDone(name, pid):
                self._forked(name, pid)
            case NotForked(name, reason):
                self._orders.pop(name, None)
                self._settled(name)
                self._on_event(name, ForkFailed(reason))
            case Died(pid, code):
                if pid in self._processes:
                    self._ended(self._processes[pid], code)

    def _fork_server_lost(self) -> None:
        """It ended: what it forked lives on; what it was asked and did not answer has failed."""
        self._close_link()
        self._counters["fork_servers_lost"] += 1
        if not self._hello.is_set():
            self._hello.set()  # `start` looks at the link
            return
        self._hello.clear()
        for process in list(self._processes.values()):
            process.forked = False
            if process.over:
                self._ended(process, None)  # nobody is left who could tell
        lost, self._orders = list(self._orders), {}
        if self._closing:
            return
        log.error("the fork server ended: starting another one", extra={"fields": {"forks_lost": len(lost)}})
        self._starter = self._loop.create_task(self._restart_fork_server(), name="fork server")
        for name in lost:
            self._settled(name)
            self._on_event(name, ForkFailed("the fork server ended while it forked"))

    async def _restart_fork_server(self) -> None:
        for delay in delays(0.1, 5.0):
            try:
                await self.start()
                return
            except (ProcessFailed, OSError) as error:
                log.error("the fork server did not start: trying again", extra={"fields": {"reason": str(error)}})
                await self._end_fork_server()
                self._hello.clear()
            await asyncio.sleep(delay)

    def _close_link(self) -> None:
        if self._link is not None:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()
            self._link = None

    # --- forks ----------------------------------------------------------------------------------------------------------

    def fork(self, spec: ChildSpec) -> None:
        """Have a process forked; Forked or ForkFailed follows. At most one order per name at a time."""
        self._pending.append(spec)
        self._send_orders()

    def _send_orders(self) -> None:
        while self._pending and self._link is not None and self._hello.is_set() and len(self._starting) < STARTS_AT_ONCE:
            spec = self._pending[0]
            try:
                self._link.send(_encode(spec))
            except BlockingIOError:
                self._loop.add_writer(self._link.fileno(), self._writable, self._link)
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # its end is read in a moment; the order waits for the next fork server
            self._pending.popleft()
            self._orders[spec.process.name] = spec
            self._starting[spec.process.name] = time.monotonic()

    def _writable(self, link: socket.socket) -> None:
        if link is self._link:
            self._loop.remove_writer(link.fileno())
            self._send_orders()

    def _forked(self, name: str, pid: int) -> None:
        spec = self._orders.pop(name)
        self._counters["forks"] += 1
        self._on_event(name, Forked(pid))
        process = self._watch(name, pid, Path(spec.log_path), forked=True)
        if process.descriptor is None:
            self._seen_dead(process)
        elif pid in self._early_ready:
            self._ready(pid, name)
        self._early_ready.discard(pid)

    def _settled(self, name: str) -> None:
        """It is ready, or has ended: the next may start."""
        self._starting.pop(name, None)
        self._send_orders()

    # --- life and death -------------------------------------------------------------------------------------------------

    def adopt(self, name: str, pid: int, started: int, log_path: Path) -> bool:
        """Watch a living process of an earlier HCM; False if it has just ended. started: clock ticks since boot."""
        process = self._watch(name, pid, log_path, forked=False)
        if process.descriptor is not None and start_time(pid) == started:  # after the pidfd was opened: this pid, this life
            return True
        self._release(self._processes.pop(pid))
        return False

    def _release(self, process: _Process) -> None:
        if process.descriptor is not None:
            self._loop.remove_reader(process.descriptor)
            os.close(process.descriptor)

    def _watch(self, name: str, pid: int, log_path: Path, *, forked: bool) -> _Process:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            descriptor = None
        if pid in self._processes:  # somebody else reaped that one, and its pid is given out again
            self._ended(self._processes[pid], None)
        process = self._processes[pid] = _Process(name, pid, descriptor, log_path, forked)
        if descriptor is not None:
            self._loop.add_reader(descriptor, self._seen_dead, process)
        return process

    def _seen_dead(self, process: _Process) -> None:
        process.over = True
        if process.descriptor is not None:
            self._loop.remove_reader(process.descriptor)
        if process.forked:
            self._loop.call_later(CODE_WAIT_SECONDS, self._ended, process, None)
        else:
            self._ended(process, None)

    def _ended(self, process: _Process, code: int | None) -> None:
        if self._processes.get(process.pid) is not process:
            return  # it was told before
        del self._processes[process.pid]
        self._release(process)
        reason = exit_reason(code, process.pid, process.log_path)
        fields = {"process": process.name, "child": process.pid, "reason": reason}
        log.info("process ended", extra={"fields": fields})
        self._settled(process.name)
        self._on_event(process.name, Exited(process.pid, reason))

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a watched process; nothing happens if it has ended."""
        process = self._processes.get(pid)
        if process is not None and process.descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process.descriptor, number)

    def _read_ready(self) -> None:
        while True:
            try:
                datagram = self._ready_socket.recv(READY_BYTES_MAX)
            except BlockingIOError:
                return
            words = datagram.decode(errors="replace").split(" ", 2)
            if len(words) == 3 and words[0] == "ready" and words[1].isdecimal():
                self._ready(int(words[1]), words[2])
            else:
                self._counters["refused_ready"] += 1

    def _ready(self, pid: int, name: str) -> None:
        if pid in self._processes:
            self._settled(name)
            self._on_event(name, ProcessReady(pid))
        elif len(self._early_ready) < EARLY_READY_MAX:  # faster than the fork server's word of its fork
            self._early_ready.add(pid)

    def tick(self, now: float) -> None:
        """Once a second: a fork server that hangs is killed; starts that take long no longer hold up others."""
        for name, since in list(self._starting.items()):
            if now - since > START_SETTLED_SECONDS and name not in self._orders:
                self._settled(name)
        if self._orders and self._fork_server is not None and now - self._fork_server_heard > FORK_SERVER_SILENT_SECONDS:
            fields = {"fork_server": self._fork_server.pid, "forks_unanswered": len(self._orders)}
            log.error("the fork server hangs: killing it", extra={"fields": fields})
            self._fork_server_heard = now
            with contextlib.suppress(ProcessLookupError):
                self._fork_server.kill()
        if not self._orders:
            self._fork_server_heard = now

    async def close(self) -> None:
        """End the fork server (its children live on) and stop watching."""
        self._closing = True
        if self._starter is not None:
            self._starter.cancel()
            await asyncio.gather(self._starter, return_exceptions=True)
        self._close_link()
        await self._end_fork_server()
        for process in self._processes.values():
            self._release(process)
        self._processes.clear()
        self._loop.remove_reader(self._ready_socket.fileno())
        self._ready_socket.close()

    async def _end_fork_server(self) -> None:
        """With its link closed it ends by itself; one that does not is killed."""
        self._close_link()
        server, self._fork_server = self._fork_server, None
        if server is None:
            return
        try:
            async with asyncio.timeout(FORK_SERVER_STOP_SECONDS):
                await server.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            await server.wait()


def _ready_path(directory: Path) -> str:
    """In the state directory, or, if that path is too long for a Unix socket, in a directory of our own in the temporary one.
    Raises InvalidConfiguration: somebody else has that."""
    path = str(directory.absolute() / "ready.sock")
    if len(path.encode()) <= UNIX_PATH_BYTES_MAX:
        return path
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    private = Path(tempfile.gettempdir()) / f"roq-{digest}"
    with contextlib.suppress(FileExistsError):
        private.mkdir(mode=0o700)
    found = private.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidConfiguration(f"{private} is not ours alone: remove it, or use a shorter path than {directory}")
    return str(private / "ready.sock")


def exit_reason(code: int | None, pid: int, log_path: Path) -> str:
    """Why a child ended, in one line for people: how, and the last thing it logged.

    code: exit code, minus the signal number, or None if nobody saw it.
    """
    logged = _last_logged(pid, log_path) if code != 0 else ""
    if code is None:
        how = "ended (nobody saw how)"
    elif code < 0:
        how = f"killed by {_signal_name(-code)}"
    else:
        how = f"exit code {code}"
    return f"{how}: {logged}" if logged else how


def _last_logged(pid: int, log_path: Path) -> str:
    """The last error this process logged, else the last line of whatever kind; "" if there is none."""
    try:
        with log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = ""
    for line in reversed(lines):
        level, text = _read_line(line, pid)
        if level in ("error", "critical"):
            return text[:REASON_CHARACTERS_MAX]
        last = last or text
    return last[:REASON_CHARACTERS_MAX]


def _read_line(line: str, pid: int) -> tuple[str, str]:
    """(level, text) of a log line; ("", "") for one of another process, ("", line) for one that is no record."""
    try:
        record = json.loads(line)
        if record["pid"] != pid:
            return "", ""
        parts = [record["message"], record.get("error", ""), record.get("reason", "")]
        parts += record.get("exception", "").strip().splitlines()[-1:]
        return record["level"], ": ".join(part for part in parts if part)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", line.strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

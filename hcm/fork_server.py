"""The fork server: imports everything the children need once, then forks a child per order. Run as `python -m hcm.fork_server`.

It has one thread, no event loop and no ZeroMQ context, so a fork copies a quiet process; the objects of all imported
modules are frozen out of garbage collection, so children share their pages. It speaks msgpack over a SOCK_SEQPACKET
socket: ChildSpec in; ForkServerReady, ForkDone, NotForked and Died out. When that socket closes (the HCM is gone) it ends, and
its children run on.

    python -m hcm.fork_server <descriptor> <module with PROGRAMS>
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from roq.runtime.log_output import set_up_logging
from roq.runtime.run import set_process_name
from roq.runtime.security import use_child_card
from roq.wire.assignment import ProcessKind
from roq.wire.process import ChildSpec

MESSAGE_BYTES_MAX = 128 * 1024  # one order; a specification is a few hundred bytes
DESCRIPTORS_MAX = 1 << 20
OUT_OF_MEMORY_SCORE = Path("/proc/self/oom_score_adj")
THREADS = "the fork server has threads ({}), whose locks a copy of it might inherit: start none in sitecustomize or a .pth file"
EXIT_DEFECT = 70  # a child's main raised something that is no RoqError (EX_SOFTWARE)


class ForkServerReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Everything is imported; orders are taken."""

    pid: int


class ForkDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process exists."""

    name: str
    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The fork failed."""

    name: str
    reason: str


class Died(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A child has ended: exit code, or minus the signal that ended it."""

    pid: int
    code: int


Report = ForkServerReady | ForkDone | NotForked | Died
Programs = Mapping[ProcessKind, Callable[[ChildSpec], int]]

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(ChildSpec).decode


def serve(link: socket.socket) -> ChildSpec | None:
    """Take orders until the HCM is gone (None). In a forked child: returns what it shall be."""
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler must exist for the wake-up descriptor to work
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    _say(link, ForkServerReady(os.getpid()))
    poller = select.poll()
    poller.register(link, select.POLLIN)
    poller.register(woken, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if woken.fileno() in ready:
            woken.recv(4096)
            _reap(link)
        if link.fileno() in ready:
            message = link.recv(MESSAGE_BYTES_MAX)
            if not message:
                return None
            spec = _decode_order(message)
            if _fork(link, spec.process.name):
                return spec


def _fork(link: socket.socket, name: str) -> bool:
    """True in the child."""
    if threads := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        _say(link, NotForked(name, THREADS.format(", ".join(threads))))
        return False
    try:
        pid = os.fork()
    except OSError as error:
        _say(link, NotForked(name, f"fork: {error.strerror}"))
        return False
    if pid == 0:
        return True
    _say(link, ForkDone(name, pid))
    return False


def _reap(link: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(link, Died(pid, os.waitstatus_to_exitcode(status)))


def _say(link: socket.socket, report: Report) -> None:
    try:
        link.send(_encode(report))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the HCM is gone


def become(spec: ChildSpec, programs: Programs) -> int:
    """Turn this forked copy into the process of `spec` and run it to its end; its exit code."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # a Ctrl-C meant for the HCM is not meant for its children
    os.closerange(3, DESCRIPTORS_MAX)
    _redirect(Path(spec.log_path))
    gc.enable()
    random.seed()
    set_process_name(f"roq-{spec.process.kind}")
    set_up_logging(spec.process.name, spec.log_level, Path(spec.log_path), host=spec.host, queue=spec.process.queue)
    faulthandler.enable()
    try:
        use_child_card(spec.card, spec.access, mixed=spec.mixed)
        return programs[spec.process.kind](spec)
    except Exception:  # process boundary: whatever it is, it is logged and the HCM restarts the process
        log.exception("process %s ended by a defect", spec.process.name)
        return EXIT_DEFECT
    finally:
        logging.shutdown()


def _redirect(log_path: Path) -> None:
    """Standard input from nowhere; what anything prints goes to the log. (The HCM's own output may be a pipe whose
    reader waits for its end; children must not hold it open.)"""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(nowhere, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nowhere)
    os.close(output)


def _stand_back() -> None:
    """The service manager may protect the HCM from the out-of-memory killer; its children take their chance like others."""
    with contextlib.suppress(OSError):
        if int(OUT_OF_MEMORY_SCORE.read_text()) < 0:
            OUT_OF_MEMORY_SCORE.write_text("0")


def main() -> None:
    """Entry of `python -m hcm.fork_server`; also where every child's life ends."""
    link = socket.socket(fileno=int(sys.argv[1]))
    set_process_name("roq-fork-server")
    _stand_back()
    programs: Programs = importlib.import_module(sys.argv[2]).PROGRAMS
    gc.collect()
    gc.disable()
    gc.freeze()
    spec = serve(link)
    code = 0 if spec is None else become(spec, programs)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

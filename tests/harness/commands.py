"""Commands of `roq`, forked from a process that has imported the command line: starting Python anew takes each of them half a
second of processor time, and there are hundreds.

A command is a process of its own all the same: arguments, environment, folder, standard streams, exit. Not for what is about a
terminal or a signal, nor for commands that start daemons: `python -m roq.cli` for these, which test_cli.py has of every kind.
Each process of pytest has one template (the process to fork from), which ends with it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from roq.cli.main import COMMANDS, GROUPS, command, main

ROOT = Path(__file__).parents[2]
REQUEST_BYTES_MAX = 1 << 17
STREAMS = 3


class Command(NamedTuple):
    """What a forked process shall run. streams: it and the descriptors it is to have as 0, 1 and 2."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


# --- the test's end -------------------------------------------------------------------------------------------------------


def run(
    *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None, timeout: float = 30.0
) -> subprocess.CompletedProcess[bytes]:
    """`roq …` as subprocess.run(…, capture_output=True, check=False) would run it."""
    theirs, (to_stdin, stdout, stderr) = _pipes()
    answers, given = socket.socketpair()
    try:
        request = json.dumps([arguments, dict(os.environ if environment is None else environment), os.getcwd()]).encode()
        assert len(request) < REQUEST_BYTES_MAX
        socket.send_fds(_template(), [request], [given.fileno(), *theirs])
    finally:
        given.close()
        for descriptor in theirs:
            os.close(descriptor)
    answers.settimeout(timeout)
    with answers, answers.makefile() as lines, ThreadPoolExecutor(STREAMS) as threads:
        writing = threads.submit(_write, to_stdin, stdin)
        output, errors = threads.submit(_read, stdout), threads.submit(_read, stderr)
        told = lines.readline()
        assert told, "the template has ended"
        pid = int(told)
        try:
            code = int(lines.readline())
        except TimeoutError as error:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout) from error
        writing.result()
        return subprocess.CompletedProcess(arguments, code, output.result(), errors.result())


def _pipes() -> tuple[list[int], list[int]]:
    """(stdin, stdout, stderr) of the command, and our ends of them."""
    (read, to_stdin), (stdout, out), (stderr, err) = (os.pipe() for _ in range(STREAMS))
    return [read, out, err], [to_stdin, stdout, stderr]


def _write(descriptor: int, data: bytes) -> None:
    try:
        with open(descriptor, "wb", buffering=0) as stream:
            while data:
                data = data[stream.write(data) :]
    except BrokenPipeError:
        return  # it does not read


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as stream:
        return stream.read()


@cache
def _template() -> socket.socket:
    """Where to ask for a command."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.harness.commands", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# --- the template's end ---------------------------------------------------------------------------------------------------


def _next_command(requests: socket.socket) -> Command | None:
    """Returns in a forked process what that is to run; in the template None when nobody asks any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for the commands leave no trace
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 1 + STREAMS)
        if not request:
            return None
        answers, *streams = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            command = os.fork()
            if command == 0:
                os.close(answers)
                arguments, environment, folder = json.loads(request)
                return Command(arguments, environment, folder, streams)
            _tell_the_end(command, answers, streams)
        for descriptor in descriptors:
            os.close(descriptor)


def _tell_the_end(command: int, answers: int, streams: Sequence[int]) -> NoReturn:
    """Its number, then its exit code."""
    for descriptor in streams:
        os.close(descriptor)
    os.write(answers, b"%d\n" % command)
    _, status = os.waitpid(command, 0)
    os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(command: Command) -> None:
    """As if this process had been started as `python -m roq.cli …`."""
    for number, descriptor in enumerate(command.streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.argv = [str(ROOT / "roq/cli/__main__.py"), *command.arguments]
    sys.modules["__main__"].__package__ = "roq.cli"


if __name__ == "__main__":
    for name in (*COMMANDS, *GROUPS):
        command(name)
    assert threading.active_count() == 1, "what has threads can't be forked"
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        found = _next_command(asked)
    if found is not None:
        _become(found)
        main()

"""How children ended is known, also where the news comes late or in another order, as on a machine that is very busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hcm.children import CODE_WAIT_SECONDS, Children
from hcm.supervisor import Event, Exited, Forked, ForkFailed, ProcessReady
from roq.runtime.liveness import HeartbeatBoard
from roq.runtime.observe import Counters
from roq.testing.freezing import freeze
from roq.wire.assignment import MonitorAddress, ProcessKind, ProcessSpec
from roq.wire.process import ChildSpec

WAIT_SECONDS = 10.0
PROMPT_SECONDS = CODE_WAIT_SECONDS / 2
MONITOR = MonitorAddress("h", "127.0.0.1", 9, 9)
LATE_SECONDS = 0.4  # how long a fork server is held up


class Host:
    """Children with their fork server, and what was told of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.board = HeartbeatBoard(directory / "board")
        self.children = Children(
            directory, "tests.integration.trivial_programs", Counters(), lambda _, event: self.events.put_nowait(event)
        )

    @property
    def fork_server(self) -> int:
        """Its pid."""
        server = self.children._fork_server
        assert server is not None
        return server.pid

    def fork(self, queue: str) -> Path:
        """Order a process; its log."""
        log = self.directory / f"{queue}.log"
        self.children.fork(
            ChildSpec(
                process=ProcessSpec(ProcessKind.MONITOR, queue, monitor=MONITOR),
                host="h",
                address="127.0.0.1",
                ports={"control": 0},
                monitor=MONITOR,
                board=str(self.directory / "board"),
                slot=1,
                ready_socket=self.children.ready_path,
                zookeeper="127.0.0.1:1",
                log_path=str(log),
            )
        )
        return log

    async def next(self) -> Event:
        """What is told next."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.events.get()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path)
    await host.children.start()
    yield host
    pids = [process.pid for process in host.children._processes.values()]
    for pid in pids:
        host.children.signal(pid, signal.SIGKILL)
    await host.children.close()


def hold_up(fork_server: int) -> None:
    """Stop it; returns when it is stopped."""
    freeze(fork_server)


def hold_the_loop_until_reaped(log: Path, fork_server: int) -> None:
    """Nothing else runs in this process until the program behind `log` has ended and its parent has seen that."""
    children = Path(f"/proc/{fork_server}/task/{fork_server}/children")
    end = time.monotonic() + WAIT_SECONDS
    while not log.exists() or "always gives up" not in log.read_text() or children.read_text():
        assert time.monotonic() < end, "the program did not end"
        time.sleep(0.01)


@pytest.mark.quick
async def test_a_child_that_was_reaped_before_its_fork_was_told_of_has_its_exit_code(host: Host) -> None:
    log = host.fork("crash")
    hold_the_loop_until_reaped(log, host.fork_server)
    assert isinstance(await host.next(), Forked)
    ended = await host.next()
    assert isinstance(ended, Exited)
    assert ended.reason.startswith("exit code 1: "), ended.reason


async def test_a_fork_server_that_is_late_tells_the_code(host: Host) -> None:
    host.fork("good")
    forked = await host.next()
    assert isinstance(forked, Forked)
    assert isinstance(await host.next(), ProcessReady)
    hold_up(host.fork_server)
    try:
        os.kill(forked.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_SECONDS):
                pytest.fail(f"{await host.events.get()} was told before the code could be known")
    finally:
        os.kill(host.fork_server, signal.SIGCONT)
    ended = await host.next()
    assert isinstance(ended, Exited)
    assert ended.reason.startswith("killed by SIGKILL"), ended.reason


async def test_without_its_fork_server_a_childs_end_is_told_at_once(host: Host) -> None:
    host.fork("good")
    forked = await host.next()
    assert isinstance(forked, Forked)
    assert isinstance(await host.next(), ProcessReady)
    hold_up(host.fork_server)  # it can't tell
    os.kill(forked.pid, signal.SIGKILL)
    os.kill(host.fork_server, signal.SIGKILL)
    began = time.monotonic()
    ended = await host.next()
    assert isinstance(ended, Exited)
    assert ended.reason.startswith("ended (nobody saw how)"), ended.reason
    assert time.monotonic() - began < PROMPT_SECONDS


async def test_a_fork_server_that_hangs_holds_up_a_childs_end_for_a_while_only(host: Host) -> None:
    host.fork("good")
    forked = await host.next()
    assert isinstance(forked, Forked)
    assert isinstance(await host.next(), ProcessReady)
    hold_up(host.fork_server)
    try:
        os.kill(forked.pid, signal.SIGKILL)
        ended = await host.next()
    finally:
        os.kill(host.fork_server, signal.SIGCONT)
    assert isinstance(ended, Exited)
    assert ended.reason.startswith("ended (nobody saw how)"), ended.reason
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(LATE_SECONDS):  # what the fork server tells now is of no process any more
            await host.events.get()


async def test_threads_that_start_with_every_python_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='agent', daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"),)))))
    host = Host(tmp_path)
    await host.children.start()
    host.fork("good")
    failed = await host.next()
    assert isinstance(failed, ForkFailed)
    assert "threads (agent)" in failed.reason
    await host.children.close()

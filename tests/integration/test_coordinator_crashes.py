"""A coordinator that is killed, stopped, stood still, fed nonsense or not read: what was answered stays, and it is bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kazoo.exceptions import KazooException, NoAuthError  # type: ignore[import-untyped]
from kazoo.security import make_digest_acl  # type: ignore[import-untyped]

from roq.config import CoordinatorConfig
from roq.coordinator import connection
from roq.coordinator.connection import UNREAD_BYTES_MAX
from roq.coordinator.server import Coordinator
from roq.testing.freezing import freeze
from tests.harness.direct_kazoo import close, connected
from tests.harness.raw_zookeeper import (
    AUTH,
    AUTH_XID,
    CLOSE,
    CREATE,
    CREATE_CONTAINER,
    EXISTS,
    GET_DATA,
    PING,
    PING_XID,
    RawClient,
    buffer,
    create,
    text,
)
from tests.integration.coordinator_rig import RunningCoordinator

WAIT = 20.0
UNIMPLEMENTED, NO_NODE, AUTH_FAILED, INVALID_ACL = -6, -101, -115, -114


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningCoordinator]:
    """A coordinator of the test's own."""
    made = RunningCoordinator(tmp_path / "data")
    made.start()
    yield made
    made.kill()


def until(holds: Callable[[], Any], what: str) -> None:
    """Ask again and again, within a bound: another process."""
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# --- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("flag", ["--force-sync", "--no-force-sync"])
def test_what_was_answered_outlives_kill_9(tmp_path: Path, flag: str) -> None:
    running = RunningCoordinator(tmp_path / "data", flag)
    running.start()
    client = connected(running.address)
    answered: list[str] = []

    def write(stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                answered.append(client.create("/n-", bytes(20_000), sequence=True))
            except KazooException:
                return

    try:
        for _ in range(2):
            stop = threading.Event()
            writer = threading.Thread(target=write, args=(stop,), daemon=True)
            before = len(answered)
            writer.start()
            until(lambda: len(answered) > before + 60, "answers")  # noqa: B023
            running.kill()
            stop.set()  # a write that kazoo had not sent yet is its last: it is answered after the restart
            running.start()
            until(lambda: client.connected, "the reconnection")
            writer.join(WAIT)
            assert not writer.is_alive()
            names = {f"/{name}" for name in client.get_children("/")}
            assert set(answered) <= names
            assert len(names) - len(answered) <= 1 + 2  # /zookeeper, and at most one unanswered write per kill
            assert answered == sorted(answered)
        assert list((running.folder / "journal").glob("*.snapshot"))  # some were made meanwhile
    finally:
        close(client)
        running.kill()


@pytest.mark.parametrize("end", [RunningCoordinator.kill, RunningCoordinator.stop])
def test_a_session_and_its_nodes_go_on_after_a_restart(
    running: RunningCoordinator, end: Callable[[RunningCoordinator], Any]
) -> None:
    with RawClient(running.address) as client, RawClient(running.address) as other:
        welcome, gone = client.welcome(2000), other.welcome(2000)
        client.ask(CREATE, create("/mine", b"m", 1))
        seen = other.ask(CREATE, create("/theirs", b"t", 1)).zxid
    end(running)
    running.start()
    began = time.monotonic()
    with RawClient(running.address) as client:
        assert client.welcome(2000, welcome.session, welcome.password, zxid=seen) == welcome
        assert client.ask(GET_DATA, text("/mine") + b"\0").record.startswith(buffer(b"m"))
        client.ask(EXISTS, text("/theirs") + b"\1")
        while not client.events and time.monotonic() - began < WAIT:
            time.sleep(0.1)
            client.ask(PING, xid=PING_XID)
        assert [event.path for event in client.events] == ["/theirs"]  # its owner did not come back
        assert time.monotonic() - began > 1.8
        assert client.ask(CREATE, create("/after")).zxid > seen
        client.ask(CLOSE)
    with RawClient(running.address) as late:
        assert late.welcome(2000, gone.session, gone.password).session == 0
    with RawClient(running.address) as new:
        assert new.welcome().session not in (welcome.session, gone.session)
        assert new.ask(EXISTS, text("/mine") + b"\0").error == NO_NODE


def test_a_second_coordinator_on_the_folder_says_who_has_it(running: RunningCoordinator, tmp_path: Path) -> None:
    second = RunningCoordinator(running.folder)
    with pytest.raises(AssertionError, match=rf"another coordinator \(process {running.pid}\) serves the folder"):
        second.start()
    third = RunningCoordinator(tmp_path / "other")
    third.port = running.port
    with pytest.raises(AssertionError, match="PortTaken"):
        third.start()
    with RawClient(running.address) as client:
        client.welcome()


def test_one_that_stood_still_gives_its_clients_their_time_again(running: RunningCoordinator) -> None:
    client = connected(running.address, 2.0)
    try:
        client.create("/mine", ephemeral=True)
        first = client.client_id[0]
        freeze(running.pid)
        time.sleep(3.5)  # longer than the session: nobody is heard meanwhile, and none is to blame
        os.kill(running.pid, signal.SIGCONT)
        until(lambda: client.connected, "the reconnection")
        assert client.get("/mine")[1].ephemeralOwner == first == client.client_id[0]
    finally:
        close(client)


def test_what_is_somebodys_stays_so_after_kill_9(running: RunningCoordinator) -> None:
    mine = [make_digest_acl("me", "secret", all=True)]
    owner = connected(running.address, auth_data=[("digest", "me:secret")])
    try:
        owner.create("/mine", b"first", mine)
        running.kill()
        running.start()
        until(lambda: owner.connected, "the reconnection")
        stranger = connected(running.address)
        try:
            for act, *rest in ((stranger.get,), (stranger.set, b"x"), (stranger.get_children,)):
                with pytest.raises(NoAuthError):
                    act("/mine", *rest)
        finally:
            close(stranger)
        assert owner.set("/mine", b"second").version == 1, "shown again by itself on the new connection"
    finally:
        close(owner)


# --- limits and nonsense ----------------------------------------------------------------------------------------------


def test_what_it_has_not_is_refused_and_told(running: RunningCoordinator) -> None:
    with RawClient(running.address) as client:
        client.welcome()
        assert client.ask(CREATE_CONTAINER, create("/c", flags=4)).error == UNIMPLEMENTED
        of_an_address = struct.pack("!ii", 1, 31) + text("ip") + text("127.0.0.1")
        assert client.ask(CREATE, create("/c", acl=of_an_address)).error == INVALID_ACL
        assert client.ask(EXISTS, text("/c") + b"\0").error == NO_NODE
        assert client.ask(AUTH, struct.pack("!i", 0) + text("sasl") + buffer(b"a:b"), xid=AUTH_XID).error == AUTH_FAILED
        assert client.ended()
    assert "only_zookeeper_has_it" in running.log()
    assert f"request of type {CREATE_CONTAINER}" in running.log()


def test_nonsense_is_logged_and_harms_nobody_else(running: RunningCoordinator) -> None:
    with RawClient(running.address) as good:
        good.welcome()
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, struct.pack("!i", 3) + b"abc"):
            with RawClient(running.address) as bad:
                bad.socket.sendall(nonsense)
                assert bad.ended()
        with RawClient(running.address) as bad:
            bad.welcome()
            bad.send(struct.pack("!iii", 1, CREATE, 1_000_000) + b"short")
            assert bad.ended()
        assert good.ask(EXISTS, text("/") + b"\0").error == 0
    assert running.log().count("client connection closed") == 4


def test_a_client_that_does_not_read_is_held_back_and_does_not_swell_the_server(running: RunningCoordinator) -> None:
    with RawClient(running.address) as client, RawClient(running.address) as other:
        client.welcome(30_000)
        other.welcome()
        client.ask(CREATE, create("/large", bytes(500_000)))
        before = psutil.Process(running.pid).memory_info().rss
        asked = struct.pack("!ii", 1, GET_DATA) + text("/large") + b"\0"
        frames = (struct.pack("!i", len(asked)) + asked) * 2000  # a gigabyte of answers
        client.socket.setblocking(False)
        sent = 0
        deadline = time.monotonic() + 3.0
        while sent < len(frames) and time.monotonic() < deadline:
            try:
                sent += client.socket.send(frames[sent:])
            except BlockingIOError:
                time.sleep(0.01)
            assert other.ask(EXISTS, text("/") + b"\0").error == 0
        assert psutil.Process(running.pid).memory_info().rss - before < UNREAD_BYTES_MAX
        client.socket.settimeout(10.0)
        for _ in range(10):
            assert len(client.frame()) > 500_000  # it goes on as it is read


async def test_who_does_not_read_its_events_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Events can't be held back: past the limit it costs the connection, not the server's memory."""
    monkeypatch.setattr(connection, "UNREAD_BYTES_MAX", 512 * 1024)
    coordinator = Coordinator(CoordinatorConfig(data_dir=tmp_path, port=0))
    await coordinator.start()
    try:
        await asyncio.to_thread(fill_with_events, f"127.0.0.1:{coordinator.port}")
    finally:
        await coordinator.stop()
    assert "it does not read" in caplog.text
    await coordinator.ended()


def fill_with_events(address: str) -> None:
    """12 MB of events for a client that reads none: more than the kernel takes for it."""
    with RawClient(address) as deaf, RawClient(address) as other:
        deaf.welcome()
        other.welcome()
        paths = [f"/{number}-" + "x" * 60_000 for number in range(200)]
        for path in paths:
            assert deaf.ask(EXISTS, text(path) + b"\1").error == NO_NODE
        for path in paths:
            assert other.ask(CREATE, create(path)).error == 0
        with pytest.raises(EOFError):
            deaf.ask(PING, xid=PING_XID)
        assert other.ask(EXISTS, text("/") + b"\0").error == 0


def test_a_full_or_failing_disk_ends_it_and_nothing_is_promised(tmp_path: Path) -> None:
    """The disk is a limit on file sizes: the first write beyond it fails."""
    running = RunningCoordinator(tmp_path / "data")
    running.start()
    psutil.Process(running.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, 4096))
    with RawClient(running.address) as client:
        client.welcome()
        answered = 0
        while created(client, f"/n{answered}"):
            answered += 1
    assert answered < 10
    running.stop()
    assert "the journal failed; nothing more is answered" in running.log()
    running.start()
    with RawClient(running.address) as client:
        client.welcome()
        for number in range(answered):
            assert client.ask(EXISTS, text(f"/n{number}") + b"\0").error == 0
    assert running.stop() == 0


def created(client: RawClient, path: str) -> bool:
    """Whether the server said so."""
    try:
        return client.ask(CREATE, create(path, bytes(1000))).error == 0
    except (EOFError, OSError):
        return False


async def test_a_stop_amid_a_flood_answers_what_it_has_taken_and_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CoordinatorConfig(data_dir=tmp_path, port=0)
    coordinator = Coordinator(config)
    await coordinator.start()
    flood = asyncio.create_task(asyncio.to_thread(flooding, f"127.0.0.1:{coordinator.port}"))
    while coordinator.counters["replies"] < 500:
        await asyncio.sleep(0.001)
    await coordinator.stop()
    answered = await flood
    assert answered >= 500
    assert "failed" not in caplog.text
    again = Coordinator(config)
    await again.start()
    with RawClient(f"127.0.0.1:{again.port}") as client:

        def numbered() -> str:
            client.welcome()
            return client.ask(CREATE, create("/n", flags=2)).record.decode()

        next_one = await asyncio.to_thread(numbered)
    await again.stop()
    assert int(next_one[-10:]) >= answered


def flooding(address: str) -> int:
    """Writes as many as it may; how many were answered."""
    with RawClient(address) as client:
        client.welcome()
        body = struct.pack("!ii", 1, CREATE) + create("/n", flags=2)
        frames = (struct.pack("!i", len(body)) + body) * 200
        answered = 0
        try:
            while True:
                client.socket.sendall(frames)
                for _ in range(200):
                    client.frame()
                    answered += 1
        except (EOFError, OSError):
            return answered

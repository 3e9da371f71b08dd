"""A coordinator whose disk hangs: what waits for it is bounded, nobody is taken for dead meanwhile, and all goes on afterwards.

The disk is a real one that stops at a gate before it syncs.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from roq.config import CoordinatorConfig
from roq.coordinator import connection as connection_module
from roq.coordinator import server as server_module
from roq.coordinator.server import Coordinator
from roq.runtime.files import Disk
from tests.harness.gate import Gate
from tests.harness.raw_zookeeper import CLOSE, CREATE, GET_DATA, PING, SET_DATA, RawClient, buffer, create, text

SECONDS = 20.0
TICK_SECONDS = 0.05
SESSION_MS = 200


class HangingDisk(Disk):
    """Syncs wait at the gate, once there is one."""

    def __init__(self) -> None:
        self.gate: Gate | None = None

    def sync(self, descriptor: int) -> None:
        if self.gate is not None:
            self.gate.stop()
        super().sync(descriptor)


class Hanging:
    """A coordinator in this process, on a disk that hangs between hang() and go_on()."""

    def __init__(self, folder: Path) -> None:
        self.disk = HangingDisk()
        config = CoordinatorConfig(data_dir=folder, port=0, tick_seconds=TICK_SECONDS)
        self.coordinator = Coordinator(config, disk=self.disk)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.coordinator.port}"

    async def hang(self) -> None:
        """From now on; a sync waits."""
        self.disk.gate = gate = Gate()
        self.starter = RawClient(self.address)
        await asyncio.to_thread(self.starter.send, struct.pack("!iqiq", 0, 0, 4000, 0) + buffer(bytes(16)) + b"\0")
        await until(lambda: gate.came > 0)

    def go_on(self) -> None:
        gate, self.disk.gate = self.disk.gate, None
        if gate is not None:
            gate.open()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def hanging(tmp_path: Path) -> AsyncIterator[Hanging]:
    made = Hanging(tmp_path)
    await made.coordinator.start()
    yield made
    made.go_on()
    await made.coordinator.stop()
    made.starter.socket.close()
    await made.coordinator.ended()


def request(xid: int, kind: int, record: bytes = b"") -> bytes:
    body = struct.pack("!ii", xid, kind) + record
    return struct.pack("!i", len(body)) + body


def welcomed(address: str, timeout_ms: int = 4000) -> tuple[RawClient, int]:
    client = RawClient(address, SECONDS)
    return client, client.welcome(timeout_ms).session


async def test_what_waits_for_the_disk_is_bounded_whoever_sends_it(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNWRITTEN_BYTES_MAX", 1_000_000)
    clients = [(await asyncio.to_thread(welcomed, hanging.address))[0] for _ in range(10)]
    await asyncio.to_thread(clients[0].ask, CREATE, create("/n"))
    await hanging.hang()
    sending = [
        asyncio.create_task(asyncio.to_thread(client.socket.sendall, request(9, SET_DATA, set_data(300_000))))
        for client in clients
        for _ in range(2)
    ]
    await until(lambda: hanging.coordinator._unwritten_bytes > 1_000_000)
    for _ in range(10):
        await asyncio.sleep(TICK_SECONDS)  # a look at every connection
        assert hanging.coordinator._unwritten_bytes <= 1_000_000 + 300_100
    hanging.go_on()
    await asyncio.gather(*sending)
    for client in clients:
        answers = [struct.unpack_from("!iqi", await asyncio.to_thread(client.frame)) for _ in range(2)]
        assert [(xid, error) for xid, _, error in answers] == [(9, 0)] * 2
        client.socket.close()


def set_data(size: int) -> bytes:
    return text("/n") + buffer(bytes(size)) + struct.pack("!i", -1)


async def test_whom_the_disk_holds_up_is_not_taken_for_dead(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pings, behind more requests than may wait."""
    monkeypatch.setattr(connection_module, "WAITING_REPLIES_MAX", 10)
    client, _ = await asyncio.to_thread(welcomed, hanging.address, SESSION_MS)
    frames = b"".join(request(-2, PING) for _ in range(50))
    await hanging.hang()
    await asyncio.to_thread(client.socket.sendall, frames)
    for _ in range(20):
        await asyncio.sleep(TICK_SECONDS)
        await asyncio.to_thread(client.socket.sendall, request(-2, PING))
    hanging.go_on()
    for _ in range(70):
        xid, _, error = struct.unpack_from("!iqi", await asyncio.to_thread(client.frame))
        assert (xid, error) == (-2, 0)
    client.socket.close()


async def test_who_went_away_is_over_once_the_disk_goes_on(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "WAITING_REPLIES_MAX", 10)
    client, session = await asyncio.to_thread(welcomed, hanging.address, SESSION_MS)
    await hanging.hang()
    await asyncio.to_thread(client.socket.sendall, b"".join(request(-2, PING) for _ in range(50)))
    client.socket.close()
    await asyncio.sleep(5 * TICK_SECONDS)
    assert session in hanging.coordinator._tree.sessions
    hanging.go_on()
    await until(lambda: session not in hanging.coordinator._tree.sessions)


async def test_what_comes_behind_the_end_of_a_session_is_not_kept(hanging: Hanging) -> None:
    client, session = await asyncio.to_thread(welcomed, hanging.address)
    await hanging.hang()
    (served,) = [one for one in hanging.coordinator._connections.values() if one.session == session]
    await asyncio.to_thread(
        client.socket.sendall, request(1, CLOSE) + request(2, GET_DATA, text("/") + b"\0") * 2_000_000
    )  # 38 MB
    assert len(served._held) <= 512 * 1024
    hanging.go_on()
    assert struct.unpack_from("!iqi", await asyncio.to_thread(client.frame))[0] == 1
    client.socket.close()

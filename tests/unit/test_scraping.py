"""What is served over HTTP: garbage, silence, slowness and crowds cost their senders a connection and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from roq.errors import PortTaken
from roq.runtime import scraping
from roq.runtime.scraping import Answer, ReadOnce, json_answer, serving

ADDRESS = "127.0.0.1"
BOUND_SECONDS = 20


class Heard:
    """What is asked, and what is answered: by a path."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.cancelled = asyncio.Event()

    async def answer(self, path: str, accept: str) -> Answer:
        self.paths.append(path)
        match path:
            case "/hangs":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            case "/fails":
                raise ValueError("a defect")
            case "/large":
                return "200 OK", "text/plain", b"x" * 64_000_000
        return json_answer({"path": path})


@contextlib.asynccontextmanager
async def served(heard: Heard) -> AsyncIterator[int]:
    async with serving(heard.answer, ADDRESS, 0) as port:
        yield port


def said(port: int, request: bytes) -> bytes:
    """Everything that comes back until the connection ends."""
    answer = bytearray()
    ends = contextlib.suppress(ConnectionError)  # it does not read the rest of what it refuses
    with socket.create_connection((ADDRESS, port), timeout=BOUND_SECONDS) as connection, ends:
        connection.sendall(request)
        while data := connection.recv(65_536):
            answer += data
    return bytes(answer)


async def got(port: int, path: str) -> bytes:
    return await asyncio.to_thread(said, port, f"GET {path} HTTP/1.0\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("request_", "statuses", "heard_of"),
    [
        (b"GET /a%2Fb?c HTTP/1.1\r\nHost: x\r\n\r\n", [b" 200 "], ["/a%2Fb"]),
        (b"HEAD /x HTTP/1.1\r\n\r\n", [b" 200 "], ["/x"]),
        (b"POST /x HTTP/1.1\r\nContent-Length: 0\r\n\r\n", [b" 405 "], []),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", [b"400"], []),
        (b"GET\r\n\r\n", [b"400"], []),
        (b"GET / HTTP/9.9.9\r\n\r\n", [b" 400 "], []),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n", [b" 431 ", b""], []),  # or the connection is reset
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", [b" 414 ", b""], []),
    ],
)
async def test_what_is_said_to_it(request_: bytes, statuses: list[bytes], heard_of: list[str]) -> None:
    heard = Heard()
    async with served(heard) as port:
        answer = await asyncio.to_thread(said, port, request_)
        head = answer.partition(b"\r\n\r\n")[0]
        assert any(status in head if status else not head for status in statuses), answer[:200]
        assert b'{"path":"/fine"}' in await got(port, "/fine"), "the next one is served"
    assert heard.paths == [*heard_of, "/fine"]


async def test_a_defect_and_what_takes_too_long_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "ANSWER_SECONDS", 0.1)
    heard = Heard()
    async with served(heard) as port:
        assert b" 500 " in (await got(port, "/fails")).partition(b"\r\n")[0]
        assert b" 503 " in (await got(port, "/hangs")).partition(b"\r\n")[0]
        async with asyncio.timeout(BOUND_SECONDS):
            await heard.cancelled.wait()


async def test_a_crowd_is_turned_away_and_a_slow_one_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(scraping, "CONNECTION_SECONDS", 2.0)
    async with served(Heard()) as port:
        slow = [socket.create_connection((ADDRESS, port), timeout=BOUND_SECONDS) for _ in range(3)]
        try:
            for connection in slow:
                connection.sendall(b"GET /")  # and a byte now and then
            assert await got(port, "/one-too-many") == b""
            ends = [asyncio.create_task(asyncio.to_thread(dripped, connection)) for connection in slow]
            async with asyncio.timeout(BOUND_SECONDS):
                await asyncio.gather(*ends)
                while b"200 OK" not in await got(port, "/fine"):  # seen from outside only
                    await asyncio.sleep(0.05)
        finally:
            for connection in slow:
                connection.close()


def dripped(connection: socket.socket) -> None:
    """A byte every 50 ms, so that no time-out of one read ever ends it. Returns when the server has."""
    connection.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return


async def test_who_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "CONNECTION_SECONDS", 1.0)
    async with served(Heard()) as port:
        with socket.create_connection((ADDRESS, port), timeout=BOUND_SECONDS) as connection:
            connection.sendall(b"GET /large HTTP/1.0\r\n\r\n")
            assert b'{"path":"/fine"}' in await got(port, "/fine")
            writing = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
            assert writing
            for thread in writing:
                await asyncio.to_thread(thread.join, BOUND_SECONDS)
                assert not thread.is_alive()


async def test_a_port_that_is_taken_is_said_with_what_to_do() -> None:
    async with served(Heard()) as port:
        with pytest.raises(PortTaken, match=f"{ADDRESS}:{port} can't be listened on, choose another place"):
            async with serving(Heard().answer, ADDRESS, port):
                pass
    async with serving(Heard().answer, ADDRESS, port) as again:
        assert again == port, "it is free again at once"


async def test_it_ends_though_somebody_is_connected() -> None:
    async with asyncio.timeout(BOUND_SECONDS):
        async with served(Heard()) as port:
            silent = socket.create_connection((ADDRESS, port), timeout=BOUND_SECONDS)
            assert b"200 OK" in await got(port, "/fine")
        with silent:
            assert await asyncio.to_thread(silent.recv, 1) == b""


async def test_all_who_ask_at_once_are_given_one_look() -> None:
    looks = 0

    async def look() -> int:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        return looks

    once = ReadOnce(look, 1000.0)
    assert set(await asyncio.gather(*(once.get() for _ in range(10)))) == {1}
    always = ReadOnce(look, -1.0)
    assert [await always.get() for _ in range(2)] == [2, 3]

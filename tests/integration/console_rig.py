"""`roq console` as people start it, and a program that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx

from tests.harness.commands import ROOT
from tests.integration.test_cli import environment

START_SECONDS, WAIT_SECONDS = 40.0, 30.0


class RunningConsole:
    """Its lines on standard error, and where it serves. Ended by `stop`."""

    def __init__(self, cluster: str, *options: str, listen: str = "127.0.0.1:0", **more: str) -> None:
        command = [sys.executable, "-m", "roq.cli", "console", "--cluster", cluster, "--listen", listen, *options]
        settings = {**environment(), **more}
        self.process = subprocess.Popen(command, cwd=ROOT, env=settings, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._came: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = self.until("roq console: ").partition(": ")[2].strip().rstrip("/")
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._came.put(line)
        self._came.put("")

    def until(self, words: str) -> str:
        """The next line that has them."""
        while line := self._came.get(timeout=START_SECONDS):
            if words in line:
                return line
        raise AssertionError(f"it ended without {words!r}: {''.join(self.lines)}")

    def audited(self) -> list[tuple[str, str, str]]:
        """(who, request, failure) of every administrative request so far."""
        found = [json.loads(line) for line in self.lines if '"roq.audit"' in line]
        return [(one["who"], one["request"], one.get("failure", "")) for one in found if "request" in one]

    async def has_audited(self, *wanted: tuple[str, str, str]) -> None:
        """Its lines come through a pipe."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not set(wanted) <= set(self.audited()):
                await asyncio.sleep(0.05)

    def stop(self) -> int:
        """Its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(START_SECONDS)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def console(cluster: str, *options: str, **more: str) -> Iterator[RunningConsole]:
    running = RunningConsole(cluster, *options, **more)
    try:
        yield running
    finally:
        code = running.stop()
    assert code == 0, "".join(running.lines)
    assert "Traceback" not in "".join(running.lines)


class Program:
    """A program with a session: what it sends changes something."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def sign_in(self, body: Any = None) -> dict[str, Any]:
        answer = await self.client.post("/v1/session", json=body or {})
        answer.raise_for_status()
        self.client.headers["authorization"] = f"Bearer {answer.json()['token']}"
        self.client.cookies.clear()
        return dict(answer.json())

    async def ask(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        """Its JSON, once the status is as expected."""
        answer = await self.client.request(method, path, **more)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        if status >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["advice"]
        return answer.json() if answer.content else None

    async def get(self, path: str, status: int = 200, **more: Any) -> Any:
        return await self.ask("GET", path, status, **more)

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return await self.ask("POST", path, status, json=body)

    async def until(self, path: str, met: Callable[[Any], bool]) -> Any:
        """What is there once it is so."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                answer = await self.client.get(path)
                if answer.status_code == 200 and met(answer.json()):
                    return answer.json()
                await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def events(self, path: str, **headers: str) -> AsyncIterator[AsyncGenerator[tuple[str, Any], None]]:
        """(name, data) of server-sent events; ("id", text) for a place."""
        async with self.client.stream("GET", path, headers=headers, timeout=WAIT_SECONDS) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async with contextlib.aclosing(_events(answer)) as events:
                yield events


async def _events(answer: httpx.Response) -> AsyncGenerator[tuple[str, Any], None]:
    name = ""
    async for line in answer.aiter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)
        elif field == "id":
            yield "id", value


async def next_of(events: AsyncGenerator[tuple[str, Any], None], name: str, met: Callable[[Any], bool] = bool) -> Any:
    """The next one of this name that is so."""
    async with asyncio.timeout(WAIT_SECONDS):
        async for kind, data in events:
            if kind == name and met(data):
                return data
    raise AssertionError(f"the stream ended without {name}")


@contextlib.asynccontextmanager
async def program(running: RunningConsole, **options: Any) -> AsyncIterator[Program]:
    async with httpx.AsyncClient(base_url=running.url, timeout=WAIT_SECONDS, **options) as client:
        yield Program(client)


def quoted(name: str) -> str:
    """For a path."""
    return quote(name, safe="")

"""Store processes of one test: real processes on loopback ports, killed and paused by pid, with the real ZooKeeper."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import RoqError
from roq.log.replicated.owner import LogKeeper
from roq.log.replicated.reader import LogReader
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.log.replicated.writer import LogWriter
from roq.runtime.rpc import RpcClient
from roq.testing.freezing import freeze
from roq.wire import store as wire
from roq.wire.assignment import MonitorAddress, ProcessKind, ProcessSpec
from roq.wire.process import ChildSpec
from tests.harness.ports import free_port, own_address

ROOT = Path(__file__).parents[2]
START = """
import sys, msgspec
from hcm.programs import PROGRAMS
from roq.runtime.log_output import set_up_logging
from roq.wire.process import ChildSpec
set_up_logging("store")
spec = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=ChildSpec)
sys.exit(PROGRAMS[spec.process.kind](spec))
"""
QUICK = LogSettings(resend_seconds=0.2, store_seconds=0.6, check_seconds=0.05, repair_seconds=0.5, give_up_seconds=20.0)


def appended(writer: LogWriter, entry: bytes) -> asyncio.Future[int]:
    """The entry's position when it is acknowledged."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def done(result: int | RoqError) -> None:
        if future.done():
            return
        if isinstance(result, int):
            future.set_result(result)
        else:
            future.set_exception(result)
            future.exception()  # nobody may wait

    writer.write(entry, done)
    return future


class Store:
    """One store process on `directory`."""

    def __init__(self, rig: StoreRig, host: str, directory: Path) -> None:
        self.rig, self.host, self.directory = rig, host, directory
        self.address = own_address()
        self.port, self.control = free_port(self.address), free_port(self.address)
        self.process: asyncio.subprocess.Process | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.address}:{self.port}"

    async def start(self) -> None:
        """Returns when it serves."""
        ready = self.rig.directory / f"ready-{self.host}"
        ready.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind(str(ready))
            told.setblocking(False)
            await self.run(str(ready))
            assert self.process is not None
            hello = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(told, 100))
            ended = asyncio.ensure_future(self.process.wait())
            done, pending = await asyncio.wait((hello, ended), timeout=15, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            assert hello in done, self.log()
        self.rig.static.alive.add(self.host)

    async def run(self, ready: str = "/nowhere") -> None:
        spec = ChildSpec(
            ProcessSpec(ProcessKind.STORE, ""),
            self.host,
            self.address,
            {"clients": self.port, "control": self.control},
            MonitorAddress("", "", 0, 0),
            str(self.rig.directory / f"board-{self.host}"),
            0,
            ready,
            self.rig.zookeeper,
            "",
            data_dir=str(self.directory),
        )
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                START,
                msgspec.msgpack.encode(spec).hex(),
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @property
    def log_path(self) -> Path:
        return self.rig.directory / f"log-{self.host}"

    def log(self) -> str:
        return self.log_path.read_text()[-3000:]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def freeze(self) -> None:
        """It answers nothing any more."""
        assert self.process is not None
        freeze(self.process.pid)

    async def kill(self) -> None:
        """kill -9"""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self.rig.static.alive.discard(self.host)

    def journal(self) -> list[Path]:
        return sorted((self.directory / "journal").glob("journal-*"))


class StoreRig:
    """Some stores, a directory that knows them, and writers, keepers and readers that are closed at the end."""

    def __init__(self, zookeeper: str, directory: Path, session: Session) -> None:
        self.zookeeper, self.directory, self.session = zookeeper, directory, session
        self.log_id = uuid.uuid4().hex[:16]
        self.static = StaticDirectory({})
        self.stores: dict[str, Store] = {}
        self.kept: Stores | None = None  # of all keepers
        self._closing: list[LogWriter | LogReader | LogKeeper | Stores] = []

    async def start(self, hosts: str, folders: Sequence[Path] = ()) -> None:
        for host, folder in zip(hosts, folders or [self.directory / host for host in hosts], strict=True):
            self.stores[host] = Store(self, host, folder)
            self.static.endpoints[host] = self.stores[host].endpoint
        await asyncio.gather(*(self.stores[host].start() for host in hosts))

    async def writer(self, term: int = 1, settings: LogSettings = QUICK) -> LogWriter:
        writer = await LogWriter.take_over(self.session, self.log_id, self.static, settings, term)
        self._closing.append(writer)
        return writer

    async def keeper(self, term: int = 1, settings: LogSettings = QUICK) -> LogKeeper:
        if self.kept is None:
            self.kept = Stores(self.static)
            self._closing.append(self.kept)
        keeper = await LogKeeper.take_over(self.session, self.log_id, self.kept, settings, term)
        self._closing.append(keeper)
        return keeper

    def reader(self) -> LogReader:
        reader = LogReader(self.session, self.log_id, self.static)
        self._closing.append(reader)
        return reader

    async def read_all(self, upto: int, seconds: float = 20.0) -> dict[int, bytes]:
        """Entries 1 … upto as a fresh reader sees them."""
        reader = self.reader()
        found: dict[int, bytes] = {}
        async with asyncio.timeout(seconds):
            if upto:
                async for entries in reader.follow(0):
                    assert [position for position, _ in entries] == list(range(len(found) + 1, len(found) + 1 + len(entries)))
                    found.update(entries)
                    if len(found) >= upto:
                        break
        return found

    async def request(self, host: str, request: wire.Request) -> msgspec.Struct:
        client = RpcClient(self.stores[host].endpoint, wire.Reply)
        try:
            return await client.request(request, msgspec.Struct, 5.0)
        finally:
            client.close()

    async def forget_disk(self, host: str) -> None:
        await self.session.delete(paths.store_cookie(host))

    async def close(self) -> None:
        for one in self._closing:
            if isinstance(one, LogWriter):
                await one.close()
            else:
                one.close()
        for store in self.stores.values():
            if store.process is not None and store.process.returncode is None:
                store.signal(signal.SIGCONT)
            await store.kill()


class Load:
    """Appends numbered entries as fast as they are acknowledged; remembers what was."""

    def __init__(self, writer: LogWriter, name: str, window: int = 50) -> None:
        self.writer, self.name, self.window = writer, name, window
        self.acked: dict[int, bytes] = {}
        self.tried: set[bytes] = set()
        self.error: RoqError | None = None
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        number = 0
        try:
            while True:
                batch = []
                for _ in range(self.window):
                    number += 1
                    entry = b"%s %d" % (self.name.encode(), number)
                    self.tried.add(entry)
                    batch.append((entry, appended(self.writer, entry)))
                for entry, future in batch:
                    self.acked[await future] = entry
        except RoqError as error:
            self.error = error

    async def grow(self, count: int, seconds: float = 15.0) -> None:
        """Wait until so many more are acknowledged."""
        goal = len(self.acked) + count
        async with asyncio.timeout(seconds):
            while len(self.acked) < goal:
                assert self.error is None, self.error
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def ended(self, seconds: float = 15.0) -> RoqError:
        """Wait until the writer's error ends it."""
        await asyncio.wait_for(asyncio.shield(self._task), seconds)
        assert self.error is not None
        return self.error

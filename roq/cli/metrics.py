"""`roq metrics`: an HTTP server for Prometheus and for autoscalers; nothing is read but when somebody asks.

    /metrics                        everything, for Prometheus (roq/client/metrics.py says what)
    /v1/queues/NAME/status          a queue of the cluster, as `roq queue ls --json` has it
    /v1/work-queues/NAME/status     a work queue's counts; NAME: of one of the cluster's, or its address, percent-encoded
    /health                         200 while this program runs

Requests come in threads of their own; what they ask for is read in the program's loop, once for all who ask within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Annotated, Any
from urllib.parse import unquote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
import typer
import uvloop

from roq.cli.address import ClusterOption, cluster_address
from roq.cli.output import say
from roq.cli.task_address import exists, full_address
from roq.client.cluster import Cluster, connect
from roq.client.metrics import ScrapedSources, exposition
from roq.client.overview import Overview, read_overview
from roq.errors import InvalidConfiguration, PortTaken, RoqError, WorkQueueNotFound
from roq.runtime.observe import logger
from roq.wire.task import Status
from roq.workqueue.queue import WorkQueue, open_queue

LISTEN = "127.0.0.1:9464"
SOURCE_SECONDS = 5.0  # a source that needs longer did not answer
KEPT_SECONDS = 1.0  # what was read is given to all who ask within this time
ANSWER_SECONDS = 3 * SOURCE_SECONDS
REQUEST_SECONDS = 10.0  # for a request to come
JSON_TYPE = "application/json"
Answer = tuple[str, str, bytes]  # status, content type, body

log = logger(__name__)


def metrics(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS…]", help="Work queues: folders, file: or log: addresses.", show_default=False),
    ] = None,
    cluster: ClusterOption = None,
    listen: Annotated[str, typer.Option(metavar="[HOST]:PORT", help="Where to serve; without a host on all.")] = LISTEN,
) -> None:
    """Serve metrics for Prometheus, and counts for autoscalers: of a cluster and its work queues, of work queues on this
    machine, or of both. Without addresses of the cluster that other commands use; with addresses only of one that --cluster
    names."""
    queues = [full_address(address) for address in addresses or ()]
    place = cluster_address(cluster) if cluster or not queues else None
    host, port = _place(listen)
    uvloop.run(_serve(Sources(place, queues), host, port))


def _place(listen: str) -> tuple[str, int]:
    """Raises InvalidConfiguration."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise InvalidConfiguration(f"--listen is [HOST]:PORT, got {listen!r}")
    return host.strip("[]") or "0.0.0.0", int(port)


# --- reading ----------------------------------------------------------------------------------------------------------


class Sources:
    """A cluster and work queues, opened when they are first read. One reader at a time."""

    def __init__(self, cluster: str | None, queues: Sequence[str]) -> None:
        self._address, self._given = cluster, dict(zip(queues, queues, strict=True))
        self._cluster: Cluster | None = None
        self._open: dict[str, WorkQueue] = {}  # by address
        self._found: ScrapedSources | None = None
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def read(self) -> ScrapedSources:
        """Now, or not long ago."""
        async with self._lock:
            if self._found is None or time.monotonic() - self._read_at > KEPT_SECONDS:
                self._found = await self._read()
                self._read_at = time.monotonic()
            return self._found

    async def _read(self) -> ScrapedSources:
        up: dict[str, bool] = {}
        wanted = dict(self._given)  # address by name
        overview = None
        if self._address is not None:
            overview, names = await self._read_cluster(self._address)
            up[self._address] = overview is not None
            wanted |= {name: f"roq://{self._address}/{name}" for name in names}
        for address in self._open.keys() - set(wanted.values()):
            await self._open.pop(address).close()
        answers = await asyncio.gather(*(self._status(address) for address in wanted.values()))
        tasks = {name: status for name, status in zip(wanted, answers, strict=True) if status is not None}
        up |= {name: name in tasks for name in wanted}
        return ScrapedSources(up, overview, tasks)

    async def _read_cluster(self, address: str) -> tuple[Overview | None, list[str]]:
        try:
            async with asyncio.timeout(SOURCE_SECONDS):
                if self._cluster is None:
                    self._cluster = connect(address, connect_seconds=SOURCE_SECONDS)
                overview = await read_overview(self._cluster)
                return overview, [info.record.name for info in await self._cluster.work_queues()]
        except (RoqError, TimeoutError) as error:
            log.warning("cluster was not read", extra={"fields": {"cluster": address, "reason": str(error)}})
            return None, []

    async def _status(self, address: str) -> Status | None:
        try:
            async with asyncio.timeout(SOURCE_SECONDS):
                if address not in self._open:
                    self._open[address] = await self._opened(address)
                return await self._open[address].status()
        except (RoqError, TimeoutError) as error:
            log.warning("work queue was not read", extra={"fields": {"queue": address, "reason": str(error)}})
            return None

    async def _opened(self, address: str) -> WorkQueue:
        if address in self._given.values() and not await asyncio.to_thread(exists, address):
            raise WorkQueueNotFound(f"no work queue at {address}")  # and none is made
        return await open_queue(address).__aenter__()

    async def close(self) -> None:
        """Let go of everything."""
        for queue in self._open.values():
            await queue.close()
        self._open.clear()
        if self._cluster is not None:
            await self._cluster.close()


# --- serving ----------------------------------------------------------------------------------------------------------


def answer(path: str, accept: str, found: ScrapedSources) -> Answer:
    """To a GET of this path, percent-encoded as it came."""
    match path.strip("/").split("/"):
        case ["metrics"]:
            content_type, body = exposition(found, accept)
            return "200 OK", content_type, body
        case ["v1", "queues", name, "status"] if found.overview is not None:
            rows = {row.queue: row for row in found.overview.queues}
            return _json(rows.get(unquote(name)))
        case ["v1", "work-queues", name, "status"]:
            status = found.tasks.get(unquote(name))
            return _json(status and status_row(status))
        case _:
            return _json(None)


def status_row(status: Status) -> dict[str, float]:
    """A work queue's counts for JSON. oldest_seconds: 0 if none is ready, for autoscalers take numbers only."""
    names = ("ready", "delayed", "leased", "dead", "completed", "inserted")
    return {**{name: getattr(status, name) for name in names}, "oldest_seconds": status.oldest_seconds or 0.0}


def _json(value: Any) -> Answer:
    if value is None:
        return "404 Not Found", JSON_TYPE, b'{"error":"nothing of this name is known, or it does not answer"}\n'
    return "200 OK", JSON_TYPE, msgspec.json.encode(value) + b"\n"


class _MetricsHandler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, *_: object) -> None:
        """Scrapes are not news."""

    def get_environ(self) -> dict[str, Any]:
        """With the path as it came: names may have slashes."""
        return {**super().get_environ(), "RAW_PATH": self.path.partition("?")[0]}

    def address_string(self) -> str:
        """Not by its name: that may take long."""
        return str(self.client_address[0])


class _MetricsServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Not by the host's full name: that may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


def application(read: Callable[[], ScrapedSources]) -> Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]:
    """WSGI. read: may raise TimeoutError."""

    def serve(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        try:
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
                status, kind, body = "405 Method Not Allowed", JSON_TYPE, b'{"error":"GET only"}\n'
            elif (path := environ["RAW_PATH"]) == "/health":
                status, kind, body = "200 OK", JSON_TYPE, b'{"status":"ok"}\n'
            else:
                status, kind, body = answer(path, environ.get("HTTP_ACCEPT", ""), read())
        except TimeoutError:
            status, kind, body = "503 Service Unavailable", JSON_TYPE, b'{"error":"nothing was read in time"}\n'
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    return serve


@contextlib.asynccontextmanager
async def serving(sources: Sources, host: str, port: int) -> AsyncIterator[int]:
    """Served by a thread until left; the port. Raises PortTaken."""
    loop = asyncio.get_running_loop()

    def read() -> ScrapedSources:
        return asyncio.run_coroutine_threadsafe(sources.read(), loop).result(ANSWER_SECONDS)

    _MetricsServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = _MetricsServer((host, port), _MetricsHandler)
    except OSError as error:
        raise PortTaken(f"{host}:{port} can't be listened on: {error.strerror or error}") from None
    server.set_app(application(read))
    thread = threading.Thread(target=server.serve_forever, name="roq-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await sources.close()


async def _serve(sources: Sources, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(sources, host, port) as bound:
        shown = f"[{host}]" if ":" in host else host
        say(f"roq metrics: http://{shown}:{bound}/metrics")
        await stop.wait()

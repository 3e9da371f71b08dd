"""`roq metrics`: an HTTP server for Prometheus and for autoscalers; nothing is read but when somebody asks.

    /metrics                        everything, for Prometheus (roq/client/metrics.py says what)
    /v1/queues/NAME/status          a queue of the cluster, as `roq queue ls --json` has it
    /v1/work-queues/NAME/status     a work queue's counts; NAME: of one of the cluster's, or its address, percent-encoded
    /health                         200 while this program runs

Requests come in threads of their own; what they ask for is read in the program's loop: all of it for /metrics, once for all who
ask within a second, else only what was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from socketserver import TCPServer, ThreadingMixIn
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
import typer
import uvloop

from roq.cli.address import ClusterOption, cluster_address
from roq.cli.output import say
from roq.cli.task_address import counts, full_address, opened
from roq.client.cluster import connect
from roq.client.metrics import ScrapedSources, exposition
from roq.client.overview import Overview, QueueRow, read_overview, read_queue
from roq.errors import InvalidAddress, InvalidConfiguration, PortTaken, RoqError
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.wire import master
from roq.wire.gcm import WorkQueueInfo
from roq.wire.task import Status

T = TypeVar("T")

LISTEN = "127.0.0.1:9464"
SOURCE_SECONDS = 2.5  # a source that needs longer did not answer: autoscalers wait for 3 s, and the cluster is asked twice
OVERVIEW_SECONDS = 8.0  # of a cluster in which many Monitors hang; Prometheus waits for 10 s
COUNTED_SECONDS = 60.0  # for so long the last count of a folder is given that takes longer
KEPT_SECONDS = 1.0  # what was read is given to all who ask within this time
ANSWER_SECONDS = 2 * OVERVIEW_SECONDS
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
    for address in queues:
        if address.startswith("roq:"):
            raise InvalidAddress(f"{address}: a cluster's work queues are served with the cluster, which --cluster names")
    place = cluster_address(cluster) if cluster or not queues else None
    host, port = _place(listen)
    uvloop.run(_serve(place, queues, host, port))


def _place(listen: str) -> tuple[str, int]:
    """Raises InvalidConfiguration."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise InvalidConfiguration(f"--listen is [HOST]:PORT, got {listen!r}")
    return host.strip("[]") or "0.0.0.0", int(port)


# --- reading ----------------------------------------------------------------------------------------------------------


class Sources:
    """A cluster, and work queues on this machine. These are opened for each look and closed again: a log that others have
    closed everywhere recovers when it is opened anew, and a folder may be another one by then."""

    def __init__(self, cluster: str | None, queues: Sequence[str]) -> None:
        self._address, self._queues = cluster, tuple(dict.fromkeys(queues))
        self._cluster = None if cluster is None else connect(cluster, connect_seconds=SOURCE_SECONDS)
        self._masters = RpcPool(master.Reply, SOURCE_SECONDS)
        self._looks: dict[str, asyncio.Future[Status]] = {}  # under way, by address: a folder may not answer for long
        self._counted: dict[str, tuple[float, Status]] = {}  # and what was counted last, when
        self._found: ScrapedSources | None = None
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def read(self) -> ScrapedSources:
        """Everything, now or not long ago."""
        async with self._lock:
            if self._found is None or time.monotonic() - self._read_at > KEPT_SECONDS:
                self._found = await self._read()
                self._read_at = time.monotonic()
            return self._found

    async def _read(self) -> ScrapedSources:
        overview, theirs, ours = await asyncio.gather(
            self._overview(), self._of_cluster(), asyncio.gather(*(self.status(address) for address in self._queues))
        )
        statuses = {**theirs, **dict(zip(self._queues, ours, strict=True))}
        up = {name: status is not None for name, status in statuses.items()}
        if self._address is not None:
            up[self._address] = overview is not None
        return ScrapedSources(up, overview, {name: status for name, status in statuses.items() if status is not None})

    async def _overview(self) -> Overview | None:
        if self._cluster is None:
            return None
        return await _answered(read_overview(self._cluster), OVERVIEW_SECONDS, self._address)

    async def _of_cluster(self) -> dict[str, Status | None]:
        if self._cluster is None:
            return {}
        found = await _answered(self._cluster.work_queues(), SOURCE_SECONDS, self._address)
        names = [info.record.name for info in found or ()]
        statuses = await asyncio.gather(*(self._asked(info) for info in found or ()))
        return dict(zip(names, statuses, strict=True))

    async def _asked(self, info: WorkQueueInfo) -> Status | None:
        """Of its master. Opening it would create it if somebody has just removed it."""
        if not info.masters or not info.masters[0].active:
            return None
        asking = self._masters.request(info.masters[0].endpoint(), master.GetStatus(), Status)
        return await _answered(asking, SOURCE_SECONDS, info.record.name)

    async def queue(self, name: str) -> QueueRow | None:
        """One queue of the cluster; None if it is not known or its Monitor does not answer."""
        if self._cluster is None:
            return None
        found = await _answered(read_queue(self._cluster, name), SOURCE_SECONDS, name)
        return None if found is None or found.summary.problem else found.summary

    async def status(self, name: str) -> Status | None:
        """Of one work queue; None if it is not known or does not answer."""
        if name not in self._queues:
            if self._cluster is None:
                return None
            info = await _answered(self._cluster.work_queue(name), SOURCE_SECONDS, name)
            return None if info is None else await self._asked(info)
        look = self._looks.get(name)
        if look is None:
            look = self._looks[name] = asyncio.ensure_future(asyncio.to_thread(_look, name))
            look.add_done_callback(partial(self._looked, name))
        found = await _answered(asyncio.shield(look), SOURCE_SECONDS, name)
        if found is None and name in self._counted:  # with a million files it may take longer than anybody waits
            when, last = self._counted[name]
            found = last if time.monotonic() - when < COUNTED_SECONDS else None
        return found

    def _looked(self, name: str, look: asyncio.Future[Status]) -> None:
        del self._looks[name]
        if look.cancelled():
            return
        if look.exception() is None:  # if it failed, whoever waited has the error
            self._counted[name] = (time.monotonic(), look.result())
        else:
            self._counted.pop(name, None)

    async def close(self) -> None:
        """Let go of everything."""
        async with self._lock:
            self._masters.close()
            if self._cluster is not None:
                await self._cluster.close()


async def _answered(asked: Awaitable[T], seconds: float, source: str | None) -> T | None:
    """What it answers; None if it does not, which is logged."""
    try:
        async with asyncio.timeout(seconds):
            return await asked
    except (RoqError, OSError, TimeoutError) as error:
        log.warning("source did not answer", extra={"fields": {"source": source, "reason": str(error) or "in time"}})
        return None


def _look(address: str) -> Status:
    with opened(address) as queue:
        return queue.status()


# --- serving ----------------------------------------------------------------------------------------------------------


async def answer(path: str, accept: str, sources: Sources) -> Answer:
    """To a GET of this path, percent-encoded as it came."""
    match path.strip("/").split("/"):
        case ["metrics"]:
            content_type, body = exposition(await sources.read(), accept)
            return "200 OK", content_type, body
        case ["v1", "queues", name, "status"]:
            return _json(await sources.queue(unquote(name)))
        case ["v1", "work-queues", name, "status"]:
            status = await sources.status(unquote(name))
            # autoscalers take numbers only
            return _json(status and {**counts(status), "oldest_seconds": status.oldest_seconds or 0.0})
        case ["health"]:
            return _json({"status": "ok"})
        case _:
            return _json(None)


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

    def handle(self) -> None:
        """Who says nothing, or goes away, is no error."""
        with contextlib.suppress(OSError):
            super().handle()

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


def application(ask: Callable[[str, str], Answer]) -> Callable[[dict[str, Any], Callable[..., object]], Iterable[bytes]]:
    """WSGI. ask: for path and Accept; may raise TimeoutError."""

    def serve(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, kind, body = "405 Method Not Allowed", JSON_TYPE, b'{"error":"GET only"}\n'
        else:
            try:
                status, kind, body = ask(environ["RAW_PATH"], environ.get("HTTP_ACCEPT", ""))
            except TimeoutError:
                status, kind, body = "503 Service Unavailable", JSON_TYPE, b'{"error":"nothing was read in time"}\n'
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return serve


@contextlib.asynccontextmanager
async def serving(sources: Sources, host: str, port: int) -> AsyncIterator[int]:
    """Served by a thread until left; the port. Raises PortTaken."""
    loop = asyncio.get_running_loop()

    def ask(path: str, accept: str) -> Answer:
        return asyncio.run_coroutine_threadsafe(answer(path, accept, sources), loop).result(ANSWER_SECONDS)

    _MetricsServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = _MetricsServer((host, port), _MetricsHandler)
    except OSError as error:
        raise PortTaken(f"{host}:{port} can't be listened on: {error.strerror or error}") from None
    server.set_app(application(ask))
    thread = threading.Thread(target=server.serve_forever, name="roq-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await sources.close()


async def _serve(cluster: str | None, queues: Sequence[str], host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(Sources(cluster, queues), host, port) as bound:
        shown = f"[{host}]" if ":" in host else host
        say(f"roq metrics: http://{shown}:{bound}/metrics")
        await stop.wait()

"""What Prometheus and autoscalers read: HTTP in a thread, with bounds on connections and their time, and the text that metrics
become (extra `metrics`).

What is asked for is read in the program's own loop, when somebody asks and at no other time. A peer that sends garbage, or
nothing, or does not read its answer, holds one connection of CONNECTIONS_MAX for CONNECTION_SECONDS at most. Not covered: who
may ask; everybody may.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec

from roq.errors import PortTaken
from roq.runtime.installation import brought_by
from roq.runtime.observe import Counters, Refusals, logger

with brought_by("metrics", "serving metrics"):
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.exposition import choose_encoder

T = TypeVar("T")

ANSWER_SECONDS = 16.0  # for an answer to be made; Prometheus waits for 10 s
REQUEST_SECONDS = 10.0  # without a byte of a request, or without room for one of an answer
CONNECTION_SECONDS = 30.0  # of one connection, whatever it does: a slow one is not there for ever
CONNECTIONS_MAX = 16  # each is a thread; more are closed unheard
JSON_TYPE = "application/json"
Answer = tuple[str, str, bytes]  # status, content type, body
Ask = Callable[[str, str], Awaitable[Answer]]  # path, percent-encoded as it came; Accept

log = logger(__name__)


def json_answer(value: Any) -> Answer:
    """200 with the value; 404 for None."""
    if value is None:
        return "404 Not Found", JSON_TYPE, b'{"error":"nothing of this name is known, or it does not answer"}\n'
    return "200 OK", JSON_TYPE, msgspec.json.encode(value) + b"\n"


class _Collected:
    """Families, as prometheus_client asks for them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Once."""
        yield from self._families


def metrics_answer(families: Iterable[Metric], accept: str = "") -> Answer:
    """accept: of the request; Prometheus asks for OpenMetrics by it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    encode, content_type = choose_encoder(accept)
    return "200 OK", content_type, encode(registry)


class ReadOnce(Generic[T]):
    """What takes time to read, on the running loop: read once for all who ask within `seconds`. lock: held while it is."""

    def __init__(self, read: Callable[[], Awaitable[T]], seconds: float) -> None:
        self.lock = asyncio.Lock()
        self._read, self._seconds = read, seconds
        self._found: T | None = None
        self._read_at = 0.0

    async def get(self) -> T:
        """Now, or not long ago."""
        async with self.lock:
            if self._found is None or time.monotonic() - self._read_at > self._seconds:
                self._found = await self._read()
                self._read_at = time.monotonic()
            return self._found


class _ScrapeHandler(WSGIRequestHandler):
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

    def get_stderr(self) -> Any:
        """What WSGI has to say of a peer that went away is for nobody: our own errors are logged."""
        return io.StringIO()


class _ScrapeServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}  # until when
        self._lock = threading.Lock()
        self._refusals = Refusals(log, Counters())
        super().__init__((host, port), _ScrapeHandler)

    def server_bind(self) -> None:
        """Not by the host's full name: that may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, unless there are too many."""
        with self._lock:
            if not (too_many := len(self._open) >= CONNECTIONS_MAX):
                self._open[request] = time.monotonic() + CONNECTION_SECONDS
        if too_many:
            self._refusals.note("too_many_scrapers", client_address[0])
            super().shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What it sent could not even be refused."""
        self._refusals.note("scrape", f"{client_address[0]}: {sys.exc_info()[1]!r}")

    def service_actions(self) -> None:
        """Twice a second: whose time is over. Its thread sees the connection end."""
        self._break_off(time.monotonic())

    def server_close(self) -> None:
        """With all that is open."""
        super().server_close()
        self._break_off(float("inf"))

    def _break_off(self, now: float) -> None:
        with self._lock:
            for request in [request for request, until in self._open.items() if until <= now]:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


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
            except Exception:
                log.exception("metrics could not be read", extra={"fields": {"path": environ["RAW_PATH"]}})
                status, kind, body = "500 Internal Server Error", JSON_TYPE, b'{"error":"the log says why"}\n'
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    return serve


@contextlib.asynccontextmanager
async def serving(ask: Ask, host: str, port: int) -> AsyncIterator[int]:
    """Served by a thread until left; the port (0: any free one). `ask` runs on this loop. Raises PortTaken."""
    loop = asyncio.get_running_loop()

    async def asked(path: str, accept: str) -> Answer:
        return await ask(path, accept)

    def answer(path: str, accept: str) -> Answer:
        under_way = asyncio.run_coroutine_threadsafe(asked(path, accept), loop)
        try:
            return under_way.result(ANSWER_SECONDS)
        except TimeoutError:
            under_way.cancel()
            raise

    try:
        server = _ScrapeServer(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise PortTaken(f"{host}:{port} can't be listened on, choose another place for metrics: {reason}") from None
    server.set_app(application(answer))
    thread = threading.Thread(target=server.serve_forever, name="roq-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()

"""One process that serves the console until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from roq.console.app import build
from roq.console.context import Console, ConsoleSettings
from roq.console.gate import ListenPolicy, Network, is_loopback, own_names
from roq.console.hub import Hub, Streams
from roq.console.identity import Attempts, Person, Sessions, SignInKind, SignInLink
from roq.console.publishing import Publishers
from roq.console.source import ConsoleSource
from roq.console.users import LOOKERS, Users, read_users
from roq.errors import AccessDenied, InvalidConfiguration, TemporaryError
from roq.runtime.sockets import listen
from roq.wire import rights
from roq.wire.access import GetAccess
from roq.wire.card import Card

STUCK_MS = 30_000  # for what was sent to be taken by the other end's machine
CONNECTIONS_MAX = 500
HEAD_SECONDS = 15.0  # longer than a connection without a request is kept for the next one
HEADERS_BYTES_MAX = 32 * 1024
END_SECONDS = 5  # for requests that are under way
GC_THRESHOLDS = 50_000, 20, 20
SOCKET_BYTES_MAX = 64 * 1024  # of what a WebSocket sends us, which means nothing


class ServeOptions(NamedTuple):
    """What `roq console` was told. header: of a proxy in front, with the user's name; users: file, see users.py. link: say one
    that signs its first visitor in as the console's own card."""

    host: str
    port: int
    writable: bool = False
    certificate: Path | None = None
    key: Path | None = None
    header: str = ""
    proxies: tuple[str, ...] = ()
    users: Path | None = None
    names: tuple[str, ...] = ()
    authority: Path | None = None
    link: bool = False


def networks(proxies: Sequence[str]) -> tuple[Network, ...]:
    """Of addresses or CIDRs. Raises InvalidConfiguration."""
    try:
        return tuple(ipaddress.ip_network(one) for one in proxies)
    except ValueError as error:
        raise InvalidConfiguration(f"--trusted-proxy is an address or a network as 10.0.0.0/8: {error}") from None


def check(options: ServeOptions, *, secured: bool) -> SignInKind:
    """How people are known. secured: the cluster takes only who shows a card, and the console has its own. Pure. Raises
    InvalidConfiguration: somebody could read what is not meant for them."""
    if (options.certificate is None) != (options.key is None):
        raise InvalidConfiguration("--certificate and --key go together")
    if options.header and not options.proxies:
        raise InvalidConfiguration("--trust-header needs --trusted-proxy: else everybody could say who they are")
    if options.users is not None and not options.header:
        raise InvalidConfiguration("--users is for the names that --trust-header has")
    if not is_loopback(options.host):
        if options.certificate is None and not options.proxies:
            raise InvalidConfiguration(
                f"{options.host} is no loopback address: give --certificate and --key, or come through a proxy with TLS, "
                "--trusted-proxy"
            )
        if not secured and not options.header:
            raise InvalidConfiguration(
                "this cluster has no cards, so everybody who reaches the console would be let in: listen on 127.0.0.1, or have "
                "a proxy sign people in, --trust-header"
            )
    if options.header:
        return SignInKind.PROXY
    return SignInKind.CARD if secured else SignInKind.NONE


def check_own(card: Card) -> None:
    """The console's. Raises AccessDenied: it would never learn which cards are revoked."""
    try:
        rights.for_names(rights.GCM)(card, GetAccess())
    except AccessDenied as error:
        raise AccessDenied(f"a console learns by that right which cards are revoked: {error}") from None


class HastyProtocol(H11Protocol):
    """HTTP whose requests begin in time: a connection that has sent no whole head HEAD_SECONDS after it was made, or after the
    answer before, is closed. So is one that goes on sending a body that was refused."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's."""
        self._wait_no_more()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """uvicorn's."""
        self._wait()
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """uvicorn's."""
        self._wait_no_more()
        super().handle_websocket_upgrade(event)

    def _wait(self) -> None:
        self._wait_no_more()
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._late)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _ConsoleServer(uvicorn.Server):
    """ready: called once it serves."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: they are handled by who runs it."""
        yield


def console_of(options: ServeOptions, source: ConsoleSource, port: int) -> Console:
    """Raises InvalidConfiguration, AccessDenied."""
    kind = check(options, secured=source.security is not None)
    if source.security is not None:
        check_own(source.security.card)
    users: Users = read_users(options.users) if options.users is not None else LOOKERS
    names = own_names(options.host, port, options.names)
    listening = ListenPolicy(names, networks(options.proxies), secure=options.certificate is not None)
    settings = ConsoleSettings(options.writable, kind, options.header.lower(), users, options.authority, f"roq_console_{port}")
    link = None
    if options.link and kind is SignInKind.CARD and is_loopback(options.host) and source.security is not None:
        link = SignInLink(Person(source.security.card.name, source.security.card), time.monotonic)
    return Console(
        settings,
        listening,
        source,
        Hub(source),
        Streams(),
        Sessions(time.monotonic),
        Attempts(time.monotonic),
        Publishers(source.cluster),
        link,
    )


async def serve(address: str, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT. address: of the cluster. Raises PortTaken, InvalidConfiguration, AccessDenied."""
    listener = listen(options.host, options.port)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)  # those it accepts have it, too
    try:
        source = ConsoleSource(address)
        try:
            port = listener.getsockname()[1]
            with contextlib.suppress(TemporaryError):  # one that is away now may come
                await source.view()
            console = console_of(options, source, port)
            shown = f"[{options.host}]" if ":" in options.host else options.host
            scheme = "https" if options.certificate is not None else "http"
            place = f"{scheme}://{shown}:{port}/"

            def ready() -> None:
                say(f"roq console: {place}")
                if console.link is not None:
                    say(
                        f"sign in as {console.link.name}, once and within 10 min: {place}#/sign-in?ticket={console.link.ticket}"
                    )

            await _run(console, options, listener, ready)
        finally:
            await source.close()
    finally:
        listener.close()


def _collect_less() -> None:
    """The cluster's view is read every second: hundreds of thousands of objects where there are ten thousand queues, none of
    them in a cycle. Looking for garbage after every 700 of them takes four times as long as making them."""
    gc.set_threshold(*GC_THRESHOLDS)


async def _run(console: Console, options: ServeOptions, listener: socket.socket, ready: Callable[[], None]) -> None:
    _collect_less()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # of a peer that went away; our own errors are logged by us
    logging.getLogger("roq.console").setLevel(logging.WARNING)  # when the cluster goes and comes, whatever commands log
    server = _ConsoleServer(_config(console, options), ready)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await console.hub.close()  # streams end, and with them their requests
        await console.publishers.close()
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        serving.cancel()
        await asyncio.gather(stopping, serving, return_exceptions=True)


def _config(console: Console, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        build(console),
        loop="none",
        http=HastyProtocol,
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # whom to believe is the gate's to say
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=END_SECONDS,
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        ws_max_size=SOCKET_BYTES_MAX,
        ws_max_queue=1,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )

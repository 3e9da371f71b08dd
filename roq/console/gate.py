"""What every request passes before anything looks at it: Host, Origin, the peer, the size; and the headers of every answer.

    DNS rebinding        a page whose name was made to mean this address sends its own name in Host: refused
    another site's page  what it sends carries its Origin, or Sec-Fetch-Site: refused where it would change or stream something
    frames, inline code  Content-Security-Policy, X-Frame-Options

Not covered: CSRF tokens and rights (context.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect

from roq.console.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ConsoleRefusal,
    ForeignOrigin,
    TooManyBodies,
    UnknownHost,
    UntrustedPeer,
)
from roq.console.problem import PROBLEM_TYPE, problem_of
from roq.runtime.observe import logger

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SAFE = ("GET", "HEAD", "OPTIONS")
BODY_BYTES_MAX = 8 * 1024 * 1024  # a message of the largest frame in base64, twice
SIGN_IN, SIGN_IN_BYTES_MAX = "/v1/session", 64 * 1024  # read before anybody is known; a card file has 2 KiB at most
BODIES_BYTES_MAX = 128 * 1024 * 1024  # of all requests that are under way
BODY_SECONDS = 30.0  # from the first byte to the last
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
DEFAULT_PORTS = (80, 443)  # browsers leave them out
log = logger(__name__)
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class ListenPolicy(NamedTuple):
    """Where the console is reached. hosts: what Host may say, lower case, `name:port` or the name alone for any port. proxies:
    networks of those that are in front of it, none: nobody is. secure: it speaks TLS itself."""

    hosts: frozenset[str]
    proxies: tuple[Network, ...] = ()
    secure: bool = False

    def knows(self, host: str) -> bool:
        """Whether this is a name of the console."""
        name = _without_port(host)
        default = name == host and any(f"{host}:{port}" in self.hosts for port in DEFAULT_PORTS)
        return host in self.hosts or name in self.hosts or default

    def trusts(self, address: str) -> bool:
        """Whether it is that of a proxy in front."""
        try:
            peer = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(peer, "ipv4_mapped", None)
        return any((mapped or peer) in network for network in self.proxies)


def own_names(host: str, port: int, more: Iterable[str]) -> frozenset[str]:
    """What Host may say. host: address that is listened on; more: names given by its operator."""
    shown = f"[{host}]" if ":" in host else host
    local = LOOPBACK_NAMES if is_loopback(host) else ()
    wild = host in ("0.0.0.0", "::")
    return frozenset(name.lower() for name in (*(f"{one}:{port}" for one in (*local, *(() if wild else (shown,)))), *more))


def is_loopback(host: str) -> bool:
    """Of an address, or localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def header(scope: MutableMapping[str, Any], name: bytes) -> str:
    """The only one of this name, "" if there is none. Raises UnknownHost for a second Host and so on: who is asked differs."""
    found = [value for key, value in scope["headers"] if key == name]
    if len(found) > 1:
        raise UnknownHost(f"{len(found)} headers {name.decode()}")
    return found[0].decode("latin-1") if found else ""


def peer_of(scope: MutableMapping[str, Any]) -> str:
    """Its address."""
    return str((scope.get("client") or ("", 0))[0])


def is_secure(scope: MutableMapping[str, Any], listening: ListenPolicy) -> bool:
    """Whether what is sent can be read by nobody else: TLS, to us or to the proxy in front, or this machine's loopback."""
    if listening.secure or (is_loopback(peer_of(scope)) and not listening.proxies):
        return True
    return listening.trusts(peer_of(scope)) and header(scope, b"x-forwarded-proto") == "https"


def check_request(scope: MutableMapping[str, Any], listening: ListenPolicy) -> None:
    """Raises UntrustedPeer, UnknownHost, ForeignOrigin, BodyTooLarge. Pure."""
    if listening.proxies and not listening.trusts(peer_of(scope)):
        raise UntrustedPeer(f"{peer_of(scope)} is none of this console's proxies")
    host = header(scope, b"host").lower()
    if not listening.knows(host):
        raise UnknownHost(f"this console is not {host or 'without a name'!r}")
    origin, stream = header(scope, b"origin"), scope["type"] == "websocket"
    if origin and not listening.knows(origin.lower().partition("://")[2]) and (stream or scope["method"] not in SAFE):
        raise ForeignOrigin(f"{origin} is not this console, {host}")
    site = header(scope, b"sec-fetch-site")
    if site == "cross-site" and scope["path"].startswith("/v1/"):
        raise ForeignOrigin("a page of another site asks")
    length = header(scope, b"content-length")
    if length and (not length.isdigit() or int(length) > body_max(scope["path"])):
        raise BodyTooLarge(f"{length} bytes; at most {body_max(scope['path'])}")


def body_max(path: str) -> int:
    """Bytes."""
    return SIGN_IN_BYTES_MAX if path == SIGN_IN else BODY_BYTES_MAX


class Gate:
    """ASGI. Around everything else."""

    def __init__(self, app: App, listening: ListenPolicy) -> None:
        self._app, self._listening = app, listening
        self._bodies = 0  # bytes, without those of signing in: nobody shuts that

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One request, or one WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            check_request(scope, self._listening)
        except ConsoleRefusal as error:
            await refuse(scope, error, receive, send)
            return
        body = BoundedBody(receive, body_max(scope["path"]))
        counted = self._counted(body) if scope["path"] != SIGN_IN else body.receive
        try:
            await self._app(scope, counted, _with_headers(scope["path"], send))
        except ClientDisconnect:
            log.info("client disconnected before its request was complete", extra={"fields": {"path": scope["path"]}})
        except Exception:
            log.exception("a request failed", extra={"fields": {"path": scope["path"]}})
            raise
        finally:
            self._bodies -= body.counted

    def _counted(self, body: BoundedBody) -> Receive:
        async def counted() -> Message:
            message = await body.receive()
            self._bodies += body.taken - body.counted
            body.counted = body.taken
            if self._bodies > BODIES_BYTES_MAX and body.more:
                raise TooManyBodies(f"they have more than {BODIES_BYTES_MAX} bytes: try again in a moment")
            return message

        return counted


class BoundedBody:
    """Of one request, in bytes and in time. counted: bytes of it that somebody has added up. more: it is not complete."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most = receive, most
        self.taken = self.counted = 0
        self.more = True
        self._until = 0.0

    async def receive(self) -> Message:
        """Its next part; once it is complete, what comes after it, whenever that is. Raises BodyTooLarge, BodyTooSlow."""
        if not self.more:
            return await self._receive()
        loop = asyncio.get_running_loop()
        self._until = self._until or loop.time() + BODY_SECONDS
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"its body did not come within {BODY_SECONDS:.0f} s") from None
        self.more = message["type"] == "http.request" and message.get("more_body", False)
        self.taken += len(message.get("body", b"")) if message["type"] == "http.request" else 0
        if self.taken > self._most:
            raise BodyTooLarge(f"more than {self._most} bytes")
        return message


def _with_headers(path: str, send: Send) -> Send:
    keep = b"no-store" if path.startswith("/v1") else b"no-cache"

    async def headed(message: Message) -> None:
        if message["type"] == "http.response.start":
            told = {name.lower() for name, _ in message["headers"]}
            extra = [(b"cache-control", keep)] if b"cache-control" not in told else []
            message = {**message, "headers": [*message["headers"], *HEADERS, *extra]}
        await send(message)

    return headed


async def refuse(scope: MutableMapping[str, Any], error: ConsoleRefusal, receive: Receive, send: Send) -> None:
    """Without asking anything behind the gate."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": type(error).__name__})
        return
    body = msgspec.json.encode(problem_of(error, scope["path"]))
    told = [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    told.append((b"connection", b"close"))  # its body is not read
    await _with_headers("/v1", send)({"type": "http.response.start", "status": error.status, "headers": told})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

"""A connection to NATS servers as a log's address names them."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
import nats.errors

from roq.errors import AccessDenied, InvalidConfiguration, LogUnavailable

CONNECT_SECONDS = 5.0
REPLICAS_MAX = 5
DENIED = ("authorization violation", "permissions violation", "authentication")


class NatsServers(msgspec.Struct, frozen=True):
    """Where the servers are, and as who to come: user and password, or a token in place of a user. replicas: of a new stream;
    0: one, or as it is."""

    urls: list[str]
    user: str = ""
    password: str = ""
    replicas: int = 0
    credentials: str = ""
    tls: str = ""

    @classmethod
    def of(cls, server: str) -> NatsServers:
        """Raises InvalidConfiguration."""
        where, _, query = server.partition("?")
        given = dict(parse_qsl(query))
        who, _, hosts = where.removeprefix("jetstream://").rpartition("@")
        user, _, password = map(unquote, who.partition(":"))
        replicas, tls = given.get("replicas", "0"), given.get("tls", "")
        if not (replicas.isdigit() and 0 <= int(replicas) <= REPLICAS_MAX):
            raise InvalidConfiguration(f"replicas is 1 to {REPLICAS_MAX}, got {replicas!r}")
        if tls not in ("", "require"):
            raise InvalidConfiguration(f"tls is 'require' or left out, got {tls!r}")
        if (path := given.get("credentials", "")) and not Path(path).is_file():
            raise InvalidConfiguration(f"credentials is the path of a file that `nsc` made; there is none at {path!r}")
        scheme = "tls" if tls else "nats"
        urls = [f"{scheme}://{host}" for host in hosts.split(",")]
        return cls(urls, user, password, int(replicas), path, tls)


async def connect(connection: Any, server: NatsServers, name: str, disconnected: Any = None, reconnected: Any = None) -> None:
    """From now on it reconnects by itself. Raises AccessDenied, LogUnavailable."""
    said: deque[str] = deque(maxlen=4)
    denied = asyncio.Event()

    async def failed(error: Exception) -> None:
        said.append(str(error) or type(error).__name__)
        if any(word in said[-1].lower() for word in DENIED):
            denied.set()

    options: dict[str, Any] = {"tls": ssl.create_default_context()} if server.tls else {}
    if server.password:
        options |= {"user": server.user, "password": server.password}
    elif server.user:
        options["token"] = server.user
    if server.credentials:
        options["user_credentials"] = server.credentials
    connecting = asyncio.ensure_future(
        connection.connect(
            server.urls,
            error_cb=failed,
            disconnected_cb=disconnected,
            reconnected_cb=reconnected,
            name="roq",
            connect_timeout=2,
            reconnect_time_wait=0.1,
            max_reconnect_attempts=-1,
            ping_interval=5,
            max_outstanding_pings=2,
            **options,
        )
    )
    refused = asyncio.ensure_future(denied.wait())
    try:
        await asyncio.wait({connecting, refused}, timeout=CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            await connecting
            return
    except (OSError, nats.errors.Error) as error:
        said.append(str(error))
    finally:
        refused.cancel()
        if not connecting.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
    why = said[-1] if said else f"no answer within {CONNECT_SECONDS:g} s"
    if denied.is_set():
        raise AccessDenied(f"{name}: NATS lets us not in: {why}")
    raise LogUnavailable(f"{name}: NATS can't be reached: {why}")

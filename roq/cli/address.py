"""Which cluster a command means: --cluster, else ROQ_CLUSTER, else the configuration file, else 127.0.0.1:2181.

The file is the one ROQ_CONFIG names, else ~/.config/roq/client.toml, else /etc/roq/client.toml: `cluster = "zk1:2181"`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
import uvloop

from roq.cli.output import working
from roq.client.cluster import Cluster, connect
from roq.errors import InvalidConfiguration
from roq.runtime.places import configuration_home

T = TypeVar("T")
DEFAULT_ADDRESS = "127.0.0.1:2181"
CONNECT_SECONDS = 8.0  # longer than a change of leader takes, shorter than people wait
TERMINATED = 128 + signal.SIGTERM
FILES = (configuration_home() / "client.toml", Path("/etc/roq/client.toml"))

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        help="ZooKeeper addresses, h1:2181,h2:2181/CHROOT (/RoQ if left out); else ROQ_CLUSTER, the configuration file.",
        show_default=False,
    ),
]
QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]
OldPlaceArgument = Annotated[  # what 0.1 took by its position
    str | None, typer.Argument(metavar="[CLUSTER]", hidden=True, show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs on standard output.")]


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the command line can be configured with. No pydantic here: it would cost every command 50 ms."""

    cluster: str | None = None


def either(option: T | None, old: T | None) -> T | None:
    """What was given under the name of today or that of 0.1. Raises BadParameter for both."""
    if option is not None and old is not None:
        raise typer.BadParameter(f"{option} and {old}: only one of them")
    return option if option is not None else old


def given_address(flag: str | None, environment: Mapping[str, str] = os.environ, files: tuple[Path, ...] = FILES) -> str | None:
    """The cluster that was named, None if none was. Raises InvalidConfiguration for an unreadable or wrong file."""
    named = flag or environment.get("ROQ_CLUSTER")
    if named:
        return named
    chosen = environment.get("ROQ_CONFIG")
    candidates = [Path(chosen)] if chosen else [path for path in files if path.exists()]
    return _file_values(candidates[0]).cluster if candidates else None


def _file_values(path: Path) -> ClientConfig:
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), ClientConfig)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidConfiguration(f"configuration file {path}: {error}") from None


def cluster_address(flag: str | None, environment: Mapping[str, str] = os.environ, files: tuple[Path, ...] = FILES) -> str:
    """The cluster a command works on."""
    return given_address(flag, environment, files) or DEFAULT_ADDRESS


def with_cluster(flag: str | None, work: Callable[[Cluster], Awaitable[T]]) -> T:
    """Connect, do `work`, disconnect: the frame of nearly every command."""

    async def body() -> T:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel, asyncio.current_task())
        address = cluster_address(flag)
        async with contextlib.AsyncExitStack() as stack:
            with working(f"looking for the cluster at {address}"):
                cluster = await stack.enter_async_context(connect(address, connect_seconds=CONNECT_SECONDS))
            return await work(cluster)

    try:
        return uvloop.run(body())
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None


def _cancel(task: asyncio.Task[object] | None) -> None:
    """SIGTERM ends a command as cleanly as Ctrl-C: publishers flush, members leave."""
    if task is not None:
        task.cancel()

"""What most commands share: the options --cluster and --json, the argument QUEUE, and a connection to the cluster that is meant
(which.py: how it is found)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer
import uvloop

from roq.cli.completion import context_names, queue_names
from roq.cli.output import working
from roq.cli.which import DEFAULT_ADDRESS, FILES, Choice, choose, take_card
from roq.client.cluster import Cluster, connect

T = TypeVar("T")
CONNECT_SECONDS = 8.0  # longer than a change of leader takes, shorter than people wait
TERMINATED = 128 + signal.SIGTERM

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        help="ZooKeeper addresses, h1:2181,h2:2181/CHROOT (/RoQ if left out), or a context; else ROQ_CLUSTER, `roq context`.",
        show_default=False,
        autocompletion=context_names,
    ),
]
QueueArgument = Annotated[
    str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False, autocompletion=queue_names)
]
OldPlaceArgument = Annotated[  # what 0.1 took by its position
    str | None, typer.Argument(metavar="[CLUSTER]", hidden=True, show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs on standard output.")]


def either(option: T | None, old: T | None) -> T | None:
    """What was given under the name of today or that of 0.1. Raises BadParameter for both."""
    if option is not None and old is not None:
        raise typer.BadParameter(f"{option} and {old}: only one of them")
    return option if option is not None else old


def given_address(flag: str | None, environment: Mapping[str, str] = os.environ, files: tuple[Path, ...] = FILES) -> str | None:
    """The cluster that was named, None if none was. Raises InvalidConfiguration for an unreadable or wrong file."""
    choice = choose(flag, environment, files)
    return choice.address if choice is not None else None


def cluster_address(flag: str | None, environment: Mapping[str, str] = os.environ, files: tuple[Path, ...] = FILES) -> str:
    """The cluster a command works on. Whoever connects to it calls take_card first."""
    return given_address(flag, environment, files) or DEFAULT_ADDRESS


def entered(flag: str | None) -> str:
    """The cluster a command works on, which it may connect to: as its context says who we are. Raises InvalidConfiguration,
    AccessDenied."""
    choice = choose(flag) or Choice(DEFAULT_ADDRESS, "nothing else was said")
    take_card(choice)
    return choice.address


def with_cluster(flag: str | None, work: Callable[[Cluster], Awaitable[T]]) -> T:
    """Connect, do `work`, disconnect: the frame of nearly every command."""

    async def body() -> T:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel, asyncio.current_task())
        address = entered(flag)
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

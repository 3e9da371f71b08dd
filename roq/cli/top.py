"""`roq top`: the tables of `roq status`, live. With --json, or without a terminal, one JSON line per refresh."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import console, print_json
from roq.cli.status import overview_tables
from roq.client.cluster import Cluster
from roq.client.overview import read_overview
from roq.errors import TemporaryError

FOR_EVER = 0


def top(
    cluster: ClusterOption = None,
    json: JsonOption = False,
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between refreshes.")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many refreshes; 0: never.")] = FOR_EVER,
) -> None:
    """Watch queues, Exchanges, rates, lag, losses and hosts. Ctrl-C ends it."""

    async def print_lines(connected: Cluster) -> None:
        shown = 0
        while True:
            print_json(await read_overview(connected))
            shown += 1
            if shown == count:
                return
            await asyncio.sleep(every)

    async def show(connected: Cluster) -> None:
        out, shown = console(), 0
        with Live(Text("asking the cluster…"), console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(await _picture(connected), refresh=True)
                shown += 1
                if shown == count:
                    return
                await asyncio.sleep(every)

    with_cluster(cluster, print_lines if json or not console().is_terminal else show)


async def _picture(cluster: Cluster) -> RenderableType:
    """The tables, or what is wrong: a GCM that changes must not end the display."""
    try:
        return overview_tables(await read_overview(cluster))
    except TemporaryError as error:
        return Text(f"{type(error).__name__}: {error}", style="red")

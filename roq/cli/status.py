"""`roq status`: the cluster at one moment, or with --watch what changes. `roq top`: the same tables, live; with --json, or
without a terminal, a JSON line per refresh."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import console, percent, print_found, print_json, rate, seconds, size, table, visible
from roq.client.broadcasts import TopologyChange, TopologyEvent
from roq.client.cluster import Cluster
from roq.client.overview import ExchangeRow, HostRow, Overview, QueueRow, read_overview
from roq.errors import TemporaryError

FOR_EVER = 0
ID_SHOWN = 8  # characters of an Exchange's id: enough to name it in a command; --json has all


class EventRow(TopologyChange, frozen=True, omit_defaults=True):
    """One change of the topology for JSON. leader, hosts, queues, work_queues: of a snapshot; hosts that are alive."""

    leader: str = ""
    hosts: list[str] | None = None
    queues: list[str] | None = None
    work_queues: list[str] | None = None


def status(
    cluster: ClusterOption = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Then a line per change, until Ctrl-C.")] = False,
) -> None:
    """Tell leader, hosts, queues and Exchanges of the cluster; or, with --watch, hosts, queues and Exchanges that come, go and
    move, as they do."""
    if watch:
        with_cluster(cluster, print_json_events if json else print_events)
        return
    print_found(with_cluster(cluster, read_overview), json, overview_tables)


async def print_json_events(connected: Cluster) -> None:
    """A JSON line per change."""
    async for event in connected.topology():
        print_json(event_row(event))


async def print_events(connected: Cluster) -> None:
    """A line per change."""
    async for event in connected.topology():
        row = event_row(event)
        subject = "  ".join(part for part in (row.queue or row.work_queue, row.exchange) if part)
        if event.view is not None:
            subject = f"leader {row.leader} epoch {row.epoch}: {len(row.hosts or ())} hosts, "
            subject += f"{len(row.queues or ())} queues, {len(row.work_queues or ())} work queues"
        host = f"  {row.host}" if row.host else ""
        print(
            f"{time.strftime('%H:%M:%S', time.localtime(row.time))}  {row.change:<20}{host}  {visible(subject)}".rstrip(),
            flush=True,
        )


def event_row(event: TopologyEvent) -> EventRow:
    """An event as JSON."""
    fields = {name: getattr(event, name) for name in TopologyChange.__struct_fields__}
    view = event.view
    if view is None:
        return EventRow(**fields)
    return EventRow(
        **fields,
        leader=view.leader,
        hosts=[host.host for host in view.hosts if host.alive],
        queues=[queue.record.name for queue in view.queues],
        work_queues=[queue.record.name for queue in view.work_queues],
    )


def overview_tables(found: Overview) -> Group:
    """All of the overview, for people."""
    alive = sum(host.alive for host in found.hosts)
    head = Text(f"leader {found.leader}  epoch {found.epoch}  hosts {alive}/{len(found.hosts)}  queues {len(found.queues)}")
    parts: list[RenderableType] = [head, "", host_table(found.hosts), "", queue_table(found.queues)]
    if found.exchanges:
        parts += ["", exchange_table(found.exchanges)]
    if found.failed:
        rows = [(one.host, one.process, str(one.restarts), one.error) for one in found.failed]
        parts += ["", table("Failed processes", ("HOST", "PROCESS", ">RESTARTS", "ERROR"), rows)]
    return Group(*parts)


def host_table(hosts: tuple[HostRow, ...]) -> RenderableType:
    """Hosts."""
    rows = [
        (
            row.host,
            row.address,
            "cordoned" if row.draining and row.alive else "alive" if row.alive else "away",
            f"{row.exchanges}/{row.exchanges_max}",
            str(row.monitors),
            str(row.processes),
            str(row.failed),
            str(row.restarts),
            percent(row.cpu_fraction),
            percent(row.memory_fraction),
        )
        for row in hosts
    ]
    columns = ("HOST", "ADDRESS", "STATE", ">EXCH", ">MON", ">PROC", ">FAILED", ">RESTARTS", ">CPU", ">MEM")
    return table("Hosts", columns, rows)


def queue_table(queues: tuple[QueueRow, ...]) -> RenderableType:
    """Queues."""
    rows = [
        (
            row.queue,
            queue_state(row),
            row.overflow,
            str(row.exchanges),
            str(row.publishers),
            str(row.subscribers),
            rate(row.messages_per_second),
            rate(row.delivered_per_second),
            size(row.bytes_per_second),
            seconds(row.lag_seconds),
            str(row.lost),
        )
        for row in queues
    ]
    columns = ("QUEUE", "STATE", "OVERFLOW", ">EXCH", ">PUB", ">SUB", ">IN/s", ">OUT/s", ">BYTES/s", ">LAG", ">LOST")
    return table("Queues", columns, rows)


def queue_state(row: QueueRow) -> str:
    """One word, or what is wrong."""
    if not row.running:
        return "stopped"
    if row.problem:
        return row.problem
    return "ready" if row.ready else "not ready"


def exchange_table(exchanges: tuple[ExchangeRow, ...]) -> RenderableType:
    """Exchanges."""
    rows = [
        (
            row.queue,
            row.exchange[:ID_SHOWN],
            row.host,
            row.state,
            str(row.publishers),
            str(row.attached),
            rate(row.messages_per_second),
            size(row.bytes_per_second),
            size(row.bytes_out_per_second),
            percent(row.cpu_fraction),
            size(row.memory_bytes),
        )
        for row in exchanges
    ]
    columns = ("QUEUE", "EXCHANGE", "HOST", "STATE", ">PUB", ">SUB", ">IN/s", ">IN B/s", ">OUT B/s", ">CPU", ">MEMORY")
    return table("Exchanges", columns, rows, gap=1)  # fits into 80 characters


def top(
    cluster: ClusterOption = None,
    json: JsonOption = False,
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between refreshes.")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many refreshes; 0: never.")] = FOR_EVER,
) -> None:
    """Watch queues, Exchanges, rates, lag, losses and hosts. Ctrl-C ends it."""

    async def work(connected: Cluster) -> None:
        out = console()
        plain = json or not out.is_terminal
        start = Text("asking the cluster…")
        with contextlib.nullcontext() if plain else Live(start, console=out, screen=True, auto_refresh=False) as live:
            for shown in itertools.count(1):
                if isinstance(live, Live):
                    live.update(await _tables(connected), refresh=True)
                else:
                    print_json(await read_overview(connected))
                if shown == count:
                    return
                await asyncio.sleep(every)

    with_cluster(cluster, work)


async def _tables(cluster: Cluster) -> RenderableType:
    """The tables, or what is wrong: a GCM that changes must not end the display."""
    try:
        return overview_tables(await read_overview(cluster))
    except TemporaryError as error:
        return Text(f"{type(error).__name__}: {error}", style="red")

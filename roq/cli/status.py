"""`roq status`: the cluster at one moment, or with --watch what changes."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import age, percent, print_found, print_json, rate, seconds, size, table
from roq.client.broadcasts import TopologyChange, TopologyEvent
from roq.client.cluster import Cluster
from roq.client.overview import ExchangeRow, HostRow, Overview, QueueRow, WorkQueueRates
from roq.client.rolling import RollingOverview, read_cluster
from roq.runtime.log_output import visible

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
    """Show leader, hosts, queues, Exchanges, work queues and groups of the cluster; or, with --watch, what comes, goes and
    moves, as it does."""
    if watch:
        with_cluster(cluster, print_json_events if json else print_events)
        return
    print_found(with_cluster(cluster, _read), json, overview_tables)


async def _read(connected: Cluster) -> Overview:
    rolling = RollingOverview(connected, time.monotonic)
    try:
        return await read_cluster(connected, rolling)
    finally:
        rolling.close()


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
    if found.work_queues:
        parts += ["", work_queue_table(found.work_queues)]
    if found.failed:
        rows = [(one.host, one.process, str(one.restarts), one.error) for one in found.failed]
        parts += ["", table("Failed processes", ("HOST", "PROCESS", ">RESTARTS", "ERROR"), rows)]
    return Group(*parts)


def host_state(row: HostRow) -> str:
    """One word."""
    if not row.alive:
        return "away"
    return "stopping" if row.stopping else "leaving" if row.leaving else "cordoned" if row.draining else "alive"


def host_table(hosts: tuple[HostRow, ...]) -> RenderableType:
    """Hosts."""
    rows = [
        (
            row.host,
            row.address,
            host_state(row),
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


def work_queue_table(found: tuple[WorkQueueRates, ...]) -> RenderableType:
    """Work queues, and groups."""
    rows = [
        (
            row.name,
            row.master,
            *("?" if row.problem else f"{count:,}" for count in (row.waiting, row.leased, row.dead, row.completed, row.missed)),
            age(row.oldest_seconds),
            "-" if row.lag is None else f"{row.lag:,}",
            row.problem,
        )
        for row in found
    ]
    columns = ("NAME", "MASTER", ">WAITING", ">LEASED", ">DEAD", ">DONE", ">MISSED", ">OLDEST", ">LAG", "PROBLEM")
    return table("Work queues and groups", columns, rows)


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

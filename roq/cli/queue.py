"""`roq queue create|ls|show|rm|start|stop|kpis`. What concerns single Exchanges is in queue_exchanges.py."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from roq.cli import queue_exchanges
from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import console, print_json, say, working
from roq.cli.policy_file import read_policy
from roq.cli.queue_show import print_detail
from roq.cli.status import queue_table
from roq.client.cluster import Cluster
from roq.client.overview import read_overview, read_queue
from roq.wire.assignment import Overflow
from roq.wire.gcm import QueueInfo
from roq.wire.limits import FRAME_BYTES_MAX
from roq.wire.policy import Policy

app = typer.Typer(
    help="Queues: create, list, show, remove, start, stop; move publishers between Exchanges.", no_args_is_help=True
)
queue_exchanges.register(app)

QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]
NamesArgument = Annotated[list[str], typer.Argument(metavar="QUEUE...", help="Names of queues.", show_default=False)]


@app.command("create")
def create(
    names: NamesArgument,
    cluster: ClusterOption = None,
    overflow: Annotated[
        Overflow, typer.Option(help="When a subscriber can't keep up: drop, or make publishers wait.")
    ] = Overflow.DROP,
    replication: Annotated[int, typer.Option(min=1, help="Monitors, each on a host of its own.")] = 1,
    host: Annotated[str | None, typer.Option(help="Host to run it; else the least loaded one.", show_default=False)] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Scaling policy, as `roq policy init` writes it.", show_default=False)
    ] = None,
    max_frame_bytes: Annotated[
        int, typer.Option(min=1024, help="Largest frame, and so about the largest payload.")
    ] = FRAME_BYTES_MAX,
    json: JsonOption = False,
) -> None:
    """Create queues and wait until they serve. Creating one that exists with the same settings changes nothing."""
    rules = read_policy(policy) if policy else None

    async def work(connected: Cluster) -> None:
        for name in names:
            with working(f"creating {name}"):
                existed = await connected.queue_exists(name)
                info = await connected.create_queue(
                    name, replication=replication, overflow=overflow, host=host, policy=rules, max_frame_bytes=max_frame_bytes
                )
            if json:
                print_json(info.record)
            else:
                _tell_created(info, existed, rules)

    with_cluster(cluster, work)


def _tell_created(info: QueueInfo, existed: bool, rules: Policy | None) -> None:
    record = info.record
    where = f"on {record.monitor_host}: {', '.join(record.exchanges)}"
    say(f"{record.name} exists already {where}" if existed else f"created {record.name} {where}")
    if existed and rules is not None and rules != info.policy:
        say(f"{record.name} keeps its policy: `roq policy set` changes it")
    elif not existed and info.policy == Policy():
        say("it has no policy and never scales by itself: see `roq policy init` and `roq policy set`")


@app.command("ls")
def list_queues(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List queues with their rates."""
    found = with_cluster(cluster, read_overview)
    if json:
        print_json(found.queues)
    else:
        console().print(queue_table(found.queues))


@app.command("show")
def show(name: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show a queue: settings, Exchanges, members, rates, and the last scaling decisions and why."""
    detail = with_cluster(cluster, lambda connected: read_queue(connected, name))
    if json:
        print_json(detail)
    else:
        print_detail(detail)


@app.command("rm")
def remove(names: NamesArgument, cluster: ClusterOption = None) -> None:
    """Remove queues: stop their processes and forget them."""
    _each(cluster, names, "removing", "removed", lambda connected, name: connected.remove_queue(name))


@app.command("start")
def start(names: NamesArgument, cluster: ClusterOption = None) -> None:
    """Run stopped queues again."""
    _each(cluster, names, "starting", "started", lambda connected, name: connected.start_queue(name))


@app.command("stop")
def stop(names: NamesArgument, cluster: ClusterOption = None) -> None:
    """Stop the processes of queues and keep what is known of them."""
    _each(cluster, names, "stopping", "stopped", lambda connected, name: connected.stop_queue(name))


def _each(
    cluster: str | None, names: list[str], doing: str, done: str, act: Callable[[Cluster, str], Awaitable[object]]
) -> None:
    async def work(connected: Cluster) -> None:
        for name in names:
            with working(f"{doing} {name}"):
                await act(connected, name)
            say(f"{done} {name}")

    with_cluster(cluster, work)


@app.command("kpis")
def kpis(
    name: QueueArgument,
    cluster: ClusterOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many seconds' records; 0: never.")] = 0,
) -> None:
    """Print the queue's KPIs, one JSON line a second, as `roq policy replay` reads them."""

    async def work(connected: Cluster) -> None:
        printed = 0
        async for kpi in connected.kpis(name):
            sys.stdout.write(msgspec.json.encode(kpi).decode() + "\n")
            sys.stdout.flush()
            printed += 1
            if printed == count:
                return

    with_cluster(cluster, work)

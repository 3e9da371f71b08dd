"""`roq queue group …`: groups of a recorded queue. What is in one, and its dead letters: `roq task … roq://…/QUEUE@GROUP`.

Not covered: being a member of one, `roq sub --group` (pub_sub.py).
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.completion import group_names
from roq.cli.output import age, print_done, print_found, print_json, say, table, working, yes
from roq.cli.pub_sub import TopicsArgument, WhereOption
from roq.cli.quantities import EARLIEST, group_start
from roq.client.cluster import Cluster
from roq.client.overview import GroupRow, group_row, read_groups
from roq.errors import GroupNotFound
from roq.ids import group_name
from roq.wire.gcm import WorkQueueInfo
from roq.wire.work_queue import GroupOrder, TaskSettings
from roq.workqueue.address import queue_address

app = typer.Typer(help="Groups of a recorded queue: create, list, remove.", no_args_is_help=True)
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.", show_default=False)]
GroupsArgument = Annotated[
    list[str], typer.Argument(metavar="GROUP...", help="Names of groups.", show_default=False, autocompletion=group_names)
]


@app.command("create")
def create(
    queue: QueueArgument,
    group: GroupArgument,
    topics: TopicsArgument = None,
    cluster: ClusterOption = None,
    order: Annotated[
        GroupOrder, typer.Option(help="topic: of each topic one message at a time; none: whoever asks gets the next one.")
    ] = GroupOrder.TOPIC,
    start: Annotated[
        str, typer.Option(metavar="earliest|now|2h|TIME|POSITION", help="Where it begins: 2h is so long ago.")
    ] = EARLIEST,
    where: WhereOption = "",
    max_attempts: Annotated[int | None, typer.Option(min=0, help="Leases until a message is dead; 0: never.")] = None,
    standbys: Annotated[int | None, typer.Option(help="Masters in waiting, on other hosts.")] = None,
    json: JsonOption = False,
) -> None:
    """Make a group of a recorded queue. Each message goes to one of its members. Again with the same options, nothing
    happens."""
    begin = group_start(start)
    settings = None if max_attempts is None else TaskSettings(max_attempts=max_attempts)

    async def work(connected: Cluster) -> WorkQueueInfo:
        with working(f"creating {group_name(queue, group)}"):
            existed = await _exists(connected, group_name(queue, group))
            info = await connected.create_group(
                *(queue, group, *(topics or ())),
                order=order,
                start=begin,
                where=where,
                settings=settings,
                standbys=standbys,
            )
        say(f"{info.record.name} exists already" if existed else f"created {info.record.name}")
        say(f"its address for `roq task`: {queue_address(connected.zookeeper, info.record.name)}")
        return info

    info = with_cluster(cluster, work)
    if json:
        print_json(group_row(info))


async def _exists(connected: Cluster, name: str) -> bool:
    try:
        await connected.work_queue(name)
    except GroupNotFound:
        return False
    return True


@app.command("ls")
def list_groups(queue: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List the groups of a queue: what they get, and how many messages are in them."""
    print_found(with_cluster(cluster, lambda connected: read_groups(connected, queue)), json, group_table)


@app.command("rm")
def remove(queue: QueueArgument, groups: GroupsArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Remove groups, with their dead letters and where they were. What is recorded stays."""

    async def work(connected: Cluster) -> None:
        for group in groups:
            with working(f"removing {group}"):
                await connected.remove_group(queue, group)
            done = {"queue": queue, "group": group, "removed": True}
            print_done(done, json, f"removed {group_name(queue, group)}")

    with_cluster(cluster, work)


def group_table(rows: tuple[GroupRow, ...]) -> RenderableType:
    """Groups."""
    cells = [
        (
            row.group,
            " ".join(row.topics),
            str(row.order),
            yes(row.ready),
            row.master,
            *_counts(row),
            age(row.oldest_seconds),
            age(row.behind_seconds),
            "-" if row.lag is None else f"{row.lag:,}",
            row.problem,
        )
        for row in rows
    ]
    counts = (">WAITING", ">DELAYED", ">LEASED", ">DEAD", ">DONE", ">MISSED", ">OLDEST", ">BEHIND", ">LAG")
    columns = ("GROUP", "TOPICS", "ORDER", "SERVES", "MASTER", *counts, "PROBLEM")
    return table("Groups", columns, cells)


def _counts(row: GroupRow) -> tuple[str, ...]:
    counts = row.waiting, row.delayed, row.leased, row.dead, row.completed, row.missed
    return tuple("?" if row.problem else f"{count:,}" for count in counts)

"""`roq events`: what happens in the cluster, a line each, as it does."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

import msgspec
import typer

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.completion import queue_names
from roq.cli.output import moment, print_json
from roq.cli.quantities import duration_seconds
from roq.client.cluster import Cluster
from roq.client.events import ClusterEvent, EventKind
from roq.runtime.log_output import visible

ALWAYS = (EventKind.WATCHING, EventKind.MISSED)  # of one queue, too: nobody shall take silence for peace


def events(
    cluster: ClusterOption = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", "-q", help="Only of this queue or work queue.", show_default=False, autocompletion=queue_names),
    ] = None,
    kind: Annotated[list[EventKind] | None, typer.Option("--kind", "-k", help="Only such ones.", show_default=False)] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="2h|…", help="First the scaling decisions of so long that Monitors remember.", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many; 0: never.")] = 0,
    json: JsonOption = False,
) -> None:
    """Print what happens, as it does: hosts, queues, Exchanges, groups that come, go and move; processes that die; who leads
    and who takes over; scaling decisions, why and what became of them; tapes that end. Until Ctrl-C.

    It begins with `watching`. Events are kept nowhere: `missed` says that nothing was heard for a while."""
    begin = None if since is None else datetime.fromtimestamp(time.time() - duration_seconds(since)).astimezone()

    async def work(connected: Cluster) -> None:
        printed = 0
        async for event in connected.events(begin):
            if not wanted(event, queue, kind):
                continue
            if json:
                print_json(event_line(event))
            else:
                print(f"{moment(event.time)}  {event.kind:<22}  {visible(str(event))}", flush=True)
            printed += 1
            if printed == count:
                return

    with_cluster(cluster, work)


def wanted(event: ClusterEvent, queue: str | None, kinds: list[EventKind] | None) -> bool:
    """Whether it is printed. Pure."""
    if event.kind in ALWAYS:
        return not kinds or event.kind in kinds
    return (not kinds or event.kind in kinds) and (queue is None or queue in (event.queue, event.work_queue))


def event_line(event: ClusterEvent) -> dict[str, object]:
    """For JSON, with its sentence. What does not apply is left out."""
    return {"kind": event.kind, "time": event.time, "text": str(event), **msgspec.to_builtins(event)}

"""`roq queue template`: how a queue is made that a publisher or subscriber asks for with `create_missing`, and is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import print_done, print_found, table
from roq.cli.policy import read_policy
from roq.cli.recording import AckOption, BytesOption, CopiesOption, RecordOption, kept_as
from roq.client.cluster import Cluster
from roq.wire.assignment import Overflow
from roq.wire.limits import FRAME_BYTES_MAX
from roq.wire.options import QueueTemplate

# How any queue is made; with those of recordings (recording.py), in `roq queue create` too.
OverflowOption = Annotated[Overflow, typer.Option(help="When a subscriber can't keep up: drop, or make publishers wait.")]
ReplicationOption = Annotated[int, typer.Option(min=1, help="Monitors, each on a host of its own.")]
PolicyOption = Annotated[Path | None, typer.Option(help="Scaling policy, as `roq policy init` writes it.", show_default=False)]
FrameBytesOption = Annotated[int, typer.Option(min=1024, help="Largest frame, and so about the largest payload.")]

app = typer.Typer(help="The template of queues that are made because they are missing: set, show.", no_args_is_help=True)


@app.command("set")
def set_template(
    cluster: ClusterOption = None,
    overflow: OverflowOption = Overflow.DROP,
    replication: ReplicationOption = 1,
    policy: PolicyOption = None,
    max_frame_bytes: FrameBytesOption = FRAME_BYTES_MAX,
    record: RecordOption = None,
    record_bytes: BytesOption = None,
    copies: CopiesOption = None,
    ack: AckOption = None,
    json: JsonOption = False,
) -> None:
    """Say how missing queues are made from now on. What is not given has its default; queues that exist stay as they are."""
    kept = kept_as(record, record_bytes, copies, ack)
    wanted = QueueTemplate(replication, overflow, max_frame_bytes, read_policy(policy) if policy else None, kept)

    async def work(connected: Cluster) -> None:
        await connected.set_template(wanted)

    with_cluster(cluster, work)
    print_done({"template": wanted, "set": True}, json, "the template is set: it holds for queues that are made from now on")


@app.command("show")
def show_template(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show how missing queues are made."""

    async def work(connected: Cluster) -> QueueTemplate:
        return (await connected.options()).template

    print_found(with_cluster(cluster, work), json, _view)


def _view(template: QueueTemplate) -> RenderableType:
    record = template.record
    rows = [
        ("overflow", str(template.overflow)),
        ("replication", str(template.replication)),
        ("max_frame_bytes", f"{template.max_frame_bytes:,}"),
        ("policy", "none" if template.policy is None else "set, see --json"),
        ("record", "no" if record is None else str(record)),
    ]
    return table("Template of missing queues", ("FIELD", "VALUE"), rows)

"""`roq queue record`, and the options of `roq queue create` that say how the messages of a queue are kept."""

from __future__ import annotations

from typing import Annotated

import typer

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.output import age, print_done, size, working
from roq.cli.quantities import UNIT_SECONDS, byte_count, duration_seconds
from roq.client.cluster import Cluster
from roq.wire.recording import COPIES_DEFAULT, Record

FOREVER, OFF = "forever", "off"
DAY = UNIT_SECONDS["d"]
DEFAULT = Record()
RecordOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help=f"Record: keep messages for so long, such as 90m, 12h, 7d or {FOREVER}.", show_default=False
    ),
]
BytesOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="At most so much, such as 10GB, the oldest go first; 0: no limit.", show_default=False),
]
CopiesOption = Annotated[
    int | None,
    typer.Option(
        min=0, help=f"Stores that keep each message; 0: {COPIES_DEFAULT}, or as many as there are.", show_default=False
    ),
]
AckOption = Annotated[
    int | None,
    typer.Option(min=0, help="Of them, that have it before it counts as stored; 0: the majority.", show_default=False),
]


def record(
    name: QueueArgument,
    kept: Annotated[str, typer.Argument(metavar=f"TIME|{OFF}", help=f"7d, 12h, {FOREVER} …, or {OFF}.", show_default=False)],
    cluster: ClusterOption = None,
    record_bytes: BytesOption = None,
    copies: CopiesOption = None,
    ack: AckOption = None,
    json: JsonOption = False,
) -> None:
    """Record a queue from now on, or record it no longer, while messages flow. What no option names stays as it is; what was
    recorded stays until it expires."""
    if kept != OFF:
        changed(DEFAULT, kept, record_bytes, copies, ack)  # a wrong one is told before anybody is asked
    elif (record_bytes, copies, ack) != (None, None, None):
        raise typer.BadParameter(f"--record-bytes, --copies and --ack say how it is recorded, not with {OFF}")

    async def work(connected: Cluster) -> Record | None:
        with working(f"changing {name}"):
            wanted: Record | None = None
            if kept != OFF:
                former = (await connected.queue(name)).record.record
                wanted = changed(former or DEFAULT, kept, record_bytes, copies, ack)
            await connected.record_queue(name, wanted)
            return wanted

    now = with_cluster(cluster, work)
    text = f"{name} is {'recorded no longer' if now is None else recorded_how(now, True)}"
    print_done({"queue": name, "recorded": now is not None, "record": now}, json, text)


def kept_as(kept: str | None, record_bytes: str | None, copies: int | None, ack: int | None) -> Record | None:
    """What the options of `roq queue create` ask for. Raises BadParameter."""
    if kept is not None:
        return changed(DEFAULT, kept, record_bytes, copies, ack)
    if (record_bytes, copies, ack) != (None, None, None):
        raise typer.BadParameter("--record-bytes, --copies and --ack need --record")
    return None


def changed(former: Record, kept: str, record_bytes: str | None, copies: int | None, ack: int | None) -> Record:
    """What is not asked for is as in `former`. Raises BadParameter."""
    return Record(
        days=days_of(kept),
        max_bytes=former.max_bytes if record_bytes is None else byte_count(record_bytes),
        copies=former.copies if copies is None else copies,
        ack=former.ack if ack is None else ack,
    )


def days_of(text: str) -> float:
    """12h → 0.5; forever → 0. Raises BadParameter."""
    if text == FOREVER:
        return 0.0
    seconds = duration_seconds(text)
    if not seconds:
        raise typer.BadParameter(f"a time of 0 keeps nothing: `{OFF}` records no longer, `{FOREVER}` keeps everything")
    return seconds / DAY


def recorded_how(record: Record, recorded: bool) -> str:
    """recorded: kept for 7 d, at most 9.3 GiB, 3 copies, 2 of them before it counts."""
    days = f"{record.days:g} d" if record.days >= 1 else age(record.days * DAY)
    parts = [f"kept for {days}" if record.days else "kept for ever"]
    if record.max_bytes:
        parts.append(f"at most {size(record.max_bytes)}")
    if record.copies:
        parts.append("1 copy" if record.copies == 1 else f"{record.copies} copies")
    else:
        parts.append(f"{COPIES_DEFAULT} copies as far as there are hosts")
    if record.ack:
        parts.append(f"{record.ack} of them before it counts")
    return f"recorded{'' if recorded else ' no longer, what was'}: {', '.join(parts)}"

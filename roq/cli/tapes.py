"""`roq queue read` and `roq queue tapes`: what a recorded queue has kept, and where."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, entered, with_cluster
from roq.cli.arrow import write_arrow
from roq.cli.output import moment, print_found, table
from roq.cli.progress import progressing_beside
from roq.cli.pub_sub import EVERYTHING, MessageJsonOption, MessageTally, TopicsArgument, WhereOption, print_messages
from roq.cli.quantities import EARLIEST, start_of
from roq.cli.status import ID_SHOWN
from roq.client.cluster import Cluster
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.wire.assignment import from_json
from roq.wire.gcm import TapeView
from roq.workqueue.address import queue_address

LIVE, ENDING, ENDED = "live", "ending", "ended"
MoreTopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="TOPIC", help="As a topic behind the queue; may be repeated.", show_default=False),
]


class TapeRow(msgspec.Struct, frozen=True):
    """A tape. state: live: the queue has its Exchange; ending: it has not, and the tape is not closed yet; ended. first, last:
    its entries; last is None as long as it is not closed. copies: stores that keep each entry, ack: that must have it before
    it counts. hosts: that keep the last segment. oldest_closed: when the oldest segment was closed, Unix seconds."""

    exchange: str
    log: str
    state: str
    segments: int
    first: int
    last: int | None
    copies: int
    ack: int
    hosts: tuple[str, ...]
    oldest_closed: float | None


def read(
    queue: QueueArgument,
    topics: TopicsArgument = None,
    cluster: ClusterOption = None,
    since: Annotated[
        str,
        typer.Option(
            metavar="earliest|last|2h|TIME|POSITION", help="Where to begin: 2h is so long ago, last the last one of each topic."
        ),
    ] = EARLIEST,
    where: WhereOption = "",
    more: MoreTopicsOption = None,
    count: Annotated[
        int,
        typer.Option(
            "--count", "-n", min=0, help="End after so many messages, some of which may be repeated when you go on; 0: never."
        ),
    ] = 0,
    json: MessageJsonOption = False,
    arrow: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Write an Arrow IPC file instead, or an Arrow stream to standard output (-).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print what was recorded, up to the present. Standard error says what was lost, and where to go on."""
    begin, tally = start_of(since), MessageTally("roq queue read")
    wanted = [*(topics or ()), *(more or ())]
    if arrow is not None:
        if json or count:
            raise typer.BadParameter("--arrow writes all there is, as Arrow: not with --json or --count")
        address = queue_address(entered(cluster), queue)
        write_arrow(arrow, address, wanted, begin, where, tally)
        return

    async def work(connected: Cluster) -> None:
        make, filters = connected.subscriber, wanted or [EVERYTHING]
        async with make(queue, *filters, on_lost=tally.lost, start=begin, follow=False, where=where) as subscriber:
            try:
                with progressing_beside("reading") as tally.told:
                    await print_messages(subscriber, tally, json, count)
            finally:
                tally.tell("read", subscriber, "--since")

    with_cluster(cluster, work)


def list_tapes(queue: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List the tapes of a recorded queue, one for each Exchange that it has or had: what is on them, and where they are."""
    found = with_cluster(cluster, lambda connected: connected.tapes(queue))
    print_found([tape_row(view) for view in found.views], json, tape_table)


def tape_row(view: TapeView) -> TapeRow:
    """What its metadata says."""
    meta = from_json(view.meta, LogMeta)
    oldest, newest = (meta.segments[0], meta.segments[-1]) if meta.segments else (None, None)
    closed = newest is None or newest.state is SegmentState.CLOSED
    return TapeRow(
        exchange=view.exchange,
        log=view.log,
        state=LIVE if view.live else ENDED if closed else ENDING,
        segments=len(meta.segments),
        first=oldest.first if oldest else meta.next_first,
        last=meta.next_first - 1 if closed else None,
        copies=meta.write_quorum,
        ack=meta.ack_quorum,
        hosts=newest.fragments[-1].nodes if newest else (),
        oldest_closed=oldest.closed_at / 1000 if oldest and oldest.closed_at else None,
    )


def tape_table(rows: list[TapeRow]) -> RenderableType:
    """Tapes."""
    cells = [
        (
            row.exchange[:ID_SHOWN],
            row.state,
            str(row.segments),
            _entries(row),
            str(row.copies),
            ", ".join(row.hosts),
            "-" if row.oldest_closed is None else moment(row.oldest_closed),
        )
        for row in rows
    ]
    return table("Tapes", ("EXCHANGE", "STATE", ">SEGMENTS", "ENTRIES", ">COPIES", "HOSTS", "OLDEST CLOSED"), cells)


def _entries(row: TapeRow) -> str:
    """1..7, or 1.. while nobody knows where it ends."""
    if row.last is not None and row.last < row.first:
        return "-"
    return f"{row.first}..{'' if row.last is None else row.last}"

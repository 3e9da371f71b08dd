"""`roq history …`: whether the cluster keeps every queue's KPIs and scaling decisions; and how `roq queue show --history` shows
what happened to one.

Not covered: reading it (roq/client/history.py), another policy over it (policy.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import age, counted, moment, print_done, print_found, rate, seconds, size, table, working
from roq.cli.quantities import EARLIEST, LAST, POSITION, byte_count, start_of
from roq.cli.recording import DEFAULT, AckOption, BytesOption, CopiesOption, recorded_how
from roq.client.cluster import Cluster
from roq.client.history import HistoryPeriod, QueueHistory
from roq.client.overview import QueueDetail, read_queue
from roq.errors import QueueNotFound
from roq.pubsub.start import Start
from roq.wire.kpi import HISTORY_QUEUES, Decision
from roq.wire.recording import Record

app = typer.Typer(help="The cluster's own history: KPIs and scaling decisions of every queue.", no_args_is_help=True)
DAY_SECONDS = 86_400
BAR = "█"
BAR_WIDTH = 16
COLUMNS = ("WHEN", ">MSG/s", "", ">AT MOST", ">DELIVERED/s", ">EXCHANGES", ">LAG", ">LOST", "DECISION")
SinceOption = Annotated[
    str | None,
    typer.Option(metavar=f"2h|TIME|{EARLIEST}", help="From when on; 2h is so long ago.", show_default=False),
]


class HistoryRow(msgspec.Struct, frozen=True):
    """One of its two queues. record: how it is kept, None if it is not. Rates are those of now."""

    queue: str
    record: Record | None = None
    messages_per_second: float = 0.0
    bytes_per_second: float = 0.0
    problem: str = ""


@app.command("on")
def on(
    cluster: ClusterOption = None,
    days: Annotated[float, typer.Option(min=0, help="How long it is kept; 0: for ever.")] = DEFAULT.days,
    record_bytes: BytesOption = None,
    copies: CopiesOption = None,
    ack: AckOption = None,
    json: JsonOption = False,
) -> None:
    """Keep KPIs and scaling decisions of every queue from now on, about 1 KB a second for a small queue. Again: change how."""
    record = Record(days, byte_count(record_bytes or "0"), copies or 0, ack or 0).check()

    async def work(connected: Cluster) -> None:
        with working("switching the history on"):
            await connected.record_history(record)

    with_cluster(cluster, work)
    text = f"KPIs and scaling decisions of every queue are {recorded_how(record, True)}"
    print_done({"history": True, "record": record}, json, text)


@app.command("off")
def off(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Keep no history any more, and remove what was kept."""

    async def work(connected: Cluster) -> None:
        with working("removing the history"):
            await connected.record_history(None)

    with_cluster(cluster, work)
    print_done({"history": False, "record": None}, json, "no history is kept, what was kept is removed")


@app.command("show")
def show(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show whether a history is kept, how, and how much comes in now."""

    async def work(connected: Cluster) -> list[HistoryRow]:
        return [await _row(connected, name) for name in reversed(HISTORY_QUEUES)]

    print_found(with_cluster(cluster, work), json, state_table)


async def _row(connected: Cluster, name: str) -> HistoryRow:
    try:
        return history_row(await read_queue(connected, name))
    except QueueNotFound:
        return HistoryRow(name)


def history_row(detail: QueueDetail) -> HistoryRow:
    """What its queue says."""
    row = detail.summary
    record = detail.record if detail.recorded else None
    problem = row.problem or ("" if row.running else "stopped: `roq history on` starts it")
    return HistoryRow(row.queue, record, row.messages_per_second, row.bytes_per_second, problem)


def state_table(rows: list[HistoryRow]) -> RenderableType:
    """On or off, and what it costs at this rate."""
    cells = [
        (
            row.queue,
            row.problem or ("off" if row.record is None else recorded_how(row.record, True)),
            rate(row.messages_per_second),
            f"{size(row.bytes_per_second)}/s",
            size(row.bytes_per_second * DAY_SECONDS),
        )
        for row in rows
    ]
    return table("History", ("QUEUE", "STATE", ">RECORDS/s", ">BYTES", ">A DAY, EACH COPY"), cells)


# --- the history of one queue -----------------------------------------------------------------------------------------


def since_of(text: str) -> Start:
    """From when on. Raises BadParameter."""
    if text == LAST or text.startswith(POSITION):
        raise typer.BadParameter(f"--since is so long ago such as 2h, a time, or {EARLIEST}; got {text!r}")
    return start_of(text)


def history_view(found: QueueHistory) -> RenderableType:
    """Period by period, with the decisions where they were made."""
    if not found.periods and not found.decisions:
        return f"{found.queue}: nothing was kept since then"
    top = max((one.messages_per_second for one in found.periods), default=0.0)
    rows = [(one.begin, 0, _period(one, top)) for one in found.periods]
    rows += [(one.time, 1, _decision(one)) for one in found.decisions]
    head = f"{found.queue}: {counted(sum(one.records for one in found.periods), 'record')}"
    if found.periods:
        head += f", a row is {age(found.periods[0].seconds)}"
    return Group(head, "", table("", COLUMNS, [cells for _, _, cells in sorted(rows)]))


def _period(one: HistoryPeriod, top: float) -> tuple[str, ...]:
    if not one.records:
        return (moment(one.begin), "-", "", "-", "-", "-", "-", "-", "")
    few, many = one.exchanges_least, one.exchanges_most
    return (
        moment(one.begin),
        rate(one.messages_per_second),
        BAR * (round(BAR_WIDTH * one.messages_per_second / top) if top else 0),
        rate(one.messages_per_second_most),
        rate(one.delivered_per_second),
        str(many) if few == many else f"{few} to {many}",
        seconds(one.lag_seconds) if one.subscribers_most else "-",
        str(one.lost),
        "",
    )


def _decision(one: Decision) -> tuple[str, ...]:
    became = "" if one.action == "hold" else f" → {one.outcome or 'under way'}"
    return (moment(one.time), *("",) * 7, f"{one.action}: {one.cause}{became}")

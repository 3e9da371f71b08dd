"""`roq queue …`: create, list, show, remove, start and stop queues, print their KPIs; planned changes of their Exchanges.

Not covered: `roq queue record` and the options of a recorded queue (recording.py); what was recorded (tapes.py); groups of it
(group.py); its durable subscribers and producers (recorded_names.py).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType

from roq.cli import group, recorded_names, recording, tapes, template
from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.completion import host_names, queue_names
from roq.cli.history import SinceOption, history_view, since_of
from roq.cli.output import moment, percent, print_done, print_found, print_json, rate, say, seconds, size, table, working, yes
from roq.cli.policy import read_policy
from roq.cli.recording import AckOption, BytesOption, CopiesOption, RecordOption, kept_as, recorded_how
from roq.cli.status import exchange_table, queue_state, queue_table
from roq.cli.template import FrameBytesOption, OverflowOption, PolicyOption, ReplicationOption
from roq.client.cluster import Cluster
from roq.client.history import read_history
from roq.client.overview import MemberRow, QueueDetail, read_overview, read_queue, with_groups
from roq.errors import CallError, ExchangeNotFound, PublisherNotFound, RoqError
from roq.ids import is_reserved
from roq.wire.assignment import Overflow
from roq.wire.gcm import QueueInfo
from roq.wire.kpi import Decision
from roq.wire.limits import FRAME_BYTES_MAX
from roq.wire.monitor import Moved, QueueView
from roq.wire.policy import Policy
from roq.wire.recording import Record

app = typer.Typer(
    help="Queues: create, list, show, remove, start, stop, record, read; move publishers between Exchanges.",
    no_args_is_help=True,
)

NamesArgument = Annotated[
    list[str], typer.Argument(metavar="QUEUE...", help="Names of queues.", show_default=False, autocompletion=queue_names)
]
ExchangeArgument = Annotated[
    str, typer.Argument(metavar="EXCHANGE", help="Id of the Exchange, or how it begins.", show_default=False)
]


@app.command("create")
def create(  # noqa: PLR0913, PLR0917  one parameter per flag
    names: NamesArgument,
    cluster: ClusterOption = None,
    overflow: OverflowOption = Overflow.DROP,
    replication: ReplicationOption = 1,
    host: Annotated[
        str | None,
        typer.Option(help="Host to run it; else the least loaded one.", show_default=False, autocompletion=host_names),
    ] = None,
    policy: PolicyOption = None,
    max_frame_bytes: FrameBytesOption = FRAME_BYTES_MAX,
    record: RecordOption = None,
    record_bytes: BytesOption = None,
    copies: CopiesOption = None,
    ack: AckOption = None,
    json: JsonOption = False,
) -> None:
    """Create queues and wait until they serve. Creating one that exists with the same settings changes nothing."""
    rules = read_policy(policy) if policy else None
    kept = kept_as(record, record_bytes, copies, ack)

    async def work(connected: Cluster) -> None:
        for name in names:
            with working(f"creating {name}"):
                existed = await connected.queue_exists(name)
                info = await connected.create_queue(
                    name,
                    replication=replication,
                    overflow=overflow,
                    host=host,
                    policy=rules,
                    max_frame_bytes=max_frame_bytes,
                    record=kept,
                )
            if json:
                print_json(info.record)
            else:
                _tell_created(info, existed, rules, kept)

    with_cluster(cluster, work)


def _tell_created(info: QueueInfo, existed: bool, rules: Policy | None, kept: Record | None) -> None:
    record = info.record
    where = f"on {record.monitor_host}: {', '.join(record.exchanges)}"
    say(f"{record.name} exists already {where}" if existed else f"created {record.name} {where}")
    if existed and rules is not None and rules != info.policy:
        say(f"{record.name} keeps its policy: `roq policy set` changes it")
    elif not existed and info.policy == Policy():
        say("it has no policy and never scales by itself: see `roq policy init` and `roq policy set`")
    if kept is not None and not record.recorded:
        say(f"{record.name} is recorded no longer: `roq queue record` changes it")


@app.command("ls")
def list_queues(
    cluster: ClusterOption = None,
    everything: Annotated[bool, typer.Option("--all", help="The cluster's own, too, see `roq history`.")] = False,
    json: JsonOption = False,
) -> None:
    """List queues with their rates."""
    found = with_cluster(cluster, read_overview).queues
    print_found(tuple(row for row in found if everything or not is_reserved(row.queue)), json, queue_table)


@app.command("show")
def show(
    name: QueueArgument,
    cluster: ClusterOption = None,
    history: Annotated[
        bool, typer.Option("--history", help="What happened to it, if `roq history` is on: load, Exchanges, decisions.")
    ] = False,
    since: SinceOption = None,
    json: JsonOption = False,
) -> None:
    """Show a queue: settings, Exchanges, members, rates, and the last scaling decisions and why. Or its --history, the last
    hour of it unless told otherwise."""
    if history:
        begin = since_of(since or "1h")
        print_found(with_cluster(cluster, lambda connected: read_history(connected, name, begin)), json, history_view)
        return
    if since is not None:
        raise typer.BadParameter("--since goes with --history")

    async def work(connected: Cluster) -> QueueDetail:
        return await with_groups(connected, await read_queue(connected, name))

    print_found(with_cluster(cluster, work), json, detail_tables)


@app.command("rm")
def remove(names: NamesArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Remove queues with what was recorded and their groups: stop their processes and forget them."""
    _each(cluster, names, "removing", "removed", lambda connected, name: connected.remove_queue(name), json)


@app.command("start")
def start(names: NamesArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Run stopped queues again."""
    _each(cluster, names, "starting", "started", lambda connected, name: connected.start_queue(name), json)


@app.command("stop")
def stop(names: NamesArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Stop the processes of queues and keep what is known of them."""
    _each(cluster, names, "stopping", "stopped", lambda connected, name: connected.stop_queue(name), json)


def _each(
    cluster: str | None,
    names: list[str],
    doing: str,
    done: str,
    act: Callable[[Cluster, str], Awaitable[object]],
    json: bool,
) -> None:
    async def work(connected: Cluster) -> None:
        for name in names:
            with working(f"{doing} {name}"):
                await act(connected, name)
            print_done({"queue": name, done: True}, json, f"{done} {name}")

    with_cluster(cluster, work)


@app.command("kpis")
def kpis(
    name: QueueArgument,
    cluster: ClusterOption = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many seconds' records; 0: never.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="As it is without, too.")] = False,
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


app.add_typer(group.app, name="group")
app.add_typer(template.app, name="template")
app.command("record")(recording.record)
app.command("read")(tapes.read)
app.command("tapes")(tapes.list_tapes)
app.command("durables")(recorded_names.list_durables)
app.command("forget-durable")(recorded_names.forget_durable)
app.command("producers")(recorded_names.list_producers)
app.command("forget-producer")(recorded_names.forget_producer)


@app.command("move")
def move(
    queue: QueueArgument,
    exchange: ExchangeArgument,
    publishers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PUBLISHER]...", help="Ids, or how they begin; without any: all of the queue.", show_default=False
        ),
    ] = None,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Move publishers to an Exchange, without loss, duplicates or reordering; ends when the move is complete."""

    async def work(connected: Cluster) -> Moved:
        view = await connected.inspect(queue)
        target = find_exchange(view, exchange)
        moves = [(publisher, target) for publisher in find_publishers(view, publishers or [], target)]
        with working(f"moving {len(moves)} publishers to {target}"):
            return await connected.move(queue, moves) if moves else Moved(0)

    moved = with_cluster(cluster, work)
    print_done({"moved": moved.moved, "refused": moved.refused}, json, f"moved {moved.moved}")
    if moved.refused:
        raise RoqError("refused: " + "; ".join(moved.refused))


@app.command("add-exchange")
def add_exchange(
    queue: QueueArgument,
    cluster: ClusterOption = None,
    host: Annotated[
        str | None,
        typer.Option(help="Host to run it; else the one with most free slots.", show_default=False, autocompletion=host_names),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Add one Exchange to a queue; ends when every subscriber is attached to it."""

    async def work(connected: Cluster) -> None:
        with working(f"adding an Exchange to {queue}"):
            created = await connected.create_exchange(queue, host=host)
            await connected.exchange_active(queue, created.exchange)
        done = {"exchange": created.exchange, "host": created.host}
        print_done(done, json, f"added Exchange {created.exchange} on {created.host}")

    with_cluster(cluster, work)


@app.command("drain-exchange")
def drain_exchange(
    queue: QueueArgument, exchange: ExchangeArgument, cluster: ClusterOption = None, json: JsonOption = False
) -> None:
    """Move everybody away from an Exchange, then stop it."""

    async def work(connected: Cluster) -> None:
        target = find_exchange(await connected.inspect(queue), exchange)
        with working(f"draining Exchange {target}"):
            await connected.remove_exchange(queue, target)
        print_done({"queue": queue, "exchange": target, "drained": True}, json, f"drained and stopped Exchange {target}")

    with_cluster(cluster, work)


def find_exchange(view: QueueView, wanted: str) -> str:
    """The one Exchange whose id begins with `wanted`; raises ExchangeNotFound or CallError."""
    found = [one.exchange.id for one in view.exchanges if one.exchange.id.startswith(wanted)]
    if wanted in found or len(found) == 1:
        return wanted if wanted in found else found[0]
    if not found:
        raise ExchangeNotFound(f"queue {view.queue!r} has no Exchange {wanted!r}")
    raise CallError(f"{wanted!r} could be any of {', '.join(found)}")


def find_publishers(view: QueueView, wanted: list[str], target: str) -> list[int]:
    """The publishers named by hexadecimal id or its beginning; all that are not at `target` yet if none is named."""
    present = {f"{member.id:016x}": member for member in view.members if member.role == "publisher"}
    if not wanted:
        return [member.id for member in present.values() if target not in member.exchanges]
    chosen = []
    for name in wanted:
        found = [member.id for text, member in present.items() if text.startswith(name.lower())]
        if not found:
            raise PublisherNotFound(f"queue {view.queue!r} has no publisher {name!r}")
        if len(found) > 1:
            raise CallError(f"{name!r} could be any of {', '.join(f'{one:016x}' for one in found)}")
        chosen += found
    return chosen


def detail_tables(detail: QueueDetail) -> RenderableType:
    """Everything about one queue."""
    row = detail.summary
    lines = [
        f"{row.queue}: {queue_state(row)}, overflow {row.overflow}, replication {row.replication}, "
        f"frames up to {size(detail.max_frame_bytes)}, created {moment(detail.created)}",
        f"Monitors (term {detail.term}): {', '.join(detail.monitors) or 'none'}",
        f"now: {rate(row.messages_per_second)} msg/s in ({size(row.bytes_per_second)}/s), "
        f"{rate(row.delivered_per_second)} msg/s delivered, lag {seconds(row.lag_seconds)}, lost {row.lost}",
    ]
    rules = [
        f"{name}.{field} = {value}"
        for name, fields in detail.policy.items()
        for field, value in fields.items()
        if value is not None
    ]
    scales = any(not rule.startswith("bounds.") for rule in rules)
    lines.append(f"policy: {', '.join(rules) if scales else 'never scales by itself'}")
    if detail.record is not None:
        lines.append(recorded_how(detail.record, detail.recorded))
    tables = [exchange_table(detail.exchanges), _member_table(detail.members), _decision_table(detail.decisions)]
    if detail.groups:
        tables.append(group.group_table(detail.groups))
    return Group(*lines, *(part for one in tables for part in ("", one)))


def _member_table(members: tuple[MemberRow, ...]) -> RenderableType:
    rows = [
        (
            row.id,
            row.role,
            ", ".join(row.exchanges),
            yes(row.ready),
            rate(row.messages_per_second),
            size(row.bytes_per_second),
            percent(row.blocked_fraction) if row.role == "publisher" else seconds(row.lag_seconds),
            str(row.dropped if row.role == "publisher" else row.lost),
        )
        for row in members
    ]
    columns = ("MEMBER", "ROLE", "EXCHANGES", "READY", ">MSG/s", ">BYTES/s", ">BLOCKED OR LAG", ">LOST")
    return table("Members", columns, rows)


def _decision_table(decisions: tuple[Decision, ...]) -> RenderableType:
    rows = [
        (
            moment(one.time),
            one.action,
            one.cause,
            one.exchange,
            one.host,
            ", ".join(f"{publisher:016x} → {exchange}" for publisher, exchange in one.moves),
            one.outcome or "under way",
        )
        for one in decisions
    ]
    return table("Scaling decisions", ("WHEN", "ACTION", "CAUSE", "EXCHANGE", "HOST", "MOVES", "OUTCOME"), rows)

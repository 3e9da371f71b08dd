"""`roq task …`: work queues from the shell, whatever their address. Tasks of one command are leased by it and settled by token.

Not covered: the live view (task_watch.py), carrying tasks elsewhere (task_move.py).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from roq.blocking import WorkQueue, open_queue
from roq.cli import task_dead, task_move, task_shards, task_watch
from roq.cli.address import ClusterOption, JsonOption, OldPlaceArgument, cluster_address, either, with_cluster
from roq.cli.completion import work_queue_names
from roq.cli.headers import HeaderOption, headers_of, headers_row
from roq.cli.output import age, console, counted, print_done, print_json, say, table, working, yes
from roq.cli.progress import how_far, progressing_beside
from roq.cli.task_address import (
    AddressArgument,
    CountOption,
    PayloadRow,
    changed_tasks,
    counts,
    exists,
    full_address,
    opened,
    payload_row,
    settings_text,
    shown,
)
from roq.client.cluster import Cluster
from roq.errors import CallError, InvalidAddress, LeaseLost, PayloadTooLarge
from roq.wire.gcm import WorkQueueInfo
from roq.wire.task import NewTask, TaskState, TaskView
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import QueueAddress, parse, queue_address, without_password

app = typer.Typer(help="Work queues: put, lease, ack, watch, move; list and remove those of a cluster.", no_args_is_help=True)
app.add_typer(task_dead.app, name="dead")
app.command("watch")(task_watch.watch)
app.command("move")(task_move.move)
app.command("shards")(task_shards.shards)

BLOCK_BYTES = 1024 * 1024  # read from standard input at once
STANDARD_INPUT = 0
TokensArgument = Annotated[list[str], typer.Argument(metavar="TOKEN…", help="As `roq task lease` printed.", show_default=False)]
SecondsOption = Annotated[float, typer.Option("--seconds", help="How long the lease lasts.")]
OldSecondsOption = Annotated[float | None, typer.Option("-s", hidden=True)]  # elsewhere this letter means --subscribers
AddressesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="ADDRESS…", help="roq://zk1:2181,zk2:2181/name.", show_default=False, autocompletion=work_queue_names
    ),
]


class LeasedRow(msgspec.Struct):
    """A leased task for JSON. topic: of a group's message."""

    id: str
    token: str
    attempt: int
    priority: int
    inserted: float
    expires: float
    payload: PayloadRow
    headers: dict[str, str]
    topic: str


class ViewRow(msgspec.Struct):
    """A task that was looked at, for JSON. topic: of a group's message."""

    id: str
    state: TaskState
    attempts: int
    priority: int
    inserted: float
    due: float
    error: str
    holder: str
    payload: PayloadRow
    headers: dict[str, str]
    topic: str


class StatusRow(msgspec.Struct):
    """`roq task status --json`."""

    address: str
    status: dict[str, float | None]
    settings: TaskSettings


def view_row(view: TaskView) -> ViewRow:
    """For JSON."""
    known = {name: getattr(view, name) for name in ViewRow.__struct_fields__ if name not in ("payload", "headers")}
    return ViewRow(**known, payload=payload_row(view.payload), headers=headers_row(view.headers))


@app.command("create")
def create(
    address: AddressArgument,
    max_attempts: Annotated[int | None, typer.Option(min=0, help="Leases until a task is dead; 0: never.")] = None,
    dedup_seconds: Annotated[float | None, typer.Option(min=0, help="How long a dedup key is remembered.")] = None,
    payload_bytes_max: Annotated[int | None, typer.Option(min=1, help="Limit of one payload.")] = None,
    write_quorum: Annotated[int | None, typer.Option(help="Stores that keep each task (roq: only).")] = None,
    ack_quorum: Annotated[int | None, typer.Option(help="Of them, that have it before a put returns (roq: only).")] = None,
    standbys: Annotated[int | None, typer.Option(help="Masters in waiting, on other hosts (roq: only).")] = None,
    inline_bytes: Annotated[int | None, typer.Option(help="Payloads from here on go straight to a store (roq: only).")] = None,
    shards: Annotated[int | None, typer.Option(help="Masters that share the tasks of a new queue (roq: only).")] = None,
    json: JsonOption = False,
) -> None:
    """Make a queue with settings of its own; again with the same ones, nothing happens. `put` makes one with the defaults."""
    where = full_address(address)
    new = not exists(where)
    with open_queue(
        where,
        max_attempts=max_attempts,
        dedup_seconds=dedup_seconds,
        payload_bytes_max=payload_bytes_max,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        standbys=standbys,
        inline_bytes=inline_bytes,
        shards=shards,
    ) as queue:
        named = without_password(where)
        text = f"{'created' if new else 'exists already'} {named}: {settings_text(queue.settings)}"
        print_done({"address": named, "created": new, "settings": queue.settings}, json, text)


@app.command("put")
def put(
    address: AddressArgument,
    payloads: Annotated[list[str] | None, typer.Argument(metavar="[PAYLOAD…]", help="Else a task per line of input.")] = None,
    delay: Annotated[float, typer.Option(help="Seconds until it can be leased.")] = 0.0,
    priority: Annotated[int, typer.Option(help="-128 to 127; higher goes first.")] = 0,
    dedup_key: Annotated[str, typer.Option(help="Put again within the window, it is the same task (one task only).")] = "",
    header: HeaderOption = None,
    json: JsonOption = False,
) -> None:
    """Put tasks: the arguments, or a task per line of standard input. Prints their ids."""
    if dedup_key and len(payloads or ()) != 1:
        raise CallError("--dedup-key goes with one payload as argument")
    count, headers = 0, headers_of(header)
    with open_queue(full_address(address)) as queue, progressing_beside("putting") as told:
        given, so_far = [os.fsencode(one) for one in payloads or ()], how_far(told, STANDARD_INPUT)
        for part in [given] if given else _lines(queue):
            ids = queue.put_many(NewTask(line, delay, priority, dedup_key, headers) for line in part)
            count += len(ids)
            if not given:
                so_far()
            if json:
                for one in ids:
                    print_json({"id": one})
            else:
                sys.stdout.write("".join(f"{one}\n" for one in ids))
                sys.stdout.flush()
    say(f"roq task put: {counted(count, 'task')}")


def _lines(queue: WorkQueue) -> Iterator[list[bytes]]:
    """Whole lines as they come; a last line without newline counts too."""
    rest = b""
    while block := os.read(STANDARD_INPUT, BLOCK_BYTES):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if len(rest) > queue.settings.payload_bytes_max:
            raise PayloadTooLarge(f"a line of more than {queue.settings.payload_bytes_max} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]


@app.command("lease")
def lease(
    address: AddressArgument,
    seconds: SecondsOption = 60.0,
    old_seconds: OldSecondsOption = None,
    count: CountOption = 1,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the first task.")] = 0.0,
    json: JsonOption = False,
) -> None:
    """Lease tasks and tell their tokens, for `ack`, `extend`, `release` and `reject`. Nothing to lease: exit code 1."""
    lasting = seconds if old_seconds is None else old_seconds
    with opened(address) as queue:
        deadline = time.monotonic() + wait
        while not (tasks := queue.lease(lasting, count, min(1.0, max(0.0, deadline - time.monotonic())))):
            if time.monotonic() >= deadline:
                break
    rows = [
        LeasedRow(
            task.id,
            task.token,
            task.attempt,
            task.priority,
            task.inserted,
            task.expires,
            payload_row(task.payload),
            headers_row(task.headers),
            task.topic,
        )
        for task in tasks
    ]
    if json:
        print_json(rows)
    elif rows:
        cells = [(task.token, str(task.attempt), str(task.priority), shown(task.payload)) for task in tasks]
        console().print(table("", ("TOKEN", ">ATTEMPT", ">PRIORITY", "PAYLOAD"), cells))
    if not rows:
        say("roq task lease: nothing to lease")
        raise typer.Exit(1)


def _settled(address: str, what: str, count: int, lost: list[str], json: bool, **more: object) -> None:
    """Says what became of so many leases. Raises LeaseLost if any is lost; what is JSON has been printed then."""
    if json or not lost:
        done = {**changed_tasks(address, what, count - len(lost)), **more, "lost": lost}
        print_done(done, json, f"roq task: {what} {count}")
    if lost:
        raise LeaseLost(f"{len(lost)} of {count} leases ended before: {' '.join(lost)}")


@app.command("ack")
def ack(address: AddressArgument, tokens: TokensArgument, json: JsonOption = False) -> None:
    """These tasks are done."""
    with opened(address) as queue:
        _settled(address, "acked", len(tokens), queue.ack_many(tokens), json)


@app.command("extend")
def extend(
    address: AddressArgument,
    tokens: TokensArgument,
    seconds: SecondsOption = 60.0,
    old_seconds: OldSecondsOption = None,
    json: JsonOption = False,
) -> None:
    """Keep these leases from now on. Prints the tokens that are valid from now on."""
    lasting = seconds if old_seconds is None else old_seconds
    valid, lost = list[str](), list[str]()
    with opened(address) as queue:
        for token in tokens:
            try:
                valid.append(queue.extend(token, lasting))
            except LeaseLost:
                lost.append(token)
            else:
                if not json:
                    print(valid[-1], flush=True)
    _settled(address, "extended", len(tokens), lost, json, tokens=valid)


@app.command("release")
def release(
    address: AddressArgument,
    tokens: TokensArgument,
    delay: Annotated[float, typer.Option(help="Seconds until it can be leased again.")] = 0.0,
    error: Annotated[str, typer.Option(help="Why it failed; kept with the task.")] = "",
    json: JsonOption = False,
) -> None:
    """Give these tasks back."""
    with opened(address) as queue:
        _settled(address, "released", len(tokens), queue.release_many(tokens, delay, error), json)


@app.command("reject")
def reject(
    address: AddressArgument,
    tokens: TokensArgument,
    error: Annotated[str, typer.Option(help="Why; kept with the task.")] = "rejected by hand",
    json: JsonOption = False,
) -> None:
    """Make these tasks dead letters."""
    with opened(address) as queue:
        _settled(address, "rejected", len(tokens), queue.reject_many(tokens, error), json)


@app.command("status")
def status(address: AddressArgument, json: JsonOption = False) -> None:
    """Count tasks; tell the age of the oldest ready one."""
    with opened(address) as queue:
        found, settings = queue.status(), queue.settings
    if json:
        print_json(StatusRow(without_password(full_address(address)), counts(found), settings))
        return
    left = found.ready + found.delayed + found.leased
    share = f" ({left / found.inserted:.0%} left)" if found.inserted else ""
    rows = [
        ("ready", f"{found.ready:,}"),
        ("delayed", f"{found.delayed:,}"),
        ("leased", f"{found.leased:,}"),
        ("dead", f"{found.dead:,}"),
        ("completed", f"{found.completed:,}"),
        ("inserted", f"{found.inserted:,}{share}"),
        ("oldest ready", age(found.oldest_seconds)),
        *([("expired", f"{found.expired:,}")] if found.expired else []),
        *([] if found.behind_seconds is None else [("behind its queue", age(found.behind_seconds))]),
        *([("on the tapes still", f"{found.lag:,}")] if found.lag >= 0 else []),
        *([("gaps in what came", f"{found.missed:,}")] if found.missed else []),
        *([("of transactions, not on tapes yet", f"{found.outgoing:,}")] if found.outgoing else []),
        ("settings", settings_text(settings)),
    ]
    console().print(table(without_password(full_address(address)), ("TASKS", ""), rows))


@app.command("peek")
def peek(
    address: AddressArgument,
    state: Annotated[TaskState, typer.Option(help="Which tasks.")] = TaskState.READY,
    count: CountOption = 10,
    json: JsonOption = False,
) -> None:
    """Show tasks without leasing them: who holds them, how often they were tried, what went wrong last."""
    with opened(address) as queue:
        views = queue.peek(state, count)
    if json:
        print_json([view_row(view) for view in views])
        return
    now = time.time()
    rows = [
        (
            view.id,
            str(view.attempts),
            str(view.priority),
            age(now - view.inserted),
            age(view.due - now) if view.due else "-",
            view.holder or "-",
            shown(view.error) or "-",
            shown(view.payload),
        )
        for view in views
    ]
    columns = ("ID", ">ATTEMPTS", ">PRIORITY", ">AGE", ">DUE IN", "HOLDER", "LAST ERROR", "PAYLOAD")
    console().print(table("", columns, rows))


@app.command("release-all")
def release_all(address: AddressArgument, json: JsonOption = False) -> None:
    """Make every leased and delayed task ready: after a crash of all workers, without waiting for their leases."""
    with opened(address) as queue:
        with working("releasing tasks"):
            released = queue.release_all()
        print_done(changed_tasks(address, "released", released), json, f"roq task release-all: {counted(released, 'task')}")


@app.command("purge")
def purge(
    address: AddressArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove every task that is not dead, leased ones too."""
    with opened(address) as queue:
        if not yes and sys.stdin.isatty():
            found = queue.status()
            typer.confirm(f"Remove {counted(found.ready + found.delayed + found.leased, 'task')}?", abort=True, err=True)
        with working("removing tasks"):
            removed = queue.purge()
        print_done(changed_tasks(address, "removed", removed), json, f"roq task purge: {counted(removed, 'task')}")


# --- the work queues of a cluster as a whole; a queue in a folder is its folder


class WorkQueueRow(msgspec.Struct):
    """A work queue for JSON. ready: its master serves; standbys: their hosts, standbys_wanted of them; copies: stores that keep
    each task; needed: that must have it before a put returns; inline_bytes: payloads from this size on go straight
    to a store; shards: that take tasks. master, term, standbys: of the first one."""

    name: str
    address: str
    ready: bool
    master: str
    term: int
    standbys: tuple[str, ...]
    copies: int
    needed: int
    settings: TaskSettings
    created: float
    standbys_wanted: int
    inline_bytes: int
    shards: int


def _row(info: WorkQueueInfo, zookeeper: str) -> WorkQueueRow:
    record, spec = info.record, info.record.spec
    return WorkQueueRow(
        record.name,
        queue_address(zookeeper, record.name),
        info.ready,
        record.master_host,
        record.term,
        record.standby_hosts,
        spec.write_quorum,
        spec.ack_quorum,
        spec.settings,
        record.created,
        record.standbys,
        spec.inline_bytes,
        len(record.shards.open) if record.shards is not None else 1,
    )


@app.command("ls")
def list_queues(cluster: ClusterOption = None, old_cluster: OldPlaceArgument = None, json: JsonOption = False) -> None:
    """List the work queues of a cluster. What is in one: `roq task status`."""
    cluster = either(cluster, old_cluster)

    async def work(connected: Cluster) -> list[WorkQueueRow]:
        return [_row(info, cluster_address(cluster)) for info in await connected.work_queues()]

    rows = with_cluster(cluster, work)
    if json:
        print_json(rows)
        return
    cells = [
        (
            *(row.name, yes(row.ready), str(row.shards), row.master, str(row.term)),
            *(", ".join(row.standbys) or "-", str(row.copies), row.address),
        )
        for row in rows
    ]
    columns = ("WORK QUEUE", "SERVES", ">SHARDS", "MASTER", ">TERM", "STANDBYS", ">COPIES", "ADDRESS")
    console().print(table("", columns, cells))


@app.command("rm")
def remove(addresses: AddressesArgument, json: JsonOption = False) -> None:
    """Remove work queues of a cluster with all their tasks: stop their masters, delete what the stores keep."""
    places = [_in_cluster(address) for address in addresses]
    for place in places:
        with working(f"removing {place.path}"):
            with_cluster(place.zookeeper, lambda connected, name=place.path: connected.remove_work_queue(name))  # type: ignore[misc]
        done = {"address": queue_address(place.zookeeper, place.path), "removed": True}
        print_done(done, json, f"removed {place.path}")


def _in_cluster(address: str) -> QueueAddress:
    place = parse(full_address(address))
    if place.scheme != "roq":
        goes = f"its folder, {place.path}" if place.scheme in ("file", "log") else "the log that its server keeps"
        raise InvalidAddress(f"{without_password(address)!r} is not in a cluster: that queue goes with {goes}")
    return place

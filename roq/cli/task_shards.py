"""`roq task shards`: which shards a work queue of a cluster has, and how many shall take tasks.

Not covered: all the other verbs (task.py), what a shard is (docs/work-queues.md).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from roq.cli.address import JsonOption, with_cluster
from roq.cli.output import console, print_json, say, table, working
from roq.cli.task_address import AddressArgument, full_address
from roq.client.cluster import Cluster
from roq.client.shard_answers import parts, status_of
from roq.errors import InvalidAddress, RoqError
from roq.runtime.rpc import RpcPool
from roq.wire import master
from roq.wire.gcm import WorkQueueInfo
from roq.wire.shards import ShardList
from roq.workqueue.address import parse, without_password

MASTER_SECONDS = 5.0  # to answer
ShardsArgument = Annotated[
    int | None, typer.Argument(metavar="[N]", help="So many take tasks from now on; without it, show them.", show_default=False)
]


class ShardRow(msgspec.Struct):
    """One shard, for JSON. state: "open", or "closing": it takes no more tasks, and is removed when nothing is left in it. The
    counts are None if its master does not answer; problem says why."""

    number: int
    state: str
    master: str
    standbys: tuple[str, ...]
    ready: int | None = None
    delayed: int | None = None
    leased: int | None = None
    dead: int | None = None
    problem: str = ""


def shards(address: AddressArgument, number: ShardsArgument = None, json: JsonOption = False) -> None:
    """Show the shards of a work queue, or split or merge it while it is used. New shards begin empty; those that are too many
    take no more tasks, are emptied by whoever leases, and removed then: dead letters in them are to be requeued or removed."""
    place = parse(full_address(address))
    if place.scheme != "roq":
        raise InvalidAddress(f"{without_password(address)!r} is not in a cluster: only work queues of a cluster have shards")

    async def work(connected: Cluster) -> list[ShardRow]:
        if number is not None:
            await connected.set_shards(place.path, number)
        return await _rows(await connected.work_queue(place.path))

    if number is not None:
        with working(f"changing the shards of {place.path}"):
            rows = with_cluster(place.zookeeper, work)
    else:
        rows = with_cluster(place.zookeeper, work)
    if json:
        print_json(rows)
        return
    columns = (">SHARD", "STATE", "MASTER", "STANDBYS", ">READY", ">DELAYED", ">LEASED", ">DEAD")
    console().print(table("", columns, [_cells(row) for row in rows]))
    if left := sum(row.dead or 0 for row in rows if row.state == "closing"):
        say(f"{left} dead letters keep closing shards: `roq task dead requeue` or `roq task dead rm`")


async def _rows(info: WorkQueueInfo) -> list[ShardRow]:
    listed = info.record.shards or ShardList()
    masters = RpcPool(master.Reply, MASTER_SECONDS)
    try:
        return [await _row(masters, number, one, listed) for number, one in sorted(parts(info).items())]
    finally:
        masters.close()


async def _row(masters: RpcPool, number: int, info: WorkQueueInfo, listed: ShardList) -> ShardRow:
    state = "open" if number in listed.open else "closing"
    row = ShardRow(number, state, info.record.master_host, info.record.standby_hosts)
    try:
        status = await status_of(masters, msgspec.structs.replace(info, shards=()))
    except RoqError as error:
        return msgspec.structs.replace(row, problem=str(error))
    counts = {"ready": status.ready, "delayed": status.delayed, "leased": status.leased, "dead": status.dead}
    return msgspec.structs.replace(row, **counts)


def _cells(row: ShardRow) -> tuple[str, ...]:
    counts = ("-" if count is None else str(count) for count in (row.ready, row.delayed, row.leased, row.dead))
    return (str(row.number), row.problem or row.state, row.master, ", ".join(row.standbys) or "-", *counts)

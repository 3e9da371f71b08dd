"""`roq task ls` and `roq task rm`: the work queues of a cluster as a whole. A queue in a folder is its folder."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from roq.cli.address import ClusterOption, JsonOption, OldPlaceArgument, cluster_address, either, with_cluster
from roq.cli.output import console, print_json, say, table, working, yes
from roq.cli.task_address import full_address
from roq.client.cluster import Cluster
from roq.errors import InvalidAddress
from roq.wire.gcm import WorkQueueInfo
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import QueueAddress, parse, queue_address

AddressesArgument = Annotated[
    list[str], typer.Argument(metavar="ADDRESS…", help="roq://zk1:2181,zk2:2181/name.", show_default=False)
]


class WorkQueueRow(msgspec.Struct):
    """A work queue for JSON. ready: its master serves; standbys: their hosts, standbys_wanted of them; copies: stores that keep
    each task; needed: that must have it before a put returns; inline_bytes: payloads from this size on go straight
    to a store."""

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
    )


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
        (row.name, yes(row.ready), row.master, str(row.term), ", ".join(row.standbys) or "-", str(row.copies), row.address)
        for row in rows
    ]
    columns = ("WORK QUEUE", "SERVES", "MASTER", ">TERM", "STANDBYS", ">COPIES", "ADDRESS")
    console().print(table("", columns, cells))


def remove(addresses: AddressesArgument) -> None:
    """Remove work queues of a cluster with all their tasks: stop their masters, delete what the stores keep."""
    places = [_in_cluster(address) for address in addresses]
    for place in places:
        with working(f"removing {place.path}"):
            with_cluster(place.zookeeper, lambda connected, name=place.path: connected.remove_work_queue(name))  # type: ignore[misc]
        say(f"removed {place.path}")


def _in_cluster(address: str) -> QueueAddress:
    place = parse(full_address(address))
    if place.scheme != "roq":
        raise InvalidAddress(f"{address!r} is not in a cluster: that queue goes with its folder, {place.path}")
    return place

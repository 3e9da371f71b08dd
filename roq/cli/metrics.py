"""`roq metrics`: an HTTP server for Prometheus and for autoscalers; nothing is read but when somebody asks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
import uvloop

from roq.cli.address import ClusterOption, entered
from roq.cli.task_address import full_address
from roq.config import listen_place
from roq.coordination.link import parse_address
from roq.errors import InvalidAddress, InvalidConfiguration
from roq.runtime.installation import brought_by

LISTEN = "127.0.0.1:9464"
CLUSTER = re.compile(r"(?!memory:)(\[[^\]]+\]|[^/:,]+):\d+(,[^/]+)?(/.*)?")  # a folder with a colon: ./so:1


def sources(addresses: Sequence[str]) -> tuple[list[str], list[str]]:
    """The clusters among these, as --cluster takes them, and the addresses of work queues. Raises InvalidAddress,
    InvalidConfiguration."""
    clusters, queues = list[str](), list[str]()
    for given in addresses:
        alone = given.removeprefix("roq://").rstrip("/")
        if CLUSTER.fullmatch(given) or (given.startswith("roq://") and "/" not in alone):
            clusters.append(given if CLUSTER.fullmatch(given) else str(parse_address(alone)))
        elif given.startswith("roq:"):
            where, _, name = alone.rpartition("/")
            raise InvalidAddress(f"{given}: {name!r} is served with its cluster, all of it: `roq metrics {where}`")
        else:
            queues.append(full_address(given))
    return clusters, queues


def metrics(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS…]",
            help="Work queues: folders, file: or log: addresses; a cluster: h1:2181,h2:2181/chroot, as --cluster.",
            show_default=False,
        ),
    ] = None,
    cluster: ClusterOption = None,
    listen: Annotated[str, typer.Option(metavar="[HOST]:PORT", help="Where to serve; without a host on all.")] = LISTEN,
) -> None:
    """Serve metrics for Prometheus, and counts for autoscalers: of a cluster and its work queues, of work queues on this
    machine, or of both. Without addresses of the cluster that other commands use; with addresses only of one that is among
    them, or that --cluster names."""
    named, queues = sources(addresses or ())
    if len({*named, *([cluster] if cluster else [])}) > 1:
        raise InvalidAddress("one cluster for each `roq metrics`: names of two would collide; start one for each")
    chosen = cluster or next(iter(named), None)
    place = entered(chosen) if chosen or not queues else None
    try:
        with brought_by("metrics", "`roq metrics`"):
            server = import_module("roq.cli.metrics_server")
    except ModuleNotFoundError as error:
        raise InvalidConfiguration(str(error)) from None
    uvloop.run(server.serve(place, queues, *listen_place(listen, "--listen")))

"""`roq up`, `roq down`: a whole cluster on this machine, in the foreground until Ctrl-C; and its end, also when it outlived its
`roq up`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from roq.cli.address import JsonOption
from roq.cli.output import print_done, print_json, say, working
from roq.errors import CallError, ProcessFailed, RoqError
from roq.runtime.files import DISK
from roq.runtime.installation import install, missing
from roq.runtime.security import known_card
from roq.tools.local import starter
from roq.tools.local.cluster import LocalCluster
from roq.tools.local.daemon import Daemon
from roq.tools.local.leftovers import Leftover
from roq.tools.local.starter import FoundCluster
from roq.wire.card import SecurityMode

COMMAND = "roq up"
DIRECTORY_HELP = "The directory of the cluster; needed if several run here, and by root for another user's."
METRICS_PORT = 9464  # as of `roq metrics`, where OpenTelemetry's exporters for Prometheus are
ZOOKEEPER_PORT = 2181  # where clients look by default; another one is taken when this one is in use
ElasticOption = Annotated[
    int, typer.Option(min=0, metavar="HOSTS", help="So many hosts more are started when Exchanges find no slot.")
]


def up(
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts, each on a loopback address of its own.")] = 1,
    gcms: Annotated[int, typer.Option(min=1, help="How many GCMs; the second and later ones stand by.")] = 1,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where logs and state stay; else a temporary directory.", show_default=False)
    ] = None,
    zookeeper: Annotated[
        str | None,
        typer.Option(
            help='"java" starts a real ZooKeeper, addresses name one that runs; else RoQ\'s coordinator is started.',
            show_default=False,
        ),
    ] = None,
    exchanges_max: Annotated[int, typer.Option(min=1, help="Exchanges a host runs at most.")] = 8,
    elastic: ElasticOption = 0,
    security: Annotated[
        SecurityMode, typer.Option(help="cards: nobody gets in without one; programs of yours find yours. none: everybody.")
    ] = SecurityMode.CARDS,
    metrics: Annotated[
        bool,
        typer.Option("--with-metrics", help=f"Each host serves metrics for Prometheus, at port {METRICS_PORT} of its address."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Start a whole cluster on this machine; Ctrl-C, or `roq down` in another terminal, stops it."""
    if security is SecurityMode.MIXED:
        raise typer.BadParameter("mixed is for GCMs and hosts of a cluster that is being given cards")
    if metrics and missing("metrics"):
        raise CallError(f"--with-metrics needs what is not installed here: {install('metrics')}")
    place = directory or Path(tempfile.mkdtemp(prefix="roq-up-"))
    cluster = LocalCluster(
        place,
        gcms=gcms,
        hosts=hosts,
        zookeeper=zookeeper,
        zookeeper_port=ZOOKEEPER_PORT,
        exchanges_max=exchanges_max,
        command=COMMAND,
        secured=security is SecurityMode.CARDS,
        metrics_port=METRICS_PORT if metrics else 0,
        elastic_hosts=elastic,
    )
    try:
        uvloop.run(_stay(cluster, json_line=json))
    except RoqError:
        directory = place  # its logs are needed
        raise
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)


def stop_signals() -> list[signal.Signals]:
    """Those that stop what runs in the foreground: Ctrl-C, `kill`, and a closed terminal, unless `nohup` says otherwise."""
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if kept else [signal.SIGHUP])]


async def _stay(cluster: LocalCluster, json_line: bool) -> None:
    """Start, wait for a signal, stop. A signal while starting stops what has started."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(cluster.start())
    kept = False
    try:
        with working("starting the cluster"):
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            kept = _keep_card(cluster)
            _announce(cluster, json_line, kept)
            await _until_stopped(cluster, stop)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    finally:
        stopping.cancel()
        if kept:
            with contextlib.suppress(OSError):
                known_card(cluster.zookeeper).unlink(missing_ok=True)
        with working("stopping the cluster"):
            left = await cluster.stop()
        killed = ", ".join(one.command for one in left)
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(f"stopped; had to kill {killed}" if left else "stopped, no process left")


def _keep_card(cluster: LocalCluster) -> bool:
    """Put our card where our programs look for it; whether it could be done."""
    if cluster.card is None:
        return False
    known = known_card(cluster.zookeeper)
    try:
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        DISK.write_file(known, cluster.card.read_bytes(), mode=0o600)
    except OSError as error:
        say(f"can't keep your card in {known.parent}: {error.strerror}")
        return False
    return True


def _announce(cluster: LocalCluster, json_line: bool, kept: bool) -> None:
    at_default = cluster.zookeeper == f"127.0.0.1:{ZOOKEEPER_PORT}/RoQ"
    if cluster.zookeeper_pid and not at_default:
        holder = starter.with_zookeeper_at(f"127.0.0.1:{ZOOKEEPER_PORT}")
        other = holder.origin.directory if holder else ""
        who = f"the cluster in {other} (`roq down --dir {other}` ends it)" if other else "another program"
        say(f"port {ZOOKEEPER_PORT} is taken by {who}: programs that look there don't find this cluster")
    if json_line:
        pids = {name: daemon.pid for name, daemon in {**cluster.gcms, **cluster.hosts}.items()}
        told = {"ready": True, "cluster": cluster.zookeeper, "directory": str(cluster.directory), "pids": pids}
        if cluster.card is not None:
            told["card"] = str(cluster.card)
        if cluster.metrics:
            told["metrics"] = cluster.metrics
        print_json({**told, "zookeeper": cluster.zookeeper_name, "zookeeper_pid": cluster.zookeeper_pid})
        return
    flag = "" if at_default else f" -c {cluster.zookeeper}"
    hosts = ", ".join(cluster.hosts)
    say(f"cluster is up: {cluster.zookeeper} ({cluster.zookeeper_name})   hosts: {hosts}   logs: {cluster.directory}")
    if cluster.metrics:
        say(f"metrics: {'   '.join(f'http://{place}/metrics' for place in cluster.metrics.values())}")
    say("now, in other terminals:")
    if cluster.card is not None and not kept:
        say(f"    export ROQ_CARD={cluster.card}")
    say(f"    roq queue create{flag} hello")
    say(f"    roq sub{flag} hello")
    say(f"    echo 'good morning' | roq pub{flag} hello greetings")
    say("Ctrl-C here, or `roq down`, stops the cluster")


async def _until_stopped(cluster: LocalCluster, stop: asyncio.Event) -> None:
    """Returns at a signal; tells of daemons that end by themselves. Raises ProcessFailed when none is left to lead."""
    async with asyncio.TaskGroup() as group:
        daemons = [*cluster.gcms.values(), *cluster.hosts.values()]
        watching = [group.create_task(_watch(cluster, daemon, stop)) for daemon in daemons]
        watching.append(group.create_task(_watch_zookeeper(cluster)))
        await stop.wait()
        for task in watching:
            task.cancel()
    if not any(gcm.running for gcm in cluster.gcms.values()):
        raise ProcessFailed("no GCM is left")


async def _watch_zookeeper(cluster: LocalCluster) -> None:
    ended = await cluster.zookeeper_ended()
    say(f"{ended}\nmessages go on flowing, but nothing can be created or recovered: Ctrl-C, then start the cluster again")


async def _watch(cluster: LocalCluster, daemon: Daemon, stop: asyncio.Event) -> None:
    await daemon.wait(None)
    say(daemon.exit_reason())
    if not any(gcm.running for gcm in cluster.gcms.values()):
        stop.set()


class StoppedCluster(msgspec.Struct):
    """`roq down --json`. stopped: there was one. cluster: its address, if it is known. orphan: it had outlived its `roq up`.
    killed: daemon → how many processes of it did not end by themselves; all of an orphan's."""

    stopped: bool
    directory: str = ""
    cluster: str = ""
    orphan: bool = False
    killed: dict[str, int] = {}


def down(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help=DIRECTORY_HELP, show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Stop the cluster that `roq up` started on this machine, and what one left that was killed."""
    found = chosen(starter.clusters(), directory, os.geteuid())
    if found is None:
        nothing = StoppedCluster(stopped=False, directory=str(directory or ""))
        text = "no cluster of `roq up` of yours runs here" if directory is None else f"no cluster runs in {directory}"
        print_done(nothing, json, text)
        return
    with working(f"stopping the cluster in {found.origin.directory}"):
        ended = starter.stop(found)
    with contextlib.suppress(OSError):
        known_card(found.address).unlink(missing_ok=True)  # its `roq up` may have been killed
    killed = Counter(process.owner for process in ended)
    print_done(StoppedCluster(True, found.origin.directory, found.address, found.orphan, killed), json, outcome(found, ended))


def chosen(found: Sequence[FoundCluster], directory: Path | None, user: int) -> FoundCluster | None:
    """The cluster to end, of this user unless a directory is named; None if there is none. Raises CallError for a choice that
    is not ours. Pure."""
    if directory is None:
        found = [one for one in found if one.user == user and (one.orphan or one.origin.command == COMMAND)]
    else:
        found = [one for one in found if one.origin.directory == str(directory.resolve())]
    if len(found) > 1 and directory is None:
        names = "; ".join(named(one) for one in found)
        raise CallError(f"{len(found)} clusters run here, choose one with --dir: {names}")
    one = next(iter(found), None)
    if one is not None and not one.orphan and one.origin.command != COMMAND:
        here = one.origin
        raise CallError(f"the cluster in {here.directory} was started by {here.command}, pid {here.pid}: stop that")
    return one


def named(one: FoundCluster) -> str:
    """How a local cluster is named to people."""
    left = ", left by a killed program" if one.orphan else ""
    return f"{one.origin.directory}{f' ({one.address})' if one.address else ''}{left}"


def outcome(found: FoundCluster, ended: Sequence[Leftover]) -> str:
    """What was done, for people."""
    counted = Counter(process.owner for process in ended)
    names = ", ".join(f"{owner} ({number})" if number > 1 else owner for owner, number in sorted(counted.items()))
    if found.orphan:
        return f"ended what was left of the cluster in {found.origin.directory}: {names or 'nothing any more'}"
    return f"stopped the cluster in {found.origin.directory}{f'; had to kill {names}' if names else ', no process left'}"

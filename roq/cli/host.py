"""`roq host …`: the machines of the cluster."""

from __future__ import annotations

import asyncio
import platform
import time
from typing import Annotated

import typer

from roq.cli import host_install
from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import console, print_json, say, table
from roq.cli.status import host_table
from roq.client.cluster import Cluster
from roq.client.overview import host_rows
from roq.errors import DeadlineExceeded, HostNotFound, TemporaryError, Unavailable
from roq.runtime.backoff import delays
from roq.runtime.rpc import RpcClient
from roq.wire import hcm as wire
from roq.wire.assignment import RunningProcess
from roq.wire.gcm import HostInfo

ASK_SECONDS = 5.0
STOP_SECONDS = 40.0  # an HCM gives its processes 15 s, and ZooKeeper may be slow to hear of it
AGAIN_SECONDS = 5.0  # an HCM that is started again is there within a second or two, on a busy machine in four
AGAIN_PAUSE_SECONDS = 0.2

app = typer.Typer(help="Hosts: list, show, cordon, stop, install.", no_args_is_help=True)
app.command("install")(host_install.install)
HostArgument = Annotated[str, typer.Argument(metavar="HOST", help="Name of the host.", show_default=False)]


@app.command("ls")
def list_hosts(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """List hosts."""

    async def work(connected: Cluster) -> tuple[HostInfo, ...]:
        return tuple(await connected.hosts())

    rows = host_rows(with_cluster(cluster, work))
    if json:
        print_json(rows)
    else:
        console().print(host_table(rows))


@app.command("show")
def show(name: HostArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show a host and its processes."""

    async def work(connected: Cluster) -> HostInfo:
        return await _described(connected, name)

    info = with_cluster(cluster, work)
    processes = info.report.processes if info.report else ()
    if json:
        print_json({"host": host_rows([info])[0], "processes": processes})
        return
    out = console()
    out.print(host_table(host_rows([info])))
    rows = [
        (one.name, str(one.state), str(one.pid), _ports(one.ports), str(one.restarts), one.error)
        for one in sorted(processes, key=lambda one: one.name)
    ]
    out.print()
    out.print(table("Processes", ("PROCESS", "STATE", ">PID", "PORTS", ">RESTARTS", "ERROR"), rows))


def _ports(ports: dict[str, int]) -> str:
    return " ".join(f"{role}:{port}" for role, port in ports.items())


@app.command("cordon")
def cordon(name: HostArgument, cluster: ClusterOption = None) -> None:
    """Place nothing new on a host. What runs there goes on; only ranges of shuffles move to other hosts."""
    _set_cordoned(name, cluster, cordoned=True)


@app.command("uncordon")
def uncordon(name: HostArgument, cluster: ClusterOption = None) -> None:
    """Place new things on a host again."""
    _set_cordoned(name, cluster, cordoned=False)


@app.command("drain", hidden=True)
def drain(
    name: HostArgument,
    cluster: ClusterOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="As `uncordon`.")] = False,
) -> None:
    """The former name of `cordon`."""
    say(f"`roq host drain` is `roq host {'uncordon' if undo else 'cordon'}`: it moves no process away")
    _set_cordoned(name, cluster, cordoned=not undo)


def _set_cordoned(name: str, cluster: str | None, *, cordoned: bool) -> None:
    async def work(connected: Cluster) -> HostInfo:
        await connected.drain_host(name, cordoned)
        return await _described(connected, name)

    info = with_cluster(cluster, work)
    runs = len(info.report.processes) if info.report else 0
    goes_on = f"; the {runs} processes that run there go on" if runs else ""
    say(f"nothing new is placed on {name}{goes_on}" if cordoned else f"new things are placed on {name} again")


@app.command("stop")
def stop(
    name: Annotated[
        str, typer.Argument(metavar="HOST", help="Name of the host.", show_default="this machine's name")
    ] = platform.node(),
    cluster: ClusterOption = None,
) -> None:
    """Stop a host: its processes in order, then its `roq-hcm`. What belongs to queues is placed on other hosts.

    A signal stops `roq-hcm` alone and leaves the processes to the next one, for upgrades without a pause."""

    async def work(connected: Cluster) -> HostInfo:
        return await _stopped(connected, await _described(connected, name))

    info = with_cluster(cluster, work)
    runs = len(info.report.processes) if info.report else 0
    say(f"{name} is stopped: roq-hcm and the {runs} processes that ran there")


async def _described(connected: Cluster, name: str) -> HostInfo:
    found = await _seen(connected, name)
    if found is None:
        raise HostNotFound(f"no host of name {name!r} is in the cluster")
    return found


async def _stopped(connected: Cluster, info: HostInfo) -> HostInfo:
    """Ask its HCM to stop it, and wait until the cluster has seen the end; the host as it was."""
    if not info.alive:
        again = "if processes of it are left, start its `roq-hcm` once more, which adopts them, then stop it"
        raise Unavailable(f"host {info.host} is away already; {again}")
    client = RpcClient(f"tcp://{info.address}:{info.port}", wire.Reply)
    try:
        await client.request(wire.ShutdownHost("roq host stop"), wire.OrderTaken, ASK_SECONDS)
    finally:
        client.close()
    await _gone(connected, info)
    await _away_for_good(connected, info)
    return info


async def _gone(connected: Cluster, info: HostInfo) -> None:
    """Returns when the cluster has seen this life of the host end with nothing left, or the next one begin."""
    left: tuple[RunningProcess, ...] = ()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            for delay in delays(0.05, 0.5):
                now = await _seen(connected, info.host)
                left = now.report.processes if now is not None and now.report is not None else ()
                if now is None or (not now.alive and not left) or _next_life(info, now):
                    return
                await asyncio.sleep(delay)
    except TimeoutError:
        pass
    names = ", ".join(sorted(process.name for process in left)) or "its roq-hcm"
    raise DeadlineExceeded(f"host {info.host} is not stopped after {STOP_SECONDS:g} s: {names} still there")


async def _away_for_good(connected: Cluster, info: HostInfo) -> None:
    """Raises TemporaryError if the host comes back at once: somebody started its HCM again."""
    until = time.monotonic() + AGAIN_SECONDS
    while True:
        now = await _seen(connected, info.host)
        if now is not None and now.alive:
            units = "under systemd install this version's units with `roq host install`, then stop the host once more"
            other = "under another service manager, and in a container, stop it there"
            raise TemporaryError(f"host {info.host} was stopped, and its service manager started it again: {units}; {other}")
        if time.monotonic() > until:
            return
        await asyncio.sleep(AGAIN_PAUSE_SECONDS)


async def _seen(connected: Cluster, name: str) -> HostInfo | None:
    return next((one for one in await connected.hosts() if one.host == name), None)


def _next_life(before: HostInfo, now: HostInfo) -> bool:
    """Whether another HCM is at work on the host."""
    if not now.alive or now.report is None or before.report is None:
        return False
    return now.report.incarnation != before.report.incarnation

"""`roq host …`: the machines of the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from roq.cli import host_install
from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import console, print_json, say, table
from roq.cli.status import host_table
from roq.client.cluster import Cluster
from roq.client.overview import host_rows
from roq.errors import HostNotFound
from roq.wire.gcm import HostInfo

app = typer.Typer(help="Hosts: list, show, drain, install.", no_args_is_help=True)
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
        found = next((info for info in await connected.hosts() if info.host == name), None)
        if found is None:
            raise HostNotFound(f"no host of name {name!r} is in the cluster")
        return found

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


@app.command("drain")
def drain(
    name: HostArgument,
    cluster: ClusterOption = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take new processes again.")] = False,
) -> None:
    """Place nothing new on a host; what runs there goes on."""

    async def work(connected: Cluster) -> None:
        await connected.drain_host(name, not undo)

    with_cluster(cluster, work)
    say(f"{name} takes new processes again" if undo else f"{name} takes nothing new any more")

"""`roq fleet set`, `roq fleet show`: machines that the cluster has a provider make when Exchanges find no slot, and gives back.

Where they come from is in the configuration of the GCMs (docs/elasticity.md).
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import age, moment, print_found, say, table
from roq.cli.quantities import duration_seconds
from roq.client.cluster import Cluster
from roq.errors import CallError
from roq.wire.fleet import FleetInfo, FleetLimits

app = typer.Typer(help="Machines that the cluster makes for itself, and gives back.", no_args_is_help=True)
PER_HOUR = "/h"


@app.command("set")
def set_fleet(
    cluster: ClusterOption = None,
    least: Annotated[int | None, typer.Option("--min", min=0, help="Machines at least.", show_default=False)] = None,
    most: Annotated[int | None, typer.Option("--max", min=0, help="Machines at most; 0: none.", show_default=False)] = None,
    cost: Annotated[
        str | None, typer.Option(metavar="0.35/h", help="What one costs in an hour, in your currency.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="3.5/h", help="What all may cost in an hour; 0/h: not bounded.", show_default=False)
    ] = None,
    boot: Annotated[
        str | None,
        typer.Option("--boot-within", metavar="5m", help="A machine that is no host by then is destroyed.", show_default=False),
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option("--idle-for", metavar="10m", help="One without an Exchange for so long goes.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say what may be made. What is not given stays as it is; at first nothing may."""

    async def work(connected: Cluster) -> FleetInfo:
        before = (await connected.fleet()).limits or FleetLimits()
        return await connected.set_fleet(changed(before, least, most, cost, budget, boot, idle))

    print_found(with_cluster(cluster, work), json, fleet_view)
    if not json:
        say("the limits are set")


@app.command("show")
def show_fleet(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show what is allowed, which machines there are, and why what is wanted is not there."""
    print_found(with_cluster(cluster, lambda connected: connected.fleet()), json, fleet_view)


def changed(
    before: FleetLimits,
    least: int | None,
    most: int | None,
    cost: str | None,
    budget: str | None,
    boot: str | None,
    idle: str | None,
) -> FleetLimits:
    """With what was given. Raises CallError, InvalidConfiguration."""
    given = {
        "least": least,
        "most": most,
        "cost": None if cost is None else per_hour(cost),
        "budget": None if budget is None else per_hour(budget),
        "boot_seconds": None if boot is None else duration_seconds(boot),
        "idle_seconds": None if idle is None else duration_seconds(idle),
    }
    return msgspec.structs.replace(before, **{name: value for name, value in given.items() if value is not None}).check()


def per_hour(text: str) -> float:
    """What `3.5/h` says. Raises CallError."""
    try:
        value = float(text.removesuffix(PER_HOUR))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise CallError(f"an amount for an hour is a number and /h, as 3.5/h; got {text!r}")
    return value


def fleet_view(info: FleetInfo) -> RenderableType:
    """For people."""
    limits = info.limits
    if limits is None:
        return "no machines may be made: `roq fleet set --max` allows some"
    budget = f", {limits.budget:g}/h pay for {limits.affordable} at {limits.cost:g}/h" if limits.budget else ""
    head = [
        f"provider: {info.provider or 'none'}   names: {info.prefix}…   machines: {limits.least} to {limits.most}{budget}",
        f"not a host within {age(limits.boot_seconds)}: destroyed   idle for {age(limits.idle_seconds)}: given back",
        *([f"no slot for: {', '.join(info.unmet)}"] if info.unmet else []),
        *([f"problem: {info.problem}"] if info.problem else []),
    ]
    cells = [
        (one.name, str(one.state), moment(one.created), "yes" if one.alive else "no", str(one.processes), one.reason)
        for one in info.machines
    ]
    return Group(*head, "", table("Machines", ("NAME", "STATE", "SINCE", "HOST", ">PROCESSES", "REASON"), cells))

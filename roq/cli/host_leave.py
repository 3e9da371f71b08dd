"""`roq host drain`, `evacuate`, `rebalance`: what runs on hosts, and what their stores keep, goes to others without loss.

The leading GCM does it (gcm/evacuation.py); these commands say so, and show how far it is. Ctrl-C ends the showing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.completion import host_names
from roq.cli.output import counted, print_done, print_json, say
from roq.client.cluster import Cluster
from roq.errors import TemporaryError
from roq.wire.assignment import Leaving
from roq.wire.hosts import HostRemains

HostArgument = Annotated[
    str, typer.Argument(metavar="HOST", help="Name of the host.", show_default=False, autocompletion=host_names)
]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Return at once, it goes on by itself. Else what is left is shown until nothing is.")
]


class Switch(StrEnum):
    """Of `roq host rebalance`."""

    ON = "on"
    OFF = "off"
    SHOW = "show"


def in_words(remains: HostRemains) -> str:
    """What is still on a host."""
    of_queues = (remains.exchanges, "Exchange"), (remains.monitors, "Monitor"), (remains.masters, "master")
    kept = (remains.segments, "stretch of logs"), (remains.payloads, "payload"), (remains.ranges, "range of shuffles")
    counts = of_queues + (kept if remains.leaving is Leaving.EVERYTHING else ())
    parts = [_counted(count, what) for count, what in counts if count > 0]
    parts += ["an unknown number of payloads"] * (remains.payloads < 0 and remains.leaving is Leaving.EVERYTHING)
    if not parts and remains.store and remains.leaving is Leaving.EVERYTHING:
        return "its store, which ends when nothing has come back for some seconds,"
    return ", ".join(parts) or "nothing"


def _counted(count: int, what: str) -> str:
    first, _, rest = what.partition(" ")
    many = "stretches" if first == "stretch" and count > 1 else counted(count, first).partition(" ")[2]
    return f"{count} {many} {rest}".rstrip()


def drain(
    name: HostArgument,
    cluster: ClusterOption = None,
    no_wait: NoWaitOption = False,
    undo: Annotated[bool, typer.Option("--undo", help="As `uncordon`.")] = False,
    json: JsonOption = False,
) -> None:
    """Cordon a host and move what runs there of queues and work queues to others, without loss. What its store keeps stays."""
    _leave(name, cluster, Leaving.PROCESSES, wait=not no_wait, cancel=undo, json=json)


def evacuate(
    name: HostArgument,
    cluster: ClusterOption = None,
    no_wait: NoWaitOption = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Call it off: what is there stays and new things come; what has moved stays there.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Drain a host and move what its store keeps to others as well: then `roq host stop` it and remove it, nothing is lost.

    It goes on when this command is interrupted, and under another leader."""
    _leave(name, cluster, Leaving.EVERYTHING, wait=not no_wait, cancel=cancel, json=json)


def has_left(asked: Leaving, last: HostRemains | None) -> bool:
    """Whether what was asked for has come about: `left` alone also says so of a host whose evacuation was called off."""
    return last is not None and last.left and last.leaving in (asked, Leaving.EVERYTHING)


def _leave(name: str, cluster: str | None, asked: Leaving, *, wait: bool, cancel: bool, json: bool) -> None:
    async def work(connected: Cluster) -> None:
        if cancel:
            await connected.cordon_host(name, False)
            text = f"new things are placed on {name} again; what had left it stays where it is"
            print_done({"host": name, "cordoned": False}, json, text)
            return
        await connected.host_remains(name)  # an older leader knows nothing of it: it says so before the host is cordoned
        await (connected.evacuate_host(name) if asked is Leaving.EVERYTHING else connected.drain_host(name))
        if not wait:
            _show(await connected.host_remains(name), json=json)
            return
        last: HostRemains | None = None
        async for remains in connected.remains(name):
            _show(last := remains, json=json)
        if not has_left(asked, last):
            raise TemporaryError(f"that was called off: {name} takes new things again, or keeps what it has")
        if not json and asked is Leaving.EVERYTHING:
            say(f"{name} is empty: `roq host stop` it, then remove it")
        elif not json:
            say(f"{name} runs nothing of queues and work queues any more")

    with_cluster(cluster, work)


def _show(remains: HostRemains, *, json: bool) -> None:
    if json:
        print_json({**msgspec.structs.asdict(remains), "left": remains.left})
        return
    say(f"{remains.host}: {in_words(remains)} left")
    for why in remains.waits:
        say(f"  waits: {why}")


def rebalance(
    switch: Annotated[Switch, typer.Argument(metavar="on|off|show", help="What to do.")] = Switch.SHOW,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Whether Exchanges, Monitors and masters move by themselves to hosts that have much less of them, as after one joined."""

    async def work(connected: Cluster) -> bool:
        if switch is not Switch.SHOW:
            await connected.set_rebalance(switch is Switch.ON)
        return (await connected.options()).rebalance

    on = with_cluster(cluster, work)
    print_done({"rebalance": on}, json, f"hosts are levelled by themselves: {'on' if on else 'off'}")

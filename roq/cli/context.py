"""`roq context …`: clusters under names, and which one commands mean. None of it needs the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption
from roq.cli.completion import context_names
from roq.cli.output import print_done, print_found, table
from roq.cli.which import DEFAULT_ADDRESS, Choice, Context, Contexts, choose, contexts_file, read_contexts, write_contexts
from roq.coordination.link import parse_address
from roq.errors import InvalidConfiguration, InvalidName
from roq.ids import check_name
from roq.runtime.security import load_card

app = typer.Typer(help="Clusters under names, and which one commands mean.", no_args_is_help=True)
NO_NAME = ":,"  # of no context, so that none is taken for an address with a port
NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the context.", show_default=False, autocompletion=context_names),
]


class ContextRow(msgspec.Struct, frozen=True):
    """A context. card: path, "" for none. in_use: commands mean it unless told otherwise."""

    context: str
    address: str
    card: str
    in_use: bool


class MeantCluster(msgspec.Struct, frozen=True):
    """What a command without further options means, and why. context, card: "" for none."""

    cluster: str
    why: str
    context: str
    card: str


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for it.", show_default=False)],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="ZooKeeper addresses, h1:2181,h2:2181/CHROOT.", show_default=False)
    ],
    card: Annotated[
        Path | None, typer.Option(help="Who you are there: a file from `roq access grant`.", show_default=False)
    ] = None,
    use: Annotated[bool, typer.Option("--use", help="Mean it from now on.")] = False,
    json: JsonOption = False,
) -> None:
    """Name a cluster, or change what a name stands for. The first one is used at once."""
    check_name(name, "context")
    if any(mark in name for mark in NO_NAME):
        raise InvalidName(f"{name!r} can't name a context: no ':' nor ',', as addresses have them")
    parse_address(address)
    path = "" if card is None else str(card.expanduser().absolute())
    if path:
        load_card(Path(path))
    known = read_contexts(contexts_file())
    current = name if use or not known.contexts else known.current
    write_contexts(contexts_file(), Contexts(current, {**known.contexts, name: Context(address, path)}))
    in_use = current == name
    text = f"context {name}: {address}{', in use' if in_use else f'; `roq context use {name}` to mean it'}"
    print_done({"context": name, "added": True, "address": address, "card": path, "in_use": in_use}, json, text)


@app.command("use")
def use_context(name: NameArgument, json: JsonOption = False) -> None:
    """Mean this cluster, in all shells, wherever a command is not told otherwise."""
    known = _known(name)
    write_contexts(contexts_file(), msgspec.structs.replace(known, current=name))
    address = known.contexts[name].address
    choice = choose(None) or Choice(address, "", name)
    text = f"context {name} is in use: {address}"
    if choice.context != name:
        text = f"context {name} is in use, but not here: {choice.why} says {choice.address}"
    done = {"context": name, "in_use": True, "address": address, "cluster": choice.address, "why": choice.why}
    print_done(done, json, text)


@app.command("ls")
def list_contexts(json: JsonOption = False) -> None:
    """List contexts."""
    known = read_contexts(contexts_file())
    rows = [ContextRow(name, one.address, one.card, name == known.current) for name, one in sorted(known.contexts.items())]

    def view(found: list[ContextRow]) -> RenderableType:
        cells = [("*" if row.in_use else "", row.context, row.address, row.card or "-") for row in found]
        return table("Contexts", ("", "CONTEXT", "ADDRESS", "CARD"), cells)

    print_found(rows, json, view)


@app.command("show")
def show(cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Show which cluster commands mean here, and why."""
    choice = choose(cluster) or Choice(DEFAULT_ADDRESS, "nothing says another")
    meant = MeantCluster(choice.address, choice.why, choice.context, choice.card)

    def view(found: MeantCluster) -> RenderableType:
        lines = [f"{found.cluster}   ({found.why})", *([f"card {found.card}"] if found.card else [])]
        return "\n".join(lines)

    print_found(meant, json, view)


@app.command("rm")
def remove(name: NameArgument, json: JsonOption = False) -> None:
    """Forget a context. The cluster and the card are left alone."""
    known = _known(name)
    current = "" if known.current == name else known.current
    left = {other: one for other, one in known.contexts.items() if other != name}
    write_contexts(contexts_file(), Contexts(current, left))
    was_in_use = known.current == name
    text = f"removed context {name}{'; none is in use now' if was_in_use else ''}"
    print_done({"context": name, "removed": True, "was_in_use": was_in_use}, json, text)


app.command("list", hidden=True)(list_contexts)
app.command("remove", hidden=True)(remove)


def _known(name: str) -> Contexts:
    """Raises InvalidConfiguration: there is no such context."""
    known = read_contexts(contexts_file())
    if name not in known.contexts:
        names = ", ".join(sorted(known.contexts)) or "none: `roq context add NAME ADDRESS` makes one"
        raise InvalidConfiguration(f"there is no context {name!r}, there are {names}")
    return known

"""`roq access`: who may do what in a secured cluster. Only `revoke`, `admit` and `push` tell the cluster."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption
from roq.cli.ca import AUTHORITY, AuthorityOption, DaysOption, push_access, revoke
from roq.cli.output import print_done, print_found, size, table
from roq.cli.quantities import byte_count
from roq.errors import CallError
from roq.runtime.security import write_secret
from roq.tools.authority import DAYS, Authority, Issued
from roq.wire.card import CardRole, Grant, Quota, Right
from roq.wire.curve import KEY_BYTES

app = typer.Typer(no_args_is_help=True, help="Who may do what in a secured cluster.")
RightsArgument = Annotated[
    list[str],
    typer.Argument(metavar="RIGHT NAMES ...", help="Pairs, as: publish 'orders.*' describe '*'. RIGHT all: every right."),
]


ConnectionsOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="At most so many connections to each port of the cluster's processes, for all cards of this name; 0: no bound.",
    ),
]
RateOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Publish at most so much a second through each Exchange, such as 5MB.", show_default=False
    ),
]


def quota_of(connections: int, publish_rate: str | None) -> Quota:
    """Raises BadParameter."""
    return Quota(connections, byte_count(publish_rate) if publish_rate else 0)


def grants_of(words: list[str]) -> list[Grant]:
    """Raises CallError."""
    if len(words) % 2:
        raise CallError("rights come in pairs: a right, and the names it is for, as: publish 'orders.*'")
    found = []
    for right, names in zip(words[::2], words[1::2], strict=True):
        if right != "all" and right not in tuple(Right):
            raise CallError(f"{right!r} is no right: {', '.join(Right)}, or all")
        found += [Grant(one, names) for one in (Right if right == "all" else (Right(right),))]
    return found


@app.command()
def grant(
    name: Annotated[str, typer.Argument(help="Who gets it.")],
    rights: RightsArgument,
    file: Annotated[Path | None, typer.Option("--out", help="Where to write the card (NAME.card).")] = None,
    days: DaysOption = DAYS,
    connections: ConnectionsOption = 0,
    publish_rate: RateOption = None,
    authority: AuthorityOption = AUTHORITY,
    json: JsonOption = False,
) -> None:
    """Write a card with these rights: it is all that a program needs to get in."""
    place = file or Path(f"{name}.card")
    quota, known = quota_of(connections, publish_rate), Authority.load(authority.expanduser())
    write_secret(place, known.issue(name, CardRole.CLIENT, grants_of(rights), days, quota=quota))
    text = f"card of {name}: {place}   use: roq.connect(..., card={str(place)!r}), roq --card {place}, or ROQ_CARD"
    print_done({"name": name, "granted": True, "id": known.issued[-1].id, "card": str(place)}, json, text)


@app.command()
def admit(
    name: Annotated[str, typer.Argument(help="Of the program.")],
    key: Annotated[str, typer.Argument(help="Its CURVE public key, 64 hexadecimal digits.")],
    rights: RightsArgument,
    cluster: ClusterOption = None,
    days: DaysOption = DAYS,
    connections: ConnectionsOption = 0,
    publish_rate: RateOption = None,
    authority: AuthorityOption = AUTHORITY,
    json: JsonOption = False,
) -> None:
    """Let a program in that can't show a card (libzmq in another language): the cluster knows it by its key."""
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise CallError("a CURVE public key is 64 hexadecimal digits")
    known = Authority.load(authority.expanduser())
    card = known.admit(name, raw, grants_of(rights), days, quota_of(connections, publish_rate))
    push_access(known, cluster)
    server_key = known.server_key().hex()
    done = {"name": name, "admitted": True, "id": card.id, "server_key": server_key}
    print_done(done, json, f"{name} is let in; the servers' key for it: {server_key}")


app.command()(revoke)


@app.command()
def push(cluster: ClusterOption = None, authority: AuthorityOption = AUTHORITY, json: JsonOption = False) -> None:
    """Tell the cluster what is revoked and admitted, as `revoke` and `admit` do when it can be reached."""
    known = Authority.load(authority.expanduser())
    push_access(known, cluster)
    print_done({"authority": str(known.path), "pushed": True}, json, "the cluster has the access list")


@app.command(name="ls")
def list_cards(authority: AuthorityOption = AUTHORITY, json: JsonOption = False) -> None:
    """All cards that were signed."""
    issued = Authority.load(authority.expanduser()).issued

    def view(cards: Sequence[Issued]) -> RenderableType:
        return table("cards", ("name", "role", "rights", "quota", "until", "id", "state"), [_row(one) for one in cards])

    print_found(issued, json, view)


def _row(one: Issued) -> list[str]:
    rights = ", ".join(f"{grant.right} {grant.names}" for grant in one.grants)
    until = datetime.datetime.fromtimestamp(one.expires, datetime.UTC).strftime("%Y-%m-%d %H:%M")
    return [
        one.name,
        one.role,
        rights,
        _quota(one.quota),
        until,
        one.id,
        "revoked" if one.revoked else "by key" if one.admitted else "",
    ]


def _quota(quota: Quota) -> str:
    parts = [f"{quota.connections} connections"] if quota.connections else []
    parts += [f"{size(quota.publish_bytes_per_second)}/s"] if quota.publish_bytes_per_second else []
    return ", ".join(parts) or "-"

"""`roq ca`: the authority of a secured cluster, and the cards of its GCMs and hosts. Only `revoke`
needs the cluster; it is that of `roq access`, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import print_done
from roq.client.cluster import Cluster
from roq.errors import InvalidConfiguration
from roq.ids import check_name
from roq.runtime.places import configuration_home
from roq.runtime.security import write_secret
from roq.tools.authority import DAYS, Authority
from roq.wire.card import CardRole

app = typer.Typer(no_args_is_help=True, help="The authority of a secured cluster, and cards of its GCMs and hosts.")
AUTHORITY = configuration_home() / "authority.json"
AuthorityOption = Annotated[
    Path,
    typer.Option("--authority", help="Its file: keep it away from the cluster.", show_default="~/.config/roq/authority.json"),
]
DaysOption = Annotated[float, typer.Option("--days", min=0.001, help="How long the card is good.")]


@app.command()
def init(authority: AuthorityOption = AUTHORITY, json: JsonOption = False) -> None:
    """Make an authority: the keys that sign cards, and those of the cluster's servers."""
    made = Authority.init(authority.expanduser())
    text = f"authority made: {made.path}   next: roq ca sign gcm gcm-1 gcm-1.card; roq ca sign host host-1 host-1.card"
    print_done({"authority": str(made.path), "made": True}, json, text)


@app.command()
def sign(
    role: Annotated[CardRole, typer.Argument(help="host or gcm; for programs and people: `roq access grant`.")],
    name: Annotated[str, typer.Argument(help="Of the host as it is in the cluster, or of the GCM.")],
    file: Annotated[Path, typer.Argument(help="Where to write the card: move it to that machine, mode 0600.")],
    days: DaysOption = DAYS,
    authority: AuthorityOption = AUTHORITY,
    json: JsonOption = False,
) -> None:
    """Sign the card of a GCM or a host."""
    if role is CardRole.CLIENT:
        raise typer.BadParameter("a program's card comes from `roq access grant`")
    known = Authority.load(authority.expanduser())
    write_secret(file, known.issue(check_name(name, "host"), role, days=days))
    flag = "roq-gcm --card" if role is CardRole.GCM else "roq-hcm --card"
    done = {"name": name, "signed": True, "role": role, "id": known.issued[-1].id, "card": str(file)}
    print_done(done, json, f"card of {role} {name}: {file}   use: {flag} {file}")


@app.command()
def rotate(authority: AuthorityOption = AUTHORITY, json: JsonOption = False) -> None:
    """Make new keys, of the authority and of the servers. Sign the cards of GCMs and hosts anew and restart these; then
    sign those of programs anew. Cards of before are good until the next rotation."""
    known = Authority.load(authority.expanduser())
    known.rotate()
    text = "new keys: sign the cards of GCMs and hosts anew and restart them one by one, then `roq access push`"
    print_done({"authority": str(known.path), "rotated": True}, json, text)


@app.command()
def zookeeper(
    ca: Annotated[Path, typer.Argument(help="Certificate of who signs ZooKeeper's certificates, in PEM.")],
    authority: AuthorityOption = AUTHORITY,
    json: JsonOption = False,
) -> None:
    """Have connections to ZooKeeper use TLS: by all cards that are signed from now on."""
    try:
        told = ca.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"can't read the certificate {ca}: {error}") from None
    known = Authority.load(authority.expanduser())
    known.trust_zookeeper(told)
    text = "cards that are signed from now on speak TLS with ZooKeeper: name its secure port in addresses"
    print_done({"authority": str(known.path), "tls": True, "certificate": str(ca)}, json, text)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Whose cards, or the id of one of them.")],
    cluster: ClusterOption = None,
    authority: AuthorityOption = AUTHORITY,
    json: JsonOption = False,
) -> None:
    """Revoke cards: their connections are cut at once."""
    known = Authority.load(authority.expanduser())
    count = known.revoke(name)
    push_access(known, cluster)
    print_done({"name": name, "revoked": count}, json, f"revoked: {count} card{'s' if count != 1 else ''} of {name}")


def push_access(authority: Authority, cluster: str | None) -> None:
    """Give the cluster the access list."""
    signed = authority.access_list()

    async def work(connected: Cluster) -> None:
        await connected.set_access(signed)

    with_cluster(cluster, work)

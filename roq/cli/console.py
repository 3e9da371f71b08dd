"""`roq console`: the cluster in a browser, and over HTTP for programs without an SDK (roq/console, extra `console`).

What serves it is imported when the command runs: its libraries would cost every other command 0.3 s."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from roq.cli.address import ClusterOption, entered
from roq.cli.output import say
from roq.config import listen_place
from roq.errors import CallError
from roq.runtime.installation import brought_by

LISTEN = "127.0.0.1:9470"


def console(  # noqa: PLR0913, PLR0917  one parameter per flag
    cluster: ClusterOption = None,
    listen: Annotated[str, typer.Option(metavar="[HOST]:PORT", help="Where to serve; port 0: any free one.")] = LISTEN,
    writable: Annotated[bool, typer.Option("--writable", help="Let people change things; else it only shows them.")] = False,
    certificate: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Serve TLS with this certificate and its chain.", show_default=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Key of the certificate.", show_default=False)] = None,
    trust_header: Annotated[
        str, typer.Option(metavar="NAME", help="A proxy signs people in: header with the name.", show_default=False)
    ] = "",
    trusted_proxy: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="Take requests from these proxies alone.", show_default=False)
    ] = None,
    users: Annotated[
        Path | None, typer.Option(metavar="TOML", help="What the proxy's users may do; else look.", show_default=False)
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name by which it is reached.", show_default=False)
    ] = None,
    authority: Annotated[
        Path | None, typer.Option(metavar="FILE", help="List all cards that this authority signed.", show_default=False)
    ] = None,
    link: Annotated[
        bool | None,
        typer.Option("--link/--no-link", help="Print a link to sign in by, as the console's card. [default: on a terminal]"),
    ] = None,
) -> None:
    """Serve a web console of the cluster, and its HTTP interface for programs.

    In a secured cluster it has a card of its own, and people sign in with theirs."""
    try:
        with brought_by("console", "roq console"):
            module: Any = import_module("roq.console.serve")
    except ModuleNotFoundError as error:
        raise CallError(str(error)) from None
    options = module.ServeOptions(
        *listen_place(listen, "--listen"),
        writable=writable,
        certificate=certificate,
        key=key,
        header=trust_header,
        proxies=tuple(trusted_proxy or ()),
        users=users,
        names=tuple(allow_host or ()),
        authority=authority,
        link=sys.stderr.isatty() if link is None else link,
    )
    uvloop.run(module.serve(entered(cluster), options, say))

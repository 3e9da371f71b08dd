"""`roq version`, `roq --version`."""

from __future__ import annotations

import platform

import typer

from roq.cli.address import JsonOption
from roq.cli.output import print_json
from roq.runtime.installation import installed_version
from roq.runtime.sockets import zeromq_versions


def print_version(asked: bool) -> None:
    """`roq --version`: the number alone."""
    if asked:
        print(installed_version())
        raise typer.Exit


def version(json: JsonOption = False) -> None:
    """Print the versions of RoQ and of what it stands on."""
    found = {
        "roq": installed_version(),
        "python": platform.python_version(),
        **zeromq_versions(),
    }
    if json:
        print_json(found)
    else:
        print(", ".join(f"{name} {number}" for name, number in found.items()))

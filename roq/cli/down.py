"""`roq down`: end the cluster that `roq up` started on this machine, also one that outlived its `roq up`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from roq.cli.output import say, working
from roq.errors import CallError
from roq.tools.local import starter
from roq.tools.local.leftovers import Leftover
from roq.tools.local.starter import FoundCluster

COMMAND = "roq up"
DIRECTORY_HELP = "The directory of the cluster; needed if several run here, and by root for another user's."


def down(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help=DIRECTORY_HELP, show_default=False),
    ] = None,
) -> None:
    """Stop the cluster that `roq up` started on this machine, and what one left that was killed."""
    found = chosen(starter.clusters(), directory, os.geteuid())
    if found is None:
        say("no cluster of `roq up` of yours runs here" if directory is None else f"no cluster runs in {directory}")
        return
    with working(f"stopping the cluster in {found.origin.directory}"):
        ended = starter.stop(found)
    say(told(found, ended))


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


def told(found: FoundCluster, ended: Sequence[Leftover]) -> str:
    """What was done, for people."""
    counted = Counter(process.owner for process in ended)
    names = ", ".join(f"{owner} ({number})" if number > 1 else owner for owner, number in sorted(counted.items()))
    if found.orphan:
        return f"ended what was left of the cluster in {found.origin.directory}: {names or 'nothing any more'}"
    return f"stopped the cluster in {found.origin.directory}{f'; had to kill {names}' if names else ', no process left'}"

"""`roq backup …`: a cluster's metadata and the messages of its recorded queues to a folder, and back (roq/client/backup.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.completion import queue_names
from roq.cli.output import counted, moment, print_found, print_json, say, size, table, yes
from roq.cli.progress import progressing
from roq.client.backup import BackupManifest, read_manifest, restore, save, verify

app = typer.Typer(help="Backups of a cluster: save, look at, verify, restore.", no_args_is_help=True)
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the backup is.", show_default=False)]
QueueOption = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="QUEUE", help="Only this one; may be repeated.", autocompletion=queue_names),
]


@app.command("save")
def save_backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New or empty.", show_default=False)],
    queue: QueueOption = None,
    cluster: ClusterOption = None,
    metadata_only: Annotated[
        bool, typer.Option("--metadata-only", help="How everything is set up, without what recorded queues hold.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Save queues, policies, work queues and groups as they are set up, and the messages of recorded queues, while the cluster
    goes on. Tasks are not among it: `roq task move` copies them."""
    with progressing("saving") as told:
        manifest = with_cluster(
            cluster, lambda connected: save(connected, folder, queue or (), messages=not metadata_only, progress=told)
        )
    if json:
        print_json(manifest)
        return
    say(f"saved to {folder}: {_told(manifest)}")
    _warn(manifest)


@app.command("show")
def show(folder: FolderArgument, json: JsonOption = False) -> None:
    """Show what is in a backup, without reading its messages."""
    print_found(read_manifest(folder), json, _table)


@app.command("verify")
def verify_backup(folder: FolderArgument, queue: QueueOption = None, json: JsonOption = False) -> None:
    """Read a backup from the first byte to the last, and say whether it is what was saved."""
    with progressing("verifying") as told:
        manifest = verify(folder, queue or (), told)
    if json:
        print_json(manifest)
        return
    say(f"{folder} is well: {_told(manifest)}")
    _warn(manifest)


@app.command("restore")
def restore_backup(
    folder: FolderArgument,
    queue: QueueOption = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="OLD=NEW", help="Restore queue OLD under the name NEW; may be repeated."),
    ] = None,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Make the queues of a backup again, with their policies, messages, work queues and groups, and compare what is there then
    with the backup. Interrupted, the same command goes on."""
    renamed = _renamed(name or ())
    with progressing("restoring") as told:
        manifest = with_cluster(
            cluster, lambda connected: restore(connected, folder, queue or (), renamed=renamed, progress=told)
        )
    if json:
        print_json(manifest)
        return
    say(f"restored {_told(manifest)}" if not queue else f"restored {', '.join(queue)}")


def _renamed(names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in names:
        old, equals, new = one.partition("=")
        if not (old and equals and new):
            raise typer.BadParameter(f"{one!r}: write OLD=NEW", param_hint="--as")
        found[old] = new
    return found


def _told(manifest: BackupManifest) -> str:
    messages, stored = sum(one.messages for one in manifest.queues), sum(one.bytes for one in manifest.queues)
    groups = sum(one.source is not None for one in manifest.work_queues)
    parts = (
        counted(len(manifest.queues), "queue"),
        f"{counted(messages, 'message')} ({size(stored)})",
        counted(len(manifest.work_queues) - groups, "work queue"),
        counted(groups, "group"),
    )
    return ", ".join(parts)


def _warn(manifest: BackupManifest) -> None:
    for one in manifest.queues:
        if one.missing:
            say(f"of {one.name} at least {counted(one.missing, 'message')} had expired or were lost before they were saved")


def _table(manifest: BackupManifest) -> RenderableType:
    cells = [
        (one.name, yes(one.recorded), str(one.messages), size(one.bytes), str(one.missing or "-")) for one in manifest.queues
    ]
    cells += [(one.name, "-", "-", "-", "-") for one in manifest.work_queues]
    title = f"Backup {manifest.id}, taken {moment(manifest.taken)} with RoQ {manifest.version}"
    return table(title, ("NAME", "RECORDED", ">MESSAGES", ">PAYLOADS", ">MISSING"), cells)

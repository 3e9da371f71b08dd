"""What `roq task …` commands share: which queue is meant, how tasks are shown."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Annotated

import msgspec
import typer

from roq.blocking import WorkQueue, open_queue
from roq.cli.address import CONNECT_SECONDS
from roq.cli.completion import work_queue_names
from roq.cli.output import age
from roq.cli.which import choose, take_card
from roq.client.cluster import connect
from roq.errors import InvalidAddress, WorkQueueNotFound
from roq.runtime.log_output import visible
from roq.wire.task import Status
from roq.wire.work_queue import TaskSettings
from roq.workqueue.address import (
    LOGS,
    SCHEMES,
    QueueAddress,
    folder_address,
    log_exists,
    parse,
    queue_address,
    without_password,
)
from roq.workqueue.contract import ClusterSettings

SHOWN_CHARACTERS = 60  # of a payload or an error in a table

AddressArgument = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        help="A folder, or file:///dir, log:///dir, roq://zk1:2181,zk2:2181/name, postgresql://user@host/database?queue=name, "
        "jetstream://host:4222/name, which may end in ?OPTION=VALUE&…; "
        "or the name of a work queue of the cluster that ROQ_CLUSTER or the context in use says.",
        show_default=False,
        autocompletion=work_queue_names,
    ),
]
CountOption = Annotated[int, typer.Option("--count", "-n", min=1, help="At most so many.")]


def full_address(given: str) -> str:
    """A folder's path becomes its file: address, the name alone that of a work queue of the cluster that was chosen. Raises
    InvalidAddress."""
    if given.partition(":")[0] in SCHEMES:
        if given.startswith("memory:"):
            raise InvalidAddress("memory: is a queue within one program; a command can't see another program's")
        return given
    if given.startswith(("/", ".", "~")) or os.path.isdir(given):
        return folder_address(os.path.abspath(os.path.expanduser(given)))
    choice = choose(None)
    if choice is not None and "/" not in given and ":" not in given:
        take_card(choice)
        return queue_address(choice.address, given)
    parse(given)  # raises, and tells what an address looks like
    return given


def opened(given: str) -> WorkQueue:
    """A queue that exists. Raises WorkQueueNotFound: a mistyped path shall not become a queue."""
    address = full_address(given)
    _check_exists(parse(address))
    return open_queue(address)


def exists(address: str) -> bool:
    """Whether there is a work queue at this full address."""
    try:
        _check_exists(parse(address))
    except WorkQueueNotFound:
        return False
    return True


def _check_exists(place: QueueAddress) -> None:
    """Raises WorkQueueNotFound."""
    needed = {"file": os.path.join(place.path, "queue"), "log": place.path}.get(place.scheme)
    if needed is not None and not (os.path.isdir(needed) and (place.scheme == "file" or os.listdir(needed))):
        raise WorkQueueNotFound(f"there is no work queue in {place.path}")
    if place.scheme in LOGS and not log_exists(place):
        raise WorkQueueNotFound(f"there is no work queue {place.path!r} in {place.place}")
    if place.scheme == "roq":
        asyncio.run(_known(place))


async def _known(place: QueueAddress) -> None:
    async with connect(place.zookeeper, connect_seconds=CONNECT_SECONDS) as cluster:
        await cluster.work_queue(place.path)


class PayloadRow(msgspec.Struct, omit_defaults=True):
    """A payload for JSON: as text if it is UTF-8, in base64 if not."""

    text: str | None = None
    base64: str | None = None


def payload_row(payload: bytes) -> PayloadRow:
    """See PayloadRow."""
    try:
        return PayloadRow(text=payload.decode())
    except UnicodeDecodeError:
        return PayloadRow(base64=base64.b64encode(payload).decode())


def shown(value: bytes | str) -> str:
    """The beginning of a payload or an error, on one line."""
    text = value[: SHOWN_CHARACTERS * 4].decode(errors="replace") if isinstance(value, bytes) else value
    line = visible(text.split("\n", 1)[0])
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def changed_tasks(address: str, what: str, tasks: int) -> dict[str, str | int]:
    """How many tasks of which work queue a command has acked, removed, …, for JSON."""
    return {"address": without_password(full_address(address)), what: tasks}


def counts(status: Status) -> dict[str, float | None]:
    """For JSON. behind_seconds, lag (None: not known), expired, missed: of a group alone; outgoing: while there are any."""
    names = ("ready", "delayed", "leased", "dead", "completed", "inserted", "oldest_seconds")
    found = {name: getattr(status, name) for name in names}
    if status.outgoing:
        found["outgoing"] = status.outgoing
    if status.behind_seconds is None:
        return found
    lag = status.lag if status.lag >= 0 else None
    group = {"behind_seconds": status.behind_seconds, "lag": lag, "expired": status.expired, "missed": status.missed}
    return {**found, **group}


def settings_text(settings: TaskSettings) -> str:
    """On one line, for people."""
    attempts = f"dead after {settings.max_attempts} attempts" if settings.max_attempts else "tried for ever"
    text = f"{attempts}, dedup keys kept {age(settings.dedup_seconds)}, payloads up to {settings.payload_bytes_max} bytes"
    if isinstance(settings, ClusterSettings):
        text += f", write quorum {settings.write_quorum}, ack quorum {settings.ack_quorum}, {settings.standbys} standbys"
        text += f", payloads from {settings.inline_bytes} bytes on go straight to a store"
    return text

"""`roq queue read --arrow`: what a recorded queue keeps, as an Arrow IPC file or stream.

pyarrow is imported when it is asked for: it takes longer than a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import roq
from roq.cli.output import counted, say, size, working
from roq.cli.pub_sub import MessageTally
from roq.errors import CallError
from roq.runtime.installation import brought_by
from roq.wire.recording import TapePosition

STREAM = "-"


def write_arrow(
    place: str,
    address: str,
    topics: list[str],
    since: str | datetime | timedelta | TapePosition,
    where: str,
    tally: MessageTally,
) -> None:
    """Into this file, which is there once it is complete, or STREAM to standard output. Says what was lost and where to go on.
    Raises CallError: pyarrow is missing, or the file can't be written; and what roq.read raises."""
    if place == STREAM and sys.stdout.isatty():
        raise CallError("an Arrow stream is no text for a terminal: redirect it, or name a file")
    try:
        with brought_by("arrow", "--arrow"):
            import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise CallError(str(error)) from None
    with roq.read(address, *topics, since=since, where=where, on_lost=tally.lost) as batches:
        with working("reading"), _writer(place, batches.schema) as writer:
            for batch in batches:
                tally.received += batch.num_rows
                writer.write_batch(batch)
        written = "" if place == STREAM else f" into {place} ({size(Path(place).stat().st_size)})"
        say(f"roq queue read: wrote {counted(tally.received, 'message')}{written}, lost {tally.missing}")
        say(f"roq queue read: go on with --since {batches.position}")


@contextmanager
def _writer(place: str, schema: Any) -> Iterator[Any]:
    ipc = import_module("pyarrow.ipc")
    if place == STREAM:
        with ipc.new_stream(sys.stdout.buffer, schema) as stream:
            yield stream
        sys.stdout.flush()
        return
    final = Path(place)
    beside = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        with ipc.new_file(str(beside), schema) as file:
            yield file
        beside.replace(final)
    except OSError as error:
        raise CallError(f"can't write {place}: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)

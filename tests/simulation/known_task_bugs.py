"""Bugs of stores, masters and their log that RoQ once had, or that its models switch on, put back one at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from roq.errors import StorageFailed
from roq.log.replicated.appending import Appending
from roq.log.replicated.writer import LogWriter
from roq.log.store import index, journal, storage
from roq.tools.simulation import disks
from roq.tools.simulation.run import What
from roq.wire import master as wire
from roq.workqueue.master import term
from roq.workqueue.master.dump import Dump
from roq.workqueue.records import Sender, Use
from tests.simulation.known_bugs import Known, put


def _unsynced(one: journal.Journal, write: journal.JournalWrite) -> None:
    """Written, and answered."""
    try:
        one._disk.write_all(one._files[write.number].descriptor, write.data, write.offset)
    except OSError as error:
        raise StorageFailed(str(error)) from error


_add = storage.SegmentStorage.add


def _unfenced_add(one: storage.SegmentStorage, request: Any, done: Any) -> None:
    segment = one.index.segments.get(request.segment)
    before = segment.fenced if segment is not None else 0
    if segment is not None:
        segment.fenced = 0
    _add(one, request, done)
    if segment is not None:
        segment.fenced = before


_sync_folder = disks.SimulatedDisk.sync_folder


def _sync_all_but_payloads(disk: disks.SimulatedDisk, folder: Path) -> None:
    """As if a store did not ask for it when it has stored a payload, removed one, or found some when it began."""
    if folder.parent.name != "blobs":
        _sync_folder(disk, folder)


_init = Appending.__init__


def _one_is_enough(one: Appending, segment: str, epoch: int, nodes: Any, ack_quorum: int, first: int) -> None:
    _init(one, segment, epoch, nodes, 1, first)


_append = term.MasterTerm._append


def _answered_early(one: term.MasterTerm, batch: Any) -> None:
    answers, batch.answers = batch.answers, []
    for peer, id, body in answers:
        one._send(peer, wire.seal_answer(id, body))
    _append(one, batch)


_snapshot = LogWriter.snapshot


async def _of_now(one: LogWriter, position: int, data: Any) -> None:
    """A snapshot claims what was written while it was made."""
    await _snapshot(one, one.confirmed, data)


def _without_what_is_under_way(one: term.MasterTerm) -> None:
    """A snapshot claims less than it has: what was applied and not durable yet."""
    wanted, one._wanted = one._wanted, None
    if wanted is not None and not wanted.done():
        one._dump = Dump(one.service.fold)
        wanted.set_result((one.position, one._dump))


_use = Sender.use


def _always_new(one: Sender, number: int) -> Use:
    use = _use(one, number)
    return Use.NEW if use is Use.KNOWN else use


def believed(record: index.StoredRecord) -> index.StoredRecord:
    """What an intact record of a damaged batch says of others is true."""
    return record


BUGS: dict[str, Known] = {
    "an entry is acknowledged before it is synced": Known(
        partial(put, (journal.Journal, "perform", _unsynced)), 0, What.TASKS, cheap=True
    ),
    "a put that is sent again is a new one": Known(partial(put, (Sender, "use", _always_new)), 4, What.TASKS),
    "a payload counts as stored before its folder is synced": Known(
        partial(put, (disks.SimulatedDisk, "sync_folder", _sync_all_but_payloads)), 0, What.TASKS
    ),
    "a snapshot claims what came after it": Known(partial(put, (LogWriter, "snapshot", _of_now)), 11, What.TASKS),
    "a snapshot claims less than it has": Known(
        partial(put, (term.MasterTerm, "_begin_dump", _without_what_is_under_way)), 3, What.TASKS
    ),
    "one store is enough": Known(partial(put, (Appending, "__init__", _one_is_enough)), 2, What.TASKS, cheap=True),
    "a master answers before the log is durable": Known(
        partial(put, (term.MasterTerm, "_append", _answered_early)), 3, What.TASKS, cheap=True
    ),
    "a store takes entries of a master that was replaced": Known(
        partial(put, (storage.SegmentStorage, "add", _unfenced_add)), 16, What.TASKS, cheap=True
    ),
}

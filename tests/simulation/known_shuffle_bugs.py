"""Bugs of shuffles that RoQ once had, or rules of followers and their leader that are switched off, one at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from roq.shuffle import queries, record
from roq.shuffle.node import datafile
from roq.tools.simulation.run import What
from tests.simulation.known_bugs import Known, put


def _unsynced(file: datafile.DataFile) -> None:
    """Written, and answered."""
    file._synced = file.size


_describe = record.ShuffleRecord.describe


def _by_the_last_table(one: record.ShuffleRecord, attempts: int, *, whole: bool = True) -> Any:
    told = _describe(one, attempts, complete=False)
    tables = {"ranges": one.table, "former": one.former, "winners": one.committed} if whole else {}
    return replace(told, **tables)


_counted = queries.counted


def _all_there(*asked: Any) -> queries.RowCount:
    return _counted(*asked)._replace(missing=0, lacking=[])


BUGS: dict[str, Known] = {
    "a receipt is given before its rows are synced": Known(
        partial(put, (datafile.DataFile, "sync", _unsynced)), 0, What.SHUFFLE
    ),
    "winners are not counted before the seal": Known(
        partial(put, (queries, "counted", _all_there)), 11, What.SHUFFLE, cheap=True
    ),
    "what is cut anew is read by a table that was not counted": Known(
        partial(put, (record.ShuffleRecord, "describe", _by_the_last_table)), 15, What.SHUFFLE
    ),
}

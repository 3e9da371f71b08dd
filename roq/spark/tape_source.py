"""format("roq") reads recorded queues: a stream that can be run again from any offset, and batches.

    spark.readStream.format("roq").option("cluster", "zk1:2181").option("queue", "orders").load()

Offsets name entries of tapes (tape_offsets.py). What a batch reads is decided by its two offsets alone: a range of entries per
tape, read by tasks from the stores. Nothing is kept anywhere but in Spark's checkpoint. What is promised: docs/spark.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from roq.errors import TemporaryError
from roq.spark.errors import spark_errors
from roq.spark.tape_offsets import TapeOffsets, TapeRange, TapesDone, admitted, ranges
from roq.spark.tape_options import TapeOptions
from roq.spark.tape_reading import LOOK_SECONDS, TapeLink, expired, range_rows
from roq.wire.recording import TapePosition

PLAN_SECONDS = 0.1  # to wait for news; Spark's other calls wait meanwhile
AWAY_SECONDS = 120.0  # a query fails when nobody could be asked for so long
log = logging.getLogger(__name__)


class TapePartition(InputPartition):
    """What one Spark task reads. Plain values."""

    def __init__(self, tapes: str, part: TapeRange) -> None:
        self.tapes, self.part = tapes, part

    def rows(self, options: TapeOptions) -> Iterator[pa.RecordBatch]:
        """In a task."""
        with spark_errors(queue=options.queue):
            yield from range_rows(options, self.tapes, self.part)


def _begin(options: TapeOptions, link: TapeLink) -> dict[str, int]:
    """Entries before the place where a query starts. Raises DataLost if it names tapes that have expired."""
    named = options.start.done if isinstance(options.start, TapePosition) else {}
    for exchange in named.keys() - link.tapes.tapes.keys():
        expired(options, exchange, named[exchange], named[exchange] + 1)
    return link.call(link.tapes.at(options.start))


class TapeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream over the tapes. The connection is opened at the first question, in the one process on the driver that is asked;
    what is pickled and sent to tasks is the options alone."""

    def __init__(self, options: TapeOptions) -> None:
        self._options = options
        self._link: TapeLink | None = None
        self._ends: dict[str, int] = {}  # at the last look
        self._frozen: dict[str, int] | None = None
        self._away_since = 0.0  # monotonic; 0: GCM and stores answer

    def __getstate__(self) -> Mapping[str, object]:
        return {"_options": self._options, "_link": None, "_ends": {}, "_frozen": None, "_away_since": 0.0}

    def _opened(self) -> TapeLink:
        if self._link is None:
            self._link = TapeLink(self._options)
        return self._link

    def initialOffset(self) -> TapeOffsets:  # noqa: N802
        """See DataSourceStreamReader."""
        with spark_errors(queue=self._options.queue):
            link = self._opened()
            return TapesDone(link.tapes.name, _begin(self._options, link)).offsets()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Admission control. Spark knows no limit in entries; this one comes back to `latestOffset`."""
        most = self._options.batch_entries
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: TapeOffsets, limit: ReadLimit) -> TapeOffsets:  # noqa: N802
        """See DataSourceStreamReader. Waits for news for PLAN_SECONDS."""
        with spark_errors(queue=self._options.queue):
            link = self._opened()
            begin = TapesDone.of(start, link.tapes.name)
            ends = self._look(link)
            if self._frozen is None and all(begin.done.get(one, 0) >= end for one, end in ends.items()):
                link.call(link.tapes.news(ends, PLAN_SECONDS))
                ends = self._look(link)
            most = None if isinstance(limit, ReadAllAvailable) else self._options.batch_entries
            return self._advanced(link, begin, admitted(begin.done, ends, most)).offsets()

    def _look(self, link: TapeLink) -> dict[str, int]:
        """Where the tapes end; for a frozen stream, no later than where they did. As it was, while nobody can say: a stream
        outlasts a change of leader or a restarted store. Raises Unavailable or LogUnavailable after AWAY_SECONDS of that."""
        try:
            link.call(link.tapes.look(LOOK_SECONDS))
            self._ends = link.call(link.tapes.ends())
            self._away_since = 0.0
        except TemporaryError as error:
            if not self._away_since:
                self._away_since = time.monotonic()
                log.warning("where the tapes of %s end can't be asked now, trying again: %s", self._options.queue, error)
            if time.monotonic() - self._away_since > AWAY_SECONDS:
                raise
        if self._frozen is None:
            return self._ends
        return {exchange: end for exchange, end in self._frozen.items() if exchange in self._ends}

    def _advanced(self, link: TapeLink, begin: TapesDone, reach: Mapping[str, int]) -> TapesDone:
        """An offset is never behind the one before it. A tape that has expired altogether leaves it."""
        done = {exchange: max(entry, begin.done.get(exchange, 0)) for exchange, entry in reach.items()}
        for exchange in begin.done.keys() - done.keys():
            if exchange in link.tapes.tapes:
                done[exchange] = begin.done[exchange]
            elif exchange not in begin.ended:
                expired(self._options, exchange, begin.done[exchange], begin.done[exchange] + 1)
        over = {one for one, tape in link.tapes.tapes.items() if not tape.is_open and one not in link.tapes.live}
        ended = {one: True for one in over if one in done and done[one] >= self._ends.get(one, 0)}
        return TapesDone(begin.tapes, done, ended)

    def reportLatestOffset(self) -> TapeOffsets | None:  # noqa: N802
        """How far the tapes went at the last look, for the query's progress."""
        return TapesDone(self._link.tapes.name, self._ends).offsets() if self._link is not None and self._ends else None

    def partitions(self, start: TapeOffsets, end: TapeOffsets) -> Sequence[InputPartition]:
        """See DataSourceStreamReader."""
        with spark_errors(queue=self._options.queue):
            name = self._opened().tapes.name
            begin, reach = TapesDone.of(start, name), TapesDone.of(end, name)
            return [TapePartition(name, part) for part in ranges(begin.done, reach.done, self._options.partition_entries)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        assert isinstance(partition, TapePartition)
        return partition.rows(self._options)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """See SupportsTriggerAvailableNow."""
        with spark_errors(queue=self._options.queue):
            link = self._opened()
            link.call(link.tapes.look())
            self._frozen = link.call(link.tapes.ends())

    def commit(self, end: TapeOffsets) -> None:
        """See DataSourceStreamReader: the checkpoint is all there is."""

    def stop(self) -> None:
        """See DataSourceStreamReader. Spark may not call it."""
        if self._link is not None:
            self._link.close()
            self._link = None


class TapeBatchReader(DataSourceReader):
    """What lies between two places, by default all there is."""

    def __init__(self, options: TapeOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """On the driver: where it begins and ends, once for all tasks."""
        options = self._options
        with spark_errors(queue=options.queue), TapeLink(options) as link:
            begin, end = _begin(options, link), link.call(link.tapes.at(options.end))
            parts = ranges(begin, end, options.partition_entries)
            return [TapePartition(link.tapes.name, part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task. Of no partitions Spark makes one that is none of ours."""
        return partition.rows(self._options) if isinstance(partition, TapePartition) else iter(())

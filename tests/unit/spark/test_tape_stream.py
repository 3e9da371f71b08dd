"""How a stream over tapes plans while tapes come, end and expire, and while nobody can say where they end.

Not covered: reading, and what stores and the GCM answer (tests/spark/test_tape_source.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from roq.errors import LogUnavailable, RoqError
from roq.spark import tape_source
from roq.spark.tape_options import tape_options
from roq.spark.tape_reading import TapeLink
from roq.spark.tape_source import TapePartition, TapeStreamReader

ALL = ReadAllAvailable()


class KnownTapes:
    """The twin of QueueTapes: what stores and the GCM would say. ending: by Exchange. closed: nobody writes these any more."""

    def __init__(self, **ending: int) -> None:
        self.name, self.ending, self.closed = "0f", ending, set[str]()
        self.failure: RoqError | None = None
        self.waits = 0

    @property
    def tapes(self) -> Mapping[str, SimpleNamespace]:
        return {exchange: SimpleNamespace(is_open=exchange not in self.closed) for exchange in self.ending}

    @property
    def live(self) -> set[str]:
        return self.ending.keys() - self.closed

    async def look(self, older_than: float = 0.0) -> None:
        if self.failure is not None:
            raise self.failure

    async def ends(self) -> dict[str, int]:
        return dict(self.ending)

    async def at(self, place: object) -> dict[str, int]:
        return dict.fromkeys(self.ending, 0) if place == "earliest" else dict(self.ending)

    async def news(self, ends: dict[str, int], seconds: float) -> None:
        self.waits += 1

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)


def stream(tapes: KnownTapes, **options: str) -> TapeStreamReader:
    given = {"cluster": "zk", "queue": "orders", "startingPosition": "earliest", **options}
    reader = TapeStreamReader(tape_options(given, "latest"))
    reader._link = cast(TapeLink, SimpleNamespace(tapes=tapes, call=tapes.call))
    return reader


def done(offsets: dict[str, Any]) -> dict[str, int]:
    return dict(offsets["done"])


def test_tapes_come_end_and_expire() -> None:
    tapes = KnownTapes(a=10)
    reader = stream(tapes)
    start = reader.initialOffset()
    assert done(start) == {"a": 0}
    first = reader.latestOffset(start, ALL)
    assert (done(first), tapes.waits) == ({"a": 10}, 0)
    assert reader.latestOffset(first, ALL) == first
    assert tapes.waits == 1, "for more"
    tapes.ending = {"a": 8, "b": 3}
    second = reader.latestOffset(first, ALL)
    assert done(second) == {"a": 10, "b": 3}, "a store that lags behind takes nothing back"
    tapes.ending, tapes.closed = {"a": 12, "b": 5}, {"a"}
    third = reader.latestOffset(second, ALL)
    assert (done(third), third["ended"]) == ({"a": 12, "b": 5}, {"a": True})
    parts = [part.part for part in reader.partitions(second, third) if isinstance(part, TapePartition)]
    assert parts == [("a", 10, 12), ("b", 3, 5)]
    del tapes.ending["a"]
    assert done(reader.latestOffset(third, ALL)) == {"b": 5}, "all of it was read"
    assert reader.reportLatestOffset() == {"tapes": "0f", "done": {"b": 5}, "ended": {}}


def test_a_tape_that_expires_unread_is_told() -> None:
    tapes = KnownTapes(a=10, b=10)
    strict, lenient = stream(tapes), stream(tapes, failOnDataLoss="false")
    start = strict.initialOffset()
    del tapes.ending["a"]
    with pytest.raises(PySparkException, match=r"\[ROQ_DATA_LOST\] entries 1 to 1 of the tape of Exchange a have expired"):
        strict.latestOffset(start, ALL)
    assert done(lenient.latestOffset(start, ALL)) == {"b": 10}


def test_a_batch_is_bounded_and_a_frozen_stream_ends() -> None:
    tapes = KnownTapes(a=10, b=2)
    reader = stream(tapes, maxEntriesPerTrigger="5")
    limit, place = reader.getDefaultReadLimit(), reader.initialOffset()
    assert isinstance(limit, ReadMaxRows)
    reader.prepareForTriggerAvailableNow()
    tapes.ending = {"a": 100, "b": 100, "c": 100}
    steps = []
    while (following := reader.latestOffset(place, limit)) != place:
        steps.append(done(following))
        place = following
    assert steps == [{"a": 3, "b": 2}, {"a": 8, "b": 2}, {"a": 10, "b": 2}]
    assert tapes.waits == 0
    assert done(stream(tapes, maxEntriesPerTrigger="5").latestOffset(place, ALL)) == {"a": 100, "b": 100, "c": 100}


def test_a_stream_outlasts_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = KnownTapes(a=10)
    reader = stream(tapes)
    start = reader.initialOffset()
    tapes.failure = LogUnavailable("no store answers")
    assert reader.latestOffset(start, ALL) == start, "nobody has said yet where it ends"
    tapes.failure = None
    first = reader.latestOffset(start, ALL)
    tapes.failure, tapes.ending = LogUnavailable("no store answers"), {"a": 20}
    assert reader.latestOffset(first, ALL) == first
    monkeypatch.setattr(tape_source, "AWAY_SECONDS", 0.0)
    with pytest.raises(PySparkException, match=r"\[ROQ_LOG_UNAVAILABLE\] no store answers"):
        reader.latestOffset(first, ALL)
    tapes.failure = None
    assert done(reader.latestOffset(first, ALL)) == {"a": 20}


def test_a_queue_that_was_made_anew_is_another_one() -> None:
    tapes = KnownTapes(a=10)
    start = stream(tapes).initialOffset()
    tapes.name = "f0"
    reader = stream(tapes)
    with pytest.raises(PySparkException, match=r"\[ROQ_INVALID_POSITION\] Spark's checkpoint is of another queue"):
        reader.latestOffset(start, ALL)
    with pytest.raises(PySparkException, match=r"\[ROQ_INVALID_POSITION\]"):
        reader.partitions(start, start)

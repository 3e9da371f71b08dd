"""How many messages follow on a tape, and on all of them behind a position; what stores know is a list here."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from roq.coordination.locate import GcmClient
from roq.errors import LogUnavailable, RoqError
from roq.groups.feed import FeedReader
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.log.replicated.reader import Entry
from roq.pubsub import tape_list
from roq.pubsub.tape import LATELY_SECONDS, Tape
from roq.pubsub.tape_looks import FoundTapes
from roq.wire import gcm, zmtp
from roq.wire.assignment import to_json
from roq.wire.frame import encode_data
from roq.wire.recording import Record, encode_entry
from roq.wire.work_queue import GroupSource

NOBODY: Any = None


def entry(before: int, count: int) -> bytes:
    frame = encode_data(b"t", 7, 1, before + 1, 0, 0, [b"x"] * count, 0)
    return encode_entry(1, [zmtp.frame(frame)], before)


class ListTape(Tape):
    """Its entries have so many messages each; those before `trimmed` are gone."""

    def __init__(self, *counts: int, exchange: str = "e", trimmed: int = 0) -> None:
        segment = SegmentMetadata("s", trimmed + 1, SegmentState.OPEN, (Fragment(trimmed + 1, ("h",)),), -1)
        meta = LogMeta(segments=(segment,), trimmed=trimmed)
        self.view = gcm.TapeView(f"tape.t.{exchange}", exchange, True, to_json(meta))
        super().__init__(self.view, NOBODY)
        self.entries = [entry(sum(counts[:place]), count) for place, count in enumerate(counts)]
        self.asked = 0
        self.failing: RoqError | None = None

    async def confirmed_end(self, meta: LogMeta) -> int:
        self.asked += 1
        if self.failing is not None:
            raise self.failing
        return len(self.entries)

    async def read_from(
        self, meta: LogMeta, after: int, wait_seconds: float = 0.0, *, ask_all: bool = False, last: int = 0
    ) -> list[Entry]:
        return list(enumerate(self.entries, 1))[after:]


@pytest.mark.parametrize(("done", "behind"), [(0, 10), (1, 7), (2, 5), (3, 0)])
async def test_what_follows_is_counted(done: int, behind: int) -> None:
    tape = ListTape(3, 2, 5)
    assert await tape.messages_behind(done, tape.metadata) == behind
    tape.ahead.append((done + 1, tape.entries[min(done, 2)]))
    assert await tape.messages_behind(done, tape.metadata) == behind


async def test_what_was_trimmed_does_not_count() -> None:
    tape = ListTape(3, 2, 5, trimmed=2)
    assert await tape.messages_behind(0, tape.metadata) == 5
    assert await tape.messages_behind(0, msgspec.structs.replace(tape.metadata, trimmed=1)) == 7, "as it is said"


async def test_nobody_is_asked_at_the_end_while_that_was_seen_lately() -> None:
    tape = ListTape(3, 2)
    tape.done, tape.looked = 2, time.monotonic()
    assert (await tape.messages_behind(2, tape.metadata), tape.asked) == (0, 0)
    assert (await tape.messages_behind(1, tape.metadata), tape.asked) == (2, 1), "what was read is not taken yet"
    tape.looked -= LATELY_SECONDS + 1
    tape.entries.append(entry(5, 4))
    assert (await tape.messages_behind(2, tape.metadata), tape.asked) == (4, 2)


async def test_of_an_older_program_it_is_not_known() -> None:
    tape = ListTape(3, 2)
    tape.entries[0] = b"\x01" + bytes(8)
    assert await tape.messages_behind(0, tape.metadata) == -1
    assert await tape.messages_behind(1, tape.metadata) == 2


def reader_of(tapes: list[ListTape], monkeypatch: pytest.MonkeyPatch) -> FeedReader:
    """One that reads the first two of them, while the GCM knows of all."""

    async def ask(since: float | None = None) -> FoundTapes:
        return FoundTapes(gcm.Tapes("t", Record(), True, tuple(tape.view for tape in tapes), {}), 0.0, 0)

    busy = SimpleNamespace(position=None, rests=lambda: False, has_enough=lambda: False)
    reader = FeedReader(GcmClient("127.0.0.1:1"), GroupSource("q"), busy, lambda lost: None)
    assert reader._past is not None
    monkeypatch.setattr(reader._past.tapes, "ask", ask)
    monkeypatch.setattr(tape_list, "Tape", lambda view, stores, of_queue: next(tape for tape in tapes if tape.view is view))
    reader._past.tapes.reading.update({tape.exchange.id: tape for tape in tapes[:2]})
    return reader


async def test_who_stands_still_counts_what_came_in_segments_and_on_tapes_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tapes = [ListTape(3, 2, exchange="a"), ListTape(4, exchange="b"), ListTape(6, exchange="new")]
    reader = reader_of(tapes, monkeypatch)
    assert await reader.lag() == 15
    tapes[0].view = msgspec.structs.replace(tapes[0].view, meta=to_json(msgspec.structs.replace(tapes[0].metadata, trimmed=1)))
    assert await reader.lag() == 12, "what is known now, not what was read last"
    for tape in tapes[:2]:
        tape.done, tape.looked = len(tape.entries), time.monotonic()
    reader._tapes, reader._done = "t", {"a": 2, "b": 1}
    assert await reader.lag() == 0, "nobody is asked"


async def test_all_tapes_of_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = [ListTape(3, 2, exchange="a"), ListTape(4, exchange="b"), ListTape(exchange="c")]
    reader = reader_of(tapes, monkeypatch)
    assert await reader.lag() == 9
    reader._tapes, reader._done = "t", {"a": 1, "gone": 8}
    assert await reader.lag() == 6
    tapes[0].entries[1] = b"\x01" + bytes(8)
    assert await reader.lag() == -1, "some of it is not"
    tapes[1].failing = LogUnavailable("no store answers")
    with pytest.raises(LogUnavailable):
        await reader.lag()

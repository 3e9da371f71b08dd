"""Tapes as they are read when a producer is opened behind a crash: all at once, and for as long as they get on.

Not covered: what is found on them (test_producers.py).
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from gcm.producers import grant, keep_in, open_record
from roq.coordination.locate import GcmClient
from roq.errors import DeadlineExceeded, LogTrimmed
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.log.replicated.reader import Entry
from roq.log.replicated.stores import Stores
from roq.pubsub import producer_tail
from roq.pubsub.producer import Producer
from roq.pubsub.producer_sender import ProducerSender
from roq.pubsub.producer_tail import TAPES_AT_ONCE, ProducerTail
from roq.pubsub.tape import Tape
from roq.wire import gcm, zmtp
from roq.wire.assignment import to_json
from roq.wire.frame import encode_data
from roq.wire.gcm import Done
from roq.wire.producers import KeepProducer, OpenProducer, ProducerGrant
from roq.wire.recording import Record, encode_entry

P = 0x1122334455667788
PATIENCE_SECONDS = 0.4
OPEN_SEGMENT = SegmentMetadata("s", 1, SegmentState.OPEN, (Fragment(1, ("h",)),), -1)


def crashed() -> ProducerGrant:
    """Of a name whose life before has kept nothing but its beginning."""
    record = keep_in(
        open_record(None, OpenProducer("q", "p", "one"), P, 0.0), KeepProducer("q", "p", "one", 1, 0, True, 1), 0.0
    )
    return grant(open_record(record, OpenProducer("q", "p", "two"), P, 0.0))


class Gcm:
    """Of a queue with these tapes, and a producer that crashed."""

    def __init__(self, *exchanges: str) -> None:
        meta = to_json(LogMeta(segments=(OPEN_SEGMENT,)))
        views = tuple(gcm.TapeView(f"tape.t.{one}", one, True, meta) for one in exchanges)
        self.tapes = gcm.Tapes("t", Record(), True, views, {})

    async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> Any:
        match request:
            case OpenProducer():
                return crashed()
            case KeepProducer():
                return Done()
        return self.tapes


class OneByOne(Tape):
    """`count` entries of one message each, from `first` on, of which a read gives the next one, after `seconds`."""

    first, count, seconds = 1, 1, 0.0

    async def read_from(
        self, meta: LogMeta, after: int, wait_seconds: float = 0.0, *, ask_all: bool = False, last: int = 0
    ) -> list[Entry]:
        if after >= self.count:
            return []
        await asyncio.sleep(self.seconds)
        return [(after + 1, encode_entry(1, [zmtp.frame(encode_data(b"t", P, 1, self.first + after, 0, 0, [b"x"], 0))]))]

    async def is_nothing_at(self, meta: LogMeta, position: int) -> bool:
        return True


async def begun(monkeypatch: pytest.MonkeyPatch, tape: type[Tape], *exchanges: str) -> ProducerTail:
    """What is found when the name is opened, if nothing is waited for longer than PATIENCE_SECONDS."""
    monkeypatch.setattr(producer_tail, "Tape", tape)
    sender = ProducerSender(lambda: None, lambda: None, lambda: 0, lambda: None)
    made = Producer(cast(GcmClient, Gcm(*exchanges)), "q", "p", lambda: 0, lambda error: None)
    await made.open(sender, 1.0)
    try:
        async with asyncio.timeout(60):
            return await made.begin(sender, PATIENCE_SECONDS)
    finally:
        made.stop()


async def test_it_reads_for_as_long_as_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(OneByOne):
        count, seconds = 12, PATIENCE_SECONDS / 6

    assert (await begun(monkeypatch, Slow, "a")).number == 12


async def test_it_gives_up_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(OneByOne):
        count, seconds = 2, 60.0

    with pytest.raises(DeadlineExceeded, match=r"nothing more of it could be read for 0\.4 s: stores may be away; try again"):
        await begun(monkeypatch, Silent, "a")


async def test_tapes_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would wait for each other for ever; of more than TAPES_AT_ONCE the rest comes behind them."""
    reading, together, most = set[str](), asyncio.Event(), 0

    class Together(OneByOne):
        def __init__(self, view: gcm.TapeView, stores: Stores, of_queue: tuple[str, str] = ("", "")) -> None:
            super().__init__(view, stores, of_queue)
            self.first = int(view.exchange)

        async def read_from(self, meta: LogMeta, after: int, *args: Any, **options: Any) -> list[Entry]:
            nonlocal most
            reading.add(self.exchange.id)
            most = max(most, len(reading))
            if len(reading) == TAPES_AT_ONCE:
                together.set()
            await together.wait()
            return await super().read_from(meta, after, *args, **options)

        async def is_nothing_at(self, meta: LogMeta, position: int) -> bool:
            reading.discard(self.exchange.id)
            return True

    tapes = TAPES_AT_ONCE + 3
    assert (await begun(monkeypatch, Together, *map(str, range(1, tapes + 1)))).number == tapes
    assert most == TAPES_AT_ONCE


async def test_what_is_trimmed_meanwhile_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = [LogTrimmed("the first entries have expired")]

    class Trimmed(OneByOne):
        count = 2

        async def read_from(self, meta: LogMeta, after: int, *args: Any, **options: Any) -> list[Entry]:
            if trimmed:
                raise trimmed.pop()
            return await super().read_from(meta, after, *args, **options)

    assert (await begun(monkeypatch, Trimmed, "a")).number == 2
    assert trimmed == []

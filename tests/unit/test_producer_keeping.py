"""What a producer keeps of itself at the GCM, and when: a next life has to look behind it, and nowhere else.

Not covered: what the GCM makes of it (test_producers.py), the tapes (test_producer_tail.py).
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from gcm.producers import ProducerRecord, grant, keep_in, open_record
from roq.coordination.locate import GcmClient
from roq.errors import AccessDenied, CardRevoked, ProducerFenced, QueueNotFound, RoqError, Unavailable
from roq.pubsub.producer import Producer
from roq.pubsub.producer_sender import ProducerSender
from roq.wire.gcm import Done
from roq.wire.producers import KeepProducer, OpenProducer

P = 7


class Confirmed(ProducerSender):
    """Everything up to `confirmed` is stored."""

    confirmed = 0

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: None, lambda: 0, lambda: None)
        self.left = "A"


class KeepingGcm:
    """Keeps as the real one does, at times that it is given. lost: the next answer is; refuses: with that."""

    def __init__(self) -> None:
        self.now, self.lost, self.seals = 1.0, False, 0
        self.refuses: RoqError | None = None
        self.record: ProducerRecord | None = None

    async def request(self, request: msgspec.Struct, expect: type[Any], timeout_seconds: float) -> Any:
        if isinstance(request, OpenProducer):
            self.record, self.seals = open_record(self.record, request, P, self.now), self.seals + 1
            return msgspec.structs.replace(grant(self.record), proof=b"seal %d" % self.seals)
        assert isinstance(request, KeepProducer)
        if self.refuses is not None:
            raise self.refuses
        self.record = keep_in(self.record, request, self.now)
        if self.lost:
            raise Unavailable("the answer was lost")
        return Done()

    @property
    def since(self) -> float:
        """From when on a next life would look."""
        assert self.record is not None
        return self.record.since


class Keeping:
    """A producer that keeps when it is told to. sent: that many messages."""

    def __init__(self) -> None:
        self.gcm, self.sender, self.sent = KeepingGcm(), Confirmed(), 0
        self.producer = Producer(cast(GcmClient, self.gcm), "q", "p", lambda: self.sent, lambda error: None)

    async def open(self) -> None:
        await self.producer.open(self.sender, 1.0)
        await self.producer.begin(self.sender, 1.0)

    async def turn(self, now: float, sent: int, stored: int, *, lost: bool = False) -> None:
        """At that time of the GCM it keeps that so many are stored, if it thinks that worth it, and then has sent so many."""
        self.gcm.now, self.gcm.lost, self.sender.confirmed = now, lost, stored
        await self.producer._look(self.sender)
        self.sent = sent


async def test_a_next_life_looks_from_before_what_was_sent_when_an_answer_was_lost() -> None:
    made = Keeping()
    try:
        await made.open()
        made.sent = 100  # at 2
        await made.turn(10.0, 200, 50, lost=True)  # only the GCM knows of this turn
        await made.turn(20.0, 300, 60)
        assert made.gcm.since == 1.0, "61 was sent at 2"
        await made.turn(21.0, 300, 200)
        assert made.gcm.since == 20.0
    finally:
        made.producer.stop()


async def test_a_next_life_looks_from_before_what_was_sent_while_confirmations_are_late() -> None:
    made = Keeping()
    try:
        await made.open()
        made.sent = 100
        await made.turn(10.0, 200, 90)
        await made.turn(20.0, 200, 95)  # 101 to 200 were sent from 10 on
        await made.turn(30.0, 200, 150)
        assert made.gcm.since == 10.0, "151 was sent at 10; and no earlier than it has to"
        made.producer.doubt(made.sender)  # so it asks, whatever is confirmed
        made.sent = 300
        await made.turn(40.0, 300, 160)
        assert made.gcm.since == 10.0
        await made.turn(50.0, 300, 250)
        assert made.gcm.since == 10.0, "251 was sent before 40"
        await made.turn(60.0, 300, 300)
        assert made.gcm.since == 40.0
    finally:
        made.producer.stop()


async def test_a_path_that_broke_is_followed_by_one_look_for_another_seal() -> None:
    """An Exchange that refuses it ends the connection, as one that dies."""
    made = Keeping()
    try:
        await made.open()
        for replays, proof in ((0, b"seal 1"), (1, b"seal 2"), (1, b"seal 2"), (7, b"seal 3")):
            made.sender.replays = replays
            await made.producer._look_at_proof(made.sender)
            assert made.sender.proof == proof
        made.gcm.record = open_record(made.gcm.record, OpenProducer("q", "p", "another"), P, 2.0)
        made.sender.replays = 8
        with pytest.raises(ProducerFenced):
            await made.producer._look_at_proof(made.sender)
    finally:
        made.producer.stop()


async def test_who_is_refused_for_a_while_keeps_trying_and_whose_card_was_revoked_does_not() -> None:
    made = Keeping()
    try:
        await made.open()
        made.gcm.refuses = AccessDenied("the card is not valid yet, by this clock")
        await made.turn(10.0, 100, 50)
        made.gcm.refuses = None
        await made.turn(11.0, 100, 50)
        assert made.producer._kept == 50
        made.gcm.refuses = CardRevoked("the card of alice was revoked")
        with pytest.raises(CardRevoked):
            await made.turn(12.0, 200, 100)
    finally:
        made.producer.stop()


@pytest.mark.parametrize("error", [QueueNotFound("no queue 'q'"), AccessDenied("not allowed"), Unavailable("no GCM leads")])
async def test_a_close_that_is_not_kept_is_no_failure(error: RoqError) -> None:
    """Everything is stored: the next one looks at the tapes."""
    made = Keeping()
    await made.open()
    made.gcm.refuses = error
    await made.producer.close(made.sender, 1.0, settled=True)


async def test_a_close_that_was_overtaken_is_one() -> None:
    made = Keeping()
    await made.open()
    made.gcm.refuses = ProducerFenced("opened since by somebody else")
    with pytest.raises(ProducerFenced):
        await made.producer.close(made.sender, 1.0, settled=True)

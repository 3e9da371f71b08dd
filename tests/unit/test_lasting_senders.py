"""Senders with a lasting id are remembered long after the others are forgotten (roq/workqueue/records.py)."""

from __future__ import annotations

from roq.workqueue.records import LASTING_IDLE_MS, SENDER_IDLE_MS, Senders, Use, lasting

JOB, CLIENT, OTHER = lasting(0x1234_5678_9ABC_DEF0), 0x1234_5678_9ABC_DEF0, 7


def test_a_lasting_sender_outlives_an_hour_of_silence() -> None:
    senders = Senders()
    for sender in (JOB, CLIENT):
        assert senders.use(sender, 1 << 32, 0) is Use.NEW
    later = 2 * SENDER_IDLE_MS
    senders.use(OTHER, 1, later)
    assert senders.use(JOB, 1 << 32, later) is Use.KNOWN
    assert senders.use(CLIENT, 1 << 32, later) is Use.NEW, "others are forgotten"


def test_even_that_ends() -> None:
    senders = Senders()
    senders.use(JOB, 1, 0)
    later = 2 * LASTING_IDLE_MS
    senders.use(OTHER, 1, later)
    assert senders.use(JOB, 1, later) is Use.NEW


def test_lasting_ids_are_64_bits_and_differ() -> None:
    assert JOB >> 64 == 0
    assert len({lasting(number) for number in range(1000)}) == 1000

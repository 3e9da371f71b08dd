"""Numbers of producers and instances: what is new, what was seen, what was forgotten."""

from __future__ import annotations

import pytest

from roq.workqueue import records as module
from roq.workqueue.records import GAPS_MAX, SENDER_IDLE_MS, Sender, Senders, Use


def test_numbers_may_come_in_any_order() -> None:
    sender = Sender()
    assert [sender.use(number) for number in (5, 2, 5, 3, 1, 4, 2, 6)] == [
        Use.NEW,
        Use.NEW,
        Use.KNOWN,
        Use.NEW,
        Use.NEW,
        Use.NEW,
        Use.KNOWN,
        Use.NEW,
    ]
    assert sender.missing == []
    for number in range(8, 8 + 2 * GAPS_MAX + 2, 2):
        assert sender.use(number) is Use.NEW
    assert len(sender.missing) == GAPS_MAX
    assert sender.use(7) is Use.FORGOTTEN, "the oldest gap was given up"
    assert sender.use(9) is Use.NEW
    assert sender.use(9) is Use.KNOWN


def test_idle_senders_are_forgotten_after_their_time() -> None:
    senders = Senders()
    assert senders.use(1, 1, 0) is Use.NEW
    senders.use(2, 1, SENDER_IDLE_MS)
    assert senders.use(1, 1, SENDER_IDLE_MS) is Use.KNOWN
    senders.use(3, 1, 3 * SENDER_IDLE_MS)
    assert set(senders.known) == {3}
    assert senders.use(1, 7, 3 * SENDER_IDLE_MS) is Use.NEW


def test_the_longest_idle_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENDERS_MAX", 16)
    senders = Senders()
    for id in range(1, 100):
        senders.use(id, 1, id)
    assert len(senders.known) <= 16
    assert 99 in senders.known
    assert 50 not in senders.known


def test_asking_whether_a_number_was_used_uses_none() -> None:
    sender = Sender()
    for number in (1, 2, 5, 9):
        sender.use(number)
    for _ in range(2):
        assert [number for number in range(12) if sender.knows(number)] == [1, 2, 5, 9]
    sender.floor = 2
    assert not sender.knows(1)

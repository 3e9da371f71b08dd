"""Quotas of cards: what is signed, and what an Exchange lets through."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import CallError
from roq.pubsub.exchange import publish_quota
from roq.pubsub.exchange.publish_quota import BURST_SECONDS, PublishQuotas
from roq.wire.card import PUBLISH_RATE_MIN, Card, CardRole, Quota, new_card

RATE = 200_000
ALLOWED = Quota(0, RATE)


def card(name: str = "alice", quota: Quota = ALLOWED) -> Card:
    return new_card(name, CardRole.CLIENT, bytes(32), (), 0.0, 1e12, quota=quota)


@pytest.mark.parametrize("quota", [Quota(-1), Quota(0, -1), Quota(0, PUBLISH_RATE_MIN - 1)])
def test_no_card_has_a_quota_that_can_not_be_meant(quota: Quota) -> None:
    with pytest.raises(CallError, match="a quota is a number of connections"):
        card(quota=quota)


def test_cards_without_a_quota_are_read() -> None:
    """They were signed before there were any, and who does not know them reads what it knows."""
    with_quota = card(quota=Quota(7, RATE))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(with_quota))
    assert msgspec.convert(fields[:-1], Card).quota == Quota()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(with_quota), type=Card) == with_quota


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500_000)), min_size=1, max_size=50))
def test_whoever_waits_as_told_never_gets_more_than_the_rate_and_a_burst(reads: list[tuple[float, int]]) -> None:
    """reads: seconds that pass by themselves, bytes."""
    quotas, now, taken = PublishQuotas(), 1000.0, 0
    began = now
    for idle, size in reads:
        now += idle
        taken += size
        now += quotas.spend(card(), size, now)
        assert taken <= RATE * (now - began + BURST_SECONDS) + 1e-3
    assert quotas.spend(card("bob"), 1, now) == 0.0, "others have their own"
    assert quotas.spend(card("free", Quota()), 10**9, now) == 0.0


def test_a_rate_that_is_kept_waits_for_nothing() -> None:
    quotas = PublishQuotas()
    assert [quotas.spend(card(), RATE // 10, 1000.0 + tenth / 10) for tenth in range(100)] == [0.0] * 100


def test_names_that_have_paid_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_quota, "NAMES_MAX", 3)
    quotas = PublishQuotas()
    for number in range(20):
        quotas.spend(card(str(number)), 1, 1000.0 + 10 * number)
        assert len(quotas._due) <= 3

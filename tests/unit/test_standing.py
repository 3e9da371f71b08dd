"""How a subscriber stands with its Monitor: when it is too slow, when messages may have passed it by."""

from __future__ import annotations

import pytest

from roq.pubsub.standing import SLOW_SECONDS, Standing
from roq.wire import monitor as wire
from roq.wire.assignment import Overflow


def standing(overflow: Overflow = Overflow.BLOCK) -> Standing:
    made = Standing(0.0)
    made.welcome(wire.SubscriberWelcome(1, 1, (), overflow, 4096))
    return made


@pytest.mark.parametrize(("overflow", "slow"), [(Overflow.BLOCK, True), (Overflow.DROP, False)])
def test_it_is_too_slow_when_nothing_was_taken_for_long_while_others_wait(overflow: Overflow, slow: bool) -> None:
    one = standing(overflow)
    assert not one.is_too_slow(1, True, 1.0)
    assert not one.is_too_slow(1, True, 1.0 + SLOW_SECONDS)
    assert one.is_too_slow(1, True, 1.1 + SLOW_SECONDS) is slow
    assert not one.is_too_slow(2, True, 1.2 + SLOW_SECONDS), "it took one"
    assert not one.is_too_slow(2, False, 2.0 + 2 * SLOW_SECONDS), "there is room"
    assert not one.is_too_slow(2, True, 2.1 + 2 * SLOW_SECONDS)


def test_what_passed_by_did_so_since_it_was_well_last() -> None:
    one = standing()
    assert one.heard(wire.Heard(1, False, answers=5.0, passed_by=2), False) is None, "it was not for it"
    assert one.heard(wire.Heard(1, True, answers=6.0, passed_by=2), True) is None
    assert one.heard(wire.Heard(1, True, answers=7.0, passed_by=3), True) == 6.0
    assert one.heard(wire.Heard(1, True, answers=8.0, passed_by=3), True) is None
    assert one.heard(wire.Heard(1, True), True) is None, "it answers nothing"
    assert one.was_ready
    one.welcome(wire.SubscriberWelcome(2, 1, (), Overflow.BLOCK, 4096))
    assert one.heard(wire.Heard(2, True, answers=9.0, passed_by=1), True) == 8.0, "another Monitor counts from 0"

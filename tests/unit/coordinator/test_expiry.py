"""Deadlines of sessions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roq.coordinator.sessions import Expiry, negotiated

TICK = 0.5


def looks(expiry: Expiry, since: float, until: float) -> dict[int, float]:
    """Look in every tick: when each session was over."""
    over: dict[int, float] = {}
    now = since
    while now < until:
        now += TICK
        for session in expiry.look(now):
            over[session] = now
    return over


def test_a_time_out_is_kept_within_limits() -> None:
    assert [negotiated(wanted, 1000, 60_000) for wanted in (-5, 0, 999, 1000, 4000, 60_000, 10**9)] == [
        1000,
        1000,
        1000,
        1000,
        4000,
        60_000,
        60_000,
    ]


@given(st.floats(0.1, 20.0), st.floats(0.0, 5.0))
def test_a_silent_session_lives_its_time_and_at_most_two_ticks_more(seconds: float, later: float) -> None:
    expiry = Expiry(TICK, 100.0)
    looks(expiry, 100.0, 100.0 + later)
    at = 100.0 + later
    expiry.touch(7, seconds, at)
    over = looks(expiry, at, at + seconds + 5)
    assert seconds <= over[7] - at <= seconds + 2 * TICK


def test_a_session_that_is_heard_of_lives_on_and_one_that_was_closed_is_forgotten() -> None:
    expiry = Expiry(TICK, 0.0)
    expiry.touch(1, 2.0, 0.0)
    expiry.touch(2, 2.0, 0.0)
    expiry.touch(3, 2.0, 0.0)
    now = 0.0
    while now < 10.0:
        expiry.touch(1, 2.0, now)
        now += TICK
        over = expiry.look(now)
        assert 1 not in over
        if now == 1.0:
            expiry.forget(3)
            expiry.forget(3)
        assert over == ([2] if now == 2.5 else [])
    assert looks(expiry, now, now + 5) == {1: 12.0}


def test_time_in_which_nothing_ran_does_not_count() -> None:
    expiry = Expiry(TICK, 0.0)
    expiry.touch(1, 2.0, 0.0)
    expiry.touch(2, 2.0, 0.0)
    assert expiry.look(60.0) == []  # stopped, or asleep: they could not be heard
    expiry.touch(1, 2.0, 60.2)
    assert looks(expiry, 60.0, 70.0) == {2: 61.5, 1: 62.5}


def test_a_stand_still_is_noticed_by_whoever_comes_first() -> None:
    expiry = Expiry(TICK, 0.0)
    expiry.touch(1, 2.0, 0.0)
    expiry.touch(2, 2.0, 60.0)
    assert expiry.look(60.1) == []
    assert looks(expiry, 60.1, 70.0) == {1: 61.6, 2: 62.6}

"""Who waits for a task: against a list that is searched for everything, as long as there is anything to choose."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from roq.workqueue.waiters import ENDS_MIN, Key, Waiters

LIMIT = 5


class One(NamedTuple):
    until: int


STEPS = st.lists(st.tuples(st.sampled_from(["add", "take", "remove", "over"]), st.integers(1, 8), st.integers(0, 20)))


@given(STEPS)
def test_a_line_with_ends(steps: list[tuple[str, int, int]]) -> None:
    waiters, line = Waiters[One](LIMIT), list[tuple[Key, One]]()
    for step, nonce, until in steps:
        key = (1, nonce)
        match step:
            case "add" if not waiters.full and key not in waiters:
                waiters.add(key, One(until))
                line.append((key, One(until)))
            case "take" if line:
                assert waiters.first() == line[0][1]
                assert waiters.take() == line.pop(0)
            case "remove":
                assert waiters.remove(key) == dict(line).get(key)
                line = [one for one in line if one[0] != key]
            case "over":
                over = sorted((one for one in line if one[1].until < until), key=lambda one: (one[1].until, one[0]))
                assert waiters.over(until) == over
                line = [one for one in line if one not in over]
        assert list(waiters.items()) == line
        assert waiters.full is (len(line) == LIMIT)
        assert waiters.next_end() == min((one.until for _, one in line), default=None)


def test_ends_of_waits_that_are_over_do_not_pile_up() -> None:
    waiters = Waiters[One](LIMIT)
    for nonce in range(1, 10 * ENDS_MIN):
        waiters.add((1, nonce), One(nonce))
        waiters.take()
    assert len(waiters._ends) <= ENDS_MIN + 2 * LIMIT + 1

"""When leases end, against a plain dict of all of them."""

from __future__ import annotations

import random

import pytest

from roq.workqueue import ready
from roq.workqueue.ready import LeaseEnds, StoredTask


def task(due: int) -> StoredTask:
    return StoredTask(1, 1, 1, b"", 0, 0, due=due)


@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_the_tasks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "ENDS_MIN", 4)
    draw, ends, delivery = random.Random(seed), LeaseEnds(), 0
    leased: dict[int, StoredTask] = {}
    for _ in range(400):
        match draw.randrange(4):
            case 0:
                due, count = draw.randrange(50), draw.randrange(1, 6)
                for number in range(delivery, delivery + count):
                    leased[number] = task(due)
                ends.add(due, delivery, count, leased)
                assert len(ends) <= 2 * len(leased) + 5
                delivery += count + draw.randrange(3)
            case 1 if leased:
                for number in draw.sample(sorted(leased), min(3, len(leased))):
                    del leased[number]
            case 2 if leased:
                number = draw.choice(sorted(leased))
                leased[number].due += draw.randrange(1, 9)
                ends.add(leased[number].due, number, 1, leased)
            case 3:
                now, count = draw.randrange(50), draw.randrange(1, 8)
                over = sorted((one.due, number) for number, one in leased.items() if one.due <= now)
                found = ends.over(now, count, leased)
                assert len(found) == min(count, len(over))
                assert sorted((due, number) for number, due in found.items()) == over[:count]
                assert ends.over(now, count, leased) == found, "they are over when that was applied"
        assert ends.next(leased) == min((one.due for one in leased.values()), default=None)
        assert all(ends.covers(number, one.due) for number, one in leased.items())


def test_a_run_that_is_added_when_the_old_ones_are_cleared_away_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "ENDS_MIN", 4)
    ends = LeaseEnds()
    for number in range(5):
        ends.add(7, number, 1, {number: task(7)})
    leased = {9: task(3), 10: task(3)}
    ends.add(3, 9, 2, leased)
    assert (ends.next(leased), ends.over(3, 5, leased)) == (3, {9: 3, 10: 3})

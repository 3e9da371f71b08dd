"""Subscribers that go on at a position: which path was before it, which one is late, which one nobody knows of.

Not covered: every way of reading (tests/model/test_tapes.py).
"""

from __future__ import annotations

import pytest

from tests.unit.test_order import HOLD, Subscriber


def begun_amid() -> Subscriber:
    """Of path 1 there is only its end: everything else of it was before the position."""
    one = Subscriber()
    one.machine.amid = True
    assert one.fin(1, 10) == []
    return one


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "broken"])
def test_a_path_between_of_which_there_is_nothing_was_before_the_position(*, finished: bool) -> None:
    one = begun_amid()
    one.opens(3, 25, "B", finished)
    assert one.data(3, "a", 26, previous=25, index=15) == ["a26"]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "broken"])
def test_once_the_past_was_read_nobody_knows_of_such_a_path(*, finished: bool) -> None:
    one = begun_amid()
    one.machine.live()
    one.opens(3, 25, "B", finished)
    assert one.data(3, "a", 26, previous=25, index=15) == ["lost any of a11..25", "a26"]


def test_what_waited_when_the_past_was_over_is_of_the_past() -> None:
    one = begun_amid()
    one.attached.add("B")
    one.opens(3, 25, "B")
    one.machine.live()
    assert one.data(3, "a", 26, previous=25, index=15) == []
    assert one.expire(HOLD + 1) == ["a26"]


def test_what_comes_late_of_a_path_before_one_that_was_entered_is_no_loss() -> None:
    one = Subscriber()
    one.machine.amid = True
    one.opens(1, 0)
    assert one.data(2, "a", 11, previous=10, index=10) == ["a11"], "its beginning was before the position"
    assert one.data(1, "a", 10, previous=9, index=9) == []
    assert one.machine.late == 1


def test_who_subscribed_just_now_is_told_of_it() -> None:
    one = Subscriber("A", "B")
    one.data(2, "a", 11, previous=10, index=10)
    assert one.data(1, "a", 10, previous=9, index=9) == ["lost 1 of a10..10"]


@pytest.mark.parametrize("missed", ["nothing", "doubted", "attached anew"])
def test_a_path_of_which_no_beginning_comes_live_began_before_the_position(missed: str) -> None:
    """Unless something may have passed by: then it may have begun in that."""
    one = Subscriber("A", "B")
    one.machine.amid = True
    assert one.data(2, "a", 11, previous=10, index=10) == ["a11"]
    one.machine.live()
    if missed != "nothing":
        if missed == "doubted":
            assert one.take(one.machine.doubt(1.0, 1.0)) == []
        else:
            one.machine.attaching()
        assert one.data(3, "a", 26, previous=25, index=25) == []
        assert one.expire(HOLD + 1) == ["lost 14 of a12..25", "a26"]
    else:
        assert one.data(3, "a", 26, previous=25, index=25) == ["a26"]
        assert one.data(3, "b", 27, previous=24, index=3) == ["b27"]
        assert one.data(3, "a", 30, previous=29, index=29) == ["lost 3 of a27..29", "a30"]

"""What is given of a window of the past, which ends at NOW: nothing of the next one, and no loss that is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from roq.pubsub.tape import SKEW_MS
from tests.unit.past_rig import NOW, P, Q, Scene, data, fin, opens


@pytest.fixture
async def window() -> AsyncIterator[Scene]:
    made = Scene(end=NOW)
    made.tape("A")
    made.tape("B")
    yield made
    await made.subscriber.close(0)


def ended(window: Scene) -> list[int | str]:
    """What is given at the end of all tapes."""
    window.subscriber.is_done()
    return [one for one in window.settle() if one != 0]


async def test_of_a_window_nothing_is_given_that_was_written_at_its_end_or_later(window: Scene) -> None:
    assert await window.read("A", -1, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await window.read("A", 0, data(P, 1, 2)) == []
    assert window.past.tapes.reading["A"].ahead  # nor read
    assert window.done["A"] == 1
    assert ended(window) == []


@pytest.mark.parametrize("late", [0, SKEW_MS - 1])
async def test_what_was_sent_before_what_a_window_has_is_no_loss_though_a_clock_was_ahead(window: Scene, late: int) -> None:
    """The publisher left A, whose clock is ahead, for B. What it sent before by A is the next window's."""
    assert await window.read("A", -9, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await window.read("B", -1, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await window.read("A", late, data(P, 1, 2), fin(P, 1, 2)) == [3]
    assert await window.read("A", late + 1, opens(Q, 1, 0), data(Q, 1, 1)) == []
    assert window.past.tapes.reading["A"].ahead  # nobody waits any more
    assert window.done["A"] == 1  # where the next window begins
    assert ended(window) == []


async def test_nor_what_was_sent_before_by_a_path_that_broke(window: Scene) -> None:
    assert await window.read("A", -9, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await window.read("B", -1, opens(P, 2, 2, "A", finished=False), data(P, 2, 3)) == []
    assert await window.read("A", 1, data(P, 1, 2)) == []
    assert await window.read("A", SKEW_MS, opens(Q, 1, 0)) == [3]
    assert ended(window) == []


async def test_what_is_nowhere_is_lost_to_a_window_as_well(window: Scene) -> None:
    assert await window.read("A", -9, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await window.read("B", -1, opens(P, 2, 3, "A", finished=False), data(P, 2, 4)) == []
    assert await window.read("A", 1, data(P, 1, 2)) == []
    assert await window.read("A", SKEW_MS, opens(Q, 1, 0)) == ["lost 3..3", 4]
    assert ended(window) == []


async def test_no_tape_is_read_on_for_whom_only_the_next_window_has(window: Scene) -> None:
    """Else one move after the other might have all tapes read up to the present. Nor is anything of them lost."""
    window.tape("C")
    assert await window.read("A", -9, opens(P, 1, 0), data(P, 1, 1)) == [1]
    assert await window.read("C", -9, opens(Q, 1, 0), data(Q, 1, 1)) == [1]
    assert await window.read("B", -1, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await window.read("A", 1, opens(Q, 2, 2, "C"), data(Q, 2, 3)) == []
    assert await window.read("C", 2, data(Q, 1, 2), fin(Q, 1, 2)) == []
    assert window.past.tapes.reading["C"].ahead
    assert await window.read("A", 3, data(P, 1, 2), fin(P, 1, 2)) == [3]
    assert ended(window) == []
    window.subscriber._order.check()


async def test_what_a_window_has_is_given_though_the_next_one_has_it_again(window: Scene) -> None:
    """P's path 2 waits for B, where its path 1 was, and breaks; the path after it, which sends it all again, is the next
    window's, to which it is a repeat: it reads what is written before it, to know whose paths go on."""
    given = await window.read("A", -9, opens(P, 2, 0, "B", finished=False), *(data(P, 2, number) for number in (1, 2, 3)))
    given += await window.read("B", 1, opens(P, 3, 1, "A", finished=False), *(data(P, 3, number) for number in (2, 3, 4)))
    given += await window.read("B", SKEW_MS, opens(Q, 1, 0))
    assert given + ended(window) == [1, 2, 3]


@pytest.fixture
async def later() -> AsyncIterator[Scene]:
    """A window from ten seconds before NOW to NOW."""
    made = Scene(start=datetime.fromtimestamp((NOW - 10_000) / 1000, UTC), end=NOW)
    made.tape("A")
    made.tape("B")
    yield made
    await made.subscriber.close(0)


async def test_what_a_publisher_sent_before_it_went_on_is_given_though_the_window_before_has_what_follows(later: Scene) -> None:
    """A's clock is ahead: message 2 is written in this window, 3, which came after it, in the one before."""
    assert await later.read("B", -10_020, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await later.read("A", -9_000, data(P, 1, 2), fin(P, 1, 2)) == [2]
    assert await later.read("B", -8_000, data(P, 2, 4)) == [4]
    assert ended(later) == []


async def test_a_path_whose_predecessor_ended_long_before_the_window_is_not_held_up(later: Scene) -> None:
    """Nor is anything of that one lost: A goes on, and its FIN will not come any more."""
    assert await later.read("B", -15_000, opens(P, 2, 2, "A"), data(P, 2, 3)) == []
    assert await later.read("B", -9_990, data(P, 2, 4)) == []
    assert await later.read("A", -9_980, opens(Q, 1, 0), data(Q, 1, 1)) == [1, 4]
    assert ended(later) == []

"""Who goes on at a position: what the reader before it had is not reported as lost, though the position is further on one tape
than on another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roq.log.replicated.metadata import SegmentState
from roq.pubsub.tape import SKEW_MS
from roq.wire.recording import TapePosition
from tests.unit.past_rig import P, Q, Scene, data, fin, opens


@pytest.fixture
async def going_on() -> AsyncIterator[Scene]:
    """At a position on A and B."""
    made = Scene(start=TapePosition("t", {"A": 0, "B": 0}))
    made.tape("A")
    made.tape("B")
    yield made
    await made.subscriber.close(0)


async def test_what_came_before_it_on_the_path_that_is_entered_is_not_missing(going_on: Scene) -> None:
    """A's tape ends with what path 3 had sent again on B, before the position: as 2 and 3, which came on that path alone."""
    given = await going_on.read("A", 0, data(P, 1, 1), fin(P, 1, 1))
    given += await going_on.read("B", 1, data(P, 3, 4))
    going_on.tape("A", SegmentState.CLOSED, 1)
    given += await going_on.read("B", 2 + SKEW_MS, data(P, 3, 5), opens(Q, 1, 0))
    assert given == [1, 4, 5]


async def test_what_a_path_repeats_may_come_twice(going_on: Scene) -> None:
    """Live, and from its tape, once its Exchange had to be connected anew."""
    sent_again = opens(P, 2, 1, "A", finished=False), *(data(P, 2, number) for number in range(2, 7))
    given = await going_on.read("A", 0, data(P, 1, 4), data(P, 1, 5))
    given += await going_on.read("B", 1, *sent_again)
    going_on.tape("A", SegmentState.CLOSED, 1)
    given += await going_on.read("B", 2 + SKEW_MS, opens(Q, 1, 0))
    going_on.tape("C")
    given += await going_on.read("C", 3 + SKEW_MS, opens(P, 3, 5, "B", finished=False), data(P, 3, 6), data(P, 3, 7))
    given += await going_on.read("B", 4 + 2 * SKEW_MS, opens(Q, 2, 0, "B"))
    given += await going_on.read("B", 5 + 2 * SKEW_MS, *sent_again)
    assert given == [4, 5, 6, 7]

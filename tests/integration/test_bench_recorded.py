"""The benchmark of recorded queues runs every scenario on RoQ, small, and finds everything that was published; a client that
fails fails the run.

Not covered: the peers, which need their servers; figures (`python -m benchmarks recorded`).
"""

from __future__ import annotations

import pytest

from benchmarks.crew import Crew, Parent
from benchmarks.recorded.run import run
from benchmarks.recorded.systems import ROQ
from benchmarks.recorded.workload import MEMBERS, Scenario, Size

TINY = Size(3_000, 50, 3_000, 50, 0.5, 3.0, 0.02, 0.2, 0.2, 1_000, 0.0)
MESSAGES = {Scenario.PUBLISH: 3_000, Scenario.ONE_BY_ONE: 50, Scenario.REPLAY: 3_000, Scenario.GROUP_SINGLY: 50}


@pytest.mark.parametrize("scenario", [Scenario.PUBLISH, Scenario.ONE_BY_ONE, Scenario.REPLAY])
async def test_publishing_and_reading_find_every_message(scenario: Scenario) -> None:
    found = await run(ROQ, scenario, TINY)
    assert found
    assert {way.messages <= MESSAGES[scenario] and way.rate > 0 for way in found} == {True}


@pytest.mark.parametrize(("scenario", "ways"), [(Scenario.GROUP, 2), (Scenario.GROUP_SINGLY, 1)])
async def test_members_of_a_group_share_every_message(scenario: Scenario, ways: int) -> None:
    found = await run(ROQ, scenario, TINY)
    assert len(found) == len(MEMBERS) * ways
    assert {way.messages for way in found} == {found[0].messages}


@pytest.mark.parametrize("scenario", [Scenario.LIVE, Scenario.AWAY])
async def test_live_messages_all_arrive(scenario: Scenario) -> None:
    found = await run(ROQ, scenario, TINY)
    assert {way.messages > 0 for way in found} == {True}


def _fails(parent: Parent, why: str) -> None:
    parent.ready()
    raise ValueError(why)


@pytest.mark.quick
def test_a_client_that_fails_says_why() -> None:
    with Crew() as crew:
        worker = crew.start(_fails, "no more paper")
        worker.until_ready()
        worker.check()
        worker.say()
        with pytest.raises(RuntimeError, match="ValueError: no more paper"):
            worker.told(10.0)

"""The rig of the study at scale, small: simulated hosts hold real sessions with a real ZooKeeper, and what is asked of it for
each queue does not grow with the number of queues.

Not covered: figures (`python -m benchmarks at-scale`, docs/scale.md).
"""

from __future__ import annotations

import pytest

from benchmarks.at_scale import run
from benchmarks.at_scale.report import full
from benchmarks.at_scale.rig import scale_rig
from benchmarks.at_scale.run import ScaleFound, Study
from benchmarks.at_scale.shuffles import shuffle_cost

HOSTS, QUEUES, MORE = 5, 20, 50
# Of one queue that is created alone: its record and assignment, the host's look and report, the leader's look, the end of the
# transaction. Queues that are created together share some of them.
REQUESTS_MAX, WRITES_MAX = 7.0, 3.5
DELTA_BYTES_MAX = 150_000  # of one Exchange: its host with all that runs there, and its queue, told a few times
PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for quiet waits less."""
    monkeypatch.setattr(run, "QUIET_SECONDS", 1.0)
    monkeypatch.setattr(run, "IDLE_SECONDS", 3.0)
    monkeypatch.setattr(run, "EVENTS", 1)
    monkeypatch.setattr(run, "MONITORS_LOST", 5)


@pytest.mark.quick
@pytest.mark.timeout(120)
async def test_zookeeper_is_asked_as_much_for_each_queue_however_many_there_are() -> None:
    found = ScaleFound()
    async with scale_rig(HOSTS, QUEUES, exchanges_max=200, session_seconds=6.0) as rig:
        one = Study(rig, HOSTS, QUEUES, found, print)
        await one.stand()
        for _ in range(3):
            await one.create(MORE)
        await one.change()
    assert [row.queues for row in found.creations] == [QUEUES + MORE * number for number in (1, 2, 3)]
    assert max(row.requests for row in found.creations) <= REQUESTS_MAX
    assert max(row.writes for row in found.creations) <= WRITES_MAX
    (standing,), (event,) = found.standings, found.events
    assert standing.view_bytes > QUEUES * 500, "the leader found what was planted"
    assert 0 < event.told_bytes <= DELTA_BYTES_MAX


@pytest.mark.timeout(180)
async def test_what_is_taken_away_comes_back() -> None:
    found = ScaleFound()
    async with scale_rig(HOSTS, QUEUES, exchanges_max=200, session_seconds=4.0) as rig:
        one = Study(rig, HOSTS, QUEUES, found, print)
        await one.lose_leader()
        await one.lose_host()
        for sessions in run.OUTAGES:
            await one.lose_zookeeper(sessions)
    assert [row.queues for row in found.recoveries] == [QUEUES, QUEUES + 5, QUEUES + 5, QUEUES + 6]
    assert all(0 < row.seconds < PATIENCE_SECONDS and row.requests >= row.peak > 0 for row in found.recoveries)
    assert "leading GCM killed" in full(found)


@pytest.mark.quick
def test_a_shuffle_of_many_followers_asks_each_a_few_times() -> None:
    few, many = shuffle_cost(10, 200), shuffle_cost(40, 800)
    assert (few.ranges, many.ranges) == (100, 400)
    assert few.requests / 10 < 30
    assert many.requests / 40 < 1.2 * few.requests / 10

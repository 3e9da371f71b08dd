"""A shard that does not answer keeps the tasks of no other from being renewed and settled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from roq.errors import Closed, Unavailable
from roq.wire.shards import marked, unmarked
from roq.wire.task import EXTEND, LeasedTask, Settlement
from roq.workqueue.contract import RoundTrip
from roq.workqueue.lease_keeper import DONE, HeldTask, LeaseKeepers

SECONDS = 0.9  # of a lease
OUTAGE = 4 * SECONDS  # that a call to a shard without a master takes


class HalfDead:
    """Backend.settle of shards of which `dead` have no master."""

    def __init__(self, *dead: int) -> None:
        self.dead, self.over = dead, threading.Event()
        self.calls: list[set[int]] = []
        self.renewed: dict[int, int] = {}

    def __call__(self, settlements: Sequence[Settlement]) -> list[str | None]:
        shards = {unmarked(one.token)[0] for one in settlements}
        self.calls.append(shards)
        if shards & set(self.dead):
            self.over.wait(OUTAGE)
            raise Unavailable("no master")
        for one in settlements:
            shard = unmarked(one.token)[0]
            self.renewed[shard] = self.renewed.get(shard, 0) + (one.kind == EXTEND)
        return [one.token if one.kind == EXTEND else "" for one in settlements]


def leased(shard: int, seconds: float = SECONDS) -> HeldTask:
    token = marked(shard, "1.0.1")
    return HeldTask(LeasedTask(token, token, b"", 1, 0, 0, 0), seconds, time.monotonic())


@pytest.fixture(params=[0, 2])
def backend(request: pytest.FixtureRequest) -> Iterator[HalfDead]:
    made = HalfDead(request.param)
    yield made
    made.over.set()


@pytest.fixture
def keeper(backend: HalfDead) -> Iterator[LeaseKeepers]:
    made = LeaseKeepers(backend)
    yield made
    backend.over.set()
    made.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_healthy_shards_are_renewed_though_one_has_no_master(backend: HalfDead, keeper: LeaseKeepers) -> None:
    tasks = [leased(shard) for shard in range(4)]
    lost = [task for task in tasks if unmarked(task.token)[0] in backend.dead]
    keeper.hold(tasks)
    until(lambda: lost[0].lost)
    assert [task for task in tasks if task.lost] == lost
    assert all(backend.renewed[unmarked(task.token)[0]] >= 2 for task in tasks if task not in lost)
    assert all(len(shards) == 1 for shards in backend.calls)


def test_what_was_settled_is_taken_in_whatever_other_shards_do(backend: HalfDead, keeper: LeaseKeepers) -> None:
    tasks = [leased(shard, 60.0) for shard in range(4)]
    keeper.hold(tasks)
    backend.over.set()
    with pytest.raises(Unavailable):
        keeper.settle([(task, DONE) for task in tasks])
    assert [task.settled for task in tasks] == [unmarked(task.token)[0] not in backend.dead for task in tasks]
    kept = keeper.close()
    assert [unmarked(task.token)[0] for task in kept] == list(backend.dead), "the rest was settled"
    for shard in (0, 5):
        with pytest.raises(Closed):
            keeper.keep(leased(shard))


def test_answers_stand_where_they_were_asked_for() -> None:
    def settle(settlements: Sequence[Settlement]) -> list[str | None]:
        return [None if one.token.endswith("x") else one.token + "+" for one in settlements]

    keeper = LeaseKeepers(settle)
    tokens = ["1:a", "b", "2:x", "1:c", "x", "d"]
    answers = keeper.settle([(token, Settlement.extend("", 9.0)) for token in tokens])
    assert answers == ["1:a+", "b+", None, "1:c+", None, "d+"]
    trip = keeper.lease(lambda *_: RoundTrip(["3:f+"], []), 9.0, 1, 0.0, [(task := leased(3), Settlement.extend("", 9.0))])
    assert (trip.settled, task.token) == (["3:f+"], "3:f+")
    assert keeper.close() == []


def test_a_queue_without_shards_has_one_keeper_and_one_call() -> None:
    calls: list[int] = []

    def settle(settlements: Sequence[Settlement]) -> list[str | None]:
        calls.append(len(settlements))
        return ["" for _ in settlements]

    keeper = LeaseKeepers(settle)
    tasks = [leased(0, 60.0) for _ in range(9)]
    before = threading.active_count()
    keeper.hold(tasks)
    keeper.settle([(task, DONE) for task in tasks])
    assert (calls, threading.active_count()) == ([9], before + 1)
    keeper.close()

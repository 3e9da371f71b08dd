"""Simulated clusters: 230 seeds keep every promise, a seed is a run, known bugs that are put back are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from roq.errors import StorageFailed
from roq.log.store import index
from roq.tools.simulation.faults import (
    RECORDED_WEIGHTS,
    SHUFFLE_WEIGHTS,
    TASK_WEIGHTS,
    WEIGHTS,
    Fault,
    FaultKind,
    plan,
    plan_recorded,
    plan_shuffles,
    plan_tasks,
    storm,
)
from roq.tools.simulation.hunt import shortest, story
from roq.tools.simulation.run import Run, What, simulate
from roq.workqueue.master.dump import Dump
from roq.workqueue.state import State
from tests.simulation import (
    known_bugs,
    known_durable_bugs,
    known_group_bugs,
    known_producer_bugs,
    known_recording_bugs,
    known_shuffle_bugs,
    known_task_bugs,
    known_transaction_bugs,
)

SEEDS = {
    What.MESSAGES: 140,
    What.TASKS: 40,
    What.SHUFFLE: 20,
    What.RECORDED: 5,
    What.DURABLES: 10,
    What.PRODUCERS: 5,
    What.GROUPS: 5,
    What.TRANSACTIONS: 5,
}
AT_ONCE = 5
QUICK = 1  # seeds of each kind in `make test`
BATCHES = [(what, (0, QUICK)) for what in SEEDS]
BATCHES += [
    (what, (first, min(first + AT_ONCE, count))) for what, count in SEEDS.items() for first in range(QUICK, count, AT_ONCE)
]
SECONDS_MIN = 60.0  # that a run simulates
GIVEN_MIN = {
    What.MESSAGES: 100,
    What.TASKS: 100,
    What.SHUFFLE: 20,
    What.RECORDED: 100,
    What.DURABLES: 100,
    What.PRODUCERS: 100,
    What.GROUPS: 100,
    What.TRANSACTIONS: 100,
}
TRIES = 12  # runs to find a bug that is put back, from the seed on that showed it when this was written
BUGS = known_bugs.BUGS | known_task_bugs.BUGS | known_shuffle_bugs.BUGS | known_recording_bugs.BUGS | known_group_bugs.BUGS
BUGS |= known_transaction_bugs.BUGS | known_producer_bugs.BUGS | known_durable_bugs.BUGS
pytestmark = pytest.mark.timeout(240)  # a time-out leaves threads of a run behind, which nothing else in this process survives
SHOW = """
import sys
from roq.tools.simulation.run import What, simulate

run = simulate(int(sys.argv[1]), what=What(sys.argv[2]))
print(run.hash, run.steps, run.wrong)
"""


@pytest.mark.parametrize(
    ("what", "seeds"), [pytest.param(*one, marks=[] if one[1][0] else [pytest.mark.quick]) for one in BATCHES]
)
def test_every_promise_is_kept(what: What, seeds: tuple[int, int]) -> None:
    for seed in range(*seeds):
        run = simulate(seed, what=what)
        assert not run.wrong, story(shortest(run))
        assert run.seconds >= SECONDS_MIN
        assert run.given > GIVEN_MIN[what], "nobody would have noticed anything"
        assert (run.settled if what is What.TASKS else run.got) > run.given / 2, "nobody would have noticed anything"


@pytest.mark.parametrize(
    ("what", "seed"),
    [
        pytest.param(What.MESSAGES, 3, marks=pytest.mark.quick),
        (What.MESSAGES, 11),
        (What.TASKS, 3),
        (What.TASKS, 5),
        (What.SHUFFLE, 5),
        (What.RECORDED, 1),
        (What.DURABLES, 1),
        (What.PRODUCERS, 1),
        (What.GROUPS, 1),
        (What.TRANSACTIONS, 1),
    ],
)
def test_a_seed_is_a_run(what: What, seed: int) -> None:
    """Twice in this process, and in others whose strings have other hashes."""
    once, again = simulate(seed, what=what), simulate(seed, what=what)
    assert (once.hash, once.steps, once.trace) == (again.hash, again.steps, again.trace)
    told = f"{once.hash} {once.steps} {once.wrong}"
    for hashes in ("1", "2"):
        shown = subprocess.run(
            [sys.executable, "-c", SHOW, str(seed), what],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout.strip() == told
    assert simulate(seed + 1, what=what).hash != once.hash


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.quick] if known.cheap else []) for name, known in BUGS.items()]
)
def test_a_known_bug_is_found(name: str) -> None:
    known = BUGS[name]
    for seed in range(known.seed, known.seed + TRIES):
        with known.put_back():
            run = simulate(seed, what=known.what)
        if run.wrong:
            return
    pytest.fail(f"{name}: not found in {TRIES} runs")


def test_the_story_of_a_bug_is_short() -> None:
    name = "repeats are delivered"
    with BUGS[name].put_back():
        run = next(run for seed in range(TRIES) if (run := simulate(seed)).wrong)
        best = shortest(run)
    assert best.wrong
    assert len(best.faults) <= 2 < len(run.faults)
    assert "WRONG" in story(best)


def test_a_rotten_byte_that_claims_too_much_does_not_end_the_log() -> None:
    """The simulation found this one: the confirmed position that a damaged batch told was believed."""
    stories = {seed: storm(Random(seed), 5.0, FaultKind.BIT_ROT) for seed in range(8, 8 + TRIES)}
    with known_bugs.put((index, "_proved", known_task_bugs.believed)):
        found = next(seed for seed, faults in stories.items() if _weather(seed, faults).wrong)
    run = _weather(found, stories[found])
    assert not run.wrong, story(run)


def test_a_new_disk_that_fails_at_once_ends_the_store_with_an_error_of_its_own() -> None:
    """The simulation found this one: what says whose a disk is was written with nobody to catch an OSError."""
    faults = [Fault(8.0, FaultKind.SWAP_DISK, 3.0, 1 / 6, 0.0), Fault(10.0, FaultKind.DISK_ERROR, 0.0, 1 / 6, 0.9)]
    runs = [_weather(seed, faults) for seed in (0, 2)]
    assert any("host-1 is shut down, its disk is replaced by an empty one" in line for run in runs for line in run.trace)
    for run in runs:
        assert not run.wrong, story(run)


def test_masters_fork_to_dump_their_state() -> None:
    """Forks that hand their dump over, and forks that die first; the run keeps its promises with both."""
    ended: Counter[bool] = Counter()
    result = Dump._result

    def counted(dump: Dump) -> memoryview:
        try:
            data = result(dump)
        except StorageFailed:
            ended[False] += 1
            raise
        ended[True] += 1
        assert State.load(bytes(data)).fold.inserted, "it is the state"
        return data

    for seed in range(2, 2 + TRIES):  # the first one had both when this was written
        with known_bugs.put((Dump, "_result", counted)):
            run = simulate(seed, what=What.TASKS)
        assert not run.wrong, story(run)
        if len(ended) == 2:
            return
    pytest.fail(f"dumps in {TRIES} runs: {ended}")


@pytest.mark.parametrize(("seed", "host"), [(2, 1 / 6), (3, 3 / 6)])
@pytest.mark.parametrize("lasts", [12.0, 300.0], ids=["and is set back", "to the end"])
def test_a_host_whose_clock_is_a_day_ahead_hides_nothing_from_one_that_reads_to_the_end(
    seed: int, host: float, lasts: float
) -> None:
    """Entries of tomorrow were there when it was opened, and so was what lies behind them."""
    run = simulate(seed, faults=[Fault(8.0, FaultKind.LEAP_CLOCK, lasts, host, 0.0)], what=What.RECORDED)
    assert any("a day ahead" in line for line in run.trace)
    assert not run.wrong, story(run)
    assert run.got > run.given > GIVEN_MIN[What.RECORDED]


def _weather(seed: int, faults: list[Fault]) -> Run:
    return simulate(seed, 12.0, faults=faults, what=What.TASKS)


@pytest.mark.quick
def test_every_kind_of_fault_is_drawn() -> None:
    assert {fault.kind for seed in range(20) for fault in plan(Random(seed), 40.0)} == WEIGHTS.keys()
    assert {fault.kind for seed in range(20) for fault in plan_tasks(Random(seed), 40.0)} == TASK_WEIGHTS.keys()
    assert {fault.kind for seed in range(20) for fault in plan_shuffles(Random(seed), 40.0)} == SHUFFLE_WEIGHTS.keys()
    assert {fault.kind for seed in range(20) for fault in plan_recorded(Random(seed), 40.0)} == RECORDED_WEIGHTS.keys()

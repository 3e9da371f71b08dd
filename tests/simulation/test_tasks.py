"""Simulated work queues: forty seeds keep every promise, a seed is a run, known bugs of stores and masters are found."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest

from roq.simulation.faults import TASK_WEIGHTS, Fault, Kind, plan_tasks, storm
from roq.simulation.hunt import shortest, story
from roq.simulation.run import Run, What, simulate
from roq.store import shelf
from tests.simulation.known_bugs import put
from tests.simulation.known_task_bugs import BUGS, believed

SEEDS, AT_ONCE = 40, 5
TRIES = 12  # runs to find a bug that is put back, from the seed on that showed it when this was written
SHOW = """
import sys
from roq.simulation.run import What, simulate

run = simulate(int(sys.argv[1]), what=What.TASKS)
print(run.hash, run.steps, run.wrong)
"""


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        run = simulate(seed, what=What.TASKS)
        assert not run.wrong, story(shortest(run))
        assert run.seconds >= 45
        assert run.told > run.published / 2 > 50, "nobody would have noticed anything"


@pytest.mark.parametrize("seed", [3, 5])
def test_a_seed_is_a_run(seed: int) -> None:
    """Twice in this process, and in others whose strings have other hashes."""
    once, again = simulate(seed, what=What.TASKS), simulate(seed, what=What.TASKS)
    assert (once.hash, once.steps, once.trace) == (again.hash, again.steps, again.trace)
    told = f"{once.hash} {once.steps} {once.wrong}"
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        shown = subprocess.run(
            [sys.executable, "-c", SHOW, str(seed)], env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout.strip() == told
    assert simulate(seed + 1, what=What.TASKS).hash != once.hash


@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_is_found(name: str) -> None:
    known = BUGS[name]
    for seed in range(known.seed, known.seed + TRIES):
        with known.put_back():
            run = simulate(seed, what=What.TASKS)
        if run.wrong:
            return
    pytest.fail(f"{name}: not found in {TRIES} runs")


def test_a_rotten_byte_that_claims_too_much_does_not_end_the_log() -> None:
    """The simulation found this one: the confirmed position that a damaged batch told was believed."""
    stories = [storm(Random(seed), 5.0, Kind.BIT_ROT) for seed in range(TRIES)]
    with put((shelf, "_proved", believed)):
        found = next(seed for seed in range(TRIES) if _weather(seed, stories[seed]).wrong)
    run = _weather(found, stories[found])
    assert not run.wrong, story(run)


def _weather(seed: int, faults: list[Fault]) -> Run:
    return simulate(seed, 12.0, faults=faults, what=What.TASKS)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(20) for fault in plan_tasks(Random(seed), 40.0)}
    assert drawn == TASK_WEIGHTS.keys()

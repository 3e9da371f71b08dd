"""Simulated clusters: two hundred seeds keep every promise, a seed is a run, known bugs that are put back are found."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest

from roq.simulation.faults import WEIGHTS, plan
from roq.simulation.hunt import shortest, story
from roq.simulation.run import simulate
from tests.simulation.known_bugs import BUGS

SEEDS, AT_ONCE = 200, 5
TRIES = 12  # runs to find a bug that is put back, from the seed on that showed it when this was written
SHOW = """
import sys
from roq.simulation.run import simulate

run = simulate(int(sys.argv[1]))
print(run.hash, run.steps, run.wrong)
"""


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        run = simulate(seed)
        assert not run.wrong, story(shortest(run))
        assert run.seconds >= 60
        assert run.delivered > run.published / 2, "nobody would have noticed anything"


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_is_a_run(seed: int) -> None:
    """Twice in this process, and in others whose strings have other hashes."""
    once, again = simulate(seed), simulate(seed)
    assert (once.hash, once.steps, once.trace) == (again.hash, again.steps, again.trace)
    told = f"{once.hash} {once.steps} {once.wrong}"
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        shown = subprocess.run(
            [sys.executable, "-c", SHOW, str(seed)], env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout.strip() == told
    assert simulate(seed + 1).hash != once.hash


@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_is_found(name: str) -> None:
    known = BUGS[name]
    for seed in range(known.seed, known.seed + TRIES):
        with known.put_back():
            run = simulate(seed)
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


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(20) for fault in plan(Random(seed), 40.0)}
    assert drawn == WEIGHTS.keys()

"""Hosts that are drained and evacuated under load in simulated clusters, alone and while other things happen: every promise is
kept, and hosts do become empty."""

from __future__ import annotations

from random import Random

import pytest

from roq.tools.simulation.faults import FaultKind, plan_leaving
from roq.tools.simulation.hunt import shortest, story
from roq.tools.simulation.run import FAULT_SECONDS, What, simulate

BESIDE = {  # what else happens, with every other seed
    What.MESSAGES: (FaultKind.ADD_EXCHANGE, FaultKind.KILL_CHILD, FaultKind.KILL_GCM, FaultKind.MOVE_PUBLISHERS),
    What.TASKS: (FaultKind.KILL_CHILD, FaultKind.KILL_GCM, FaultKind.LOSE_POWER),
    What.RECORDED: (FaultKind.ADD_EXCHANGE, FaultKind.KILL_CHILD, FaultKind.KILL_GCM, FaultKind.MOVE_PUBLISHERS),
}
SEEDS = {What.MESSAGES: 12, What.TASKS: 6, What.RECORDED: 4}


CASES = [
    pytest.param(what, seed, marks=[] if seed else [pytest.mark.quick])
    for what, count in SEEDS.items()
    for seed in range(count)
]


@pytest.mark.parametrize(("what", "seed"), CASES)
def test_every_promise_is_kept_while_hosts_are_left(what: What, seed: int) -> None:
    others = BESIDE[what] if seed % 2 else ()
    run = simulate(seed, faults=plan_leaving(Random(seed), FAULT_SECONDS, others), hosts=4, what=what)
    assert not run.wrong, story(shortest(run))


@pytest.mark.quick
def test_hosts_become_empty() -> None:
    runs = [simulate(seed, faults=plan_leaving(Random(seed), FAULT_SECONDS), hosts=4) for seed in (1, 3)]
    assert not [wrong for run in runs for wrong in run.wrong]
    assert any("is taken back, empty" in line for run in runs for line in run.trace)

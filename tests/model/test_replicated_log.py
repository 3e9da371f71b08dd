"""Exhaustive search of the replicated log: with all rules no promise breaks; with any one of them off, one does.

The numbers in brackets are those of RELIABILITY 3.3; the last rules were found here.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from roq.log.replicated.appending import AppendingSafeguards
from tests.harness.tiers import but_long
from tests.model.replicated_log import Model, closed
from tests.model.replicated_state import Breach, Scenario, World

log = logging.getLogger(__name__)
STATES_MAX = 400_000

SAFE = {
    "a late writer": Scenario(),
    "a lost disk": Scenario(losses=1),
    "an old image of a disk": Scenario(planted="ab", planted_acked=1, images=1),
    "a rotten entry": Scenario(rots=1),
    "an ensemble change": Scenario(spares="d", changes=1),
    "two entries, order": Scenario(entries=2, recoverers=0, spares="d", changes=1),
    "two recoveries": Scenario(nodes="ab", recoverers=2, planted="a"),
    "two recoveries with a spare": Scenario(
        nodes="ab", recoverers=2, planted="ab", planted_acked=1, spares="c", replacements=1
    ),
    "a node that lost its disk is taken again": Scenario(
        nodes="ab", planted="ab", planted_acked=1, spares="c", losses=1, replacements=2
    ),
    "all three must have it": Scenario(ack_quorum=3),
}
UNSAFE = {
    "recovery reads do not fence (1)": Scenario(reads_fence=False),
    "recovery begins before the last fragment (2)": Scenario(spares="d", changes=1, start_behind_fragment=False),
    "acknowledging over a hole (3)": Scenario(entries=2, recoverers=0, safeguards=AppendingSafeguards(acks_in_order=False)),
    "fenced taken for failed (4)": Scenario(nodes="ab", fenced_means_unknown=False),
    "answering before the sync (5)": Scenario(crashes=1, sync_before_ack=False),
    "a fence that a crash forgets (6)": Scenario(crashes=1, fence_is_durable=False),
    "an empty disk is sure of absence (7)": Scenario(planted="ab", planted_acked=1, losses=1, lost_disk_is_unsure=False),
    "damage taken for absence (8)": Scenario(planted="ab", planted_acked=1, rots=1, rot_is_unknown=False),
    "metadata without compare-and-set (10)": Scenario(nodes="ab", recoverers=2, planted="a", compare_and_set=False),
    "one node too few asked": Scenario(coverage=False),
    "an empty disk takes entries of an old segment": Scenario(losses=1, lost_disk_refuses=False),
    "acknowledging while the ensemble changes": Scenario(
        spares="de", changes=2, safeguards=AppendingSafeguards(freeze_while_changing=False)
    ),
    "a recovery names its spare before the end": Scenario(
        nodes="ab",
        recoverers=2,
        planted="ab",
        planted_acked=1,
        spares="c",
        replacements=1,
        fragments_with_the_end=False,
        count_copies_while_open=False,
    ),
    "an old image is sure of absence": Scenario(planted="ab", planted_acked=1, images=1, old_image_is_noticed=False),
    "a recovery announces the segment to a node it asks": Scenario(
        nodes="ab", planted="ab", planted_acked=1, spares="c", losses=1, replacements=2, named_stay_as_they_are=False
    ),
}


def search(scenario: Scenario) -> tuple[int, int, tuple[str, ...]]:
    """(states, of them with a closed log, the shortest way to a breach)"""
    model = Model(scenario)
    start = model.start()
    came_from: dict[World, tuple[str, World] | None] = {start: None}
    layer, ends = [start], 0
    gc.disable()  # frozen values have no cycles, and looking for some takes a third of the time
    try:
        while layer:
            following: list[World] = []
            for world in layer:
                ends += closed(world.meta)
                try:
                    model.check(world)
                    for label, after in model.steps(world):
                        if after not in came_from:
                            came_from[after] = (label, world)
                            following.append(after)
                except (Breach, AssertionError) as breach:
                    return len(came_from), ends, (*list(trail(came_from, world))[::-1], f"==> {breach}")
            assert len(came_from) <= STATES_MAX
            layer = following
    finally:
        gc.enable()
    return len(came_from), ends, ()


def trail(came_from: dict[World, tuple[str, World] | None], world: World) -> Iterator[str]:
    while (before := came_from[world]) is not None:
        yield before[0]
        world = before[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", but_long(SAFE, "an ensemble change", "a lost disk"))
def test_no_promise_breaks(name: str) -> None:
    states, ends, way = search(SAFE[name])
    log.info("%s: %d states, %d of them closed", name, states, ends)
    assert not way, "\n".join(way)
    assert ends or not SAFE[name].recoverers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", UNSAFE)
def test_every_rule_is_needed(name: str) -> None:
    states, _, way = search(UNSAFE[name])
    log.info("%s: %d states, %s", name, states, "\n  ".join(way))
    assert way, f"{name}: no counterexample in {states} states"

"""A fleet of machines from a provider: nothing is lost, forgotten, or thrashed, whatever dies or lies; each rule is needed.

The model and its promises F1 to F5: fleet.py.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from gcm.fleet import ALL_SAFEGUARDS as ALL
from tests.model.fleet import FleetConfig, FleetModel
from tests.model.search import Found, explore

log = logging.getLogger(__name__)
STATES_MIN = 300
SETTLE_ONE_IN = 17  # of the states
HEALTHY = {
    "one is wanted, used and given back": FleetConfig(uses=2, demands=2, settle_one_in=SETTLE_ONE_IN),
    "leaders die": FleetConfig(crashes=2, settle_one_in=SETTLE_ONE_IN),
    "the provider fails, lies, is late": FleetConfig(faults=2, settle_one_in=SETTLE_ONE_IN),
    "both": FleetConfig(crashes=1, faults=1, uses=1, settle_one_in=SETTLE_ONE_IN),
    "machines vanish, or never boot": FleetConfig(lost=1, duds=1, faults=1, settle_one_in=SETTLE_ONE_IN),
    "machines with data are lost": FleetConfig(lost=1, uses=1, settle_one_in=SETTLE_ONE_IN),
    "copies come to what is left, and leaders die": FleetConfig(crashes=1, uses=2, settle_one_in=SETTLE_ONE_IN),
    "two at least": FleetConfig(least=2, most=2, demands=0, duds=1),
    "somebody else's look like ours": FleetConfig(most=2, stranger=True, crashes=1, faults=1, settle_one_in=SETTLE_ONE_IN),
}
HARMFUL: dict[str, tuple[FleetConfig, str]] = {
    "a machine is recorded first": (FleetConfig(crashes=1, record_first=False), "F3: "),
    "what is destroyed takes nothing new": (FleetConfig(faults=1, uses=1, guards=replace(ALL, close_first=False)), "F2: "),
    "its store has ended when it is found empty": (FleetConfig(uses=2, guards=replace(ALL, store_ends=False)), "F2: "),
    "only what is empty is returned": (FleetConfig(uses=1, guards=replace(ALL, empty_only=False)), "F2: "),
    "only what is recorded is destroyed": (FleetConfig(stranger=True, most=2, guards=replace(ALL, own_only=False)), "F1: "),
    "gone is what is not listed": (FleetConfig(faults=2, demands=2, duds=1, guards=replace(ALL, confirm=False)), "F[34]: "),
    "what is gone is remembered": (FleetConfig(faults=1, guards=replace(ALL, remember=False)), "F3: "),
    "what may cost counts": (FleetConfig(faults=2, demands=2, guards=replace(ALL, count_all=False)), "F4: "),
    "who does not boot is destroyed": (FleetConfig(duds=1, settle_one_in=1, guards=replace(ALL, boot_bound=False)), "F5: "),
}


def show(name: str, found: Found) -> str:
    return "\n    ".join((f"{name}: {found.states} states, {found.depth} steps deep", *found.trail))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_fleet_is_safe(name: str) -> None:
    model = FleetModel(HEALTHY[name])
    found = explore(model)
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.states > STATES_MIN, "the world is too small to show anything"
    assert model.settled or not HEALTHY[name].settle_one_in


@pytest.mark.parametrize("name", HARMFUL)
def test_without_a_rule_it_is_not(name: str) -> None:
    config, breach = HARMFUL[name]
    found = explore(FleetModel(config))
    log.info(show(name, found))
    assert found.trail, f"{name}: nothing goes wrong without it"
    assert re.match(f"==> {breach}", found.trail[-1]), show(name, found)

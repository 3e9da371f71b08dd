"""A position never passes what a full subscriber was not given and not told of; without the rule it does (dropping.py)."""

from __future__ import annotations

import pytest

from tests.model.dropping import DroppingConfig, DroppingModel
from tests.model.search import explore

STATES_MIN = 3_000


@pytest.mark.parametrize("met", [True, False], ids=["from its beginning", "begun before"])
def test_a_position_passes_nothing_that_was_not_reported(met: bool) -> None:
    found = explore(DroppingModel(DroppingConfig(met=met)))
    assert not found.trail, "\n    ".join(found.trail)
    assert found.states >= STATES_MIN


@pytest.mark.parametrize(
    "without", [DroppingConfig(tell=False), DroppingConfig(tell=False, met=False), DroppingConfig(name_first=False, met=False)]
)
def test_without_the_rule_it_does(without: DroppingConfig) -> None:
    found = explore(DroppingModel(without))
    assert found.trail, "superfluous, or the model is too small"
    assert "nobody has said that m1 is missing" in found.trail[-1]

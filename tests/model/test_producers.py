"""Producers: each message of a source is stored once over the lives of its program, whatever dies when; each rule is needed.

Readers of tapes meet a life that was killed and the next one as tapes.py describes. The model and what it does not cover:
producers.py.
"""

from __future__ import annotations

import logging
import re

import pytest

from tests.harness.tiers import but_long
from tests.model.producers import ProducersConfig, ProducersModel
from tests.model.search import Found, explore
from tests.model.tapes import TapesConfig, TapesModel

log = logging.getLogger(__name__)
STATES_MIN = 1_000
HEALTHY = {
    "killed and opened again, or followed while it lives": ProducersConfig(last=3),
    "three lives": ProducersConfig(last=2, lives=3, kills=2),
    "moves": ProducersConfig(last=3, moves=1),
    "an Exchange dies": ProducersConfig(last=2, deaths=1),
    "an Exchange dies in a move": ProducersConfig(deaths=1, moves=1),
}
HARMFUL: dict[str, tuple[ProducersConfig, str]] = {
    "connections of lives before are cut": (ProducersConfig(kills=1, cut=False), "P3: "),
    "what an Exchange took is stored first": (ProducersConfig(kills=1, await_stored=False), "P[23]: "),
    "a path waits for the one before": (ProducersConfig(moves=1, deaths=1, in_turn=False), "P1: "),
    "what is kept is stored": (ProducersConfig(kills=1, deaths=1, confirmed=False), "P[14]: "),
    "the tapes are read": (ProducersConfig(kills=1, read=False), "P4: "),
    "a life that began nothing leaves what was": (ProducersConfig(lives=3, kills=1, inherit=False), "P4: "),
    "the Monitor refuses lives before": (ProducersConfig(kills=0, deaths=1, refuse=False), "P[23]: "),
}


SECOND = 4097  # first path of a second life
READ = {  # it begins where the one before was, or that is gone
    "on the same Exchange": f"A: open1 m1 m2 open{SECOND} m3 m4",
    "the Exchange died, too": f"A: open1 m1 m2 end | B: open{SECOND} m3 m4",
    "there was a move before": f"A: open1 m1 fin1 taped | B: open2-A m2 end | C: open{SECOND} m3",
    "it died with the Exchange, and had stored nothing there": f"A: open1 m1 fin1 | B: open2-A end | A: open{SECOND} m2",
    "an Exchange was not fenced": f"A: open1 m1 m2 taped open{SECOND} m2 m3",
    "it was closed": "A: open1 m1 m2 fin1 | B: open2-A m3",
    "two lives, the first one was closed": f"A: open1 m1 fin1 taped | B: open2-A m2 open{SECOND} m3",
}


def show(name: str, found: Found) -> str:
    return "\n    ".join((f"{name}: {found.states} states, {found.ends} ends, {found.depth} steps deep", *found.trail))


@pytest.mark.parametrize("name", but_long(HEALTHY, "an Exchange dies in a move", "three lives"))
def test_each_message_is_stored_once_over_all_lives(name: str) -> None:
    found = explore(ProducersModel(HEALTHY[name]))
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.states > STATES_MIN, "the world is too small to show anything"
    assert found.ends > 0


@pytest.mark.parametrize("name", HARMFUL)
def test_without_a_rule_it_is_not(name: str) -> None:
    config, breach = HARMFUL[name]
    found = explore(ProducersModel(config))
    log.info(show(name, found))
    assert found.trail, f"{name}: nothing goes wrong without it"
    assert re.match(f"==> {breach}", found.trail[-1]), show(name, found)


@pytest.mark.parametrize("stored", [False, True], ids=["then live", "what is stored"])
@pytest.mark.parametrize("name", READ)
def test_readers_of_tapes_get_all_lives_once_and_in_order(name: str, stored: bool) -> None:
    found = explore(TapesModel(TapesConfig((READ[name],), paces=(1,), together=False, lagging=stored, stored=stored)))
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.ends > 0

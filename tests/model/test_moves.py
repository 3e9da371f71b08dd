"""Moves between Exchanges: nothing lost, doubled or out of order in any interleaving; each safeguard is needed.

The model and what it does not cover: moves.py. Run with `--log-cli-level=info` to see the sizes of the searches and, for every
safeguard that is switched off, the shortest way to harm.
"""

from __future__ import annotations

import logging

import pytest

from roq.pubsub.order import OrderSafeguards
from roq.pubsub.path import PathSafeguards
from tests.harness.tiers import but_long
from tests.model.search import Found, search
from tests.model.state import Config, Rules
from tests.model.test_tapes import HARMFUL as HARMFUL_FOR_TAPES

log = logging.getLogger(__name__)
STATES_MIN = 3_000  # that each healthy search visits
HEALTHY = {
    "from A to B, which is being proved": Config(messages=4, moves=1),
    "there and back": Config(messages=2, moves=2, proved=2),
    "on to a third": Config(messages=1, moves=2, exchanges=3, proved=3),
    "the old one is emptied and stopped": Config(messages=3, moves=1, retires=1, proved=2),
    "the Monitor thinks again": Config(messages=1, moves=1, retires=1, retargets=1, exchanges=3, proved=3, met=True),
    "a subscriber joins": Config(messages=1, moves=1, late=True),
    "a frame is dropped": Config(messages=2, moves=1, drops=1, proved=2),
    "a frame is dropped, then an Exchange dies": Config(messages=3, deaths=1, drops=1, proved=2, met=True),
    "a hold expires": Config(messages=3, moves=1, delays=1, proved=2),
    "a frame is dropped and a hold expires": Config(messages=2, moves=1, drops=1, delays=1, proved=2, met=True),
    "an Exchange dies": Config(messages=1, moves=1, deaths=1, proved=2),
    "the first Exchange and the Monitor die": Config(messages=2, moves=1, deaths=1, changes=1, proved=2),
    "a subscriber freezes and an Exchange dies": Config(messages=2, deaths=1, freezes=1, met=True),
    "it has not met the publisher before": Config(messages=3, deaths=1, freezes=1),
    "the publisher closes": Config(messages=2, moves=1, closes=1, proved=2),
    "the publisher is killed": Config(messages=2, moves=1, kills=1, proved=2),
}
ALSO_SAFE = {
    # FIN and OPEN leave in one breath on two connections: the order matters only if the publisher dies in between
    "fin_before_open, as long as the publisher lives": Config(
        messages=2, moves=1, proved=2, path=PathSafeguards(fin_before_open=False)
    ),
}
MOVE = Config(messages=1, moves=1, proved=2, met=True)
STOP = MOVE._replace(retires=1)
HARMFUL = {
    "hold_for_fin": (MOVE._replace(order=OrderSafeguards(hold_for_fin=False)), "is given m|was never given"),
    "drop_repeats": (
        Config(messages=1, deaths=1, proved=2, order=OrderSafeguards(drop_repeats=False)),
        "is given m1 after m1",
    ),
    "report_gaps": (
        Config(messages=1, drops=1, proved=2, met=True, order=OrderSafeguards(report_gaps=False)),
        "was never given m1, nor told",
    ),
    "order_topics": (
        Config(messages=2, drops=1, deaths=1, proved=2, met=True, order=OrderSafeguards(order_topics=False)),
        "is given m1 after m2",
    ),
    "doubt_strangers": (
        Config(messages=2, deaths=1, freezes=1, order=OrderSafeguards(doubt_strangers=False)),
        "was never given m",
    ),
    "await_welcome": (Config(messages=1, path=PathSafeguards(await_welcome=False)), "was never given m1"),
    "fin_before_open": (MOVE._replace(kills=1, path=PathSafeguards(fin_before_open=False)), "holds frames for ever"),
    "keep_old_link": (MOVE._replace(path=PathSafeguards(keep_old_link=False)), "was never given m1|holds frames for ever"),
    "heed_welcome": (
        Config(messages=1, moves=1, deaths=1, changes=1, proved=2, path=PathSafeguards(heed_welcome=False)),
        "the publisher never begins",
    ),
    "prove_before_move": (Config(messages=1, moves=1, rules=Rules(prove_before_move=False)), "was never given m1"),
    "retire_after_fin": (STOP._replace(rules=Rules(retire_after_fin=False)), "was never given m1"),
    "stop_after_detach": (STOP._replace(rules=Rules(stop_after_detach=False)), "was never given m1|holds frames for ever"),
    "join_apart": (Config(messages=0, moves=1, late=True, proved=2, rules=Rules(join_apart=False)), "holds frames for ever"),
    "await_open": (Config(messages=0, moves=1, late=True, proved=2, rules=Rules(await_open=False)), "holds frames for ever"),
    "excuse_silent": (
        Config(messages=1, deaths=1, freezes=1, met=True, rules=Rules(excuse_silent=False)),
        "waits for the dead",
    ),
    "remember_offers": (
        Config(messages=1, moves=1, retires=1, retargets=1, exchanges=3, proved=3, rules=Rules(remember_offers=False)),
        "was never given m1",
    ),
}


def show(name: str, found: Found) -> str:
    return "\n    ".join((f"{name}: {found.states} states, {found.ends} ends, {found.depth} steps deep", *found.trail))


LONG = (
    *("on to a third", "there and back", "the publisher closes"),
    *("the Monitor thinks again", "it has not met the publisher before"),
)


@pytest.mark.parametrize("name", but_long(HEALTHY, *LONG))
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    found = search(HEALTHY[name])
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.ends > 1
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("name", ALSO_SAFE)
def test_what_is_not_needed_for_this(name: str) -> None:
    found = search(ALSO_SAFE[name])
    assert not found.trail, show(name, found)


@pytest.mark.parametrize("name", HARMFUL)
def test_without_this_safeguard_there_is_harm(name: str) -> None:
    config, harm = HARMFUL[name]
    found = search(config)
    log.info(show(f"without {name}", found))
    assert found.trail, f"no harm without {name} in {found.states} states: superfluous, or the model is too small"
    assert any(words in found.trail[-1] for words in harm.split("|")), show(name, found)


def test_the_safeguards_of_both_machines_are_all_tried() -> None:
    assert {*OrderSafeguards._fields, *PathSafeguards._fields, *Rules._fields} == HARMFUL.keys() | HARMFUL_FOR_TAPES

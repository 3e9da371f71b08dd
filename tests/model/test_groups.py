"""Groups: each message once, those of a topic one after the other, none lost, whoever crashes when; each rule is needed.

The model and what it does not cover: groups.py.
"""

from __future__ import annotations

import logging
import re

import pytest

from roq.workqueue.fold import Effects, Fold
from roq.workqueue.ready import StoredTask
from roq.workqueue.records import FeedMessage
from tests.model.groups import GroupConfig, GroupModel
from tests.model.search import Found, explore

log = logging.getLogger(__name__)
STATES_MIN = 1_000
TWO_TOPICS = (((1, 1, "a"), (1, 2, "b")), ((2, 5, "a"),))  # publisher 2's first ones are on other topics
ONE_TOPIC = (((1, 1, "a"),), ((1, 2, "a"), (1, 3, "a")))
ONE_ENTRY = (((1, 1, "a"), (1, 2, "a")),)
FIRST = frozenset({(1, 1, "a")})
HEALTHY = {
    "a crash": GroupConfig(TWO_TOPICS, crashes=1),
    "two crashes": GroupConfig(ONE_ENTRY, crashes=2),
    "a crash loses two records": GroupConfig(ONE_ENTRY, crashes=1, pending=2),
    "messages come back, and a crash": GroupConfig(ONE_TOPIC, crashes=1, releases=1),
    "messages are rejected and redriven": GroupConfig(ONE_TOPIC, rejects=1, redrives=1),
    "time passes, and a crash": GroupConfig(ONE_TOPIC, crashes=1, ending=frozenset({(1, 1, "a"), (1, 2, "a")})),
    "time passes, and messages come back": GroupConfig(ONE_ENTRY, releases=1, rejects=1, redrives=1, ending=FIRST),
    "time passes, in any order": GroupConfig(ONE_ENTRY, ordered=False, releases=2, ending=FIRST),
    "in any order": GroupConfig(ONE_ENTRY, ordered=False, crashes=1, releases=1),
}


class FeedsHaveNoNumbers(Fold):
    def _feed(self, record: FeedMessage) -> Effects:
        self.producers.known.pop(record.publisher, None)
        return super()._feed(record)


class TopicsDoNotWait(Fold):
    def _is_first(self, task: StoredTask) -> bool:
        task.ordered = False
        return super()._is_first(task)


class TheDeadHoldTheirTopic(Fold):
    def _bury(self, task: StoredTask) -> None:
        self.dead[task.producer, task.sequence] = task


class EndsAreForgotten(Fold):
    def _be_ready(self, task: StoredTask) -> None:
        self.ready.put_back(task)


class WhatIsOverHoldsItsTopic(Fold):
    def _come_back(self, task: StoredTask) -> None:
        self._lapse(task)


HARMFUL: dict[str, tuple[GroupConfig, str]] = {
    "publishers' numbers are kept": (GroupConfig(ONE_TOPIC, crashes=1, fold=FeedsHaveNoNumbers), "G1: "),
    "the position is kept behind its messages": (GroupConfig(ONE_TOPIC, crashes=1, early=True), "G3: "),
    "one of a topic at a time": (GroupConfig(ONE_TOPIC, fold=TopicsDoNotWait), "G2: "),
    "what comes back still ends": (GroupConfig(ONE_ENTRY, pending=2, releases=1, ending=FIRST, fold=EndsAreForgotten), "G4: "),
    "what is over lets the next one go": (
        GroupConfig(ONE_ENTRY, releases=1, ending=FIRST, fold=WhatIsOverHoldsItsTopic),
        "G3: ",
    ),
    "a dead letter lets the next one go": (GroupConfig(ONE_TOPIC, rejects=1, fold=TheDeadHoldTheirTopic), "G3: "),
}


def show(name: str, found: Found) -> str:
    return "\n    ".join((f"{name}: {found.states} states, {found.ends} ends, {found.depth} steps deep", *found.trail))


@pytest.mark.parametrize("name", HEALTHY)
def test_every_interleaving_keeps_the_promises_of_groups(name: str) -> None:
    found = explore(GroupModel(HEALTHY[name]))
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.ends, "no search came to an end"
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("rule", HARMFUL)
def test_without_this_rule_a_promise_of_groups_is_broken(rule: str) -> None:
    config, harm = HARMFUL[rule]
    found = explore(GroupModel(config))
    assert found.trail, f"nothing is harmed without the rule: {rule}"
    log.info(show(f"without {rule} ({len(found.trail) - 1} steps)", found))
    assert re.search(harm, found.trail[-1]), show(rule, found)
    sound = explore(GroupModel(config._replace(fold=Fold, early=False)))
    assert not sound.trail, show(rule, sound)

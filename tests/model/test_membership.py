"""The Monitor's membership machine in random order of everything: nobody is cut off, and it is right in the end.

Seeded random walks through queue_twin.py, which says what has to hold and what is not covered. A walk that fails is shortened
before it is shown.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from roq.monitor.membership import Membership
from roq.monitor.records import Exchange
from tests.model.queue_twin import EXCHANGES, PUBLISHERS, SUBSCRIBERS, Queue

WALKS, STEPS = 300, 70  # per seed
Step = tuple[str, tuple[Any, ...]]
OFTEN: dict[str, tuple[Any, ...]] = {
    "exchange_forwards": (PUBLISHERS, (True, True, True, False)),
    "newest_path_is_faster": (PUBLISHERS,),
    "exchange_welcomes": (PUBLISHERS,),
    "link_breaks": (PUBLISHERS,),
    "publisher_reports": (PUBLISHERS,),
    "report_arrives": (PUBLISHERS,),
    "notice_arrives": (PUBLISHERS,),
    "subscriber_takes_notice": (SUBSCRIBERS,),
    "probes_arrive": (SUBSCRIBERS,),
    "retire_arrives": (SUBSCRIBERS,),
    "subscriber_report_arrives": (SUBSCRIBERS,),
    "move": (PUBLISHERS, EXCHANGES),
    "second_passes": ((0.5, 1.0, 2.5),),
    "publisher_joins": (PUBLISHERS,),
    "subscriber_joins": (SUBSCRIBERS,),
    "calm_second": (),
}
SELDOM: dict[str, tuple[Any, ...]] = {
    "drain": (EXCHANGES,),
    "exchange_starts": (EXCHANGES,),
    "exchange_dies": (EXCHANGES,),
    "publisher_gives_up_on_fin": (PUBLISHERS,),
    "publisher_closes": (PUBLISHERS,),
    "subscriber_gives_up": (SUBSCRIBERS,),
}


def walk(steps: list[Step]) -> str:
    """What went wrong, "" if nothing."""
    queue = Queue()
    try:
        for name, arguments in steps:
            getattr(queue, name)(*arguments)
            queue.monitor.check()
        queue.rest()
    except AssertionError as error:
        return str(error).split("\n")[0] or "assertion"
    return ""


def shorten(steps: list[Step]) -> list[Step]:
    """Leave out what the failure does not need."""
    at = len(steps) - 1
    while at >= 0:
        fewer = steps[:at] + steps[at + 1 :]
        if walk(fewer):
            steps = fewer
        at -= 1
    return steps


def find(seed: int) -> str:
    """The first walk that fails, shortened; "" if none does."""
    chance = random.Random(seed)
    for _ in range(WALKS):
        steps: list[Step] = [("exchange_starts", (id,)) for id in EXCHANGES[: chance.randint(1, 3)]]
        for _ in range(STEPS):
            kinds = SELDOM if chance.random() < 0.1 else OFTEN
            name = chance.choice(list(kinds))
            steps.append((name, tuple(chance.choice(domain) for domain in kinds[name])))
        if walk(steps):
            steps = shorten(steps)
            return "\n".join([f"{name}{arguments}" for name, arguments in steps] + [f"==> {walk(steps)}"])
    return ""


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events(seed: int) -> None:
    found = find(seed)
    assert not found, found


def retire_as_soon_as_told(self: Membership, exchange: str) -> bool:
    return self.load(exchange) > 0


def active_unproved(self: Membership, exchange: Exchange, now: float) -> bool:
    return True


@pytest.mark.parametrize(
    ("rule", "without", "harm"),
    [("_used", retire_as_soon_as_told, "RETIRE through"), ("_proved", active_unproved, "carries")],
)
def test_without_this_rule_a_walk_fails(rule: str, without: object, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, rule, without)
    found = find(0)
    assert harm in found, found

"""The Monitor's membership machine in random order of everything: nobody is cut off, and it is right in the end.

Seeded random walks through queue_twin.py, which says what has to hold and what is not covered. A walk that fails is shortened
before it is shown.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable
from typing import Any

import pytest

from roq.pubsub.monitor.membership import Membership
from roq.pubsub.monitor.records import JOINING_SECONDS, Exchange, SubscriberRecord
from roq.pubsub.monitor.takeover import NEWCOMER_SECONDS, ExpectedSubscribers, Takeover
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
    "confirmation_arrives": (PUBLISHERS,),
    "monitor_hears": (EXCHANGES,),
    "subscriber_takes_notice": (SUBSCRIBERS,),
    "attachments_are_proved": (SUBSCRIBERS,),
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
    "monitor_restarts": (EXCHANGES,),
    "monitor_is_replaced": (EXCHANGES,),
    "former_is_fenced": (),
}
TOLD = ((), PUBLISHERS, (*PUBLISHERS, *SUBSCRIBERS), (*PUBLISHERS, SUBSCRIBERS[0]), SUBSCRIBERS)
WITH_STOPS = {**SELDOM, "host_stops": (EXCHANGES, TOLD)}


def starts(id: str) -> list[Step]:
    return [("exchange_starts", (id,)), ("monitor_hears", (id,))]


def walk(steps: list[Step]) -> str:
    """What went wrong, "" if nothing."""
    queue = Queue()
    try:
        for name, arguments in steps:
            getattr(queue, name)(*arguments)
            queue.monitor.check()
            queue.passing_by_is_counted()
            if queue.monitor._settled:  # a subscriber's report would not have been followed by this
                assert not queue.monitor._settle(queue.now), "left undone"
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


def find(seed: int, seldom: dict[str, tuple[Any, ...]] = SELDOM) -> str:
    """The first walk that fails, shortened; "" if none does."""
    chance = random.Random(seed)
    for _ in range(WALKS):
        steps = [step for id in EXCHANGES[: chance.randint(1, 3)] for step in starts(id)]
        for _ in range(STEPS):
            kinds = seldom if chance.random() < 0.1 else OFTEN
            name = chance.choice(list(kinds))
            steps.append((name, tuple(chance.choice(domain) for domain in kinds[name])))
        if walk(steps):
            steps = shorten(steps)
            return "\n".join([f"{name}{arguments}" for name, arguments in steps] + [f"==> {walk(steps)}"])
    return ""


@pytest.mark.parametrize("seed", [*range(6), 12, 30])  # the last two each need a rule that the others do not
def test_any_order_of_events(seed: int) -> None:
    found = find(seed)
    assert not found, found


@pytest.mark.parametrize("seed", [0, 1, 17, 25])
def test_any_order_of_events_when_the_monitor_is_stopped_with_its_host(seed: int) -> None:
    found = find(seed, WITH_STOPS)
    assert not found, found


def test_who_has_to_look_for_the_monitor_has_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpectedSubscribers, "until", lambda self, seconds, begun: begun + seconds)
    assert "can't get" in find(25, WITH_STOPS)


def nobody_is_counted(self: ExpectedSubscribers, present: Container[int], now: float) -> bool:
    return now < self.awaited_until and any(one not in present for one in self._living)


def test_who_did_not_hear_that_the_monitor_ends_is_waited_for_by_those_who_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpectedSubscribers, "awaited", nobody_is_counted)
    assert "can't get" in find(17, WITH_STOPS)


def retire_as_soon_as_told(self: Membership, exchange: str) -> bool:
    return self.load(exchange) > 0


def active_unproved(self: Membership, exchange: Exchange, now: float) -> bool:
    return exchange.heard


def active_unheard(self: Membership, exchange: Exchange, now: float) -> bool:
    heard, exchange.heard = exchange.heard, True
    try:
        return RULE_PROVED(self, exchange, now)
    finally:
        exchange.heard = heard


RULE_PROVED = Membership._proved


def everybody_is_known(self: Membership, now: float) -> bool:
    return True


def nothing_is_waited_for(self: Takeover, now: float) -> tuple[str, ...]:
    return ()


def former_lives_are_forgotten(self: Takeover, now: float) -> tuple[str, ...]:
    return () if self.begun is None or now - self.begun >= NEWCOMER_SECONDS else ("young",)


REPORTS: list[Step] = [(name, (22,)) for name in ("attachments_are_proved", "subscriber_report_arrives")]
LISTENS: list[Step] = [("subscriber_takes_notice", (22,))] * 9
NEW_PUBLISHER: list[Step] = [
    *[*starts("A"), ("subscriber_joins", (21,)), ("subscriber_joins", (22,)), ("calm_second", ())],
    *[("attachments_are_proved", (21,)), ("subscriber_report_arrives", (21,)), ("exchange_dies", ("A",))],
    *[("monitor_restarts", ("C",)), *starts("B"), *REPORTS, *LISTENS, *REPORTS, ("second_passes", (2.0,))],
    *[("publisher_joins", (12,)), ("notice_arrives", (12,)), ("exchange_welcomes", (12,))],
]
FORMER_EXCHANGE: list[Step] = [
    *[*starts("A"), ("publisher_joins", (11,)), *starts("B"), ("calm_second", ())],
    *[("monitor_is_replaced", ("A",)), ("subscriber_joins", (21,)), *[("calm_second", ())] * 7],
]
DEAD_SUBSCRIBER: list[Step] = [
    *[*starts("A"), ("subscriber_joins", (21,)), ("publisher_joins", (11,)), ("calm_second", ())],
    *[("exchange_dies", ("A",)), *starts("A"), *[("second_passes", (0.5,))] * 6, ("somebody_is_served", (11,))],
]


def silent_are_waited_for(one: SubscriberRecord, now: float) -> bool:
    return one.ready or now - one.joined < JOINING_SECONDS


@pytest.mark.parametrize(
    ("place", "rule", "without", "steps", "harm"),
    [
        (Membership, "all_back", everybody_is_known, NEW_PUBLISHER, "can't get"),
        (Takeover, "waits", former_lives_are_forgotten, FORMER_EXCHANGE, "told that it is ready"),
        (SubscriberRecord, "waited_for", silent_are_waited_for, DEAD_SUBSCRIBER, "waits for the dead"),
    ],
)
def test_a_situation_that_chance_hardly_meets(
    place: object, rule: str, without: object, steps: list[Step], harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert walk(steps) == ""
    monkeypatch.setattr(place, rule, without)
    assert harm in walk(steps)


def miss_in_silence(self: SubscriberRecord, tokens: Iterable[str]) -> None:
    self.ready = self.ready and self.attached.issuperset(tokens)


def nobody_is_awaited(self: ExpectedSubscribers, present: Container[int], now: float) -> bool:
    return False


def never_wait_for_a_report(self: Membership) -> bool:
    return True


@pytest.mark.parametrize(
    ("place", "rule", "without", "harm"),
    [
        (Membership, "_used", retire_as_soon_as_told, "RETIRE through|sends through"),
        (Membership, "_proved", active_unproved, "that subscriber|carries unproved"),
        (Membership, "_proved", active_unheard, "does not hear it"),
        (Takeover, "waits", nothing_is_waited_for, "told that it is ready"),
        (Membership, "_nothing_pending", never_wait_for_a_report, "left undone"),
        (SubscriberRecord, "may_miss", miss_in_silence, "was passed by"),
        (ExpectedSubscribers, "awaited", nobody_is_awaited, "can't get"),
    ],
)
def test_without_this_rule_a_walk_fails(
    place: object, rule: str, without: object, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, rule, without)
    found = find(0) or find(2) or find(3)
    assert any(words in found for words in harm.split("|")), found

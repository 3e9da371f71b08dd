"""A subscriber that begins with the past: nothing lost, doubled or out of order, whatever is read first; what waits is needed.

The model, the script of a history and what is not covered: tapes.py. Run with `--log-cli-level=info` to see the sizes of the
searches and, without the safeguard, the shortest way to harm.
"""

from __future__ import annotations

import logging

import pytest

from roq.pubsub.order import OrderSafeguards
from roq.pubsub.tape import SKEW_MS
from tests.harness.tiers import but_long
from tests.model.search import Found, explore
from tests.model.tapes import TapesConfig, TapesModel

log = logging.getLogger(__name__)
STATES_MIN = 1_000  # that each healthy search visits


def messages(first: int, last: int) -> str:
    return " ".join(f"m{number}" for number in range(first, last + 1))


def deaths(sent: int) -> tuple[str, ...]:
    """A's tape has so many messages, and the replay begins with one that is on it, or with the next."""
    return tuple(
        f"A: open1 {messages(1, taped)} end | B: open2!A {messages(first, sent)}"
        for taped in range(sent + 1)
        for first in range(1, min(taped + 1, sent) + 1)
    )


def deaths_after_a_move(at_a: str) -> tuple[str, ...]:
    """B's tape has so much of the path through it, and the replay on C begins with what is missing there, or before that."""
    return tuple(
        f"A: open1 m1 fin1 {at_a} | B: {taped} end | C: open3!B {messages(first, 3)}"
        for taped, missing in (("", 2), ("open2-A", 2), ("open2-A m2", 3))
        for first in range(1, missing + 1)
    )


BACK = "A: open1 m1 fin1 | B: open2-A m2 fin2 {} | A: open3-B m3"
THERE_AND_BACK = (BACK.format(""), BACK.format("end"))
SAME_AGAIN = ("A: open1 m1 m2 open2!A m2 m3 | B: qopen1 qm1", "A: open1 m1 open2!A m1 m2 | B: qopen1 end")
MOVED_AND_DIED = (
    "A: open1 m1 taped fin1 | B: open2-A m2 m3 end | C: open3!B m4",
    "A: open1 m1 taped fin1 | B: open2-A m2 m3 open3!B m3 m4",
    "A: open1 m1 taped fin1 | B: open2-A m2 m3 open3!B m4",
)
LEFT_ONE_DIES = tuple(f"A: open1 m1 end | B: open2-A m3 open3!B taped {messages(first, 4)}" for first in (1, 2))
BOTH_DIE = tuple(f"A: open1 m1 end | B: open2-A m3 end | C: open3!B taped {messages(first, 4)}" for first in (1, 2))
LEFT_ONE_HAD_NOTHING = tuple(f"A: end | B: open2-A {then}open3!B taped {messages(1, 4)}" for then in ("", "m3 "))
OPENED_UNRECORDED = ("A: open1 m1 m2 end | B: ~open2-A m3 m4", "A: open1 m1 end | B: ~open3-A m2 fin3 | A: qopen1")
LEFT_ONE_IS_SLOW = (
    "A: open1 m1 | B: open2-A m3 | A: qopen1 qm1 m2 fin1",
    "A: open1 m1 fin1 open3-B m4 | B: qopen1 open2-A m2 m3 fin2",
)
TWO = "A: open1 m1 | B: qopen1 qm1 | A: fin1 | B: open2-A m2 qfin1 {} | A: qopen2-B qm2"
FORWARDED_LATE = "A: open1 m1 taped | B: open2!A m2 m3 | A: m2 m3 qopen1"
WATERMARKS = "A: open1 m1 m2 fin1 end | B: qopen1 w1-2 qm1"
ALONE = TapesConfig((), together=False, offsets=(0, SKEW_MS // 2, SKEW_MS))
HEALTHY = {
    "there and back": ALONE._replace(histories=THERE_AND_BACK),
    "there and back, some of it in one entry": TapesConfig(THERE_AND_BACK[:1], paces=(1,)),
    "an Exchange dies": ALONE._replace(histories=deaths(3)),
    "an Exchange dies, some of it in one entry": TapesConfig(deaths(2)),
    "a move, then a death": TapesConfig(deaths_after_a_move("taped"), paces=(1, SKEW_MS // 2), together=False),
    "a move, then a death, and the first one is gone": TapesConfig(deaths_after_a_move("end"), paces=(1,), together=False),
    "the same Exchange again": ALONE._replace(histories=SAME_AGAIN),
    "the one that was left dies before its FIN": ALONE._replace(histories=LEFT_ONE_DIES, paces=(1, SKEW_MS // 4)),
    "the one that was left dies before its FIN, and the next one": ALONE._replace(histories=BOTH_DIE, paces=(1,)),
    "the one that was left dies with an empty tape": ALONE._replace(histories=LEFT_ONE_HAD_NOTHING, paces=(1, SKEW_MS // 4)),
    "the one that was left is slow": ALONE._replace(histories=LEFT_ONE_IS_SLOW),
    "one forwards what was sent again elsewhere": TapesConfig((FORWARDED_LATE,), together=False),
    "a watermark through another one": ALONE._replace(histories=(WATERMARKS,)),
    "two publishers": TapesConfig((TWO.format(""), TWO.format("end")), together=False),
}
LAGGING = {
    "there and back": THERE_AND_BACK,
    "an Exchange dies": deaths(2),
    "a move, then a death": deaths_after_a_move("taped")[1:4],
    "the same Exchange again": SAME_AGAIN,
    "the one that was left is slow": LEFT_ONE_IS_SLOW,
    "a path was opened while nothing was recorded": OPENED_UNRECORDED,
    "two publishers": (TWO.format(""),),
}
IDLE = (
    "A: open1 m1 taped | B: open2!A m2 m3",
    *(f"A: open1 m1 m2 taped | B: open2!A {messages(first, 4)}" for first in (2, 3)),
)
FOLLOWING = TapesConfig((), paces=(1,), together=False, lagging=True, stored=True)
STORED = {
    "the one that was left lives and is idle": FOLLOWING._replace(histories=IDLE, paces=(1, SKEW_MS // 2)),
    "there and back": FOLLOWING._replace(histories=THERE_AND_BACK),
    "an Exchange dies": FOLLOWING._replace(histories=deaths(2)),
    "a move, then a death": FOLLOWING._replace(histories=deaths_after_a_move("taped")[1:4], offsets=(0,)),
    "the same Exchange again": FOLLOWING._replace(histories=SAME_AGAIN),
    "the one that was left dies before its FIN": FOLLOWING._replace(histories=LEFT_ONE_DIES),
    "the one that was left dies with an empty tape": FOLLOWING._replace(histories=LEFT_ONE_HAD_NOTHING),
    "the one that was left is slow": FOLLOWING._replace(histories=LEFT_ONE_IS_SLOW),
    "a path was opened while nothing was recorded": FOLLOWING._replace(histories=OPENED_UNRECORDED),
    "a watermark through another one": FOLLOWING._replace(histories=(WATERMARKS,)),
    "two publishers": FOLLOWING._replace(histories=(TWO.format(""),)),
}
AGAIN = TapesConfig((), paces=(1,), together=False, offsets=(0,), again=True)
BEGUN_AGAIN = {
    "there and back": AGAIN._replace(histories=THERE_AND_BACK),
    "an Exchange dies": AGAIN._replace(histories=deaths(2)),
    "a move, then a death": AGAIN._replace(histories=deaths_after_a_move("taped")),
    "a move, then a death, and the first one is not read": AGAIN._replace(histories=MOVED_AND_DIED),
    "the same Exchange again": AGAIN._replace(histories=SAME_AGAIN),
    "the one that was left dies before its FIN": AGAIN._replace(histories=LEFT_ONE_DIES),
    "the one that was left is slow": AGAIN._replace(histories=LEFT_ONE_IS_SLOW),
    "two publishers": AGAIN._replace(histories=(TWO.format(""),)),
}
WITHOUT = OrderSafeguards(await_tapes=False)
HARMFUL = {
    "await_tapes": {
        name: config._replace(order=WITHOUT)
        for name, config in HEALTHY.items()
        if config.histories != SAME_AGAIN  # nobody waits there
    }
}


def found_in(name: str, config: TapesConfig) -> tuple[Found, str]:
    """And how to show it."""
    model = TapesModel(config)
    found = explore(model)
    sizes = f"{name}: {len(model.worlds)} worlds, {found.states} states, {found.ends} ends, {found.depth} steps deep"
    log.info("\n    ".join((sizes, *found.trail)))
    return found, "\n    ".join((sizes, *found.trail))


@pytest.mark.parametrize("name", HEALTHY)
def test_every_way_of_reading_keeps_the_promises(name: str) -> None:
    found, shown = found_in(name, HEALTHY[name])
    assert not found.trail, shown
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("name", but_long(LAGGING, "a move, then a death"))
def test_tapes_that_stand_still_are_waited_for(name: str) -> None:
    found, shown = found_in(name, TapesConfig(LAGGING[name], paces=(1,), together=False, lagging=True))
    assert not found.trail, shown
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("name", STORED)
def test_who_follows_what_is_stored_waits_for_nobody_for_ever(name: str) -> None:
    found, shown = found_in(name, STORED[name])
    assert not found.trail, shown
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("name", BEGUN_AGAIN)
def test_who_goes_on_at_a_position_gets_what_the_one_before_had_not(name: str) -> None:
    found, shown = found_in(name, BEGUN_AGAIN[name])
    assert not found.trail, shown
    assert found.states >= STATES_MIN


@pytest.mark.parametrize(
    ("config", "harm"),
    [
        (FOLLOWING._replace(histories=IDLE, see_ends=False), "was never given"),
        (FOLLOWING._replace(histories=IDLE, margin_ms=0), "is given after"),
    ],
    ids=["it does not see that an idle tape has nothing", "it takes for nothing what is not confirmed yet"],
)
def test_the_rules_of_a_tapes_end_are_needed(config: TapesConfig, harm: str) -> None:
    found, shown = found_in("controls", config)
    assert found.trail, f"superfluous, or the model is too small: {shown}"
    assert harm in found.trail[-1], shown


@pytest.mark.parametrize("name", HARMFUL["await_tapes"])
def test_without_the_safeguard_there_is_harm(name: str) -> None:
    found, shown = found_in(f"{name}, without await_tapes", HARMFUL["await_tapes"][name])
    assert found.trail, f"superfluous, or the model is too small: {shown}"
    assert "is given" in found.trail[-1] or "reported lost" in found.trail[-1], shown

"""The judge over transactions that programs were killed in (tests/harness/moving.py): it finds each thing that must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness.moving import MovedLedger, judge

Found = dict[str, list[str]]
Tamper = Callable[[MovedLedger, Found], None]
SAID = """leased 1.0 7.0 7.1
asked a.0 7.0 7.1
committed 2.0 a.0
asked a.1 a.1
committed 3.0 a.1
leased 3.5 7.2
undone a.2~
asked a.2 7.2
leased 1.5 7.0
leased 9.0 7.2
asked b.0 7.2
committed 10.0 b.0
asked b.1 b.1
committed 11.0 b.1
asked b.2 b.2
committed 12.0 b.2"""
SHOWN = ["a.0 7.0", "a.0 7.1", "a.1 a.1", "b.0 7.2", "b.1 b.1", "b.2 b.2"]
DONE = {"7.0", "7.1", "7.2"}


def scene() -> tuple[MovedLedger, Found]:
    """All is right: a.2 was cut off and did not take effect."""
    ledger = MovedLedger()
    for line in SAID.splitlines():
        ledger.heard(line)
    return ledger, {queue: list(SHOWN) for queue in ("moved", "copied")}


def test_what_is_right_is_right() -> None:
    ledger, found = scene()
    assert judge(ledger, found, DONE) == []
    ledger.asked["c.0"] = ["c.0"]
    assert judge(ledger, found, DONE) == [], "nobody knows whether it took effect: it did not"
    for payloads in found.values():
        payloads.append("c.0 c.0")
    assert judge(ledger, found, DONE) == [], "it did"


def without(payload: str, *queues: str) -> Tamper:
    """It is missing in these queues, none named: in all."""

    def tamper(ledger: MovedLedger, found: Found) -> None:
        for queue in queues or found:
            found[queue].remove(payload)

    return tamper


def with_more(payload: str, *queues: str) -> Tamper:
    """It is there (once more) in these queues, none named: in all."""

    def tamper(ledger: MovedLedger, found: Found) -> None:
        for queue in queues or found:
            found[queue].append(payload)

    return tamper


def last_first(ledger: MovedLedger, found: Found) -> None:
    """In one queue."""
    found["moved"].insert(0, found["moved"].pop())


WRONG: dict[str, Tamper] = {
    "show in some queues only": without("b.1 b.1", "moved"),
    "were committed and don't show": without("b.1 b.1"),
    "show that nobody committed": with_more("a.2~ 7.2"),
    "a.1": lambda ledger, found: ledger.undone.add("a.1"),
    "are not as they were": without("a.0 7.1"),
    "b.1": with_more("b.1 b.1", "copied"),
    "were moved twice": with_more("a.2 7.2"),
    "are done and were not moved": without("b.0 7.2"),
    "were moved and are not done": with_more("a.2 7.3"),
    "behind later ones of their program": last_first,
    "came again after their ack was committed": lambda ledger, found: ledger.heard("leased 2.5 7.1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str) -> None:
    ledger, found = scene()
    WRONG[what](ledger, found)
    assert any(what in one for one in judge(ledger, found, DONE))

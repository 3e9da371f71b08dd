"""Transactions: all or nothing, each message once and in order, whoever crashes when; each rule is needed.

The model and what it does not cover: transactions.py.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from roq.workqueue.fold import APPLIED, Effects, Fold
from roq.workqueue.records import CommitTransaction
from tests.model.search import Found, explore
from tests.model.transactions import POISON, TransactionConfig, TransactionModel

log = logging.getLogger(__name__)
STATES_MIN = 300
THREE = ("t", "t", "t")
HEALTHY = {
    "two crashes": TransactionConfig(THREE, crashes=2),
    "a crash loses two records": TransactionConfig(crashes=1, pending=2),
    "a message goes to another member, and a crash": TransactionConfig(expiries=1, crashes=1),
    "a zombie": TransactionConfig(takeovers=1),
    "a zombie, and a forwarder that dies": TransactionConfig(takeovers=1, deaths=1, sends=1),
    "a zombie, and a message that no queue takes": TransactionConfig(("t", POISON, "t"), takeovers=1, sends=1),
    "nothing is acked": TransactionConfig(THREE, acks=False, crashes=1, deaths=1),
    "the queue is created anew": TransactionConfig(THREE, recreations=1, crashes=1, sends=1),
    "the queue is created anew, and a zombie": TransactionConfig(recreations=1, takeovers=1, sends=1),
    "it is forgotten between two messages, and crashes": TransactionConfig(forgets=True, crashes=1, pending=2),
    "it is forgotten, and a zombie": TransactionConfig(forgets=True, takeovers=1, deaths=1, sends=1),
    "it is forgotten, and created anew": TransactionConfig(forgets=True, recreations=1, crashes=1, sends=1),
}


class NumbersAreNotKept(Fold):
    def _commit(self, record: CommitTransaction) -> Effects:
        effects = super()._commit(record)
        self.transactions.known.pop(record.producer, None)
        return effects


class LostLeasesDoNotMatter(Fold):
    def lost(self, deliveries: object) -> list[int]:
        return []

    def _commit(self, record: CommitTransaction) -> Effects:
        for delivery, _ in record.deliveries:
            if (task := self.leased.pop(delivery, None)) is not None:
                self.completed += 1
                self._go_on_behind(task) if task.ordered else None
        self.transactions.use(record.producer, record.sequence, self.clock)
        self.outbox.add(record.outgoing)
        return APPLIED


HARMFUL: dict[str, tuple[TransactionConfig, dict[str, Any], str]] = {
    "numbers of transactions are kept": (TransactionConfig(("t",), acks=False), {"fold": NumbersAreNotKept}, "X1: "),
    "a lost lease aborts": (TransactionConfig(("t",), expiries=1), {"fold": LostLeasesDoNotMatter}, "X1: "),
    "only what is durable leaves": (TransactionConfig(crashes=1, sends=1), {"only_durable": False}, "X1: |X4: "),
    "the producer's number is read": (TransactionConfig(("t",), crashes=1), {"read_number": False}, "X1: "),
    "the log is proved after the producer is opened": (
        TransactionConfig((POISON, "t", "t"), takeovers=1, sends=1),
        {"prove_after_open": False},
        "X1: |X3: ",
    ),
    "a producer is of one life of its queue": (
        TransactionConfig(recreations=1, crashes=1, sends=1),
        {"compare_tapes": False},
        "X1: |X3: ",
    ),
    "where it counts from is durable first": (TransactionConfig(recreations=1, crashes=1), {"certain": False}, "X1: |X3: "),
    "only what nothing waits for is forgotten": (
        TransactionConfig(("t",), forgets=True, crashes=1, sends=1),
        {"idle_only": False},
        "X1: ",
    ),
    "the producer before is fenced": (TransactionConfig(("t",), takeovers=1, sends=1), {"fence": False}, "X1: "),
}


def show(name: str, found: Found) -> str:
    return "\n    ".join((f"{name}: {found.states} states, {found.ends} ends, {found.depth} steps deep", *found.trail))


@pytest.mark.parametrize("name", HEALTHY)
def test_every_interleaving_keeps_the_promises_of_transactions(name: str) -> None:
    found = explore(TransactionModel(HEALTHY[name]))
    log.info(show(name, found))
    assert not found.trail, show(name, found)
    assert found.ends, "no search came to an end"
    assert found.states >= STATES_MIN


@pytest.mark.parametrize("rule", HARMFUL)
def test_without_this_rule_a_promise_of_transactions_is_broken(rule: str) -> None:
    config, without, harm = HARMFUL[rule]
    found = explore(TransactionModel(config._replace(**without)))
    assert found.trail, f"nothing is harmed without the rule: {rule}"
    log.info(show(f"without {rule} ({len(found.trail) - 1} steps)", found))
    assert re.search(harm, found.trail[-1]), show(rule, found)
    sound = explore(TransactionModel(config))
    assert not sound.trail, show(rule, sound)

"""Lists of the console: what of ten thousand queues is shown, and to whom."""

from __future__ import annotations

import pytest

from roq.console.identity import (
    ANYBODY,
    names_shown,
    proxied,
)
from roq.console.summary import chosen_queues, page
from roq.wire import gcm
from roq.wire.assignment import QueueRecord, QueueSettings
from roq.wire.card import Grant, Right
from roq.wire.policy import Policy


def test_ten_thousand_queues_are_searched_and_paged() -> None:
    infos = [
        gcm.QueueInfo(QueueRecord(name, QueueSettings(), number % 10 != 0, "host-1", 1, {}, 0.0), (), True, Policy())
        for number, name in enumerate([*(f"Queue-{number:05}" for number in range(10_000)), "_roq.kpi"])
    ]
    everything = chosen_queues(infos, "", "all", None, lambda name: True)
    assert [one.record.name for one in page(everything, 9_998, 50)] == ["Queue-09998", "Queue-09999"]
    assert [one.record.name for one in chosen_queues(infos, "queue-0123", "all", None, lambda name: True)] == [
        f"Queue-0123{number}" for number in range(10)
    ]
    assert len(chosen_queues(infos, "", "stopped", None, lambda name: True)) == 1000
    assert [one.record.name for one in chosen_queues(infos, "", "own", None, lambda name: True)] == ["_roq.kpi"]
    assert chosen_queues(infos, "", "all", {"Queue-00777": 5.0}, lambda name: True)[0].record.name == "Queue-00777"
    assert len(chosen_queues(infos, "", "all", None, lambda name: name < "Queue-00010")) == 10


@pytest.mark.parametrize(
    ("grants", "shown"),
    [
        (None, [True, True, True]),
        ([Grant(Right.DESCRIBE, "*")], [True, True, True]),
        ([Grant(Right.DESCRIBE, "orders*")], [True, True, False]),
        ([Grant(Right.DESCRIBE, "orders")], [True, False, False]),
        ([Grant(Right.READ, "*")], [False, False, False]),
    ],
)
def test_a_list_has_the_names_that_may_be_described(grants: list[Grant] | None, shown: list[bool]) -> None:
    person = ANYBODY if grants is None else proxied("alice", tuple(grants))
    found = names_shown(person, Right.DESCRIBE)
    assert [found(name) for name in ("orders", "orders.eu", "bills")] == shown

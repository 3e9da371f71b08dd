"""Performing decisions against a Monitor and a GCM that answer from a script."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from roq.errors import DeadlineExceeded, HostFull, RoqError
from roq.pubsub.scaling.load import NEW
from roq.pubsub.scaling.process import DECISIONS_WAITING, NO_SLOT, Performer
from roq.runtime.observe import Counters
from roq.wire import gcm, monitor
from roq.wire.kpi import Decision

OUT = Decision(1.0, "scale-out", "too much", moves=((1, NEW), (2, NEW)))
IN = Decision(2.0, "scale-in", "too little", exchange="b", moves=((1, "a"),))


class Script:
    """Answers every request by its type; keeps what it was asked."""

    def __init__(self, answers: dict[type, msgspec.Struct | RoqError]) -> None:
        self.answers, self.asked = answers, list[Any]()
        self.closed = 0

    async def request(self, body: msgspec.Struct, expect: type, timeout_seconds: float = 1.0) -> Any:
        self.asked.append(body)
        answer = self.answers.get(type(body), monitor.Recorded())
        if isinstance(answer, RoqError):
            raise answer
        assert isinstance(answer, expect)
        return answer

    def close(self) -> None:
        self.closed += 1

    def kinds(self) -> list[str]:
        return [type(each).__name__ for each in self.asked]


def performer(**answers: msgspec.Struct | RoqError) -> tuple[Performer, Script, Script]:
    usual: dict[type, msgspec.Struct | RoqError] = {
        monitor.Move: answers.get("move", monitor.Moved(2)),
        monitor.Drain: answers.get("drain", monitor.Drained()),
        monitor.AwaitExchange: answers.get("active", monitor.Recorded()),
        monitor.RecordDecision: answers.get("record", monitor.Recorded()),
    }
    leader: dict[type, msgspec.Struct | RoqError] = {
        gcm.CreateExchange: answers.get("create", gcm.ExchangeCreated("c", "h2")),
        gcm.RemoveExchange: answers.get("remove", gcm.Done()),
    }
    asked_monitor, asked_gcm = Script(usual), Script(leader)
    return Performer("q", asked_monitor, lambda: asked_gcm, Counters()), asked_monitor, asked_gcm


async def test_scale_out() -> None:
    subject, asked_monitor, asked_gcm = performer()
    done = await subject.perform(OUT)
    assert asked_monitor.kinds() == ["RecordDecision", "AwaitExchange", "Move", "RecordDecision"]
    assert asked_monitor.asked[2].moves == ((1, "c"), (2, "c"))
    assert asked_monitor.asked[0].decision == OUT
    assert (done.exchange, done.host, done.outcome) == ("c", "h2", "created on host h2; 2 of 2 publishers moved")
    assert asked_gcm.asked[0].queue == "q"
    assert asked_gcm.closed == 1


async def test_scale_in() -> None:
    subject, asked_monitor, asked_gcm = performer(move=monitor.Moved(0, ("it left",)))
    done = await subject.perform(IN)
    assert asked_monitor.kinds() == ["RecordDecision", "Move", "Drain", "RecordDecision"]
    assert asked_gcm.asked[0].exchange == "b"
    assert done.outcome == "0 of 1 publishers moved; refused: it left; removed"


async def test_no_free_slot() -> None:
    subject, asked_monitor, asked_gcm = performer(create=HostFull())
    assert (await subject.perform(OUT)).outcome == NO_SLOT
    assert asked_monitor.kinds() == ["RecordDecision", "RecordDecision"]
    assert asked_gcm.closed == 1


@pytest.mark.parametrize("step", ["create", "active", "move", "drain", "remove"])
async def test_failures_become_outcomes(step: str) -> None:
    subject, asked_monitor, _ = performer(**{step: DeadlineExceeded("too late")})
    outcomes = [(await subject.perform(each)).outcome for each in (OUT, IN)]
    assert any(each.startswith("failed") and each.endswith("DeadlineExceeded: too late") for each in outcomes)
    assert asked_monitor.kinds()[-1] == "RecordDecision"


async def test_an_exchange_that_is_never_removed_while_not_drained() -> None:
    subject, _, asked_gcm = performer(drain=DeadlineExceeded())
    await subject.perform(IN)
    assert asked_gcm.asked == []


async def test_hold_is_only_recorded_and_a_deaf_monitor_is_no_harm() -> None:
    subject, asked_monitor, _ = performer(record=DeadlineExceeded())
    await subject.perform(Decision(1.0, "hold", "why"))
    assert asked_monitor.kinds() == ["RecordDecision"]
    await subject.perform(Decision(1.0, "rebalance", "why", moves=((1, "a"),)))
    assert asked_monitor.kinds() == ["RecordDecision", "RecordDecision", "Move", "RecordDecision"]


async def test_waiting_decisions_are_bounded() -> None:
    subject, _, _ = performer()
    for _ in range(DECISIONS_WAITING + 3):
        subject.offer(OUT)
    assert subject._counters["decisions_dropped"] == 3

"""Ways between a host and clients that answer with resets for a moment, in simulated clusters: who sends knows that a
connection broke, who only reads does not. Nothing is lost all the same; without one of the three rules of 0083, it is."""

from __future__ import annotations

from random import Random

import pytest

from roq.pubsub.deferred import DeferredWatermarks
from roq.pubsub.exchange import absent
from roq.pubsub.links import Attachment
from roq.tools.simulation.faults import Fault, FaultKind
from roq.tools.simulation.hunt import story
from roq.tools.simulation.run import FAULT_SECONDS, Run, simulate

SEEDS = (*range(20), 50)
KEPT = [pytest.param(seed, marks=[] if seed else [pytest.mark.quick]) for seed in SEEDS]


def reset(seed: int) -> Run:
    random = Random(seed)
    at, faults = 6.0, list[Fault]()
    while at < FAULT_SECONDS:
        faults.append(Fault(at, FaultKind.REJECT_CLIENTS, random.uniform(0.2, 1.5), random.random(), random.random()))
        at += random.uniform(6.0, 12.0)
    return simulate(seed, faults=faults)


@pytest.mark.parametrize("seed", KEPT)
def test_a_way_that_is_reset_loses_nothing(seed: int) -> None:
    run = reset(seed)
    assert any("reset each other's connections" in line for line in run.trace)
    assert not run.wrong, story(run)


def test_where_subscribers_do_not_ask_messages_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attachment, "look_if_quiet", lambda self, now: None)
    assert any(reset(seed).wrong for seed in (8, 10, 13, 14))


def test_where_publishers_do_not_wait_messages_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent.AbsentSubscribers, "broke", lambda self, address, prefixes: None)
    assert any(reset(seed).wrong for seed in (63, 14, 39))


def test_where_subscribers_heed_watermarks_at_once_what_comes_again_is_called_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredWatermarks, "defers", lambda self, exchange, watermark, now: False)
    assert any(reset(seed).wrong for seed in (154, 160))

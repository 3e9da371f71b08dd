"""A cluster of simulated stores under churn, on a virtual clock, with the real master: what may be lost, and how soon."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.churn.persistence import HEARTBEATS, LITERAL, ROLLING, Reading, lost_within
from benchmarks.churn.simulation import Scene, churn, persist
from benchmarks.churn.study import CLIENTS, NODES, Study, charts

SVG = "{http://www.w3.org/2000/svg}"
HOUR = 3600.0


@pytest.mark.parametrize(("clients", "failure", "seed"), [(1, 0.0, 0), (16, 0.001, 1), (8, 0.01, 2), (8, 0.01, 3)])
def test_a_value_is_lost_only_when_all_its_copies_are_gone_at_once(clients: int, failure: float, seed: int) -> None:
    found = churn(Scene(57, clients, operations=40, failure=failure, seed=seed))
    assert found.acknowledged == clients * 40
    assert found.delivered + found.lost == found.acknowledged
    assert found.lost <= found.gone
    assert found.copies >= 2 * found.acknowledged


def test_the_same_seed_gives_the_same_run() -> None:
    scene = Scene(20, 4, operations=20, failure=0.01, seed=7)
    assert churn(scene) == churn(scene)


def test_copies_are_made_again_as_fast_as_nodes_fail() -> None:
    curve = persist(Scene(57, failure=0.01, seed=4), values=60, seconds=HOUR / 2)
    assert curve[-1][1] <= lost_within(ROLLING, 0.01, HOUR / 2) + 0.1


def test_more_clients_get_more_done() -> None:
    rates = []
    for clients in (1, 16):
        found = churn(Scene(57, clients, operations=30))
        rates.append(clients / (found.enqueue_seconds + found.dequeue_seconds))
    assert rates[1] > 4 * rates[0]


@pytest.mark.parametrize(
    ("reading", "failure", "hours", "expected"),
    [
        (LITERAL, 0.01, 7, 0.9995),
        (LITERAL, 0.0001, 48, 0.000069),
        (HEARTBEATS, 0.01, 7, 0.8896),
        (HEARTBEATS, 0.0001, 48, 0.0000173),
        (ROLLING, 0.01, 7, 0.9989),
        (ROLLING, 0.0001, 48, 0.000052),
    ],
)
def test_the_arithmetic_of_the_paper(reading: Reading, failure: float, hours: float, expected: float) -> None:
    assert lost_within(reading, failure, hours * HOUR) == pytest.approx(expected, rel=0.02)


def test_the_charts_of_a_study_show_what_was_simulated_and_what_was_computed() -> None:
    lost = [(600.0 * step, step / 100) for step in range(43)]
    drawn = charts(Study([], [(nodes, clients, 9.0) for nodes in NODES for clients in CLIENTS], lost))
    texts = {name: [one.text for one in ElementTree.fromstring(svg).iter(f"{SVG}text")] for name, svg in drawn.items()}
    assert {"simulated, 57 nodes", LITERAL.name, "7 h"} <= set(texts["blizzard-loss.svg"])
    assert {LITERAL.name, "48 h"} <= set(texts["blizzard-loss-rare.svg"])
    assert {f"{nodes} nodes" for nodes in NODES} | {"by clients", "60"} <= set(texts["blizzard-throughput.svg"])

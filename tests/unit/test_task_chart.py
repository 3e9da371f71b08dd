"""Pace, bars and pictures of a work queue's progress."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from roq.cli.task_chart import POINTS_MAX, Sample, nice_limit, pace, rates, sparkline, svg
from roq.workqueue.contract import Status


def sample(at: float, ready: int, completed: int, inserted: int | None = None, leased: int = 0) -> Sample:
    return Sample(at, Status(ready, 0, leased, 0, completed, inserted if inserted is not None else ready + completed, None))


def test_the_pace_tells_when_it_ends() -> None:
    found = pace([sample(0, 100, 0), sample(10, 50, 50)])
    assert (found.completed_per_second, found.inserted_per_second, found.left, found.eta_seconds) == (5.0, 0.0, 50, 10.0)
    growing = pace([sample(0, 100, 0), sample(10, 150, 50)])
    assert (growing.completed_per_second, growing.inserted_per_second, growing.eta_seconds) == (5.0, 10.0, None)
    assert pace([sample(0, 0, 7)]).eta_seconds == 0.0
    assert pace([sample(0, 5, 7)]).eta_seconds is None


def test_counters_that_were_reset_give_no_negative_pace() -> None:
    assert pace([sample(0, 10, 100), sample(1, 10, 0)]).completed_per_second == 0.0


def test_bars() -> None:
    assert sparkline([0, 1, 2, 4], 10) == "▁▃▅█"
    assert sparkline([1, 2, 4], 2) == "▅█"
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert rates([sample(0, 4, 0), sample(2, 0, 4)]) == [2.0]


@pytest.mark.parametrize(("value", "limit"), [(0, 1), (1, 1), (1.01, 2), (2.4, 2.5), (99, 100), (1e6, 1e6), (0.03, 0.05)])
def test_axes_end_at_round_numbers(value: float, limit: float) -> None:
    assert nice_limit(value) == pytest.approx(limit)


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_a_picture_is_whole_at_any_length(count: int) -> None:
    samples = [sample(float(number), count - number, number) for number in range(count)]
    root = ET.fromstring(svg(samples, "file:///a<b>&c"))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 5
    points = lines[0].attrib["points"].split()
    assert len(points) <= POINTS_MAX + 1
    assert all(0 <= float(value) <= 900 for point in points for value in point.split(","))

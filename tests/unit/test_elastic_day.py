"""What the benchmark of a day says of what it saw."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.elastic.day import Day, Moment, chart, load_at, table


def test_the_load_rises_to_its_height_at_noon_and_is_low_at_night() -> None:
    assert [load_at(part, 100, 1000) for part in (0.0, 0.1, 0.9, 1.0)] == [100] * 4
    assert load_at(0.5, 100, 1000) == pytest.approx(1000)
    rising = [load_at(part / 100, 100, 1000) for part in range(20, 51)]
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(100)


def test_what_was_late_and_what_it_cost() -> None:
    early = Moment(1.0, 100, 1, 1, 0.001, 0.004, 0, 100)
    late = Moment(2.0, 300, 3, 3, 0.002, 0.2, 30, 300)
    seen = Day(0.05, 400, 400, 0, (early, late))
    assert seen.within == pytest.approx(0.925)
    assert seen.seconds_within == 0.5
    assert seen.cost == pytest.approx(4 / 6)
    found = table(seen)
    assert "| hosts | 1 to 3 |" in found
    assert "| messages within 50 ms | 92.50% |" in found
    assert "| host seconds against a fixed fleet | 0.67 |" in found
    picture = chart(seen)
    ET.fromstring(picture)
    assert "92.50% of messages within 50 ms, 67% of a fixed fleet" in picture

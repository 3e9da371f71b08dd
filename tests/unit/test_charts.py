"""Lines over time as SVG: where points, names and times come to lie, what is joined, what people wrote stays text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from roq.spark.pipeline.capacity import CapacityFindings, apart, chart
from roq.tools.charts import (
    DAY,
    LEFT,
    PANEL,
    RIGHT,
    TIMES_MAX,
    WIDTH,
    Band,
    ChartLine,
    Panel,
    draw,
    legend,
    linear,
    logarithmic,
    numbers,
    shortened,
    since,
    stretches,
    times,
)

SVG = "{http://www.w3.org/2000/svg}"
BEGIN = 1_790_000_000.25  # 2026-09-21T14:13:20Z


def elements(drawn: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawn).iter(f"{SVG}{name}"))


def texts(drawn: str) -> list[str | None]:
    return [one.text for one in elements(drawn, "text")]


def lines_of(drawn: str) -> list[list[tuple[float, float]]]:
    found = elements(drawn, "polyline")
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in one.attrib["points"].split())] for one in found]


def test_a_line_goes_from_the_bottom_left_to_the_top_right() -> None:
    line = lines_of(draw("t", "", [Panel("p", [ChartLine("l", "red", [(100.0, 0.0), (200.0, 10.0)])])], 100.0, 200.0))[0]
    assert [x for x, _ in line] == [LEFT, WIDTH - RIGHT]
    assert line[0][1] - line[1][1] == PANEL


def test_steps_hold_a_value_until_the_next_one_and_gaps_stay_open() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (9.0, 2.0), (10.0, 1.0)]
    line = ChartLine("l", "red", points, gap_seconds=3.0, steps=True)
    assert stretches(line) == [points[:2], points[2:]]
    rising, falling = lines_of(draw("t", "", [Panel("p", [line])], 0.0, 10.0))
    assert [y for _, y in rising] == [rising[0][1], rising[0][1], rising[-1][1]]
    assert rising[1][0] == rising[2][0]
    assert falling[0][1] < falling[-1][1]


def test_a_filled_line_reaches_down_to_its_axis() -> None:
    drawn = draw("t", "", [Panel("p", [ChartLine("l", "red", [(0.0, 5.0), (1.0, 5.0)], filled=True)])], 0.0, 1.0)
    (corners,) = [one.attrib["points"].split() for one in elements(drawn, "polygon")]
    heights = [float(corner.split(",")[1]) for corner in corners]
    assert (heights[0], heights[3]) == (heights[1] + PANEL, heights[2] + PANEL)


def test_a_single_point_no_points_and_no_time_are_drawn_too() -> None:
    panels = [Panel("p", [ChartLine("l", "red", [(5.0, 3.0)])]), Panel("q", [ChartLine("m", "red", [])], "logarithmic")]
    assert len(elements(draw("t", "", panels, 5.0, 5.0), "circle")) == 1


def test_names_are_text_and_a_long_title_keeps_both_ends_and_its_times() -> None:
    assert "<a> & b" in texts(draw("<a> & b", "", [], 0.0, 1.0))
    shown = texts(draw("Queue " + "x" * 97 + "end", "from here to there", [], 0.0, 1.0))
    assert shown[1] == "from here to there"
    assert shown[0] is not None
    assert len(shown[0]) * 9.2 < WIDTH - LEFT  # about the width of a bold character of 15 pixels
    assert shown[0].startswith("Queue x")
    assert shown[0].endswith("xend")
    assert [shortened("abcdefgh", size) for size in (8, 7, 4)] == ["abcdefgh", "abc…fgh", "ab…h"]


def test_a_legend_takes_as_many_rows_as_it_needs() -> None:
    lines = [ChartLine(f"policy {'very-' * number}strict", "red", []) for number in range(9)] + [
        ChartLine("y" * 500, "red", [])
    ]
    entries = legend(lines)
    assert [entry.line for entry in entries] == lines
    for before, entry in pairwise(entries):
        assert entry.row in (before.row, before.row + 1)
        assert entry.x == LEFT if entry.row > before.row else entry.x > before.x + 6 * len(before.text)
    assert all(entry.x + 6.6 * len(entry.text) < WIDTH for entry in entries)
    assert entries[-1].row > 2
    drawn = draw("t", "", [Panel("p", lines), Panel("q", [])], 0.0, 1.0)
    rows = {float(one.attrib["y"]) for one in elements(drawn, "text") if (one.text or "").startswith(("policy", "y"))}
    assert len(rows) == entries[-1].row + 1
    top = max(rows)
    assert all(float(one.attrib["y2"]) > top for one in elements(drawn, "line") if one.attrib.get("stroke") == "#e2e2e2")


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (0, [0, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5150, [0, 2000, 4000, 6000]),
        (360_000, [0, 100_000, 200_000, 300_000, 400_000]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (101, [0, 25, 50, 75, 100, 125]),
    ],
)
def test_values_beside_an_axis_are_round_and_waste_little(most: float, ticks: list[float]) -> None:
    assert linear([most, most / 2]).ticks == pytest.approx(ticks)
    assert linear([most]).high == pytest.approx(ticks[-1])


def test_no_axis_wastes_half() -> None:
    for number in range(1, 2000):
        for most, scale in ((number * 0.37, linear([number * 0.37])), (number, linear([number], whole=True))):
            assert most * (1 - 1e-9) <= scale.high
            assert scale.high <= most * 1.5 + 1e-9
            assert 2 <= len(scale.ticks) <= 6
        assert all(tick == int(tick) for tick in linear([number], whole=True).ticks)


def test_a_logarithmic_axis_shows_small_values_beside_large_ones() -> None:
    scale = logarithmic([0.0, 0.4, 3.0, 5153.5])
    assert scale.ticks == pytest.approx([1, 10, 100, 1000, 10_000])
    assert (scale.low, scale.high) == pytest.approx((0.2, 10_000))
    assert scale.part(3.0) - scale.part(0.4) > 0.15
    assert [scale.part(value) for value in (-1.0, 0.0, 1e9)] == [0.0, 0.0, 1.0]
    assert logarithmic([1.0, 1.0]).ticks == pytest.approx([1, 2])
    assert logarithmic([0.0]).ticks == (1.0, 10.0)
    wide = logarithmic([1e-300, 1e300])
    assert len(wide.ticks) <= 8


def shown(seconds: float, begin: float = BEGIN) -> list[str]:
    return [f"{tick.date} {tick.text}".strip() for tick in times(begin, begin + seconds)]


def test_times_are_round_and_days_have_dates() -> None:
    assert shown(299) == ["21 Sep 2026 14:14", "14:15", "14:16", "14:17", "14:18"]
    assert shown(86_396)[:2] == ["21 Sep 2026 15:00", "18:00"]
    assert "22 Sep 2026 00:00" in shown(86_396)
    assert [tick.at % DAY for tick in times(BEGIN, BEGIN + 86_396) if tick.midnight] == [0]
    assert shown(10)[0] == "21 Sep 2026 14:13:22"
    assert shown(6 * DAY) == [f"{day} Sep 2026" for day in range(22, 28)]
    assert len(set(shown(86_400))) == len(shown(86_400))


@pytest.mark.parametrize("seconds", [1, 7, 61, 600, 3599, 40_000, 86_400, 1e6, 3e7, 1e9, 1e11])
def test_times_are_neither_too_many_nor_too_few(seconds: float) -> None:
    found = times(BEGIN, BEGIN + seconds)
    assert 2 <= len(found) <= TIMES_MAX or seconds <= 1
    assert all(BEGIN <= tick.at <= BEGIN + seconds for tick in found)


def many_policies(count: int, seconds: float = 10.0) -> str:
    """A queue with one Exchange, and as many policies, which all would have done the same."""
    rows = [
        {"at": BEGIN + at, "exchanges": 1, "messages": 5.0, "messages_most": 9.0, "delivered": 5.0, "cpu": 0.1, "p50": 1e-3}
        | {"p99": 5.0 if at == 7 else 2e-3}
        for at in range(10)
    ]
    report = SimpleNamespace(queue="orders", begin="2026-09-21T14:13:20Z", end="2026-09-21T14:13:29Z")
    found = SimpleNamespace(report=report, begin=BEGIN, end=BEGIN + 9, seconds=seconds, points=rows)
    found.steps = [(f"p{number}", rows) for number in range(count)]
    return chart(cast(CapacityFindings, cast(Any, found)))


def test_lines_alike_can_be_told_apart() -> None:
    drawn = many_policies(6)
    looks = [(one.attrib["stroke"], one.attrib.get("stroke-dasharray")) for one in elements(drawn, "polyline")]
    assert len(set(looks)) == len(looks) == 2 + 1 + 6 + 2 + 1
    assert len({colour for colour, _ in looks}) == len(looks)  # one colour, one meaning
    heights = [line[0][1] for line in lines_of(drawn)[2:9]]
    assert len(set(heights)) == 7 or heights[0] in heights[1:]
    assert len(set(heights[1:])) == 6
    assert elements(drawn, "polyline")[2].attrib["stroke-width"] == "6"  # as it was: thick, behind the policies
    assert {"0", "1", "published", "published, highest within 10 s"} <= set(texts(drawn))
    assert len(elements(drawn, "polygon")) == 1
    assert elements(many_policies(1, 1.0), "polygon") == []  # each point is one record
    assert not [text for text in texts(drawn) if text in ("0.25", "0.5")]
    assert apart(1) == [0.0]
    assert max(apart(40)) - min(apart(40)) == pytest.approx(12.0)


def test_policies_look_different_up_to_twelve() -> None:
    drawn = elements(many_policies(12), "polyline")[3:15]
    assert len({(one.attrib["stroke"], one.attrib.get("stroke-dasharray")) for one in drawn}) == 12


def test_bands_are_marked_in_every_panel_and_named_above() -> None:
    panels = [Panel(name, [ChartLine("", "red", [(0.0, 1.0), (60.0, 2.0)])]) for name in ("p", "q")]
    drawn = draw("t", "", panels, 0.0, 60.0, bands=[Band(30.0, 30.0, "blue", "kill <host-1>"), Band(50.0, 90.0, "green")])
    marks = [one.attrib for one in elements(drawn, "rect") if one.attrib["fill"] in ("blue", "green")]
    assert [mark["fill"] for mark in marks] == ["blue", "green"] * 2
    assert float(marks[0]["width"]) > 0, "a moment is seen too"
    assert float(marks[1]["x"]) + float(marks[1]["width"]) == pytest.approx(WIDTH - RIGHT, abs=0.1)
    assert "kill <host-1>" in texts(drawn)


@pytest.mark.parametrize(("seconds", "last"), [(8.0, "8 s"), (250.0, "4 min"), (7200.0, "120 min"), (86_400 * 3, "72 h")])
def test_times_since_the_begin_are_round(seconds: float, last: str) -> None:
    found = since(BEGIN, BEGIN + seconds)
    assert (found[0].text[:2], found[-1].text) == ("0 ", last)
    assert len(found) <= TIMES_MAX


def test_numbers_under_a_chart_are_round() -> None:
    assert [tick.text for tick in numbers(0.0, 64.0)] == ["0", "20", "40", "60"]
    drawn = draw("t", "by clients", [Panel("p", [ChartLine("l", "red", [(1, 2.0), (64, 9.0)])])], 0.0, 64.0, across=numbers)
    assert {"0", "20", "40", "60"} <= set(texts(drawn))

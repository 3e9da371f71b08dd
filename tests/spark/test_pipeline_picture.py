"""Lines over time as SVG: where points come to lie, what is joined, what people wrote stays text."""

from __future__ import annotations

from xml.etree import ElementTree

from roq.spark.pipeline.picture import LEFT, PANEL, RIGHT, WIDTH, Line, Panel, draw, nice_limit, stretches

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(picture: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(picture).iter(f"{SVG}polyline")
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in one.attrib["points"].split())] for one in found]


def test_a_line_goes_from_the_bottom_left_to_the_top_right() -> None:
    line = lines_of(draw("t", [Panel("p", [Line("l", "red", [(100.0, 0.0), (200.0, 10.0)])])], 100.0, 200.0))[0]
    assert [x for x, _ in line] == [LEFT, WIDTH - RIGHT]
    assert line[0][1] - line[1][1] == PANEL


def test_steps_hold_a_value_until_the_next_one_and_gaps_stay_open() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (9.0, 2.0), (10.0, 1.0)]
    line = Line("l", "red", points, gap_seconds=3.0, steps=True)
    assert stretches(line) == [points[:2], points[2:]]
    rising, falling = lines_of(draw("t", [Panel("p", [line])], 0.0, 10.0))
    assert [y for _, y in rising] == [rising[0][1], rising[0][1], rising[-1][1]]
    assert rising[1][0] == rising[2][0]
    assert falling[0][1] < falling[-1][1]


def test_a_single_point_no_points_and_no_time_are_drawn_too() -> None:
    lonely = draw("t", [Panel("p", [Line("l", "red", [(5.0, 3.0)])]), Panel("q", [Line("m", "red", [])])], 5.0, 5.0)
    assert len(list(ElementTree.fromstring(lonely).iter(f"{SVG}circle"))) == 1


def test_names_are_text() -> None:
    texts = [one.text for one in ElementTree.fromstring(draw("<a> & b", [], 0.0, 1.0)).iter(f"{SVG}text")]
    assert "<a> & b" in texts


def test_limits_are_round() -> None:
    assert [nice_limit(value) for value in (0, 0.03, 1, 1.1, 2.4, 2.6, 99, 100, 101)] == [1, 0.05, 1, 2, 2.5, 5, 100, 100, 200]

"""Pace, bars and pictures of a work queue's progress."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from roq.cli.task_watch import POINTS_MAX, Progress, Sample, pace, progress, rates, sparkline, svg
from roq.tools.charts import WIDTH
from roq.wire.task import Status


def sample(at: float, ready: int, completed: int, inserted: int | None = None, leased: int = 0) -> Sample:
    return Sample(at, Status(ready, 0, leased, 0, completed, inserted if inserted is not None else ready + completed))


def test_the_pace_tells_when_it_ends() -> None:
    found = pace([sample(0, 100, 0), sample(10, 50, 50)])
    assert (found.completed_per_second, found.inserted_per_second, found.left, found.eta_seconds) == (5.0, 0.0, 50, 10.0)
    growing = pace([sample(0, 100, 0), sample(10, 150, 50)])
    assert (growing.completed_per_second, growing.inserted_per_second, growing.eta_seconds) == (5.0, 10.0, None)
    assert pace([sample(0, 0, 7)]).eta_seconds == 0.0
    assert pace([sample(0, 5, 7)]).eta_seconds is None


def looks(*statuses: Status) -> list[Sample]:
    return [Sample(float(second), status) for second, status in enumerate(statuses)]


def status(ready: int = 0, delayed: int = 0, leased: int = 0, dead: int = 0, completed: int = 0, inserted: int = 9) -> Status:
    return Status(ready, delayed, leased, dead, completed, inserted)


WORKED = [status(ready=9 - second, completed=second) for second in range(5)]


@pytest.mark.parametrize(
    ("samples", "expected", "said"),
    [
        (looks(status(ready=0)), Progress.EMPTY, "nothing is left to do"),
        (looks(status(ready=9), status(ready=8, completed=1)), Progress.MEASURING, "measuring"),
        (looks(*[status(ready=9)] * 4), Progress.NO_WORKER, "none: no worker takes tasks"),
        (looks(*[status(ready=9 + n, inserted=9 + n) for n in range(4)]), Progress.NO_WORKER, "none: no worker takes tasks"),
        (looks(*WORKED), Progress.SHRINKING, "ends in 5 s at this rate"),
        (looks(*WORKED, *[WORKED[-1]] * 4), Progress.SHRINKING, "ends in 10 s at this rate"),
        (looks(*WORKED, *[WORKED[-1]] * 5), Progress.NO_WORKER, "none: no worker takes tasks"),
        (looks(*[status(delayed=9)] * 4), Progress.DELAYED, "none: all tasks are delayed"),
        (looks(*[status(ready=8, leased=1)] * 4), Progress.STALLED, "none: no task was completed in the last 30 s"),
        (looks(*[status(ready=9 - n, delayed=n) for n in range(4)]), Progress.STALLED, "none: no task was completed"),
        (looks(*[status(ready=9 - n, dead=n) for n in range(4)]), Progress.STALLED, "none: no task was completed"),
        (looks(*[status(ready=9, completed=n, inserted=9 + n) for n in range(4)]), Progress.GROWING, "no end in sight"),
        (
            looks(*[status(ready=90 - 30 * n, completed=30 * n) for n in range(3)][:-1], status(1, completed=89)),
            None,
            "less than 1 s",
        ),
    ],
)
def test_what_becomes_of_the_tasks_is_told_as_it_is(samples: list[Sample], expected: Progress | None, said: str) -> None:
    """Also: five seconds after the last worker went, the rate it had is no ground for an estimate any more."""
    found = pace(samples)
    assert found.progress == (expected or Progress.SHRINKING)
    assert said in progress(found)
    assert (found.eta_seconds is None) == (found.progress not in (Progress.EMPTY, Progress.SHRINKING))


def test_counters_that_were_reset_give_no_negative_pace() -> None:
    assert pace([sample(0, 10, 100), sample(1, 10, 0)]).completed_per_second == 0.0


def test_bars() -> None:
    assert sparkline([0, 1, 2, 4], 10) == "▁▃▅█"
    assert sparkline([1, 2, 4], 2) == "▅█"
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([], 5) == ""
    assert rates([sample(0, 4, 0), sample(2, 0, 4)]) == [2.0]


@pytest.mark.parametrize("count", [1, 2, 5000])
def test_a_picture_is_whole_at_any_length(count: int) -> None:
    samples = [sample(float(number), count - number, number) for number in range(count)]
    root = ET.fromstring(svg(samples, "file:///a<b>&c"))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    dots = root.findall("{http://www.w3.org/2000/svg}circle")
    assert (len(lines), len(dots)) == {1: (0, 4), 2: (4, 1)}.get(count, (5, 0))
    for line in lines:
        points = line.attrib["points"].split()
        assert len(points) <= POINTS_MAX + 1
        assert all(0 <= float(value) <= WIDTH for point in points for value in point.split(","))

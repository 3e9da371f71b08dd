"""A dashboard of Grafana, asked of a Prometheus and drawn: its panels where it has them, with its titles, legends and units.

Drawn by roq/tools/charts.py and a browser, not by Grafana: what it shows are Grafana's questions and Prometheus' answers.
"""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from roq.tools.charts import ChartLine, Panel, draw

ASK_SECONDS = 20.0
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#444444")
SCALES = {"percentunit": (100.0, "%"), "bytes": (2.0**-20, "MiB"), "Bps": (2.0**-10, "KiB/s"), "s": (1000.0, "ms")}
NAMES = {"cps": "per second", "ops": "per second"}
COLUMN, ROW = 100, 41  # pixels of a unit of Grafana's grid, which has 24 columns
STYLE = """
body { margin: 0; background: #f3f4f6; font-family: sans-serif; }
main { position: relative; width: %dpx; height: %dpx; }
section { position: absolute; background: white; border: 1px solid #d8dade; box-sizing: border-box; margin: 3px; }
svg { width: 100%%; height: 100%%; display: block; }
h2 { font-size: 22px; margin: 14px 16px 0; } strong { display: block; text-align: center; font-size: 60px; color: #1b7f3b; }
"""


class Answer(msgspec.Struct, frozen=True):
    """One series: its legend, as the panel words it, and (Unix seconds, value)."""

    legend: str
    points: Sequence[tuple[float, float]]


class Asked(msgspec.Struct, frozen=True):
    """A panel with what Prometheus answered. empty: questions that it had no number for."""

    id: int
    kind: str
    title: str
    unit: str
    place: Mapping[str, int]  # x, y, w, h of Grafana's grid
    answers: Sequence[Answer]
    empty: Sequence[str]


class Prometheus:
    """One that runs at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str | float) -> Any:
        """`data` of an answer of its HTTP API."""
        asked = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(asked, timeout=ASK_SECONDS) as answer:
            return json.load(answer)["data"]

    def values(self, question: str) -> list[str]:
        """Of a variable of a dashboard: label_values(metric, label)."""
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", question)
        assert found is not None, question
        return list(self.get(f"label/{found[2]}/values", **{"match[]": found[1]}))

    def ask(self, dashboard: Path, begin: float, end: float, step: float) -> list[Asked]:
        """Every panel, with "All" chosen for its variables."""
        shown = json.loads(dashboard.read_text())
        chosen = {f"${one['name']}": ".*" for one in shown["templating"]["list"]}
        found = []
        for panel in shown["panels"]:
            answers, empty = list[Answer](), list[str]()
            for target in panel["targets"]:
                question = target["expr"]
                for name, value in sorted(chosen.items(), reverse=True):
                    question = question.replace(name, value)
                told = self.get("query_range", query=question, start=begin, end=end, step=step)["result"]
                series = [_answer(target["legendFormat"], one) for one in told]
                answers += [one for one in series if one.points]
                empty += [] if any(one.points for one in series) else [question]
            unit = panel["fieldConfig"]["defaults"]["unit"]
            found.append(Asked(panel["id"], panel["type"], panel["title"], unit, panel["gridPos"], answers, empty))
        return found


def _answer(legend: str, series: Any) -> Answer:
    labels = series["metric"]
    text = re.sub(r"{{(\w+)}}", lambda name: labels[name[1]], legend)  # KeyError: a label that the answer has not
    points = [(float(at), float(value)) for at, value in series["values"]]
    return Answer(text, [(at, value) for at, value in points if math.isfinite(value)])


def page(panels: Sequence[Asked], begin: float, end: float) -> str:
    """The dashboard as one page of HTML."""
    size = [max(one.place[at] + one.place[long] for one in panels) for at, long in (("x", "w"), ("y", "h"))]
    boxes = []
    for one in panels:
        x, y, width, height = (one.place[name] * pixels - less for name, pixels, less in _BOX)
        inner = _number(one) if one.kind == "stat" else _lines(one, begin, end)
        boxes.append(f'<section style="left:{x}px;top:{y}px;width:{width}px;height:{height}px">{inner}</section>')
    style = STYLE % (size[0] * COLUMN + 6, size[1] * ROW + 6)
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><main>{''.join(boxes)}</main>"


_BOX = (("x", COLUMN, 0), ("y", ROW, 0), ("w", COLUMN, 6), ("h", ROW, 6))


def _number(one: Asked) -> str:
    return f"<h2>{escape(one.title)}</h2><strong>{one.answers[0].points[-1][1]:g}</strong>"


def _lines(one: Asked, begin: float, end: float) -> str:
    scale, unit = SCALES.get(one.unit, (1.0, NAMES.get(one.unit, "")))
    lines = [
        ChartLine(answer.legend, COLOURS[number % len(COLOURS)], [(at, value * scale) for at, value in answer.points])
        for number, answer in enumerate(one.answers)
    ]
    return draw(one.title, unit, [Panel("", lines)], begin, end)

"""What `roq top` shows: which screen, sorted by what, which row; keys change it. Pure, but for how rows look.

Not covered: reading the cluster (roq/client/rolling.py), the terminal and the loop (top.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from rich.console import RenderableType

from roq.cli.output import age, percent, rate, seconds, size, table
from roq.cli.status import host_state, queue_state

PAGE = 10  # rows that PgUp and PgDn move
ESCAPE = b"\x1b"
KEYS = {  # longest first, so that Esc is Esc only where nothing follows
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\x1b[D": "back",
    b"\x1b[C": "open",
    ESCAPE: "back",
    b"\x7f": "back",
    b"\r": "open",
    b"\n": "open",
    b"\t": "next",
    b"k": "up",
    b"j": "down",
    b"s": "sort",
    b"r": "reverse",
    b"q": "quit",
    b"1": "queues",
    b"2": "tasks",
    b"3": "hosts",
}


class Screen(StrEnum):
    """A list."""

    QUEUES = "queues"
    TASKS = "tasks"
    HOSTS = "hosts"


class Column(NamedTuple):
    """One of a list. name: for --sort; head: as `table` takes it; key: what it is sorted by; text: of a row."""

    name: str
    head: str
    key: Callable[[Any], Any]
    text: Callable[[Any], str]

    @property
    def numeric(self) -> bool:
        """The largest comes first."""
        return self.head.startswith(">")


def _number(name: str, head: str, field: str, text: Callable[[Any], str] = str) -> Column:
    return Column(name, f">{head}", lambda row: getattr(row, field) or 0, lambda row: text(getattr(row, field)))


COLUMNS: dict[Screen, tuple[Column, ...]] = {
    Screen.QUEUES: (
        Column("name", "QUEUE", lambda row: row.queue, lambda row: row.queue),
        Column("state", "STATE", queue_state, queue_state),
        _number("exchanges", "EXCH", "exchanges"),
        _number("publishers", "PUB", "publishers"),
        _number("subscribers", "SUB", "subscribers"),
        _number("in", "IN/s", "messages_per_second", rate),
        _number("out", "OUT/s", "delivered_per_second", rate),
        _number("bytes", "BYTES/s", "bytes_per_second", size),
        _number("lag", "LAG", "lag_seconds", seconds),
        _number("lost", "LOST", "lost"),
    ),
    Screen.TASKS: (
        Column("name", "WORK QUEUE", lambda row: row.name, lambda row: row.name),
        Column("master", "MASTER", lambda row: row.master, lambda row: row.problem or row.master),
        _number("waiting", "WAITING", "waiting", lambda count: f"{count:,}"),
        _number("leased", "LEASED", "leased", lambda count: f"{count:,}"),
        _number("dead", "DEAD", "dead", lambda count: f"{count:,}"),
        _number("done", "DONE/s", "completed_per_second", rate),
        _number("oldest", "OLDEST", "oldest_seconds", age),
        _number("lag", "LAG", "lag", lambda count: "-" if count is None else f"{count:,}"),
        _number("missed", "MISSED", "missed"),
    ),
    Screen.HOSTS: (
        Column("name", "HOST", lambda row: row.host, lambda row: row.host),
        Column("state", "STATE", host_state, host_state),
        _number("exchanges", "EXCH", "exchanges"),
        _number("monitors", "MON", "monitors"),
        _number("processes", "PROC", "processes"),
        _number("failed", "FAILED", "failed"),
        _number("restarts", "RESTARTS", "restarts"),
        _number("cpu", "CPU", "cpu_fraction", percent),
        _number("memory", "MEM", "memory_fraction", percent),
    ),
}
SORTS = sorted({column.name for columns in COLUMNS.values() for column in columns})


@dataclass(frozen=True)
class TopState:
    """What people see. sort: name of a column; reverse: the other way round; selected: number of the row; opened: its name, ""
    while the list is shown."""

    screen: Screen = Screen.QUEUES
    sort: str = "name"
    reverse: bool = False
    selected: int = 0
    opened: str = ""
    over: bool = False

    @property
    def column(self) -> Column:
        """That it is sorted by; names where the screen has none of that name."""
        columns = COLUMNS[self.screen]
        return next((one for one in columns if one.name == self.sort), columns[0])


def pressed(state: TopState, key: str, names: Sequence[str]) -> TopState:
    """After a key. names: of the rows, as they are shown."""
    if key in tuple(Screen):
        return replace(state, screen=Screen(key), selected=0, opened="")
    match key:
        case "quit":
            return replace(state, over=True)
        case "next":
            screens = list(Screen)
            return pressed(state, screens[(screens.index(state.screen) + 1) % len(screens)], names)
        case "back":
            return replace(state, opened="")
        case "open" if names:
            return replace(state, opened=names[min(state.selected, len(names) - 1)])
        case "sort":
            columns = [column.name for column in COLUMNS[state.screen]]
            return replace(state, sort=columns[(columns.index(state.column.name) + 1) % len(columns)], reverse=False)
        case "reverse":
            return replace(state, reverse=not state.reverse)
    steps = {"up": -1, "down": 1, "page-up": -PAGE, "page-down": PAGE}
    selected = state.selected + steps.get(key, 0)
    return replace(state, selected=max(0, min(selected, len(names) - 1)))


def keys_of(typed: bytes) -> list[str]:
    """What was typed; what means nothing is left out."""
    found = list[str]()
    while typed:
        code = next((code for code in KEYS if typed.startswith(code)), typed[:1])
        if code in KEYS:
            found.append(KEYS[code])
        typed = typed[len(code) :]
    return found


def ordered(state: TopState, rows: Sequence[Any]) -> list[Any]:
    """Rows as they are shown."""
    column, first = state.column, COLUMNS[state.screen][0]
    by_name = sorted(rows, key=first.key)
    return sorted(by_name, key=column.key, reverse=column.numeric != state.reverse)


def name_of(state: TopState, row: Any) -> str:
    """Its first column."""
    return COLUMNS[state.screen][0].text(row)


def window(selected: int, count: int, height: int) -> range:
    """Numbers of the rows that fit into `height` lines, the selected one among them."""
    first = max(0, min(selected - height // 2, count - height))
    return range(first, min(count, first + max(1, height)))


def list_table(state: TopState, rows: Sequence[Any], height: int) -> RenderableType:
    """rows: as `ordered` gives them. height: lines for it, its head included."""
    columns = COLUMNS[state.screen]
    shown = window(min(state.selected, len(rows) - 1), len(rows), height - 1)
    mark = {True: "▼", False: "▲"}[state.column.numeric != state.reverse]
    heads = [f"{column.head}{mark}" if column is state.column else column.head for column in columns]
    cells = [[column.text(rows[number]) for column in columns] for number in shown]
    return table("", heads, cells, marked=min(state.selected, len(rows) - 1) - shown.start)

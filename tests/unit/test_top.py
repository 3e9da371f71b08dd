"""`roq top`: keys, sorting, which rows fit, whose Monitors are asked. Not covered: a terminal and a cluster
(tests/integration/test_cli_operator.py)."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from roq.cli.main import app
from roq.cli.output import rate, table
from roq.cli.top_screen import (
    COLUMNS,
    KEYS,
    SORTS,
    Screen,
    TopState,
    keys_of,
    list_table,
    name_of,
    ordered,
    pressed,
    window,
)
from roq.client import rolling
from roq.client.events import in_turn
from roq.client.overview import HostRow, QueueRow, WorkQueueRates
from roq.client.rolling import ASKED_AT_ONCE, ASKED_PER_LOOK, NOT_YET, RollingOverview, counted_row
from roq.wire.gcm import ClusterView, WorkQueueInfo
from roq.wire.task import Status
from roq.wire.work_queue import MasterAddress, TaskSettings, WorkQueueRecord, WorkQueueSpec

MANY = [QueueRow(f"q{n:04}", True, True, 1, "drop", "h", 1, messages_per_second=float(n % 7), lost=n) for n in range(1000)]
NAMES = [row.queue for row in MANY]


def shown(rows: list[QueueRow], state: TopState, height: int) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(list_table(state, rows, height))
    return [line.split() for line in out.getvalue().splitlines()]


def test_keys_are_told_apart_however_they_come() -> None:
    assert keys_of(b"\x1b[A\x1b[B\x1b\x7fj1q") == ["up", "down", "back", "back", "down", "queues", "quit"]
    assert keys_of(b"\x1b[5~\x1b[6~\t\r") == ["page-up", "page-down", "next", "open"]
    assert keys_of("äZ\x00".encode()) == []


def test_every_key_does_something_on_every_screen() -> None:
    for screen in Screen:
        for key in set(KEYS.values()) - {"back", screen.value}:
            state = TopState(screen, selected=20)
            assert pressed(state, key, NAMES) != state, key
        assert pressed(TopState(screen, opened="x"), "back", NAMES) == TopState(screen)


def test_moving_about_stays_within_the_rows() -> None:
    state = TopState()
    assert pressed(state, "up", NAMES).selected == 0
    assert pressed(state, "page-down", NAMES).selected == 10
    assert pressed(replace(state, selected=998), "page-down", NAMES).selected == 999
    assert pressed(replace(state, selected=5), "down", ["only"]).selected == 0
    assert pressed(state, "open", []) == state
    assert pressed(replace(state, selected=7), "open", ["a", "b"]).opened == "b"  # rows have gone meanwhile
    assert pressed(replace(state, selected=7), "next", NAMES) == TopState(Screen.TASKS)


def test_sorting_goes_round_and_the_largest_numbers_come_first() -> None:
    state, seen = TopState(), list[str]()
    for _ in COLUMNS[Screen.QUEUES]:
        state = pressed(state, "sort", NAMES)
        seen.append(state.sort)
    assert sorted(seen) == sorted(column.name for column in COLUMNS[Screen.QUEUES])
    assert state.sort == "name"
    by_lost = [row.queue for row in ordered(TopState(sort="lost"), MANY)]
    assert by_lost[:2] == ["q0999", "q0998"]
    assert [row.queue for row in ordered(TopState(sort="lost", reverse=True), MANY)][:2] == ["q0000", "q0001"]
    assert [row.queue for row in ordered(TopState(sort="in"), MANY)][:2] == ["q0006", "q0013"]  # then by name
    assert TopState(Screen.HOSTS, sort="lag").column.name == "name"  # hosts have no lag


def test_every_column_of_every_screen_can_be_sorted_by_and_shown() -> None:
    rows: dict[Screen, list[Any]] = {
        Screen.QUEUES: MANY[:3],
        Screen.TASKS: [WorkQueueRates("a", "", True, "h"), WorkQueueRates("q@g", "q", True, "h", lag=3, oldest_seconds=1.0)],
        Screen.HOSTS: [HostRow("h", "1.2.3.4", True, False, 1, 8, 1, 3, 0, 0, 0.5, 0.5)],
    }
    for screen, some in rows.items():
        for sort in SORTS:
            state = TopState(screen, sort)
            found = ordered(state, some)
            assert len(found) == len(some)
            assert name_of(state, found[0])
            Console(file=io.StringIO()).print(list_table(state, found, 10))


def test_of_many_rows_those_about_the_selected_one_are_shown() -> None:
    head, *lines = shown(MANY, TopState(selected=500), 11)
    assert head[0] == "QUEUE▲"
    assert [line[0] for line in lines] == NAMES[495:505]
    assert [line[0] for line in shown(MANY, TopState(selected=999), 11)[1:]] == NAMES[990:]
    assert window(0, 3, 10) == range(3)
    assert list(window(0, 0, 10)) == []
    assert shown([], TopState(), 10)


def test_the_selected_row_stands_out() -> None:
    out = io.StringIO()
    Console(file=out, width=40, force_terminal=True, color_system="standard").print(
        table("", ("A",), [("x",), ("y",)], marked=1)
    )
    assert [line for line in out.getvalue().splitlines() if "\x1b[7m" in line] == [out.getvalue().splitlines()[2]]
    assert "y" in out.getvalue().splitlines()[2]


def test_a_look_asks_few_those_that_are_seen_and_each_in_turn() -> None:
    asked = [in_turn(NAMES, NAMES[:30], number, 96) for number in range(16)]
    assert all(len(names) == len(set(names)) <= 96 <= ASKED_PER_LOOK for names in asked)
    assert all(set(NAMES[:30]) <= set(names) for names in asked)
    assert {name for names in asked for name in names} == set(NAMES)
    assert in_turn(NAMES[:96], (), 7, 96) == NAMES[:96]
    tall = [in_turn(NAMES, NAMES[:200], number, 96) for number in range(60)]  # a screen with more rows than may be asked
    assert {name for names in tall for name in names} == set(NAMES)
    assert in_turn([], (), 3, 96) == []


def test_rates_of_a_work_queue_are_between_two_looks() -> None:
    row = counted_row(WorkQueueRates("a", "", True, "h"), Status(5, 1, 2, 3, 100, 111, oldest_ms=1500), 0.0)
    assert (row.waiting, row.leased, row.dead, row.completed, row.completed_per_second) == (6, 2, 3, 100, 0.0)
    assert (row.oldest_seconds, row.lag) == (1.5, None)
    later = counted_row(row, Status(0, 0, 0, 3, 150, 111, lag=7), 2.0)
    assert (later.completed_per_second, rate(later.completed_per_second), later.lag) == (25.0, "25", 7)
    again = counted_row(later, Status(0, 0, 0, 0, 10, 10), 2.0)  # of another one of this name
    assert again.completed_per_second == 0.0
    assert msgspec.json.decode(msgspec.json.encode(again))["completed"] == 10


class ClusterTwin:
    """A cluster with these work queues."""

    def __init__(self, *names: str) -> None:
        spec, address = WorkQueueSpec("log", 3, 2, TaskSettings()), MasterAddress("h", "127.0.0.1", 1, 1, active=True)
        self._infos = tuple(
            WorkQueueInfo(WorkQueueRecord(name, spec, 1, "h", 1, (), 0.0, "t"), (address,), ready=True) for name in names
        )

    async def view(self) -> ClusterView:
        return ClusterView(1, "leader", 0.0, (), (), self._infos)


async def test_all_work_queues_are_looked_at_and_masters_that_hang_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def status_of(pool: object, info: WorkQueueInfo) -> Status:
        if info.record.name.startswith("hangs"):
            await asyncio.Event().wait()
        return Status(5, 1, 0, 0, 7, 13, missed=2)

    monkeypatch.setattr(rolling, "status_of", status_of)
    monkeypatch.setattr(rolling, "WORK_SECONDS", 0.2)
    fine = [f"fine-{number}" for number in range(2 * ASKED_PER_LOOK)]
    cluster: Any = ClusterTwin(*fine, *(f"hangs-{number}" for number in range(ASKED_AT_ONCE)), "last")
    looking = RollingOverview(cluster, lambda: 1.0)
    try:
        await looking.look_at_work()
        rows = {row.name: row for row in looking.work_queues()}
    finally:
        looking.close()
    assert [(rows[name].waiting, rows[name].completed, rows[name].missed) for name in fine] == [(6, 7, 2)] * len(fine)
    assert rows["hangs-0"].problem == rows["last"].problem == NOT_YET


@pytest.mark.parametrize("arguments", [("--sort", "colour"), ("--queue", "a", "--host", "b"), ("--screen", "x")])
def test_what_it_does_not_know_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, ["top", *arguments]).exit_code == 2

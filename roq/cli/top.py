"""`roq top`: queues, work queues, groups and hosts, live: sorted, and one of them opened; with --json, or without a terminal, a
JSON line per refresh.

Not covered: what keys do and what rows look like (top_screen.py), which Monitors are asked (roq/client/rolling.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.completion import host_names, queue_names, work_queue_names
from roq.cli.output import console, print_json, rate, table
from roq.cli.queue import detail_tables
from roq.cli.status import host_table
from roq.cli.top_screen import SORTS, Screen, TopState, keys_of, list_table, name_of, ordered, pressed, window
from roq.client.cluster import Cluster
from roq.client.overview import QueueDetail, host_rows, read_queue, with_groups
from roq.client.rolling import RollingOverview, read_cluster
from roq.errors import CallError, HostNotFound, TemporaryError, WorkQueueNotFound
from roq.runtime.log_output import visible
from roq.wire.gcm import ClusterView

FOR_EVER = 0
HEAD_LINES = 4  # above and below the list
MEMBERS_SHOWN = 50  # of a queue that is opened: the busiest
KEY_BYTES_MAX = 1024  # read at once
HELP = "q quit  Tab 1 2 3 screen  ↑ ↓ select  Enter open  Esc back  s sort  r reverse"


def top(
    cluster: ClusterOption = None,
    json: JsonOption = False,
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between refreshes.")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many refreshes; 0: never.")] = FOR_EVER,
    screen: Annotated[Screen, typer.Option(help="Which list.")] = Screen.QUEUES,
    sort: Annotated[str, typer.Option(metavar="COLUMN", help=f"By which column: {', '.join(SORTS)}.")] = "name",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    queue: Annotated[
        str | None, typer.Option("--queue", "-q", help="Open this queue.", show_default=False, autocompletion=queue_names)
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="Open this work queue or group.", show_default=False, autocompletion=work_queue_names),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Open this host.", show_default=False, autocompletion=host_names)
    ] = None,
) -> None:
    """Watch queues, work queues, groups and hosts: rates, lag, losses, load. Keys sort, select and open; Ctrl-C or q ends it.

    However many queues there are, a refresh of the screen asks 128 Monitors and masters at most: those of what is shown, then
    the others in turn. --json asks all."""
    opened = [(kind, name) for kind, name in zip(Screen, (queue, task, host), strict=True) if name is not None]
    if len(opened) > 1:
        raise typer.BadParameter("one of --queue, --task and --host")
    if sort not in SORTS:
        raise typer.BadParameter(f"--sort is one of {', '.join(SORTS)}")
    kind, name = opened[0] if opened else (screen, "")
    state = TopState(kind, sort, reverse, opened=name)

    async def work(connected: Cluster) -> None:
        out = console()
        if json or not out.is_terminal:
            await _print_lines(connected, state, every, count)
        else:
            await Display(connected, out, state).run(every, count)

    with_cluster(cluster, work)


async def _print_lines(connected: Cluster, state: TopState, every: float, count: int) -> None:
    rolling = RollingOverview(connected, time.monotonic)
    try:
        for shown in itertools.count(1):
            print_json(await read_one(connected, rolling, state))
            if shown == count:
                return
            await asyncio.sleep(every)
    finally:
        rolling.close()


async def read_one(connected: Cluster, rolling: RollingOverview, state: TopState) -> Any:
    """For JSON: the whole cluster, or what is opened. Raises QueueNotFound, WorkQueueNotFound, HostNotFound."""
    if not state.opened:
        return await read_cluster(connected, rolling)
    if state.screen is Screen.QUEUES:
        return await with_groups(connected, await read_queue(connected, state.opened))
    if state.screen is Screen.HOSTS:
        return _host(await connected.view(), state.opened)
    await rolling.look([state.opened], work=True)
    found = [row for row in rolling.work_queues() if row.name == state.opened]
    if not found:
        raise WorkQueueNotFound(f"there is no work queue {state.opened!r}")
    return found[0]


def _host(view: ClusterView, name: str) -> dict[str, Any]:
    info = next((info for info in view.hosts if info.host == name), None)
    if info is None:
        raise HostNotFound(f"no host of name {name!r} is in the cluster")
    return {"host": host_rows([info])[0], "processes": info.report.processes if info.report else ()}


class Display:
    """One `roq top` on a terminal."""

    def __init__(self, cluster: Cluster, out: Console, state: TopState) -> None:
        self._cluster, self._out, self._state = cluster, out, state
        self._rolling = RollingOverview(cluster, time.monotonic)
        self._typed = asyncio.Event()
        self._names: list[str] = []
        self._detail: QueueDetail | None = None
        self._problem = ""

    async def run(self, every: float, count: int) -> None:
        """Until it is quit, or shown so often."""
        start = Text("asking the cluster…")
        with keyboard(self._take), Live(start, console=self._out, screen=True, auto_refresh=False) as live:
            try:
                for shown in itertools.count(1):
                    await self._look()
                    until = time.monotonic() + every
                    live.update(self._render(), refresh=True)
                    while not self._state.over and (left := until - time.monotonic()) > 0:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(left):
                                await self._typed.wait()
                        if self._typed.is_set():
                            self._typed.clear()
                            live.update(self._render(), refresh=True)
                            if self._state.opened and self._state.screen is Screen.QUEUES and self._stale():
                                break  # read it now
                    if self._state.over or shown == count:
                        return
            finally:
                self._rolling.close()

    def _stale(self) -> bool:
        return self._detail is None or self._detail.summary.queue != self._state.opened

    def _take(self, typed: bytes) -> None:
        for key in keys_of(typed):
            self._state = pressed(self._state, key, self._names)
        self._typed.set()

    async def _look(self) -> None:
        """A GCM that changes must not end the display."""
        state, self._problem = self._state, ""
        try:
            await self._rolling.look(self._shown(), work=state.screen is Screen.TASKS)
            if state.opened and state.screen is Screen.QUEUES:
                detail = await with_groups(self._cluster, await read_queue(self._cluster, state.opened))
                busiest = sorted(detail.members, key=lambda row: -row.messages_per_second)[:MEMBERS_SHOWN]
                self._detail = msgspec.structs.replace(detail, members=tuple(busiest))
        except (TemporaryError, CallError) as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _shown(self) -> list[str]:
        numbers = window(self._state.selected, len(self._names), self._list_lines())
        return [self._names[number] for number in numbers if number < len(self._names)]

    def _list_lines(self) -> int:
        return max(2, self._out.height - HEAD_LINES)

    def _rows(self) -> Sequence[Any]:
        rolling = self._rolling
        reads: dict[Screen, Callable[[], Sequence[Any]]] = {
            Screen.QUEUES: rolling.queues,
            Screen.TASKS: rolling.work_queues,
            Screen.HOSTS: rolling.hosts,
        }
        return reads[self._state.screen]()

    def _render(self) -> RenderableType:
        state, rows = self._state, ordered(self._state, self._rows())
        self._names = [name_of(state, row) for row in rows]
        body = self._opened(rows) if state.opened else list_table(state, rows, self._list_lines())
        problem = Text(visible(self._problem), style="red")
        return Group(self._head(), problem, body, Text(HELP, style="dim", no_wrap=True))

    def _head(self) -> Text:
        view = self._rolling.view
        if view is None:
            return Text("asking the cluster…")
        queues, alive = self._rolling.queues(), sum(host.alive for host in view.hosts)
        flow = f"in {rate(sum(row.messages_per_second for row in queues))}/s"
        flow += f" out {rate(sum(row.delivered_per_second for row in queues))}/s"
        counts = f"hosts {alive}/{len(view.hosts)}  queues {len(view.queues)}  work queues {len(view.work_queues)}"
        told = f"{self._state.screen}  leader {view.leader}  {counts}  {flow}  {time.strftime('%H:%M:%S')}"
        return Text(told, style="bold", no_wrap=True)

    def _opened(self, rows: Sequence[Any]) -> RenderableType:
        """What was chosen, as large as the screen has room for it."""
        state = self._state
        if state.screen is Screen.QUEUES:
            return Text("asking…") if self._stale() or self._detail is None else detail_tables(self._detail)
        found = [row for row in rows if name_of(state, row) == state.opened]
        if not found:
            return Text(f"{visible(state.opened)} is there no longer")
        if state.screen is Screen.TASKS:
            fields = msgspec.structs.asdict(found[0])
            return table("", ("FIELD", "VALUE"), [(name, str(value)) for name, value in fields.items()])
        assert self._rolling.view is not None
        return _host_tables(_host(self._rolling.view, state.opened))


def _host_tables(found: dict[str, Any]) -> RenderableType:
    rows = [
        (one.name, str(one.state), str(one.pid), str(one.restarts), one.error)
        for one in sorted(found["processes"], key=lambda one: one.name)
    ]
    processes = table("Processes", ("PROCESS", "STATE", ">PID", ">RESTARTS", "ERROR"), rows)
    return Group(host_table((found["host"],)), "", processes)


@contextlib.contextmanager
def keyboard(take: Callable[[bytes], None]) -> Iterator[None]:
    """Keys as they are pressed, if standard input is a terminal; the terminal is as it was afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    former = termios.tcgetattr(number)
    tty.setcbreak(number)  # Ctrl-C remains a signal
    loop.add_reader(number, lambda: take(os.read(number, KEY_BYTES_MAX)))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, former)

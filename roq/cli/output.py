"""What commands print: machine output on stdout only, everything for people's eyes beside it on stderr, errors in one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from roq import errors
from roq.errors import RoqError
from roq.runtime.log_output import visible

T = TypeVar("T")
PLAIN_WIDTH = 100_000  # columns when a stream is not a terminal: a line for every row, whatever its length
NEXT_STEP: tuple[tuple[type[RoqError], str], ...] = (
    (errors.DurableNotFound, "`roq queue durables` lists those there are"),
    (errors.ProducerNotFound, "`roq queue producers` lists those there are"),
    (errors.NoResponder, "`roq serve` answers requests"),
    (errors.QueueNotFound, "`roq queue ls` lists the queues there are"),
    (errors.QueueConflict, "`roq queue show` shows the settings it has"),
    (errors.QueueStopped, "`roq queue start` starts it"),
    (errors.HostNotFound, "`roq host ls` lists the hosts there are"),
    (errors.ExchangeNotFound, "`roq queue show` shows the queue's Exchanges"),
    (errors.PublisherNotFound, "`roq queue show` shows the queue's publishers"),
    (errors.GroupNotFound, "`roq queue group ls` lists the groups of a queue"),
    (errors.WorkQueueNotFound, "`roq task create` or `roq task put` makes one"),
    (errors.TaskNotFound, "`roq task dead ls` lists the dead letters there are"),
    (errors.ShuffleNotFound, "`roq shuffle ls` lists the shuffles there are"),
    (errors.ShuffleNotSealed, "`roq shuffle show` shows how far it is"),
    (errors.LeaseLost, "`roq task peek --state leased` shows who leases what"),
    (errors.ClusterNotFound, "is the chroot right? `roq up` starts a cluster on this machine"),
    (
        errors.ZooKeeperUnavailable,
        "`roq context show` says why this address, `roq doctor` looks closer, `roq up` starts a cluster here",
    ),
    (errors.Unavailable, "`roq doctor` looks closer"),
    (errors.HostFull, "`roq host ls` shows the free slots"),
    (errors.NoHosts, "start a host with `roq-hcm`"),
)


def print_error(error: RoqError) -> None:
    """`roq: Class: message; hint` on stderr."""
    hint = next((f" ({text})" for kind, text in NEXT_STEP if isinstance(error, kind)), "")
    say(f"roq: {type(error).__name__}: {error}{hint}")


def print_json(value: Any) -> None:
    """Any struct, list or dict as one line of JSON on stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def print_found(found: T, json: bool, view: Callable[[T], RenderableType]) -> None:
    """The same as JSON for programs, or as `view` shows it to people; both on stdout."""
    if json:
        print_json(found)
    else:
        console().print(view(found))


def print_done(done: Any, json: bool, text: str) -> None:
    """What a command has changed: as JSON for programs, on stdout, or in words for people, on stderr."""
    if json:
        print_json(done)
    else:
        say(text)


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def console(*, stderr: bool = False) -> Console:
    """A stream for people: as wide as the terminal; elsewhere nothing is wrapped. Text is shown as it is: names, payloads
    and errors come from anybody, so nothing in them is markup, an emoji's name, or worth a colour."""
    stream = sys.stderr if stderr else sys.stdout
    width, terminal = (None, None) if stream.isatty() else (PLAIN_WIDTH, False)
    return Console(stderr=stderr, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], gap: int = 2, marked: int | None = None
) -> RenderableType:
    """A plain table; columns that start with ">" are right-aligned. gap: characters between two columns. marked: number of the
    row that stands out."""
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for column in columns:
        found.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for number, row in enumerate(rows):
        found.add_row(*map(visible, row), style="reverse" if number == marked else None)
    return Group(Text(visible(title), style="table.title"), found) if title else found  # its own title would wrap at its width


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on stderr while something takes long, if a person watches."""
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(Text(visible(text))):  # a string would be taken for markup
        yield


def counted(count: int, one: str) -> str:
    """1 task, 2 tasks."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def rate(value: float) -> str:
    """1234567 → 1.23 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def size(value: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def percent(fraction: float) -> str:
    """0.25 → 25%."""
    return f"{fraction * 100:.0f}%"


def seconds(value: float) -> str:
    """0.0012 → 1.2 ms."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def age(seconds: float | None) -> str:
    """75.0 → 1 min 15 s."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 48 * 3600 else f"{whole // 86400} d"


def moment(at: float) -> str:
    """Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def yes(value: object) -> str:
    """yes or no."""
    return "yes" if value else "no"

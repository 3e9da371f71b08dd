"""`roq shuffle ls|show|rm|rebalance`: the shuffles of a folder or a cluster. What they need (pyarrow) is imported when it is
used: every other command starts without it. Not covered: writing and reading, which programs do (roq.shuffle)."""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Annotated, Any

import msgspec
import typer

from roq.cli.address import JsonOption, OldPlaceArgument, either, entered
from roq.cli.output import age, console, print_done, print_json, size, table, working
from roq.errors import InvalidConfiguration
from roq.runtime.installation import brought_by
from roq.shuffle.ranges import imbalance
from roq.wire.shuffle import RANGES_MAX, Description, Position, Range, ShuffleState

app = typer.Typer(help="Shuffles: list, show how far they are, rebalance, remove.", no_args_is_help=True)
KEY_SHOWN_BYTES = 12

PlaceOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        help="ZooKeeper addresses, h1:2181,h2:2181, a context, or a folder; else ROQ_CLUSTER, the context in use.",
        show_default=False,
    ),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the shuffle.", show_default=False)]
RangesOption = Annotated[int, typer.Option("--ranges", min=0, max=RANGES_MAX, help="Cut into so many; 0: as many as it has.")]


class RangeRow(msgspec.Struct):
    """A range for JSON. rows, bytes: -1 before they were counted. lower: hexadecimal key it begins at."""

    number: int
    identity: int
    rows: int
    bytes: int
    holders: tuple[str, ...]
    lower: str


class ShuffleRow(msgspec.Struct):
    """A shuffle for JSON. attempts: stored so far; rows, bytes: of the committed attempts. imbalance: largest range / mean, 0
    while they are not counted. moved, moved_least: bytes that rebalancing has sent, and had to send."""

    name: str
    id: str
    state: ShuffleState
    keys: tuple[str, ...]
    replicas: int
    created: float
    attempts: int
    rows: int
    bytes: int
    table: int
    moving: bool
    imbalance: float
    moved: int
    moved_least: int
    ranges: list[RangeRow]


def shuffle_row(each: Description) -> ShuffleRow:
    """For people, and as JSON."""
    counted = bool(each.ranges) and all(part.size >= 0 for part in each.ranges)
    return ShuffleRow(
        each.name,
        each.id,
        each.state,
        each.spec.keys,
        each.spec.replicas,
        each.created,
        each.stored,
        each.rows,
        each.size,
        each.epoch,
        bool(each.former),
        round(imbalance([part.size for part in each.ranges]), 4) if counted else 0.0,
        each.moved,
        each.moved_least,
        [RangeRow(part.number, part.identity, part.rows, part.size, part.holders, _lower(part).hex()) for part in each.ranges],
    )


def _lower(part: Range) -> bytes:
    lower: Position | None = part.interval.lower
    return lower.key if lower is not None else b""


def _address(given: str | None) -> str:
    if given is None:
        return f"roq://{entered(None)}"
    if "://" in given:
        return given
    if given.startswith(("/", ".", "~")) or os.path.isdir(given):
        return f"file://{os.path.abspath(os.path.expanduser(given))}"
    return f"roq://{entered(given)}"


def _opened(cluster: str | None, old_place: str | None) -> Any:
    """A roq.shuffle.Shuffles, which is a Service and more. Raises InvalidAddress, InvalidConfiguration."""
    try:
        with brought_by("shuffle", "`roq shuffle`"):
            module = import_module("roq.shuffle.service")
    except ModuleNotFoundError as error:
        raise InvalidConfiguration(str(error)) from None
    return module.open(_address(either(cluster, old_place)))


@app.command("ls")
def list_shuffles(cluster: PlaceOption = None, old_place: OldPlaceArgument = None, json: JsonOption = False) -> None:
    """List shuffles and how far they are."""
    with working("asking"), _opened(cluster, old_place) as shuffles:
        found: list[Description] = shuffles.list()
    if json:
        print_json([shuffle_row(msgspec.structs.replace(each, ranges=(), former=())) for each in found])
        return
    now = time.time()
    rows = [
        (
            each.name,
            each.state,
            ", ".join(each.spec.keys),
            str(each.stored),
            f"{each.rows:,}",
            size(each.size),
            age(now - each.created),
        )
        for each in found
    ]
    console().print(table("", ("NAME", "STATE", "KEYS", ">ATTEMPTS", ">ROWS", ">SIZE", ">AGE"), rows))


@app.command("show")
def show(name: NameArgument, cluster: PlaceOption = None, old_place: OldPlaceArgument = None, json: JsonOption = False) -> None:
    """Show one shuffle: state, progress, ranges and who holds them."""
    with working("asking"), _opened(cluster, old_place) as shuffles:
        row = shuffle_row(shuffles.describe(name))
    _show(row, either(cluster, old_place), json)


def _show(row: ShuffleRow, address: str | None, json: bool) -> None:
    if json:
        print_json(row)
        return
    state = f"{row.state}, data is moving" if row.moving else str(row.state)
    facts = [
        ("state", state),
        ("keys", ", ".join(row.keys)),
        ("copies", str(row.replicas) if _address(address).startswith("roq:") else "1, it is in a folder"),
        ("attempts stored", f"{row.attempts:,}"),
        ("rows", f"{row.rows:,}"),
        ("size", size(row.bytes)),
        ("ranges", f"{len(row.ranges)}, table {row.table}"),
        ("largest / mean", f"{row.imbalance:.3f}" if row.imbalance else "-"),
        ("moved / least", f"{size(row.moved)} / {size(row.moved_least)}"),
    ]
    console().print(table(f"shuffle {row.name}", ("", ""), facts))
    ranges = [
        (str(each.number), each.lower[: 2 * KEY_SHOWN_BYTES] or "-", *_counts(each), ", ".join(each.holders) or "-")
        for each in row.ranges
    ]
    console().print(table("", (">RANGE", "FROM KEY", ">ROWS", ">SIZE", "HOLDERS"), ranges))


def _counts(each: RangeRow) -> tuple[str, str]:
    return (f"{each.rows:,}", size(each.bytes)) if each.rows >= 0 else ("-", "-")


@app.command("rm")
def remove(
    name: NameArgument, cluster: PlaceOption = None, old_place: OldPlaceArgument = None, json: JsonOption = False
) -> None:
    """Remove a shuffle and its data."""
    with working("removing"), _opened(cluster, old_place) as shuffles:
        shuffles.remove(name)
    print_done({"shuffle": name, "removed": True}, json, f"roq shuffle: removed {name}")


@app.command("rebalance")
def rebalance(
    name: NameArgument,
    cluster: PlaceOption = None,
    old_place: OldPlaceArgument = None,
    ranges: RangesOption = 0,
    json: JsonOption = False,
) -> None:
    """Cut a sealed shuffle anew; returns when its data has moved."""
    with working("moving data"), _opened(cluster, old_place) as shuffles:
        row = shuffle_row(shuffles.rebalance(name, ranges))
    _show(row, either(cluster, old_place), json)

"""`roq bench …`: load generators. `pubsub` measures publish/subscribe end to end and accounts for every message."""

from __future__ import annotations

import os
from typing import Annotated

import typer
import uvloop
from rich.console import RenderableType

from roq.cli.address import ClusterOption, JsonOption, either
from roq.cli.output import print_found, rate, say, seconds, table, working
from roq.cli.which import choose, take_card
from roq.tools.bench.harness import IDLE_SECONDS, PubSubResult
from roq.tools.bench.load import Load
from roq.tools.bench.pubsub import run
from roq.wire.assignment import Overflow

MESSAGES = 100_000  # per publisher, when the load is bounded by nothing else

app = typer.Typer(help="Measure this machine or a cluster with a load.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this machine or a cluster with a load."""


@app.command("pubsub")
def pubsub(  # noqa: PLR0913, PLR0917  one parameter per flag
    cluster: ClusterOption = None,
    publishers: Annotated[int, typer.Option("--publishers", "-p", help="Publishers, a process each.")] = 1,
    subscribers: Annotated[int, typer.Option("--subscribers", "-s", help="Subscribers, a process each.")] = 1,
    size: Annotated[int, typer.Option(help="Bytes of one payload.")] = 100,
    messages: Annotated[
        int | None, typer.Option(help=f"Messages per publisher. {MESSAGES}, or without bound if there are --seconds.")
    ] = None,
    topics: Annotated[int, typer.Option(help="Topics each publisher goes through in turn.")] = 1,
    pace: Annotated[float, typer.Option("--rate", help="Messages per second and publisher; 0: flat out.")] = 0.0,
    seconds: Annotated[float | None, typer.Option(help="Publishers stop after so many; else after --messages.")] = None,
    old_seconds: Annotated[float | None, typer.Option("--duration", hidden=True)] = None,  # the name it had in 0.1
    overflow: Annotated[
        Overflow, typer.Option(help="What a slow subscriber causes: publishers wait, or it loses.")
    ] = Overflow.BLOCK,
    pairs: Annotated[bool, typer.Option("--pairs", help="Subscriber i hears publisher i only.")] = False,
    batch: Annotated[int, typer.Option(help="Payloads per publish_many call, read by batches(); 0: one publish each.")] = 0,
    idle: Annotated[float, typer.Option(help="Seconds without a message after which what is missing is lost.")] = IDLE_SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Publishers and subscribers, each a process of its own; every message accounted for.

    Without --cluster, ROQ_CLUSTER or a configuration file it brings a cluster of its own up and down.
    """
    duration = either(seconds, old_seconds) or 0.0
    count = messages if messages is not None else (0 if duration else MESSAGES)
    load = Load(
        publishers=publishers,
        subscribers=subscribers,
        size=size,
        messages=count,
        topics=topics,
        rate=pace,
        duration=duration,
        batch=batch,
        pairs=pairs,
    ).check()
    address = _address(cluster)
    if not address:
        say("no cluster named: bringing one up")
    with working("measuring"):
        result = uvloop.run(run(address, load, overflow, idle))
    print_found(result, as_json, _table)


def _address(flag: str | None) -> str:
    """The cluster somebody named, or "" for one of our own; never the default address, nor a context that is only in use: a
    load is nothing to have by accident."""
    choice = choose(flag)
    if choice is None or (choice.context and not (flag or os.environ.get("ROQ_CLUSTER"))):
        return ""
    take_card(choice)
    return choice.address


def _table(result: PubSubResult) -> RenderableType:
    latency = {name: "-" if value is None else seconds(value / 1e6) for name, value in result.latency_us.items()}
    rows = [
        ("delivered end to end", f"{rate(result.throughput)} messages/s"),
        ("payload", f"{rate(result.throughput * result.load.size)}B/s"),
        ("published", f"{result.published}"),
        ("delivered", f"{result.delivered}"),
        ("lost, duplicated, reordered", f"{result.lost}, {result.duplicated}, {result.reordered}"),
        ("latency p50, p99, p99.9", ", ".join(latency.values())),
        ("CPU seconds", ", ".join(f"{kind} {value:.2f}" for kind, value in result.cpu_seconds.items())),
    ]
    return table("publish/subscribe", ("what", "value"), rows)

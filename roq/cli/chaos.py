"""`roq chaos`: faults under load against a cluster of its own, every message accounted for."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import RenderableType

from roq.cli.address import JsonOption
from roq.cli.output import print_found, say, table
from roq.errors import CallError
from roq.tools.chaos.result import ChaosOptions, ChaosResult, ChaosRun, memory, timeline

RUN_MODULE = "roq.tools.chaos.run"  # imported when it is wanted: the Docker client would cost every command 60 ms
LOCAL_HELP = "A cluster on loopback addresses: kills and pauses. With a real ZooKeeper: needs Java, or the extra 'local'."
DOCKER_HELP = "A cluster in containers: partitions too. Needs the extra 'testing'."


def chaos(  # noqa: PLR0913, PLR0917  one parameter per flag
    local: Annotated[bool, typer.Option("--local", help=LOCAL_HELP)] = False,
    docker: Annotated[bool, typer.Option("--docker", help=DOCKER_HELP)] = False,
    seconds: Annotated[float, typer.Option(help="Seconds of load under faults.")] = 60.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same faults.")] = 0,
    publishers: Annotated[int, typer.Option("--publishers", "-p", help="Publishers.")] = 4,
    subscribers: Annotated[int, typer.Option("--subscribers", "-s", help="Subscribers; each hears every publisher.")] = 4,
    pace: Annotated[float, typer.Option("--rate", help="Messages per second and publisher.")] = 1250.0,
    size: Annotated[int, typer.Option(help="Bytes of one payload.")] = 100,
    every: Annotated[float, typer.Option(help="Seconds from one fault to the next.")] = 10.0,
    longest: Annotated[
        float | None, typer.Option(help="No fault takes longer than this (seconds).", show_default=False)
    ] = None,
    image: Annotated[str, typer.Option(help="Image for --docker; empty: as built by `make image`.")] = "",
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as SVG to this file.", show_default=False)] = None,
    soak: Annotated[
        bool,
        typer.Option("--soak", help="Judge memory, descriptors and znodes too. Runs two queues, each with the load asked for."),
    ] = False,
    memory_picture: Annotated[
        Path | None, typer.Option(help="Write each process's memory over time as SVG to this file.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Kill, pause and partition everything under load, heal it, drain, and judge: exit code 1 if anything was violated.

    --soak: ZooKeeper, the first host, the first GCM and the first queue's processes there are only frozen for moments, so that
    there are processes that live through it; what they take must be flat. Needs a long run: judged is what is left of it after
    a third, 10 minutes at most.
    """
    if local == docker:
        raise CallError("where? give --local or --docker")
    logging.getLogger("roq.client").setLevel(logging.CRITICAL)  # gaps and lost paths are what is counted here
    options = ChaosOptions(seconds, seed, publishers, subscribers, pace, every, longest, size, soak).check()
    done = _run("docker" if docker else "local", image, options)
    result = done.result
    title = f"roq chaos, seed {seed}, {result.cluster}: {_summary(result)}"
    if picture is not None:
        picture.write_text(timeline(title, done.heard, result.faults, done.seconds))
    if memory_picture is not None:
        text = f"memory of every process, seed {seed}, {seconds:g} s, {len(result.faults)} faults"
        memory_picture.write_text(memory(text, done.series, done.znodes, result.faults, done.seconds))
    for problem in (*result.problems, *result.violations):
        say(problem)
    print_found(result, as_json, _table)
    if not result.passed:
        raise typer.Exit(1)


def _run(where: str, image: str, options: ChaosOptions) -> ChaosRun:
    say("bringing a cluster up")
    done: ChaosRun = uvloop.run(importlib.import_module(RUN_MODULE).bring_up_and_run(where, image, options, say))
    return done


def _summary(result: ChaosResult) -> str:
    counts = ("published", "delivered", "lost", "duplicated", "reordered", "unknown", "reported_gaps")
    return ", ".join(f"{getattr(result, name)} {name.replace('_', ' ')}" for name in counts)


def _table(result: ChaosResult) -> RenderableType:
    names = ("published", "acked", "delivered", "lost", "duplicated", "reordered", "unknown", "reported_gaps")
    rows = [(name.replace("_", " "), f"{getattr(result, name)}") for name in names]
    silence = max(share.silence_seconds for share in result.subscribers)
    rows += [
        ("faults", f"{len(result.faults)}"),
        ("administration", f"{result.administration.acked} acked, {result.administration.unknown} unknown at first"),
        ("longest silence", f"{silence:.1f} s"),
        ("healed after", f"{result.healed_seconds:.1f} s"),
        ("verdict", "passed" if result.passed else "FAILED"),
    ]
    if result.options.soak:
        rows[-1:-1] = _steady(result)
    return table(f"chaos, seed {result.options.seed}", ("what", "value"), rows)


def _steady(result: ChaosResult) -> list[tuple[str, str]]:
    taken = result.resources
    judged = [life for life in taken.lives if life.judged]
    return [
        ("processes judged", f"{len(judged)} of {len(taken.lives)}"),
        ("not steady", f"{len(taken.problems)}"),
        ("znodes", f"{taken.znodes.first} at first, {taken.znodes.last} at last, {taken.znodes.most} at most"),
    ]

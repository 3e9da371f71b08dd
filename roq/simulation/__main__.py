"""roq-sim: hunts for a seed whose run breaks a promise."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from roq.simulation.hunt import Clock, runs, shortest, story
from roq.simulation.run import FAULT_SECONDS, simulate

app = typer.Typer(add_completion=False)


@app.command()
def hunt(
    seeds: Annotated[int, typer.Option(help="How many runs.")] = 100,
    first: Annotated[int, typer.Option(help="The first one's seed; the others follow it.")] = 0,
    seconds: Annotated[float, typer.Option(help="Simulated seconds of faults in each.")] = FAULT_SECONDS,
    jobs: Annotated[int, typer.Option(help="Processes that share the runs.")] = os.cpu_count() or 1,
    trace: Annotated[bool, typer.Option("--trace", help="Tell what happened in each run, too.")] = False,
) -> None:
    """Simulate a cluster again and again, with other faults each time: GCMs, hosts and clients are killed, stopped and cut off,
    Exchanges come and go. What every subscriber got is held against what was published. Tells the shortest story that breaks a
    promise, and ends with 1 if there is one."""
    clock, broken = Clock(), 0
    for run in runs(range(first, first + seeds), seconds, jobs):
        clock.count += 1
        if trace:
            typer.echo(story(run))
        if run.wrong:
            broken += 1
            typer.echo(f"seed {run.seed} breaks a promise: {run.wrong[0]}; looking for its shortest story")
            typer.echo(story(shortest(run, seconds)))
    typer.echo(f"{clock.count} runs, {clock.per_minute():.0f} a minute, {broken} broken")
    raise typer.Exit(1 if broken else 0)


@app.command()
def show(
    seed: Annotated[int, typer.Argument(help="Which run.")],
    seconds: Annotated[float, typer.Option(help="Simulated seconds of faults.")] = FAULT_SECONDS,
) -> None:
    """Tell one run's story."""
    run = simulate(seed, seconds)
    typer.echo(story(run))
    typer.echo(
        f"{run.published} published, {run.delivered} delivered, {run.told} told as lost; "
        f"{run.seconds:.0f} simulated seconds in {run.real_seconds:.1f} s, {run.steps} steps, trace {run.hash:08x}"
    )
    raise typer.Exit(1 if run.wrong else 0)


def main() -> None:
    """Entry of `roq-sim`."""
    app()


if __name__ == "__main__":
    main()

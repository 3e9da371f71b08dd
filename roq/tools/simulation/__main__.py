"""roq-sim: hunts for a seed whose run breaks a promise."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from roq.tools.simulation.hunt import Stopwatch, runs, shortest, story
from roq.tools.simulation.run import FAULT_SECONDS, WORDS, What, simulate

app = typer.Typer(add_completion=False)
WHAT = typer.Option(
    help="messages: a queue with publishers and subscribers; tasks: a work queue, its stores, masters and disks; "
    "shuffle: shuffles, their leader and followers, drivers, writers and readers; "
    "recorded: a recorded queue, its tapes and stores, publishers and readers of the past; "
    "durables: the same, with subscribers that have names; "
    "producers: the same as recorded, with publishers that have names; "
    "groups: the same as recorded, with a group of it, its master and members; "
    "transactions: the same, whose members move messages to two other recorded queues."
)


@app.command()
def hunt(
    seeds: Annotated[int, typer.Option(help="How many runs.")] = 100,
    first: Annotated[int, typer.Option(help="The first one's seed; the others follow it.")] = 0,
    seconds: Annotated[float, typer.Option(help="Simulated seconds of faults in each.")] = FAULT_SECONDS,
    jobs: Annotated[int, typer.Option(help="Processes that share the runs.")] = os.cpu_count() or 1,
    what: Annotated[What, WHAT] = What.MESSAGES,
    trace: Annotated[bool, typer.Option("--trace", help="Print what happened in each run, too.")] = False,
) -> None:
    """Simulate a cluster again and again, with other faults each time: GCMs, hosts and clients are killed, stopped and cut off,
    Exchanges come and go; with `--what tasks` stores and masters are killed, disks fail, fill up, rot and are replaced; with
    `--what shuffle` hosts join and are drained, too, and shuffles are cut anew; with `--what recorded` stores and Exchanges are
    killed, disks fail, fill up and are replaced, and recording is switched off and on; with `--what groups` and
    `--what transactions` masters are killed besides. What every subscriber got is held
    against what was published, what was worked on against what was put, what was read against the attempts that won. Tells
    the shortest story that breaks a promise, and ends with 1 if there is one."""
    clock, broken = Stopwatch(), 0
    for run in runs(range(first, first + seeds), seconds, jobs, what):
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
    what: Annotated[What, WHAT] = What.MESSAGES,
) -> None:
    """Tell one run's story."""
    run = simulate(seed, seconds, what=what)
    typer.echo(story(run))
    counts = zip((run.given, run.got, run.settled), WORDS[what], strict=True)
    typer.echo(
        f"{', '.join(f'{count} {word}' for count, word in counts)}; "
        f"{run.seconds:.0f} simulated seconds in {run.real_seconds:.1f} s, {run.steps} steps, trace {run.hash:08x}"
    )
    raise typer.Exit(1 if run.wrong else 0)


def main() -> None:
    """Entry of `roq-sim`."""
    app()


if __name__ == "__main__":
    main()

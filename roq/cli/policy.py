"""`roq policy …`: scaling policies of queues, and what another policy would have decided."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import moment, print_json, say, visible
from roq.cli.policy_file import policy_toml, read_policy, sample_toml, write_sample
from roq.cli.task_address import age
from roq.client.cluster import Cluster
from roq.client.overview import policy_tables
from roq.errors import CallError, FrameError
from roq.pubsub.scaling.replay import replay as replay_kpis
from roq.wire.kpi import Decision, QueueKpi, from_json_line
from roq.wire.policy import Policy

app = typer.Typer(help="Scaling policies: write one, set, show, replay.", no_args_is_help=True)
QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]


@app.command("init")
def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="[POLICY.TOML]", help="A new file; else standard output.", show_default=False)
    ] = None,
) -> None:
    """Write a sample policy, every field explained: it scales out before hosts or Exchanges are overloaded."""
    if file is None:
        sys.stdout.write(sample_toml())
        return
    write_sample(file)
    say(f"wrote {file}: change it, then `roq policy set QUEUE {file}`")


@app.command("set")
def set_policy(
    name: QueueArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="[POLICY.TOML]", help="As `roq policy init` writes it.", show_default=False)
    ] = None,
    cluster: ClusterOption = None,
    default: Annotated[bool, typer.Option("--default", help="Back to the default: never scale by itself.")] = False,
) -> None:
    """Give a queue a scaling policy; it holds from the next second on."""
    if (file is None) != default:
        raise typer.BadParameter("give either a policy file or --default")
    rules = read_policy(file) if file else None

    async def work(connected: Cluster) -> None:
        await connected.set_policy(name, rules)

    with_cluster(cluster, work)
    say(f"policy of {name} is set")


@app.command("show")
def show_policy(name: QueueArgument, cluster: ClusterOption = None, json: JsonOption = False) -> None:
    """Print a queue's scaling policy as `roq policy set` reads it."""

    async def work(connected: Cluster) -> Policy:
        return await connected.get_policy(name)

    found = with_cluster(cluster, work)
    if json:
        print_json(policy_tables(found))
    else:
        sys.stdout.write(policy_toml(found))


@app.command("replay")
def replay(
    record: Annotated[Path, typer.Argument(metavar="KPIS.JSONL", help="What `roq queue kpis` printed.", show_default=False)],
    policy: Annotated[Path, typer.Option(help="Scaling policy, a TOML file.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Tell what a policy would have decided on a recorded KPI stream."""
    rules = read_policy(policy)
    times: list[float] = []  # of the first record and the last
    decisions = replay_kpis(_noting(_records(record), times), rules)
    if json:
        for decision in decisions:
            print_json(decision)
        return
    for decision in decisions:
        print(visible(_line(decision, times[0])))
    say(f"{len(decisions)} decisions" + (f" in {age(times[1] - times[0])} since {moment(times[0])}" if times else ""))


def _noting(records: Iterator[QueueKpi], times: list[float]) -> Iterator[QueueKpi]:
    """The records themselves."""
    for one in records:
        times[:] = (times[0] if times else one.time, one.time)
        yield one


def _line(decision: Decision, first: float) -> str:
    """When, and how long after the first record; what and why."""
    moves = ", ".join(f"{publisher:016x} → {exchange}" for publisher, exchange in decision.moves)
    detail = f"  [{moves}]" if moves else ""
    return f"{moment(decision.time)}  +{age(decision.time - first)}  {decision.action}  {decision.cause}{detail}"


def _records(path: Path) -> Iterator[QueueKpi]:
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _record(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise CallError(f"can't read {path}: {error}") from None


def _record(path: Path, number: int, line: str) -> QueueKpi:
    try:
        return from_json_line(line)
    except FrameError as error:
        raise CallError(f"{path}, line {number}: {error}") from None

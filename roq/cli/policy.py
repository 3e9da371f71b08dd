"""`roq policy …`: scaling policies of queues as TOML files, and what another policy would have decided.

docs/policies.md is checked against what stands here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.output import age, moment, print_json, say, visible
from roq.client.cluster import Cluster
from roq.client.overview import policy_tables
from roq.errors import CallError, FrameError, InvalidPolicy
from roq.pubsub.scaling.what_if import replay as replay_kpis
from roq.wire.kpi import Decision, QueueKpi, from_json_line
from roq.wire.policy import Policy, policy_from_toml

app = typer.Typer(help="Scaling policies: write one, set, show, replay.", no_args_is_help=True)


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


class Field(NamedTuple):
    """A field for people. sample: what `roq policy init` writes; active: else it is written as a comment."""

    unit: str
    meaning: str
    sample: float
    active: bool = True


# The samples: an Exchange carries 3.7 million messages of 100 bytes a second on two cores (README, Measured), and a network of
# 1 Gbit/s 125 MB/s. Memory is off because another Exchange does not free what other programs take.
FIELDS = {
    "exchange.max_messages_per_second": Field("messages/s", "coming in to one Exchange", 1_000_000),
    "exchange.max_bytes_per_second": Field("bytes/s", "coming in to one Exchange", 100_000_000),
    "host.max_cpu_fraction": Field("0 to 1", "of all cores of a host that runs an Exchange of the queue", 0.8),
    "host.max_memory_fraction": Field("0 to 1", "of the memory of such a host, whoever uses it", 0.9, active=False),
    "queue.max_messages_per_second_per_exchange": Field(
        "messages/s", "average over the queue's Exchanges", 500_000, active=False
    ),
    "queue.max_publishers_per_exchange": Field("publishers", "average over the queue's Exchanges", 100, active=False),
    "bounds.min_exchanges": Field("Exchanges", "never fewer", 1),
    "bounds.max_exchanges": Field("Exchanges", "never more", 4),
    "bounds.cooldown_seconds": Field("seconds", "of rest after a change has taken effect", 5.0),
    "bounds.hysteresis": Field(
        "0 to 1", "scale in only when every limit would keep so much to spare with one Exchange less", 0.3
    ),
}
TABLES = {
    "exchange": "What one Exchange carries at most. Above it: another Exchange, or publishers move to an emptier one.",
    "host": "What a host may be used. Above it: publishers move to an Exchange on another host.",
    "queue": "Averages over all Exchanges of the queue. Above them: another Exchange.",
    "bounds": "Limits of the scaling itself.",
}


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file; raises InvalidPolicy with the reason."""
    try:
        return policy_from_toml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPolicy(f"can't read policy file {path}: {error}") from None


def policy_toml(policy: Policy) -> str:
    """The policy as `roq policy set` reads it: only what is set, then the bounds in full."""
    parts = []
    for name, fields in policy_tables(policy).items():
        lines = [f"{field} = {value}" for field, value in fields.items() if value is not None]
        if lines:
            parts.append("\n".join((f"[{name}]", *lines)))
    return "\n\n".join(parts) + "\n"


def sample_toml() -> str:
    """A policy with every field and what it means, as `roq policy set` and `replay` read it."""
    parts = ["# A scaling policy for `roq policy set QUEUE FILE`. A rule that is left out, or a comment, is off."]
    for table, fields in policy_tables(Policy()).items():
        lines = [f"# {TABLES[table]}", f"[{table}]"]
        for name in fields:
            one = FIELDS[f"{table}.{name}"]
            lines.append(f"{'' if one.active else '# '}{name} = {one.sample:_}  # {one.unit}: {one.meaning}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write_sample(path: Path) -> None:
    """Raises CallError if the file exists or can't be written."""
    try:
        with path.open("x") as file:
            file.write(sample_toml())
    except OSError as error:
        raise CallError(f"can't write {path}: {error.strerror}") from None

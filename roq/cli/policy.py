"""`roq policy …`: scaling policies of queues as TOML files, and what another policy would have decided.

docs/policies.md is checked against what stands here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from roq.cli.address import ClusterOption, JsonOption, QueueArgument, with_cluster
from roq.cli.completion import queue_names
from roq.cli.history import SinceOption, since_of
from roq.cli.output import age, counted, moment, print_done, print_json, say, working
from roq.cli.progress import progressing
from roq.client.cluster import Cluster
from roq.client.history import past_decisions, past_kpis
from roq.client.overview import policy_tables
from roq.errors import CallError, FrameError, InvalidPolicy
from roq.pubsub.scaling.what_if import PolicyReplay
from roq.pubsub.scaling.what_if import replay as replay_kpis
from roq.pubsub.start import Start
from roq.runtime.log_output import visible
from roq.wire.kpi import Decision, QueueKpi, from_json_line
from roq.wire.policy import Policy, policy_from_toml

app = typer.Typer(help="Scaling policies: write one, set, show, replay.", no_args_is_help=True)
LINES_PER_STEP = 1000  # of the progress bar


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
    json: JsonOption = False,
) -> None:
    """Give a queue a scaling policy; it holds from the next second on."""
    if (file is None) != default:
        raise typer.BadParameter("give either a policy file or --default")
    rules = read_policy(file) if file else None

    async def work(connected: Cluster) -> None:
        await connected.set_policy(name, rules)

    with_cluster(cluster, work)
    print_done({"queue": name, "set": True, "policy": policy_tables(rules or Policy())}, json, f"policy of {name} is set")


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
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="KPIS.JSONL|POLICY.TOML",
            help="What `roq queue kpis` printed; with --queue the policy.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="Scaling policy, a TOML file.", show_default=False)] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            "-q",
            help="Over the history of this queue, see `roq history`.",
            show_default=False,
            autocompletion=queue_names,
        ),
    ] = None,
    since: SinceOption = None,
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a policy would have decided on a recorded KPI stream; over a queue's history (the last day of it unless told
    otherwise), beside what was decided."""
    if queue is not None:
        if (file is None) == (policy is None):
            raise typer.BadParameter("--queue needs a policy, one: `roq policy replay --queue QUEUE POLICY.TOML`")
        replay_history(queue, since_of(since or "1d"), read_policy(file or policy or Path()), cluster, json)
    elif file is None or policy is None:
        raise typer.BadParameter("give KPIS.JSONL and --policy, or --queue and a policy")
    elif since is not None:
        raise typer.BadParameter("--since says from when on the history of a --queue is read")
    else:
        replay_file(file, read_policy(policy), json)


def replay_file(record: Path, rules: Policy, json: bool) -> None:
    """What `rules` would have decided on the KPIs in a file."""
    times: list[float] = []  # of the first record and the last
    decisions = replay_kpis(_noting(_records(record), times), rules)
    if json:
        for decision in decisions:
            print_json(decision)
        return
    for decision in decisions:
        print(visible(_line(decision, times[0])))
    say(f"{len(decisions)} decisions" + (f" in {age(times[1] - times[0])} since {moment(times[0])}" if times else ""))


class ReplayedDecision(Decision, frozen=True, kw_only=True):
    """One line of a replay over a history. taken: it was taken; would: the policy would have taken it."""

    taken: bool
    would: bool


def replay_history(queue: str, since: Start, rules: Policy, cluster: str | None, json: bool) -> None:
    """What `rules` would have decided on the history of a queue, beside what was decided."""
    times: list[float] = []

    async def work(connected: Cluster) -> list[ReplayedDecision]:
        course = PolicyReplay(rules)
        with working(f"reading the history of {queue}"):
            async for kpi in past_kpis(connected, queue, since):
                times[:] = (times[0] if times else kpi.time, kpi.time)
                course.see(kpi)
            return beside(await past_decisions(connected, queue, since), course.decisions)

    found = with_cluster(cluster, work)
    if json:
        for one in found:
            print_json(one)
        return
    for one in found:
        print(visible(f"{MARKS[one.taken, one.would]}  {_line(one, times[0] if times else one.time)}{_became(one)}"))
    both = sum(one.taken and one.would for one in found)
    taken, would = (sum(getattr(one, field) for one in found) for field in ("taken", "would"))
    span = f" in {age(times[1] - times[0])} since {moment(times[0])}" if times else ": nothing was kept since then"
    say(f"{counted(taken, 'decision')} taken, by the policy {would}, {both} of them the same{span}")


MARKS = {(True, True): "both   ", (True, False): "taken  ", (False, True): "policy "}


def beside(taken: Sequence[Decision], would: Sequence[Decision]) -> list[ReplayedDecision]:
    """In order of time. The same action on the same record is the same decision; of one that was taken, what became of it."""
    known = {(one.time, one.action): one for one in taken}
    again = {(one.time, one.action) for one in would}
    rows = [_replayed(one, True, key in again) for key, one in known.items()]
    rows += [_replayed(one, False, True) for one in would if (one.time, one.action) not in known]
    return sorted(rows, key=lambda row: row.time)


def _replayed(one: Decision, taken: bool, would: bool) -> ReplayedDecision:
    fields = {name: getattr(one, name) for name in Decision.__struct_fields__}
    return ReplayedDecision(**fields, taken=taken, would=would)


def _became(one: Decision) -> str:
    return f"  → {one.outcome}" if one.outcome else ""


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
        with path.open() as lines, progressing("reading") as told:
            size, read = path.stat().st_size, 0
            for number, line in enumerate(lines, 1):
                read += len(line)
                if number % LINES_PER_STEP == 0:
                    told(path.name, read, size)
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


# The samples: an Exchange carries 3.7 million messages of 100 bytes a second on two cores (docs/benchmarks.md), and a network
# of 1 Gbit/s 125 MB/s. Memory is off because another Exchange does not free what other programs take.
FIELDS = {
    "exchange.max_messages_per_second": Field("messages/s", "coming in to one Exchange", 1_000_000),
    "exchange.max_bytes_per_second": Field("bytes/s", "coming in to one Exchange", 100_000_000),
    "host.max_cpu_fraction": Field("0 to 1", "of all cores of a host that runs an Exchange of the queue", 0.8),
    "host.max_memory_fraction": Field("0 to 1", "of the memory of such a host, whoever uses it", 0.9, active=False),
    "queue.max_messages_per_second_per_exchange": Field(
        "messages/s", "average over the queue's Exchanges", 500_000, active=False
    ),
    "queue.max_publishers_per_exchange": Field("publishers", "average over the queue's Exchanges", 100, active=False),
    "queue.max_subscribers_per_exchange": Field("subscribers", "of the queue, divided by its Exchanges", 50, active=False),
    "target.max_latency_p99_seconds": Field("seconds", "from publishing to delivery, of most subscribers", 0.05, active=False),
    "target.min_messages_per_second": Field(
        "messages/s", "into the queue, while publishers are held up", 100_000, active=False
    ),
    "target.min_messages_per_second_per_publisher": Field(
        "messages/s", "from each publisher that is held up", 1_000, active=False
    ),
    "group.max_lag_messages": Field("messages", "stored, and not in the group yet; reported only", 100_000, active=False),
    "group.max_behind_seconds": Field("seconds", "age of what comes into the group next; reported only", 60.0, active=False),
    "group.max_ready_seconds": Field("seconds", "that a message waits for a worker; reported only", 60.0, active=False),
    "bounds.min_exchanges": Field("Exchanges", "never fewer", 1),
    "bounds.max_exchanges": Field("Exchanges", "never more", 4),
    "bounds.cooldown_seconds": Field("seconds", "of rest after a change has taken effect", 5.0),
    "bounds.hysteresis": Field(
        "0 to 1", "scale in only when every limit would keep so much to spare with one Exchange less", 0.3
    ),
    "bounds.credit": Field("factor", "and when the load was low for so many times as long as going and coming back take", 2.0),
}
TABLES = {
    "exchange": "What one Exchange carries at most. Above it: another Exchange, or publishers move to an emptier one.",
    "host": "What a host may be used. Above it: publishers move to an Exchange on another host.",
    "queue": "Averages over all Exchanges of the queue. Above them: another Exchange.",
    "target": "What members shall see. Where it is missed: another Exchange, and a look whether that helps.",
    "group": "What groups of a recorded queue shall keep to. Exchanges don't make them faster: it is reported, nothing else.",
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

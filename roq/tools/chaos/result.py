"""What a run of `roq chaos` is asked for, and what it answers: a result, and charts over time with faults as bands: what each
subscriber got, and what each process took. Pure; no cluster code here: the command line imports it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import structs

from roq.errors import CallError
from roq.tools.chaos.administration import RequestCounts
from roq.tools.chaos.history import FaultDone, SubscriberHistory
from roq.tools.chaos.resources import Resources, Series, ZnodeCount
from roq.tools.chaos.schedule import LoadKind
from roq.tools.chaos.verdict import COUNTS, Gap, LoadOutcome, LoadVerdict, Share, Verdict
from roq.tools.charts import Band, ChartLine, Panel, draw, since

CLIENTS_MAX = 64
DEFAULT_LOADS = (LoadKind.PUBSUB, LoadKind.TASKS, LoadKind.GROUPS)
FAULT_COLOURS = {"kill": "#c0392b", "pause": "#d68910"}
NETWORK_COLOUR = "#7d3c98"
LINE_COLOUR, MARK_COLOUR = "#1f618d", "#1e8449"


class ChaosOptions(msgspec.Struct, frozen=True):
    """seconds: of load under faults. rate: messages per second and publisher. every: seconds between faults. longest: no fault
    takes longer (seconds; None: as long as `every` allows). size: bytes of a payload. soak: two queues with so many publishers
    and subscribers each, the first one's processes on one host and one GCM are spared, and what they take is judged. loads:
    what the cluster has to do. faults: their names, none: all that are possible. history: a file for it, as EDN."""

    seconds: float = 60.0
    seed: int = 0
    publishers: int = 4
    subscribers: int = 4
    rate: float = 1250.0
    every: float = 10.0
    longest: float | None = None
    size: int = 100
    soak: bool = False
    loads: tuple[LoadKind, ...] = DEFAULT_LOADS
    faults: tuple[str, ...] = ()
    history: str = ""

    def check(self) -> ChaosOptions:
        """Itself; raises CallError for what can't run."""
        if not (1 <= self.publishers <= CLIENTS_MAX and 1 <= self.subscribers <= CLIENTS_MAX):
            raise CallError(f"1 to {CLIENTS_MAX} publishers and subscribers, not {self.publishers} and {self.subscribers}")
        if self.rate <= 0 or self.seconds <= 0:
            raise CallError("rate and seconds are more than 0")
        if not self.loads:
            raise CallError(f"no load: give some of {', '.join(LoadKind)}")
        if self.soak and LoadKind.PUBSUB not in self.loads:
            raise CallError(f"--soak judges processes of publish/subscribe: have {LoadKind.PUBSUB} among --loads")
        return self


class ChaosResult(msgspec.Struct, frozen=True):
    """What one run found. The counts as in verdict.Verdict, of the load pubsub; problems: every violation in words, empty if
    all is well; undecided: what could not be found out. loads: a verdict on each; outcome: on all of it."""

    published: int
    acked: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    unknown: int
    reported_gaps: int
    faults: list[FaultDone]
    adds_up: bool
    passed: bool
    problems: list[str]
    violations: list[str]
    options: ChaosOptions
    cluster: str
    healed_seconds: float
    subscribers: tuple[Share, ...]
    gaps: tuple[Gap, ...]
    administration: RequestCounts
    resources: Resources
    loads: tuple[LoadVerdict, ...]
    outcome: LoadOutcome
    undecided: list[str]


def with_problem(found: ChaosResult, text: str) -> ChaosResult:
    """The same with one more."""
    return structs.replace(found, problems=[*found.problems, text], passed=False, outcome=LoadOutcome.FAILED)


def with_violation(found: ChaosResult, text: str) -> ChaosResult:
    """The same with one more."""
    failed = LoadOutcome.FAILED
    return structs.replace(found, violations=[*found.violations, text], passed=False, outcome=failed)


class ChaosRun(msgspec.Struct, frozen=True):
    """The result, and what its charts are drawn from."""

    result: ChaosResult
    heard: list[SubscriberHistory]
    seconds: float
    series: list[Series]
    znodes: list[ZnodeCount]


def result(
    options: ChaosOptions,
    cluster: str,
    verdict: Verdict,
    loads: Sequence[LoadVerdict],
    faults: list[FaultDone],
    found: tuple[list[str], list[str]],
    healed: float,
    resources: Resources,
    administration: RequestCounts,
    gaps: tuple[Gap, ...],
) -> ChaosResult:
    """Everything found, in one struct. found: what clients met, and invariants that do not hold. healed: seconds from the last
    fault until all served."""
    problems, violations = found
    problems = [*problems, *(f"{one.load}: {text}" for one in loads for text in one.problems)]
    problems += [*resources.beyond, *(resources.problems if options.soak else ())]
    undecided = [f"{one.load}: {text}" for one in loads for text in one.undecided]
    failed = problems or violations
    return ChaosResult(
        **{name: getattr(verdict, name) for name in COUNTS if name != "foreign"},
        faults=faults,
        adds_up=verdict.adds_up,
        passed=not failed and not undecided,
        problems=problems,
        violations=violations,
        options=options,
        cluster=cluster,
        healed_seconds=round(healed, 2),
        subscribers=verdict.subscribers,
        gaps=gaps,
        administration=administration,
        resources=resources,
        loads=tuple(loads),
        outcome=LoadOutcome.FAILED if failed else LoadOutcome.UNDECIDED if undecided else LoadOutcome.PASSED,
        undecided=undecided,
    )


def _bands(faults: Sequence[FaultDone], *, named: bool) -> list[Band]:
    found = []
    for fault in faults:
        name = f"{fault.kind} {fault.target.partition(':')[2].rpartition('/')[0] or fault.target} {fault.seconds:g} s"
        colour = FAULT_COLOURS.get(fault.kind, NETWORK_COLOUR)
        found.append(Band(fault.t, fault.t + fault.seconds, colour, name if named else ""))
    return found


def timeline(title: str, heard: Sequence[SubscriberHistory], faults: Sequence[FaultDone], seconds: float) -> str:
    """Deliveries per second of each subscriber. seconds: length of the whole run, drain included."""
    panels = []
    for number, one in enumerate(heard):
        counts = [*one.per_second, *[0] * (int(seconds) + 1 - len(one.per_second))]
        lost = sum(gap.messages for gap in one.reported)
        name = f"subscriber {number}: messages per second" + (f"; {lost} reported lost" if lost else "")
        panels.append(Panel(name, [ChartLine("", LINE_COLOUR, [(at + 0.5, float(count)) for at, count in enumerate(counts)])]))
    return draw(title, "", panels, 0.0, int(seconds) + 1.0, bands=_bands(faults, named=True), across=since)


def memory(
    title: str, series: Sequence[Series], znodes: Sequence[ZnodeCount], faults: Sequence[FaultDone], seconds: float
) -> str:
    """Anonymous memory of each process, one panel per machine and kind; a line is one life, the longest in another colour."""
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        kind, _, rest = one.name.partition("/")
        queue = rest.partition("/")[0]
        groups.setdefault((one.machine, f"{kind}/{queue}" if queue else kind.removeprefix("roq-")), []).append(one)
    panels = []
    for (machine, kind), lives in sorted(groups.items()):
        longest = max(lives, key=lambda one: one.at[-1] - one.at[0])
        who = machine if machine == kind else f"{machine} {kind}"
        name = f"{who}: MiB in {len(lives)} lives, the longest {longest.at[-1] - longest.at[0]:.0f} s"
        lines = []
        for one in lives:
            points = [(at, value / 2**20) for at, value in zip(one.at, one.column("memory"), strict=True)]
            lines.append(ChartLine("", MARK_COLOUR if one is longest else LINE_COLOUR, points))
        panels.append(Panel(name, lines))
    panels.append(Panel("znodes", [ChartLine("", LINE_COLOUR, [(one.at, float(one.nodes)) for one in znodes])], "whole"))
    # only the marks: an hour has too many faults for names
    return draw(title, "", panels, 0.0, seconds, bands=_bands(faults, named=False), across=since)

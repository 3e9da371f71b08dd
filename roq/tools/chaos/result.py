"""What a run of `roq chaos` is asked for, and what it answers. No cluster code here: the command line imports it."""

from __future__ import annotations

import msgspec

from roq.errors import CallError
from roq.tools.chaos.administration import RequestCounts
from roq.tools.chaos.history import FaultDone, SubscriberHistory
from roq.tools.chaos.resources import Resources, Series
from roq.tools.chaos.verdict import Gap, Share, Verdict

CLIENTS_MAX = 64


class ChaosOptions(msgspec.Struct, frozen=True):
    """seconds: of load under faults. rate: messages per second and publisher. every: seconds between faults. longest: no fault
    takes longer (seconds; None: as long as `every` allows). size: bytes of a payload. soak: two queues with so many publishers
    and subscribers each, the first one's processes on one host and one GCM are spared, and what they take is judged."""

    seconds: float = 60.0
    seed: int = 0
    publishers: int = 4
    subscribers: int = 4
    rate: float = 1250.0
    every: float = 10.0
    longest: float | None = None
    size: int = 100
    soak: bool = False

    def check(self) -> ChaosOptions:
        """Itself; raises CallError for what can't run."""
        if not (1 <= self.publishers <= CLIENTS_MAX and 1 <= self.subscribers <= CLIENTS_MAX):
            raise CallError(f"1 to {CLIENTS_MAX} publishers and subscribers, not {self.publishers} and {self.subscribers}")
        if self.rate <= 0 or self.seconds <= 0:
            raise CallError("rate and seconds are more than 0")
        return self


class ChaosResult(msgspec.Struct, frozen=True):
    """What one run found. The counts as in verdict.Verdict; problems: every violation in words, empty if all is well."""

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


class ChaosRun(msgspec.Struct, frozen=True):
    """The result, and what its pictures are drawn from. znodes: (seconds, count)."""

    result: ChaosResult
    heard: list[SubscriberHistory]
    seconds: float
    series: list[Series]
    znodes: list[tuple[float, int]]


def result(
    options: ChaosOptions,
    cluster: str,
    verdict: Verdict,
    faults: list[FaultDone],
    problems: list[str],
    violations: list[str],
    healed: float,
    resources: Resources,
    administration: RequestCounts,
    gaps: tuple[Gap, ...],
) -> ChaosResult:
    """Everything found, in one struct. healed: seconds from the last fault until all served."""
    problems = [*problems, *resources.beyond, *(resources.problems if options.soak else ())]
    return ChaosResult(
        published=verdict.published,
        acked=verdict.acked,
        delivered=verdict.delivered,
        lost=verdict.lost,
        duplicated=verdict.duplicated,
        reordered=verdict.reordered,
        unknown=verdict.unknown,
        reported_gaps=verdict.reported_gaps,
        faults=faults,
        adds_up=verdict.adds_up,
        passed=not problems and not violations,
        problems=problems,
        violations=violations,
        options=options,
        cluster=cluster,
        healed_seconds=round(healed, 2),
        subscribers=verdict.subscribers,
        gaps=gaps,
        administration=administration,
        resources=resources,
    )

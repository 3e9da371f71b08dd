"""What the cluster has kept of one queue's past (`Cluster.record_history`): its KPIs over time, what was decided and what
became of that.

Pure, but for the readers at the end. Not covered: what another policy would have decided (roq/pubsub/scaling/what_if.py), how
it is shown (roq/cli/history.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

import msgspec

from roq.client.cluster import Cluster
from roq.errors import FrameError, InvalidTopic, NotRecorded, QueueNotFound
from roq.pubsub.start import Start
from roq.pubsub.subscription import check_filter, log_lost
from roq.runtime.observe import logger
from roq.wire.kpi import HISTORY_DECISIONS, HISTORY_KPIS, QueueDecision, QueueKpi, decision_from_json, from_json_line

log = logger(__name__)
ROWS_MAX = 30  # periods of a history: what fits a screen
STEPS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 604_800)  # seconds; each divides the next
ALL = ">"


class HistoryPeriod(msgspec.Struct):
    """Some seconds of one queue. begin: seconds since 1970. records: KPI records, one a second; 0: nothing is known. Rates are
    means, except `…_most`; lag and latency are the worst of any subscriber. lost: messages reported as lost in it."""

    begin: float
    seconds: int
    records: int = 0
    messages_per_second: float = 0.0
    messages_per_second_most: float = 0.0
    bytes_per_second: float = 0.0
    delivered_per_second: float = 0.0
    exchanges_least: int = 0
    exchanges_most: int = 0
    publishers_most: int = 0
    subscribers_most: int = 0
    lag_seconds: float = 0.0
    latency_p99_seconds: float = 0.0
    lost: int = 0

    def take(self, kpi: QueueKpi, lost: int) -> None:
        """One record, and what was lost since the one before."""
        active = sum(one.state == "active" for one in kpi.exchanges)
        self.add(
            HistoryPeriod(
                begin=self.begin,
                seconds=self.seconds,
                records=1,
                messages_per_second=kpi.messages_per_second,
                messages_per_second_most=kpi.messages_per_second,
                bytes_per_second=kpi.bytes_per_second,
                delivered_per_second=kpi.delivered_per_second,
                exchanges_least=active,
                exchanges_most=active,
                publishers_most=len(kpi.publishers),
                subscribers_most=len(kpi.subscribers),
                lag_seconds=max((one.lag_seconds for one in kpi.subscribers), default=0.0),
                latency_p99_seconds=max((one.latency_p99_seconds for one in kpi.subscribers), default=0.0),
                lost=lost,
            )
        )

    def add(self, other: HistoryPeriod) -> None:
        """Both together."""
        if not other.records:
            return
        own, total = self.records, self.records + other.records

        def mean(before: float, more: float) -> float:
            return (before * own + more * other.records) / total

        self.messages_per_second = mean(self.messages_per_second, other.messages_per_second)
        self.bytes_per_second = mean(self.bytes_per_second, other.bytes_per_second)
        self.delivered_per_second = mean(self.delivered_per_second, other.delivered_per_second)
        self.messages_per_second_most = max(self.messages_per_second_most, other.messages_per_second_most)
        self.exchanges_least = min(self.exchanges_least, other.exchanges_least) if own else other.exchanges_least
        self.exchanges_most = max(self.exchanges_most, other.exchanges_most)
        self.publishers_most = max(self.publishers_most, other.publishers_most)
        self.subscribers_most = max(self.subscribers_most, other.subscribers_most)
        self.lag_seconds = max(self.lag_seconds, other.lag_seconds)
        self.latency_p99_seconds = max(self.latency_p99_seconds, other.latency_p99_seconds)
        self.lost += other.lost
        self.records = total


class QueueHistory(msgspec.Struct, frozen=True):
    """Of one queue, oldest first. periods: all of one length, without gaps in between. decisions: each once, with its outcome
    if it has one by now."""

    queue: str
    periods: tuple[HistoryPeriod, ...]
    decisions: tuple[QueueDecision, ...]


class Timeline:
    """KPI records, however many, become at most ROWS_MAX periods: the shortest that are possible."""

    def __init__(self, rows: int = ROWS_MAX) -> None:
        self._rows, self._step = rows, 0  # place of the step in STEPS
        self._periods: dict[int, HistoryPeriod] = {}  # by number: begin / step
        self._before: QueueKpi | None = None

    def add(self, kpi: QueueKpi) -> None:
        """The next record."""
        before, self._before = self._before, kpi
        goes_on = before is not None and before.term == kpi.term and kpi.lost >= before.lost  # else it counts from 0 again
        lost = 0 if before is None else kpi.lost - before.lost if goes_on else kpi.lost
        self._at(kpi.time).take(kpi, lost)
        while self._count() > self._rows and self._step + 1 < len(STEPS):
            self._lengthen()

    def _at(self, time: float) -> HistoryPeriod:
        step = STEPS[self._step]
        number = int(time // step)
        if number not in self._periods:
            self._periods[number] = HistoryPeriod(float(number * step), step)
        return self._periods[number]

    def _count(self) -> int:
        return max(self._periods) - min(self._periods) + 1

    def _lengthen(self) -> None:
        former, self._periods = self._periods, {}
        self._step += 1
        for one in former.values():
            self._at(one.begin).add(one)

    def periods(self) -> tuple[HistoryPeriod, ...]:
        """In order; of what lies between two of them and has no record, empty ones. More than ROWS_MAX times the longest: the
        newest."""
        if not self._periods:
            return ()
        step, last = STEPS[self._step], max(self._periods)
        first = max(min(self._periods), last - self._rows + 1)
        return tuple(
            self._periods.get(number) or HistoryPeriod(float(number * step), step) for number in range(first, last + 1)
        )


def settled(decisions: Iterable[QueueDecision]) -> list[QueueDecision]:
    """Each decision once, with its outcome, by time. They are kept as they are begun and once more with their outcome, either
    perhaps twice."""
    found: dict[tuple[float, str], QueueDecision] = {}
    for one in decisions:
        known = found.get((one.time, one.cause))
        if known is None or one.outcome:
            found[one.time, one.cause] = one
    return sorted(found.values(), key=lambda one: one.time)


# --- reading ----------------------------------------------------------------------------------------------------------


def _topic(queue: str) -> str:
    """The filter for a queue's name, or for everything if that is none, or means more."""
    try:
        return check_filter(queue)
    except InvalidTopic:
        return ALL


async def _payloads(cluster: Cluster, kept: str, queue: str, since: Start) -> AsyncGenerator[bytes, None]:
    try:
        async with cluster.subscriber(kept, _topic(queue), on_lost=log_lost, start=since, follow=False) as past:
            async for message in past:
                yield message.payload
    except QueueNotFound as error:
        raise NotRecorded("this cluster keeps no history: `roq history on` begins with it") from error


async def past_kpis(cluster: Cluster, queue: str, since: Start) -> AsyncGenerator[QueueKpi, None]:
    """The KPI records of a queue, also of one that is gone, in the order in which they were kept, up to now. Raises
    NotRecorded: the cluster keeps no history."""
    async for payload in _payloads(cluster, HISTORY_KPIS, queue, since):
        try:
            kpi = from_json_line(payload)
        except FrameError as error:
            log.warning("a record of the history can't be read and is left out", extra={"fields": {"reason": str(error)}})
            continue
        if kpi.queue == queue:
            yield kpi


async def past_decisions(cluster: Cluster, queue: str, since: Start) -> list[QueueDecision]:
    """What was decided for a queue and what became of it, each decision once, by time. Raises NotRecorded."""
    found = list[QueueDecision]()
    async for payload in _payloads(cluster, HISTORY_DECISIONS, queue, since):
        try:
            decision = decision_from_json(payload)
        except FrameError as error:
            log.warning("a record of the history can't be read and is left out", extra={"fields": {"reason": str(error)}})
            continue
        if decision.queue == queue:
            found.append(decision)
    return settled(found)


async def read_history(cluster: Cluster, queue: str, since: Start) -> QueueHistory:
    """Raises NotRecorded; QueueNotFound: there is no such queue, and nothing was kept of it."""
    timeline = Timeline()
    async for kpi in past_kpis(cluster, queue, since):
        timeline.add(kpi)
    periods, decisions = timeline.periods(), await past_decisions(cluster, queue, since)
    if not periods and not decisions:
        await cluster.queue(queue)
    return QueueHistory(queue, periods, tuple(decisions))

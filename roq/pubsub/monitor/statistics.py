"""StatMonitor's arithmetic: reports of totals in, one QueueKpi a second out (thesis §6.4.7).

Pure: arrival times come in as arguments (monotonic seconds). Sockets, membership and Exchange states belong to the Monitor.

Rules
- A rate is the difference of two totals over the time between their reports. Reports that follow each other faster than
  INTERVAL_SECONDS are folded into one interval; totals that go backwards, or another incarnation, start over at rate 0.
- A publisher counts where its newest report says it publishes, and nowhere else (defect 13 of the original). What an
  Exchange takes in is the sum over its publishers.
- Who is silent for SILENT_SECONDS vanishes. The newest two reports of a member are all that is kept of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from roq.wire.kpi import ExchangeKpi, HostKpi, PublisherKpi, QueueKpi, QueueTotals, SubscriberKpi
from roq.wire.monitor import ExchangeReport, PublisherReport, SubscriberReport

SILENT_SECONDS = 3.0  # three missed reports
INTERVAL_SECONDS = 0.5  # a rate over less than half the report period would be mostly jitter
COUNTED_MAX = 50_000  # members whose totals are remembered
LOSSES_REMEMBERED = 1_000  # subscribers that vanished with losses, in case they come back with the same totals


class _Series:
    """The newest totals of one member, and their rates over the last full interval."""

    __slots__ = ("at", "base", "base_at", "newest", "rates")

    def __init__(self, at: float, totals: tuple[float, ...]) -> None:
        self._start(at, totals)

    def _start(self, at: float, totals: tuple[float, ...]) -> None:
        self.at = self.base_at = at
        self.base = self.newest = totals
        self.rates = (0.0,) * len(totals)

    def add(self, at: float, totals: tuple[float, ...]) -> None:
        """Take in the next report."""
        if any(new < old for new, old in zip(totals, self.newest, strict=True)):
            self._start(at, totals)  # a new life: its totals started over
            return
        elapsed = at - self.base_at
        if elapsed >= INTERVAL_SECONDS:
            self.rates = tuple((new - old) / elapsed for new, old in zip(totals, self.base, strict=True))
            self.base_at, self.base = at, totals
        self.at, self.newest = at, totals


class _Publisher:
    __slots__ = ("kpi", "path", "series")

    def __init__(self, series: _Series) -> None:
        self.series = series
        self.path = 0
        self.kpi: PublisherKpi | None = None


class _Subscriber:
    __slots__ = ("kpi", "series")

    def __init__(self, series: _Series, kpi: SubscriberKpi) -> None:
        self.series, self.kpi = series, kpi


class _Exchange:
    __slots__ = ("report", "series")

    def __init__(self, series: _Series, report: ExchangeReport) -> None:
        self.series, self.report = series, report


class Statistics:
    """Everything StatMonitor knows about the members of one queue."""

    def __init__(self) -> None:
        self._publishers: dict[int, _Publisher] = {}
        self._subscribers: dict[int, _Subscriber] = {}
        self._exchanges: dict[str, _Exchange] = {}
        self._totals = [0, 0, 0, 0, 0]  # of QueueTotals, in its order
        self._counted: dict[int, tuple[int, ...]] = {}  # what of each member is in them; silent ones may come back
        self._lost_before = 0  # by subscribers that are gone
        self._lost_of_gone: dict[int, int] = {}

    def join_publisher(self, publisher: int, now: float, path: int = 1) -> None:
        """A publisher joins. One that has no path yet (0) has sent nothing, so that its first report already gives a rate;
        of any other the first report only tells totals."""
        if path == 0 and publisher not in self._publishers:
            self._publishers[publisher] = _Publisher(_Series(now, (0, 0, 0.0)))
            self._counted[publisher] = (0, 0, 0, 0, 0)

    def report_publisher(self, report: PublisherReport, now: float) -> None:
        """Take in a publisher's totals. An overtaken report (of an earlier path) is ignored."""
        totals = (report.messages, report.bytes, report.blocked_seconds)
        known = self._publishers.get(report.publisher)
        if known is None:
            known = self._publishers[report.publisher] = _Publisher(_Series(now, totals))
        elif report.path < known.path:
            return
        else:
            known.series.add(now, totals)
        self._count(report.publisher, (report.messages, report.bytes, 0, report.dropped, 0))
        known.path = report.path
        messages, size, blocked = known.series.rates
        known.kpi = PublisherKpi(report.publisher, report.exchange, messages, size, min(1.0, blocked), report.dropped)

    def report_subscriber(self, report: SubscriberReport, now: float, ready: bool) -> None:
        """Take in a subscriber's totals. `ready` is the Monitor's own judgement."""
        totals = (report.messages, report.bytes)
        known = self._subscribers.get(report.subscriber)
        if known is None:
            series = _Series(now, totals)
            self._lost_before -= self._lost_of_gone.pop(report.subscriber, 0)
        else:
            series = known.series
            series.add(now, totals)
        self._count(report.subscriber, (0, 0, report.messages, 0, report.lost))
        kpi = SubscriberKpi(
            report.subscriber,
            ready,
            series.rates[0],
            series.rates[1],
            report.lag_seconds,
            report.latency_p50_seconds,
            report.latency_p99_seconds,
            report.lost,
            report.duplicated,
        )
        if known is None:
            self._subscribers[report.subscriber] = _Subscriber(series, kpi)
        else:
            known.kpi = kpi

    def _count(self, member: int, newest: tuple[int, ...]) -> None:
        """What has come since its last report; of a member that came from another Monitor the first one tells nothing new."""
        before = self._counted.pop(member, newest)
        self._totals = [total + max(0, new - old) for total, new, old in zip(self._totals, newest, before, strict=True)]
        self._counted[member] = newest
        if len(self._counted) > COUNTED_MAX:
            del self._counted[next(iter(self._counted))]

    def report_exchange(self, report: ExchangeReport, now: float) -> None:
        """Take in an Exchange's totals and those of its host."""
        totals = (report.bytes_out, report.cpu_seconds)
        known = self._exchanges.get(report.exchange.id)
        if known is None or known.report.exchange.incarnation != report.exchange.incarnation:
            self._exchanges[report.exchange.id] = _Exchange(_Series(now, totals), report)
        else:
            known.series.add(now, totals)
            known.report = report

    def forget(self, member: int | str) -> None:
        """A publisher or subscriber (by number) or an Exchange (by id) left."""
        if isinstance(member, str):
            self._exchanges.pop(member, None)
            return
        self._counted.pop(member, None)
        self._drop(member)

    def _drop(self, member: int) -> None:
        self._publishers.pop(member, None)
        gone = self._subscribers.pop(member, None)
        if gone is not None and gone.kpi.lost:
            self._lost_before += gone.kpi.lost
            self._lost_of_gone[member] = gone.kpi.lost
            if len(self._lost_of_gone) > LOSSES_REMEMBERED:
                del self._lost_of_gone[next(iter(self._lost_of_gone))]

    def snapshot(self, now: float, wall_time: float, queue: str, term: int, exchange_states: Mapping[str, str]) -> QueueKpi:
        """The KPIs of this second. Exchanges that are not in `exchange_states` (id → state) are left out; `lost` counts
        for as long as this Monitor lives, subscribers that left included."""
        self._drop_silent(now)
        publishers = tuple(each.kpi for each in self._publishers.values() if each.kpi is not None)
        subscribers = tuple(each.kpi for each in self._subscribers.values())
        exchanges = self._exchange_kpis(publishers, exchange_states)
        return QueueKpi(
            queue=queue,
            time=wall_time,
            term=term,
            messages_per_second=sum(each.messages_per_second for each in publishers),
            bytes_per_second=sum(each.bytes_per_second for each in publishers),
            delivered_per_second=sum(each.messages_per_second for each in subscribers),
            lost=self._lost_before + sum(each.lost for each in subscribers),
            exchanges=exchanges,
            publishers=publishers,
            subscribers=subscribers,
            hosts=self._host_kpis(exchanges),
            totals=QueueTotals(*self._totals),
        )

    def _drop_silent(self, now: float) -> None:
        oldest = now - SILENT_SECONDS
        members: list[int | str] = [id for id, each in self._publishers.items() if each.series.at < oldest]
        members += [id for id, each in self._subscribers.items() if each.series.at < oldest]
        members += [id for id, each in self._exchanges.items() if each.series.at < oldest]
        for member in members:
            if isinstance(member, str):
                self._exchanges.pop(member, None)
            else:
                self._drop(member)

    def _exchange_kpis(self, publishers: tuple[PublisherKpi, ...], states: Mapping[str, str]) -> tuple[ExchangeKpi, ...]:
        inflow: dict[str, list[float]] = {}
        for each in publishers:
            entry = inflow.setdefault(each.exchange, [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += each.messages_per_second
            entry[2] += each.bytes_per_second
        found = []
        for id, state in states.items():
            exchange = self._exchanges.get(id)
            if exchange is None:
                continue
            count, messages, size = inflow.get(id, (0, 0.0, 0.0))
            out, cpu = exchange.series.rates
            report = exchange.report
            found.append(ExchangeKpi(id, report.host, state, int(count), messages, size, out, cpu, report.memory_bytes))
        return tuple(found)

    def _host_kpis(self, exchanges: tuple[ExchangeKpi, ...]) -> tuple[HostKpi, ...]:
        newest: dict[str, _Exchange] = {}
        for each in exchanges:
            exchange = self._exchanges[each.id]
            known = newest.get(each.host)
            if known is None or exchange.series.at > known.series.at:
                newest[each.host] = exchange
        return tuple(
            HostKpi(
                host,
                exchange.report.host_cpu_fraction,
                exchange.report.host_memory_fraction,
                exchange.report.host_exchanges,
                exchange.report.host_exchanges_max,
            )
            for host, exchange in newest.items()
        )

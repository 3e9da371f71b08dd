"""StatMonitor's arithmetic: rates, moves, restarts, silence."""

from __future__ import annotations

import pytest

from roq.pubsub.monitor.statistics import LOSSES_REMEMBERED, Statistics
from roq.wire.kpi import ExchangeKpi, PublisherKpi, QueueKpi, QueueTotals
from roq.wire.monitor import ExchangeAddress, ExchangeReport, PublisherReport, SubscriberReport

STATES = {"a": "active", "b": "active"}


def publisher(id: int, messages: int, exchange: str = "a", path: int = 1, blocked: float = 0.0) -> PublisherReport:
    return PublisherReport(id, path, exchange, "", 0, messages, messages * 10, 0, blocked)


def subscriber(id: int, messages: int, lost: int = 0) -> SubscriberReport:
    return SubscriberReport(id, 1, (), messages, messages * 10, lost, 0, 0.001, 0.001, 0.002)


def exchange(id: str, out: int, cpu: float = 0.0, incarnation: int = 1, host: str = "h", load: float = 0.5) -> ExchangeReport:
    address = ExchangeAddress(id, "127.0.0.1", 1, 2, incarnation)
    return ExchangeReport(address, host, 0, 0, 0, out, cpu, 1000, load, 0.25, 2, 8)


def view(statistics: Statistics, now: float, states: dict[str, str] | None = None) -> QueueKpi:
    return statistics.snapshot(now, 1e9 + now, "q", 3, STATES if states is None else states)


def only(found: tuple[PublisherKpi, ...]) -> PublisherKpi:
    (one,) = found
    return one


def by_id(kpi: QueueKpi) -> dict[str, ExchangeKpi]:
    return {each.id: each for each in kpi.exchanges}


def test_rates_are_differences_over_time() -> None:
    statistics = Statistics()
    statistics.report_publisher(publisher(1, 5000, blocked=2.0), 10.0)
    assert only(view(statistics, 10.0).publishers).messages_per_second == 0  # totals alone tell nothing
    statistics.report_publisher(publisher(1, 7000, blocked=3.0), 12.0)
    one = only(view(statistics, 12.0).publishers)
    assert (one.messages_per_second, one.bytes_per_second, one.blocked_fraction) == (1000, 10_000, 0.5)
    statistics.report_publisher(publisher(1, 7000, blocked=3.0), 13.0)
    assert only(view(statistics, 13.0).publishers).messages_per_second == 0


def test_reports_in_quick_succession_make_one_interval() -> None:
    statistics = Statistics()
    for at, messages in ((0.0, 0), (1.0, 100), (1.001, 110), (1.01, 120), (2.0, 200)):
        statistics.report_publisher(publisher(1, messages), at)
    assert only(view(statistics, 2.0).publishers).messages_per_second == 100


def test_a_publisher_known_from_its_start_has_a_rate_at_once() -> None:
    statistics = Statistics()
    statistics.join_publisher(1, 5.0, path=0)
    assert view(statistics, 5.5).publishers == ()
    statistics.report_publisher(publisher(1, 300), 6.0)
    assert only(view(statistics, 6.0).publishers).messages_per_second == 300
    statistics.join_publisher(2, 6.0, path=0)
    assert view(statistics, 10.0).publishers == ()
    assert statistics._publishers == {}


def test_a_publisher_that_rejoins_a_restarted_monitor_gives_no_huge_rate() -> None:
    statistics = Statistics()
    statistics.join_publisher(1, 5.0, path=1)
    statistics.report_publisher(publisher(1, 10**9), 6.0)
    assert only(view(statistics, 6.0).publishers).messages_per_second == 0


def test_relocated_publisher_counts_at_its_new_exchange_only() -> None:
    """Defect 13 of the original."""
    statistics = Statistics()
    for id in ("a", "b"):
        statistics.report_exchange(exchange(id, 0), 1.0)
    statistics.report_publisher(publisher(1, 0), 0.0)
    statistics.report_publisher(publisher(1, 100), 1.0)
    assert by_id(view(statistics, 1.0))["a"].messages_per_second == 100
    statistics.report_publisher(publisher(1, 200, "b", path=2), 2.0)
    statistics.report_publisher(publisher(1, 150, "a", path=1), 2.1)  # overtaken on its way
    found = by_id(view(statistics, 2.1))
    assert (found["a"].publishers, found["a"].messages_per_second, found["a"].bytes_per_second) == (0, 0, 0)
    assert (found["b"].publishers, found["b"].messages_per_second, found["b"].bytes_per_second) == (1, 100, 1000)


def test_sums() -> None:
    statistics = Statistics()
    for at in (0.0, 1.0):
        for id, home in ((1, "a"), (2, "a"), (3, "b")):
            statistics.report_publisher(publisher(id, int(at) * 100 * id, home), at)
        statistics.report_subscriber(subscriber(9, int(at) * 600, lost=int(at) * 4), at, True)
        statistics.report_exchange(exchange("a", int(at) * 5000, cpu=at * 0.25), at)
        statistics.report_exchange(exchange("b", 0), at)
    kpi = view(statistics, 1.0)
    assert (kpi.queue, kpi.time, kpi.term) == ("q", 1e9 + 1, 3)
    assert (kpi.messages_per_second, kpi.bytes_per_second, kpi.delivered_per_second, kpi.lost) == (600, 6000, 600, 4)
    found = by_id(kpi)["a"]
    assert (found.publishers, found.messages_per_second, found.bytes_out_per_second) == (2, 300, 5000)
    assert (found.cpu_fraction, found.memory_bytes, found.state) == (0.25, 1000, "active")
    assert kpi.subscribers[0].ready


def test_hosts_once_each_by_their_newest_report() -> None:
    statistics = Statistics()
    statistics.report_exchange(exchange("a", 0, load=0.9), 1.0)
    statistics.report_exchange(exchange("b", 0, load=0.2), 1.5)
    (host,) = view(statistics, 1.5).hosts
    assert (host.host, host.cpu_fraction, host.memory_fraction, host.exchanges, host.exchanges_max) == ("h", 0.2, 0.25, 2, 8)


def test_only_exchanges_the_monitor_knows() -> None:
    statistics = Statistics()
    statistics.report_exchange(exchange("a", 0), 1.0)
    assert view(statistics, 1.0, {}).exchanges == ()
    assert view(statistics, 1.0, {}).hosts == ()
    assert [each.state for each in view(statistics, 1.0, {"a": "draining", "never reported": "starting"}).exchanges] == [
        "draining"
    ]


@pytest.mark.parametrize("after", [0, 10, 10**9])
def test_restarted_exchange_gives_no_nonsense(after: int) -> None:
    statistics = Statistics()
    statistics.report_exchange(exchange("a", 10**6, cpu=50.0), 0.0)
    statistics.report_exchange(exchange("a", 2 * 10**6, cpu=50.5), 1.0)
    statistics.report_exchange(exchange("a", after, cpu=0.1, incarnation=2), 2.0)
    found = by_id(view(statistics, 2.0))["a"]
    assert (found.bytes_out_per_second, found.cpu_fraction) == (0, 0)
    statistics.report_exchange(exchange("a", after + 70, cpu=0.2, incarnation=2), 3.0)
    assert by_id(view(statistics, 3.0))["a"].bytes_out_per_second == 70


def test_totals_that_start_over_give_no_negative_rates() -> None:
    statistics = Statistics()
    for at, messages in ((0.0, 1000), (1.0, 2000), (2.0, 5)):
        statistics.report_publisher(publisher(1, messages), at)
    assert only(view(statistics, 2.0).publishers).messages_per_second == 0


def test_who_left_or_is_silent_vanishes() -> None:
    statistics = Statistics()
    statistics.report_publisher(publisher(1, 0), 0.0)
    statistics.report_publisher(publisher(2, 0), 0.0)
    statistics.report_subscriber(subscriber(3, 0), 0.0, False)
    statistics.report_exchange(exchange("a", 0), 0.0)
    statistics.forget(2)
    assert [each.id for each in view(statistics, 2.9).publishers] == [1]
    late = view(statistics, 3.1)
    assert (late.publishers, late.subscribers, late.exchanges, late.hosts) == ((), (), (), ())
    statistics.forget(77)
    statistics.forget("nobody")
    statistics.report_exchange(exchange("a", 0), 4.0)
    statistics.forget("a")
    assert view(statistics, 4.0).exchanges == ()


def test_losses_are_kept_when_a_subscriber_goes_and_not_counted_twice_when_it_returns() -> None:
    statistics = Statistics()
    statistics.report_subscriber(subscriber(1, 0, lost=5), 0.0, True)
    assert view(statistics, 10.0).lost == 5
    statistics.report_subscriber(subscriber(1, 0, lost=7), 11.0, True)
    assert view(statistics, 11.0).lost == 7
    for id in range(2, LOSSES_REMEMBERED + 100):
        statistics.report_subscriber(subscriber(id, 0, lost=1), 12.0, True)
        statistics.forget(id)
    assert view(statistics, 12.0).lost == 7 + LOSSES_REMEMBERED + 98
    assert len(statistics._lost_of_gone) == LOSSES_REMEMBERED


def test_totals_count_what_comes_and_outlive_members() -> None:
    statistics = Statistics()
    statistics.join_publisher(1, 0.0, path=0)
    statistics.report_publisher(publisher(1, 100), 1.0)
    statistics.report_publisher(publisher(1, 250), 2.0)
    statistics.report_subscriber(subscriber(2, 0), 1.0, ready=True)
    statistics.report_subscriber(subscriber(2, 240), 2.0, ready=True)
    assert view(statistics, 2.0).totals == QueueTotals(250, 2500, 240, 0, 0)
    statistics.forget(1)
    statistics.forget(2)
    assert view(statistics, 3.0).totals == QueueTotals(250, 2500, 240, 0, 0)


def test_of_members_that_come_from_another_monitor_only_what_is_new_counts() -> None:
    statistics = Statistics()
    statistics.join_publisher(1, 0.0, path=4)
    statistics.report_publisher(publisher(1, 1_000_000, path=4), 1.0)
    statistics.report_publisher(publisher(1, 1_000_010, path=4), 2.0)
    statistics.report_publisher(publisher(1, 900_000, path=3), 2.5)  # overtaken
    statistics.report_subscriber(subscriber(2, 5_000_000), 1.0, ready=True)
    statistics.report_subscriber(subscriber(2, 5_000_007), 2.0, ready=True)
    assert view(statistics, 2.5).totals == QueueTotals(10, 100, 7, 0, 0)


def test_what_publishers_give_up_counts() -> None:
    statistics = Statistics()
    statistics.join_publisher(1, 0.0, path=0)
    for second, dropped in enumerate((0, 3, 3, 10), 1):
        report = PublisherReport(1, 1, "a", "", 0, 100 * second, 1000 * second, dropped, 0.0)
        statistics.report_publisher(report, float(second))
    assert view(statistics, 4.0).totals.dropped == 10


def test_what_a_silent_member_did_counts_when_it_is_back() -> None:
    statistics = Statistics()
    statistics.join_publisher(1, 0.0, path=0)
    statistics.report_publisher(publisher(1, 100), 1.0)
    statistics.report_subscriber(subscriber(2, 100), 1.0, ready=True)
    assert view(statistics, 9.0).publishers == ()
    statistics.report_publisher(publisher(1, 900), 9.5)
    statistics.report_subscriber(subscriber(2, 900), 9.5, ready=True)
    assert view(statistics, 9.5).totals == QueueTotals(900, 9000, 800, 0, 0), "a subscriber counts from its first report on"


def test_losses_count_when_they_are_told() -> None:
    statistics = Statistics()
    statistics.report_subscriber(subscriber(1, 10, lost=700), 1.0, ready=True)
    assert view(statistics, 1.0).totals.missed == 0, "another Monitor counted them"
    statistics.report_subscriber(subscriber(1, 20, lost=705), 2.0, ready=True)
    statistics.forget(1)
    assert view(statistics, 2.0).totals.missed == 5

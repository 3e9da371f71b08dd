"""A capacity report: what each queue carried, with what, how fast, and what other policies would have used.

A record of the KPI history stands for one second, also where others are missing.
The numbers come from capacity_numbers.py, pictures from capacity_picture.py.
"""

from __future__ import annotations

import msgspec

from roq.pubsub.scaling.decide import GAP_SECONDS
from roq.wire.policy import Policy

SPARSE_SHARE = 0.1  # of all records; with more of them far apart, a policy's decisions are not what it would have decided


class SpreadOverTime(msgspec.Struct, frozen=True):
    """Of one number over time. highest_at: when it was highest."""

    mean: float
    median: float
    p95: float
    highest: float
    highest_at: str


class DecisionTaken(msgspec.Struct, frozen=True):
    """One decision. action: scale-out, scale-in, rebalance, hold."""

    at: str
    action: str
    cause: str


class Trial(msgspec.Struct, frozen=True):
    """What a policy would have done. exchange_hours: Exchanges times hours. over_seconds: records in which one of its limits
    would have been exceeded; recorded_over_seconds: in which it really was."""

    policy: str
    rules: Policy
    exchanges_least: int
    exchanges_mean: float
    exchanges_most: int
    exchange_hours: float
    busiest_exchange_per_second: float
    over_seconds: int
    recorded_over_seconds: int
    actions: dict[str, int]
    decisions: list[DecisionTaken]


class QueueReport(msgspec.Struct, frozen=True):
    """One queue. Latencies and lags are those of the slowest subscriber in each record. missing_seconds: between the first and
    the last record, but without one; hours and seconds don't count them. sparse_records: that came more than GAP_SECONDS after
    the one before, where policies forget what they had seen. lost: what was added while it was recorded. None: there was no
    such member."""

    queue: str
    begin: str
    end: str
    records: int
    missing_seconds: int
    sparse_records: int
    messages_per_second: SpreadOverTime
    bytes_per_second: SpreadOverTime
    delivered_per_second: SpreadOverTime
    exchanges_least: int
    exchanges_mean: float
    exchanges_most: int
    exchange_hours: float
    busiest_exchange_per_second: SpreadOverTime | None
    busiest_host_cpu: SpreadOverTime | None
    busiest_host_memory: SpreadOverTime | None
    publishers_most: int
    subscribers_most: int
    latency_p50_seconds: SpreadOverTime | None
    latency_p99_seconds: SpreadOverTime | None
    lag_seconds: SpreadOverTime | None
    lost: int
    trials: list[Trial]

    def in_words(self) -> str:
        """Some lines for people."""
        load, latency = self.messages_per_second, self.latency_p99_seconds
        lines = [
            f"{self.queue}: {self.begin} to {self.end}, {self.records} records",
            *self._warnings(),
            f"  load {load.mean:,.0f} messages/s on average, {load.highest:,.0f} at most ({load.highest_at})",
            f"  Exchanges {self.exchanges_least} to {self.exchanges_most}, {self.exchange_hours:,.2f} Exchange hours",
            f"  p99 latency {latency.p95 * 1000:,.1f} ms in 95 % of the time, {latency.highest * 1000:,.1f} ms at most"
            if latency
            else "  no subscribers",
            f"  {self.lost:,} messages lost",
        ]
        for trial in self.trials:
            actions = ", ".join(f"{count} {action}" for action, count in sorted(trial.actions.items())) or "no decision"
            lines.append(
                f"  policy {trial.policy}: Exchanges {trial.exchanges_least} to {trial.exchanges_most},"
                f" {trial.exchange_hours:,.2f} Exchange hours; over a limit {trial.over_seconds:,} s"
                f" (as it was: {trial.recorded_over_seconds:,} s); {actions}"
            )
        return "\n".join(lines)

    def _warnings(self) -> list[str]:
        """What the numbers that follow can't tell."""
        found = []
        if self.missing_seconds:
            found.append(f"  {self.missing_seconds:,} s have no record: hours and seconds below are those of the records alone")
        if self.trials and self.sparse_records > SPARSE_SHARE * self.records:
            found.append(
                f"  warning: {self.sparse_records:,} records came more than {GAP_SECONDS:g} s after the one before. Policies"
                " decide on records in a row: what they would have done can't be told from these"
            )
        return found

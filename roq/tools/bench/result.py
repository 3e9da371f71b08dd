"""What one publish/subscribe run showed, added up from its clients' reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from roq.tools.bench.accounting import latency_us
from roq.tools.bench.load import Load
from roq.tools.bench.protocol import PublisherFinished, SubscriberFinished


class PubSubResult(msgspec.Struct, frozen=True):
    """What one run showed; its JSON is the command's last line. throughput: deliveries/s over all subscribers from the first
    publish to the last receipt; publish_rate: messages/s until the last publisher had flushed; foreign: messages from
    publishers that are not ours; reported_lost: the SDK's own count; foreign_cores: what other programs took of the machine."""

    throughput: float
    published: int
    delivered: int
    lost: int
    duplicated: int
    reordered: int
    latency_us: dict[str, float | None]
    cpu_seconds: dict[str, float]
    seconds: float
    publish_rate: float
    reported_lost: int
    foreign: int
    foreign_cores: float
    load: Load
    overflow: str = ""


def summary(
    load: Load,
    published: Sequence[PublisherFinished],
    delivered: Sequence[SubscriberFinished],
    cpu: dict[str, float],
    foreign_cores: float,
) -> PubSubResult:
    """The result of one run. cpu: seconds by kind of every process that is not a client."""
    counts = [report.published for report in published]
    first_ns = min(report.first_ns for report in published)
    arrived = sum(report.delivered for report in delivered)
    seconds = max(0.0, max(report.last_ns for report in delivered) - first_ns) / 1e9
    publishing = max(report.last_ns for report in published) - first_ns
    cpu = {
        "publisher": round(sum(report.cpu_seconds for report in published), 3),
        "subscriber": round(sum(report.cpu_seconds for report in delivered), 3),
        **cpu,
    }
    return PubSubResult(
        throughput=round(arrived / seconds, 1) if seconds > 0 else 0.0,
        published=sum(counts),
        delivered=arrived,
        lost=load.expected(counts) - arrived,
        duplicated=sum(report.duplicated for report in delivered),
        reordered=sum(report.reordered for report in delivered),
        latency_us=latency_us(value for report in delivered for value in report.latencies_ns),
        cpu_seconds=cpu,
        seconds=round(seconds, 6),
        publish_rate=round(sum(counts) * 1e9 / publishing, 1) if publishing > 0 else 0.0,
        reported_lost=sum(report.reported_lost for report in delivered),
        foreign=sum(report.foreign for report in delivered),
        foreign_cores=foreign_cores,
        load=load,
    )

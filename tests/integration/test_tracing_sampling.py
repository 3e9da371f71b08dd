"""What a sampler changes about tracing: who is not sampled pays little, and whoever decided, nobody decides again.

Through a real cluster, with OpenTelemetry's own SDK. Not covered: what spans there are (test_tracing.py).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState

import roq
from roq import blocking, tracing
from roq.errors import InvalidTopic
from roq.pubsub.publisher import Publisher
from roq.wire.frame import HEADERS_VERSION, VERSION
from tests.integration.running import RunningCluster
from tests.integration.test_headers import take
from tests.integration.test_tracing import follows, identity, linked, named, one

OUT_OF = 4


class EveryFourth(Sampler):
    """Of the publications. asked: how often about one."""

    def __init__(self) -> None:
        self.asked = 0

    def should_sample(
        self,
        parent_context: Any,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Any = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See Sampler."""
        if not name.startswith("publish"):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        self.asked += 1
        return SamplingResult(Decision.DROP if self.asked % OUT_OF else Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self) -> str:
        """See Sampler."""
        return "every fourth"


class Tracing:
    """With this sampler until `end`."""

    def __init__(self, sampler: Sampler) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracing.instrument(self.provider)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    tracing.uninstrument()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of every data frame that leaves: messages, version."""
    sent, original = list[tuple[int, int]](), Publisher._send_run

    def noting(self: Publisher, record: Any, run: Any, timestamp: int, version: int) -> None:
        sent.append((len(run), version))
        original(self, record, run, timestamp, version)

    monkeypatch.setattr(Publisher, "_send_run", noting)
    return sent


async def test_a_batch_stays_one_frame(client: roq.Cluster, queue: str, frames: list[tuple[int, int]]) -> None:
    payloads = [b"%d" % number for number in range(500)]
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        for sampler in (ALWAYS_OFF, ALWAYS_ON):
            traced = Tracing(sampler)
            await publisher.publish_many("eu", payloads)
            messages = await take(subscriber, len(payloads))
            assert [message.payload for message in messages] == payloads
            assert {"traceparent" in message.headers for message in messages} == {sampler is ALWAYS_ON}
            assert len(named(traced.exporter, f"publish {queue}")) == (sampler is ALWAYS_ON)
            tracing.uninstrument()
    assert frames == [(500, VERSION), (500, HEADERS_VERSION)]


async def test_each_message_is_decided_on_once(client: roq.Cluster, queue: str) -> None:
    sampler = EveryFourth()
    traced = Tracing(sampler)
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        for number in range(10 * OUT_OF):
            await publisher.publish("eu", b"%d" % number, {"n": "x"} if number % 2 else None)
        messages = await take(subscriber, 10 * OUT_OF)
    published = named(traced.exporter, f"publish {queue}")
    assert (sampler.asked, len(published)) == (10 * OUT_OF, 10)
    sampled = [message for message in messages if "traceparent" in message.headers]
    assert sampled == messages[OUT_OF - 1 :: OUT_OF]
    assert all(message.headers.get("n") == "x" for message in messages[1::2])
    for message, producer in zip(sampled, published, strict=True):
        traced.exporter.clear()
        with tracing.process(message, queue):
            pass
        assert follows(one(traced.exporter, f"process {queue}"), producer)


async def test_a_list_is_linked_to_those_of_its_messages_that_were_sampled(client: roq.Cluster, queue: str) -> None:
    traced = Tracing(EveryFourth())
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        for number in range(3 * OUT_OF):
            await publisher.publish("eu", b"%d" % number)
        await take(subscriber, 3 * OUT_OF)
    links = set[int]().union(*map(linked, named(traced.exporter, f"receive {queue}")))
    assert links == {identity(span) for span in named(traced.exporter, f"publish {queue}")}
    assert len(links) == 3


async def test_a_decision_that_was_taken_before_is_passed_on(client: roq.Cluster, queue: str) -> None:
    traced = Tracing(ParentBased(ALWAYS_OFF))
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        with traced.provider.get_tracer("shop").start_as_current_span("checkout") as checkout:
            await publisher.publish_many("eu", [b"1", b"2"], {"who": "me"})
            await publisher.publish("eu", b"3")
        await publisher.publish("eu", b"4")
        messages = await take(subscriber, 4)
    tracing.uninstrument()
    outside = checkout.get_span_context()
    inside = f"00-{outside.trace_id:032x}-{outside.span_id:016x}-{outside.trace_flags:02x}"
    assert not outside.trace_flags.sampled
    assert [message.headers.get("traceparent") for message in messages] == [inside] * 3 + [None]
    assert [message.headers.get("who") for message in messages] == ["me", "me", None, None]
    consumer = Tracing(ParentBased(ALWAYS_ON))
    for message in messages:
        with tracing.process(message, queue):
            pass
    assert len(named(consumer.exporter, f"process {queue}")) == 1, "whoever made the span outside decided for all in it"


async def test_baggage_goes_along_without_a_span(client: roq.Cluster, queue: str) -> None:
    Tracing(ALWAYS_OFF)
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        token = context.attach(baggage.set_baggage("tenant", "7"))
        try:
            await publisher.publish("eu", b"x")
        finally:
            context.detach(token)
        await publisher.publish("eu", b"y")
        messages = await take(subscriber, 2)
    assert [message.headers for message in messages] == [{"baggage": "tenant=7"}, {}]


async def test_the_plain_face_decides_once(client: roq.Cluster, cluster: RunningCluster, queue: str) -> None:
    sampler = EveryFourth()
    traced = Tracing(sampler)

    def plainly() -> None:
        with blocking.connect(cluster.zookeeper) as plain, plain.publisher(queue) as publisher:
            for number in range(2 * OUT_OF):
                publisher.publish("eu", b"%d" % number)
            for _ in range(OUT_OF):
                publisher.publish_many("eu", [b"many", b"many"])
            for _ in range(OUT_OF):
                publisher.publish("eu", b"sure", confirm="routed")

    async with client.subscriber(queue) as subscriber:
        await asyncio.to_thread(plainly)
        messages = await take(subscriber, 5 * OUT_OF)
    assert (sampler.asked, len(named(traced.exporter, f"publish {queue}"))) == (4 * OUT_OF, 4)
    sampled = [number for number, message in enumerate(messages) if "traceparent" in message.headers]
    assert sampled == [3, 7, 14, 15, 19]


async def test_what_can_not_carry_a_context_is_published_all_the_same(client: roq.Cluster, queue: str) -> None:
    traced = Tracing(ALWAYS_ON)
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        publisher.protocol = 1  # as while the cluster, or a subscriber, has version 0.1
        await publisher.publish("eu", b"1")
        await publisher.publish_many("eu", [b"2"])
        messages = await take(subscriber, 2)
    assert [(message.payload, message.headers) for message in messages] == [(b"1", {}), (b"2", {})]
    assert len(named(traced.exporter, f"publish {queue}")) == 2


async def test_a_failure_is_recorded_where_it_is_sampled(client: roq.Cluster, queue: str) -> None:
    traced = Tracing(EveryFourth())
    async with client.publisher(queue) as publisher:
        for _ in range(OUT_OF):
            with pytest.raises(InvalidTopic):
                await publisher.publish("", b"x")
    failed = one(traced.exporter, f"publish {queue}")
    assert not failed.status.is_ok
    assert failed.events[0].name == "exception"
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "InvalidTopic"


@pytest.mark.parametrize("begin", ["tracing.instrument()", "pass"])
def test_a_provider_may_come_later_and_process_needs_no_instrument(begin: str) -> None:
    script = f"""
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from roq import tracing
from roq.pubsub.subscription import Message

{begin}
for _ in range(2):
    with tracing.process(Message("eu", b"", 1, 1, 0), "orders") as span:
        print(span.is_recording())
    if not span.is_recording():
        trace.set_tracer_provider(TracerProvider())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["False", "True"]

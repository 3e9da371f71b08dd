"""Traces through a real cluster and a folder: what is published, put and asked for is in one trace with who works on it.

Spans are collected by OpenTelemetry's own SDK. Not covered: exporters, which are OpenTelemetry's.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

import roq
from roq import blocking, tracing
from roq.errors import InvalidConfiguration, InvalidTopic
from roq.ids import new_token
from roq.pubsub.inbox import Inbox
from roq.workqueue.blocking_queue import WorkQueue as PlainWorkQueue
from tests.harness.documented import block
from tests.integration.running import RunningCluster

KEPT = (
    *(roq.Publisher, blocking.Publisher, Inbox, roq.Cluster, roq.WorkQueue, PlainWorkQueue),
    *(roq.Transaction, blocking.Transaction),
)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Where they go while it is instrumented."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.instrument(provider)
    yield exporter
    tracing.uninstrument()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def one(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = named(exporter, name)
    return found


def linked(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


def identity(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def follows(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """It is a part of that one."""
    assert span.context is not None
    assert parent.context is not None
    return span.parent is not None and (span.parent.span_id, span.context.trace_id) == (
        parent.context.span_id,
        parent.context.trace_id,
    )


@pytest.mark.quick
async def test_a_message_and_who_works_on_it_are_in_one_trace(
    client: roq.Cluster, queue: str, spans: InMemorySpanExporter
) -> None:
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish("eu", b"first", {"who": "me"})
        await publisher.publish_many("eu", [b"second", b"third"])
        messages = [await anext(subscriber) for _ in range(3)]
    with tracing.process(messages[0], queue):
        pass
    assert messages[0].headers["who"] == "me"
    first, both = named(spans, f"publish {queue}")
    assert follows(one(spans, f"process {queue}"), first)
    received = named(spans, f"receive {queue}")
    assert set.union(*map(linked, received)) == {identity(first), identity(both)}
    assert first.attributes is not None
    assert dict(first.attributes) == {
        "messaging.system": "roq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue,
        "messaging.message.body.size": 5,
        "roq.topic": "eu",
    }


async def test_what_has_a_context_is_passed_on_in_it(client: roq.Cluster, queue: str, spans: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with client.subscriber(queue) as subscriber, client.publisher(queue) as publisher:
        await publisher.publish("eu", b"", {"traceparent": parent})
        message = await anext(subscriber)
    assert message.headers["traceparent"] == parent
    assert not named(spans, f"publish {queue}")


async def test_the_plain_face_has_one_span_for_a_message(
    cluster: RunningCluster, queue: str, spans: InMemorySpanExporter
) -> None:
    def plainly() -> roq.Message:
        with (
            blocking.connect(cluster.zookeeper) as client,
            client.subscriber(queue) as subscriber,
            client.publisher(queue) as publisher,
        ):
            publisher.publish("eu", b"x")
            publisher.flush()
            return next(iter(subscriber))

    message = await asyncio.to_thread(plainly)
    with tracing.process(message, queue):
        pass
    assert follows(one(spans, f"process {queue}"), one(spans, f"publish {queue}"))


async def test_a_request_and_its_answer(client: roq.Cluster, queue: str, spans: InMemorySpanExporter) -> None:
    async def serve(responder: roq.Responder) -> None:
        request = await anext(responder)
        with tracing.process(request, queue):
            await request.reply(b"7")

    async with client.serve(queue) as responder:
        task = asyncio.create_task(serve(responder))
        assert (await client.request(queue, "eu", b"?")).payload == b"7"
        await task
    assert follows(one(spans, f"process {queue}"), one(spans, f"request {queue}"))


async def test_a_task_and_its_worker(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with roq.open_queue(f"file://{tmp_path / 'work'}") as queue:
        await queue.put(b"once", headers={"who": "me"})
        await queue.put_many([b"twice", roq.NewTask(b"thrice")])
        seen: list[bytes] = []

        async def handle(task: roq.Task) -> None:
            seen.append(task.payload)
            if task.payload == b"thrice" and task.attempt == 1:
                raise ValueError("not yet")

        await queue.run(handle, wait_seconds=0.0, retry_seconds=0.0)
    put, both = named(spans, "put work")
    worked = named(spans, "process work")
    assert sorted(seen) == [b"once", b"thrice", b"thrice", b"twice"]
    assert [follows(span, put) for span in worked].count(True) == 1
    assert [follows(span, both) for span in worked].count(True) == 3
    (failed,) = [span for span in worked if not span.status.is_ok]
    assert failed.events[0].name == "exception"
    assert (failed.attributes or {})["error.type"] == "ValueError"
    kinds = {span.name.partition(" ")[0]: span.kind for span in spans.get_finished_spans()}
    assert kinds == {
        "put": SpanKind.PRODUCER,
        "lease": SpanKind.CLIENT,
        "process": SpanKind.CONSUMER,
        "ack": SpanKind.CLIENT,
        "release": SpanKind.CLIENT,
    }
    leased = set[int]().union(*map(linked, named(spans, "lease work")))
    assert leased == {identity(put), identity(both)}
    assert len(named(spans, "ack work")) == 3
    assert linked(one(spans, "release work")) == {identity(both)}


def in_one_transaction(spans: InMemorySpanExporter, target: str, group: str) -> None:
    """From the first message, by the member that works on it, to the one that it published."""
    (first,) = [span for span in named(spans, f"publish {group.partition('@')[0]}") if span.parent is None]
    worked, published, committed = (
        one(spans, f"process {group}"),
        one(spans, f"publish {target}"),
        one(spans, f"commit {group}"),
    )
    assert follows(worked, first)
    assert follows(published, worked)
    assert follows(committed, worked)
    assert linked(committed) == {identity(first)}
    assert committed.attributes is not None
    assert committed.attributes["messaging.batch.message_count"] == 1
    assert committed.attributes["roq.transaction.published"] == 1
    assert not named(spans, f"ack {group}")


async def test_a_transaction(client: roq.Cluster, chained: tuple[str, str], spans: InMemorySpanExporter) -> None:
    source, target = chained
    async with client.publisher(source, confirm="stored") as publisher:
        await publisher.publish("eu", b"order")
    async with client.subscriber(source, group="billing") as messages:
        message = await anext(messages)
        with tracing.process(message, f"{source}@billing"):
            async with client.transaction() as transaction:
                await transaction.publish(target, "eu", b"invoice", {"currency": "EUR"})
                await transaction.ack(message)
    in_one_transaction(spans, target, f"{source}@billing")
    async with client.subscriber(target, start="earliest", follow="stored") as invoices:
        invoice = await anext(invoices)
    assert invoice.headers["currency"] == "EUR"
    with tracing.process(invoice, target):
        pass
    assert follows(one(spans, f"process {target}"), one(spans, f"publish {target}"))
    async with client.transaction():
        pass
    assert len([span for span in spans.get_finished_spans() if span.name.startswith("commit")]) == 1, "an empty one has none"
    with pytest.raises(InvalidTopic):
        async with client.transaction() as transaction:
            await transaction.publish(target, "", b"x")
    assert [span.status.is_ok for span in named(spans, f"publish {target}")] == [True, False]


async def test_a_plain_transaction(
    client: roq.Cluster, cluster: RunningCluster, chained: tuple[str, str], spans: InMemorySpanExporter
) -> None:
    source, target = chained

    def plainly() -> None:
        with blocking.connect(cluster.zookeeper) as plain:
            with plain.publisher(source, confirm="stored") as publisher:
                publisher.publish("eu", b"order")
            with plain.subscriber(source, group="billing") as messages:
                message = next(iter(messages))
                with tracing.process(message, f"{source}@billing"), plain.transaction() as transaction:
                    transaction.publish(target, "eu", b"invoice")
                    transaction.ack(message)

    await asyncio.to_thread(plainly)
    in_one_transaction(spans, target, f"{source}@billing")


@pytest.fixture
async def chained(client: roq.Cluster) -> AsyncIterator[tuple[str, str]]:
    """Two recorded queues, the first with a group."""
    names = tuple(f"traced-{new_token()[:12]}" for _ in range(2))
    for name in names:
        await client.create_queue(name, overflow="block", record=roq.Record(days=1))
    await client.create_group(names[0], "billing")
    yield names[0], names[1]
    for name in names:
        await client.remove_queue(name)


def test_a_task_and_its_plain_worker(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    with blocking.open_queue(f"file://{tmp_path / 'work'}") as queue:
        queue.put(b"once")
        (task,) = queue.lease()
        with tracing.process(task, "work"):
            task.ack()
        queue.put_many([b"twice"])
        (task,) = queue.lease()
        assert queue.ack_many([task]) == []
    first, second = named(spans, "put work")
    worked = one(spans, "process work")
    assert follows(worked, first)
    acked, together = named(spans, "ack work")
    assert follows(acked, worked)
    assert linked(together) == {identity(second)}


async def test_what_the_document_shows(client: roq.Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    exporter, names = InMemorySpanExporter(), dict[str, Any]()
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    await client.create_queue("orders")
    try:
        exec(block("docs/tracing.md", "Tracing", 1), names)  # as an application runs it
        await names["shop"](client)
    finally:
        tracing.uninstrument()
        await client.remove_queue("orders")
    assert capsys.readouterr().out == """b'{"price": 120}'\n"""
    checkout, published, worked = (one(exporter, name) for name in ("checkout", "publish orders", "process orders"))
    assert follows(published, checkout)
    assert follows(worked, published)


def test_what_was_replaced_is_put_back() -> None:
    before = {face: dict(vars(face)) for face in KEPT}
    tracing.instrument(TracerProvider())
    try:
        changed = [name for face in KEPT for name, method in vars(face).items() if before[face].get(name) is not method]
        assert "publish" in changed
        for face in KEPT:
            for name, method in vars(face).items():
                if callable(method) and not isinstance(method, type):
                    assert inspect.signature(method) == inspect.signature(before[face][name])
        with pytest.raises(InvalidConfiguration, match="uninstrument"):
            tracing.instrument()
    finally:
        tracing.uninstrument()
    assert {face: dict(vars(face)) for face in KEPT} == before
    tracing.uninstrument()  # nothing to do


def test_without_opentelemetry_it_says_what_is_missing() -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None; import roq, roq.blocking; import roq.tracing"
    ran = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "pip install 'roq-messaging[otel]'" in ran.stderr

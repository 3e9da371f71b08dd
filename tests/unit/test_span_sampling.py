"""The sampler is asked once, before there is a span, and the span is what it said. With messages: tests/integration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import INVALID_SPAN_CONTEXT, Link, SpanContext, SpanKind, TraceFlags, TraceState

from roq.runtime.span_sampling import recorded_span

PARENT = SpanContext(0xAF, 0xB7, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


class NotingSampler(Sampler):
    """Says the same each time; `asked`: the trace ids, names and attributes."""

    def __init__(self, decision: Decision) -> None:
        self.asked = list[tuple[int, str, Any]]()
        self._decision = decision

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
        self.asked.append((trace_id, name, attributes))
        return SamplingResult(self._decision, {**attributes, "by": "sampler"}, TraceState([("of", "sampler")]))

    def get_description(self) -> str:
        """See Sampler."""
        return "noting"


def begun(sampler: Sampler, parent: SpanContext = INVALID_SPAN_CONTEXT) -> Any:
    tracer = TracerProvider(sampler=sampler).get_tracer("test")
    return recorded_span(tracer, parent, "publish q", SpanKind.PRODUCER, {"a": 1}, (Link(PARENT),), 7)


@pytest.mark.parametrize("decision", [Decision.RECORD_AND_SAMPLE, Decision.RECORD_ONLY])
def test_a_recorded_span_is_the_one_that_was_decided_on(decision: Decision) -> None:
    sampler = NotingSampler(decision)
    span = begun(sampler)
    assert isinstance(span, ReadableSpan)
    assert span.context is not None
    assert sampler.asked == [(span.context.trace_id, "publish q", {"a": 1})]
    assert (span.parent, span.start_time, span.kind) == (None, 7, SpanKind.PRODUCER)
    assert dict(span.attributes or {}) == {"a": 1, "by": "sampler"}
    assert [link.context for link in span.links] == [PARENT]
    assert span.context.trace_state.get("of") == "sampler"
    assert span.context.trace_flags.sampled == (decision is Decision.RECORD_AND_SAMPLE)


def test_what_is_not_recorded_has_no_span() -> None:
    sampler = NotingSampler(Decision.DROP)
    assert begun(sampler) is None
    assert len(sampler.asked) == 1


def test_spans_of_their_own_have_traces_of_their_own() -> None:
    tracer = TracerProvider().get_tracer("test")
    spans = [recorded_span(tracer, INVALID_SPAN_CONTEXT, "x", SpanKind.CLIENT, {}) for _ in range(10)]
    for part in ("trace_id", "span_id"):
        assert len({getattr(span.get_span_context(), part) for span in spans if span}) == 10
    assert tracer.start_span("y").get_span_context().trace_id not in {
        span.get_span_context().trace_id for span in spans if span
    }


@pytest.mark.parametrize("sampled", [True, False])
def test_a_span_within_another_belongs_to_its_trace(sampled: bool) -> None:
    parent = SpanContext(0xAF, 0xB7, is_remote=False, trace_flags=TraceFlags(int(sampled)))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        span = begun(ParentBased(ALWAYS_OFF if sampled else ALWAYS_ON), parent)
    assert (span is not None) == sampled, "as the parent's"
    if span is not None:
        assert span.context.trace_id == 0xAF
        assert span.parent == parent


def test_a_tracer_that_is_not_the_sdks_is_asked_for_the_span() -> None:
    assert recorded_span(trace.NoOpTracer(), INVALID_SPAN_CONTEXT, "x", SpanKind.CLIENT, {}) is None

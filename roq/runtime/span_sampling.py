"""Spans of OpenTelemetry for what is sampled, and nothing for what is not: the sampler is asked before there is a span.

The SDK's tracer makes an object for each span, also for those that nobody records, at three times the price of the decision. So
its sampler is asked here, once, with what the tracer would ask with; for a span that is recorded the tracer is told what was
said. A tracer of another make is asked for the span itself. Not covered: what spans there are (roq/tracing.py), nor does this
import OpenTelemetry: an install without it has this file, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class _Answered:
    """A sampler or a source of ids, one method of which was called already and said this."""

    def __init__(self, inner: Any, method: str, said: Any) -> None:
        self._inner = inner
        setattr(self, method, lambda *_: said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def recorded_span(
    tracer: Any,
    parent: Any,
    name: str,
    kind: Any,
    attributes: Mapping[str, str | int],
    links: Sequence[Any] = (),
    began_ns: int | None = None,
) -> Any | None:
    """One that is recorded, begun; None if it would not be. parent: the current span's context, valid or not. began_ns:
    nanoseconds since 1970, None: now."""
    known = getattr(tracer, "__dict__", {})
    sampler, ids = known.get("sampler"), known.get("id_generator")
    if sampler is not None and ids is not None:  # the SDK's
        trace_id = parent.trace_id if parent.is_valid else ids.generate_trace_id()
        result = sampler.should_sample(None, trace_id, name, kind, attributes, links)
        if not result.decision.is_recording():
            return None
        tracer = object.__new__(tracer.__class__)  # copy.copy takes as long as a tenth of the span
        tracer.__dict__.update(
            known,
            sampler=_Answered(sampler, "should_sample", result),
            id_generator=_Answered(ids, "generate_trace_id", trace_id),
        )
    span = tracer.start_span(name, kind=kind, attributes=attributes, links=links, start_time=began_ns)
    return span if span.is_recording() else None


@contextmanager
def telling_errors(span: Any) -> Iterator[None]:
    """What is raised within is named in the span's `error.type`."""
    try:
        yield
    except Exception as error:
        span.set_attribute("error.type", type(error).__qualname__)
        raise

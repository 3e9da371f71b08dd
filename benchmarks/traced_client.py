"""A client of the load generator with `roq.tracing`, in one of the ways of `benchmarks.overhead`: the variable says which."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import uvloop

from roq.tools.bench.client import serve

WAY = "ROQ_BENCH_TRACING"
PLAIN, OFF, SAMPLED, ON = "plain", "off", "sampled", "on"
SAMPLED_SHARE = 0.01


def prepare(way: str) -> None:
    """As an application would before it connects. off: instrumented once, and put back."""
    if way == PLAIN:
        return
    tracing = import_module("roq.tracing")  # plain: not even imported
    if way == OFF:
        tracing.instrument()
        tracing.uninstrument()
        return
    tracing.instrument(_provider(SAMPLED_SHARE if way == SAMPLED else 1.0))


def _provider(share: float) -> Any:
    """OpenTelemetry's own, whose exporter throws the spans away: what sending them costs is the exporter's."""
    sdk, export, sampling = (import_module(f"opentelemetry.sdk.trace{name}") for name in ("", ".export", ".sampling"))

    class Nowhere(export.SpanExporter):  # type: ignore[name-defined,misc]
        def export(self, spans: Sequence[Any]) -> Any:
            return export.SpanExportResult.SUCCESS

    provider = sdk.TracerProvider(sampler=sampling.ParentBased(sampling.TraceIdRatioBased(share)))
    provider.add_span_processor(export.BatchSpanProcessor(Nowhere()))
    return provider


if __name__ == "__main__":
    prepare(os.environ.get(WAY, PLAIN))
    sys.exit(uvloop.run(serve()))

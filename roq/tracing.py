"""Traces of messages, tasks and requests through OpenTelemetry (extra `otel`): `roq.tracing.instrument()`.

    publish, put, request    a span each; its context goes along in the header `traceparent` (W3C)
    published, not recorded  no span: the context of the current span goes along, or nothing if there is none
    messages, tasks come     a span for each list that has any, with links to their contexts
    ack, release, reject     a span each, linked to the task's context
    a transaction            a span for each message as it is collected, and for its commit, linked to the acked tasks' contexts
    working on one           `with process(message):`; `run(handler)` does it by itself

It replaces methods of the classes people use and puts them back with `uninstrument`, so what is not instrumented is the code
it was, at no cost. Spans go where the application's TracerProvider sends them; without one nothing is recorded. Names and
attributes follow the semantic conventions for messaging. A message that has `traceparent` already keeps it and gets no span of
its own, so what is passed on as it came stays in its trace.

A context is a header: headers need version 0.2 of the cluster and of all its subscribers. Without, a publisher sends none.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from roq import blocking
from roq.client import blocking_transaction, transaction
from roq.client import cluster as client
from roq.errors import InvalidConfiguration
from roq.pubsub import inbox, publisher
from roq.pubsub.subscription import Message
from roq.runtime.span_sampling import recorded_span, telling_errors
from roq.wire.headers import Headers, OwnHeaders, split_headers
from roq.wire.monitor import PROTOCOL_0_2
from roq.wire.requests import PRIVATE_PREFIXES
from roq.wire.task import ACK, EXTEND, REJECT, NewTask
from roq.workqueue import blocking_queue, queue
from roq.workqueue.transaction import came_from

try:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context, get_current
    from opentelemetry.trace import Link, ProxyTracerProvider, Span, SpanKind, Tracer, TracerProvider
except ImportError as error:
    raise ImportError("roq.tracing needs OpenTelemetry: pip install 'roq-messaging[otel]'") from error

PARENT = "traceparent"
LINKS_MAX = 128  # of one span: what OpenTelemetry keeps by default
SETTLING = {ACK: "ack", EXTEND: "extend", REJECT: "reject"}  # others: release
BATCH_COUNT = "messaging.batch.message_count"
Attributes = Mapping[str, str | int]
Changed = Iterator[tuple[tuple[Any, ...], dict[str, Any]]]  # the arguments that a traced method goes on with


class Traced(Protocol):
    """A message, a task or a request."""

    @property
    def headers(self) -> Mapping[str, str | bytes]:
        """What its publisher said of it."""


class _Instrumentation:
    """Of this process. replaced: class, name, what was there."""

    def __init__(self) -> None:
        self.tracer = trace.get_tracer("roq")  # the application's, once it has one
        self.replaced: list[tuple[type, str, Any]] = []
        self.carried: tuple[Context, dict[str, str]] = (Context(), {})  # the last one that was asked for, and its headers

    def replace(self, where: type, name: str, wrap: Callable[[Any], Any]) -> None:
        original = where.__dict__[name]
        setattr(where, name, functools.wraps(original)(wrap(original)))
        self.replaced.append((where, name, original))


_here = _Instrumentation()
_is_decided = ContextVar("roq_tracing_is_decided", default=False)  # the plain face has: the asynchronous one passes it on
_headers_of = attrgetter("_headers")  # without the property: this looks at every message


def instrument(provider: TracerProvider | None = None) -> None:
    """Trace from now on, in this process, what is published, put, requested and received. provider: where spans go, None: the
    application's own (`opentelemetry.trace.set_tracer_provider`). Raises InvalidConfiguration if it is instrumented already."""
    if _here.replaced:
        raise InvalidConfiguration("roq is instrumented already: call roq.tracing.uninstrument() first")
    _here.tracer = trace.get_tracer("roq", tracer_provider=provider)
    for face in (publisher.Publisher, blocking.Publisher):
        _here.replace(face, "publish", _publishing)
        _here.replace(face, "publish_many", _publishing_many)
    _here.replace(inbox.Inbox, "next_batch", _receiving)
    _here.replace(client.Cluster, "request", _requesting)
    for together in (transaction.Transaction, blocking_transaction.Transaction):
        _here.replace(together, "publish", _publishing_together)
        _here.replace(together, "commit", _committing)
    for worker in (queue.WorkQueue, blocking_queue.WorkQueue):
        _here.replace(worker, "put", _putting)
        _here.replace(worker, "put_many", _putting_many)
        _here.replace(worker, "_lease", _leasing)
        _here.replace(worker, "_settle_one", _settling)
        _here.replace(worker, "_settle_many", _settling_many)
        _here.replace(worker, "run", _running)


def uninstrument() -> None:
    """Put everything back as it was. What is under way is traced to its end."""
    while _here.replaced:
        where, name, original = _here.replaced.pop()
        setattr(where, name, original)


def process(one: Traced, queue: str = "") -> AbstractContextManager[Span]:
    """The span of working on a message, a task or a request: `with process(message, "orders"):`. It belongs to the trace in
    which that was published; inside of another span it is a part of that one, with a link. An exception that leaves the block
    is recorded. queue: its name."""
    headers = one.headers
    inside = trace.get_current_span().get_span_context().is_valid
    links = _links([headers]) if inside and headers else ()
    attributes: dict[str, str | int] = {**_about(queue, "process", "process"), **_topic(one)}
    if (attempt := getattr(one, "attempt", None)) is not None:
        attributes |= {"messaging.message.id": getattr(one, "id", ""), "roq.task.attempt": attempt}
    began = propagate.extract(_texts(headers)) if headers and not inside else None
    return _within(_tracer().start_span(f"process {queue}".rstrip(), began, SpanKind.CONSUMER, attributes, links))


# --- spans, contexts --------------------------------------------------------------------------------------------------------


@functools.lru_cache
def _about(queue: str, operation: str, kind: str) -> Attributes:
    about: dict[str, str | int] = {
        "messaging.system": "roq",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    if queue:
        about["messaging.destination.name"] = queue
    return about


def _name(address: str) -> str:
    """Of the work queue there."""
    return address.rstrip("/").rpartition("/")[2]


def _count(many: Iterable[Any]) -> Attributes:
    return {BATCH_COUNT: len(many)} if isinstance(many, Sequence) else {}


def _topic(one: Any) -> dict[str, str | int]:
    return {"roq.topic": topic} if (topic := getattr(one, "topic", "")) else {}


def _texts(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if isinstance(value, str)}


def _with_context(headers: Headers | None, span: Span | None = None) -> Headers:
    """These headers, and this span's context, None: the current one's."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, None if span is None else trace.set_span_in_context(span))
    return {**(headers or {}), **carrier}


def _links(all_headers: Iterable[Mapping[str, str | bytes]]) -> list[Link]:
    """To the contexts that are in there, LINKS_MAX at most."""
    links: list[Link] = []
    seen = set[str | bytes]()
    for headers in all_headers:
        parent = headers.get(PARENT) if headers else None
        if parent is None or parent in seen:
            continue
        seen.add(parent)
        context = trace.get_current_span(propagate.extract(_texts(headers))).get_span_context()
        if context.is_valid:
            links.append(Link(context))
        if len(links) == LINKS_MAX:
            break
    return links


def _has_context(headers: Headers | None) -> bool:
    """Also what carries a request or an answer: the request has a span."""
    return headers is not None and (PARENT in headers or isinstance(headers, OwnHeaders))


def _record(name: str, kind: SpanKind, attributes: Attributes, links: Sequence[Link], began_ns: int) -> None:
    """A span of what is over already."""
    if (span := _begin(name, kind, attributes, links, began_ns)) is not None:
        span.end()


def _begin(
    name: str, kind: SpanKind, about: Attributes, links: Sequence[Link] = (), began_ns: int | None = None
) -> Span | None:
    now = get_current()
    parent = trace.get_current_span(now).get_span_context() if now else trace.INVALID_SPAN_CONTEXT
    return recorded_span(_tracer(), parent, name, kind, about, links, began_ns)


@contextmanager
def _within(span: Span) -> Iterator[Span]:
    with trace.use_span(span, end_on_exit=True), telling_errors(span):
        yield span


def _tracer() -> Tracer:
    """Also of an application that set its provider after `instrument()`."""
    if _here.tracer.__class__ is trace.ProxyTracer and not isinstance(trace.get_tracer_provider(), ProxyTracerProvider):
        _here.tracer = trace.get_tracer("roq")
    return _here.tracer


def _traced(original: Any, span: Callable[..., AbstractContextManager[Any]]) -> Any:
    """The method within a span. span: called with the method's arguments; gives the arguments to go on with."""
    if not inspect.iscoroutinefunction(original):

        def plain(self: Any, /, *arguments: Any, **options: Any) -> Any:
            with span(self, *arguments, **options) as (changed, named):
                return original(self, *changed, **named)

        return plain

    async def asynchronous(self: Any, /, *arguments: Any, **options: Any) -> Any:
        with span(self, *arguments, **options) as (changed, named):
            return await original(self, *changed, **named)

    return asynchronous


# --- publish ----------------------------------------------------------------------------------------------------------------


def _published(
    face: publisher.Publisher, topic: str, headers: Headers | None, size: Attributes
) -> tuple[Span | None, Headers | None]:
    """The span of publishing something, None if it gets none, and the headers to publish it with. Nobody fails to publish
    because it is traced: while a subscriber, or the cluster, can't read headers, no context goes along."""
    if _is_decided.get() or _has_context(headers):
        return None, headers
    attributes = {**_about(face.queue, "publish", "send"), "roq.topic": topic, **size}
    span = _begin(f"publish {face.queue}", SpanKind.PRODUCER, attributes)
    if face.protocol < PROTOCOL_0_2:
        return span, headers
    return span, _carried(headers) if span is None else _with_context(headers, span)


def _carried(headers: Headers | None) -> Headers | None:
    """These, and the current context, if there is any: whoever decided before about the trace decided for all that follow."""
    now = get_current()
    if not now:
        return headers
    known, carrier = _here.carried
    if known is not now:
        carrier = {}
        propagate.inject(carrier)
        _here.carried = (now, carrier)
    return {**(headers or {}), **carrier} if carrier else headers


def _sending(original: Any, size: Callable[[Any], Attributes]) -> Any:
    """Without `_traced`: for what is not recorded, that would be most of the price."""
    if not inspect.iscoroutinefunction(original):

        def plain(self: Any, topic: str, payload: Any, headers: Headers | None = None, confirm: str | None = None) -> Any:
            span, own = _published(self._publisher, topic, headers, size(payload))
            with _decided(span):
                return original(self, topic, payload, own, confirm=confirm)

        return plain

    async def sent(self: Any, topic: str, payload: Any, headers: Headers | None = None, confirm: str | None = None) -> Any:
        span, own = _published(self, topic, headers, size(payload))
        if span is None:
            return await original(self, topic, payload, own, confirm=confirm)
        with _within(span):
            return await original(self, topic, payload, own, confirm=confirm)

    return sent


def _publishing(original: Any) -> Any:
    return _sending(original, lambda payload: {"messaging.message.body.size": len(payload)})


def _publishing_many(original: Any) -> Any:
    send = _sending(original, _count)
    if not inspect.iscoroutinefunction(original):
        return lambda self, topic, payloads, headers=None, *, confirm=None: send(self, topic, payloads, headers, confirm)

    async def many(self: Any, topic: str, payloads: Any, headers: Headers | None = None, *, confirm: str | None = None) -> Any:
        return await send(self, topic, payloads, headers, confirm)

    return many


@contextmanager
def _decided(span: Span | None) -> Iterator[None]:
    """Within this span, or none; the asynchronous publisher that the plain one calls does not decide again."""
    token = _is_decided.set(True)
    try:
        with nullcontext() if span is None else _within(span):
            yield
    finally:
        _is_decided.reset(token)


# --- transactions -----------------------------------------------------------------------------------------------------------


def _publishing_together(original: Any) -> Any:
    """The span is of collecting it: whether it was published says that of the commit."""

    @contextmanager
    def span(self: Any, queue: str, topic: str, payload: bytes, headers: Headers | None = None) -> Changed:
        if _has_context(headers):
            yield (queue, topic, payload, headers), {}
            return
        attributes = {**_about(queue, "publish", "create"), "roq.topic": topic, "messaging.message.body.size": len(payload)}
        with _within(_tracer().start_span(f"publish {queue}", kind=SpanKind.PRODUCER, attributes=attributes)):
            yield (queue, topic, payload, _with_context(headers)), {}

    return _traced(original, span)


def _committing(original: Any) -> Any:
    @contextmanager
    def span(self: Any) -> Changed:
        collected = self._collected
        if not collected:
            yield (), {}
            return
        name = _name(came_from(collected.tasks[0])) if collected.tasks else ""
        attributes = {
            **_about(name, "commit", "settle"),
            BATCH_COUNT: len(collected.tasks),
            "roq.transaction.published": collected.messages,
        }
        links = _links(task.headers for task in collected.tasks)
        with _within(_tracer().start_span(f"commit {name}".rstrip(), kind=SpanKind.CLIENT, attributes=attributes, links=links)):
            yield (), {}

    return _traced(original, span)


# --- receive ----------------------------------------------------------------------------------------------------------------


def _receiving(original: Any) -> Any:
    async def next_batch(self: Any) -> list[Message] | None:
        began = time.time_ns()
        batch: list[Message] | None = await original(self)
        if batch and not batch[0].topic.startswith(PRIVATE_PREFIXES):
            name = str(getattr(self, "queue", ""))
            attributes = {**_about(name, "receive", "receive"), "roq.topic": batch[0].topic, BATCH_COUNT: len(batch)}
            _record(f"receive {name}", SpanKind.CLIENT, attributes, _links(filter(None, map(_headers_of, batch))), began)
        return batch

    return next_batch


# --- requests ---------------------------------------------------------------------------------------------------------------


def _requesting(original: Any) -> Any:
    @contextmanager
    def span(
        self: Any, queue: str, topic: str, payload: bytes = b"", headers: Headers | None = None, **options: Any
    ) -> Changed:
        attributes = {**_about(queue, "request", "send"), "roq.topic": topic, "messaging.message.body.size": len(payload)}
        with _within(_tracer().start_span(f"request {queue}", kind=SpanKind.CLIENT, attributes=attributes)):
            yield (queue, topic, payload, headers if _has_context(headers) else _with_context(headers)), options

    return _traced(original, span)


# --- tasks ------------------------------------------------------------------------------------------------------------------


def _putting(original: Any) -> Any:
    @contextmanager
    def span(self: Any, payload: bytes, *, headers: Headers | None = None, **options: Any) -> Changed:
        if _has_context(headers):
            yield (payload,), {"headers": headers, **options}
            return
        name = _name(self.address)
        attributes = {**_about(name, "put", "send"), "messaging.message.body.size": len(payload)}
        with _within(_tracer().start_span(f"put {name}", kind=SpanKind.PRODUCER, attributes=attributes)):
            yield (payload,), {"headers": _with_context(headers), **options}

    return _traced(original, span)


def _putting_many(original: Any) -> Any:
    def with_context(tasks: Iterable[NewTask | bytes]) -> Iterator[NewTask]:
        for task in tasks:
            new = task if isinstance(task, NewTask) else NewTask(task)
            yield new if _has_context(new.headers) else msgspec.structs.replace(new, headers=_with_context(new.headers))

    @contextmanager
    def span(self: Any, tasks: Iterable[NewTask | bytes]) -> Changed:
        name = _name(self.address)
        attributes = {**_about(name, "put", "send"), **_count(tasks)}
        with _within(_tracer().start_span(f"put {name}", kind=SpanKind.PRODUCER, attributes=attributes)):
            yield (with_context(tasks),), {}

    return _traced(original, span)


def _leasing(original: Any) -> Any:
    """An ack that brings the next task has its own span within the time of the lease."""

    def came(address: str, trip: Any, began: int) -> Any:
        if trip.tasks:
            queue, links = _name(address), _links(split_headers(task.payload)[1] for task in trip.tasks)
            attributes = {**_about(queue, "lease", "receive"), BATCH_COUNT: len(trip.tasks)}
            _record(f"lease {queue}", SpanKind.CLIENT, attributes, links, began)
        return trip

    @contextmanager
    def settling(address: str, settle: Any) -> Iterator[None]:
        with ExitStack() as spans:
            for target, settlement in settle:
                spans.enter_context(_settled(address, [target], settlement))
            yield

    if not inspect.iscoroutinefunction(original):

        def plain(self: Any, seconds: float, count: int, wait_seconds: float, settle: Any = ()) -> Any:
            began = time.time_ns()
            with settling(self.address, settle):
                trip = original(self, seconds, count, wait_seconds, settle)
            return came(self.address, trip, began)

        return plain

    async def lease(self: Any, seconds: float, count: int, wait_seconds: float, settle: Any = ()) -> Any:
        began = time.time_ns()
        with settling(self.address, settle):
            trip = await original(self, seconds, count, wait_seconds, settle)
        return came(self.address, trip, began)

    return lease


@contextmanager
def _settled(address: str, targets: Sequence[Any], settlement: Any) -> Iterator[None]:
    queue, verb = _name(address), SETTLING.get(settlement.kind, "release")
    links = _links(getattr(task, "headers", {}) for task in targets)
    attributes = {**_about(queue, verb, "settle"), BATCH_COUNT: len(targets)}
    with _within(_tracer().start_span(f"{verb} {queue}", kind=SpanKind.CLIENT, attributes=attributes, links=links)):
        yield


def _settling(original: Any) -> Any:
    """The span is of what was tried, whatever came of it."""

    @contextmanager
    def span(self: Any, target: Any, settlement: Any) -> Changed:
        with _settled(self.address, [target], settlement):
            yield (target, settlement), {}

    return _traced(original, span)


def _settling_many(original: Any) -> Any:
    @contextmanager
    def span(self: Any, tasks: Iterable[Any], settlement: Any) -> Changed:
        targets = list(tasks)
        with _settled(self.address, targets, settlement):
            yield (targets, settlement), {}

    return _traced(original, span)


def _running(original: Any) -> Any:
    if not inspect.iscoroutinefunction(original):

        def plain(self: Any, handler: Callable[[Any], object], **options: Any) -> Any:
            def traced(task: Any) -> object:
                with process(task, _name(self.address)):
                    return handler(task)

            return original(self, traced, **options)

        return plain

    async def run(self: Any, handler: Callable[[Any], Awaitable[object]], **options: Any) -> Any:
        async def traced(task: Any) -> object:
            with process(task, _name(self.address)):
                return await handler(task)

        return await original(self, traced, **options)

    return run

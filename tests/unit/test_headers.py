"""Headers: what is taken, how frames and tasks carry them, and what a Monitor tells members that can't read them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import FrameError, IncompatibleVersion, InvalidHeaders
from roq.pubsub.monitor.membership import Membership
from roq.pubsub.monitor.takeover import Takeover
from roq.pubsub.subscription import Message
from roq.wire import monitor as wire
from roq.wire.frame import (
    HEADERS_VERSION,
    FrameKind,
    Item,
    bundle_body,
    encode_bundle,
    encode_control,
    encode_data,
    parse,
    payloads,
)
from roq.wire.headers import (
    HEADERS_BYTES_MAX,
    MARK,
    check_headers,
    check_message_headers,
    priority_of,
    split_headers,
    ttl_ms,
    with_headers,
)
from tests.unit.small_queue import USE, P, Queue, S, notices

names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20).filter(lambda one: one[:4] != "roq-")
headers_of_any_kind = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5)
items = st.one_of(st.binary(max_size=20), st.tuples(st.binary(max_size=20), headers_of_any_kind))
OLD = 1


@given(headers_of_any_kind)
def test_headers_are_copied_and_counted(headers: dict[str, str]) -> None:
    copied, size = check_headers(headers)
    assert (copied, copied is headers) == (headers, False)
    assert size == sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "content-type": "text/plain", "ce-id": "1"},
        {"digest": b"\0\xff", "ünïcode and a space": ""},
        {"n": "v" * (HEADERS_BYTES_MAX - 1)},
    ],
)
def test_these_are_taken(headers: dict[str, str | bytes]) -> None:
    assert check_headers(headers)[0] == headers


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"": "x"}, "name"),
        ({"a\nb": "x"}, "name"),
        ({b"a": "x"}, "name"),
        ({"roq-reply": "x"}, "RoQ's own"),
        ({"a": 1}, "'a' is text or bytes, got int"),
        ({"a": None}, "got NoneType"),
        ({"traceparent": b"00"}, "'traceparent' is text"),
        ({"ce-type": b"x"}, "'ce-type' is text"),
        ({"a": "\ud800"}, "surrogate"),
        ({"n": "v" * HEADERS_BYTES_MAX}, f"{HEADERS_BYTES_MAX + 1} bytes"),
        ([("a", "b")], "got list"),
        ("a=b", "got str"),
    ],
)
def test_these_are_refused(headers: Any, told: str) -> None:
    with pytest.raises(InvalidHeaders, match=told):
        check_headers(headers)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, (0, 0)),
        ({"roq-priority": "9"}, (9, 0)),
        ({"roq-priority": "-128", "roq-ttl": "30"}, (-128, 30_000)),
        ({"roq-ttl": "0.5"}, (0, 500)),
        ({"roq-ttl": "0.0004"}, (0, 1)),
        ({"roq-ttl": "316224000"}, (0, 316_224_000_000)),
    ],
)
def test_what_a_message_may_ask_of_groups(headers: dict[str, str | bytes], found: tuple[int, int]) -> None:
    assert check_message_headers({**headers, "n": "1"})[0] == {**headers, "n": "1"}
    assert (priority_of(headers), ttl_ms(headers)) == found


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"roq-priority": "128"}, "-128 to 127"),
        ({"roq-priority": "1.5"}, "a whole number as text"),
        ({"roq-priority": b"1"}, "got b'1'"),
        ({"roq-priority": "٣"}, "a whole number"),
        ({"roq-ttl": "0"}, "more than 0"),
        ({"roq-ttl": "-1"}, "more than 0"),
        ({"roq-ttl": "1e3"}, "as '30' or '0.5'"),
        ({"roq-ttl": ""}, "seconds as text"),
        ({"roq-ttl": "316224001"}, "at most 316224000"),
        ({"roq-other": "1"}, "a message may have roq-priority and roq-ttl of them"),
    ],
)
def test_what_groups_would_not_understand_is_refused_when_it_is_published(headers: Any, told: str) -> None:
    with pytest.raises(InvalidHeaders, match=told):
        check_message_headers(headers)


@pytest.mark.parametrize("name", ["roq-priority", "roq-ttl"])
def test_a_task_has_no_such_headers(name: str) -> None:
    with pytest.raises(InvalidHeaders, match="RoQ's own"):
        with_headers(b"", {name: "1"})


@given(st.lists(items, max_size=5))
def test_a_frame_with_headers_comes_back(batch: list[Item]) -> None:
    frame = encode_data(b"t", 7, 3, 11, 9, 4, batch, 5, HEADERS_VERSION)
    topic, header, body = parse(frame)
    assert (topic, header.version, header.count) == (b"t", HEADERS_VERSION, len(batch))
    assert payloads(header, body) == batch
    _, bundle, inner = parse(encode_bundle(7, 3, 12, [frame, frame], 5))
    assert (bundle.kind, bundle_body(inner)) == (FrameKind.BUNDLE, [frame, frame])


@pytest.mark.parametrize(
    "body",
    [
        [[b"x", {"a": 1}]],
        [[b"x", {"a": None}]],
        [[b"x", {b"a": "x"}]],
        [[b"x"]],
        [[b"x", {}, 1]],
        [["x", {}]],
        ["x"],
        [[b"x", []]],
    ],
)
def test_nonsense_instead_of_headers_is_refused(body: Any) -> None:
    frame = encode_data(b"t", 7, 3, 11, 9, 4, body, 5, HEADERS_VERSION)
    with pytest.raises(FrameError):
        payloads(*parse(frame)[1:])


def test_only_data_has_that_version() -> None:
    frame = bytearray(encode_control(FrameKind.FIN, 7, 3, 11, None, 5))
    frame[1] = HEADERS_VERSION
    with pytest.raises(FrameError, match="version 2"):
        parse(bytes(frame))


def test_an_older_program_is_not_sent_headers_as_something_else() -> None:
    frame = bytearray(encode_data(b"t", 7, 3, 11, 9, 4, [(b"x", {"a": "b"})], 5, HEADERS_VERSION))
    frame[2] = 1  # what 0.1 would make of its body
    with pytest.raises(FrameError):
        payloads(*parse(bytes(frame))[1:])


def test_a_message_says_what_it_has() -> None:
    bare, annotated = Message("t", b"x", 7, 1, 5), Message("t", b"x", 7, 1, 5, {"a": "b"})
    assert (bare.headers, annotated.headers) == ({}, {"a": "b"})
    assert copy.deepcopy(annotated) == annotated != bare
    assert pickle.dumps(annotated), "as it goes to other processes"
    assert msgspec.to_builtins(annotated)["headers"] == {"a": "b"}
    assert len({bare, annotated, copy.deepcopy(annotated)}) == 2


# --- members of version 0.1 -------------------------------------------------------------------------------------------


def joined(queue: Queue, subscriber: int, protocol: int) -> None:
    queue.machine.join_subscriber(wire.JoinSubscriber(subscriber, (">",), False, protocol), b"s", queue.now)


def reported(queue: Queue, needs: int) -> wire.Heard:
    report = wire.PublisherReport(P, 1, "A", "", 0, 0, 0, 0, 0.0, needs)
    (heard,) = notices(queue.machine.publisher_report(report, b"p", queue.now), wire.Heard)
    assert isinstance(heard, wire.Heard)
    return heard


def test_publishers_hear_what_every_subscriber_understands() -> None:
    queue = Queue("A")
    assert queue.join().protocol == wire.PROTOCOL
    joined(queue, S, wire.PROTOCOL)
    assert reported(queue, OLD).protocol == wire.PROTOCOL
    joined(queue, S + 1, OLD)
    assert reported(queue, OLD).protocol == OLD
    assert queue.join(P + 1).protocol == OLD
    queue.machine.leave(S + 1, queue.now)
    assert reported(queue, OLD).protocol == wire.PROTOCOL


def test_a_subscriber_that_is_evicted_or_upgraded_holds_nobody_back() -> None:
    queue = Queue("A")
    joined(queue, S, OLD)
    joined(queue, S, wire.PROTOCOL)
    assert queue.machine.understood(queue.now) == wire.PROTOCOL
    joined(queue, S + 1, OLD)
    queue.tick(31.0)
    assert queue.machine.understood(queue.now) == wire.PROTOCOL


def test_who_can_not_read_what_is_sent_is_refused_in_words() -> None:
    queue = Queue("A")
    queue.join()
    reported(queue, wire.PROTOCOL)
    with pytest.raises(IncompatibleVersion, match="upgrade this subscriber"):
        joined(queue, S, OLD)
    joined(queue, S, wire.PROTOCOL)
    queue.machine.leave(P, queue.now)
    joined(queue, S + 1, OLD)


def test_a_publisher_of_0_1_is_confirmed_by_the_monitor() -> None:
    queue = Queue("A")
    queue.machine.join_publisher(wire.JoinPublisher(P), b"p", queue.now)  # as it joined: no more fields
    queue.opened(1, "A")
    assert notices(queue.machine.mark_seen(P, 1, 7), wire.Forwarded) == [wire.Forwarded(1, 7)]
    assert notices(queue.fin(1, "A"), wire.Forwarded) == [wire.Forwarded(1, 0)]
    assert queue.machine.mark_seen(P + 1, 1, 7) == [], "nobody it knows"


def test_all_others_are_confirmed_by_their_exchange() -> None:
    queue = Queue("A")
    queue.machine.join_publisher(wire.JoinPublisher(P, protocol=wire.PROTOCOL), b"p", queue.now)
    queue.opened(1, "A")
    assert queue.machine.mark_seen(P, 1, 7) == []
    assert notices(queue.fin(1, "A"), wire.Forwarded) == []


def test_what_is_needed_outlives_a_monitor() -> None:
    queue = Queue("A")
    queue.machine.join_publisher(wire.JoinPublisher(P, protocol=wire.PROTOCOL, needs=wire.PROTOCOL), b"p", queue.now)
    with pytest.raises(IncompatibleVersion):
        joined(queue, S, OLD)


def test_a_monitor_that_has_taken_over_says_nothing_of_subscribers_it_may_not_know() -> None:
    machine = Membership(3, USE, Takeover(100.0, {S: 100.0}))
    assert machine.understood(100.5) == 0
    machine.join_subscriber(wire.JoinSubscriber(S, (">",), True, OLD), b"s", 100.5)
    assert machine.understood(100.6) == OLD


# --- tasks ------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=40), st.one_of(st.none(), headers_of_any_kind))
def test_what_is_stored_of_a_task_comes_back(payload: bytes, headers: dict[str, str] | None) -> None:
    assert split_headers(with_headers(payload, headers)) == (payload, headers or {})
    assert split_headers(with_headers(MARK + payload, headers)) == (MARK + payload, headers or {})


@given(st.binary(max_size=40).filter(lambda payload: not payload.startswith(MARK)))
def test_without_headers_a_payload_is_stored_as_it_is(payload: bytes) -> None:
    assert with_headers(payload, None) is payload
    assert with_headers(payload, {}) is payload


def test_as_many_headers_as_fit() -> None:
    headers = {f"{number:03x}": "" for number in range(HEADERS_BYTES_MAX // 3)}
    assert split_headers(with_headers(b"x", headers)) == (b"x", headers)


@given(st.binary(max_size=20))
def test_what_only_begins_like_headers_is_a_payload(rest: bytes) -> None:
    stored = MARK + rest
    payload, headers = split_headers(stored)
    assert payload == stored or stored == MARK + rest[: len(rest) - len(payload)] + payload
    assert headers == {} or payload != stored


@pytest.mark.parametrize(
    ("rest", "payload"),
    [
        (b"\x01\x00\x80rest", b"rest"),
        (b"\x03\x00\xde\x00\x00", b""),  # as another msgpack writes it
        (b"\x02\x00\x80", None),  # longer than what there is
        (b"\x01\x00", None),
        (b"\x01", None),
        (b"\x02\x00\x80\x80", None),
        (b"\x01\x00\x90", None),
    ],
)
def test_lengths_that_fit_and_that_do_not(rest: bytes, payload: bytes | None) -> None:
    assert split_headers(MARK + rest) == (MARK + rest if payload is None else payload, {})


def with_headers_of(payload: bytes, headers: Any) -> bytes:
    """As they were written, whoever wrote them."""
    encoded = msgspec.msgpack.encode(headers)
    return MARK + len(encoded).to_bytes(2, "little") + encoded + payload


def test_values_that_are_neither_text_nor_bytes_are_no_headers() -> None:
    stored = with_headers_of(b"x", {"a": 1})
    assert split_headers(stored) == (stored, {})

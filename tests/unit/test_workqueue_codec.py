"""Verbs into records: what is refused, and what the answers look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roq.errors import CallError, InvalidConfiguration, PayloadTooLarge, TemporaryError
from roq.wire.task import ERROR_BYTES_MAX, LeasedTask, NewTask, Settlement, cut_error, milliseconds
from roq.wire.work_queue import TaskSettings
from roq.workqueue import codec
from roq.workqueue.fold import Known, RecordRefused, Settled, TasksDelivered
from roq.workqueue.records import DeadLetter, Requeue
from roq.workqueue.state import State

GOOD = codec.token(7 << 10 | 3, 0xABC)


def put(**task: Any) -> object:
    return codec.RequestCodec(1).put([NewTask(**{"payload": b"", **task})], TaskSettings(payload_bytes_max=10), 0)


def lease(seconds: float = 1.0, count: int = 1, wait_seconds: float = 0.0) -> object:
    return codec.RequestCodec(1).lease(seconds, count, wait_seconds, 0)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (PayloadTooLarge, lambda: put(payload=b"x" * 11)),
        (InvalidConfiguration, lambda: put(delay_seconds=-0.1)),
        (InvalidConfiguration, lambda: put(delay_seconds=float("nan"))),
        (InvalidConfiguration, lambda: put(delay_seconds=float("inf"))),
        (InvalidConfiguration, lambda: put(priority=128)),
        (InvalidConfiguration, lambda: put(priority=-129)),
        (InvalidConfiguration, lambda: put(priority=1.5)),
        (InvalidConfiguration, lambda: put(dedup_key="k" * 257)),
        (InvalidConfiguration, lambda: put(dedup_key="\udc80")),
        (InvalidConfiguration, lambda: codec.RequestCodec(1).put([NewTask(b"")] * 10_001, TaskSettings(), 0)),
        (InvalidConfiguration, lambda: lease(seconds=0)),
        (InvalidConfiguration, lambda: lease(seconds=-1)),
        (InvalidConfiguration, lambda: lease(seconds=float("nan"))),
        (InvalidConfiguration, lambda: lease(count=0)),
        (InvalidConfiguration, lambda: lease(count=1001)),
        (InvalidConfiguration, lambda: lease(wait_seconds=-1)),
        (InvalidConfiguration, lambda: lease(wait_seconds=float("nan"))),
        (InvalidConfiguration, lambda: codec.settlement(Settlement.extend(GOOD, 0), 0)),
        (InvalidConfiguration, lambda: codec.settlement(Settlement.release(GOOD, -1), 0)),
        (CallError, lambda: codec.settlement(Settlement.ack(""), 0)),
        (CallError, lambda: codec.settlement(Settlement.ack("7.1024.0000000000000abc"), 0)),
        (CallError, lambda: codec.settlement(Settlement.ack("99999999999999999999.0.0000000000000abc"), 0)),
        (CallError, lambda: codec.settlement(Settlement.ack("9999999999999999999.0.0000000000000abc"), 0)),
        (CallError, lambda: codec.settlement(Settlement.ack(GOOD + "\n"), 0)),
        (CallError, lambda: codec.settlement(Settlement.ack("1526590800--4c8f-0.json"), 0)),
        (CallError, lambda: codec.chosen(["no id"])),
    ],
)
def test_wrong_calls_are_refused(kind: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(kind):
        call()


def test_a_refused_put_uses_no_number() -> None:
    one = codec.RequestCodec(5)
    with pytest.raises(PayloadTooLarge):
        one.put([NewTask(b""), NewTask(b"xx")], TaskSettings(payload_bytes_max=1), 0)
    assert [push.sequence for push in one.put([NewTask(b""), NewTask(b"x")], TaskSettings(), 0)] == [1, 2]


def test_ids_and_tokens_read_back() -> None:
    for key in ((0, 1), (2**64 - 1, 10**18)):
        assert codec.parse_task_id(codec.task_id(key)) == key
    for delivery, instance in ((1 << 10, 1), ((2**54 - 1) << 10 | 1023, 2**64 - 1)):
        assert codec.parse_token(codec.token(delivery, instance)) == (delivery, instance)


def test_a_token_of_an_older_lease_is_answered_none() -> None:
    one, state = codec.RequestCodec(5), State()
    (push,) = one.put([NewTask(b"a")], TaskSettings(), 0)
    assert codec.put_id(push, state.apply(push)) == "0000000000000005-1"
    (delivered,) = state.apply(one.lease(1.0, 1, 0.0, 0))
    assert isinstance(delivered, TasksDelivered)
    (leased,) = codec.leased(delivered.handed, one.id, codec.inline)
    assert leased == LeasedTask("0000000000000005-1", "2.0.0000000000000005", b"a", 1, 0, 0, 1000)

    def answer(settlement: Settlement) -> str | None:
        return codec.settled(settlement, state.apply(codec.settlement(settlement, 0)))

    assert answer(Settlement.extend(leased.token, 5)) == leased.token
    assert answer(Settlement.release(leased.token)) == ""
    for settlement in (
        Settlement.ack(leased.token),
        Settlement.extend(leased.token, 1),
        Settlement.release(leased.token),
        Settlement.reject(leased.token, ""),
    ):
        assert answer(settlement) is None


def test_answers_to_a_put() -> None:
    (push,) = codec.RequestCodec(5).put([NewTask(b"a")], TaskSettings(), 0)
    assert codec.put_id(push, [Known((6, 7))]) == "0000000000000006-7"
    with pytest.raises(TemporaryError):
        codec.put_id(push, [RecordRefused()])
    assert codec.settled(Settlement.ack(GOOD), [Settled(False)]) is None


def test_long_error_texts_are_cut_at_a_character() -> None:
    record = codec.settlement(Settlement.reject(GOOD, "é" * ERROR_BYTES_MAX), 0)
    assert isinstance(record, DeadLetter)
    assert record.error == "é" * (ERROR_BYTES_MAX // 2)
    odd = codec.settlement(Settlement.release(GOOD, 0.0, "a" + "é" * ERROR_BYTES_MAX), 0)
    assert isinstance(odd, Requeue)
    assert len(odd.error.encode()) == ERROR_BYTES_MAX - 1
    assert cut_error("\udc80") == "?"


def test_times_are_rounded_up() -> None:
    assert [milliseconds(s) for s in (0.0, 0.0001, 0.001, 1.5, 0.3, 1e9)] == [0, 1, 1, 1500, 300, 10**12]

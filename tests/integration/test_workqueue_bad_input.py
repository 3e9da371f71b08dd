"""The contract of work queues, wrong calls: refused with a clear error, nothing stored or lost, on every kind of address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roq.errors import CallError, LeaseLost, PayloadTooLarge
from roq.workqueue.contract import DEDUP_KEY_BYTES_MAX, LEASE_COUNT_MAX
from tests.integration.workqueue_rig import EVERY_WRONG_CALL, LONG, Faces, counts, one

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize(("work_address", "faces"), EVERY_WRONG_CALL, indirect=True)]


def test_a_task_over_a_limit_is_refused_and_nothing_is_stored(faces: Faces) -> None:
    queue = faces.open(payload_bytes_max=1000)
    with pytest.raises(PayloadTooLarge):
        queue.put(b"x" * 1001)
    with pytest.raises(PayloadTooLarge):
        queue.put_many([b"fits", b"x" * 1001])
    for wrong in (
        {"delay_seconds": -1.0},
        {"delay_seconds": float("nan")},
        {"delay_seconds": float("inf")},
        {"priority": 128},
        {"priority": -129},
        {"dedup_key": "k" * (DEDUP_KEY_BYTES_MAX + 1)},
    ):
        with pytest.raises(CallError):
            queue.put(b"x", **wrong)
    with pytest.raises(TypeError):
        queue.put("text")
    assert counts(queue) == (0, 0, 0, 0)
    queue.put(b"x" * 1000, priority=127, dedup_key="k" * DEDUP_KEY_BYTES_MAX)


def test_a_wrong_lease_is_refused(work_queue: Any) -> None:
    work_queue.put(b"x")
    for wrong in ((0.0,), (-1.0,), (float("nan"),), (LONG, 0), (LONG, LEASE_COUNT_MAX + 1), (LONG, 1, -1.0)):
        with pytest.raises(CallError):
            work_queue.lease(*wrong)
        assert counts(work_queue) == (1, 0, 0, 0), wrong
    one(work_queue).ack()


def test_a_wrong_settlement_leaves_the_lease(work_queue: Any) -> None:
    work_queue.put(b"x")
    task = one(work_queue)
    wrong: list[Callable[[], Any]] = [lambda: task.release(-1.0), lambda: task.extend(0.0), lambda: task.extend(-1.0)]
    for settle in wrong:
        with pytest.raises(CallError):
            settle()
    assert not task.lost
    task.ack()


def test_a_malformed_token_is_refused(work_queue: Any) -> None:
    work_queue.put(b"x")
    task = one(work_queue)
    wrong: list[Callable[[str], Any]] = [work_queue.ack, work_queue.release, lambda token: work_queue.extend(token, LONG)]
    for token in ("", "nonsense", "../../etc/passwd", "1.0.zz", "é" * 300, "\0", "-1.5.0123456789abcdef"):
        for settle in wrong:
            with pytest.raises((CallError, LeaseLost)):
                settle(token)
        assert counts(work_queue) == (0, 0, 1, 0), token
    task.ack()


def test_unknown_ids_change_nothing(work_queue: Any) -> None:
    task_id = work_queue.put(b"x")
    one(work_queue).reject("no")
    work_queue.requeue_dead()
    assert work_queue.requeue_dead([task_id]) == 0  # known, but not dead
    assert work_queue.remove_dead([task_id]) == 0
    for wrong in ("nonsense", "../work_queue", ""):
        with pytest.raises(CallError):
            work_queue.remove_dead([wrong])
    assert counts(work_queue) == (1, 0, 0, 0)

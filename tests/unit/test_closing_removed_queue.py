"""A work queue that was removed while somebody had its tasks: closing it closes it, for plain code and for loops."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

import roq
from roq import blocking
from roq.errors import LogUnavailable, RoqError, WorkQueueNotFound

GONE = WorkQueueNotFound("work queue 'tasks' does not exist")
REASONS = pytest.mark.parametrize("reason", [GONE, LogUnavailable("no master leads")], ids=["removed", "away"])


@REASONS
def test_plain_code_just_closes(monkeypatch: pytest.MonkeyPatch, reason: RoqError) -> None:
    queue = blocking.open_queue("memory:")
    with queue:
        queue.put(b"x")
        leases = queue.leases(60)
        next(leases)
        monkeypatch.setattr(queue._keeper, "settle", settle := Mock(side_effect=reason))
        queue.close()
        assert settle.called, "it was held"
    assert queue.closed


@REASONS
async def test_a_loop_just_closes(monkeypatch: pytest.MonkeyPatch, reason: RoqError) -> None:
    queue = roq.open_queue("memory:")
    async with queue:
        await queue.put(b"x")
        leases = queue.leases(60)
        await anext(leases)
        monkeypatch.setattr(queue._keeper, "settle", settle := Mock(side_effect=reason))
        await queue.close()
        assert settle.called, "it was held"
    assert queue.closed

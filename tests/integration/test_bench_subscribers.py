"""Idle subscribers of one Exchange: all are attached, and each takes little of its memory."""

from __future__ import annotations

import pytest

from benchmarks.subscribers import GOAL_BYTES, measured


@pytest.mark.quick
async def test_hundreds_at_once_are_attached_and_cost_little() -> None:
    _, each = await measured(300, 900)
    assert 0 < each < GOAL_BYTES

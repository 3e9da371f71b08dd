"""Marks of an Exchange's sockets: how many frames they queue. What comes of it: tests/integration/test_pubsub_edges.py."""

from __future__ import annotations

import pytest
import zmq

from roq.runtime.sockets import exchange_back
from roq.wire.assignment import Overflow

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("overflow", "max_frame_bytes", "frames"),
    [
        (Overflow.DROP, 128 * 1024, 128),
        (Overflow.DROP, MIB, 64),
        (Overflow.DROP, 64 * MIB, 32),
        (Overflow.BLOCK, 128 * 1024, 32),
    ],
)
def test_a_back_queues_fewer_frames_where_they_may_be_larger(overflow: Overflow, max_frame_bytes: int, frames: int) -> None:
    socket = exchange_back(max_frame_bytes, overflow)
    try:
        assert socket.get(zmq.SNDHWM) == frames
    finally:
        socket.close(0)

"""What every child process of an HCM does besides its own work: announce itself, and beat its heartbeat slot."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from roq.runtime.liveness import BEAT_SECONDS, HeartbeatBoard
from roq.wire.child import ChildSpec


def announce_ready(spec: ChildSpec) -> None:
    """Tell the HCM that this process serves. An HCM that is away finds out from the heartbeat instead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        try:
            out.sendto(f"ready {os.getpid()} {spec.process.name}".encode(), spec.ready_socket)
        except OSError:
            return  # no HCM listens just now; its successor adopts us by pid and heartbeat


async def beat(board: HeartbeatBoard, slot: int) -> None:
    """Beat for ever; a hung loop stops beating, and that is the point."""
    while True:
        board.beat(slot)
        await asyncio.sleep(BEAT_SECONDS)


def open_board(spec: ChildSpec) -> HeartbeatBoard:
    """The host's heartbeat board."""
    return HeartbeatBoard(Path(spec.board))

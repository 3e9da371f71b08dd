"""What every child process of an HCM does besides its own work: announce itself, and beat its heartbeat slot."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

from roq.errors import ProcessFailed
from roq.runtime.liveness import BEAT_SECONDS, HeartbeatBoard
from roq.wire.child import ChildSpec


def announce_ready(spec: ChildSpec) -> None:
    """Tell the HCM that this process serves. An HCM that is away finds out from the heartbeat instead."""
    send_datagram(f"ready {os.getpid()} {spec.process.name}".encode(), spec.ready_socket)


def send_datagram(data: bytes, path: str) -> None:
    """To a Unix socket, if somebody reads there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        try:
            out.sendto(data, path)
        except OSError:
            return  # no HCM listens just now; its successor adopts us by pid and heartbeat


async def beat(board: HeartbeatBoard, slot: int) -> None:
    """Beat for ever; a hung loop stops beating, and that is the point."""
    while True:
        board.beat(slot)
        await asyncio.sleep(BEAT_SECONDS)


class HostLease:
    """The host's lease as one process sees it. It counts once it was seen to run: an HCM that has just come back starts what is
    wanted before it can renew it."""

    def __init__(self, board: HeartbeatBoard) -> None:
        self._board = board
        self._given = False

    def check(self) -> None:
        """Raises ProcessFailed when it is over: what lives on unseen must not carry what goes on elsewhere."""
        if not self._board.lease_is_over(time.monotonic()):
            self._given = True
        elif self._given:
            raise ProcessFailed("the HCM has not renewed this host's lease: the process ends, it may be replaced elsewhere")


def open_board(spec: ChildSpec) -> HeartbeatBoard:
    """The host's heartbeat board."""
    return HeartbeatBoard(Path(spec.board))

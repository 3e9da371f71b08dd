"""In place of an Exchange's thread with ZeroMQ's proxy (exchange/process.py): what the proxy does, message by message."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq

from roq.pubsub.exchange.process import SUBSCRIBE_ALL, ForwardedTotals
from roq.runtime import sockets
from roq.wire.assignment import QueueSettings
from roq.wire.frame import welcome
from roq.wire.limits import FRAME_OVERHEAD_BYTES

AT_ONCE = 100  # messages of one direction before the other one


class SimulatedForwarder:
    """The same face."""

    def __init__(self, address: str, front_port: int, back_port: int, settings: QueueSettings) -> None:
        self._front: Any = sockets.exchange_front(settings.max_frame_bytes + FRAME_OVERHEAD_BYTES, settings.overflow)
        self._back: Any = sockets.exchange_back(settings.max_frame_bytes, settings.overflow)
        self.front_port = sockets.bind(self._front, address, front_port)
        self.back_port = sockets.bind(self._back, address, back_port)
        self._held: list[bytes] | None = None  # a message that the back does not take
        self.traffic = ForwardedTotals()
        self.alive = True
        self._loop = asyncio.get_running_loop()
        self._turning = False

    def start(self, token: str) -> None:
        """Forward from now on."""
        self._front.send(SUBSCRIBE_ALL)
        self._front.send(welcome(token))
        self._front.on_news = self._back.on_news = self._soon
        self._soon()

    def _soon(self) -> None:
        if not self._turning and self.alive:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        if not self.alive:
            return
        for _ in range(AT_ONCE):
            if not self._forward():
                break
        else:
            self._soon()
        try:
            while True:
                self._front.send_multipart(self._back.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return

    def _forward(self) -> bool:
        try:
            parts = self._held or self._front.recv_multipart(zmq.NOBLOCK)
            self._held = parts
            self._back.send_multipart(parts)
        except zmq.Again:
            return False
        self._held = None
        size = sum(map(len, parts))
        frames_in, bytes_in, frames_out, bytes_out = self.traffic
        self.traffic = ForwardedTotals(frames_in + 1, bytes_in + size, frames_out + 1, bytes_out + size)
        return True

    def refresh(self) -> None:
        """The counts are always new."""

    def stop(self) -> None:
        """What was not taken is gone."""
        self.alive = False
        self._front.close(0)
        self._back.close(0)

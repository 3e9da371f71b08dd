"""A PathSender at real fronts of Exchanges, with the Monitor's words played here: what leaves on which path.

Not covered: the decisions about paths (tests/unit/test_path.py) and the replay buffer (test_replay_buffer.py) by themselves.
"""

from __future__ import annotations

import asyncio

import pytest
import zmq

from roq.pubsub import path_sender as module
from roq.pubsub.path_sender import PathSender
from roq.wire.frame import FrameKind, encode_data, mark_body, parse, welcome
from roq.wire.member_id import MemberId
from roq.wire.monitor import ExchangeAddress
from tests.harness import libzmq


class Front:
    """The front of an Exchange; `kinds`: of the frames that came, (kind, path)."""

    def __init__(self, id: str) -> None:
        self.socket = libzmq.socket(zmq.XSUB)
        self.address = ExchangeAddress(id, "127.0.0.1", libzmq.bind(self.socket, "127.0.0.1", 0), 1, 1)
        self.socket.send(b"\x01")
        self.socket.send(welcome(self.address.token))
        self.kinds: list[tuple[FrameKind, int]] = []
        self.marks: list[int] = []

    def read(self) -> None:
        try:
            while True:
                _, header, body = parse(self.socket.recv(zmq.NOBLOCK))
                self.kinds.append((FrameKind(header.kind), header.path))
                if header.kind == FrameKind.MARK:
                    self.marks.append(mark_body(body))
        except zmq.Again:
            pass

    async def until(self, kind: FrameKind, path: int) -> None:
        async with asyncio.timeout(20):
            while (kind, path) not in self.kinds:
                await asyncio.sleep(0.005)
                self.read()


@pytest.mark.quick
@pytest.mark.parametrize("part", [1, 8], ids=["in parts", "at once"])
async def test_a_closing_path_that_is_begun_again_ends_once(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits behind a replay when an Exchange that was left dies: the next path replays, and has the only end."""
    monkeypatch.setattr(module, "PART_FRAMES", 1)
    monkeypatch.setattr(module, "PART_SECONDS", 60.0)
    fronts = {id: Front(id) for id in "ABCD"}
    sent = 0
    sender = PathSender(MemberId(7), lambda: None, lambda: None, lambda: sent)
    try:
        sender.assign(fronts["A"].address, 1)
        await fronts["A"].until(FrameKind.OPEN, 1)
        for sent in range(1, 4):
            sender.send(encode_data(b"t", 7, sender.path, sent, sent - 1, sent - 1, [bytes(1000)], 0), sent)
        sender.bundle_bytes = 1000  # a part is one frame
        sender.assign(fronts["B"].address, 2)
        await fronts["B"].until(FrameKind.OPEN, 2)
        sender.abandoned(fronts["B"].address.token, 2)
        sender.assign(fronts["C"].address, 3)
        await fronts["C"].until(FrameKind.MARK, 3)
        closing = asyncio.create_task(sender.finish(10))
        await asyncio.sleep(0)
        sender.abandoned(fronts["A"].address.token, 1)
        monkeypatch.setattr(module, "PART_FRAMES", part)
        sender.assign(fronts["D"].address, 4)
        await fronts["D"].until(FrameKind.MARK, 4)
        while (FrameKind.FIN, 4) not in fronts["D"].kinds:
            sender.forwarded(4, fronts["D"].marks[-1])
            await asyncio.sleep(0.005)
            fronts["D"].read()
        sender.forwarded(4, 0)
        async with asyncio.timeout(5):
            assert await closing
        assert sender.mark_number == fronts["D"].marks[-1] + 1, "more than one FIN followed"
        assert fronts["D"].kinds.count((FrameKind.DATA, 4)) == 3
    finally:
        sender.close()
        for front in fronts.values():
            front.socket.close(0)

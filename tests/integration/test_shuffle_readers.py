"""Readers of a cluster's ranges over real sockets: what they opened is told, and whatever is wrong with one holder, another is
asked. Not covered: holders that die or are damaged (test_follower_reads.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from roq.runtime.loop_thread import LoopThread
from roq.runtime.rpc import RpcServer
from roq.shuffle.contract import Opened
from roq.wire import shuffle as wire
from tests.integration.follower_rig import SHUFFLE, Followers, made_in

Make = Callable[..., Followers]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from made_in(tmp_path)


@pytest.fixture
def stranger() -> Iterator[str]:
    """Endpoint of a server that answers every question with Done."""

    async def begin() -> RpcServer:
        async def handle(peer: bytes, request: msgspec.Struct) -> msgspec.Struct:
            return wire.FollowerDone()

        return RpcServer("127.0.0.1", 0, wire.Request, handle)

    async def end() -> None:
        server.close()

    thread = LoopThread("stranger")
    server = thread.call(begin())
    yield f"tcp://127.0.0.1:{server.port}"
    thread.call(end())
    thread.stop()


def test_a_holder_that_answers_nonsense_is_left_for_another(make: Make, stranger: str) -> None:
    followers = make()
    followers.write("a", 0, 5000)
    info = followers.info({0: "a"})
    followers.leader.hosts["a"] = stranger
    lied = followers.info({0: "a"}, counted=False)
    info = msgspec.structs.replace(info, followers=lied.followers)
    assert len(followers.read(info)) == 5000


def test_a_source_tells_what_its_number_stood_for(make: Make) -> None:
    followers = make()
    followers.write("a", 0, 5000)
    info = followers.info({0: "a"})
    for one in info.description.ranges:
        assert followers.source(info, one.number).opened == Opened(SHUFFLE, one.interval)

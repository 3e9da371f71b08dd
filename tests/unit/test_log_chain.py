"""A change of a log's metadata whose outcome is not known: whose write is it that is found there? ZooKeeper is a twin."""

from __future__ import annotations

from functools import partial
from typing import cast

import msgspec
import pytest

from roq.coordination import paths
from roq.coordination.link import Node, VersionConflict
from roq.coordination.session import Session
from roq.errors import LogFenced, ZooKeeperUnavailable
from roq.log.replicated import metadata
from roq.log.replicated.chain import Chain
from roq.log.replicated.metadata import LogMeta, owned, take
from roq.wire.assignment import from_json, to_json


class ZooKeeper:
    """One znode. cut: how many writes are answered by a broken connection. kept: whether those have taken effect."""

    def __init__(self) -> None:
        self.data, self.version = to_json(LogMeta()), 0
        self.cut, self.kept = 0, False
        self.meanwhile: list[Chain] = []

    async def get(self, path: str) -> Node:
        assert path == paths.log("log")
        return Node(self.data, self.version, 1, 1, 0)

    async def set(self, path: str, data: bytes, version: int) -> int:
        if version != self.version:
            raise VersionConflict(path)
        broken = self.cut > 0
        self.cut -= broken
        if not broken or self.kept:
            self.data, self.version = data, self.version + 1
        if broken:
            raise ZooKeeperUnavailable(path)
        return self.version

    async def wait_connected(self) -> None:
        while self.meanwhile:
            await self.meanwhile.pop().change(partial(take, term=1))


async def a_chain(zookeeper: ZooKeeper) -> Chain:
    chain = Chain(cast(Session, zookeeper), "log")
    await chain.read()
    return chain


async def test_the_identical_take_of_another_process_is_not_our_own() -> None:
    zookeeper = ZooKeeper()
    first, second = await a_chain(zookeeper), await a_chain(zookeeper)
    zookeeper.cut, zookeeper.meanwhile = 1, [second]
    mine = await first.change(partial(take, term=1))
    assert (second.meta.epoch, mine.epoch) == (1, 2), "each its own epoch"
    with pytest.raises(LogFenced):
        await second.change(lambda meta: metadata.open_next(owned(meta, 1), "log~1.1", ("a", "b", "c")))
    await first.change(lambda meta: metadata.open_next(owned(meta, mine.epoch), "log~2.1", ("a", "b", "c")))


async def test_our_own_take_is_known_again() -> None:
    zookeeper = ZooKeeper()
    chain = await a_chain(zookeeper)
    zookeeper.cut, zookeeper.kept = 1, True
    assert (await chain.change(partial(take, term=1))).epoch == 1
    assert zookeeper.version == 1, "it was not done again"


async def test_metadata_of_version_0_1_is_read_and_read_by_it() -> None:
    zookeeper = ZooKeeper()
    fields = msgspec.json.decode(zookeeper.data)
    fields.pop("owner", None)
    zookeeper.data = msgspec.json.encode(fields)
    chain = await a_chain(zookeeper)
    await chain.change(partial(take, term=1))
    assert list(msgspec.json.decode(zookeeper.data))[: len(fields)] == list(fields), "what is new comes last"
    assert from_json(zookeeper.data, LogMeta) == chain.meta

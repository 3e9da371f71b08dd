"""What the stores of an idle log know of its last entry: readers get only what a store knows to be confirmed.

The real writer and the real storages; what one sends the other is carried by hand. Not covered: connections, tests/integration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from roq.coordination.session import SessionState
from roq.log.replicated import metadata
from roq.log.replicated.chain import Chain
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.log.replicated.writer import LogWriter
from roq.wire.store import Add, EntriesAdded
from tests.unit.test_store_storage import Bench

AWAY: Any = SimpleNamespace(state=SessionState.SUSPENDED)  # ZooKeeper is not needed
SEGMENT, NODES = "log~1.1", ("a", "b", "c")
SETTINGS = LogSettings(confirm_seconds=0.001, confirm_again_seconds=0.02, check_seconds=0.005)


class CarriedStores(Stores):
    """Storages. `passes(frame)`: whether it is carried to them."""

    def __init__(self) -> None:
        super().__init__(StaticDirectory(dict.fromkeys(NODES, "tcp://nowhere:1")))
        self.benches = {node: Bench() for node in NODES}
        for bench in self.benches.values():
            bench.open(SEGMENT)
        self.passes: Callable[[Add], bool] = lambda frame: True
        self.lost = 0
        self._sent = asyncio.Event()

    def send(self, host: str, add: Add) -> None:
        self._sent.set()
        if not self.passes(add):
            self.lost += 1
            return
        assert self.benches[host].ask("add", add) is None
        if add.entries and self.on_notice is not None:
            self.on_notice(host, EntriesAdded(add.segment, add.first, len(add.entries)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._sent.clear()
                await self._sent.wait()

    def confirmed(self) -> list[int]:
        return [bench.storage.confirmed(SEGMENT) for bench in self.benches.values()]


@pytest.fixture
async def stores() -> CarriedStores:
    return CarriedStores()


@pytest.fixture
async def writer(stores: CarriedStores) -> AsyncIterator[LogWriter]:
    chain = Chain(AWAY, "log")
    chain.meta = metadata.open_next(metadata.take(LogMeta(), 1), SEGMENT, NODES)
    writer = LogWriter("log", chain, stores, SETTINGS)
    yield writer
    await writer.close()


async def test_that_an_entry_is_confirmed_is_said_again_when_it_was_lost(writer: LogWriter, stores: CarriedStores) -> None:
    stores.passes = lambda frame: bool(frame.entries)
    writer.write(b"the last one", lambda result: None)
    await stores.until(lambda: stores.lost >= len(NODES))
    assert (writer.confirmed, stores.confirmed()) == (1, [0, 0, 0])
    stores.passes = lambda frame: True
    await stores.until(lambda: stores.confirmed() == [1, 1, 1])


async def test_a_store_that_begins_anew_learns_what_is_confirmed(writer: LogWriter, stores: CarriedStores) -> None:
    writer.write(b"the last one", lambda result: None)
    await stores.until(lambda: stores.confirmed() == [1, 1, 1])
    stores.benches["b"] = stores.benches["b"].reopened()
    assert stores.confirmed() == [1, 0, 1], "the journal has only what was confirmed when an entry came"
    await stores.until(lambda: stores.confirmed() == [1, 1, 1])


async def test_of_an_empty_segment_nothing_is_said(writer: LogWriter, stores: CarriedStores) -> None:
    stores.passes = lambda frame: False
    writer._tell_confirmed()
    assert stores.lost == 0

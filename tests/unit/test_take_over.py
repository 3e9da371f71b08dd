"""Taking a log over, with the real storage of every store and nothing but calls between them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roq.errors import CallError, DeadlineExceeded, LogFenced
from roq.log.replicated import takeover
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.log.replicated.stores import StaticDirectory
from roq.log.replicated.takeover import TakeOver
from roq.wire import store as wire
from roq.wire.store import EntriesAdded, EntriesRefused, Refusal
from tests.unit.test_store_storage import Bench, entry


class Benches:
    """As roq.log.replicated.stores.Stores, over benches of storage. off: stores that do not answer."""

    def __init__(self, names: str, opened: str) -> None:
        self.benches = {name: Bench() for name in names}
        self.directory = StaticDirectory({name: name for name in names})
        self.directory.alive |= set(names)
        self.off: set[str] = set()
        self.asked: list[tuple[str, wire.Request]] = []
        self.notice: Any = None
        for name in opened:
            self.benches[name].open()

    async def request(self, host: str, request: Any, expect: Any, seconds: float = 0.0) -> Any:
        await asyncio.sleep(0.001)
        if host in self.off:
            raise DeadlineExceeded("silent")
        bench = self.benches[host]
        self.asked.append((host, request))
        verb = "open_segment" if isinstance(request, wire.OpenSegment) else "fence"
        refusal = bench.ask(verb, request.segment, request.epoch)
        if refusal is not None:
            raise LogFenced("fenced") if refusal is Refusal.FENCED else CallError(refusal.name)
        if isinstance(request, wire.OpenSegment):
            return wire.StoreDone()
        if isinstance(request, wire.FenceLog):
            return wire.Fenced(bench.storage.confirmed(request.segment))
        positions = range(request.first, request.first + request.count)
        return wire.Recovered(request.first, [bench.storage.look(request.segment, position) for position in positions])

    def send(self, host: str, frame: wire.Add) -> None:
        if host in self.off:
            return
        refusal = self.benches[host].ask("add", frame)
        count = len(frame.entries)
        answer = EntriesAdded(frame.segment, frame.first, count)
        self.notice(host, answer if refusal is None else EntriesRefused(frame.segment, frame.first, count, refusal))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_node_that_lost_an_entry_is_not_made_sure_of_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """a and b acknowledged entry 2, a lost it, b is away; c never had it, and both places beside c fall silent in turn."""
    monkeypatch.setattr(takeover, "SECURE_SECONDS", 0.02)
    monkeypatch.setattr(takeover, "RETRY_SECONDS", 0.5)
    stores = Benches("abcd", opened="abc")
    for name, last in (("a", 2), ("b", 2), ("c", 1)):
        assert stores.benches[name].add(1, *(entry(position) for position in range(1, last + 1))) is None
    stores.benches["a"] = Bench()  # an empty disk under the old name
    stores.off |= {"b"}
    segment = SegmentMetadata("s", 1, SegmentState.RECOVERY, (Fragment(1, ("a", "b", "c")),))
    one = TakeOver("log", stores, LogMeta(2, 1, 2, 3, 2, 0, (segment,)))  # type: ignore[arg-type]
    stores.notice = one.notice
    recovering = asyncio.ensure_future(one.recover())
    await until(lambda: ("d", wire.OpenSegment("s", 2)) in stores.asked)
    stores.off |= {"d"}
    stores.benches["d"] = Bench()
    recovery = one._recovery
    assert recovery is not None
    assert recovery.writing is not None
    rounds = len(stores.asked)
    await until(lambda: len(stores.asked) > rounds + 6 or recovering.done())
    assert recovery.end is None, "nobody who knows said that entry 2 never was"
    stores.off.clear()
    await asyncio.wait_for(recovering, 10)
    assert recovery.end == 2
    assert {host for host, request in stores.asked if isinstance(request, wire.OpenSegment)} == {"d"}


async def test_a_node_that_was_silent_is_written_to_again_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """d took b's place and is silent now: c is asked anyway, and needs no announcement."""
    monkeypatch.setattr(takeover, "SECURE_SECONDS", 0.02)
    monkeypatch.setattr(takeover, "RETRY_SECONDS", 0.02)
    stores = Benches("abcd", opened="abc")
    for name in "abc":
        assert stores.benches[name].add(1, entry(1)) is None
    segment = SegmentMetadata("s", 1, SegmentState.RECOVERY, (Fragment(1, ("a", "b", "c")),))
    one = TakeOver("log", stores, LogMeta(2, 1, 2, 3, 2, 0, (segment,)))  # type: ignore[arg-type]
    stores.notice = one.notice
    recovery = one._recovery
    assert recovery is not None
    for node in "ab":
        recovery.node_fenced(node, 0)
    assert recovery.writing is not None
    recovery.writing.append(entry(1))
    recovery.replace(("a", "d"))
    one._heard = {"b": 2.0, "c": 3.0}
    one._unfit = set()
    recovery.writing.sent.update(dict.fromkeys("ad", 1))
    recovery.writing.added("a", 1, 1)
    stores.off |= {"d"}
    await one._replace_silent()
    assert recovery.writing.nodes == ("a", "c")
    assert not stores.asked

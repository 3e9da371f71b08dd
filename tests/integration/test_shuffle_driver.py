"""One shuffle of a term goes wrong or away, with a real ZooKeeper: the term goes on, and nothing is held on to."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from gcm.followers import FollowerLinks
from gcm.shuffle_driver import Driver, DriverContext
from gcm.shuffle_leader import ShuffleLeader
from gcm.shuffle_store import ShuffleStore
from gcm.term import LeaderTerm
from roq.coordination import paths
from roq.coordination.election import take_epoch
from roq.coordination.session import Session
from roq.errors import NotLeader, RoqError, ShuffleNotFound
from roq.runtime.observe import Counters
from roq.shuffle.events import AttemptReported, Commit, Event, Instruction, Remove, Touched
from roq.shuffle.plan import ShufflePlan
from roq.shuffle.record import FollowerHosts, ShuffleRecord
from roq.wire.shuffle import ShuffleState, Spec

RECORD = ShuffleRecord("s", "id", Spec(("k",), b"schema"), 0.0, "t")
NOBODY = FollowerHosts(frozenset(), frozenset())


@pytest.fixture
async def session(chroot: str) -> AsyncIterator[Session]:
    session = await Session.connect(chroot, 6.0)
    try:
        for path in paths.SKELETON:
            await session.ensure_path(path)
        yield session
    finally:
        await session.close()


async def begun(session: Session) -> LeaderTerm:
    return await LeaderTerm.begin(session, await take_epoch(session), Counters())


@pytest.fixture
async def term(session: Session) -> AsyncIterator[LeaderTerm]:
    term = await begun(session)
    try:
        yield term
    finally:
        await term.end(None)


async def driver_of(term: LeaderTerm, plan: ShufflePlan) -> Driver:
    store = ShuffleStore(term, plan.record.id)
    await store.create(plan.record)
    driver = Driver(plan, store, DriverContext(term, FollowerLinks(), {}, lambda _: None))
    driver.start()
    driver.feed(NOBODY)
    return driver


class Defective(ShufflePlan):
    """Fails when it is touched."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, Touched):
            raise ZeroDivisionError("a defect")
        return super().handle(event, now)


async def test_a_defect_concerns_one_shuffle_only(term: LeaderTerm) -> None:
    driver = await driver_of(term, Defective(RECORD, term.fence.epoch))
    waiting = asyncio.create_task(driver.until(lambda record: record.state is ShuffleState.SEALED))
    await driver.submit(AttemptReported((), (), wanted=False))
    async with asyncio.timeout(20):
        for event in (Touched(), Commit(())):
            with pytest.raises(RoqError, match="a defect"):
                await driver.submit(event)
        with pytest.raises(RoqError, match="a defect"):
            await waiting
    assert not term.ended.done()
    await term.write()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What goes round in a circle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
async def test_of_a_shuffle_that_is_gone_nothing_is_held(term: LeaderTerm) -> None:
    driver = await driver_of(term, ShufflePlan(RECORD, term.fence.epoch, abandoned_seconds=7 * 86400.0))
    async with asyncio.timeout(20):
        await driver.submit(Remove("x"))
        await driver.store.delete()
        waiting = asyncio.create_task(driver.until(lambda record: record.state is ShuffleState.SEALED))
        await asyncio.sleep(0)
        driver.stop()
        with pytest.raises(ShuffleNotFound):
            await waiting
        with pytest.raises(ShuffleNotFound):
            await driver.submit(Remove("y"))
    plan = weakref.ref(driver.plan)
    del driver, waiting
    async with asyncio.timeout(20):
        while plan() is not None:  # its task ends in one of the next turns of the loop
            await asyncio.sleep(0.01)
    assert not term.ended.done()


async def test_of_a_term_that_is_over_its_shuffles_hold_nothing(session: Session) -> None:
    """Each wakes after a week to see whether it was abandoned."""
    first = await begun(session)
    await ShuffleStore(first, "id").create(RECORD)
    await first.end(None)
    term = await begun(session)
    leader = await ShuffleLeader.begin(session, term, abandoned_seconds=7 * 86400.0)
    async with asyncio.timeout(20):
        await leader._drivers["id"].submit(Touched())
        await term.end(None)
        leader.close()
        with pytest.raises(NotLeader):
            await leader._drivers["id"].submit(Touched())
    held = weakref.ref(term)
    del term, leader
    async with asyncio.timeout(20):
        while held() is not None:
            await asyncio.sleep(0.01)
            gc.collect()

"""The end of a tape, as who reads it sees it: when nothing more that counts can be there, and how soon more is heard of.

Not covered: what follows from it (tests/unit/test_past.py, tests/model/test_tapes.py).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import LogUnavailable
from roq.log.replicated.metadata import SegmentState
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import Stores
from roq.log.replicated.writer import LogWriter
from roq.pubsub.tape import UNCONFIRMED_MS, Tape
from roq.wire import gcm
from roq.wire.recording import encode_entry
from tests.integration.store_rig import QUICK, StoreRig, appended

THREE = LogSettings(**{**QUICK.model_dump(), "write_quorum": 3, "ack_quorum": 2})
BOUND_SECONDS = 20


@pytest.fixture
async def rig(chroot: str, tmp_path: Path, sessions: Callable[..., Awaitable[Session]]) -> AsyncIterator[StoreRig]:
    made = StoreRig(chroot, tmp_path, await sessions(chroot))
    await made.start("abc")
    yield made
    await made.close()


async def tape_of(rig: StoreRig) -> Tape:
    return Tape(await view_of(rig), Stores(rig.static))


async def view_of(rig: StoreRig) -> gcm.TapeView:
    node = await rig.session.get(paths.log(rig.log_id))
    assert node is not None
    return gcm.TapeView(rig.log_id, "A", True, node.data)


async def write(writer: LogWriter, text: bytes) -> int:
    return await asyncio.wait_for(appended(writer, encode_entry(1, [text])), BOUND_SECONDS)


async def read_on(tape: Tape, entries: int) -> None:
    """Until so many were read, and handed out."""
    async with asyncio.timeout(BOUND_SECONDS):
        while tape.done < entries:
            assert await tape.fetch(1.0) == 0
            while tape.ahead:
                tape.done, _ = tape.ahead.popleft()


async def sees_the_end(tape: Tape) -> bool:
    """Whether it is sure of it."""
    tape.seen, tape._proved = 0, 0.0
    began = time.time_ns() // 1_000_000
    assert await tape.fetch(0.0, True) == 0
    assert not tape.ahead
    assert tape.seen == 0 or began - UNCONFIRMED_MS <= tape.seen <= time.time_ns() // 1_000_000 - UNCONFIRMED_MS
    return tape.seen > 0


@pytest.mark.quick
async def test_the_end_is_seen_when_enough_stores_have_nothing_more(rig: StoreRig) -> None:
    writer = await rig.writer(settings=THREE)
    tape = await tape_of(rig)
    await write(writer, b"1")
    await read_on(tape, 1)
    assert await sees_the_end(tape)
    await rig.stores["a"].kill()
    assert await sees_the_end(tape), "two of three: one of them has whatever counts"
    await rig.stores["b"].kill()
    assert not await sees_the_end(tape), "the other two may have something"
    assert tape.looked, "nothing follows as far as is known"
    await rig.stores["c"].kill()
    with pytest.raises(LogUnavailable):
        await tape.fetch()


async def test_what_is_stored_and_not_known_to_be_is_not_passed_over(rig: StoreRig) -> None:
    """Its writer has told its publisher, and died before it could tell the stores."""
    writer = await rig.writer(settings=LogSettings(**{**THREE.model_dump(), "confirm_seconds": 3_600.0}))
    tape = await tape_of(rig)
    await write(writer, b"1")
    assert not await sees_the_end(tape)
    await writer.close()
    await rig.keeper(2, THREE)
    tape.update(await view_of(rig))
    await read_on(tape, 1)
    assert tape.ended


async def test_what_is_being_recovered_has_no_end_yet(rig: StoreRig) -> None:
    writer = await rig.writer(settings=THREE)
    tape = await tape_of(rig)
    await write(writer, b"1")
    await read_on(tape, 1)
    (segment,) = tape.metadata.segments
    tape.metadata = replace(tape.metadata, segments=(replace(segment, state=SegmentState.RECOVERY),))
    assert not await sees_the_end(tape)


async def test_more_is_heard_of_at_once_and_a_store_that_hangs_is_passed_over(rig: StoreRig) -> None:
    writer = await rig.writer(settings=THREE)
    tape = await tape_of(rig)
    assert await tape.confirmed_end(tape.metadata) == 0
    waiting = asyncio.ensure_future(tape.fetch(10.0))
    await write(writer, b"1")
    assert await asyncio.wait_for(waiting, 2.0) == 0
    tape.done = tape.ahead.popleft()[0]
    waiting = asyncio.ensure_future(tape.fetch(10.0))
    await asyncio.sleep(0.05)  # it waits at the store by then
    view = await view_of(rig)
    tape.update(gcm.TapeView(view.log, view.exchange, view.live, view.meta + b" "))
    assert await asyncio.wait_for(waiting, 2.0) == 0, "its metadata changed: it may have to wait elsewhere"
    hangs = next(host for host in rig.stores if host == tape._preferred)
    rig.stores[hangs].freeze()
    await asyncio.wait_for(tape.fetch(0.2), BOUND_SECONDS)
    assert tape._preferred != hangs
    await write(writer, b"2")
    await asyncio.wait_for(read_on(tape, 2), 2.0)
    rig.stores[hangs].signal(signal.SIGCONT)
    await tape.seek_end()
    assert tape.done == 2

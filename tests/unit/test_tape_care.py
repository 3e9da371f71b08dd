"""Who looks after tapes that nobody writes: one that can't be taken over keeps nobody from the others.

Not covered: logs and their stores (tests/integration/test_recorded.py), what expires (test_retention.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock

import pytest

import roq.pubsub.exchange.tapes as module
from roq.errors import LogUnavailable
from roq.log.replicated.metadata import LogMeta
from roq.pubsub.exchange.tapes import ADOPTED_AT_ONCE, RETRY_SECONDS, TapeCare
from roq.runtime.observe import Counters
from roq.wire.assignment import QueueRecord, QueueSettings, to_json
from roq.wire.recording import Record, Recording, tape_log

RECORDING = Recording(Record(), "t", on=False)
GONE = tape_log("t", "gone")


class KeeperTwin:
    """LogKeeper of a log whose stores answer, or do not. tried: every take-over, by log."""

    tried: ClassVar[list[str]] = []
    away: ClassVar[dict[str, asyncio.Event]] = {}  # by log whose stores are gone: until this it waits for them

    def __init__(self, log_id: str) -> None:
        self.log_id, self.meta, self.error = log_id, LogMeta(), None
        self.close = Mock()

    @classmethod
    async def take_over(cls, session: object, log_id: str, *about: object) -> KeeperTwin:
        cls.tried.append(log_id)
        if log_id in cls.away:
            await cls.away[log_id].wait()
            raise LogUnavailable("its stores are gone")
        return cls(log_id)


@pytest.fixture
async def care(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TapeCare]:
    """Of the only Exchange."""
    monkeypatch.setattr(module, "LogKeeper", KeeperTwin)
    monkeypatch.setattr(module, "LogRepairer", lambda *about: Mock(run=AsyncMock()))
    monkeypatch.setattr(KeeperTwin, "tried", [])
    monkeypatch.setattr(KeeperTwin, "away", {})
    errors: list[BaseException] = []
    made = TapeCare("q", "me", "127.0.0.1:1", Mock(), Counters(), errors.append)
    made._recording = RECORDING
    yield made
    await made.close()
    assert not errors


async def look(care: TapeCare, monkeypatch: pytest.MonkeyPatch, *logs: str) -> None:
    """These are there; whatever can be done at once is done then."""
    record = QueueRecord("q", QueueSettings(), True, "h", 1, {"me": "h"}, 0.0, record=Record())
    session: Any = Mock(get=AsyncMock(return_value=Mock(data=to_json(record))))
    monkeypatch.setattr(module, "read_tapes", AsyncMock(return_value={log: LogMeta() for log in logs}))
    await care._look(session, Mock(directory=Mock(hosts=lambda: ["h"])), expire=False)
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_tape_whose_stores_are_gone_delays_no_other(care: TapeCare, monkeypatch: pytest.MonkeyPatch) -> None:
    KeeperTwin.away[GONE] = asyncio.Event()
    await look(care, monkeypatch, GONE, "tape.t.x")
    assert set(care._kept) == {"tape.t.x"}
    await look(care, monkeypatch, GONE, "tape.t.x", "tape.t.y")
    assert set(care._kept) == {"tape.t.x", "tape.t.y"}
    assert KeeperTwin.tried.count(GONE) == 1, "it is still being tried"


async def test_one_that_failed_is_tried_again_a_while_later(care: TapeCare, monkeypatch: pytest.MonkeyPatch) -> None:
    KeeperTwin.away[GONE] = asyncio.Event()
    KeeperTwin.away[GONE].set()
    for _ in range(3):
        await look(care, monkeypatch, GONE)
    assert KeeperTwin.tried == [GONE]
    care._retry_at[GONE] -= RETRY_SECONDS
    await look(care, monkeypatch, GONE)
    assert KeeperTwin.tried == [GONE, GONE]
    care._retry_at[GONE] -= RETRY_SECONDS
    del KeeperTwin.away[GONE]
    await look(care, monkeypatch, GONE)
    assert set(care._kept) == {GONE}


async def test_those_that_were_tried_leave_their_places_to_others(care: TapeCare, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [tape_log("t", f"a{number:02}") for number in range(ADOPTED_AT_ONCE)]
    KeeperTwin.away |= dict.fromkeys(gone, asyncio.Event())
    await look(care, monkeypatch, *gone, "tape.t.x")
    assert not care._kept
    KeeperTwin.away[gone[0]].set()
    await asyncio.sleep(0)
    await look(care, monkeypatch, *gone, "tape.t.x")
    assert set(care._kept) == {"tape.t.x"}

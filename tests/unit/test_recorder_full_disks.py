"""The tape of an Exchange while disks are full: how often it is taken over again. Everything else: test_recorder.py."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from roq.errors import LogUnavailable, RoqError, StorageFull
from roq.log.replicated.stores import StoreDirectory
from roq.pubsub.exchange.recorder import FULL_RETRY_SECONDS, Recorder
from tests.unit.test_recorder import NOBODY, Tape

TRIES = 12
SLEEP = asyncio.sleep


class Pauses:
    """What the recorder waits between two writers, each of which is stopped by `error` once `storing` entries were stored."""

    def __init__(self, tape: Tape, error: RoqError) -> None:
        self.tape, self.error, self.storing, self.seconds = tape, error, 0, list[float]()

    async def write(self, writer: object) -> None:
        """As Recorder does."""
        self.tape.counters["tape_entries"] += self.storing
        raise self.error

    async def sleep(self, seconds: float) -> None:
        await SLEEP(0)
        self.seconds.append(seconds)
        if len(self.seconds) == TRIES:
            raise asyncio.CancelledError

    async def run(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """TRIES of them."""
        self.seconds.clear()
        with monkeypatch.context() as patch, contextlib.suppress(asyncio.CancelledError):
            patch.setattr(Recorder, "_take_over", lambda *about: SLEEP(0))
            patch.setattr(Recorder, "_write", self.write)
            patch.setattr(asyncio, "sleep", self.sleep)
            await self.tape.recorder.run(NOBODY, StoreDirectory(NOBODY))
        return self.seconds


async def test_on_full_disks_it_is_taken_over_ever_more_seldom_until_something_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = Pauses(Tape(), StorageFull("the disks of a, b are full"))
    assert (await pauses.run(monkeypatch))[-1] >= FULL_RETRY_SECONDS / 2
    pauses.storing = 1
    assert max(await pauses.run(monkeypatch)) <= 0.1


async def test_after_any_other_failure_it_is_taken_over_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(await Pauses(Tape(), LogUnavailable("a, b did not answer")).run(monkeypatch)) <= 1.0

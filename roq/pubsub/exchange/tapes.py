"""The tapes of a recorded queue, as one of its Exchanges looks after them: its own, and those that nobody writes any more.

Of the Exchanges that are there, the one that ranks first for a tape whose own Exchange is gone closes what was left open, keeps
its copies complete and drops what has expired. Two that think so at once do no harm: the later one takes the log.
A tape of which nothing is left is forgotten.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any

from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import FrameError, LogFenced, RoqError, TemporaryError
from roq.log.replicated import metadata
from roq.log.replicated.health import rank
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.owner import LogKeeper, LogOwner, now_ms
from roq.log.replicated.repairer import LogRepairer
from roq.log.replicated.settings import LogSettings, RepairSettings
from roq.log.replicated.stores import StoreDirectory, Stores
from roq.pubsub.exchange.forwarder import Forwarder
from roq.pubsub.exchange.recorder import TERM, Recorder
from roq.pubsub.exchange.retention import SEGMENTS_MAX, ExpiryClock, expired
from roq.runtime.backoff import delays
from roq.runtime.observe import Counters, logger
from roq.runtime.run import Tasks
from roq.wire.assignment import QueueRecord, from_json
from roq.wire.recording import Record, Recording, tape_exchange, tapes_prefix

LOOK_SECONDS = 5.0
EXPIRE_EVERY = 6  # looks
ADOPTED_AT_ONCE = 16
RETRY_SECONDS = 15.0  # after a tape could not be taken over
EMPTY_SECONDS = 180.0  # after its last segment expired a tape is forgotten: by then the stores have dropped it, too
ROLL_SECONDS_MIN, ROLL_SECONDS_MAX = 60.0, 6 * 3600.0
ROLLS = 8  # in the time for which messages are kept, at least: what is dropped is a whole segment
DAY_SECONDS = 86_400.0

log = logger(__name__)


class KeptTape:
    """A tape that nobody writes, taken over by this process."""

    def __init__(self, keeper: LogKeeper) -> None:
        self.keeper = keeper
        self.empty_since: float | None = None
        self._tasks = Tasks(lambda error: None)
        self._tasks.start(LogRepairer(keeper, RepairSettings()).run(), f"repairs of {keeper.log_id}")

    async def close(self) -> None:
        """Somebody else may have it."""
        await self._tasks.stop()
        self.keeper.close()


class TapeCare:
    """`configure` whenever the queue's Recording is another one. fail(error): this Exchange can't go on."""

    def __init__(
        self,
        queue: str,
        exchange: str,
        zookeeper: str,
        forwarder: Forwarder,
        counters: Counters,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._queue, self._exchange, self._zookeeper = queue, exchange, zookeeper
        self._forwarder, self._counters = forwarder, counters
        self._recording: Recording | None = None
        self._recorder: Recorder | None = None
        self._writing: asyncio.Task[None] | None = None  # of it, or the end of what was recorded before
        self._found: asyncio.Future[tuple[Session, StoreDirectory]] = asyncio.get_running_loop().create_future()
        self._stores: Stores | None = None  # of all tapes that are kept, since that is found
        self._kept: dict[str, KeptTape] = {}
        self._clock = ExpiryClock()
        self._adopting: dict[str, asyncio.Task[None]] = {}  # by log: it is being taken over
        self._retry_at: dict[str, float] = {}  # by log that could not be (monotonic)
        self._tasks = Tasks(fail)

    def configure(self, recording: Recording | None) -> None:
        """What the Exchange is told of it."""
        if recording is None or recording == self._recording:
            return
        if self._recording is None:
            self._tasks.start(self._run(), "tapes")
        self._recording = recording
        if recording.on and self._recorder is None:
            told = self._forwarder.hold_for_tape, self._forwarder.stored
            recorder = Recorder(self._queue, self._exchange, recording, *told, self._counters)
            self._recorder = self._forwarder.recorder = recorder
            self._writing = self._tasks.start(self._write(recorder, self._writing), "tape")
        elif recording.on and self._recorder is not None:
            self._recorder.recording = recording
        elif self._recorder is not None:
            self._writing = self._tasks.start(self._end(self._recorder, self._writing), "end of the tape")
            self._recorder = self._forwarder.recorder = None

    async def close(self) -> None:
        """Write what there is, as far as that goes quickly, and let go."""
        if self._recorder is not None:
            await self._end(self._recorder, self._writing)
        self._recorder = self._forwarder.recorder = None
        await self._tasks.stop()
        await asyncio.gather(*(kept.close() for kept in self._kept.values()))
        if self._stores is not None:
            self._stores.close()
        if self._found.done():
            session, directory = self._found.result()
            directory.close()
            await session.close()

    async def _write(self, recorder: Recorder, former: asyncio.Task[None] | None) -> None:
        """Once what was recorded before is sealed, and nobody here is just taking that tape over to look after it."""
        if former is not None:
            await asyncio.wait({former})
        if (adopting := self._adopting.get(recorder.log_id)) is not None:
            await asyncio.wait({adopting})
        await recorder.run(*await asyncio.shield(self._found))

    async def _end(self, recorder: Recorder, writing: asyncio.Task[None] | None) -> None:
        """Record no longer."""
        await recorder.seal()
        if writing is not None:
            writing.cancel()
            await asyncio.wait({writing})

    async def _run(self) -> None:
        for delay in delays():
            try:
                session = await Session.connect(self._zookeeper)
                break
            except TemporaryError as error:
                log.warning("the tape waits for ZooKeeper", extra={"fields": {"reason": str(error)}})
                await asyncio.sleep(delay)
        try:
            directory = await StoreDirectory(session).start()
        except BaseException:
            await session.close()
            raise
        self._stores = stores = Stores(directory)
        self._found.set_result((session, directory))
        looks = 0
        while True:
            try:
                await self._look(session, stores, expire=looks % EXPIRE_EVERY == 0)
                looks += 1
            except RoqError as error:
                log.info("the queue's tapes can't be maintained now, retrying: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    # --- looking after them -------------------------------------------------------------------------------------------

    async def _look(self, session: Session, stores: Stores, *, expire: bool) -> None:
        recording, directory = self._recording, stores.directory
        if recording is None:
            return
        tapes = await read_tapes(session, recording.tapes)
        node = await session.get(paths.queue(self._queue))  # after the tapes: whoever has just made one is named there
        if node is None:
            return
        exchanges = [*from_json(node.data, QueueRecord).exchanges]
        mine = {log_id for log_id in tapes if self._exchange == _keeper_of(log_id, exchanges)}
        if self._recorder is not None:
            mine.discard(self._recorder.log_id)
            self._recorder.grow(len(directory.hosts() - directory.leaving()))
            await self._roll(self._recorder, recording.record)
        for log_id in [log_id for log_id, kept in self._kept.items() if log_id not in mine or kept.keeper.error is not None]:
            await self._kept.pop(log_id).close()
        self._adopt_all(mine, partial(self._adopt, session, stores, record=recording.record))
        if expire:
            await self._expire(recording, tapes, directory.hosts())
        await self._forget_empty(session, exchanges)

    def _adopt_all(self, mine: set[str], adopt: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Those that are not kept yet, beside the rest: one whose stores are gone takes its time."""
        now, mine = time.monotonic(), mine - ({self._recorder.log_id} if self._recorder is not None else set())
        self._adopting = {log_id: task for log_id, task in self._adopting.items() if not task.done()}
        self._retry_at = {log_id: at for log_id, at in self._retry_at.items() if log_id in mine}
        retry_at = {log_id: self._retry_at.get(log_id, 0.0) for log_id in mine - self._kept.keys() - self._adopting.keys()}
        for at, log_id in sorted((at, log_id) for log_id, at in retry_at.items()):
            if len(self._adopting) < ADOPTED_AT_ONCE and now >= at:
                self._adopting[log_id] = self._tasks.start(adopt(log_id), f"take-over of {log_id}")

    async def _adopt(self, session: Session, stores: Stores, log_id: str, *, record: Record) -> None:
        write, ack = record.quorums(len(stores.directory.hosts()))
        settings = LogSettings(write_quorum=write, ack_quorum=ack)
        try:
            keeper = await LogKeeper.take_over(session, log_id, stores, settings, TERM)
        except LogFenced as error:
            log.info("tape adopted by another Exchange", extra={"fields": {"log": log_id, "reason": str(error)}})
            return
        except RoqError as error:
            self._retry_at[log_id] = time.monotonic() + RETRY_SECONDS
            log.warning("tape was left open and can't be closed now, retrying: %s", error, extra={"fields": {"log": log_id}})
            return
        self._kept[log_id] = KeptTape(keeper)
        log.info("tape adopted", extra={"fields": {"log": log_id, "last": keeper.meta.next_first - 1}})

    async def _roll(self, recorder: Recorder, record: Record) -> None:
        seconds = min(max(record.days * DAY_SECONDS / ROLLS, ROLL_SECONDS_MIN), ROLL_SECONDS_MAX)
        if record.days and recorder.writer is not None and recorder.writer.age_seconds > seconds:
            await recorder.writer.roll()

    async def _expire(self, recording: Recording, tapes: dict[str, LogMeta], hosts: Collection[str]) -> None:
        record = recording.record
        sizes = await self._sizes(recording, hosts) if record.max_bytes else {}
        now = self._clock.now(now_ms(), time.monotonic())
        owners = {owner.log_id: owner for owner in self._owners()}
        for log_id, position in expired(tapes, sizes, record, now).items():
            owner = owners.get(log_id)
            if owner is not None and owner.error is None:
                await owner.change(partial(metadata.trim, position=position))
                full = len(tapes[log_id].segments) > SEGMENTS_MAX
                told = log.warning if full else log.info
                told(
                    "tape was trimmed%s",
                    ": it has too many segments" * full,
                    extra={"fields": {"log": log_id, "up_to": position}},
                )

    async def _sizes(self, recording: Recording, hosts: Collection[str]) -> dict[str, int]:
        """Bytes by segment, as the stores that answer have them."""
        found: dict[str, int] = {}
        owner = next(iter(self._owners()), None)
        if owner is None:
            return found
        for host in sorted(hosts):
            try:
                for view in await owner.stores.segment_views(host, tapes_prefix(recording.tapes)):
                    found[view.segment] = max(found.get(view.segment, 0), view.size)
            except RoqError as error:
                log.info("host %s did not say how much of the tapes it holds: %s", host, error)
        return found

    def _owners(self) -> Iterable[LogOwner]:
        if self._recorder is not None and self._recorder.writer is not None:
            yield self._recorder.writer
        yield from (kept.keeper for kept in self._kept.values())

    async def _forget_empty(self, session: Session, exchanges: list[str]) -> None:
        """Not of Exchanges that are there: they may write on, and entries are numbered from where they were."""
        now = time.monotonic()
        for log_id, kept in list(self._kept.items()):
            if kept.keeper.meta.segments or tape_exchange(log_id) in exchanges:
                kept.empty_since = None
            elif kept.empty_since is None:
                kept.empty_since = now
            elif now - kept.empty_since > EMPTY_SECONDS:
                await kept.keeper.own()
                await session.delete(paths.log(log_id))
                await self._kept.pop(log_id).close()
                log.info("tape has expired", extra={"fields": {"log": log_id}})


def _keeper_of(log_id: str, exchanges: list[str]) -> str:
    """The Exchange that looks after this tape."""
    own = tape_exchange(log_id)
    return own if own in exchanges else rank(log_id, exchanges)[0] if exchanges else ""


async def read_tapes(session: Session, tapes: str) -> dict[str, LogMeta]:
    """Metadata of all tapes of a queue, by log. tapes: the queue's part of their names."""
    prefix, found = tapes_prefix(tapes), dict[str, LogMeta]()
    for log_id in await session.children(paths.logs()):
        if log_id.startswith(prefix) and (node := await session.get(paths.log(log_id))) is not None:
            try:
                found[log_id] = from_json(node.data, LogMeta)
            except FrameError as error:
                log.error("metadata of a tape are unreadable: %s", error, extra={"fields": {"log": log_id}})
    return found

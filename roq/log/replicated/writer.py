"""The writer of a replicated log: shell around Appending. An entry leaves at once; what is sent again leaves in few frames.

ZooKeeper is needed to take the log over, to change the ensemble after a store failed, to roll and to make a snapshot; not
to append. The writer stops for good when it is fenced, when the disks are full, or when too few stores answer for long; what
was not acknowledged then is *unknown*: it may be in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from roq.coordination.session import Session
from roq.errors import Closed, LogFenced, LogUnavailable, PayloadTooLarge, RoqError, StorageFailed, TemporaryError
from roq.log.replicated import metadata
from roq.log.replicated.appending import Appending
from roq.log.replicated.chain import Chain, Guard
from roq.log.replicated.ensemble import SegmentHealth, SegmentLeave, SegmentRepair
from roq.log.replicated.health import Directory, candidates
from roq.log.replicated.metadata import LogMeta, SegmentState, SnapshotMetadata
from roq.log.replicated.owner import LogOwner, now_ms, take
from roq.log.replicated.repair import Holding, OpenPart, open_parts
from roq.log.replicated.settings import LogSettings
from roq.log.replicated.stores import Stores
from roq.log.replicated.takeover import announce, open_nodes
from roq.runtime.observe import logger
from roq.wire import store as wire

log = logger(__name__)
CONFIRM_LATE = 4  # times confirm_again_seconds, at most
ANSWER_SECONDS = 1.0  # of a store that may get a segment which is opened to repair another
Done = Callable[[int | RoqError], None]  # position, or what stopped the log: then the outcome is unknown


class LogWriter(LogOwner):
    """The one writer of a log in its epoch. Made by `take_over`."""

    def __init__(self, log_id: str, chain: Chain, stores: Stores, settings: LogSettings) -> None:
        """The chain's last segment has just been opened for it."""
        super().__init__(log_id, chain, stores)
        self.settings = settings
        self.quorums = settings.write_quorum, settings.ack_quorum  # if higher than the log's: from the next segment on
        self._loop = asyncio.get_running_loop()
        self._dones: deque[Done] = deque()  # of positions acked+1 …
        self._held: list[bytes] = []  # taken while the next segment is being opened
        self._held_bytes = 0
        self._drained = asyncio.Event()
        self._written = asyncio.Event()  # something, since nothing was to be looked after
        self._rolling = False
        self._snapshots = 0  # begun
        self._confirm_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._repair = SegmentRepair(settings)
        self._leave = SegmentLeave(settings)
        self._busy = asyncio.Lock()  # one roll or ensemble change at a time
        self._open(chain.meta)
        stores.on_notice = self._notice
        self._start(self._look_after())

    @classmethod
    async def take_over(
        cls, session: Session, log_id: str, directory: Directory, settings: LogSettings, term: int, guard: Guard | None = None
    ) -> LogWriter:
        """Fence every earlier writer, recover what it left, and begin a new segment. Makes the log if `guard` allows it.

        Raises LogFenced (a later term has it, or took it meanwhile), NoHosts, LogUnavailable, StorageFull, DeadlineExceeded
        after `settings.take_over_seconds`; then it may be tried again.
        """
        chain, stores, quorums = Chain(session, log_id, guard), Stores(directory), (settings.write_quorum, settings.ack_quorum)
        made = LogMeta(write_quorum=quorums[0], ack_quorum=quorums[1])
        await take(log_id, chain, stores, settings, term, lambda taking: taking.begin(quorums), made)
        writer = cls(log_id, chain, stores, settings)
        log.info("log taken over", extra={"fields": {"log": log_id, "epoch": writer.epoch, "confirmed": writer.confirmed}})
        return writer

    def _open(self, meta: LogMeta) -> None:
        """The segment that was opened last is written from now on."""
        segment = meta.segments[-1]
        self._appending = Appending(segment.id, self.epoch, segment.fragments[-1].nodes, meta.ack_quorum, segment.first)
        self._opened = time.monotonic()
        self._sent_confirmed = segment.first - 1  # the confirmed position the stores know
        self._told_at = self._flushed_at = self._opened  # when each of them was told, and sent something, last
        self._health = SegmentHealth(self.settings, self._appending, time.monotonic())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, RoqError):
                log.error("the log's writer failed", exc_info=error, extra={"fields": {"log": self.log_id}})
            self._stop(error if isinstance(error, RoqError) else StorageFailed(f"{type(error).__name__}: {error}"))

    # --- appending ----------------------------------------------------------------------------------------------------

    @property
    def confirmed(self) -> int:
        """The highest acknowledged position."""
        return self._appending.acked

    @property
    def age_seconds(self) -> float:
        """Since the segment was opened; 0 while it is empty."""
        return time.monotonic() - self._opened if self._health.entries else 0.0

    def write(self, entry: bytes, done: Done) -> None:
        """Append one entry. `done` is called with its position when it and all before it are on stable storage of the ack
        quorum, in the turn of the loop that brings it; or with LogFenced, LogUnavailable, StorageFull: the outcome is unknown.

        Raises PayloadTooLarge, LogUnavailable (too much is on its way: wait for some of it), and what stopped the writer.
        """
        if self._error is not None:
            raise self._error
        appending = self._appending
        if len(entry) > wire.ENTRY_BYTES_MAX:
            raise PayloadTooLarge(f"{len(entry)} bytes: an entry has at most {wire.ENTRY_BYTES_MAX}")
        if (
            appending.bytes_pending + self._held_bytes > self.settings.window_bytes
            or len(self._dones) >= self.settings.window_entries
        ):
            raise LogUnavailable("too many entries are not acknowledged yet")
        if self._rolling:
            self._held.append(entry)
            self._held_bytes += len(entry)
        else:
            appending.append(entry)
            self._health.took(entry)
        self._dones.append(done)
        self._written.set()
        self._flush()

    def _flush(self) -> None:
        if self._error is None:
            self._flushed_at = time.monotonic()
            self._health.before_sending(self._flushed_at)
            self._send(self._appending)

    def _send(self, appending: Appending) -> None:
        for node, frame in appending.frames():
            self.stores.send(node, frame)
            self._sent_confirmed = appending.acked

    def _notice(self, node: str, notice: wire.EntriesAdded | wire.EntriesRefused) -> None:
        appending = self._appending
        if notice.segment != appending.segment or self._error is not None:
            return
        if isinstance(notice, wire.EntriesRefused):
            self._refusal(node, notice)
            return
        self._health.heard(node, time.monotonic())
        before = appending.acked
        paced = node in appending.paced
        self._acknowledge(before, appending.added(node, notice.first, notice.count))
        if paced:
            self._flush()  # the next frame may leave

    def _acknowledge(self, before: int, acked: int) -> None:
        for position in range(before + 1, acked + 1):
            self._dones.popleft()(position)
        if acked > before and self._confirm_timer is None:
            self._confirm_timer = self._loop.call_later(self.settings.confirm_seconds, self._confirm)
        if self._appending.drained:
            self._drained.set()

    def _confirm(self) -> None:
        """Nothing was sent since the last acknowledgement: send it to the stores, so that followers see it."""
        self._confirm_timer = None
        if self._error is None and self._appending.acked > self._sent_confirmed:
            self._tell_confirmed()

    def _tell_confirmed(self) -> None:
        """Again after a while: nobody answers that, so it may have been lost, and a store that begins anew has forgotten it."""
        appending, self._told_at = self._appending, time.monotonic()
        if appending.acked >= self.meta.segments[-1].first:
            self._sent_confirmed = appending.acked
            for node in appending.nodes:
                self.stores.send(node, appending.confirmation())

    def _refusal(self, node: str, notice: wire.EntriesRefused) -> None:
        if notice.reason is wire.Refusal.FENCED:
            self._stop(LogFenced())
        elif notice.reason is wire.Refusal.DIVERGED:
            self._stop(StorageFailed(f"host {node} holds another entry at {notice.first} of {notice.segment}"))
        elif notice.reason is wire.Refusal.OVERLOADED:
            if node not in self._appending.paced:
                fields = {"segment": notice.segment, "node": node, "first": notice.first}
                log.warning("store is slow: it gets one frame at a time until it has caught up", extra={"fields": fields})
            self._appending.overloaded(node, notice.first)
        else:
            self._health.refused(node, notice.reason)

    def _stop(self, error: RoqError) -> None:
        """For good. What is not acknowledged is unknown."""
        if self._error is not None:
            return
        super()._stop(error)
        reason = f"{type(error).__name__}: {error}"
        log.warning(
            "log writer stopped: what it had not acknowledged is unknown",
            extra={"fields": {"log": self.log_id, "reason": reason}},
        )
        dones, self._dones = self._dones, deque()
        for done in dones:
            done(type(error)(str(error)))
        self._drained.set()

    def open_parts(self) -> list[OpenPart]:
        """What the nodes of the open segment must have by now."""
        segment, appending = self.meta.segments[-1], self._appending
        if appending.segment != segment.id or segment.state is not SegmentState.OPEN:
            return []
        return list(open_parts(segment, appending))

    def behind(self) -> frozenset[str]:
        """Nodes of the open segment that miss some of it, for longer than it is under way."""
        appending, health = self._appending, self._health
        late = health.silent(self.settings.resend_seconds, time.monotonic())
        return frozenset(appending.nodes) - health.sound | frozenset(late)

    def lost(self, part: OpenPart) -> None:
        """A node has not what `open_parts` said: the segment is closed soon, for only a closed one is copied."""
        if self._appending.segment == part.name:
            self._health.lost(part.node)

    # --- looking after the ensemble -----------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        """Send again what was lost, replace nodes that fail, roll."""
        while self._error is None:
            await self._until_due()
            if time.monotonic() >= self._confirm_again_at():
                self._tell_confirmed()
            appending, health = self._appending, self._health
            if self._busy.locked():
                continue
            now = time.monotonic()
            for node in health.silent(self.settings.resend_seconds, now):
                appending.send_again(node)
            appending.resume()
            self._send(appending)
            if (bad := health.bad(now)) and await self._replace(health, bad, now):
                continue
            if self._error is not None or not self._chain.connected:
                continue
            if health.long:
                await self.roll()
            elif fewer_of := self._to_leave(now):
                await self.roll(fewer_of=fewer_of)
            elif await self._repair_due(health, now):
                await self.roll(None if health.any_lost else health.sound)

    async def _until_due(self) -> None:
        """Until all is to be looked at again. That is seldom while every node has all that was written: of many logs few are
        written."""
        appending = self._appending
        if not (appending.paced or appending.changing or any(appending.behind(node) for node in appending.nodes)):
            self._written.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._confirm_again_at() - time.monotonic()):
                    await self._written.wait()
        await asyncio.sleep(self.settings.check_seconds)

    def _confirm_again_at(self) -> float:
        """Seldom when nothing was written for long: then only a store that began anew can have missed it (monotonic)."""
        soon = self.settings.confirm_again_seconds
        return self._told_at + min(max((self._told_at - self._flushed_at) / 2, soon), CONFIRM_LATE * soon)

    def _nodes(self) -> frozenset[str]:
        """Of all of the open segment."""
        return frozenset(node for part in self.meta.segments[-1].fragments for node in part.nodes)

    def _to_leave(self, now: float) -> frozenset[str]:
        """Hosts that are being evacuated, if a segment on fewer of them is to be tried now."""
        hosts, leaving = self.stores.directory.hosts(), self.stores.directory.leaving()
        wanted = max(self.meta.write_quorum, self.quorums[0])
        return leaving if self._leave.due(self._nodes(), wanted, hosts, leaving, now) else frozenset()

    async def _repair_due(self, health: SegmentHealth, now: float) -> bool:
        """Does some node miss entries, and would the next segment be better?"""
        wanted = max(self.meta.write_quorum, self.quorums[0])
        asked = self._repair.due(health, wanted, self.stores.directory.hosts(), now)
        if asked is None:
            return False
        return self._repair.helps(health, await self.stores.answering(asked, ANSWER_SECONDS), now)

    async def _replace(self, health: SegmentHealth, bad: list[str], now: float) -> bool:
        """Take other nodes for those that fail. Where there are none, wait for them, and at last give up."""
        appending = health.appending
        spares = self.stores.directory.hosts() - set(appending.nodes)
        if (failure := health.failure(bad, spares, now)) is not None:
            self._stop(failure)
        due = health.due(bad, now)
        if self._error is not None or not due or not spares or not self._chain.connected:
            return False
        ranked = [host for host in candidates(appending.segment, self.stores.directory) if host in spares]
        try:
            fresh = await open_nodes(self.stores, appending.segment, self.epoch, ranked, len(due), 1)
        except TemporaryError as error:
            if isinstance(error, LogFenced):
                raise
            health.postpone(due, now)
            return False
        replacement = dict(zip(due, fresh, strict=False))
        await self._change_ensemble(appending, tuple(replacement.get(node, node) for node in appending.nodes))
        return True

    async def _change_ensemble(self, appending: Appending, nodes: tuple[str, ...]) -> None:
        async with self._busy:
            if appending is not self._appending:
                return  # rolled meanwhile
            first = appending.begin_change()
            await self.change(lambda meta: metadata.change_ensemble(meta, appending.segment, first, nodes))
            log.info("ensemble changed", extra={"fields": {"segment": appending.segment, "first": first, "nodes": nodes}})
            before, acked = appending.acked, appending.finish_change(nodes)
            self._health.changed(time.monotonic())
            self._acknowledge(before, acked)
            self._flush()

    async def roll(self, sound: frozenset[str] | None = None, fewer_of: frozenset[str] = frozenset()) -> None:
        """Close the segment and go on in a new one, on the hosts that are best now. Raises LogFenced.

        sound: only if the nodes will be others than these; fewer_of: only if it will be on fewer of these."""
        async with self._busy:
            appending, health = self._appending, self._health
            health.since = time.monotonic()  # if it fails, again after `repair_seconds`
            try:
                segment, nodes = await announce(self.log_id, self.stores, self.meta, self.epoch, self.quorums[0])
            except LogFenced:
                raise
            except TemporaryError as error:
                log.info(
                    "segment stays open: the next one could not be opened, trying again",
                    extra={"fields": {"log": self.log_id, "reason": str(error)}},
                )
                return
            if frozenset(nodes) == sound == frozenset(appending.nodes):
                return  # what answered a moment ago took no segment
            if fewer_of and len(fewer_of.intersection(nodes)) >= len(fewer_of & self._nodes()):
                return  # those that stay took none
            self._rolling = True
            try:
                if not await self._drain(appending):
                    return

                def change(meta: LogMeta) -> LogMeta:
                    return metadata.open_next(_closed(meta, appending), segment, nodes, quorums=self.quorums)

                self._open(await self.change(change))
            finally:
                self._rolling = False
                self._release_held()

    async def seal(self) -> bool:
        """Wait until everything is acknowledged, close the segment and stop: nobody writes until the next take-over. Whether
        that could be done; if not, the log is left as a writer leaves it that dies. Raises LogFenced."""
        async with self._busy:
            appending = self._appending
            self._rolling = True
            try:
                drained = await self._drain(appending)
                if drained:
                    await self.change(lambda meta: _closed(meta, appending))
            finally:
                self._rolling = False
        await self.close()
        return drained

    async def _drain(self, appending: Appending) -> bool:
        """Wait until everything sent is acknowledged; False if that takes too long."""
        try:
            async with asyncio.timeout(self.settings.resend_seconds):
                while not appending.drained and self._error is None:
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            return False
        return self._error is None

    def _release_held(self) -> None:
        held, self._held = self._held, []
        self._held_bytes = 0
        if self._error is not None:
            return
        for entry in held:
            self._appending.append(entry)
            self._health.took(entry)
        self._written.set()
        self._flush()

    # --- snapshots and metadata ---------------------------------------------------------------------------------------

    async def snapshot(self, position: int, data: bytes | memoryview) -> None:
        """Store the state as of `position` (≤ confirmed): readers begin there, and what it covers may be deleted.

        Raises LogFenced, LogUnavailable, StorageFull.
        """
        assert position <= self.confirmed
        meta = self.meta
        self._snapshots += 1  # a name is never used twice: one that was deleted is refused for a while
        blob = f"{self.log_id}~snapshot-{self.epoch}.{meta.serial}.{position}.{self._snapshots}"
        hosts = tuple(candidates(blob, self.stores.directory)[: meta.write_quorum])
        if len(hosts) < meta.ack_quorum:
            raise LogUnavailable(f"{len(hosts)} hosts with a store, a snapshot needs {meta.ack_quorum}")
        self.uploads.add(blob)
        try:
            nodes = await self.stores.put_blob(hosts, blob, data, enough=meta.ack_quorum)
            if self._health.entries >= self.settings.roll_entries:
                await self.roll()  # so that what the snapshot covers can go
            holding = Holding(blob, nodes, size=len(data))
            found = await self.stores.compare([holding], (), nodes)  # the upload may have taken long
            nodes = tuple(node for node in nodes if (holding, node) not in found.lacking)
            if len(nodes) < meta.ack_quorum:
                raise LogUnavailable(f"only {', '.join(nodes) or 'no host'} kept snapshot {blob}, it needs {meta.ack_quorum}")
            leaving = self.stores.directory.leaving()
            if leaving.intersection(nodes) and len(self.stores.directory.hosts() - leaving) >= len(nodes):
                raise LogUnavailable(f"a host that keeps snapshot {blob} is being evacuated since: it is made again elsewhere")
            await self.change(lambda meta: metadata.set_snapshot(meta, SnapshotMetadata(position, blob, len(data), nodes)))
        finally:
            self.uploads.discard(blob)

    async def close(self) -> None:
        """Stop. What is not acknowledged is unknown. The log stays open for the next take-over."""
        self._stop(Closed("the log's writer was closed"))
        if self._confirm_timer is not None:
            self._confirm_timer.cancel()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.stores.close()


def _closed(meta: LogMeta, appending: Appending) -> LogMeta:
    """Its last segment ends with what is acknowledged."""
    return metadata.close_last(meta, appending.acked, meta.segments[-1].fragments, now_ms())

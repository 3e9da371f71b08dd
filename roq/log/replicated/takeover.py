"""Taking a log over: the shell around Recovery. Fences, reads, secures, and finds nodes for the next segment."""

from __future__ import annotations

import asyncio
import time

from roq.errors import DataLost, LogFenced, LogUnavailable, NoHosts, RoqError, TemporaryError
from roq.log.replicated import metadata
from roq.log.replicated.health import candidates, rank
from roq.log.replicated.metadata import Change, LogMeta, SegmentState
from roq.log.replicated.recovery import SegmentRecovery
from roq.log.replicated.stores import Stores
from roq.runtime.observe import logger
from roq.wire import store as wire

log = logger(__name__)
RETRY_SECONDS = 0.1
SECURE_SECONDS = 2.0  # for writing a recovered entry again, before another node is taken
REQUEST_SECONDS = 2.0


class TakeOver:
    """Recovers the last segment of `meta`, of which `epoch` is the owner. `notice` must be fed with the stores' answers."""

    def __init__(self, log_id: str, stores: Stores, meta: LogMeta) -> None:
        self._log_id, self._stores, self._meta = log_id, stores, meta
        self._recovery: SegmentRecovery | None = None
        self._progress = asyncio.Event()
        self._enough = asyncio.Event()  # nodes are fenced
        self._failed: RoqError | None = None
        self._heard: dict[str, float] = {}  # loop's time of the last answer to a question
        self._unfit: set[str] = set()  # nodes that refused an entry
        if meta.segments and meta.segments[-1].state is not SegmentState.CLOSED:
            self._recovery = SegmentRecovery(meta.segments[-1], meta.epoch, meta.ack_quorum)

    def notice(self, node: str, notice: wire.EntriesAdded | wire.EntriesRefused) -> None:
        """A store's answer to an entry that was written again."""
        recovery = self._recovery
        if recovery is None or recovery.writing is None or notice.segment != recovery.segment.id:
            return
        if isinstance(notice, wire.EntriesAdded):
            recovery.writing.added(node, notice.first, notice.count)
        elif notice.reason is wire.Refusal.FENCED:
            self._failed = LogFenced("a newer epoch recovers this log")
        elif notice.reason is wire.Refusal.OVERLOADED:
            recovery.writing.overloaded(node, notice.first)
        else:
            self._unfit.add(node)
        self._progress.set()

    def waits_for(self) -> str:
        """Who has not answered, in words."""
        recovery = self._recovery
        if recovery is None or recovery.done:
            return "new stores"
        if silent := [node for node in recovery.nodes if node not in recovery.fenced]:
            return f"segment {recovery.segment.id} waits for an answer of {', '.join(silent)}"
        return f"segment {recovery.segment.id} waits for entry {recovery.position} to be known or stored by more hosts"

    async def begin(self, quorums: tuple[int, int]) -> Change:
        """Recover, and find stores for the next segment: the change of the metadata that closes the one and opens the other."""
        meta, recovery = self._meta, await self.recover()
        segment, nodes = await announce(self._log_id, self._stores, meta, meta.epoch, quorums[0])

        def change(now: LogMeta) -> LogMeta:
            return metadata.open_next(self._ended(now, recovery), segment, nodes, metadata.TAKE_OVER_SEGMENTS_MAX, quorums)

        return change

    async def end(self) -> Change:
        """Recover: the change of the metadata that closes the last segment."""
        recovery = await self.recover()
        return lambda now: self._ended(now, recovery)

    def _ended(self, now: LogMeta, recovery: SegmentRecovery | None) -> LogMeta:
        metadata.owned(now, self._meta.epoch)
        if recovery is None or recovery.end is None:
            return now
        return metadata.close_last(now, recovery.end, recovery.written, time.time_ns() // 1_000_000)

    async def recover(self) -> SegmentRecovery | None:
        """The finished recovery, None if there was nothing to recover. Raises LogFenced; waits for stores otherwise."""
        recovery = self._recovery
        if recovery is None:
            return None
        readers = [asyncio.create_task(self._ask(recovery, node)) for node in recovery.nodes]
        try:
            while not recovery.done:
                self._progress.clear()
                if recovery.writing is not None:
                    for node, frame in recovery.frames():
                        self._stores.send(node, frame)
                if self._failed is not None:
                    raise self._failed
                if not recovery.done and not self._progress.is_set():
                    await self._pause()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        return recovery

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(SECURE_SECONDS):
                await self._progress.wait()
        except TimeoutError:
            await self._replace_silent()

    async def _ask(self, recovery: SegmentRecovery, node: str) -> None:
        """Fence the node, then ask it what it knows, until the end is decided; again and again if it fails."""
        segment, epoch = recovery.segment.id, recovery.epoch
        fenced = False
        while recovery.end is None:
            before = recovery.position if recovery.writing is not None else 0
            try:
                if not fenced:
                    answer = await self._stores.request(node, wire.FenceLog(segment, epoch), wire.Fenced, REQUEST_SECONDS)
                    recovery.node_fenced(node, answer.confirmed)
                    fenced = True
                    if recovery.writing is not None:
                        self._enough.set()
                else:
                    await self._enough.wait()
                    request = wire.Recover(segment, epoch, recovery.position, wire.RECOVER_COUNT_MAX)
                    found = await self._stores.request(node, request, wire.Recovered, REQUEST_SECONDS)
                    recovery.answered(node, found.first, found.answers)
                    if (undecidable := recovery.undecidable) is not None:
                        self._failed = _undecided(recovery, *undecidable)
                self._heard[node] = asyncio.get_running_loop().time()
                self._progress.set()
            except LogFenced as error:
                self._failed = error
                self._progress.set()
                return
            except TemporaryError as error:
                log.info(
                    "segment is in recovery: a store does not answer, asking again",
                    extra={"fields": {"segment": segment, "node": node, "reason": str(error)}},
                )
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if recovery.end is None and recovery.writing is not None and recovery.position == before:
                await asyncio.sleep(RETRY_SECONDS / 5)  # others must answer first

    async def _replace_silent(self) -> None:
        """Entries were not confirmed in time: send again, and take other nodes for silent ones where there are some."""
        recovery = self._recovery
        assert recovery is not None
        writing = recovery.writing
        if writing is None or writing.drained:
            return
        writing.resume()
        silent = {node for node in writing.nodes if writing.behind(node)}
        good = tuple(node for node in writing.nodes if node not in silent)
        for node in writing.nodes:
            writing.send_again(node)
        if len(good) >= recovery.ack_quorum:
            return
        fresh = await self._fresh(recovery, len(silent))
        fresh += self._returning(recovery)[: len(silent) - len(fresh)]
        if self._failed is None and len(good) + len(fresh) >= recovery.ack_quorum:
            recovery.replace((*good, *fresh))

    async def _fresh(self, recovery: SegmentRecovery, count: int) -> tuple[str, ...]:
        """Up to `count` hosts more that know the segment from now on."""
        spares = recovery.spares(self._stores.directory.hosts())
        if not spares:
            return ()
        segment, ranked = recovery.segment.id, rank(recovery.segment.id, spares)
        try:
            return await open_nodes(self._stores, segment, recovery.epoch, ranked, count, 1)
        except LogFenced as error:
            self._failed = error
        except TemporaryError as error:
            log.info(
                "segment keeps its ensemble: no other store took it",
                extra={"fields": {"segment": segment, "reason": str(error)}},
            )
        return ()

    def _returning(self, recovery: SegmentRecovery) -> tuple[str, ...]:
        """Nodes of the segment that may be written to again: those first that answered last."""
        fit = [node for node in recovery.returning if node in self._heard and node not in self._unfit]
        return tuple(sorted(fit, key=lambda node: self._heard[node], reverse=True))


def _undecided(recovery: SegmentRecovery, position: int, unsure: tuple[str, ...]) -> DataLost:
    return DataLost(
        f"whether segment {recovery.segment.id} has an acknowledged entry {position} can't be found out: {', '.join(unsure)} "
        f"of {', '.join(sorted(recovery.nodes))} lost part of what they held, the others do not have it. Bring back their "
        "disks; it is tried again every few seconds. If they are gone for good, remove the queue"
    )


async def announce(log_id: str, stores: Stores, meta: LogMeta, epoch: int, write_quorum: int) -> tuple[str, tuple[str, ...]]:
    """Id and nodes of the epoch's next segment. Raises LogFenced, NoHosts, LogUnavailable."""
    segment = wire.segment_id(log_id, epoch, meta.serial)  # never used twice
    hosts, wanted = candidates(segment, stores.directory), max(meta.write_quorum, write_quorum)
    nodes = await open_nodes(stores, segment, epoch, hosts, wanted, meta.ack_quorum)
    if len(nodes) < wanted:
        fields = {"log": log_id, "nodes": len(nodes), "wanted": wanted}
        log.warning("log is under-replicated: too few stores for its next segment", extra={"fields": fields})
    return segment, nodes


async def open_nodes(
    stores: Stores,
    segment: str,
    epoch: int,
    candidates: list[str],
    count: int,
    least: int,
) -> tuple[str, ...]:
    """Announce the segment to stores in order of preference until `count` know it; at least `least`.

    Raises LogFenced, NoHosts (fewer than `least` known hosts), LogUnavailable (fewer answered).
    """
    if len(candidates) < least:
        raise NoHosts(f"{len(candidates)} hosts with a store, this log needs {least}")
    opened: list[str] = []
    errors: list[RoqError] = []

    async def announce(node: str) -> None:
        try:
            await stores.request(node, wire.OpenSegment(segment, epoch), wire.StoreDone, REQUEST_SECONDS)
            opened.append(node)
        except RoqError as error:
            errors.append(error)

    rest = list(candidates)
    while len(opened) < count and rest:
        wanted, rest = rest[: count - len(opened)], rest[count - len(opened) :]
        await asyncio.gather(*map(announce, wanted))
        if fenced := next((error for error in errors if isinstance(error, LogFenced)), None):
            raise fenced
    if len(opened) < least:
        raise (
            errors[-1]
            if len(errors) == 1
            else LogUnavailable(f"{len(opened)} stores answered, this log needs {least}: {errors}")
        )
    return tuple(node for node in candidates if node in opened)[:count]

"""Reading a replicated log: from any node that has an entry, up to the last confirmed one. Never disturbs the writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from roq.coordination import paths
from roq.coordination.link import Node
from roq.coordination.session import Session
from roq.errors import DataLost, FrameError, LogTrimmed, LogUnavailable, RoqError
from roq.log.replicated.health import Directory
from roq.log.replicated.metadata import LogMeta, SegmentMetadata, SegmentState
from roq.log.replicated.stores import Stores
from roq.wire import store as wire
from roq.wire.assignment import from_json

WAIT_SECONDS = 5.0  # a store holds a question for news so long
ANSWER_SECONDS = 3.0
RETRY_SECONDS = 0.1
NOWHERE = 1 << 62  # a position that no entry has
Entry = tuple[int, bytes]


class SegmentReader:
    """Reads a log of which somebody else knows the metadata."""

    def __init__(self, log_id: str, stores: Stores) -> None:
        self.log_id, self.stores = log_id, stores
        self.of_queue = ("", "")  # of a tape, see wire.Read
        self._changed = asyncio.Event()  # the metadata did: a question that waits for news is dropped
        self._preferred = ""

    async def refresh(self) -> LogMeta:
        """The metadata, read now. Raises LogUnavailable (there is no such log), or what the one does who has them."""
        raise NotImplementedError

    async def read_from(
        self, meta: LogMeta, after: int, wait_seconds: float = 0.0, *, ask_all: bool = False, last: int = 0
    ) -> list[Entry]:
        """Confirmed entries behind position `after`, about 1 MiB at most; [] if there are none yet, and have not been for
        `wait_seconds`. ask_all: before that is believed; one node alone may lag behind. last: up to this one, which is known to
        be confirmed; 0: all there are.

        Raises LogTrimmed (load the snapshot), LogUnavailable (no node that has it answers), DataLost (all answer, none has it).
        """
        position = after + 1
        if after < meta.trimmed and (not meta.segments or meta.segments[0].first > position):
            raise LogTrimmed()
        for segment in meta.segments:
            if segment.first <= position and (segment.state is not SegmentState.CLOSED or position <= segment.last):
                return await self._read_segment(segment, position, wait_seconds, ask_all=ask_all, up_to=last)
        return []

    async def is_nothing_at(self, meta: LogMeta, position: int) -> bool:
        """Whether no entry there counts as stored, nor any behind it, though it may not be known yet that it is confirmed: no
        node of the open segment holds one, and so many say so that too few others could."""
        segment = meta.segments[-1]
        nodes = segment.fragment_of(position).nodes
        requests = [self._ask(node, wire.Read(segment.id, position, position, 0.0, *self.of_queue)) for node in nodes]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        known = [answer for answer in answers if isinstance(answer, wire.Entries)]
        return len(known) > len(nodes) - meta.ack_quorum and not any(answer.entries for answer in known)

    async def confirmed_end(self, meta: LogMeta) -> int:
        """Position of the last confirmed entry, as far as the nodes that answer know. Raises LogUnavailable: none does."""
        if not meta.segments or meta.segments[-1].state is SegmentState.CLOSED:
            return meta.next_first - 1
        segment = meta.segments[-1]
        requests = [
            self._ask(node, wire.Read(segment.id, NOWHERE, 0, 0.0, *self.of_queue)) for node in segment.fragments[-1].nodes
        ]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        known = [answer.confirmed for answer in answers if isinstance(answer, wire.Entries)]
        if not known:
            raise LogUnavailable(f"the end of log {self.log_id} can't be found out now: {'; '.join(map(str, answers))}")
        return max(*known, segment.first - 1)

    async def _read_segment(
        self, segment: SegmentMetadata, position: int, wait_seconds: float, *, ask_all: bool = False, up_to: int = 0
    ) -> list[Entry]:
        fragment = segment.fragment_of(position)
        later = [one.first for one in segment.fragments if one.first > position]
        last = min(later) - 1 if later else max(segment.last, 0)  # 0: up to what is confirmed
        last = min(last or up_to, up_to) if up_to else last
        live = self.stores.directory.hosts()
        nodes = sorted(fragment.nodes, key=lambda node: (node not in live, node != self._preferred))
        silent: list[str] = []
        none_yet: list[str] = []  # nodes that know of nothing more
        for node in nodes:
            request = wire.Read(segment.id, position, last, 0.0 if last or none_yet else wait_seconds, *self.of_queue)
            try:
                answer = await self._ask(node, request)
            except RoqError as failed:
                silent.append(f"{node}: {failed}")
                continue
            entries = list(enumerate(answer.entries, answer.first))
            if not _intact(segment.id, answer):
                silent.append(f"{node}: sent a damaged entry")
                continue
            if not (entries or answer.missing):
                none_yet.append(node)
            if entries or not (answer.missing or ask_all):
                self._preferred = node
                return entries
        if none_yet:
            self._preferred = none_yet[0]  # not one that is silent: the others would hear of news only after it
            return []
        where = f"entry {position} of log {self.log_id}, segment {segment.id},"
        if not silent or not last:
            now = await self.refresh()
            if not silent and segment in now.segments:
                raise lost(f"{where} is damaged or missing on every host that should hold it: {', '.join(sorted(nodes))}")
        raise LogUnavailable(f"{where} can't be read from {len(nodes)} hosts now: {'; '.join(silent) or 'they moved'}")

    async def _ask(self, node: str, request: wire.Read) -> wire.Entries:
        """The answer; a question that waits for news is dropped when the metadata change."""
        ask = asyncio.ensure_future(self.stores.request(node, request, wire.Entries, request.wait_seconds + ANSWER_SECONDS))
        if not request.wait_seconds:
            return await ask
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((ask, changed), return_when=asyncio.FIRST_COMPLETED)
            return ask.result() if ask.done() else wire.Entries(request.first, [], [], 0, False)
        finally:
            ask.cancel()
            changed.cancel()
            await asyncio.gather(ask, changed, return_exceptions=True)


class LogReader(SegmentReader):
    """Reads one log. Needs ZooKeeper to begin, and to see new segments."""

    def __init__(self, session: Session, log_id: str, directory: Directory) -> None:
        super().__init__(log_id, Stores(directory))
        self._session = session
        self._meta: LogMeta | None = None
        self._known = asyncio.Event()
        self._watch = session.watch_data(paths.log(log_id), self._seen)

    def _seen(self, node: Node | None) -> None:
        if node is not None:
            try:
                self._meta = from_json(node.data, LogMeta)
            except FrameError:
                return
            self._known.set()
            self._changed.set()

    async def meta(self) -> LogMeta:
        """The newest metadata known; waits until the log is there."""
        await self._known.wait()
        assert self._meta is not None
        return self._meta

    async def refresh(self) -> LogMeta:
        """Metadata read now. Raises LogUnavailable (there is no such log), ZooKeeperUnavailable."""
        node = await self._session.get(paths.log(self.log_id))
        if node is None:
            raise LogUnavailable(f"there is no log {self.log_id}")
        self._seen(node)
        return await self.meta()

    async def load_snapshot(self) -> tuple[int, bytes] | None:
        """(position, data) of the newest snapshot, None if there is none. Raises LogUnavailable, DataLost (no host has it)."""
        while True:
            snapshot = (await self.refresh()).snapshot
            if snapshot is None:
                return None
            try:
                return snapshot.position, await self.stores.get_blob(snapshot.nodes, snapshot.blob)
            except RoqError as error:
                newer = (await self.refresh()).snapshot
                if newer != snapshot:
                    continue
                if isinstance(error, DataLost):
                    raise lost(f"the snapshot of log {self.log_id} as of entry {snapshot.position}: {error}") from error
                raise

    async def read(self, after: int) -> list[Entry]:
        """As `read_from`, of what is known."""
        return await self.read_from(await self.meta(), after)

    async def follow(self, after: int) -> AsyncIterator[list[Entry]]:
        """Runs of confirmed entries behind `after`, as they come, for ever. Waits while stores are away. Raises LogTrimmed,
        DataLost."""
        while True:
            meta = await self.meta()
            self._changed.clear()
            try:
                entries = await self.read_from(meta, after, WAIT_SECONDS)
            except LogUnavailable:
                await self._news(RETRY_SECONDS)
                continue
            if entries:
                after = entries[-1][0]
                yield entries
            elif not meta.segments or meta.segments[-1].state is SegmentState.CLOSED:  # nothing is being written
                await self._news(WAIT_SECONDS)

    async def _news(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Let go."""
        self._watch.close()
        self.stores.close()


def lost(what: str) -> DataLost:
    """Nothing behind it may be applied without it: what is to be done."""
    return DataLost(
        f"{what}. What follows it can't be applied without it. Bring back a disk that has it, or a standby that has applied "
        "it; it is looked for again every few seconds. If there is none, remove the queue"
    )


def _intact(segment: str, answer: wire.Entries) -> bool:
    return all(
        wire.entry_crc(segment, position, entry) == crc
        for position, (crc, entry) in enumerate(zip(answer.crcs, answer.entries, strict=True), answer.first)
    )

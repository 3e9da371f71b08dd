"""The follower's socket and thread around its two roles. Nothing is decided here; see roq/wire/shuffle.py."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from roq.config import FollowerConfig, load
from roq.coordination.locate import GcmClient
from roq.errors import Closed, DeadlineExceeded, RoqError, StorageFailed
from roq.runtime.loop_thread import LoopThread
from roq.runtime.observe import Counters, logger
from roq.runtime.rpc import RpcPool, RpcServer
from roq.shuffle.committed import CommittedAttempts
from roq.shuffle.node.buffer import Buffer
from roq.shuffle.node.committed import CommittedRegistry
from roq.shuffle.node.committer import FREE_BYTES_MIN
from roq.shuffle.node.datafile import raise_limit
from roq.shuffle.node.memory import BlockMemory, Budget
from roq.shuffle.node.queries import FencedCommands, RangeQueries
from roq.shuffle.node.repair import Fetcher, List, RangeRepair
from roq.shuffle.node.storage import RangeStorage
from roq.wire import shuffle as wire
from roq.wire.gcm import ListShuffles, ReportRuns, ShuffleList, TableInfo
from roq.wire.process import ChildSpec
from roq.wire.rights import for_shuffles

log = logger(__name__)
PORT = "shuffle"  # of a store
REPORT_SECONDS = 5.0  # one report, with all tries
STOP_SECONDS = 5.0
PEER_SECONDS = 20.0  # for the answer of another follower, whose disk may be slow
OPEN_AGAIN_SECONDS = 5.0  # after its disk failed: the leader counts on it as long as the store runs
FETCH_SECONDS = 20.0  # then the leader is told that it goes on
Report = Callable[[ReportRuns], Awaitable[TableInfo]]


class Follower:
    """Both roles on the running loop. Make it with `open`. directory: of all shuffles' data."""

    def __init__(
        self,
        host: str,
        directory: Path,
        storage: RangeStorage,
        budget: Budget,
        report: Report,
        list: List | None = None,
    ) -> None:
        self.host, self.storage, self.budget = host, storage, budget
        self.counters = storage.counters
        self._peers = RpcPool(wire.Reply, PEER_SECONDS)
        self.queries, self.registry = RangeQueries(storage), CommittedRegistry(FREE_BYTES_MIN)
        self.commands = FencedCommands(storage, self.queries)
        self.fetcher = Fetcher(storage, self._peers, budget, self.commands)
        self.repair = RangeRepair(host, storage, self.fetcher, report, list)
        self._repairing = asyncio.get_running_loop().create_task(self.repair.run(), name="repair")
        memory = BlockMemory(directory, budget, self.counters, FREE_BYTES_MIN)
        self.buffer = Buffer(host, memory, self.counters, report, self._store)
        self._server: RpcServer | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        directory: Path,
        address: str,
        port: int,
        report: Report,
        memory_bytes: int,
        list: List | None = None,
    ) -> Follower:
        """Serve at address:port (0: any free one). Raises PortTaken, StorageFailed."""
        budget = Budget(memory_bytes)
        storage = await RangeStorage.open(directory / "shuffles", budget, Counters())
        follower = cls(host, directory / "spill", storage, budget, report, list)
        try:
            follower._server = RpcServer(
                address,
                port,
                wire.Request,
                follower._handle,
                counters=follower.counters,
                drained=lambda: None,
                unfinished_max=budget.coming_max,
                allow=for_shuffles(follower._name_of),
            )
        except RoqError:
            await follower.close()
            raise
        budget.unsent = follower._server.unsent
        return follower

    @property
    def port(self) -> int:
        """Where it serves."""
        return self._server.port if self._server is not None else 0

    async def _store(self, endpoint: str, request: wire.StorePieces) -> None:
        await self._peers.request(endpoint, request, wire.FollowerDone)

    async def _handle(self, peer: bytes, request: wire.Request) -> msgspec.Struct:
        match request:
            case wire.OpenAttempt():
                self.buffer.open(request)
            case wire.SendBlocks():
                self.buffer.send(request)
            case wire.EndRun():
                self.buffer.end_run(request)
            case wire.FinishAttempt():
                await self.buffer.finish(request)
            case wire.AbandonAttempt():
                self.buffer.abandon(request)
            case wire.StorePieces(shuffle, name, spec, pieces):
                await self.storage.store(shuffle, name, spec, pieces)
            case wire.NameCommitted(shuffle, name, spec):
                if (committed := await self.registry.told(request)) is not None:
                    await self.registry.save(await self.storage.opened(shuffle, name, spec), committed)
            case wire.ReadBlocks() | wire.CutBlocks():
                return wire.Blocks(await self.storage.read(request))
            case wire.TellSpec(shuffle):
                return wire.SpecTold(*self.storage.known_as(shuffle))
            case wire.ListSlices() | wire.TellSamples() | wire.CountRows():
                return await self._query(request)
            case wire.FetchInterval() | wire.KeepIntervals() | wire.ForgetShuffle() | wire.TableChanged():
                await self.storage.obey(request.epoch)
                return await self._command(request)
            case wire.DescribeFollower():
                return self._describe()
        return wire.FollowerDone()

    async def _committed(self, request: wire.AboutCommitted) -> CommittedAttempts:
        """Those that the request is about. Raises WinnersUnknown."""
        if not request.digest:
            return CommittedAttempts(request.committed)
        return await self.registry.of(request.shuffle, self.storage.shuffles.get(request.shuffle), request.digest)

    async def _query(self, request: wire.ListSlices | wire.TellSamples | wire.CountRows) -> msgspec.Struct:
        if request.shuffle not in self.storage.shuffles:  # of what is not here nothing counts
            request = msgspec.structs.replace(request, digest="")
        committed = await self._committed(request)
        match request:
            case wire.ListSlices(shuffle, interval, every=every, begin=begin):
                return await self.queries.slices(shuffle, interval, None if every else committed, begin)
            case wire.TellSamples(shuffle, intervals, keys=keys, begin=begin):
                return await self.queries.samples(shuffle, intervals, committed, keys, begin)
            case wire.CountRows(shuffle, intervals, begin=begin):
                return await self.queries.count(shuffle, intervals, committed, begin)

    async def _command(
        self, request: wire.FetchInterval | wire.KeepIntervals | wire.ForgetShuffle | wire.TableChanged
    ) -> msgspec.Struct:
        match request:
            case wire.FetchInterval():
                return await self._fetch(request)
            case wire.KeepIntervals(epoch, shuffle, intervals, sealed=sealed, table_epoch=table_epoch):
                committed = await self._committed(request) if sealed else None
                await self.commands.keep(epoch, shuffle, table_epoch, intervals, committed)
            case wire.ForgetShuffle(_, shuffle):
                self.buffer.forget(shuffle)
                self.registry.forget(shuffle)
                await self.storage.forget(shuffle)
            case wire.TableChanged(_, shuffle, table_epoch):
                await self.buffer.table_changed(shuffle, table_epoch)
        return wire.FollowerDone()

    async def _fetch(self, request: wire.FetchInterval) -> wire.Fetched:
        every = not (request.committed or request.digest)
        committed = None if every else await self._committed(request)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return wire.Fetched(await self.fetcher.fetch(request, committed))
        except TimeoutError:
            return wire.Fetched(0, complete=False)

    def _name_of(self, shuffle: str) -> str | None:
        stored = self.storage.shuffles.get(shuffle)
        return self.buffer.name_of(shuffle) if stored is None else stored.name

    def _describe(self) -> wire.FollowerView:
        stored = {shuffle.id: shuffle.live for shuffle in self.storage.shuffles.values()}
        budget, lacking = self.budget, self.repair.lacking
        used = budget.used + (self._server.unfinished() if self._server is not None else 0)
        return wire.FollowerView(
            self.host, used, budget.size, budget.paused, self.buffer.attempts, stored, dict(self.counters),
            lacking or (), lacking is not None,
        )  # fmt: skip

    async def close(self) -> None:
        """Stop serving; what is not answered is not promised."""
        if self._server is not None:
            self._server.close()
        self._repairing.cancel()
        await asyncio.gather(self._repairing, return_exceptions=True)
        await self.fetcher.close()
        await self.buffer.close()
        await self.storage.close()
        self._peers.close()


class FollowerThread:
    """A store's follower in a thread of its own. failed(error): it can't serve."""

    def __init__(self, spec: ChildSpec, failed: Callable[[RoqError], object]) -> None:
        self._spec, self._failed = spec, failed
        self._config = load(FollowerConfig, None, os.environ, {})
        raise_limit()
        self._thread = LoopThread("follower")
        self._follower: Follower | None = None
        self._gcm: GcmClient | None = None
        self._stopping = threading.Event()
        self._starting = threading.Thread(target=self._start, name="follower starts", daemon=True)
        self._starting.start()

    def _start(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    return self._thread.call(self._open())
                except StorageFailed as error:  # work queues go on; whoever asks this follower turns to another one
                    log.critical(
                        "follower could not start: its disk is tried again soon", extra={"fields": {"reason": str(error)}}
                    )
                self._stopping.wait(OPEN_AGAIN_SECONDS)
        except Closed:  # stopped before it had begun
            return None
        except RoqError as error:
            self._failed(error)

    async def _open(self) -> None:
        spec = self._spec
        gcm = self._gcm = self._gcm or GcmClient(spec.zookeeper)

        async def report(runs: ReportRuns) -> TableInfo:
            try:
                async with asyncio.timeout(2 * REPORT_SECONDS):
                    return await gcm.request(runs, TableInfo, REPORT_SECONDS)
            except TimeoutError:
                raise DeadlineExceeded("no answer from the leader") from None

        async def shuffles() -> ShuffleList:
            return await gcm.request(ListShuffles(), ShuffleList, REPORT_SECONDS)

        directory, memory = Path(spec.data_dir), self._config.shuffle_memory_bytes
        self._follower = await Follower.open(spec.host, directory, spec.address, spec.ports[PORT], report, memory, shuffles)
        log.info("follower serves", extra={"fields": {"port": self._follower.port, "memory_bytes": memory}})

    async def _close(self) -> None:
        if self._follower is not None:
            async with asyncio.timeout(STOP_SECONDS):
                await self._follower.close()
        if self._gcm is not None:
            self._gcm.close()

    def close(self) -> None:
        """Blocking: stop it."""
        self._stopping.set()
        try:
            self._thread.call(self._close())
        except (RoqError, TimeoutError) as error:
            log.warning("follower did not stop in time", extra={"fields": {"reason": str(error)}})
        self._thread.stop()


def beside_store(spec: ChildSpec, failed: Callable[[RoqError], object]) -> FollowerThread | None:
    """The shuffle node in the process of a host's store; None: this one has no part in shuffles."""
    return FollowerThread(spec, failed) if PORT in spec.ports else None

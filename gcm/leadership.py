"""Who leads: the latch, the epoch, and one term after the other. Standbys know the leader's address and say so.

Order (RELIABILITY §2.4): win the latch, bump the epoch, read everything, finish what was begun, publish the address, serve. A
term ends when the latch is lost (also while ZooKeeper is out of reach) or a write fails. Deciding is elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gcm.background import Finisher, HostRepairer
from gcm.cluster import ClusterState
from gcm.durables import DurableStore
from gcm.emptiness import why_in_use
from gcm.evacuator import Evacuator, RemainsCounter
from gcm.fleet_keeper import FleetKeeper
from gcm.producers import ProducerStore
from gcm.providers.means import FleetMeans
from gcm.shard_keeper import ShardKeeper
from gcm.shuffle_leader import ShuffleLeader
from gcm.term import LeaderTerm
from roq.config import GcmConfig
from roq.coordination import paths
from roq.coordination.election import Fence, LeaderLatch, fenced, take_epoch
from roq.coordination.link import CreateEphemeral, Delete, Node, Op
from roq.coordination.session import Session
from roq.errors import NotLeader, RoqError, StaleEpoch, UnknownFormat
from roq.runtime.backoff import delays
from roq.runtime.observe import Counters, logger
from roq.wire.gcm import LeaderAddress
from roq.wire.hosts import HostRemains
from roq.wire.tree_format import check_format, read_format

log = logger(__name__)


@dataclass(frozen=True)
class Serving:
    """What a leader answers from."""

    term: LeaderTerm
    finisher: Finisher
    shuffles: ShuffleLeader
    durables: DurableStore
    producers: ProducerStore
    remains: RemainsCounter
    fleet: FleetKeeper


class Leadership:
    """Takes part in the election for ever. on_change(before, after): after every change of the leader's cluster."""

    def __init__(
        self,
        session: Session,
        participant: str,
        address: LeaderAddress,
        counters: Counters,
        on_change: Callable[[ClusterState, ClusterState], None],
        config: GcmConfig,
        means: FleetMeans | None = None,
    ) -> None:
        self._session, self._participant, self._address, self._counters = session, participant, address, counters
        self._on_change, self._config, self._means = on_change, config, means
        self._serving: Serving | None = None
        self._leader: LeaderAddress | None = None
        self._latch = LeaderLatch(session, paths.LATCH, participant)

    def serving(self) -> Serving:
        """The current term; raises NotLeader with the leader's address."""
        if self._serving is None or not self._latch.is_leader or self._serving.term.ended.done():
            raise NotLeader("this Global Configuration Manager does not lead", leader=self.leader)
        return self._serving

    @property
    def leader(self) -> str:
        """ "host:port" of another leader, empty while none is known."""
        known = self._leader
        if known is None or (known.host, known.port) == (self._address.host, self._address.port):
            return ""
        return f"{known.host}:{known.port}"

    async def run(self) -> None:
        """Lead whenever it is our turn, until cancelled."""
        watch = self._session.watch_data(paths.LEADER, self._leader_seen)
        try:
            self._latch.start()
            pauses = delays()
            while True:
                latch_term = await self._latch.wait_leader()
                reason = await self._lead(latch_term)
                if isinstance(reason, StaleEpoch | UnknownFormat):  # somebody else leads, or must: queue up again
                    await self._latch.stop()
                    if isinstance(reason, UnknownFormat):
                        await self._format_known()
                    self._latch = LeaderLatch(self._session, paths.LATCH, self._participant)
                    self._latch.start()
                if reason is None:
                    pauses = delays()
                else:
                    await asyncio.sleep(next(pauses))
        finally:
            watch.close()
            await self._latch.stop()

    async def _format_known(self) -> None:
        """Wait until the tree is one that we may lead: until then newer GCMs have the election for themselves."""
        known = asyncio.Event()

        def seen(node: Node | None) -> None:
            with suppress(UnknownFormat):
                check_format(read_format(node.data if node is not None else None))
                known.set()

        watch = self._session.watch_data(paths.FORMAT, seen)
        try:
            await known.wait()
        finally:
            watch.close()

    async def _lead(self, latch_term: int) -> BaseException | None:
        """One term, from epoch to end; why it ended, None if the latch was lost."""
        try:
            fence = await take_epoch(self._session)
            term = await LeaderTerm.begin(self._session, fence, self._counters)
            shuffles = await self._shuffles(term)
        except RoqError as error:
            log.warning(
                "leadership could not be taken", extra={"fields": {"error": type(error).__name__, "reason": str(error)}}
            )
            return error
        term.view.on_change.append(self._on_change)
        finisher = Finisher(term)
        remains = RemainsCounter(term)
        self._start_keepers(term, partial(_remains, remains, shuffles))
        durables = DurableStore(self._session, term)
        durables.start()
        producers = ProducerStore(self._session, term)
        producers.start()
        fleet = FleetKeeper(self._session, term, self._means, partial(why_in_use, term.view, remains, shuffles))
        fleet.start()
        lost = asyncio.get_running_loop().create_task(self._latch.wait_lost(latch_term))
        over: list[asyncio.Future[Any]] = [lost, term.ended]
        reason: BaseException | None = None
        try:
            await self._publish(fence)
            self._serving = Serving(term, finisher, shuffles, durables, producers, remains, fleet)
            self._counters["terms"] += 1
            log.info("this GCM leads", extra={"fields": {"epoch": fence.epoch, "queues": len(term.view.cluster.queues)}})
            self._on_change(ClusterState(), term.view.cluster)
            term.view.start()  # behind the address: its reads, two for each host, would hold that up
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            reason = term.ended.result() if term.ended.done() else None
        except RoqError as error:
            reason = error
        finally:
            self._serving = None
            lost.cancel()
            await term.end(reason)
            shuffles.close()
            remains.close()
            await finisher.stop()
            log.warning("this GCM leads no longer", extra={"fields": {"epoch": fence.epoch, "reason": str(reason or "")}})
            await self._withdraw()
        return reason

    def _start_keepers(self, term: LeaderTerm, count: Callable[[str], Awaitable[HostRemains]]) -> None:
        """What goes on in a term without being asked. count: what is still on a host."""
        HostRepairer(term).start()
        Evacuator(term, self._config.rebalance_after_seconds, count).start()
        ShardKeeper(term, self._config.shard_kept_seconds).start()

    async def _shuffles(self, term: LeaderTerm) -> ShuffleLeader:
        try:
            return await ShuffleLeader.begin(self._session, term, self._config.shuffle_abandoned_seconds)
        except RoqError as error:
            await term.end(error)
            raise

    async def _publish(self, fence: Fence) -> None:
        """Put our address in gcm/leader, in place of whatever is there."""
        address = msgspec.structs.replace(self._address, epoch=fence.epoch)
        old = await self._session.get(paths.LEADER)
        operations: list[Op] = [Delete(paths.LEADER)] if old is not None else []
        await fenced(self._session, fence, *operations, CreateEphemeral(paths.LEADER, msgspec.json.encode(address)))
        self._leader = address

    async def _withdraw(self) -> None:
        """Take our address out of gcm/leader, if it is still ours."""
        try:
            node = await self._session.get(paths.LEADER)
            if node is not None and node.owner == self._session.session_id:
                await self._session.delete(paths.LEADER, node.version)
        except RoqError as error:  # it goes with the session
            log.info("leader address was not withdrawn: it ends with the session", extra={"fields": {"reason": str(error)}})

    def _leader_seen(self, node: Node | None) -> None:
        try:
            self._leader = msgspec.json.decode(node.data, type=LeaderAddress) if node is not None else None
        except msgspec.MsgspecError as error:
            log.error("leader address is unreadable", extra={"fields": {"reason": str(error)}})
            self._leader = None


async def _remains(counter: RemainsCounter, shuffles: ShuffleLeader, host: str) -> HostRemains:
    return await counter.count(host, shuffles.ranges_on(host))

"""One method per request of roq/wire/gcm.py, named after it: check it, change the cluster, wait until it is so, answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from gcm import evacuation, shards, transactions, work_queues
from gcm.cluster import ClusterState, queue_info, store_endpoints, work_queue_info
from gcm.crash import crash_point
from gcm.durables import DurableRequest
from gcm.fleet_keeper import FleetRequest
from gcm.history import check_not_reserved, check_removable, creation, part
from gcm.leadership import Leadership, Serving
from gcm.parts import part_of
from gcm.producers import ProducerRequest
from gcm.shuffle_leader import ShuffleLeader
from gcm.snapshots import Listing, Snapshots
from gcm.term import LeaderTerm
from roq.errors import (
    CallError,
    ExchangeNotFound,
    HostFull,
    HostNotFound,
    NoHosts,
    NotLeader,
    NotReady,
    NotRecorded,
    QueueConflict,
)
from roq.ids import check_name
from roq.wire import gcm as wire
from roq.wire.assignment import STORES, Leaving, work_subject
from roq.wire.gcm import Done, QueueInfo
from roq.wire.hosts import DescribeRemains, HostRemains
from roq.wire.kpi import HISTORY_QUEUES
from roq.wire.options import CreateMissing, GetOptions, OptionsInfo, SetRebalance, SetTemplate
from roq.wire.policy import Policy, split
from roq.wire.recording import tape_exchange, tapes_prefix
from roq.wire.shards import SetShards

ShuffleRequest = (
    wire.CreateShuffle
    | wire.RemoveShuffle
    | wire.NameReceipts
    | wire.CommitShuffle
    | wire.RebalanceShuffle
    | wire.ReportRuns
    | wire.DescribeShuffle
    | wire.ListShuffles
)
Placing = TypeVar("Placing", wire.CreateQueue, wire.CreateExchange)
Place = Callable[[ClusterState, Placing, float, random.Random], ClusterState]


class Handlers:
    """Answers requests while we lead; otherwise raises NotLeader with the leader's address.

    wait_seconds: longest wait for hosts. chance: breaks ties between hosts. clock: seconds since 1970.
    """

    def __init__(
        self,
        leadership: Leadership,
        leader: str,
        wait_seconds: float,
        chance: random.Random,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._leadership, self._wait_seconds = leadership, wait_seconds
        self._chance, self._clock = chance, clock or time.time
        self._snapshots = Snapshots(leader, self._clock)

    def now(self) -> float:
        """Seconds since 1970."""
        return self._clock()

    async def handle(self, peer: bytes, request: wire.Request) -> msgspec.Struct:
        """The reply to one request."""
        serving = self._leadership.serving()
        try:
            if isinstance(request, ShuffleRequest):
                return await self._about_shuffles(serving.shuffles, request)
            if isinstance(request, DurableRequest):
                return await serving.durables.handle(request, self._clock())
            if isinstance(request, ProducerRequest):
                return await serving.producers.handle(request, self._clock())
            if isinstance(request, FleetRequest):
                return await serving.fleet.handle(request, self._clock())
            return await self._change(serving, request)
        except NotLeader as error:  # it ended while we waited: tell who leads now, if that is known
            raise NotLeader(str(error), leader=self._leadership.leader) from error

    async def _change(self, serving: Serving, request: wire.Request) -> msgspec.Struct:
        match request:
            case wire.CreateQueue(name) | CreateMissing(name):
                check_not_reserved(serving.term.view.cluster, check_name(name))
                return await self._make_queue(serving, request)
            case wire.RemoveQueue(name):
                check_removable(name)
                return await self.remove_queue(serving, request)
            case wire.StartQueue():
                return await self.start_queue(serving, request)
            case wire.StopQueue():
                return await self.stop_queue(serving, request)
            case wire.CreateExchange():
                return await self.create_exchange(serving, request)
            case wire.RemoveExchange():
                return await self.remove_exchange(serving, request)
            case wire.DrainHost() | DescribeRemains() | SetTemplate() | SetRebalance():
                return await self._about_hosts(serving, request)
            case wire.SetPolicy() | wire.RecordQueue() | wire.RecordHistory() | wire.DescribeTapes():
                return await self._about_queue(serving, request)
            case wire.CreateWorkQueue() | SetShards() | wire.RemoveWorkQueue():
                return await self._change_work_queue(serving, request)
            case _:
                return self._read(serving.term.view.cluster, request)

    async def _about_queue(
        self, serving: Serving, request: wire.SetPolicy | wire.RecordQueue | wire.RecordHistory | wire.DescribeTapes
    ) -> msgspec.Struct:
        match request:
            case wire.SetPolicy():
                return await self.set_policy(serving, request)
            case wire.RecordQueue():
                return await self.record_queue(serving, request)
            case wire.RecordHistory():
                return await self.record_history(serving, request)
            case wire.DescribeTapes():
                return await self.describe_tapes(serving, request)

    async def _make_queue(self, serving: Serving, request: wire.CreateQueue | CreateMissing) -> QueueInfo:
        if isinstance(request, wire.CreateQueue):
            return await self.create_queue(serving, request)
        return await self.create_missing(serving, request)

    async def _about_hosts(
        self, serving: Serving, request: wire.DrainHost | DescribeRemains | SetTemplate | SetRebalance
    ) -> msgspec.Struct:
        match request:
            case wire.DrainHost():
                return await self.drain_host(serving, request)
            case DescribeRemains():
                return await self.describe_remains(serving, request)
            case SetTemplate() | SetRebalance():
                return await self.set_options(serving, request)

    async def _change_work_queue(
        self, serving: Serving, request: wire.CreateWorkQueue | SetShards | wire.RemoveWorkQueue
    ) -> msgspec.Struct:
        if isinstance(request, wire.CreateWorkQueue):
            return await self.create_work_queue(serving, request)
        if isinstance(request, SetShards):
            return await self.set_shards(serving, request)
        return await self.remove_work_queue(serving, request)

    async def _about_shuffles(self, shuffles: ShuffleLeader, request: ShuffleRequest) -> msgspec.Struct:
        match request:
            case wire.ReportRuns():
                return await shuffles.report(request)
            case wire.NameReceipts():
                return shuffles.name_receipts(request)
            case wire.DescribeShuffle(name):
                return shuffles.info(name)
            case wire.ListShuffles():
                return shuffles.list()
        async with self._bounded(f"shuffle {request.name!r} is not ready"):
            match request:
                case wire.CreateShuffle():
                    return await shuffles.create(request, self._clock())
                case wire.RemoveShuffle():
                    return await shuffles.remove(request)
                case wire.CommitShuffle():
                    return await shuffles.commit(request)
                case wire.RebalanceShuffle():
                    return await shuffles.rebalance(request)

    def _read(self, cluster: ClusterState, request: wire.Request) -> msgspec.Struct:
        if isinstance(request, Listing):
            return self._snapshots.answer(cluster, request)
        match request:
            case wire.QueueExists(name):
                return wire.Exists(check_name(name) in cluster.queues)
            case wire.DescribeQueue(name):
                return queue_info(cluster, transactions.record_of(cluster, check_name(name)))
            case GetOptions():
                return OptionsInfo(cluster.options)
            case wire.GetPolicy(queue):
                return wire.PolicyInfo(*split(cluster.policy(transactions.record_of(cluster, check_name(queue)).name)))
            case wire.DescribeWorkQueue(name):
                return work_queue_info(cluster, work_queues.record_of(cluster, check_name(name, "work queue")))
            case wire.ListGroups(queue):
                groups = transactions.groups_of(cluster, transactions.record_of(cluster, check_name(queue)).name)
                return wire.WorkQueues(tuple(work_queue_info(cluster, group) for group in groups))
        raise CallError(f"no such request: {type(request).__name__}")

    # --- queues ------------------------------------------------------------------------------------------------------

    async def create_queue(self, serving: Serving, request: wire.CreateQueue) -> QueueInfo:
        """Created and serving, with stores if it shall be recorded; the same for a repetition, and for another request of the
        same name and settings."""
        name = check_name(request.name)
        _check(request.transaction, request.host)
        transactions.check_settings(request.settings)
        _check_policy(request.policy)
        term = serving.term
        async with self._bounded(f"queue {name!r} does not serve"):
            await term.view.until(name, lambda cluster: not transactions.leftovers(cluster, name))
            if name in term.view.cluster.unreadable:
                transactions.record_of(term.view.cluster, name)  # raises: nothing is made in its place
            crash_point("create_queue.received")
            subjects = (name, STORES) if request.record is not None else (name,)
            cluster = await self._placed(serving, request, name, subjects, transactions.create_queue)
            crash_point("create_queue.recorded")
            await serving.finisher.settle(transactions.record_of(cluster, name).transaction, self._wait_seconds)
            crash_point("create_queue.settled")
            await _until_ready(term, name, {})
            if request.record is not None:
                await _until_kept(term, name)
        return queue_info(term.view.cluster, transactions.record_of(term.view.cluster, name))

    async def create_missing(self, serving: Serving, request: CreateMissing) -> QueueInfo:
        """Serving: one that was there, however it is, or a new one by the template. Whoever comes second finds the first's."""
        view = serving.term.view
        while True:
            template, known = view.cluster.options.template, view.cluster.queues.get(request.name)
            asked = wire.CreateQueue(request.name, request.transaction, template.settings, "", template.policy, template.record)
            if known is not None:
                asked = wire.CreateQueue(request.name, request.transaction, known.settings)
            try:
                return await self.create_queue(serving, asked)
            except QueueConflict:
                if view.cluster.queues.get(request.name) is known:
                    raise

    async def set_options(self, serving: Serving, request: SetTemplate | SetRebalance) -> Done:
        """Written, and so from now on."""
        _check(request.transaction)

        def decide(cluster: ClusterState) -> ClusterState:
            if isinstance(request, SetTemplate):
                transactions.check_settings(request.template.check().settings)
                return replace(cluster, options=msgspec.structs.replace(cluster.options, template=request.template))
            return replace(cluster, options=msgspec.structs.replace(cluster.options, rebalance=request.on))

        await serving.term.change(decide)
        return Done()

    async def remove_queue(self, serving: Serving, request: wire.RemoveQueue) -> Done:
        """Removed with its groups, and none of their processes is left on a live host."""
        name = check_name(request.name)
        _check(request.transaction)
        await serving.term.change(lambda now: transactions.remove_queue(now, request, self._clock()), name)
        await serving.finisher.settle(request.transaction, self._wait_seconds)
        return Done()

    async def start_queue(self, serving: Serving, request: wire.StartQueue) -> Done:
        """Running and serving."""
        name = check_name(request.name)
        async with self._bounded(f"queue {name!r} does not serve"):
            cluster = await serving.term.change(lambda now: transactions.start_queue(now, name), name)
            await _until_ready(serving.term, name, _revisions(cluster, name))
        return Done()

    async def stop_queue(self, serving: Serving, request: wire.StopQueue) -> Done:
        """Stopped: none of its processes is left on a live host."""
        name = check_name(request.name)
        async with self._bounded(f"queue {name!r} has not stopped"):
            cluster = await serving.term.change(lambda now: transactions.stop_queue(now, name), name)
            hosts, revisions = cluster.hosts_of(transactions.record_of(cluster, name)), _revisions(cluster, name)
            await serving.term.view.until(name, lambda now: transactions.stopped(now, name, hosts, revisions))
        return Done()

    async def set_policy(self, serving: Serving, request: wire.SetPolicy) -> Done:
        """Written, and on its way to the ScalingProcess."""
        queue = check_name(request.queue)
        _check_policy(request.policy)
        await serving.term.change(lambda now: transactions.set_policy(now, request), queue)
        return Done()

    async def record_queue(self, serving: Serving, request: wire.RecordQueue) -> Done:
        """Written, and on its way to the Exchanges; stores run if it shall be recorded."""
        queue = check_name(request.queue)
        _check(request.transaction)
        async with self._bounded(f"not enough stores run for queue {queue!r}"):
            await serving.term.change(lambda now: transactions.record_queue(now, request, self._clock()), queue, STORES)
            await _until_kept(serving.term, queue)
        return Done()

    async def record_history(self, serving: Serving, request: wire.RecordHistory) -> Done:
        """Both queues serve and are recorded like this, and their writers are on their way to know; or both are gone."""
        _check(request.transaction)
        for name in HISTORY_QUEUES if request.record is not None else reversed(HISTORY_QUEUES):
            known = name in serving.term.view.cluster.queues
            if request.record is None:
                if known:
                    await self.remove_queue(serving, wire.RemoveQueue(name, part(request.transaction, name)))
                continue
            if not known:
                await self.create_queue(serving, creation(name, request.transaction, request.record.check()))
            await self.start_queue(serving, wire.StartQueue(name, part(request.transaction, name)))
            await self.record_queue(serving, wire.RecordQueue(name, request.record, part(request.transaction, name)))
        return Done()

    async def describe_tapes(self, serving: Serving, request: wire.DescribeTapes) -> wire.Tapes:
        """The logs there are now, or a part of them. Whoever makes one stands in the queue's record before, so that is looked
        at after them."""
        queue, term = check_name(request.queue), serving.term
        recording = transactions.record_of(term.view.cluster, queue).recording
        if recording is None:
            raise NotRecorded(f"queue {queue!r} is not recorded: `roq queue record` switches that on")
        logs, more = part_of(await term.logs(tapes_prefix(recording.tapes), only_asked=True), request.after)
        record = transactions.record_of(term.view.cluster, queue)
        views = tuple(
            wire.TapeView(log, exchange := tape_exchange(log), record.running and exchange in record.exchanges, meta)
            for log, meta in logs.items()
        )
        stores = store_endpoints(term.view.cluster)
        since = round(record.recorded_since * 1000)
        return wire.Tapes(recording.tapes, recording.record, recording.on, views, stores, record.transaction, since, more)

    # --- work queues -------------------------------------------------------------------------------------------------

    async def create_work_queue(self, serving: Serving, request: wire.CreateWorkQueue) -> wire.WorkQueueInfo:
        """Created, and its master and stores run; the same for a repetition, and for another request that fits it."""
        name = check_name(request.name, "work queue")
        _check(request.transaction)
        work_queues.check(request)
        term, subject = serving.term, work_subject(name)
        async with self._bounded(f"work queue {name!r} does not serve"):
            await term.view.until(subject, lambda cluster: not transactions.leftovers(cluster, subject))
            crash_point("create_work_queue.received")
            cluster = await term.change(lambda now: shards.create(now, request, self._clock(), self._chance), subject, STORES)
            crash_point("create_work_queue.recorded")
            await serving.finisher.settle(work_queues.record_of(cluster, name).transaction, self._wait_seconds)
            crash_point("create_work_queue.settled")
            await term.view.until(subject, lambda now: work_queues.serves(now, work_queues.record_of(now, name), {}))
            await self._until_shards_serve(term, name)
        return work_queue_info(term.view.cluster, work_queues.record_of(term.view.cluster, name))

    async def set_shards(self, serving: Serving, request: SetShards) -> wire.WorkQueueInfo:
        """Written, and as many serve; those that are too many take no more tasks as soon as their masters hear of it."""
        name = check_name(request.name, "work queue")
        _check(request.transaction)
        term = serving.term
        async with self._bounded(f"not every shard of work queue {name!r} serves"):
            crash_point("set_shards.received")
            await term.change(
                lambda now: shards.set_shards(now, request, self._clock(), self._chance), work_subject(name), STORES
            )
            crash_point("set_shards.recorded")
            await self._until_shards_serve(term, name)
            crash_point("set_shards.settled")
        return work_queue_info(term.view.cluster, work_queues.record_of(term.view.cluster, name))

    @staticmethod
    async def _until_shards_serve(term: LeaderTerm, name: str) -> None:
        for shard in work_queues.record_of(term.view.cluster, name).shard_names:
            await term.view.until(work_subject(shard), partial(shards.serves, queue=name, shard=shard))

    async def remove_work_queue(self, serving: Serving, request: wire.RemoveWorkQueue) -> Done:
        """Removed, and none of its processes is left on a live host."""
        name = check_name(request.name, "work queue")
        _check(request.transaction)
        await serving.term.change(lambda now: work_queues.remove(now, request, self._clock()), work_subject(name))
        await serving.finisher.settle(request.transaction, self._wait_seconds)
        return Done()

    # --- Exchanges and hosts -----------------------------------------------------------------------------------------

    async def create_exchange(self, serving: Serving, request: wire.CreateExchange) -> wire.ExchangeCreated:
        """One more Exchange runs; the same one for a repetition."""
        queue = check_name(request.queue)
        _check(request.transaction, request.host)
        crash_point("create_exchange.received")
        await self._placed(serving, request, queue, (queue,), transactions.create_exchange)
        crash_point("create_exchange.recorded")
        exchange = transactions.exchange_id(queue, request.transaction)
        await serving.finisher.settle(request.transaction, self._wait_seconds)
        crash_point("create_exchange.settled")
        host = transactions.record_of(serving.term.view.cluster, queue).exchanges.get(exchange)
        if host is None:
            raise ExchangeNotFound(f"Exchange {exchange!r} was removed while it was being created")
        return wire.ExchangeCreated(exchange, host)

    async def _placed(
        self, serving: Serving, request: Placing, queue: str, subjects: tuple[str, ...], place: Place[Placing]
    ) -> ClusterState:
        """With an Exchange more, on a machine that is made for it if no host has a slot. Raises HostFull, NoHosts."""

        def decide(now: ClusterState) -> ClusterState:
            return place(now, request, self._clock(), self._chance)

        try:
            return await serving.term.change(decide, *subjects)
        except (HostFull, NoHosts):
            if request.host or not await serving.fleet.room(queue, request.transaction):
                raise
        placed = await serving.term.change(decide, *subjects)
        serving.fleet.met(queue)
        return placed

    async def remove_exchange(self, serving: Serving, request: wire.RemoveExchange) -> Done:
        """The Exchange runs no more."""
        queue = check_name(request.queue)
        _check(request.transaction)
        await serving.term.change(lambda now: transactions.remove_exchange(now, request, self._clock()), queue)
        await serving.finisher.settle(request.transaction, self._wait_seconds)
        return Done()

    async def drain_host(self, serving: Serving, request: wire.DrainHost) -> Done:
        """Nothing new goes there, or again it does; what is to leave is on its way."""
        check_name(request.host, "host")
        everything = request.leaving is Leaving.EVERYTHING
        copies = {**await serving.remains.copies(request.host), **serving.shuffles.copies_wanted()} if everything else {}

        def decide(cluster: ClusterState) -> ClusterState:
            if request.draining and request.leaving is not Leaving.NOTHING and not _leaves_already(cluster, request):
                evacuation.check_possible(cluster, request.host, request.leaving, copies)
            return transactions.drain_host(cluster, request)

        await serving.term.change(decide)
        return Done()

    async def describe_remains(self, serving: Serving, request: DescribeRemains) -> HostRemains:
        """What is still on the host."""
        if check_name(request.host, "host") not in serving.term.view.cluster.hosts:
            raise HostNotFound(f"no host is named {request.host!r}")
        return await serving.remains.count(request.host, serving.shuffles.ranges_on(request.host))

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_seconds):
                yield
        except TimeoutError:
            raise NotReady(f"{what} after {self._wait_seconds:g} s; repeat the request with the same transaction id") from None


def _leaves_already(cluster: ClusterState, request: wire.DrainHost) -> bool:
    return cluster.host(request.host).leaving in (request.leaving, Leaving.EVERYTHING)


def _check(transaction: str, host: str = "") -> None:
    check_name(transaction, "transaction")
    if host:
        check_name(host, "host")


def _check_policy(policy: Policy | None) -> None:
    if policy is not None:
        policy.check()


def _revisions(cluster: ClusterState, queue: str) -> transactions.Revisions:
    return {name: cluster.host(name).revision for name in cluster.hosts_of(transactions.record_of(cluster, queue))}


async def _until_ready(term: LeaderTerm, queue: str, revisions: transactions.Revisions) -> None:
    def ready(cluster: ClusterState) -> bool:
        return transactions.serves(cluster, transactions.record_of(cluster, queue), revisions)

    await term.view.until(queue, ready)


async def _until_kept(term: LeaderTerm, queue: str) -> None:
    await term.view.until(queue, lambda cluster: transactions.keeps(cluster, transactions.record_of(cluster, queue)))

"""What `roq.Cluster` administers: queues, work queues, hosts, policies, and the Monitor of one queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TypeVar

import msgspec

from roq.client import held_names
from roq.client.broadcasts import kpi_stream
from roq.client.fleet import read_fleet, set_limits
from roq.coordination.locate import GcmClient
from roq.coordination.parts import read_cluster, read_hosts, read_queues, read_work_queues
from roq.errors import NotReady, QueueStopped
from roq.ids import check_name, new_token
from roq.pubsub.tape_looks import describe_tapes
from roq.runtime.rpc import RpcClient
from roq.wire import gcm
from roq.wire import monitor as wire
from roq.wire.access import AccessInfo, SetAccess
from roq.wire.assignment import Leaving, MonitorAddress
from roq.wire.durables import DurableView
from roq.wire.fleet import FleetInfo, FleetLimits
from roq.wire.hosts import DescribeRemains, HostRemains
from roq.wire.kpi import QueueKpi
from roq.wire.limits import FRAME_BYTES_MAX
from roq.wire.options import ClusterOptions, GetOptions, OptionsInfo, QueueTemplate, SetRebalance, SetTemplate
from roq.wire.policy import Policy
from roq.wire.producers import ProducerView
from roq.wire.recording import Record
from roq.wire.shards import SetShards
from roq.wire.work_queue import TaskSettings

T = TypeVar("T", bound=msgspec.Struct)
ADMIN_SECONDS = 15.0  # default deadline of an administrative request
REMAINS_SECONDS = 0.5  # between two looks at what is on a host
MOVE_SECONDS = 30.0  # default deadline of a planned move or drain


class ClusterAdmin:
    """The part of `roq.Cluster` that asks the leading GCM, or a queue's Monitor."""

    def __init__(self, client: GcmClient) -> None:
        self._gcm = client

    async def _ask(self, request: msgspec.Struct, expect: type[T], timeout_seconds: float) -> T:
        return await self._gcm.request(request, expect, timeout_seconds)

    # --- queues -------------------------------------------------------------------------------------------------------

    async def create_queue(
        self,
        name: str,
        *,
        replication: int = 1,
        overflow: str = "drop",
        host: str | None = None,
        policy: Policy | None = None,
        max_frame_bytes: int = FRAME_BYTES_MAX,
        record: Record | None = None,
        timeout_seconds: float = ADMIN_SECONDS,
    ) -> gcm.QueueInfo:
        """Create a queue and wait until it serves. Creating it again with the same settings changes nothing.

        replication: Monitors kept, on distinct hosts. overflow: "drop" or "block". max_frame_bytes: bounds a payload (512
        bytes less). record: its messages are kept like this; None: they are not, and an existing queue may be recorded or not.
        Raises InvalidName, QueueConflict, HostNotFound, NoHosts, HostFull, InvalidPolicy, InvalidConfiguration, Unavailable.
        """
        check_name(name)
        wanted = QueueTemplate(replication, overflow, max_frame_bytes, policy, record).check()  # type: ignore[arg-type]
        request = gcm.CreateQueue(name, new_token(), wanted.settings, host or "", wanted.policy, wanted.record)
        return await self._ask(request, gcm.QueueInfo, timeout_seconds)

    async def remove_queue(self, name: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Stop and forget a queue, with what was recorded of it and its groups. Raises QueueNotFound."""
        await self._ask(gcm.RemoveQueue(name, new_token()), gcm.Done, timeout_seconds)

    async def start_queue(self, name: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Run a stopped queue again. Raises QueueNotFound."""
        await self._ask(gcm.StartQueue(name, new_token()), gcm.Done, timeout_seconds)

    async def stop_queue(self, name: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Stop a queue's processes, keep its metadata. Raises QueueNotFound."""
        await self._ask(gcm.StopQueue(name, new_token()), gcm.Done, timeout_seconds)

    async def record_queue(self, name: str, record: Record | None, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Keep a queue's messages like this from now on; None: record it no longer, what is kept stays until it expires.
        Messages flow on meanwhile. Raises QueueNotFound, NoHosts, InvalidConfiguration, Unavailable."""
        request = gcm.RecordQueue(name, record.check() if record else None, new_token())
        await self._ask(request, gcm.Done, timeout_seconds)

    async def record_history(self, record: Record | None, *, timeout_seconds: float = MOVE_SECONDS) -> None:
        """Keep KPIs and scaling decisions of all queues like this from now on, in `_roq.kpi` and `_roq.decisions`; None: no
        longer, and what was kept is gone (docs/history.md). Raises NoHosts, HostFull, InvalidConfiguration, Unavailable."""
        await self._ask(gcm.RecordHistory(record.check() if record else None, new_token()), gcm.Done, timeout_seconds)

    async def tapes(self, name: str) -> gcm.Tapes:
        """The tapes of a queue that is or was recorded, and the stores they may be on. Raises QueueNotFound, NotRecorded."""
        return await describe_tapes(self._gcm, name, ADMIN_SECONDS)

    async def durables(self, queue: str) -> list[DurableView]:
        """The queue's durable subscribers by name, open or not, and how far each got. Raises QueueNotFound, NotRecorded."""
        return await held_names.durables(self._gcm, queue)

    async def forget_durable(self, queue: str, name: str) -> None:
        """Opened again, it begins anew; where it is open now it fails with DurableTaken. Raises DurableNotFound, QueueNotFound,
        NotRecorded."""
        await held_names.forget_durable(self._gcm, queue, name)

    async def producers(self, queue: str) -> list[ProducerView]:
        """The queue's producers by name, open or not, and what each has stored. Raises QueueNotFound, NotRecorded."""
        return await held_names.producers(self._gcm, queue)

    async def forget_producer(self, queue: str, name: str) -> None:
        """Opened again, it begins with number 1 and new messages; where it is open now it fails with ProducerFenced. Raises
        ProducerNotFound, QueueNotFound, NotRecorded."""
        await held_names.forget_producer(self._gcm, queue, name)

    async def queue_exists(self, name: str) -> bool:
        """Whether there is a queue of this name."""
        return (await self._ask(gcm.QueueExists(name), gcm.Exists, ADMIN_SECONDS)).exists

    async def queues(self) -> list[gcm.QueueInfo]:
        """All queues, by name."""
        return sorted(await read_queues(self._gcm, ADMIN_SECONDS), key=lambda info: info.record.name)

    async def queue(self, name: str) -> gcm.QueueInfo:
        """One queue. Raises QueueNotFound."""
        return await self._ask(gcm.DescribeQueue(name), gcm.QueueInfo, ADMIN_SECONDS)

    async def create_exchange(
        self, queue: str, *, host: str | None = None, transaction: str | None = None, timeout_seconds: float = ADMIN_SECONDS
    ) -> gcm.ExchangeCreated:
        """One more Exchange, on `host` or where most slots are free. The same transaction id again gives the same Exchange.
        Raises QueueNotFound, QueueStopped, HostNotFound, HostFull."""
        request = gcm.CreateExchange(queue, transaction or new_token(), host or "")
        return await self._ask(request, gcm.ExchangeCreated, timeout_seconds)

    async def remove_exchange(self, queue: str, exchange: str, *, timeout_seconds: float = MOVE_SECONDS) -> None:
        """Drain an Exchange without loss, then stop it. Raises ExchangeNotFound, LastExchange."""
        await self.drain_exchange(queue, exchange, timeout_seconds=timeout_seconds)
        await self._ask(gcm.RemoveExchange(queue, exchange, new_token()), gcm.Done, timeout_seconds)

    # --- work queues --------------------------------------------------------------------------------------------------

    async def create_work_queue(
        self,
        name: str,
        *,
        settings: TaskSettings | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        standbys: int | None = None,
        inline_bytes: int | None = None,
        shards: int | None = None,
        timeout_seconds: float = ADMIN_SECONDS,
    ) -> gcm.WorkQueueInfo:
        """Create a work queue and wait until its masters run. What is None may be any in an existing one.

        write_quorum: stores that keep each entry (3, or as many as there are hosts); ack_quorum: that must have it before it
        counts (the majority); standbys: masters in waiting, on other hosts (1); inline_bytes: payloads from this size on go
        straight to a store (65,536); shards: that share the tasks of a new one (1), an existing one keeps its own. Raises
        InvalidName, WorkQueueConflict, NoHosts, InvalidConfiguration, Unavailable.
        """
        check_name(name, "work queue")
        others = write_quorum or 0, ack_quorum or 0, standbys, inline_bytes or 0
        request = gcm.CreateWorkQueue(name, new_token(), settings, *others, shards=shards or 0)
        return await self._ask(request, gcm.WorkQueueInfo, timeout_seconds)

    async def set_shards(self, name: str, shards: int, *, timeout_seconds: float = ADMIN_SECONDS) -> gcm.WorkQueueInfo:
        """Have so many shards of a work queue take tasks, 1 to 64, while it is used; returns when they serve. New ones begin
        empty. Those that are too many take no more tasks, are emptied by whoever leases, and are removed when nothing is left
        in them, dead letters included. Raises WorkQueueNotFound, InvalidConfiguration, InvalidName, NoHosts, NotReady."""
        return await self._ask(SetShards(name, shards, new_token()), gcm.WorkQueueInfo, timeout_seconds)

    async def remove_work_queue(self, name: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Stop and forget a work queue, its tasks included. Raises WorkQueueNotFound."""
        await self._ask(gcm.RemoveWorkQueue(name, new_token()), gcm.Done, timeout_seconds)

    async def work_queues(self) -> list[gcm.WorkQueueInfo]:
        """All work queues, by name."""
        return await read_work_queues(self._gcm, ADMIN_SECONDS)

    async def work_queue(self, name: str) -> gcm.WorkQueueInfo:
        """One work queue. Raises WorkQueueNotFound."""
        return await self._ask(gcm.DescribeWorkQueue(name), gcm.WorkQueueInfo, ADMIN_SECONDS)

    # --- hosts, policies, the whole -----------------------------------------------------------------------------------

    async def hosts(self) -> list[gcm.HostInfo]:
        """All hosts, by name."""
        return sorted(await read_hosts(self._gcm, ADMIN_SECONDS), key=lambda info: info.host)

    async def cordon_host(self, host: str, cordoned: bool = True) -> None:
        """Place nothing new on a host (or, with False, again); what runs there goes on. Whatever was leaving it stays.
        Raises HostNotFound."""
        await self._ask(gcm.DrainHost(host, cordoned, new_token()), gcm.Done, ADMIN_SECONDS)

    async def drain_host(self, host: str, draining: bool = True) -> None:
        """Cordon a host, and move what runs there of queues and work queues to others, without loss; its store stays, with what
        it keeps. Returns when that has begun, see `remains`. False: no more of that. Raises HostNotFound, NoHosts, HostFull."""
        leaving = Leaving.PROCESSES if draining else Leaving.NOTHING
        await self._ask(gcm.DrainHost(host, draining, new_token(), leaving), gcm.Done, ADMIN_SECONDS)

    async def evacuate_host(self, host: str) -> None:
        """Drain a host, and move what its store keeps to others as well: then it may be stopped and removed. Returns when that
        has begun, see `remains`; it goes on whatever becomes of this program and of the leading GCM, until
        `cordon_host(host, False)`. Raises HostNotFound; NoHosts, HostFull: the others could not take it."""
        await self._ask(gcm.DrainHost(host, True, new_token(), Leaving.EVERYTHING), gcm.Done, ADMIN_SECONDS)

    async def host_remains(self, host: str) -> HostRemains:
        """What is still on a host. Raises HostNotFound, Unavailable."""
        return await self._ask(DescribeRemains(host), HostRemains, ADMIN_SECONDS)

    async def remains(self, host: str) -> AsyncGenerator[HostRemains, None]:
        """What is still on a host that is drained or evacuated, now and after each change, until nothing is left or that was
        called off. Raises HostNotFound, Unavailable."""
        told: HostRemains | None = None
        while True:
            now = await self.host_remains(host)
            if now != told:
                told = now
                yield now
            if now.left or now.leaving is Leaving.NOTHING:
                return
            await asyncio.sleep(REMAINS_SECONDS)

    async def options(self) -> ClusterOptions:
        """What is settled for the whole cluster: the template of missing queues, whether load is levelled."""
        return (await self._ask(GetOptions(), OptionsInfo, ADMIN_SECONDS)).options

    async def set_template(self, template: QueueTemplate) -> None:
        """How queues are made from now on by publishers and subscribers with `create_missing=True`. Raises
        InvalidConfiguration, InvalidPolicy."""
        await self._ask(SetTemplate(template.check(), new_token()), gcm.Done, ADMIN_SECONDS)

    async def set_rebalance(self, on: bool) -> None:
        """Whether Exchanges, Monitors and masters move by themselves to hosts that have much less of them."""
        await self._ask(SetRebalance(on, new_token()), gcm.Done, ADMIN_SECONDS)

    async def fleet(self) -> FleetInfo:
        """Machines that the cluster has made for itself, what is allowed, and what can't be met."""
        return await read_fleet(self._gcm)

    async def set_fleet(self, limits: FleetLimits) -> FleetInfo:
        """What may be made from now on; the fleet with that. Raises InvalidConfiguration."""
        return await set_limits(self._gcm, limits)

    async def set_policy(self, queue: str, policy: Policy | None) -> None:
        """Scaling policy of a queue from now on; None: back to the default. Raises QueueNotFound, InvalidPolicy."""
        await self._ask(gcm.SetPolicy(queue, policy.check() if policy else None, new_token()), gcm.Done, ADMIN_SECONDS)

    async def get_policy(self, queue: str) -> Policy:
        """Scaling policy of a queue. Raises QueueNotFound."""
        return (await self._ask(gcm.GetPolicy(queue), gcm.PolicyInfo, ADMIN_SECONDS)).policy

    async def view(self) -> gcm.ClusterView:
        """The whole cluster at this moment."""
        return await read_cluster(self._gcm, ADMIN_SECONDS)

    async def set_access(self, signed: bytes) -> None:
        """Tell the cluster which cards are revoked: an access list as the authority signs it (`roq access revoke`). Returns
        when it is written; every process that runs has it within a second. Raises CallError: the cluster has no security."""
        await self._ask(SetAccess(signed), AccessInfo, ADMIN_SECONDS)

    # --- one queue's Monitor ------------------------------------------------------------------------------------------

    async def inspect(self, queue: str) -> wire.QueueView:
        """What the queue's Monitor knows: members, decisions, rates. Raises QueueNotFound, QueueStopped, NotReady."""
        return await self._ask_monitor(queue, wire.Describe(), wire.QueueView, ADMIN_SECONDS)

    async def move(self, queue: str, moves: Iterable[tuple[int, str]], *, timeout_seconds: float = MOVE_SECONDS) -> wire.Moved:
        """Move publishers to Exchanges, without loss: (publisher id, Exchange id). Returns when every one has moved."""
        return await self._ask_monitor(queue, wire.Move(tuple(moves)), wire.Moved, timeout_seconds)

    async def drain_exchange(self, queue: str, exchange: str, *, timeout_seconds: float = MOVE_SECONDS) -> None:
        """Empty an Exchange, without loss: nothing passes through it any more. Raises ExchangeNotFound, LastExchange."""
        await self._ask_monitor(queue, wire.Drain(exchange), wire.Drained, timeout_seconds)

    async def exchange_active(self, queue: str, exchange: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Return when every ready subscriber has proved its attachment to this Exchange."""
        await self._ask_monitor(queue, wire.AwaitExchange(exchange), wire.Recorded, timeout_seconds)

    async def _ask_monitor(self, queue: str, request: msgspec.Struct, expect: type[T], timeout_seconds: float) -> T:
        rpc = RpcClient((await self._monitor(queue)).clients_endpoint(), wire.Reply)
        try:
            return await rpc.request(request, expect, timeout_seconds)
        finally:
            rpc.close()

    async def _monitor(self, queue: str) -> MonitorAddress:
        info = await self.queue(queue)
        if not info.record.running:
            raise QueueStopped(f"queue {queue!r} is stopped")
        if not info.monitors:
            raise NotReady(f"queue {queue!r} has no serving Monitor")
        return info.monitors[0]

    async def kpis(self, queue: str) -> AsyncGenerator[QueueKpi, None]:
        """The queue's KPIs, one record a second, until one stops. Raises QueueNotFound, QueueStopped, NotReady."""
        address = await self._monitor(queue)
        async for kpi in kpi_stream(address, queue):
            yield kpi


async def create_queue_as(cluster: ClusterAdmin, request: gcm.CreateQueue) -> gcm.QueueInfo:
    """As `create_queue`, under a transaction id of the caller's own: it stays in the queue's record and says who made it."""
    return await cluster._ask(request, gcm.QueueInfo, ADMIN_SECONDS)

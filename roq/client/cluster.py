"""Cluster: what `roq.connect` gives. Administration, publishers and subscribers, and a look at a queue."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TypeVar, overload

import msgspec

from roq.client.broadcasts import TopologyEvent, kpi_stream, topology_events
from roq.client.group import LEASE_SECONDS, NOW, GroupSubscriber, check_kind, group_source, join_request
from roq.client.requests import REQUEST_SECONDS, Callers, Question, Reply
from roq.client.responder import CAPACITY, Responder
from roq.coordination.locate import ZOOKEEPER_SECONDS, GcmClient
from roq.errors import DurableNotFound, InvalidConfiguration, MessagesLost, NotReady, QueueStopped, WorkQueueNotFound
from roq.ids import check_name, group_name, new_token
from roq.pubsub.durable import DurableSubscriber
from roq.pubsub.publisher import Publisher
from roq.pubsub.start import EARLIEST, LIVE, Start
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import log_lost
from roq.runtime.rpc import RpcClient
from roq.runtime.security import use_card
from roq.wire import gcm
from roq.wire import monitor as wire
from roq.wire.assignment import MonitorAddress, Overflow, QueueSettings
from roq.wire.durables import Durables, DurableView, ForgetDurable, ListDurables
from roq.wire.headers import Headers
from roq.wire.kpi import QueueKpi
from roq.wire.limits import FRAME_BYTES_CEILING, FRAME_BYTES_MAX, FRAME_OVERHEAD_BYTES
from roq.wire.policy import Policy
from roq.wire.recording import Record, is_position
from roq.wire.work_queue import GroupSource, TaskSettings
from roq.workqueue.address import queue_address

T = TypeVar("T", bound=msgspec.Struct)
ADMIN_SECONDS = 15.0  # default deadline of an administrative request
MOVE_SECONDS = 30.0  # default deadline of a planned move or drain


class Cluster:
    """Use as an async context manager: `async with roq.connect("zk1:2181,zk2:2181") as cluster`.

    Every request that changes something carries a transaction id and is repeated until its deadline, also across a change of
    leader; it takes effect once.
    """

    def __init__(
        self, zookeeper: str, connect_seconds: float = ADMIN_SECONDS, zookeeper_seconds: float = ZOOKEEPER_SECONDS
    ) -> None:
        self.zookeeper = zookeeper
        self._connect_seconds = connect_seconds
        self._gcm = GcmClient(zookeeper, zookeeper_seconds)
        self._members: weakref.WeakSet[Publisher | Subscriber | GroupSubscriber | Responder] = weakref.WeakSet()
        self._callers = Callers(self._gcm)

    async def __aenter__(self) -> Cluster:
        await self._gcm.request(gcm.QueueExists("?"), gcm.Exists, self._connect_seconds)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Publishers and subscribers made from it are closed too."""
        await self._callers.close()
        members = list(self._members)
        await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
        self._gcm.close()

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
        if replication < 1:
            raise InvalidConfiguration(f"replication is at least 1, got {replication}")
        if overflow not in tuple(Overflow):
            raise InvalidConfiguration(f"overflow is 'drop' or 'block', got {overflow!r}")
        if not 2 * FRAME_OVERHEAD_BYTES <= max_frame_bytes <= FRAME_BYTES_CEILING:
            raise InvalidConfiguration(f"max_frame_bytes is between {2 * FRAME_OVERHEAD_BYTES} and {FRAME_BYTES_CEILING}")
        settings = QueueSettings(replication, Overflow(overflow), max_frame_bytes)
        rules, kept = policy.check() if policy else None, record.check() if record else None
        request = gcm.CreateQueue(name, new_token(), settings, host or "", rules, kept)
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

    async def tapes(self, name: str) -> gcm.Tapes:
        """The tapes of a queue that is or was recorded, and the stores they may be on. Raises QueueNotFound, NotRecorded."""
        return await self._ask(gcm.DescribeTapes(name), gcm.Tapes, ADMIN_SECONDS)

    async def durables(self, queue: str) -> list[DurableView]:
        """The queue's durable subscribers by name, open or not, and how far each got. Raises QueueNotFound, NotRecorded."""
        found, more = list[DurableView](), True
        while more:
            asked = ListDurables(queue, found[-1].name if found else "")
            answer = await self._ask(asked, Durables, ADMIN_SECONDS)
            found += answer.views
            more = answer.more and bool(answer.views)
        return found

    async def forget_durable(self, queue: str, name: str) -> None:
        """Keep no position of this durable subscriber any more: opened again it begins anew, and where it is open now it fails
        with DurableTaken. Raises DurableNotFound, QueueNotFound, NotRecorded."""
        if not any(view.name == name for view in await self.durables(queue)):
            raise DurableNotFound(f"queue {queue!r} has no durable subscriber {name!r}")
        await self._ask(ForgetDurable(queue, name), gcm.Done, ADMIN_SECONDS)

    async def queue_exists(self, name: str) -> bool:
        """Whether there is a queue of this name."""
        return (await self._ask(gcm.QueueExists(name), gcm.Exists, ADMIN_SECONDS)).exists

    async def queues(self) -> list[gcm.QueueInfo]:
        """All queues, by name."""
        return sorted((await self._ask(gcm.ListQueues(), gcm.Queues, ADMIN_SECONDS)).queues, key=lambda info: info.record.name)

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
        timeout_seconds: float = ADMIN_SECONDS,
    ) -> gcm.WorkQueueInfo:
        """Create a work queue and wait until its master runs. What is None may be any in an existing one.

        write_quorum: stores that keep each entry (3, or as many as there are hosts); ack_quorum: that must have it before it
        counts (the majority); standbys: masters in waiting, on other hosts (1); inline_bytes: payloads from this size on go
        straight to a store (65,536). Raises InvalidName, WorkQueueConflict, NoHosts, InvalidConfiguration, Unavailable.
        """
        check_name(name, "work queue")
        quorums = write_quorum or 0, ack_quorum or 0
        request = gcm.CreateWorkQueue(name, new_token(), settings, *quorums, standbys, inline_bytes or 0)
        return await self._ask(request, gcm.WorkQueueInfo, timeout_seconds)

    async def remove_work_queue(self, name: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Stop and forget a work queue, its tasks included. Raises WorkQueueNotFound."""
        await self._ask(gcm.RemoveWorkQueue(name, new_token()), gcm.Done, timeout_seconds)

    async def work_queues(self) -> list[gcm.WorkQueueInfo]:
        """All work queues, by name."""
        return list((await self._ask(gcm.ListWorkQueues(), gcm.WorkQueues, ADMIN_SECONDS)).work_queues)

    async def work_queue(self, name: str) -> gcm.WorkQueueInfo:
        """One work queue. Raises WorkQueueNotFound."""
        return await self._ask(gcm.DescribeWorkQueue(name), gcm.WorkQueueInfo, ADMIN_SECONDS)

    # --- groups of recorded queues ------------------------------------------------------------------------------------

    async def create_group(
        self,
        queue: str,
        group: str,
        *topics: str,
        order: str = "topic",
        start: Start = "earliest",
        where: str = "",
        settings: TaskSettings | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        standbys: int | None = None,
        timeout_seconds: float = ADMIN_SECONDS,
    ) -> gcm.WorkQueueInfo:
        """Create a group of a recorded queue: a work queue named `queue@group` that gets the queue's messages. Creating it
        again changes nothing.

        topics: filters as a subscriber has them, none means everything. order: "topic": of each topic one message at a time, in
        each publisher's order; "none": whoever asks gets the next one. start: where it begins, once: "earliest", "now", a
        datetime, a timedelta (so long ago), a position. where: a condition that messages must meet. The rest: see
        create_work_queue. Raises QueueNotFound, NotRecorded, InvalidName, InvalidTopic, InvalidFilter, InvalidPosition,
        WorkQueueConflict: it has another order, other topics, another condition or other settings; NoHosts, Unavailable.
        """
        source = group_source(queue, topics, order, start, where, datetime.now(UTC))
        name, quorums = group_name(queue, group), (write_quorum or 0, ack_quorum or 0)
        source = await self._placed(name, source)
        request = gcm.CreateWorkQueue(name, new_token(), settings, *quorums, standbys, source=source)
        return await self._ask(request, gcm.WorkQueueInfo, timeout_seconds)

    async def _placed(self, name: str, source: GroupSource) -> GroupSource:
        """With a position for "now": a group begins where its queue is when it is created, not when its master runs. Raises
        InvalidPosition: there is no such place."""
        if source.start != NOW and not is_position(source.start):
            return source
        try:
            await self.work_queue(name)
        except WorkQueueNotFound:
            start = LIVE if source.start == NOW else source.start
            async with self.subscriber(source.queue, start=start, follow="stored") as here:
                return msgspec.structs.replace(source, start=str(here.position))
        return msgspec.structs.replace(source, start=EARLIEST)  # where it began says nothing any more

    async def remove_group(self, queue: str, group: str, *, timeout_seconds: float = ADMIN_SECONDS) -> None:
        """Stop and forget a group, with where it was and its dead letters; what is recorded stays. Raises WorkQueueNotFound."""
        await self.remove_work_queue(group_name(queue, group), timeout_seconds=timeout_seconds)

    async def groups(self, queue: str) -> list[gcm.WorkQueueInfo]:
        """The groups of a queue, by name. Raises QueueNotFound."""
        return list((await self._ask(gcm.ListGroups(queue), gcm.WorkQueues, ADMIN_SECONDS)).work_queues)

    # --- hosts, policies, the whole -----------------------------------------------------------------------------------

    async def hosts(self) -> list[gcm.HostInfo]:
        """All hosts, by name."""
        return sorted((await self._ask(gcm.ListHosts(), gcm.Hosts, ADMIN_SECONDS)).hosts, key=lambda info: info.host)

    async def drain_host(self, host: str, draining: bool = True) -> None:
        """Place nothing new on a host (or, with False, again); what runs there goes on. Raises HostNotFound."""
        await self._ask(gcm.DrainHost(host, draining, new_token()), gcm.Done, ADMIN_SECONDS)

    async def set_policy(self, queue: str, policy: Policy | None) -> None:
        """Scaling policy of a queue from now on; None: back to the default. Raises QueueNotFound, InvalidPolicy."""
        await self._ask(gcm.SetPolicy(queue, policy.check() if policy else None, new_token()), gcm.Done, ADMIN_SECONDS)

    async def get_policy(self, queue: str) -> Policy:
        """Scaling policy of a queue. Raises QueueNotFound."""
        return (await self._ask(gcm.GetPolicy(queue), gcm.PolicyInfo, ADMIN_SECONDS)).policy

    async def view(self) -> gcm.ClusterView:
        """The whole cluster at this moment."""
        return await self._ask(gcm.GetCluster(), gcm.ClusterView, ADMIN_SECONDS)

    async def set_access(self, signed: bytes) -> None:
        """Tell the cluster which cards are revoked: an access list as the authority signs it (`roq access revoke`). Returns
        when it is written; every process that runs has it within a second. Raises CallError: the cluster has no security."""
        await self._ask(gcm.SetAccess(signed), gcm.AccessInfo, ADMIN_SECONDS)

    async def topology(self) -> AsyncGenerator[TopologyEvent, None]:
        """Hosts, queues, Exchanges and work queues as they come, go and move, until one stops: first the whole cluster, then
        each change; after a change of the leading GCM the whole again, with whatever happened meanwhile. A slow reader misses
        steps between two looks, never their outcome. While no GCM leads, nothing is told. Raises Closed."""
        async with contextlib.aclosing(topology_events(self._gcm)) as events:
            async for event in events:
                yield event

    async def _ask(self, request: msgspec.Struct, expect: type[T], timeout_seconds: float) -> T:
        return await self._gcm.request(request, expect, timeout_seconds)

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

    # --- messages -----------------------------------------------------------------------------------------------------

    def publisher(self, queue: str, *, confirm: str = "routed") -> Publisher:
        """A publisher of `queue`; enter it (`async with`) or `await publisher.open()`. confirm: what `flush` and `close` wait
        for: that messages were handed to those who subscribed ("routed"), or that they are stored, too (recorded queues).
        Raises InvalidConfiguration."""
        publisher = Publisher(self._gcm, queue, confirm)
        self._members.add(publisher)
        return publisher

    @overload
    def subscriber(
        self,
        queue: str,
        *topics: str,
        on_lost: Callable[[MessagesLost], None] = ...,
        start: Start = ...,
        follow: bool | str = ...,
        durable: str | None = ...,
        where: str = ...,
    ) -> Subscriber: ...

    @overload
    def subscriber(
        self,
        queue: str,
        *topics: str,
        group: str,
        start: Start = ...,
        order: str | None = ...,
        where: str = ...,
        lease_seconds: float = ...,
        count: int = ...,
    ) -> GroupSubscriber: ...

    def subscriber(
        self,
        queue: str,
        *topics: str,
        on_lost: Callable[[MessagesLost], None] = log_lost,
        start: Start | None = None,
        follow: bool | str = True,
        durable: str | None = None,
        group: str | None = None,
        order: str | None = None,
        where: str = "",
        lease_seconds: float = LEASE_SECONDS,
        count: int = 1,
    ) -> Subscriber | GroupSubscriber:
        """A subscriber of `queue`; enter it (`async with`) or `await subscriber.open()`. It is ready then.

        topics: filters as in roq.pubsub.subscription, none means everything. on_lost: called in iteration order for every gap.
        start: of a recorded queue, where to begin: "earliest", a datetime, a timedelta (so long ago), a TapePosition or its
        text, or "last": the latest message of each topic first. What follows is read from the tapes, and then live, without gap
        or repeat. Of what had expired before it was read `on_lost` hears with publisher 0 and the range of tape entries.
        follow: True: on into the present; False: iteration ends there; "stored": on with what is stored from then on, read from
        the stores alone, so nobody ever waits for it. where: hand out only messages for which this condition over headers and
        JSON is true (docs/filters.md).
        Raises InvalidConfiguration, InvalidFilter, InvalidPosition, InvalidTopic, InvalidName.

        durable: a name under which the cluster keeps how far this one got. Opened again by this name, from anywhere, it goes on
        behind that, also with other topics; `start` is for the first time. A batch counts when the next one is asked for; what
        counts is kept within a second and by `close`, and what came after may come again. Who has the name open elsewhere then
        fails with DurableTaken, at its next position.

        group: a member of this group instead, made if it is missing: each message goes to one member, which acks it (see
        GroupSubscriber). What is not said may be any in an existing group, a new one gets it as from `create_group`; start is
        for a new one, "earliest" unless told. lease_seconds: after which a message goes to another member when its holder is
        silent; count: messages leased at once.
        """
        alone = follow is not True or durable is not None or on_lost is not log_lost
        check_kind(group, order, (lease_seconds, count), alone=alone)
        if group is not None:
            return self._member(join_request(queue, topics, group, order, start, where), lease_seconds, count)
        begin: Start = "live" if start is None else start
        about = self._gcm, queue, topics, on_lost, begin, follow, where
        subscriber = Subscriber(*about) if durable is None else DurableSubscriber(*about, name=durable)
        self._members.add(subscriber)
        return subscriber

    def _member(self, request: gcm.CreateWorkQueue, lease_seconds: float, count: int) -> GroupSubscriber:
        async def create() -> None:
            assert request.source is not None
            source = await self._placed(request.name, request.source)
            once = msgspec.structs.replace(request, transaction=new_token(), source=source)
            await self._ask(once, gcm.WorkQueueInfo, ADMIN_SECONDS)

        member = GroupSubscriber(queue_address(self.zookeeper, request.name), create, lease_seconds, count)
        self._members.add(member)
        return member

    # --- requests -----------------------------------------------------------------------------------------------------

    async def request(
        self,
        queue: str,
        topic: str,
        payload: bytes = b"",
        headers: Headers | None = None,
        *,
        group: str | None = None,
        timeout_seconds: float = REQUEST_SECONDS,
    ) -> Reply:
        """Ask one of those who serve this topic over `queue`, of this group or of any, and return what it answers.

        Raises NoResponder: nobody serves it; RequestFailed: its server says why; Overloaded: all have too much to do;
        ResponderLost, DeadlineExceeded: it may have been carried out or not. Also QueueNotFound, QueueStopped, Unavailable,
        InvalidTopic, InvalidHeaders, PayloadTooLarge, IncompatibleVersion, Closed; SlowSubscriber, ProcessFailed: what ended
        the connection that answers come over, the next request opens it anew.
        """
        asked = Question(topic, payload, headers, group, timeout_seconds)
        return await self._callers.of(queue).request(asked)

    def serve(self, queue: str, *topics: str, group: str = "", capacity: int = CAPACITY) -> Responder:
        """Serve requests on these topics of `queue` (none: all): enter it (`async with`) and iterate over Requests. Each
        request goes to one server of one group. capacity: requests at a time, waiting or being worked on; what is beyond goes
        to other servers. Raises InvalidTopic, InvalidName, InvalidConfiguration."""
        responder = Responder(self._gcm, queue, topics, group, capacity)
        self._members.add(responder)
        return responder


def connect(
    zookeeper: str,
    *,
    connect_seconds: float = ADMIN_SECONDS,
    zookeeper_seconds: float = ZOOKEEPER_SECONDS,
    card: str | Path | None = None,
) -> Cluster:
    """The cluster behind these ZooKeeper addresses: "host:port,host:port[/chroot]", chroot /RoQ unless given.

    connect_seconds: how long entering it looks for a leading GCM. zookeeper_seconds: how much of it for a ZooKeeper that has
    not answered at all, as none does at a wrong address. card: file from `roq access grant`, for all that this process does
    from now on (ROQ_CARD's, if not given). Raises InvalidConfiguration, AccessDenied: the card can't be used.
    """
    use_card(Path(card) if card is not None else None)
    return Cluster(zookeeper, connect_seconds, zookeeper_seconds)

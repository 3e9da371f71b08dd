"""Cluster: what `roq.connect` gives. Administration, publishers and subscribers, and a look at a queue."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import overload

import msgspec

from roq.client.administration import ADMIN_SECONDS, ClusterAdmin
from roq.client.broadcasts import TopologyEvent, topology_events
from roq.client.events import ClusterEvent, cluster_events
from roq.client.group import LEASE_SECONDS, GroupSubscriber, check_kind, group_source, join_request
from roq.client.missing import QueueMaker
from roq.client.requests import REQUEST_SECONDS, Callers, Question, Reply
from roq.client.responder import CAPACITY, Responder
from roq.client.transaction import Transaction, TransactionHub
from roq.coordination.locate import ZOOKEEPER_SECONDS, GcmClient
from roq.errors import MessagesLost, WorkQueueNotFound
from roq.ids import check_unreserved, group_name, new_token
from roq.pubsub.durable import DurableSubscriber
from roq.pubsub.named_publisher import NamedPublisher
from roq.pubsub.publisher import Publisher
from roq.pubsub.start import EARLIEST, LIVE, NOW, Start
from roq.pubsub.subscriber import Subscriber
from roq.pubsub.subscription import log_lost
from roq.runtime.security import use_card
from roq.wire import gcm
from roq.wire.headers import Headers
from roq.wire.recording import is_position
from roq.wire.work_queue import GroupSource, TaskSettings
from roq.workqueue.address import queue_address


class Cluster(ClusterAdmin):
    """Use as an async context manager: `async with roq.connect("zk1:2181,zk2:2181") as cluster`.

    Every request that changes something carries a transaction id and is repeated until its deadline, also across a change of
    leader; it takes effect once.
    """

    def __init__(
        self, zookeeper: str, connect_seconds: float = ADMIN_SECONDS, zookeeper_seconds: float = ZOOKEEPER_SECONDS
    ) -> None:
        self.zookeeper = zookeeper
        self._connect_seconds = connect_seconds
        super().__init__(GcmClient(zookeeper, zookeeper_seconds))
        self._members: weakref.WeakSet[Publisher | Subscriber | GroupSubscriber | Responder] = weakref.WeakSet()
        self._callers = Callers(self._gcm)
        self._transactions = TransactionHub(self._gcm, zookeeper)

    async def __aenter__(self) -> Cluster:
        await self._gcm.request(gcm.QueueExists("?"), gcm.Exists, self._connect_seconds)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Publishers and subscribers made from it are closed too."""
        await self._callers.close()
        await self._transactions.close()
        members = list(self._members)
        await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
        self._gcm.close()

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

    # --- what happens -------------------------------------------------------------------------------------------------------

    def topology(self) -> AsyncGenerator[TopologyEvent, None]:
        """Hosts, queues, Exchanges and work queues as they come, go and move, until one stops: first the whole cluster, then
        each change; after a change of the leading GCM the whole again, with whatever happened meanwhile. A slow reader misses
        steps between two looks, never their outcome. While no GCM leads, nothing is told. Raises Closed."""
        return topology_events(self._gcm)

    def events(self, since: datetime | None = None) -> AsyncGenerator[ClusterEvent, None]:
        """What happens, as it does, until one stops: first WATCHING, then what comes, goes, moves, dies, is decided and ends.
        Where nothing was heard for a while, MISSED says for how long, and what was before is compared with what is. Nobody
        keeps events: what came and went between two looks is not reported, and while no GCM leads, nothing is. since: scaling
        decisions that were taken since then and that Monitors remember are told as well. Raises Closed."""
        return cluster_events(self._gcm, self.tapes, since)

    # --- messages -----------------------------------------------------------------------------------------------------

    def publisher(
        self, queue: str, *, confirm: str = "routed", producer: str | None = None, create_missing: bool = False
    ) -> Publisher:
        """A publisher of `queue`; enter it (`async with`) or `await publisher.open()`. confirm: what `flush` and `close` wait
        for: that messages were handed to those who subscribed ("routed"), or that they are stored, too (recorded queues).
        producer: a name under which numbers go on when the program is started anew; implies "stored". `publisher.number` is
        then the last one of this name that is stored: go on with the message behind it, and each counts once. Opened by this
        name elsewhere, this one fails with ProducerFenced. create_missing: opening it makes the queue if there is none, by the
        cluster's template (`set_template`); that takes the right `admin` to it. Raises InvalidConfiguration, InvalidName."""
        client = QueueMaker(self._gcm, queue) if create_missing else self._gcm
        if producer is None:
            publisher = Publisher(client, queue, confirm)
        else:
            publisher = NamedPublisher(client, queue, check_unreserved(producer, "producer"))
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
        create_missing: bool = ...,
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
        create_missing: bool = ...,
    ) -> GroupSubscriber: ...

    def subscriber(  # noqa: PLR0913 - all but the queue are options
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
        create_missing: bool = False,
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

        create_missing: opening it makes the queue if there is none, as for `publisher`. For a `start` or a `group` the template
        must say that queues are recorded.
        """
        alone = follow is not True or durable is not None or on_lost is not log_lost
        check_kind(group, order, (lease_seconds, count), alone=alone)
        client = QueueMaker(self._gcm, queue) if create_missing else self._gcm
        if group is not None:
            request = join_request(queue, topics, group, order, start, where)
            return self._member(request, lease_seconds, count, client if isinstance(client, QueueMaker) else None)
        begin: Start = "live" if start is None else start
        about = client, queue, topics, on_lost, begin, follow, where
        subscriber = Subscriber(*about) if durable is None else DurableSubscriber(*about, name=durable)
        self._members.add(subscriber)
        return subscriber

    def _member(
        self, request: gcm.CreateWorkQueue, lease_seconds: float, count: int, maker: QueueMaker | None
    ) -> GroupSubscriber:
        async def create() -> None:
            assert request.source is not None
            if maker is not None:
                await maker.make()
            source = await self._placed(request.name, request.source)
            once = msgspec.structs.replace(request, transaction=new_token(), source=source)
            await self._ask(once, gcm.WorkQueueInfo, ADMIN_SECONDS)

        member = GroupSubscriber(queue_address(self.zookeeper, request.name), create, lease_seconds, count)
        self._members.add(member)
        return member

    def transaction(self) -> Transaction:
        """Messages to recorded queues and a group's acks that take effect together or not at all; enter it (`async with`)."""
        return Transaction(self._transactions)

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

"""Which right each request needs. One table per conversation; what stands in none is for the cluster's own processes. Pure.

client   by the rights of its card
host     everything between processes; as a host only what its card's name says
GCM      everything
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roq.errors import AccessDenied
from roq.ids import is_reserved
from roq.wire import access, durables, fleet, gcm, hcm, hosts, master, monitor, options, producers, shuffle, store
from roq.wire.card import Card, CardRole, Right
from roq.wire.recording import is_tape_of, tapes_of
from roq.wire.shards import SetShards, queue_of

EVERYTHING = "*"
Rule = tuple[Right, ...] | None  # any of these
MEMBERS: Rule = ()  # no client
ANYBODY: Rule = None  # with a card
KNOWN = tuple(Right)  # whoever has a right of any kind to it

GCM: Mapping[type, tuple[Rule, str]] = {  # rule, and the field with the name
    gcm.CreateQueue: ((Right.ADMIN,), "name"),
    gcm.RemoveQueue: ((Right.ADMIN,), "name"),
    gcm.StartQueue: ((Right.ADMIN,), "name"),
    gcm.StopQueue: ((Right.ADMIN,), "name"),
    gcm.QueueExists: (ANYBODY, ""),
    gcm.DescribeQueue: (KNOWN, "name"),
    gcm.ListQueues: ((Right.DESCRIBE,), ""),
    gcm.CreateExchange: ((Right.ADMIN,), "queue"),
    gcm.RemoveExchange: ((Right.ADMIN,), "queue"),
    gcm.ListHosts: ((Right.DESCRIBE,), ""),
    gcm.DrainHost: ((Right.ADMIN,), ""),
    hosts.DescribeRemains: ((Right.DESCRIBE,), ""),
    options.CreateMissing: ((Right.ADMIN,), "name"),
    options.SetTemplate: ((Right.ADMIN,), ""),
    options.SetRebalance: ((Right.ADMIN,), ""),
    options.GetOptions: ((Right.DESCRIBE,), ""),
    gcm.SetPolicy: ((Right.ADMIN,), "queue"),
    gcm.RecordQueue: ((Right.ADMIN,), "queue"),
    gcm.RecordHistory: ((Right.ADMIN,), ""),
    gcm.DescribeTapes: ((Right.SUBSCRIBE, Right.READ, Right.DESCRIBE), "queue"),
    durables.OpenDurable: ((Right.SUBSCRIBE, Right.READ), "queue"),
    durables.KeepPosition: ((Right.SUBSCRIBE, Right.READ), "queue"),
    durables.ListDurables: ((Right.SUBSCRIBE, Right.READ, Right.DESCRIBE, Right.ADMIN), "queue"),
    durables.ForgetDurable: ((Right.ADMIN,), "queue"),
    producers.OpenProducer: ((Right.PUBLISH,), "queue"),
    producers.KeepProducer: ((Right.PUBLISH,), "queue"),
    producers.ListProducers: ((Right.PUBLISH, Right.DESCRIBE, Right.ADMIN), "queue"),
    producers.ForgetProducer: ((Right.ADMIN,), "queue"),
    gcm.GetPolicy: ((Right.DESCRIBE,), "queue"),
    gcm.CreateWorkQueue: (KNOWN, "name"),  # one that exists is opened like that; see MAKES
    SetShards: ((Right.ADMIN,), "name"),
    gcm.RemoveWorkQueue: ((Right.ADMIN,), "name"),
    gcm.DescribeWorkQueue: (KNOWN, "name"),
    gcm.ListWorkQueues: ((Right.DESCRIBE,), ""),
    gcm.ListGroups: ((Right.SUBSCRIBE, Right.READ, Right.DESCRIBE), "queue"),
    gcm.CreateShuffle: ((Right.ADMIN, Right.SHUFFLE_WRITE), "name"),
    gcm.RemoveShuffle: ((Right.ADMIN,), "name"),
    gcm.DescribeShuffle: ((Right.DESCRIBE, Right.SHUFFLE_WRITE, Right.SHUFFLE_READ), "name"),
    gcm.ListShuffles: ((Right.DESCRIBE,), ""),
    gcm.NameReceipts: ((Right.SHUFFLE_WRITE,), "name"),
    gcm.CommitShuffle: ((Right.SHUFFLE_WRITE,), "name"),
    gcm.RebalanceShuffle: ((Right.ADMIN,), "name"),
    gcm.GetCluster: ((Right.DESCRIBE,), ""),
    gcm.ReportRuns: (MEMBERS, ""),
    access.SetAccess: ((Right.ADMIN,), ""),
    access.GetAccess: ((Right.DESCRIBE,), ""),
    fleet.SetFleet: ((Right.ADMIN,), ""),
    fleet.GetFleet: ((Right.DESCRIBE,), ""),
}
MAKES: Rule = (Right.ADMIN,)  # what CreateWorkQueue needs beside, if there is none of that name
FILLS: Rule = (Right.SUBSCRIBE, Right.READ)  # and to the queue of which it makes a group: who leases there sees what is here
HCM: Mapping[type, tuple[Rule, str]] = {
    hcm.GetProcesses: ((Right.DESCRIBE,), ""),
    hcm.GetCapacity: ((Right.DESCRIBE,), ""),
    hcm.GetLog: ((Right.DESCRIBE,), ""),
    hcm.SetDraining: ((Right.ADMIN,), ""),
    hcm.ShutdownHost: ((Right.ADMIN,), ""),
}
MONITOR: Mapping[type, Rule] = {
    monitor.JoinPublisher: (Right.PUBLISH,),
    monitor.PublisherReport: (Right.PUBLISH,),
    monitor.JoinSubscriber: (Right.SUBSCRIBE,),
    monitor.SubscriberReport: (Right.SUBSCRIBE,),
    monitor.Leave: (Right.PUBLISH, Right.SUBSCRIBE),
    monitor.ListResponders: (Right.PUBLISH, Right.DESCRIBE),
    monitor.Move: (Right.ADMIN,),
    monitor.Drain: (Right.ADMIN,),
    monitor.AwaitExchange: (Right.ADMIN, Right.DESCRIBE),
    monitor.Describe: (Right.DESCRIBE,),
    monitor.ExchangeReport: MEMBERS,
    monitor.PathsFenced: MEMBERS,
    monitor.RecordDecision: MEMBERS,
}
MASTER: Mapping[type, Rule] = {
    master.Hello: (Right.PUT, Right.LEASE, Right.DESCRIBE, Right.ADMIN),
    master.Put: (Right.PUT,),
    master.Reserve: (Right.PUT,),
    master.PayloadStored: (Right.PUT,),
    master.Lease: (Right.LEASE,),
    master.SettleAll: (Right.LEASE,),
    master.ReleaseEvery: (Right.ADMIN,),
    master.PurgeQueue: (Right.ADMIN,),
    master.RequeueLetters: (Right.ADMIN,),
    master.RemoveLetters: (Right.ADMIN,),
    master.Peek: (Right.DESCRIBE, Right.LEASE),
    master.GetStatus: (Right.DESCRIBE, Right.PUT, Right.LEASE),
    master.GetCopies: (Right.DESCRIBE,),
    master.CountHeld: (Right.DESCRIBE,),
    master.FindKeys: (Right.PUT,),
    master.EndWaits: (Right.LEASE,),
    master.CountLeft: (Right.DESCRIBE,),
    master.CommitAll: (Right.LEASE,),  # and publish to each of its queues, see allow_at_master
}
STORE: Mapping[type, Rule] = {  # what clients need of a store: payloads under names that only the master tells them
    store.PutBlob: (Right.PUT,),
    store.GetBlob: (Right.LEASE, Right.DESCRIBE),
    store.DescribeStore: (Right.DESCRIBE,),
    store.Read: (Right.SUBSCRIBE, Right.READ),  # of tapes alone; see allow_at_store
}
FOLLOWER: Mapping[type, Rule] = {
    shuffle.OpenAttempt: (Right.SHUFFLE_WRITE,),
    shuffle.SendBlocks: (Right.SHUFFLE_WRITE,),
    shuffle.EndRun: (Right.SHUFFLE_WRITE,),
    shuffle.FinishAttempt: (Right.SHUFFLE_WRITE,),
    shuffle.AbandonAttempt: (Right.SHUFFLE_WRITE,),
    shuffle.NameCommitted: (Right.SHUFFLE_WRITE, Right.SHUFFLE_READ),
    shuffle.ListSlices: (Right.SHUFFLE_READ,),
    shuffle.ReadBlocks: (Right.SHUFFLE_READ,),
    shuffle.CutBlocks: (Right.SHUFFLE_READ,),
    shuffle.TellSpec: (Right.SHUFFLE_READ, Right.SHUFFLE_WRITE),
    shuffle.TellSamples: (Right.SHUFFLE_READ, Right.SHUFFLE_WRITE),
    shuffle.CountRows: (Right.SHUFFLE_READ, Right.SHUFFLE_WRITE),
    shuffle.DescribeFollower: (Right.DESCRIBE,),  # to everything
}
ADMINISTRATIVE = frozenset(  # what changes the cluster for others: each is written down with who asked for it
    {kind for table in (GCM, HCM) for kind, (rule, _) in table.items() if rule == (Right.ADMIN,)}
    | {kind for table in (MONITOR, MASTER) for kind, rule in table.items() if rule == (Right.ADMIN,)}
    | {gcm.CreateShuffle}
)
HOSTS = (  # what a host's processes ask the GCM; as an administrator nobody needs a host's card
    gcm.QueueExists,
    gcm.DescribeQueue,
    gcm.DescribeTapes,  # a group's master reads them
    gcm.ListGroups,  # a ScalingProcess whose policy has rules for them
    producers.OpenProducer,  # it publishes what transactions say
    producers.KeepProducer,
    gcm.DescribeWorkQueue,
    gcm.DescribeShuffle,
    gcm.ListShuffles,
    gcm.CreateExchange,
    gcm.RemoveExchange,
    gcm.ReportRuns,
)


def check(card: Card, rule: Rule, name: str) -> None:
    """Members may; a client needs any of these rights to what has this name, or of which it is a shard. In the cluster's own
    queues no client publishes. Raises AccessDenied."""
    if card.role is not CardRole.CLIENT or rule is None:
        return
    name = queue_of(name)
    if rule == (Right.PUBLISH,) and is_reserved(name):
        raise AccessDenied(f"{card.name} is no host of this cluster, and nobody else publishes in {name!r}")
    if any(card.allows(right, name) for right in rule):
        return
    if not rule:
        raise AccessDenied(f"{card.name} is no host of this cluster")
    what = "any right" if rule == KNOWN else "the right " + " or ".join(f"`{right}`" for right in rule)
    raise AccessDenied(f"{card.name} needs {what} to {'everything (*)' if name == EVERYTHING else repr(name)}")


def check_member(card: Card, right: Right, name: str) -> None:
    """As `check`, of one right."""
    check(card, (right,), name)


def publishes(card: Card) -> bool:
    """Whether it may publish to any queue, and so use transactions."""
    return card.role is not CardRole.CLIENT or any(grant.right is Right.PUBLISH for grant in card.grants)


def check_creation(card: Card, request: gcm.CreateWorkQueue, exists: bool) -> None:
    """Who has any right to a work queue that exists may open it; making one needs more, see MAKES and FILLS. Who may publish
    anywhere may use and make that of transactions. Raises AccessDenied."""
    if request.name == master.TRANSACTIONS and publishes(card):
        return
    check(card, KNOWN if exists else MAKES, request.name)
    if request.source is not None and not exists:
        check(card, FILLS, request.source.queue)


def for_names(table: Mapping[type, tuple[Rule, str]]) -> Callable[[Card, Any], None]:
    """For an RpcServer whose requests say what they are about."""

    def allow(card: Card, request: Any) -> None:
        if card.role is CardRole.HOST and not isinstance(request, HOSTS):
            raise AccessDenied(f"host {card.name} is no administrator: {type(request).__name__} needs a card with rights")
        rule, field = table.get(type(request), (MEMBERS, ""))
        if rule == KNOWN and getattr(request, field) == master.TRANSACTIONS and publishes(card):
            return
        if isinstance(request, producers.OpenProducer | producers.KeepProducer) and is_reserved(request.name):
            rule = MEMBERS  # a master publishes under it what transactions say
        check(card, rule, getattr(request, field) if field else EVERYTHING)

    return allow


def for_one(table: Mapping[type, Rule], name: str) -> Callable[[Card, Any], None]:
    """For the processes of one queue or work queue."""

    def allow(card: Card, request: Any) -> None:
        check(card, table.get(type(request), MEMBERS), name)

    return allow


def allow_at_master(name: str) -> Callable[[Card, Any], None]:
    """For the master of a work queue. It publishes by its host's card what transactions say, so each of their queues is checked
    by the card of who commits."""
    by_table = for_one(MASTER, name)

    def allow(card: Card, request: Any) -> None:
        if name != master.TRANSACTIONS or not isinstance(request, master.Hello | master.CommitAll) or not publishes(card):
            by_table(card, request)
        if isinstance(request, master.CommitAll):
            for queue in {part.queue for one in request.transactions for part in one.outgoing}:
                check(card, (Right.PUBLISH,), queue)

    return allow


def allow_at_store() -> Callable[[Card, Any], None]:
    """For a store, whose requests name what only those know who were told: a right to anything is enough. Of logs clients read
    the tapes of a queue that they may subscribe to."""

    def allow(card: Card, request: Any) -> None:
        rule = STORE.get(type(request), MEMBERS) or ()
        if isinstance(request, store.Read):
            mine = is_tape_of(request.segment, tapes_of(request.queue, request.made_by))
            check(card, rule if mine else MEMBERS, request.queue)
            return
        if not any(grant.right in rule for grant in card.grants):
            check(card, rule, EVERYTHING)

    return allow


def for_shuffles(name_of: Callable[[str], str | None]) -> Callable[[Card, Any], None]:
    """For a follower. name_of(id): of a shuffle that it knows; what it does not know, nobody gets."""

    def allow(card: Card, request: Any) -> None:
        rule = FOLLOWER.get(type(request), MEMBERS)
        if isinstance(request, shuffle.DescribeFollower) or not rule:
            check(card, rule, EVERYTHING)
            return
        told = getattr(request, "name", "")
        name = name_of(request.shuffle) or told
        if told not in ("", name):
            raise AccessDenied(f"shuffle {request.shuffle} is not {told!r}")
        if name:
            check(card, rule, name)

    return allow


def allow_at_monitor(queue: str) -> Callable[[Card, Any], None]:
    """For a Monitor: its Exchanges report for the host that their card names; who serves requests has to answer, too."""
    by_table = for_one(MONITOR, queue)

    def allow(card: Card, request: Any) -> None:
        by_table(card, request)
        if isinstance(request, monitor.JoinSubscriber) and request.service is not None:
            check(card, (Right.PUBLISH,), queue)
        if isinstance(request, monitor.ExchangeReport) and (card.role is not CardRole.HOST or card.name != request.host):
            raise AccessDenied(f"{card.name} reports as host {request.host!r}")

    return allow

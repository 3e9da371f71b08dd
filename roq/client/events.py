"""What happens in a cluster, as it does: topology, failures, take-overs, scaling decisions, tapes that end.

    views of the whole cluster (broadcasts.py)   compared, old with new, by `events_between`: pure
    scaling decisions                            their queues' Monitors are asked, those of queues with a policy
    ends of tapes                                the GCM is asked, after an Exchange of a recorded queue has gone
    machines of the fleet                        the GCM is asked, now and then where there is none (fleet_events.py: pure)

Nothing is kept anywhere: what came and went between two looks is not reported, and a pause in which nothing was heard is
reported as MISSED. Not covered: rates and health (overview.py), and what was decided while nobody looked (docs/history.md).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from roq.client.broadcasts import Change, cluster_views, differences
from roq.client.fleet import read_fleet
from roq.client.fleet_events import asks_fleet, fleet_changes
from roq.coordination.locate import GcmClient
from roq.errors import FrameError, RoqError
from roq.ids import GROUP_MARK
from roq.log.replicated.metadata import LogMeta, SegmentState
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcPool
from roq.wire import monitor
from roq.wire.assignment import Leaving, ProcessState, QueueRecord, RunningProcess, from_json
from roq.wire.fleet import FleetInfo
from roq.wire.gcm import ClusterView, QueueInfo, Tapes, WorkQueueInfo
from roq.wire.kpi import Decision
from roq.wire.policy import Policy
from roq.wire.work_queue import GroupSource

MISSED_SECONDS = 5.0  # between two views, from when on it is reported; the leader broadcasts every 2
LOOK_SECONDS = 2.0  # between two rounds of questions to Monitors and about tapes
ASK_SECONDS = 2.0  # one question to a Monitor
ASKED_PER_ROUND = 50  # Monitors; with more queues that scale each is asked less often
ASKED_AT_ONCE = 10
TAPE_SECONDS = 300.0  # after which an end of a tape is not waited for any longer
TAPES_AWAITED_MAX = 100  # as many ends are waited for at a time
log = logger(__name__)


class EventKind(StrEnum):
    """What happened. Those of Change have the same names."""

    WATCHING = "watching"  # the first one: from here on
    MISSED = "missed"
    LEADER_CHANGED = "leader-changed"
    HOST_JOINED = "host-joined"
    HOST_LEFT = "host-left"
    HOST_DRAINING = "host-draining"
    HOST_DRAINING_ENDED = "host-draining-ended"
    PROCESS_DIED = "process-died"
    PROCESS_GIVEN_UP = "process-given-up"
    QUEUE_CREATED = "queue-created"
    QUEUE_REMOVED = "queue-removed"
    QUEUE_STARTED = "queue-started"
    QUEUE_STOPPED = "queue-stopped"
    QUEUE_UNAVAILABLE = "queue-unavailable"
    QUEUE_AVAILABLE = "queue-available"
    POLICY_CHANGED = "policy-changed"
    RECORDING_CHANGED = "recording-changed"
    MONITOR_MOVED = "monitor-moved"
    EXCHANGE_ADDED = "exchange-added"
    EXCHANGE_REMOVED = "exchange-removed"
    EXCHANGE_MOVED = "exchange-moved"
    WORK_QUEUE_CREATED = "work-queue-created"
    WORK_QUEUE_REMOVED = "work-queue-removed"
    WORK_QUEUE_UNAVAILABLE = "work-queue-unavailable"
    WORK_QUEUE_AVAILABLE = "work-queue-available"
    MASTER_MOVED = "master-moved"
    GROUP_CREATED = "group-created"
    GROUP_REMOVED = "group-removed"
    DECISION = "decision"
    DECISION_DONE = "decision-done"
    TAPE_CLOSED = "tape-closed"
    MACHINE_ORDERED = "machine-ordered"
    MACHINE_SERVING = "machine-serving"
    MACHINE_RETURNING = "machine-returning"
    MACHINE_GONE = "machine-gone"
    FLEET_PROBLEM = "fleet-problem"
    FLEET_WELL = "fleet-well"


SENTENCES = {
    EventKind.WATCHING: "watching {detail}",
    EventKind.MISSED: "{detail}",
    EventKind.LEADER_CHANGED: "another GCM leads: {detail}",
    EventKind.HOST_JOINED: "host {host} joined",
    EventKind.HOST_LEFT: "host {host} left: its HCM ended or can't be reached",
    EventKind.HOST_DRAINING: "host {host} {detail}",
    EventKind.HOST_DRAINING_ENDED: "host {host} takes new things again",
    EventKind.PROCESS_DIED: "{process} died on {host} and was started again: {detail}",
    EventKind.PROCESS_GIVEN_UP: "{process} on {host} was given up: {detail}",
    EventKind.QUEUE_CREATED: "queue {queue} was created on {host}",
    EventKind.QUEUE_REMOVED: "queue {queue} was removed",
    EventKind.QUEUE_STARTED: "queue {queue} was started",
    EventKind.QUEUE_STOPPED: "queue {queue} was stopped",
    EventKind.QUEUE_UNAVAILABLE: "queue {queue} has no Monitor that serves: messages flow on, nobody joins",
    EventKind.QUEUE_AVAILABLE: "queue {queue} serves",
    EventKind.POLICY_CHANGED: "queue {queue} has another scaling policy",
    EventKind.RECORDING_CHANGED: "queue {queue} {detail}",
    EventKind.MONITOR_MOVED: "the Monitor of queue {queue} is on {host} now, {detail}",
    EventKind.EXCHANGE_ADDED: "queue {queue} has another Exchange, {exchange} on {host}",
    EventKind.EXCHANGE_REMOVED: "Exchange {exchange} of queue {queue} on {host} was removed",
    EventKind.EXCHANGE_MOVED: "Exchange {exchange} of queue {queue} is on {host} now",
    EventKind.WORK_QUEUE_CREATED: "work queue {work_queue} was created, its master is on {host}",
    EventKind.WORK_QUEUE_REMOVED: "work queue {work_queue} was removed",
    EventKind.WORK_QUEUE_UNAVAILABLE: "work queue {work_queue} has no master that serves",
    EventKind.WORK_QUEUE_AVAILABLE: "work queue {work_queue} serves",
    EventKind.MASTER_MOVED: "the master of work queue {work_queue} is on {host} now, {detail}",
    EventKind.GROUP_CREATED: "group {group} of queue {queue} was made, its master is on {host}",
    EventKind.GROUP_REMOVED: "group {group} of queue {queue} was removed",
    EventKind.DECISION: "queue {queue}: {detail}",
    EventKind.DECISION_DONE: "queue {queue}: {detail}",
    EventKind.TAPE_CLOSED: "the tape of Exchange {exchange} of queue {queue} ended: {detail}",
    EventKind.MACHINE_ORDERED: "machine {host} is being made{detail}",
    EventKind.MACHINE_SERVING: "machine {host} is a host now{detail}",
    EventKind.MACHINE_RETURNING: "machine {host} is given back{detail}",
    EventKind.MACHINE_GONE: "machine {host} is gone{detail}",
    EventKind.FLEET_PROBLEM: "the fleet has a problem: {detail}",
    EventKind.FLEET_WELL: "the fleet has no problem any longer",
}


STOPPING = "is about to end: its queues and work queues move to other hosts"
LEAVING = {
    Leaving.NOTHING: "is cordoned: nothing new is placed there",
    Leaving.PROCESSES: "is drained: its queues and work queues move to other hosts",
    Leaving.EVERYTHING: "is evacuated: its queues, work queues and what its store keeps move to other hosts",
}


class ClusterEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened. str() of it is a sentence.

    time: seconds since 1970, of who saw it (the leading GCM; of a decision, who decided). What is "" or None does not apply.
    host: whose it is, or where the process is now (of what is gone: was). work_queue: of a group its name as one. process: as
    `roq host show` names it. detail: the rest of the sentence. decision: with its cause; of a DECISION_DONE with its outcome.
    """

    kind: EventKind
    time: float
    host: str = ""
    queue: str = ""
    exchange: str = ""
    work_queue: str = ""
    group: str = ""
    process: str = ""
    detail: str = ""
    decision: Decision | None = None

    def __str__(self) -> str:
        return SENTENCES[self.kind].format(**{name: getattr(self, name) for name in self.__struct_fields__})


# --- compared, old with new ---------------------------------------------------------------------------------------------


def watching(view: ClusterView) -> ClusterEvent:
    """The first one."""
    alive = sum(host.alive for host in view.hosts)
    queues = f"{len(view.queues)} queues and {len(view.work_queues)} work queues"
    return ClusterEvent(EventKind.WATCHING, view.time, detail=f"{alive} hosts, {queues}; {view.leader} leads")


def events_between(before: ClusterView, after: ClusterView, silent_seconds: float = 0.0) -> list[ClusterEvent]:
    """What happened between two views. silent_seconds: how long nothing was heard in between. Pure."""
    found = list[ClusterEvent]()
    if silent_seconds > MISSED_SECONDS:
        told = f"nothing was heard for {silent_seconds:.0f} s: what came and went meanwhile is not known"
        found.append(ClusterEvent(EventKind.MISSED, after.time, detail=told))
    if (before.epoch, before.leader) != (after.epoch, after.leader):
        told = f"{after.leader}, epoch {after.epoch}"
        found.append(ClusterEvent(EventKind.LEADER_CHANGED, after.time, detail=told))
    return [*found, *_topology(before, after), *_processes(before, after), *_queues(before, after), *_work(before, after)]


def _topology(before: ClusterView, after: ClusterView) -> Iterator[ClusterEvent]:
    """Those of `differences`; a work queue that is a group is called one."""
    work = {one.record.name: one for view in (before, after) for one in view.work_queues}
    hosts = {host.host: host for host in after.hosts}
    terms = {one.record.name: one.record.term for one in after.queues}
    for change in differences(before, after):
        event = ClusterEvent(
            EventKind(change.change), change.time, change.host, change.queue, change.exchange, change.work_queue
        )
        info = work.get(change.work_queue) if change.work_queue else None
        source = info.record.spec.source if info is not None else None
        match change.change:
            case Change.HOST_DRAINING:
                host = hosts[change.host]
                event = msgspec.structs.replace(event, detail=STOPPING if host.stopping else LEAVING[host.leaving])
            case Change.MONITOR_MOVED:
                event = msgspec.structs.replace(event, detail=f"term {terms[change.queue]}")
            case Change.MASTER_MOVED if info is not None:
                event = msgspec.structs.replace(event, detail=f"term {info.record.term}")
            case Change.WORK_QUEUE_CREATED | Change.WORK_QUEUE_REMOVED if source is not None:
                created = change.change is Change.WORK_QUEUE_CREATED
                event = msgspec.structs.replace(event, kind=EventKind.GROUP_CREATED if created else EventKind.GROUP_REMOVED)
        yield event if source is None else _of_group(event, source)


def _of_group(event: ClusterEvent, source: GroupSource) -> ClusterEvent:
    group = event.work_queue.removeprefix(source.queue + GROUP_MARK)
    return msgspec.structs.replace(event, queue=source.queue, group=group)


def _processes(before: ClusterView, after: ClusterView) -> Iterator[ClusterEvent]:
    """Deaths that an HCM saw; of one that was started anew, whose counts begin at 0, only those of its own life."""
    former = {host.host: host.report for host in before.hosts}
    for host in after.hosts:
        old = former.get(host.host)
        if host.report is None or old is None or old.incarnation != host.report.incarnation:
            continue
        known = {process.name: process for process in old.processes}
        for process in host.report.processes:
            if (was := known.get(process.name)) is not None:
                yield from _deaths(was, process, partial(ClusterEvent, time=after.time, host=host.host, process=process.name))


def _deaths(was: RunningProcess, now: RunningProcess, tell: Callable[..., ClusterEvent]) -> Iterator[ClusterEvent]:
    tell = partial(tell, exchange=now.exchange, **_place(now))
    if now.state is ProcessState.FAILED:
        if was.state is not ProcessState.FAILED:
            yield tell(EventKind.PROCESS_GIVEN_UP, detail=now.error or "no reason was given")
    elif now.restarts > was.restarts:
        times = now.restarts - was.restarts
        reason = now.error or ("once" if times == 1 else f"{times} times")
        yield tell(EventKind.PROCESS_DIED, detail=reason)


def _place(process: RunningProcess) -> dict[str, str]:
    return {"work_queue" if process.subject != process.queue else "queue": process.queue}


def _queues(before: ClusterView, after: ClusterView) -> Iterator[ClusterEvent]:
    old = {_life(info.record): info for info in before.queues}
    for info in after.queues:
        tell = partial(ClusterEvent, time=after.time, queue=info.record.name)
        if (was := old.get(_life(info.record))) is None:
            continue
        if was.policy != info.policy:
            yield tell(EventKind.POLICY_CHANGED)
        if (was.record.recorded, was.record.record) != (info.record.recorded, info.record.record):
            yield tell(EventKind.RECORDING_CHANGED, detail=_recorded(info.record))
        if was.record.running and info.record.running and bool(was.monitors) != bool(info.monitors):
            yield tell(EventKind.QUEUE_AVAILABLE if info.monitors else EventKind.QUEUE_UNAVAILABLE)


def _life(record: QueueRecord) -> tuple[str, str]:
    """Another queue of the same name is another one."""
    return record.name, record.transaction


def _recorded(record: QueueRecord) -> str:
    if not record.recorded or record.record is None:
        return "is recorded no longer"
    return f"is recorded: {record.record}"


def _work(before: ClusterView, after: ClusterView) -> Iterator[ClusterEvent]:
    old = {(info.record.name, info.record.transaction): info for info in before.work_queues}
    for info in after.work_queues:
        was = old.get((info.record.name, info.record.transaction))
        if was is not None and was.ready != info.ready:
            kind = EventKind.WORK_QUEUE_AVAILABLE if info.ready else EventKind.WORK_QUEUE_UNAVAILABLE
            yield _about(ClusterEvent(kind, after.time, info.record.master_host, work_queue=info.record.name), info)


def _about(event: ClusterEvent, info: WorkQueueInfo) -> ClusterEvent:
    source = info.record.spec.source
    return event if source is None else _of_group(event, source)


# --- scaling decisions --------------------------------------------------------------------------------------------------


class DecisionLog:
    """What has been told of each queue's decisions. since: seconds since 1970; what was decided before is not told, only what
    became of it. Pure."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._told: dict[tuple[str, str], dict[tuple[float, str], str]] = {}  # queue → (time, cause) → outcome

    def keep(self, lives: Iterable[tuple[str, str]]) -> None:
        """The queues that there are, by name and creation; others are forgotten."""
        for gone in self._told.keys() - set(lives):
            del self._told[gone]

    def take(self, life: tuple[str, str], decisions: Sequence[Decision], now: float) -> list[ClusterEvent]:
        """What is new of what the queue's Monitor remembers. life: the queue. now: seconds since 1970."""
        known, found = self._told.get(life, {}), list[ClusterEvent]()
        self._told[life] = {(one.time, one.cause): one.outcome for one in decisions}
        for one in decisions:
            told = known.get((one.time, one.cause))
            if told is None:
                if one.time < self._since:
                    continue
                found.append(_decided(EventKind.DECISION, life[0], one, one.time))
            if one.outcome and not told:
                found.append(_decided(EventKind.DECISION_DONE, life[0], one, now))
        return found


def _decided(kind: EventKind, queue: str, one: Decision, at: float) -> ClusterEvent:
    what = f"{one.action}, {one.cause}" if kind is EventKind.DECISION else f"{one.action}: {one.outcome}"
    return ClusterEvent(kind, at, one.host, queue, one.exchange, detail=what, decision=one)


def in_turn(names: Sequence[str], first: Collection[str], number: int, count: int) -> list[str]:
    """At most `count` of the names: those of `first`, up to three quarters, and of the others every one in turn. number: of the
    look. Pure."""
    if len(names) <= count:
        return list(names)
    urgent = set(first)
    wanted = [name for name in names if name in urgent][: count - count // 4]
    chosen = set(wanted)
    others = [name for name in names if name not in chosen]
    room = count - len(wanted)
    begin = number * room % len(others)
    return [*wanted, *others[begin : begin + room], *others[: max(0, begin + room - len(others))]]


# --- ends of tapes ------------------------------------------------------------------------------------------------------


def closed_tapes(queue: str, awaited: Mapping[str, float], found: Tapes, now: float) -> list[ClusterEvent]:
    """Of the Exchanges that are gone, by id, those whose tapes have ended. Pure."""
    events = list[ClusterEvent]()
    for view in found.views:
        if view.live or view.exchange not in awaited:
            continue
        try:
            meta = from_json(view.meta, LogMeta)
        except FrameError as error:
            log.info("a tape's metadata can't be read", extra={"fields": {"log": view.log, "reason": str(error)}})
            continue
        if not meta.segments or meta.segments[-1].state is SegmentState.CLOSED:
            first = meta.segments[0].first if meta.segments else meta.next_first
            count = meta.next_first - first
            told = f"entries {first} to {meta.next_first - 1}" if count else "it is empty"
            events.append(ClusterEvent(EventKind.TAPE_CLOSED, now, queue=queue, exchange=view.exchange, detail=told))
    return events


# --- all of it ----------------------------------------------------------------------------------------------------------


class EventWatch:
    """One reader. Its tasks put what they find into a line of one: who reads slowly makes them wait, and views and decisions
    fall together."""

    def __init__(self, client: GcmClient, tapes: Callable[[str], Awaitable[Tapes]], since: float) -> None:
        self._client, self._tapes = client, tapes
        self.found: asyncio.Queue[list[ClusterEvent]] = asyncio.Queue(1)
        self._queues: tuple[QueueInfo, ...] = ()
        self._decisions = DecisionLog(since)
        self._fleet: FleetInfo | None = None
        self._awaited: dict[str, dict[str, float]] = {}  # queue → Exchange that is gone → until when its tape is waited for

    async def views(self) -> None:
        """Compare them."""
        last, heard = None, time.monotonic()
        async with aclosing(cluster_views(self._client)) as views:
            async for view in views:
                silent, heard = time.monotonic() - heard, time.monotonic()
                events = [watching(view)] if last is None else events_between(last, view, silent)
                self._await_tapes(last, events)
                last, self._queues = view, view.queues
                self._decisions.keep(_life(info.record) for info in view.queues)
                if events:
                    await self.found.put(events)
                    heard = time.monotonic()  # a slow reader's pause is none of the cluster's

    def _await_tapes(self, before: ClusterView | None, events: Sequence[ClusterEvent]) -> None:
        recorded = {one.record.name for one in before.queues if one.record.record is not None} if before else set[str]()
        until = time.monotonic() + TAPE_SECONDS
        for event in events:
            room = sum(map(len, self._awaited.values())) < TAPES_AWAITED_MAX
            if event.kind is EventKind.EXCHANGE_REMOVED and event.queue in recorded and room:
                self._awaited.setdefault(event.queue, {})[event.exchange] = until

    async def rounds(self) -> None:
        """Ask Monitors for decisions, and the GCM for tapes that end."""
        pool = RpcPool(monitor.Reply, ASK_SECONDS)
        number = 0
        try:
            while True:
                running = [one for one in self._queues if one.record.running and one.monitors]
                scaling = {one.record.name: one for one in running if one.policy != Policy()}
                asked = [scaling[name] for name in in_turn(list(scaling), (), number, ASKED_PER_ROUND)]
                events = await self._decided(pool, asked) + await self._ended() + await self._machines(number)
                if events:
                    await self.found.put(events)
                number += 1
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            pool.close()

    async def _decided(self, pool: RpcPool, infos: Sequence[QueueInfo]) -> list[ClusterEvent]:
        gate = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(info: QueueInfo) -> list[ClusterEvent]:
            async with gate:
                try:
                    view = await pool.request(info.monitors[0].clients_endpoint(), monitor.Describe(), monitor.QueueView)
                except RoqError as error:  # it moves, or we have no right; asked again in its turn
                    log.info(
                        "decisions of a queue could not be read from its Monitor, retrying",
                        extra={"fields": {"queue": info.record.name, "reason": str(error)}},
                    )
                    return []
            return self._decisions.take(_life(info.record), view.decisions, time.time())

        found = await asyncio.gather(*map(ask, infos))
        return sorted((event for events in found for event in events), key=lambda event: event.time)

    async def _machines(self, number: int) -> list[ClusterEvent]:
        before = self._fleet
        if not asks_fleet(number, before):
            return []
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._fleet = await read_fleet(self._client)
        except (RoqError, TimeoutError) as error:  # no GCM leads, or one of an older version
            log.info("the fleet is not known", extra={"fields": {"reason": str(error)}})
            return []
        changes = fleet_changes(before, self._fleet) if before is not None else ()
        return [ClusterEvent(EventKind(kind), time.time(), name, detail=detail) for kind, name, detail in changes]

    async def _ended(self) -> list[ClusterEvent]:
        found = list[ClusterEvent]()
        for queue, awaited in list(self._awaited.items()):
            try:
                events = closed_tapes(queue, awaited, await self._tapes(queue), time.time())
            except RoqError as error:  # the queue is gone, or no GCM leads
                log.info("tapes are not known", extra={"fields": {"queue": queue, "reason": str(error)}})
                events = []
            told = {event.exchange for event in events}
            left = {one: until for one, until in awaited.items() if one not in told and until > time.monotonic()}
            if left:
                self._awaited[queue] = left
            else:
                del self._awaited[queue]
            found += events
        return found


async def cluster_events(
    client: GcmClient, tapes: Callable[[str], Awaitable[Tapes]], since: datetime | None
) -> AsyncGenerator[ClusterEvent, None]:
    """For ever: WATCHING, then everything that happens. tapes: of a queue; since: of decisions, None: from now on. Raises
    Closed."""
    watch = EventWatch(client, tapes, since.timestamp() if since is not None else time.time())
    tasks: set[asyncio.Task[Any]] = {asyncio.create_task(watch.views()), asyncio.create_task(watch.rounds())}
    try:
        while True:
            came = asyncio.create_task(watch.found.get())
            tasks.add(came)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if came not in done:
                for ended in done:
                    ended.result()  # raises: they run for ever
            tasks.discard(came)
            for event in await came:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

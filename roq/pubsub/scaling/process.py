"""The ScalingProcess: KPI stream in, decisions performed. Nothing is decided here, see decide.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from roq.coordination.locate import GcmClient
from roq.errors import CallError, FrameError, HostFull, NoHosts, RoqError
from roq.ids import new_token
from roq.pubsub.scaling.decide import Memory, decide
from roq.pubsub.scaling.groups import GroupWatch
from roq.pubsub.scaling.history import HistoryWriter
from roq.pubsub.scaling.load import NEW
from roq.runtime.links import SubscriberLink
from roq.runtime.liveness import beat_on_lease, open_board
from roq.runtime.observe import Counters, Refusals, logger
from roq.runtime.rpc import RpcClient
from roq.runtime.run import Tasks, run
from roq.runtime.shutdown import ShutdownMonitor
from roq.wire import gcm, monitor
from roq.wire import kpi as wire
from roq.wire.assignment import MonitorAddress, ProcessSpec
from roq.wire.process import ChildSpec

log = logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
CREATE_SECONDS = 15.0  # GCM fail-over included
ACTIVE_SECONDS = 15.0  # until every ready subscriber has proved the new Exchange
MOVE_SECONDS = 30.0  # until every FIN was seen
DRAIN_SECONDS = 60.0  # until subscribers have read what is on its way
RECORD_SECONDS = 5.0
DECISIONS_WAITING = 16  # decide() waits for effects, so more means that performing is stuck
NO_SLOT = "refused: no host has a free slot; a host provider would be asked here"


class Asker(Protocol):
    """A GcmClient or an RpcClient to the Monitor."""

    async def request(self, body: msgspec.Struct, expect: type[T], timeout_seconds: float = ...) -> T:
        """The answer; raises a RoqError."""

    def close(self) -> None:
        """End the connection."""


class Performer:
    """Performs scaling decisions, one at a time: GCM for Exchanges, Monitor for moves. Each is recorded at the Monitor twice,
    when it is begun and with its outcome; (time, cause) names it. `offer` decisions, `run` performs them. `connect_gcm` is
    called for each decision that needs the GCM, so that an idle process keeps no connection to it. keep: told what the Monitor
    is told."""

    def __init__(
        self,
        queue: str,
        ask_monitor: Asker,
        connect_gcm: Callable[[], Asker],
        counters: Counters,
        keep: Callable[[wire.Decision], None] = lambda decision: None,
    ) -> None:
        self._queue, self._connect_gcm, self._counters, self._keep = queue, connect_gcm, counters, keep
        self.monitor = ask_monitor
        self._waiting: asyncio.Queue[wire.Decision] = asyncio.Queue(DECISIONS_WAITING)

    def offer(self, decision: wire.Decision) -> None:
        """Perform this after those before it."""
        log.info("scaling decision", extra={"fields": msgspec.to_builtins(decision)})
        self._counters[f"decisions_{decision.action}"] += 1
        try:
            self._waiting.put_nowait(decision)
        except asyncio.QueueFull:
            self._counters["decisions_dropped"] += 1
            fields = {"queue": self._queue, "action": decision.action, "waiting": DECISIONS_WAITING}
            log.error("scaling decision dropped: earlier ones are still being performed", extra={"fields": fields})

    async def run(self) -> None:
        """Perform for ever."""
        while True:
            await self.perform(await self._waiting.get())

    async def perform(self, decision: wire.Decision) -> wire.Decision:
        """Do it; the decision with its outcome. Never raises a RoqError."""
        if decision.action == "hold":
            await self._record(decision)
            return decision
        await self._record(decision)
        try:
            match decision.action:
                case "scale-out":
                    decision = await self._scale_out(decision)
                case "scale-in":
                    decision = replace(decision, outcome=await self._scale_in(decision))
                case _:
                    decision = replace(decision, outcome=await self._move(decision.moves))
        except (HostFull, NoHosts):
            decision = replace(decision, outcome=NO_SLOT)
        except RoqError as error:
            decision = replace(decision, outcome=f"failed: {type(error).__name__}: {error}")
        if decision.outcome.startswith(("failed", "refused")):
            self._counters["decisions_failed"] += 1
        log.info("scaling outcome", extra={"fields": {"cause": decision.cause, "scaling outcome": decision.outcome}})
        await self._record(decision)
        return decision

    async def _scale_out(self, decision: wire.Decision) -> wire.Decision:
        request = gcm.CreateExchange(self._queue, new_token())
        client = self._connect_gcm()
        try:
            created = await client.request(request, gcm.ExchangeCreated, CREATE_SECONDS)
        finally:
            client.close()
        moves = tuple((publisher, created.exchange if to == NEW else to) for publisher, to in decision.moves)
        decision = replace(decision, exchange=created.exchange, host=created.host, moves=moves)
        try:
            await self.monitor.request(monitor.AwaitExchange(created.exchange), monitor.Recorded, ACTIVE_SECONDS)
            return replace(decision, outcome=f"created on host {created.host}; {await self._move(moves)}")
        except RoqError as error:
            return replace(decision, outcome=f"failed after creation: {type(error).__name__}: {error}")

    async def _scale_in(self, decision: wire.Decision) -> str:
        moved = await self._move(decision.moves)
        await self.monitor.request(monitor.Drain(decision.exchange), monitor.Drained, DRAIN_SECONDS)
        client = self._connect_gcm()
        try:
            request = gcm.RemoveExchange(self._queue, decision.exchange, new_token())
            await client.request(request, gcm.Done, CREATE_SECONDS)
        finally:
            client.close()
        return f"{moved}; removed"

    async def _move(self, moves: tuple[tuple[int, str], ...]) -> str:
        if not moves:
            return "no publisher to move"
        moved = await self.monitor.request(monitor.Move(moves), monitor.Moved, MOVE_SECONDS)
        refused = f"; refused: {'; '.join(moved.refused)}" if moved.refused else ""
        return f"{moved.moved} of {len(moves)} publishers moved{refused}"

    async def _record(self, decision: wire.Decision) -> None:
        self._keep(decision)
        try:
            await self.monitor.request(monitor.RecordDecision(decision), monitor.Recorded, RECORD_SECONDS)
        except RoqError as error:  # the log has it; a Monitor that restarts must not stop the scaling
            log.warning(
                "scaling decision could not be recorded", extra={"fields": {"error": f"{type(error).__name__}: {error}"}}
            )


class Scaling:
    """One queue's scaling: its policy, its memory, and its two connections to the Monitor."""

    def __init__(self, spec: ChildSpec, counters: Counters) -> None:
        self.queue = spec.process.queue
        self._name = self.queue.encode()
        self._counters = counters
        self._refusals = Refusals(log, counters)
        self._policy = spec.process.full_policy.check()
        self._memory = Memory()
        self._address = spec.monitor
        self.history = HistoryWriter(self.queue, lambda: GcmClient(spec.zookeeper), counters)
        self.history.switch(spec.process.history)
        self.groups = GroupWatch(self.queue, lambda: GcmClient(spec.zookeeper))
        self.groups.switch(self._policy.watches_groups())
        keep = self.history.note_decision
        self.performer = Performer(self.queue, self._ask(), lambda: GcmClient(spec.zookeeper), counters, keep)
        self._stream = self._listen()

    def _ask(self) -> RpcClient:
        return RpcClient(self._address.clients_endpoint(), monitor.Reply, counters=self._counters)

    def _listen(self) -> SubscriberLink:
        return SubscriberLink(self._address.kpis_endpoint(), [self._name], self._records)

    def _records(self, messages: list[list[bytes]]) -> None:
        for parts in messages:
            self._record(parts)

    def _record(self, parts: list[bytes]) -> None:
        """One message of the KPI stream."""
        try:
            if len(parts) != 2:
                raise FrameError(f"{len(parts)} parts instead of 2")
            record = wire.decode(parts[1])
        except FrameError as error:
            self._refusals.note("undecodable_kpi", error)
            return
        if record.queue != self.queue:
            return  # the subscription matches by prefix
        self._counters["records"] += 1
        if self._policy.watches_groups():
            record = replace(record, groups=self.groups.newest())
        decisions, self._memory = decide(record, self._policy, self._memory)
        for decision in decisions:
            self.performer.offer(decision)
        self.history.note_kpi(record)

    def configure(self, spec: ProcessSpec) -> None:
        """Go on with another policy, at once, with history or without, and with another Monitor if it has moved."""
        if spec.queue != self.queue:
            raise CallError(f"this process scales queue {self.queue!r}, not {spec.queue!r}")
        self._policy = spec.full_policy.check()
        self.history.switch(spec.history)
        self.groups.switch(self._policy.watches_groups())
        log.info("policy replaced", extra={"fields": {"queue": self.queue, "history": spec.history}})
        if spec.monitor is not None and spec.monitor != self._address:
            self._follow(spec.monitor)

    def _follow(self, address: MonitorAddress) -> None:
        """Listen to and ask another Monitor; what is being asked of the former one fails with Closed. One that only has
        another term is the same process."""
        former, self._address = self._address, address
        if (former.clients_endpoint(), former.kpis_endpoint()) == (address.clients_endpoint(), address.kpis_endpoint()):
            return
        self.performer.monitor.close()
        self.performer.monitor = self._ask()
        self._stream.close()
        self._stream = self._listen()

    def close(self) -> None:
        """Close both connections."""
        self._stream.close()
        self.performer.monitor.close()


async def serve(spec: ChildSpec, stop: asyncio.Event) -> None:
    """Scale until `stop`. Raises PortTaken, InvalidPolicy, ProcessFailed: the host's lease is over."""
    counters = Counters()
    scaling = Scaling(spec, counters)
    tasks = Tasks(lambda error: stop.set())
    try:
        control = ShutdownMonitor(
            spec.process.name, spec.address, spec.ports["control"], stop, counters, configure=scaling.configure
        )
        board = open_board(spec)
        try:
            tasks.start(scaling.performer.run(), "performer")
            tasks.start(scaling.history.run(), "history")
            tasks.start(scaling.groups.run(), "groups")
            await beat_on_lease(board, spec, stop, lambda: None)
        finally:
            await tasks.stop()
            control.close()
            board.close()
    finally:
        scaling.close()


def main(spec: ChildSpec) -> int:
    """Run the ScalingProcess of `spec`; its exit code."""
    return run(lambda stop: serve(spec, stop))

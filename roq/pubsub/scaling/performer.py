"""Performing scaling decisions, one at a time: GCM for Exchanges, Monitor for moves. Nothing is decided here.

Each decision is recorded at the Monitor twice, when it is begun and with its outcome; (time, cause) names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from roq.errors import HostFull, NoHosts, RoqError
from roq.ids import new_token
from roq.pubsub.scaling.plan import NEW
from roq.runtime.observe import Counters, logger
from roq.wire import gcm, monitor
from roq.wire.kpi import Decision

T = TypeVar("T", bound=msgspec.Struct)
log = logger(__name__)

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
    """`offer` decisions, `run` performs them. `connect_gcm` is called for each decision that needs the GCM, so that an idle
    process keeps no connection to it."""

    def __init__(self, queue: str, ask_monitor: Asker, connect_gcm: Callable[[], Asker], counters: Counters) -> None:
        self._queue, self._connect_gcm, self._counters = queue, connect_gcm, counters
        self.monitor = ask_monitor
        self._waiting: asyncio.Queue[Decision] = asyncio.Queue(DECISIONS_WAITING)

    def offer(self, decision: Decision) -> None:
        """Perform this after those before it."""
        log.info("scaling decision", extra={"fields": msgspec.to_builtins(decision)})
        self._counters[f"decisions_{decision.action}"] += 1
        try:
            self._waiting.put_nowait(decision)
        except asyncio.QueueFull:
            self._counters["decisions_dropped"] += 1
            log.error("scaling decision dropped: earlier ones are still being performed")

    async def run(self) -> None:
        """Perform for ever."""
        while True:
            await self.perform(await self._waiting.get())

    async def perform(self, decision: Decision) -> Decision:
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

    async def _scale_out(self, decision: Decision) -> Decision:
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

    async def _scale_in(self, decision: Decision) -> str:
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

    async def _record(self, decision: Decision) -> None:
        try:
            await self.monitor.request(monitor.RecordDecision(decision), monitor.Recorded, RECORD_SECONDS)
        except RoqError as error:  # the log has it; a Monitor that restarts must not stop the scaling
            log.warning(
                "scaling decision could not be recorded", extra={"fields": {"error": f"{type(error).__name__}: {error}"}}
            )

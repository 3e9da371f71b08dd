"""One client's membership of one queue: join at the active Monitor, report once a second, rejoin when needed.

Honest by construction: `monitor_silent_seconds` grows while the Monitor does not answer, and the owner's intent (topics,
path) is told again on every join. One endless loop does it all, with jittered waits; nothing but `close` ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import msgspec

from roq.client.locate import GcmClient
from roq.errors import CallError, NotReady, QueueStopped, RoqError
from roq.runtime.backoff import delays
from roq.runtime.rpc import RpcClient
from roq.wire import gcm
from roq.wire import monitor as wire
from roq.wire.assignment import MonitorAddress

log = logging.getLogger(__name__)
REPORT_SECONDS = 1.0
SILENT_SECONDS = 3.0  # three reports unanswered: look for the Monitor again
JOIN_SECONDS = 3.0  # one try


class Member(Protocol):
    """Who joins: the publisher or the subscriber."""

    def join_request(self) -> msgspec.Struct:
        """JoinPublisher or JoinSubscriber as of now."""

    def report(self) -> msgspec.Struct:
        """PublisherReport or SubscriberReport as of now."""

    def take(self, notice: Any) -> None:
        """A welcome or a notice of the Monitor (Heard and Rejoin excepted unless they change something)."""


class Membership:
    """`await join()` once, then it keeps itself up until `close`."""

    def __init__(self, gcm_client: GcmClient, queue: str, member: Member) -> None:
        self._gcm, self._queue, self._member = gcm_client, queue, member
        self._rpc: RpcClient | None = None
        self._address: MonitorAddress | None = None
        self._heard = 0.0
        self._joined = False
        self._again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def joined(self) -> bool:
        """Whether the Monitor knows us."""
        return self._joined

    def monitor_silent_seconds(self) -> float:
        """Since the Monitor was heard last."""
        return time.monotonic() - self._heard

    async def join(self, timeout_seconds: float) -> None:
        """Join for the first time. Raises the refusal (QueueNotFound, QueueStopped, …) or what kept us from joining."""
        deadline = time.monotonic() + timeout_seconds
        for wait in delays(0.02, 0.5):
            try:
                await self._join_once(deadline - time.monotonic())
                break
            except CallError:
                raise
            except RoqError as error:
                self._disconnect()
                if time.monotonic() + wait >= deadline:
                    raise error
            await asyncio.sleep(wait)
        self._task = asyncio.get_running_loop().create_task(self._keep_up(), name=f"membership of {self._queue}")

    async def _join_once(self, left_seconds: float) -> None:
        if self._rpc is None:
            info = await self._gcm.request(gcm.DescribeQueue(self._queue), gcm.QueueInfo, max(0.1, left_seconds))
            if not info.record.running:
                raise QueueStopped(f"queue {self._queue!r} is stopped")
            if not info.monitors:
                raise NotReady(f"queue {self._queue!r} has no serving Monitor yet")
            self._address = info.monitors[0]
            self._rpc = RpcClient(self._address.clients_endpoint(), wire.Reply, wire.NoticeToMember, self._notice)
        request = self._member.join_request()
        expect: Any = wire.PublisherWelcome if isinstance(request, wire.JoinPublisher) else wire.SubscriberWelcome
        welcome = await self._rpc.request(request, expect, max(0.1, min(JOIN_SECONDS, left_seconds)))
        self._heard, self._joined = time.monotonic(), True
        self._member.take(welcome)

    async def _keep_up(self) -> None:
        waits = delays(0.05, 2.0)
        while True:
            try:
                if not self._joined:
                    await self._join_once(JOIN_SECONDS)
                    waits = delays(0.05, 2.0)
                    log.info("joined queue again", extra={"fields": {"queue": self._queue}})
                self.report_now()
                await self._pause(REPORT_SECONDS)
                if self.monitor_silent_seconds() > SILENT_SECONDS:
                    log.warning("monitor is silent: looking for it again", extra={"fields": {"queue": self._queue}})
                    self._disconnect()
            except RoqError as error:
                fields = {"queue": self._queue, "error": type(error).__name__, "reason": str(error)}
                log.warning("could not join queue again; trying on", extra={"fields": fields})
                self._disconnect()
                await asyncio.sleep(next(waits))

    async def _pause(self, seconds: float) -> None:
        """Until the next report is due or something must be done at once."""
        try:
            async with asyncio.timeout(seconds):
                await self._again.wait()
        except TimeoutError:
            pass
        self._again.clear()

    def _notice(self, notice: Any) -> None:
        self._heard = time.monotonic()
        if isinstance(notice, wire.Rejoin):
            self._joined = False
            self._again.set()
        else:
            self._member.take(notice)

    def report_now(self) -> None:
        """Send a report without waiting for the next second."""
        if self._rpc is not None and self._joined:
            self._rpc.notify(self._member.report())

    def _disconnect(self) -> None:
        self._joined = False
        if self._rpc is not None:
            self._rpc.close()
            self._rpc = None

    async def close(self, member: int, timeout_seconds: float) -> None:
        """Say good-bye within the bound and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._rpc is not None and self._joined and timeout_seconds > 0:
            try:
                await self._rpc.request(wire.Leave(member), wire.Left, timeout_seconds)
            except RoqError as error:
                log.info("left without a good-bye", extra={"fields": {"queue": self._queue, "reason": str(error)}})
        self._disconnect()

"""One client's membership of one queue: join at the active Monitor, report once a second, rejoin when needed.

Reports go to the backup Monitors too: one that has been activated answers with a higher term than the last, and is joined
at once. A Monitor of a lower term is not obeyed.

Honest by construction: `monitor_silent_seconds` grows while the Monitor does not answer, and the owner's intent (topics,
path) is told again on every join. One endless loop does it all, with jittered waits; nothing ends it but `close`, and a proof
that the Monitor refuses while there is no other: then the owner ends, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from roq.coordination.locate import GcmClient
from roq.errors import CallError, CardRevoked, Closed, NotReady, ProducerFenced, ProofRefused, QueueStopped, RoqError
from roq.pubsub.outage import may_pass
from roq.runtime.backoff import delays
from roq.runtime.observe import logger
from roq.runtime.rpc import RpcClient
from roq.wire import gcm
from roq.wire import monitor as wire
from roq.wire.assignment import MonitorAddress
from roq.wire.member_id import MemberId

T = TypeVar("T", bound=msgspec.Struct)
log = logger(__name__)
REPORT_SECONDS = 1.0
WORRY_SECONDS = 1.5  # a report was not answered: report more often, so that an activated backup is found soon
WORRIED_REPORT_SECONDS = 0.2
SILENT_SECONDS = 3.0  # three reports unanswered: look for the Monitor again
JOIN_SECONDS = 3.0  # one try
NOT_READY_SECONDS = 0.2  # longest wait between tries while the Monitor answers that it is not ready
REJOIN_SECONDS = 1.0  # one try of a member that looks for its Monitor again


class Member(Protocol):
    """Who joins: the publisher or the subscriber."""

    def join_request(self) -> msgspec.Struct:
        """JoinPublisher or JoinSubscriber as of now."""

    def report(self) -> msgspec.Struct:
        """PublisherReport or SubscriberReport as of now."""

    def take(self, notice: Any) -> None:
        """A welcome or a notice of the Monitor, except those about Monitors themselves."""

    def fail(self, error: RoqError) -> None:
        """It is no member any more, and will be none."""


async def no_other_proof(refused: ProofRefused) -> MemberId:
    """Of an id that was drawn."""
    raise refused


class ClientMembership:
    """`await join()` once, then it keeps itself up until `close`. identity: the member's; all that is said has its proof."""

    def __init__(self, gcm_client: GcmClient, queue: str, member: Member, identity: MemberId) -> None:
        self._gcm, self._queue, self._member = gcm_client, queue, member
        self.identity = identity
        # Asked once, when the Monitor refuses the one we have. Raises TemporaryError, or why there is none.
        self.other_proof: Callable[[ProofRefused], Awaitable[MemberId]] = no_other_proof
        self._monitors: dict[str, RpcClient] = {}  # by endpoint: all that are known
        self._leader = ""  # endpoint of the one we are with
        self._term = 0
        self._before: wire.ReadyCount | None = None  # what the last Monitor said when it ended
        self._heard = 0.0
        self._joined = False
        self._stopped = False
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
        """Join for the first time. Raises the refusal (QueueNotFound, QueueStopped, …) or what kept us from joining; Closed
        once it was stopped."""
        deadline = time.monotonic() + timeout_seconds
        for wait in delays(0.02, 0.5):
            try:
                await self._join_once(deadline - time.monotonic())
                break
            except (CallError, ProducerFenced):
                raise
            except RoqError as error:
                self._check_running()
                self._disconnect()
                if time.monotonic() + wait >= deadline:
                    raise error
            await asyncio.sleep(wait)
        self._task = asyncio.get_running_loop().create_task(self._keep_up(), name=f"membership of {self._queue}")

    def _check_running(self) -> None:
        """After each wait of one that joins: whoever stops it may not wait for that."""
        if self._stopped:
            raise Closed(f"the membership of queue {self._queue!r} was closed")

    async def _join_once(self, left_seconds: float) -> None:
        self._check_running()
        if not self._leader:
            info = await self._gcm.request(gcm.DescribeQueue(self._queue), gcm.QueueInfo, max(0.1, left_seconds))
            self._check_running()
            if not info.record.running:
                raise QueueStopped(f"queue {self._queue!r} is stopped: start it first")
            if not info.monitors:
                raise NotReady(f"queue {self._queue!r} has no serving Monitor yet")
            self._listen_to(info.monitors)
            self._leader = info.monitors[0].clients_endpoint()
        request = self._proved(self._member.join_request(), before=self._before)
        expect: Any = wire.PublisherWelcome if isinstance(request, wire.JoinPublisher) else wire.SubscriberWelcome
        rpc = self._monitors[self._leader]
        welcome = await rpc.request(request, expect, max(0.1, min(JOIN_SECONDS, left_seconds)))
        self._check_running()
        self._heard, self._joined, self._before = time.monotonic(), True, None
        self._term = welcome.term
        if welcome.monitors:
            self._listen_to(welcome.monitors)
        self._member.take(welcome)

    def _proved(self, said: msgspec.Struct, **more: Any) -> msgspec.Struct:
        return msgspec.structs.replace(said, proof=self.identity.proof, **more)

    def _listen_to(self, monitors: Iterable[MonitorAddress]) -> None:
        """Be connected to exactly these Monitors (and to the one we are with)."""
        wanted = dict.fromkeys(one.clients_endpoint() for one in monitors)
        for endpoint in [one for one in self._monitors if one not in wanted and one != self._leader]:
            self._monitors.pop(endpoint).close()
        for endpoint in [one for one in wanted if one not in self._monitors]:
            hear = functools.partial(self._notice, endpoint)
            self._monitors[endpoint] = RpcClient(endpoint, wire.Reply, wire.NoticeToMember, hear)

    async def _keep_up(self) -> None:
        waits = delays(0.05, 1.0)
        while True:
            try:
                if not self._joined:
                    await self._join_again()
                    waits = delays(0.05, 1.0)
                self.report_now()
                worried = self.monitor_silent_seconds() > WORRY_SECONDS
                await self._pause(WORRIED_REPORT_SECONDS if worried else REPORT_SECONDS)
                if self.monitor_silent_seconds() > SILENT_SECONDS and self._joined:
                    log.warning("Monitor does not answer: looking it up again", extra={"fields": {"queue": self._queue}})
                    self._joined, self._leader = False, ""
            except CardRevoked as error:  # which no server takes back; a card that is over may be so by a wrong clock
                return self._end(error)
            except RoqError as error:
                fields = {"queue": self._queue, "error": type(error).__name__, "reason": str(error)}
                log.warning("rejoining the queue failed; retrying", extra={"fields": fields})
                self._leader = ""
                self.report_now()  # a backup that was activated meanwhile answers
                wait = next(waits)
                await self._pause(min(wait, NOT_READY_SECONDS) if isinstance(error, NotReady) else wait)
            except Exception:  # a defect must not end the membership in silence
                log.exception("defect in the membership loop; retrying", extra={"fields": {"queue": self._queue}})
                await self._pause(next(waits))

    async def _join_again(self) -> None:
        """Or end, if we are taken no more. Raises what keeps us from it just now."""
        for other_proof in (self.other_proof, no_other_proof):
            try:
                await self._join_once(REJOIN_SECONDS)
                log.info("joined queue again", extra={"fields": {"queue": self._queue}})
                return
            except ProofRefused as error:
                refused = ProofRefused(f"queue {self._queue!r} does not take this member back, as {error}: open it again")
            try:
                self.identity = await other_proof(refused)
            except (CallError, ProducerFenced) as error:
                if may_pass(error):
                    raise
                self._end(error)
                return

    def _end(self, error: RoqError) -> None:
        self.stop()  # this loop, too, at its next wait
        self._member.fail(error)

    async def _pause(self, seconds: float) -> None:
        """Until the next report is due or something must be done at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._again.wait()
        self._again.clear()

    def _notice(self, source: str, notice: Any) -> None:
        term = getattr(notice, "term", self._term)
        if source != self._leader:
            if isinstance(notice, wire.Rejoin) and term > self._term:
                log.info("another Monitor leads the queue", extra={"fields": {"queue": self._queue, "term": term}})
                self._leader, self._term, self._joined = source, term, False
                self._again.set()
            return
        if term < self._term:
            return  # it no longer leads
        self._heard = time.monotonic()
        match notice:
            case wire.Rejoin():
                self._joined = False
                self._again.set()
            case wire.Standby(_, ready):
                self._leader, self._joined, self._before = "", False, ready  # it leads no more: ask who does
                self._again.set()
            case wire.Monitors(_, monitors):
                self._listen_to(monitors)
            case _:
                self._member.take(notice)

    async def ask(self, request: msgspec.Struct, expect: type[T], timeout_seconds: float) -> T:
        """Ask the Monitor. Raises NotReady while it does not know us, also if another has replaced it before it answered, and
        what RpcClient.request raises."""
        rpc = self._monitors.get(self._leader)
        if rpc is None or not self._joined:
            raise NotReady(f"the Monitor of queue {self._queue!r} can't be asked just now: try again")
        reply = await rpc.request(request, expect, timeout_seconds)
        if getattr(reply, "term", self._term) < self._term:
            raise NotReady(f"the Monitor of queue {self._queue!r} was replaced meanwhile: try again")
        return reply

    def report_now(self) -> None:
        """Send a report without waiting for the next second."""
        if self._monitors:
            report = self._proved(self._member.report())
            for rpc in self._monitors.values():
                rpc.notify(report)

    def _disconnect(self) -> None:
        self._joined, self._leader = False, ""
        for rpc in self._monitors.values():
            rpc.close()
        self._monitors.clear()

    async def close(self, timeout_seconds: float) -> None:
        """Say good-bye within the bound and stop."""
        if self._task is not None:
            self._task.cancel()
        rpc = self._monitors.get(self._leader)
        if rpc is not None and self._joined and timeout_seconds > 0:
            try:
                await rpc.request(wire.Leave(*self.identity), wire.Left, timeout_seconds)
            except RoqError as error:
                log.info(
                    "leave could not be reported to the Monitor", extra={"fields": {"queue": self._queue, "reason": str(error)}}
                )
        self.stop()

    def stop(self) -> None:
        """Stop at once, without a word, also one that joins just now."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
        self._disconnect()

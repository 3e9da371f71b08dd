"""A producer: the name of a publisher, under which its numbers go on when the program is started anew.

Whoever opens a name holds it, with a token drawn for that, until another one does. Opening it ends what the life before still
does, in this order:

    GCM         the name has another holder: the one before keeps nothing any more
    Monitor     lets the new one in when every Exchange refuses the paths of the one before, and has stored what it took of them
    tapes       are read from where the one before has kept how far it got: its last number that is stored
    GCM         that is kept; from here on messages leave

While it publishes it keeps how far it got once a second. If it could not for LEASE_SECONDS it sends nothing until it could, so
a later one knows up to which time it has to read. Not covered: paths (producer_sender.py), tapes (producer_tail.py), the GCM's
side (gcm/producers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable

from roq.coordination.locate import GcmClient
from roq.errors import (
    Closed,
    DeadlineExceeded,
    FrameError,
    IncompatibleVersion,
    ProcessFailed,
    ProducerFenced,
    RoqError,
)
from roq.ids import check_name, new_token
from roq.pubsub.outage import Outage
from roq.pubsub.producer_sender import ProducerSender
from roq.pubsub.producer_tail import ProducerTail, read_tail
from roq.runtime.observe import logger
from roq.wire.gcm import Done
from roq.wire.member_id import MemberId
from roq.wire.producers import LEASE_SECONDS, KeepProducer, OpenProducer, ProducerGrant

log = logger(__name__)
KEEP_SECONDS = 1.0  # between two looks at whether there is more to be kept
IDLE_SECONDS = 10.0  # without: the lease is renewed so often
REQUEST_SECONDS = 10.0
MOMENT_SECONDS = 0.1  # for a request, however little time is left


class Producer:
    """`await open()`, join, `await begin()`; `await close()` once everything is stored.

    sent(): number of the last message that was sent. fail(error): it was opened elsewhere, or forgotten, or there is no such
    queue any more."""

    def __init__(
        self, client: GcmClient, queue: str, name: str, sent: Callable[[], int], fail: Callable[[RoqError], None]
    ) -> None:
        """Raises InvalidName."""
        self._client, self._queue, self._name = client, queue, check_name(name, "producer")
        self._sent, self._fail = sent, fail
        self._holder = new_token()
        self._grant: ProducerGrant | None = None
        self._turn = self._answered = 0  # the last one that was begun, and that was answered
        self._target = self._kept = 0  # what was sent when the last turn was answered; what was kept last
        self._kept_at = 0.0  # when the last turn began that was answered (monotonic)
        self._held = False  # the lease is over
        self._replays = 0  # of the paths, when the proof was given
        self._outage = Outage("the producer can't keep its name now", queue=queue, producer=name)
        self._wanted = asyncio.Event()  # a look before its time
        self._task: asyncio.Task[None] | None = None

    @property
    def above(self) -> int:
        """Its paths are above this one."""
        return 0 if self._grant is None else self._grant.path

    @property
    def prefer(self) -> str:
        """The Exchange of the life before, "" if that is not known."""
        return "" if self._grant is None else self._grant.exchange

    async def open(self, sender: ProducerSender, timeout_seconds: float) -> MemberId:
        """Hold the name from now on. The publisher's id. Raises QueueNotFound, NotRecorded, AccessDenied, IncompatibleVersion,
        CallError, Unavailable, DeadlineExceeded."""
        try:
            grant = self._grant = await self._client.request(self._opening(), ProducerGrant, timeout_seconds)
        except FrameError as error:
            raise IncompatibleVersion(f"the GCM has a version without producers: upgrade the hosts ({error})") from error
        identity = MemberId(grant.publisher, grant.proof)
        sender.begin(identity, grant.path, grant.exchange if grant.settled else "")
        return identity

    def _opening(self, *, holds: bool = False) -> OpenProducer:
        owner = f"{socket.gethostname()} (pid {os.getpid()})"
        return OpenProducer(self._queue, self._name, self._holder, owner, holds)

    async def prove_anew(self, sender: ProducerSender, timeout_seconds: float = REQUEST_SECONDS) -> MemberId:
        """With a seal of today: keys rotate while a producer lives. Raises ProducerFenced, and as `open`."""
        replays = sender.replays
        grant = await self._client.request(self._opening(holds=True), ProducerGrant, timeout_seconds)
        sender.proof, self._replays = grant.proof, replays
        log.info("a producer has its proof anew", extra={"fields": {"queue": self._queue, "producer": self._name}})
        return MemberId(grant.publisher, grant.proof)

    async def begin(self, sender: ProducerSender, timeout_seconds: float) -> ProducerTail:
        """The Monitor has let us in: find what the life before has stored, and go on behind it. timeout_seconds: without any
        progress. Raises ProducerFenced, and as read_tail."""
        assert self._grant is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_seconds) as patience:

                def moved() -> None:
                    if not patience.expired():
                        patience.reschedule(loop.time() + timeout_seconds)

                tail = await read_tail(self._client, self._queue, self._grant, moved)
        except TimeoutError:
            what = f"what producer {self._name!r} has stored before: nothing more of it could be read for {timeout_seconds:g} s"
            raise DeadlineExceeded(f"{what}: stores may be away; try again") from None
        sender.begin_behind(tail.number)
        self._target = tail.number
        await self._keep(sender, timeout_seconds)
        sender.resume()
        self._task = asyncio.get_running_loop().create_task(self._run(sender), name=f"producer {self._name}")
        return tail

    def doubt(self, sender: ProducerSender) -> None:
        """Somebody else may have opened it: nothing leaves until it is known."""
        self._held = True
        sender.hold()
        self._wanted.set()

    async def _keep(self, sender: ProducerSender, timeout_seconds: float, *, closed: bool = False) -> None:
        began, number = time.monotonic(), sender.confirmed
        fresh = number >= self._target and self._turn == self._answered  # a lost answer does not say what was sent before it
        self._turn += 1
        about = self._turn, number, fresh, sender.path, sender.left, closed
        await self._client.request(KeepProducer(self._queue, self._name, self._holder, *about), Done, timeout_seconds)
        self._kept_at, self._kept, self._answered, self._target = began, number, self._turn, self._sent()

    async def _run(self, sender: ProducerSender) -> None:
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_SECONDS):
                        await self._wanted.wait()
                await self._look(sender)
                await self._look_at_proof(sender)
        except Closed:
            return
        except RoqError as error:
            self._fail(error)
        except Exception as error:  # a defect must not end in silence
            log.exception(
                "defect while a producer kept its name", extra={"fields": {"queue": self._queue, "producer": self._name}}
            )
            self._fail(ProcessFailed(f"the producer could not keep its name: {error}"))

    async def _look(self, sender: ProducerSender) -> None:
        since = time.monotonic() - self._kept_at
        if since > LEASE_SECONDS and not self._held:
            fields = {"queue": self._queue, "producer": self._name}
            log.warning("a producer could not keep its name: it publishes nothing until it can", extra={"fields": fields})
            self._held = True
            sender.hold()
        news = sender.confirmed > max(self._kept, self._target - 1)  # earlier a turn could not be fresh, nor the one behind it
        if not (self._wanted.is_set() or self._held or since > IDLE_SECONDS or news):
            return
        self._wanted.clear()
        try:
            left = LEASE_SECONDS - since
            await self._keep(sender, min(REQUEST_SECONDS, left) if left > 1 else REQUEST_SECONDS)
        except RoqError as error:
            self._outage.wait_out(error)
            return
        if self._held:
            self._held = False
            sender.resume()

    async def _look_at_proof(self, sender: ProducerSender) -> None:
        """A path broke: an Exchange that refuses the proof says nothing. Not longer than the lease: then it has to be held."""
        left = LEASE_SECONDS - (time.monotonic() - self._kept_at)
        if sender.proof and sender.replays > self._replays and left > 1:
            try:
                await self.prove_anew(sender, min(REQUEST_SECONDS, left))
            except RoqError as error:
                self._outage.wait_out(error)

    async def close(self, sender: ProducerSender, timeout_seconds: float, *, settled: bool) -> None:
        """Keep how far it got for good. settled: everything that was sent is stored, and its path is ended. Raises
        ProducerFenced; whatever else keeps it from that only means that the next one has to look at the tapes."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not (settled and sender.left) or timeout_seconds <= 0:
            return
        try:
            await self._keep(sender, max(MOMENT_SECONDS, timeout_seconds), closed=True)
        except ProducerFenced:
            raise
        except RoqError as error:
            fields = {"queue": self._queue, "producer": self._name, "reason": str(error)}
            log.info("the next one to open this producer will have to look at the tapes", extra={"fields": fields})

    def stop(self) -> None:
        """Keep nothing more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

"""A publisher with a name: exactly once onto the tapes, over restarts of its program (producer.py).

Numbers are those of the application's source: message n of it has number n, in every life. So it reads `number`, goes on with
the message behind it, and what a life before had sent and not been told of is not sent twice, or is dropped by its number.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

from roq.coordination.locate import GcmClient
from roq.errors import DeadlineExceeded, IncompatibleVersion, RoqError
from roq.pubsub.path_sender import PathSender
from roq.pubsub.producer import MOMENT_SECONDS, Producer
from roq.pubsub.producer_sender import ProducerSender
from roq.pubsub.publisher import CONFIRM_SECONDS, OPEN_SECONDS, STORED, Publisher, PublishReceipt
from roq.pubsub.watermarks import TopicRecord
from roq.wire import monitor as wire
from roq.wire.member_id import MemberId


class NamedPublisher(Publisher):
    """Confirms what is stored. Once its name was opened elsewhere, or forgotten, all it is asked for raises ProducerFenced."""

    def __init__(self, client: GcmClient, queue: str, producer: str) -> None:
        """Raises InvalidName."""
        super().__init__(client, queue, STORED)
        self._producer = Producer(client, queue, producer, lambda: self._sequence, self.fail)
        self._membership.other_proof = lambda refused: self._producer.prove_anew(self._paths)

    def _make_sender(self, member: MemberId) -> PathSender:
        return ProducerSender(
            self._flush, self._membership.report_now, lambda: self._sequence, lambda: self.fail(self._not_recorded())
        )

    @property
    def _paths(self) -> ProducerSender:
        return cast(ProducerSender, self._sender)

    async def open(self, timeout_seconds: float = OPEN_SECONDS) -> Publisher:
        """As Publisher's; also ProducerFenced: somebody else has opened the name meanwhile; IncompatibleVersion: hosts have an
        older version, which knows no producers. Behind a crash it takes as long as tapes have to be read, and `timeout_seconds`
        is how long nothing of them may come."""
        try:
            await super().open(timeout_seconds)
        except RoqError as error:
            raise self._failed or error from None
        return self

    async def _prepare(self, timeout_seconds: float) -> None:
        await super()._prepare(timeout_seconds)
        self._membership.identity = await self._producer.open(self._paths, timeout_seconds)
        self.id = self._membership.identity.id

    async def _begin(self, timeout_seconds: float) -> float:
        tail = await self._producer.begin(self._paths, timeout_seconds)
        self._sequence = tail.number
        for name, (last, sent) in tail.topics.items():
            record = self._topics[name] = self._watermarks.touched[name] = TopicRecord(name)
            record.last, record.sent = last, sent
        return timeout_seconds  # anew: reading lasts as long as it gets on

    def fail(self, error: RoqError) -> None:
        """See Publisher."""
        self._producer.stop()
        super().fail(error)

    async def flush(self, timeout_seconds: float = CONFIRM_SECONDS) -> PublishReceipt:
        """As Publisher's; also ProducerFenced."""
        return await super().flush(timeout_seconds)

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """As Publisher's; also ProducerFenced. With everything stored the next one to open the name needs not look at tapes."""
        deadline, settled, was_closed = time.monotonic() + timeout_seconds, False, self._closed
        try:
            if timeout_seconds > 0 and not was_closed:
                self._flush()
                with contextlib.suppress(RoqError):  # `close` finds out itself; watermarks tell only of what is stored
                    await self._sender.confirm(timeout_seconds)
            await super().close(max(MOMENT_SECONDS, deadline - time.monotonic()) if timeout_seconds > 0 else 0)
            settled = self._failed is None and self._sequence == self.number and self._paths.ended
        except DeadlineExceeded:
            what = f"closed after {timeout_seconds:g} s without confirmation that all messages are stored"
            raise DeadlineExceeded(f"{what}: open it again, and publish what is behind its number") from None
        finally:
            await self._producer.close(self._paths, deadline - time.monotonic(), settled=settled)

    def join_request(self) -> wire.JoinPublisher:
        """See membership.Member."""
        sender, producer = self._sender, self._producer
        path = sender.path if sender.opened.is_set() else 0
        place = (self.id, path, sender.exchange, sender.token, wire.PROTOCOL, self._needs)
        return wire.JoinPublisher(*place, producer.above, producer.prefer)

    def take(self, notice: Any) -> None:
        """See membership.Member."""
        if isinstance(notice, wire.ProducerReplaced):
            self._producer.doubt(self._paths)
            return
        opening = not self._sender.opened.is_set()
        if opening and isinstance(notice, wire.PublisherWelcome) and notice.monitor < wire.SERVER_FENCES:
            what = f"the Monitor of queue {self.queue!r} has a version without producers"
            self.fail(error := IncompatibleVersion(f"{what}: upgrade the hosts"))
            raise error
        super().take(notice)

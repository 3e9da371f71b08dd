"""What transactions of a term publish, as their forwarder (roq/groups/outbox.py) sees it: only what is durable, each queue's in
its order; and what became of it is written to the same log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roq.errors import NotReady
from roq.runtime.observe import logger
from roq.wire.master import OUTBOX_PREFIX
from roq.workqueue.master.service import MasterService
from roq.workqueue.master.term import MasterTerm
from roq.workqueue.outbox import Destination, Message

log = logger(__name__)


class OutgoingOutbox:
    """Of one term. producer: the name under which everything is published. now: ms."""

    def __init__(self, service: MasterService, term: MasterTerm, log_id: str, now: Callable[[], int]) -> None:
        self.producer = OUTBOX_PREFIX + log_id  # another work queue of the same name counts anew
        self._service, self._term, self._now = service, term, now
        self._durable = {queue: one.last for queue, one in service.fold.outbox.destinations.items()}  # so is what was read
        self._changed = asyncio.Event()
        for queue in list(self._durable):
            self.idle(queue)
        service.committed = self._committed

    def _committed(self, numbers: dict[str, int]) -> None:
        self._durable.update(numbers)
        self._changed.set()

    async def changed(self) -> None:
        """Returns when more is durable than when it returned last."""
        await self._changed.wait()
        self._changed.clear()

    def queues(self) -> list[str]:
        """To which there is something to be forwarded."""
        return [queue for queue in self._durable if self.waiting(queue)]

    def waiting(self, queue: str) -> int:
        """Messages to be forwarded to this one."""
        one = self._of(queue)
        return self._durable.get(queue, 0) - one.sent if one is not None else 0

    def first(self, queue: str, count: int) -> list[Message]:
        """The first of them, at most `count`."""
        one = self._of(queue)
        return one.first(min(count, self.waiting(queue))) if one is not None else []

    async def prove(self) -> None:
        """Returns when this master has shown that the log is its own. Raises NotLeader."""
        await self._term.barrier()

    async def attach(self, queue: str, tapes: str, stored: int) -> None:
        """The producer has published `stored` messages there. Returns when what is to follow them is certain. To be called
        between `prove` and the first message: whoever owns the log later opens the producer later, and so ends this one. Raises
        NotReady: tapes have lost messages."""
        one = self._of(queue)
        if one is None:
            return
        if one.lacks(tapes, stored):
            raise NotReady(
                f"its tapes show {stored} messages of producer {self.producer}, and had {one.stored}: stores are away, or "
                f"lost some (`roq queue tapes {queue}`). If they stay away, `roq queue forget-producer` lets it begin anew"
            )
        number, known = one.attached(tapes, stored, self._durable[queue])
        if one.tapes == tapes and not known:
            fields = {"queue": queue, "producer": self.producer, "stored": stored, "expected": one.stored}
            log.error("the producer of transactions has other numbers than it had: was it forgotten?", extra={"fields": fields})
        if number > one.sent or not known:
            self._record(queue, tapes, number, stored)
        if not known:
            await self._term.barrier()

    def sent(self, queue: str, count: int) -> None:
        """So many more are on the tapes."""
        if (one := self._of(queue)) is not None:
            self._record(queue, one.tapes, one.sent + count, one.stored + count)

    async def give_up(self, queue: str) -> None:
        """Forget the first of its messages, which can't be published. Returns when that is certain."""
        if (one := self._of(queue)) is not None:
            self._record(queue, one.tapes, one.sent + 1, one.stored)
            await self._term.barrier()

    def idle(self, queue: str) -> None:
        """Forget a queue for which nothing waits, so that others have room. The next message to it finds the numbers anew."""
        if (one := self._of(queue)) is not None and not one.waiting:
            self._forget(queue, one.sent)

    def gone(self, queue: str) -> int:
        """The queue was removed: forget it. How many messages it does not get."""
        count = self.waiting(queue)
        if (one := self._of(queue)) is not None:
            self._forget(queue, one.sent + count)
        return count

    def _forget(self, queue: str, number: int) -> None:
        self._record(queue, "", number, 0)
        if self._of(queue) is None:
            self._durable.pop(queue, None)

    def _record(self, queue: str, tapes: str, number: int, stored: int) -> None:
        self._service.forwarded(queue, tapes, number, stored, self._now())
        self._term.turn()

    def _of(self, queue: str) -> Destination | None:
        return self._service.fold.outbox.destinations.get(queue)

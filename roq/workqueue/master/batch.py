"""What becomes one entry of the log, and all of that which is not durable yet: its bytes are bounded, its requests known. Pure.

A client sends a request again when the log is slow. What it did the first time is on its way then, so a second one is not
logged: it joins the first and gets the same answer. So what waits for a log that stands still grows with new requests only,
and those are refused from WAITING_BYTES_MAX on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roq.errors import RoqError
from roq.wire import master as wire
from roq.workqueue.records import BlobRef, Record

RECORD_BYTES = 64  # of a record without what users gave
RECORD_COST = 256  # of memory, beyond that: as an object, and as the task that it made
ANSWER_BYTES = 64  # of an answer; payloads in it are the queue's own
WAITING_BYTES_MAX = 64 * 1024 * 1024  # seconds of a busy queue; the log takes no more either (LogSettings.window_bytes)

Body = wire.Reply | RoqError
Name = tuple[int, int | str]


@dataclass(slots=True, eq=False)
class EntryBatch:
    """What becomes one entry of the log, and what is due when it is durable. No records: only something to wait for.

    asked: by the request's name, what was asked for in detail and its answer.
    """

    records: list[Record] = field(default_factory=list)
    answers: list[tuple[bytes, int, Body]] = field(default_factory=list)  # peer, id of the request
    asked: dict[Name, tuple[Any, wire.Reply]] = field(default_factory=dict)
    dropped: list[BlobRef] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    size: int = 0


def name_of(request: wire.Request) -> tuple[Name, Any] | None:
    """What a request that is sent again has in common with the first one, and with nobody else's; None: it may as well be done
    again. Tasks are part of it: the records hold the same objects, so that costs nothing."""
    if isinstance(request, wire.Put):
        return (request.producer, request.sequence), request.tasks
    if isinstance(request, wire.Lease):
        return (request.instance, -request.nonce), 0
    if isinstance(request, wire.SettleAll):
        return ((request.instance, request.settle[0].token), request.settle) if request.settle else None
    if isinstance(request, wire.PayloadStored):
        return (request.producer, request.sequence), request.blob
    return None


class PendingBatches:
    """The batches that are not durable yet, the open one included. bytes: of all of them, nearly."""

    def __init__(self) -> None:
        self.bytes = 0
        self.open = EntryBatch()
        self._all: dict[EntryBatch, None] = {self.open: None}  # in their order

    @property
    def full(self) -> bool:
        """So much waits for the log that nothing new should."""
        return self.bytes > WAITING_BYTES_MAX

    def answer(self, peer: bytes, id: int, body: Body) -> None:
        """Due when all is durable that there is now."""
        self.open.answers.append((peer, id, body))
        self.bytes += ANSWER_BYTES

    def tell(self, peer: bytes, id: int, name: Name, detail: Any, body: wire.Reply) -> None:
        """As `answer`; also for those who send the request again. name, detail: as `name_of` gives them."""
        batch = self.open
        batch.asked[name] = (detail, body)
        batch.answers.append((peer, id, body))
        self.bytes += ANSWER_BYTES

    def join(self, peer: bytes, id: int, request: wire.Request) -> bool:
        """Give it the answer of the one that it repeats, if that is on its way."""
        if (named := name_of(request)) is None:
            return False
        name, detail = named
        for batch in self._all:
            found = batch.asked.get(name)
            if found is not None and found[0] == detail:
                batch.answers.append((peer, id, found[1]))
                self.bytes += ANSWER_BYTES
                return True
        return False

    def close(self) -> EntryBatch | None:
        """The open batch, if there is anything in it; the next one is open then."""
        batch = self.open
        if not (batch.records or batch.answers):
            return None
        self.open = EntryBatch()
        self._all[self.open] = None
        return batch

    def follow(self, batch: EntryBatch, before: EntryBatch) -> None:
        """This one without records is as durable as the one before."""
        before.answers += batch.answers
        before.asked |= batch.asked
        batch.answers = []
        self.durable(batch)

    def durable(self, batch: EntryBatch) -> None:
        """It waits no longer."""
        if batch in self._all:
            del self._all[batch]
            self.bytes -= batch.size + RECORD_COST * len(batch.records) + ANSWER_BYTES * len(batch.answers)

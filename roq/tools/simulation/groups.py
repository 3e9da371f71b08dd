"""Members of a simulated group, and what their accounts add up to.

What a publisher was told is stored comes to the group: some member acks it in the end, and the group has completed all that
came into it. A message that was acked is never leased again. In order by topic, a message comes only when those of its topic
that came before are done, and each publisher's come in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import roq
from roq.errors import LeaseLost, TemporaryError
from roq.tools.chaos.promises import TopicOrder
from roq.tools.simulation.recordings import TOLD_MAX, RecordedPublisher, RecordingBooks
from roq.tools.simulation.tasks import AGAIN_SECONDS, IDLE_SECONDS, LEASE_SECONDS
from roq.workqueue.codec import parse_task_id, parse_token
from roq.workqueue.prefetch import Task

DONE_LOOK_SECONDS = 0.5


class MessageKey(NamedTuple):
    """A message: its publisher's id, its number."""

    publisher: int
    number: int


@dataclass(eq=False)
class MessageLease:
    """One lease, as its member knows it. order: in the group's log. acking, acked: as a tasks.Delivery has them."""

    message: MessageKey
    topic: str
    member: str
    order: int
    acking: bool = False
    acked: bool = False


@dataclass
class GroupBooks:
    """All leases of a run, by message. status: of the group in the end."""

    ordered: bool
    work_seconds: float = 0.1
    leases: dict[MessageKey, list[MessageLease]] = field(default_factory=dict)
    topics: dict[str, list[MessageKey]] = field(default_factory=dict)  # messages as they came for the first time
    order: TopicOrder = field(default_factory=TopicOrder)
    wrong: list[str] = field(default_factory=list)
    status: roq.Status | None = None

    def came(self, member: str, task: Task) -> MessageLease:
        """A member got it."""
        key = MessageKey(*parse_task_id(task.id))
        if int(task.payload.split(b" ", 1)[0]) != key.number:
            self.wrong.append(f"message {key} has the payload of another one")
        lease = MessageLease(key, task.topic, member, parse_token(task.token)[0])
        before = self.leases.setdefault(key, [])
        if any(one.acked and one.order < lease.order for one in before):
            self.wrong.append(f"{key} came to {member} although it was acked by {before[-1].member}")
        if not before:
            self._first(lease)
        before.append(lease)
        return lease

    def _first(self, lease: MessageLease) -> None:
        if self.ordered:
            self.wrong += self.order.first(lease.topic, *lease.message)
        self.topics.setdefault(lease.topic, []).append(lease.message)

    def asks(self, lease: MessageLease) -> None:
        """Its member asks for it to be acked."""
        lease.acking = True
        self.order.done(lease.topic, *lease.message)

    def may_be_done(self, key: MessageKey) -> bool:
        """Whether some member asked for it to be acked."""
        return any(one.acking for one in self.leases.get(key, ()))

    def counts(self) -> tuple[int, int]:
        """Leases, messages acked."""
        leases = [one for some in self.leases.values() for one in some]
        return len(leases), sum(any(one.acked for one in some) for some in self.leases.values())


async def take_part(books: GroupBooks, address: str, label: str, random: Random, stop: asyncio.Event) -> None:
    """Lease messages and settle them until `stop`."""
    while not stop.is_set():
        try:
            async with roq.open_queue(address, patience_seconds=random.choice((3.0, 30.0))) as group:
                while not stop.is_set():
                    leases = group.leases(LEASE_SECONDS, count=random.choice((1, 4, 20)), wait_seconds=IDLE_SECONDS)
                    async with contextlib.aclosing(leases) as messages:
                        async for message in messages:
                            await _handle(books, books.came(label, message), message, random)
                            if stop.is_set():
                                break
        except TemporaryError:
            await asyncio.sleep(AGAIN_SECONDS)


async def _handle(books: GroupBooks, lease: MessageLease, message: Task, random: Random) -> None:
    await asyncio.sleep(random.random() * books.work_seconds)
    drawn = random.random()
    try:
        if drawn < 0.02:
            return  # its lease runs out
        if drawn < 0.06:
            await message.release(random.choice((0.0, 0.5)), error="try it again")
        else:
            books.asks(lease)
            await message.ack()
            lease.acked = True
    except LeaseLost:
        pass


async def await_done(books: GroupBooks, address: str, seconds: float) -> None:
    """Until everything that is on the tapes came into the group and is done, for so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(TemporaryError):
                    async with roq.open_queue(address) as group:
                        books.status = status = await group.status()
                        if status.behind_seconds == 0.0 and not (status.ready or status.delayed or status.leased):
                            return
                await asyncio.sleep(DONE_LOOK_SECONDS)


def judge_group(books: GroupBooks, recording: RecordingBooks) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    wrong, status = list(dict.fromkeys(books.wrong))[:TOLD_MAX], books.status
    if status is None or status.completed != status.inserted:
        wrong.append(f"the group was not done in time: {status}")
    known = {one.id for one in recording.recorded}
    if strangers := [key for key in books.leases if key.publisher not in known]:
        wrong.append(f"messages of unknown publishers: {strangers[:TOLD_MAX]}")
    for one in recording.recorded:
        missed = [number for number in _due(recording, one) if not books.may_be_done(MessageKey(one.id, number))]
        if missed:
            wrong.append(f"{one.label}: {len(missed)} stored messages were done by nobody, {missed[:TOLD_MAX]}")
    return wrong


def _due(recording: RecordingBooks, one: RecordedPublisher) -> list[int]:
    """What was stored, and not while recording was switched off or on."""
    return [number for number, at in sorted(one.stored.items()) if not recording.switched(one.began[number - 1], at)]

"""Members of a simulated group that move its messages to two other recorded queues by transactions, and what accounts say.

Every message that the group has completed is on the tapes of both, once, and nothing else is; of an ordered group, those of a
topic in the order in which they came. A transaction that was aborted, or rolled back, has published nothing: then another
member moves the message, and it would be there twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

import roq
from roq.errors import LeaseLost, TemporaryError
from roq.tools.simulation.cluster import QUEUE, ZOOKEEPER
from roq.tools.simulation.faults import Fault
from roq.tools.simulation.groups import GroupBooks, MessageKey, MessageLease
from roq.tools.simulation.load import OPEN_SECONDS
from roq.tools.simulation.recording_cluster import GROUP_ADDRESS, GroupCluster
from roq.tools.simulation.recordings import TOLD_MAX
from roq.tools.simulation.tasks import AGAIN_SECONDS, IDLE_SECONDS, LEASE_SECONDS
from roq.workqueue.prefetch import Task

MOVED = "moved", "copied"
COMMITS_MAX = 3  # of one transaction whose outcome is not known, before its member gives up
BY_HAND = 0.1, 0.12  # of what is drawn: people give the message back, by its token, while its member works on it
FOUND_SECONDS = 120.0  # until everything has been forwarded


@dataclass
class MovedBooks:
    """found: what is on the tapes of each queue in the end, with its topic."""

    found: dict[str, list[tuple[str, MessageKey]]] = field(default_factory=lambda: {queue: [] for queue in MOVED})
    committed: int = 0


async def move(books: GroupBooks, moved: MovedBooks, label: str, random: Random, stop: asyncio.Event) -> None:
    """Lease messages and move them until `stop`."""
    while not stop.is_set():
        try:
            async with (
                roq.connect(ZOOKEEPER, connect_seconds=OPEN_SECONDS) as cluster,
                roq.open_queue(GROUP_ADDRESS, patience_seconds=random.choice((3.0, 30.0))) as group,
            ):
                while not stop.is_set():
                    leases = group.leases(LEASE_SECONDS, count=random.choice((1, 4, 20)), wait_seconds=IDLE_SECONDS)
                    async with contextlib.aclosing(leases) as messages:
                        async for message in messages:
                            lease, drawn = books.came(label, message), random.random()
                            await asyncio.sleep(random.random() * books.work_seconds)
                            if BY_HAND[0] < drawn < BY_HAND[1]:
                                with contextlib.suppress(LeaseLost):
                                    await group.release(message.token)
                            await _handle(books, moved, cluster, lease, message, drawn)
                            if stop.is_set():
                                break
        except TemporaryError:
            await asyncio.sleep(AGAIN_SECONDS)


async def _handle(
    books: GroupBooks, moved: MovedBooks, cluster: roq.Cluster, lease: MessageLease, message: Task, drawn: float
) -> None:
    if drawn < 0.02:
        return  # its lease runs out
    with contextlib.suppress(LeaseLost):
        if drawn < 0.05:
            await message.release(0.0 if drawn < 0.035 else 0.5, error="try it again")
            return
        async with cluster.transaction() as transaction:
            for queue in MOVED:
                await transaction.publish(queue, message.topic, b"%d %d" % lease.message)
            await transaction.ack(message)
            if drawn < 0.1:
                transaction.rollback()
                return
            books.asks(lease)
            for left in reversed(range(COMMITS_MAX)):
                try:
                    await transaction.commit()
                    break
                except TemporaryError:
                    if not left:
                        return
        lease.acked = True
        moved.committed += 1


class TransactionCluster(GroupCluster):
    """As a GroupCluster, whose members move what they get."""

    RECORDED = QUEUE, *MOVED

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.moved = MovedBooks()

    def _program(self, what: str, label: str, random: Random, stop: asyncio.Event) -> Coroutine[Any, Any, None]:
        if what == "member":
            return self._told(label, move(self.group, self.moved, label, random, stop))
        return super()._program(what, label, random, stop)

    async def look(self, seconds: float) -> None:
        """Read what was moved, too."""
        await super().look(seconds)
        done = asyncio.Event()

        async def program(stop: asyncio.Event) -> None:
            await self._told("admin", self._read())
            done.set()

        self.admin.run("admin", program)
        await done.wait()

    async def _read(self) -> None:
        """Until as many are there as the group has completed."""
        status, end = self.group.status, self.loop.time() + FOUND_SECONDS
        wanted = status.completed if status is not None else 0
        while self.loop.time() < end and (short := [queue for queue, keys in self.moved.found.items() if len(keys) < wanted]):
            with contextlib.suppress(TemporaryError):
                async with roq.connect(ZOOKEEPER, connect_seconds=OPEN_SECONDS) as cluster:
                    for queue in short:
                        async with cluster.subscriber(queue, start="earliest", follow=False) as messages:
                            self.moved.found[queue] = [(one.topic, _key(one.payload)) async for one in messages]
            await asyncio.sleep(AGAIN_SECONDS)

    def judged(self, faults: list[Fault]) -> tuple[list[str], tuple[int, int, int]]:
        """What is wrong, and what was stored, leased and moved."""
        wrong, (stored, leases, _) = super().judged(faults)
        return wrong + judge_moved(self.moved, self.group), (stored, leases, self.moved.committed)


def _key(payload: bytes) -> MessageKey:
    publisher, number = payload.split()
    return MessageKey(int(publisher), int(number))


def judge_moved(moved: MovedBooks, books: GroupBooks) -> list[str]:
    """What is wrong, in words; empty if nothing is."""
    wrong = [f"{queue}: {one}" for queue, found in moved.found.items() for one in _judge_queue(found, books)]
    one, other = ({key for _, key in moved.found[queue]} for queue in MOVED)
    if half := sorted(one ^ other):
        wrong.append(f"{len(half)} messages were published to one queue of two, {half[:TOLD_MAX]}")
    return wrong


def _judge_queue(found: list[tuple[str, MessageKey]], books: GroupBooks) -> list[str]:
    wrong, times = list[str](), Counter(key for _, key in found)
    if twice := [key for key, count in times.items() if count > 1]:
        wrong.append(f"{len(twice)} messages were moved twice, {twice[:TOLD_MAX]}")
    if never := [key for key in books.leases if any(one.acked for one in books.leases[key]) and key not in times]:
        wrong.append(f"{len(never)} messages were committed and are not there, {never[:TOLD_MAX]}")
    if strange := [key for key in times if not books.may_be_done(key)]:
        wrong.append(f"nobody committed {strange[:TOLD_MAX]}")
    if books.status is not None and len(times) != books.status.completed:
        wrong.append(f"{books.status.completed} messages are done, {len(times)} were moved")
    if books.ordered:
        for topic, keys in books.topics.items():
            mine = [key for name, key in found if name == topic]
            if mine != [key for key in keys if key in times]:
                wrong.append(f"what was moved of {topic} is in another order than it came")
    return wrong

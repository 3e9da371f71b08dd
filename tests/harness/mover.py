"""A program that moves a group's messages to several queues by transactions, says what it does, and kills itself at a step:
`ZOOKEEPER GROUP LIFE STEP TURN QUEUE...`. It ends when its input does.

Every fourth turn acks nothing, and so does one for which there is no message; every fourth begins with a transaction that is
rolled back. A payload is `TRANSACTION KEY`: the key of a message is `PUBLISHER.NUMBER`, of what acks nothing the transaction.

    leased BEGAN KEY...      the request was sent at that time (monotonic seconds of this machine)
    asked TRANSACTION KEY... commit is called now
    committed WHEN TRANSACTION
    undone TRANSACTION       nothing of it may ever show

Not covered: what is right (moving.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum, auto

import roq
from roq.errors import LeaseLost, TemporaryError

LEASE_SECONDS, COUNT, WAIT_SECONDS = 3.0, 20, 0.2
TURNS_MAX = 100_000
COMMITS_MAX = 3  # of one transaction whose outcome is not known
COMMIT_SECONDS = 0.02  # about as long as one takes: it is cut off somewhere within
ROLLED_BACK = "~"  # behind a transaction's name
AGAIN = 3  # exit status: nothing that it needs answers


class MoverStep(StrEnum):
    """Where it dies: behind each of these, but for COMMITTING, which is anywhere within a commit."""

    NEVER = auto()
    LEASED = auto()
    PUBLISHED_ONE = auto()
    PUBLISHED = auto()
    ACKED = auto()
    COMMITTING = auto()
    COMMITTED = auto()


def tell(*words: object) -> None:
    """To whoever started this; said when it returns."""
    os.write(sys.stdout.fileno(), (" ".join(map(str, words)) + "\n").encode())


def die() -> None:
    """As if somebody else had killed it."""
    os.kill(os.getpid(), signal.SIGKILL)


class Mover:
    """One life."""

    def __init__(self, cluster: roq.Cluster, group: roq.WorkQueue, life: str, dies: MoverStep, queues: Sequence[str]) -> None:
        self._cluster, self._group, self._life, self._queues = cluster, group, life, queues
        self._dies, self._now = dies, False

    def _reached(self, step: MoverStep) -> None:
        if self._now and step is self._dies:
            die()

    async def turn(self, number: int, *, last: bool) -> None:
        """One transaction. last: it dies in it."""
        self._now = last
        messages = await self._lease() if number % 4 != 3 else []
        self._reached(MoverStep.LEASED)
        name = f"{self._life}.{number}"
        try:
            if messages and number % 4 == 1:
                await self._undo(name + ROLLED_BACK, messages)
            async with self._cluster.transaction() as transaction:
                keys = await self._collect(transaction, name, messages)
                tell("asked", name, *keys)
                await self._commit(transaction, name)
        except (LeaseLost, TemporaryError):  # TransactionAborted, or it came to no commit
            tell("undone", name)

    async def _lease(self) -> list[roq.Task]:
        began = time.monotonic()
        try:
            found = await self._group.lease(LEASE_SECONDS, COUNT, WAIT_SECONDS)
        except TemporaryError:
            return []
        tell("leased", began, *map(_key, found))
        return found

    async def _collect(self, transaction: roq.Transaction, name: str, messages: Sequence[roq.Task]) -> list[str]:
        wanted = [(one.topic, _key(one)) for one in messages] or [("alone", name)]
        for queue in self._queues:
            for topic, key in wanted:
                await transaction.publish(queue, topic, f"{name} {key}".encode())
            self._reached(MoverStep.PUBLISHED_ONE)
        self._reached(MoverStep.PUBLISHED)
        for message in messages:
            await transaction.ack(message)
        self._reached(MoverStep.ACKED)
        return [key for _, key in wanted]

    async def _undo(self, name: str, messages: Sequence[roq.Task]) -> None:
        tell("undone", name)
        async with self._cluster.transaction() as transaction:
            await self._collect(transaction, name, messages)
            transaction.rollback()

    async def _commit(self, transaction: roq.Transaction, name: str) -> None:
        if self._now and self._dies is MoverStep.COMMITTING:
            asyncio.get_running_loop().call_later(random.uniform(0.0, COMMIT_SECONDS), die)
        for left in reversed(range(COMMITS_MAX)):
            try:
                await transaction.commit()
                break
            except TemporaryError:
                if not left:
                    transaction.rollback()
                    return
        self._reached(MoverStep.COMMITTED)
        tell("committed", time.monotonic(), name)


def _key(message: roq.Task) -> str:
    return f"{message.publisher}.{int(message.payload)}"


async def live(zookeeper: str, address: str, life: str, step: str, turn: str, *queues: str) -> None:
    """Until it dies, or its input ends."""
    stop, stdin = asyncio.Event(), sys.stdin.fileno()
    asyncio.get_running_loop().add_reader(stdin, stop.set)
    async with roq.connect(zookeeper) as cluster, roq.open_queue(address) as group:
        mover = Mover(cluster, group, life, MoverStep(step), queues)
        for number in range(TURNS_MAX):
            if stop.is_set():
                break
            await mover.turn(number, last=number >= int(turn))
    asyncio.get_running_loop().remove_reader(stdin)


if __name__ == "__main__":
    try:
        asyncio.run(live(*sys.argv[1:]))
    except TemporaryError:
        sys.exit(AGAIN)

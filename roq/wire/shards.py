"""Shards of a work queue: their names, their list, and the request that changes it.

A work queue of several *shards* is as many work queues, each with its log and its masters. The first, number 0, has the queue's
own name and record, and in it the list of all; the others have names that nobody else can give.
"""

from __future__ import annotations

import msgspec

from roq.ids import RESERVED

SHARDS_MAX = 64  # of one work queue, that take tasks: each has masters of its own, and every lease that waits asks all
SHARDED_NAME_MAX = 80  # characters of a queue with shards: theirs are longer
SHARD_PREFIX = RESERVED + "shard."
MARK = ":"  # between the number of a shard and an id or a token; those of shard 0 stand alone


def shard_name(queue: str, number: int) -> str:
    """`_roq.shard.2.orders`: what shard 2 is named as a work queue. Shard 0 has the queue's name."""
    return f"{SHARD_PREFIX}{number}.{queue}" if number else queue


def is_shard(name: str) -> bool:
    """Whether a work queue of this name is a shard of another."""
    return name.startswith(SHARD_PREFIX)


def queue_of(name: str) -> str:
    """The queue that a work queue of this name is, or is a shard of."""
    return name.removeprefix(SHARD_PREFIX).partition(".")[2] if is_shard(name) else name


def shard_number(name: str) -> int:
    """Which shard of its queue a work queue of this name is."""
    return int(name.removeprefix(SHARD_PREFIX).partition(".")[0]) if is_shard(name) else 0


def marked(shard: int, text: str) -> str:
    """An id or token of the whole queue."""
    return f"{shard}{MARK}{text}" if shard and text else text


def unmarked(text: str) -> tuple[int, str]:
    """The shard, and what the id or token is there."""
    number, mark, rest = text.partition(MARK)
    if mark and number.isascii() and number.isdecimal() and number[0] != "0":
        return int(number), rest
    return 0, text


class ClosingShard(msgspec.Struct, frozen=True):
    """A shard that takes no more tasks, and is removed when it is empty. since: seconds since 1970, by the GCM's clock."""

    number: int
    since: float


class ShardList(msgspec.Struct, frozen=True):
    """The shards of a work queue, in the record of shard 0, which never closes. A number is used once.

    version: higher with each change, also of a queue that is made anew under this name: it begins with the time of day. open:
    those that take tasks. keyed: those among which tasks with a dedup_key are spread, closing ones included; a split adds none,
    so each key stays where it is remembered. made: numbers used so far.
    """

    version: int = 0
    open: tuple[int, ...] = (0,)
    keyed: tuple[int, ...] = (0,)
    closing: tuple[ClosingShard, ...] = ()
    made: int = 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """All there are: open ones, then closing ones."""
        return (*self.open, *(one.number for one in self.closing))

    @property
    def single(self) -> bool:
        """There is shard 0 alone: a work queue as any other."""
        return len(self.open) == 1 and not self.closing


class SetShards(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How many shards of a work queue take tasks from now on. Answered with its WorkQueueInfo when all of them serve. Those
    that are too many are emptied by whoever leases, then removed. Said again, it changes nothing."""

    name: str
    shards: int
    transaction: str

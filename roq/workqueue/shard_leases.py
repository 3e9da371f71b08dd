"""Leases in hand of a queue of several shards: one keeper for each, so that a shard that does not answer keeps no other's tasks
from being renewed and settled.

Any token says which shard it is of, and those of a queue without others are all of shard 0: then this is a LeaseKeeper as any.
Not covered: what a keeper does (lease_keeper.py), how settlements of an event loop travel (batcher.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from roq.errors import Closed
from roq.wire.shards import unmarked
from roq.wire.task import Settlement
from roq.workqueue.lease_keeper import HeldTask, LeaseKeeper, Settle, Settlements, Target

Places = list[int]  # in what was given


def shard_of(target: Target) -> int:
    """Of a task, or a token."""
    return unmarked(target if isinstance(target, str) else target.token)[0]


def by_shard(wanted: Settlements) -> dict[int, Places]:
    """Which are of which shard."""
    parts: dict[int, Places] = {}
    for place, (target, _) in enumerate(wanted):
        parts.setdefault(shard_of(target), []).append(place)
    return parts


class LeaseKeepers(LeaseKeeper):
    """A LeaseKeeper, itself that of shard 0; others are made when a task of theirs comes."""

    def __init__(self, settle: Settle) -> None:
        super().__init__(settle)
        self._others: dict[int, LeaseKeeper] = {}
        self._making = threading.Lock()
        self._ended = False

    def _other(self, shard: int) -> LeaseKeeper:
        with self._making:
            if shard not in self._others:
                if self._ended:
                    raise Closed("this work queue is closed")
                self._others[shard] = LeaseKeeper(self._settle)
            return self._others[shard]

    def hold(self, tasks: Iterable[HeldTask]) -> None:
        """See LeaseKeeper."""
        parts: dict[int, list[HeldTask]] = {}
        for task in tasks:
            parts.setdefault(shard_of(task), []).append(task)
        for shard, some in parts.items():
            if shard:
                self._other(shard).hold(some)
            else:
                super().hold(some)

    def keep(self, task: HeldTask) -> None:
        """See LeaseKeeper."""
        if shard := shard_of(task):
            self._other(shard).keep(task)
        else:
            super().keep(task)

    def let_go(self, task: HeldTask) -> None:
        """See LeaseKeeper."""
        if not (shard := shard_of(task)):
            super().let_go(task)
        elif (other := self._others.get(shard)) is not None:
            other.let_go(task)

    def begin(self, wanted: Settlements) -> list[Settlement]:
        """See LeaseKeeper."""
        begun = [one for _, one in wanted]
        for shard, places in by_shard(wanted).items():
            some, other = [wanted[place] for place in places], self._others.get(shard)
            given = super().begin(some) if other is None else other.begin(some)
            for place, settlement in zip(places, given, strict=True):
                begun[place] = settlement
        return begun

    def finish(
        self, wanted: Settlements, settlements: Sequence[Settlement], tokens: Sequence[str | None], asked: float
    ) -> list[str | None]:
        """See LeaseKeeper."""
        for shard, places in by_shard(wanted).items():
            some, other = [wanted[place] for place in places], self._others.get(shard)
            finish = super().finish if other is None else other.finish
            finish(some, [settlements[place] for place in places], [tokens[place] for place in places], asked)
        return list(tokens)

    def abandon(self, wanted: Settlements) -> None:
        """See LeaseKeeper."""
        for shard, places in by_shard(wanted).items():
            some, other = [wanted[place] for place in places], self._others.get(shard)
            if other is None:
                super().abandon(some)
            else:
                other.abandon(some)

    def settle(self, wanted: Settlements, call: Settle | None = None) -> list[str | None]:
        """See LeaseKeeper. At each shard by itself, side by side: what some have done is taken in, whatever others do. Raises
        what the first of those raised that did not."""
        parts = by_shard(wanted)
        if len(parts) < 2:
            return super().settle(wanted, call)
        tokens: list[str | None] = [None] * len(wanted)
        with ThreadPoolExecutor(len(parts), thread_name_prefix="roq-settle") as pool:
            one_shard = super().settle
            calls = [(places, pool.submit(one_shard, [wanted[place] for place in places], call)) for places in parts.values()]
        for places, done in calls:
            for place, token in zip(places, done.result(), strict=True):
                tokens[place] = token
        return tokens

    def close(self) -> list[HeldTask]:
        """See LeaseKeeper."""
        with self._making:
            self._ended = True
            others = list(self._others.values())
        held = super().close()
        for other in others:
            held += other.close()
        return held

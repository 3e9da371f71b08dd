"""What only a leader may order: its epoch is remembered for ever, and an order that came late is refused.

Late are orders of a former leader, and orders to forget that are of an older table than others: meanwhile the follower may
have fetched what they would take away again. An order that becomes late while it is obeyed ends. Not covered: fetching
(fetching.py), the leader's epoch (storage.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from roq.errors import StaleEpoch, TemporaryError
from roq.shuffle.node.questions import Questions
from roq.shuffle.node.storage import RangeStorage
from roq.shuffle.node.stored import RunKey, StoredShuffle
from roq.shuffle.node.turns import Turn
from roq.shuffle.winners import Winners
from roq.wire.shuffle import Interval

TABLES_MAX = 10_000  # shuffles whose table is remembered; who is forgotten is not being moved


class Orders:
    """On the follower's loop."""

    def __init__(self, storage: RangeStorage, questions: Questions) -> None:
        self._storage, self._questions = storage, questions
        self._tables: OrderedDict[str, int] = OrderedDict()

    def note(self, shuffle: str, table_epoch: int) -> None:
        """An order of this table came."""
        self._tables[shuffle] = max(table_epoch, self._tables.get(shuffle, 0))
        self._tables.move_to_end(shuffle)
        while len(self._tables) > TABLES_MAX:
            self._tables.popitem(last=False)

    async def keep(
        self, epoch: int, shuffle: str, table_epoch: int, intervals: Sequence[Interval], winners: Winners | None
    ) -> None:
        """Forget blocks outside of the intervals, and what isn't the winners' (None: all attempts may win). What comes
        meanwhile stays. Raises StaleEpoch, TemporaryError when this order has become an old one; and as Questions.row."""
        self._check(epoch, shuffle, table_epoch)
        self.note(shuffle, table_epoch)
        stored = self._storage.shuffles.get(shuffle)
        if stored is None:
            return
        turn = Turn()
        for key in list(stored.runs):
            await self._keep_run(stored, key, intervals, winners, lambda: self._check(epoch, shuffle, table_epoch))
            await turn.pause()
        await self._storage.give_back(stored)

    def _check(self, epoch: int, shuffle: str, table_epoch: int) -> None:
        if epoch < self._storage.epoch:
            raise StaleEpoch(f"epoch {epoch} is over: {self._storage.epoch} leads")
        if table_epoch < self._tables.get(shuffle, 0):
            raise TemporaryError(f"table {table_epoch} of shuffle {shuffle} is not the last one: {self._tables[shuffle]} is")

    async def _keep_run(
        self,
        stored: StoredShuffle,
        key: RunKey,
        intervals: Iterable[Interval],
        winners: Winners | None,
        check: Callable[[], None],
    ) -> None:
        run = stored.runs.get(key)
        if run is None:
            return
        before = list(run.entries)
        wanted: set[int] = set()
        if winners is None or winners.by.get(key[0]) == key[1]:
            for interval in intervals:
                first, end = await self._questions.rows(stored, key, run, interval)
                wanted.update(entry.first for entry in run.between(first, end))
        check()  # nothing is awaited from here on
        for entry in before:
            if entry.first not in wanted:
                stored.remove(key, entry)

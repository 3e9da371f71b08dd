"""A process's copy of a work queue's state, folded from a log on a server (folded_log.py).

Time is the log's: whatever writers say, the records of an entry have the time that the log gave it, so that hosts whose clocks
differ agree on when a lease ends. What is appended may come into the log twice, or late; the effects of a request are those of
its first coming. Snapshots are taken when much was folded since the last one, by whoever notices first.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from threading import RLock

from roq.errors import AppendUnknown, RoqError, TemporaryError
from roq.log.contract import LogEntry, SharedLog
from roq.workqueue.fold import Effects
from roq.workqueue.folded_log import OUTCOME_UNKNOWN, FoldedLog
from roq.workqueue.records import Record, Requeue, Tick, decode
from roq.workqueue.state import State

REPLAY_BYTES = 4 * 1024 * 1024  # of log behind a snapshot before the next is taken: who opens the queue reads that much
ENTRY_BYTES = 256  # an entry costs as much as so many bytes
SNAPSHOT_SHARE = 2  # a snapshot is taken when the log behind it is this many times as long, at least REPLAY_BYTES
SPREAD = 0.3  # so that not all instances take it
SKIP_ENTRIES = 10_000  # fewer are folded even where there is a snapshot
RETRY_SECONDS = 10.0  # after a snapshot that failed

logger = logging.getLogger(__name__)


class SharedReplica(FoldedLog[LogEntry]):
    """wanted: by the nonce of the Pop that ends it, what each request did whose effects somebody waits for; None: it was not
    seen yet."""

    def __init__(self, log: SharedLog, instance: int, lock: RLock, replay_bytes: int) -> None:
        super().__init__(log, instance, lock)
        self.wanted: dict[int, list[Effects] | None] = {}
        self._log, self._replay_bytes = log, replay_bytes
        self._behind = 0  # bytes folded since the newest snapshot
        self._behind_max = replay_bytes
        self._newest = 0  # position of the newest snapshot we know
        self._loaded = False

    def now(self) -> int:
        """ms: the log's clock shows this, or more."""
        return max(self._log.now(), self.state.fold.clock)

    # --- folding ------------------------------------------------------------------------------------------------------

    def _read(self) -> Sequence[tuple[int, LogEntry]]:
        return [(entry.position, entry) for entry in self._log.read(self.position)]

    def _decoded(self, entry: LogEntry) -> list[Record]:
        records = decode(entry.data)
        fold = self.state.fold
        fold.advance(entry.time)
        self._behind += len(entry.data) + ENTRY_BYTES
        # Who writes that a lease is over may be ahead of the log's clock; then it isn't, for anybody.
        return [Tick(0) if type(record) is Requeue and record.due > fold.clock else record for record in records]

    def _seeks(self, nonce: int) -> bool:
        return self.wanted.get(nonce, ()) is None

    def _found(self, nonce: int, effects: list[Effects]) -> None:
        if nonce in self.wanted:  # a signal handler may have ended the wait
            self.wanted[nonce] = effects

    def fold_to(self, position: int) -> None:
        """Fold up to a position that the log has. Raises AppendUnknown: it says that it ends before."""
        if not self.consistent:
            self.state, self.position, self.consistent, self._loaded = State(), 0, True, False
        if not self._loaded:
            self.load()
            self._loaded = True
        while (before := self.position) < position:
            self._fold(0, 0)
            if self.position == before:
                raise AppendUnknown(  # a server that was elected just now may come to it
                    f"{self._log.name} ends at position {before}, before {position}, which was confirmed: its server lost the "
                    "end of it, so what was done last may not be there. Look before you repeat it"
                )
        self._look_at_length()

    def catch_up(self) -> None:
        """Fold what was written until now, or load a snapshot that spares the most of it."""
        end = self._log.end()
        if self._loaded and end - self.position > SKIP_ENTRIES and not self.wanted:
            position, _ = self._log.newest_snapshot()
            if position - self.position > SKIP_ENTRIES:
                self.load()
        self.fold_to(end)

    def effects(self, nonce: int, position: int) -> list[Effects]:
        """What the wanted request did that ends with this Pop and is in the log up to `position`. Raises TemporaryError."""
        self.fold_to(position)
        found = self.wanted[nonce]
        if found is None:
            raise TemporaryError(
                f"{OUTCOME_UNKNOWN}: the log was trimmed past its entry before this process read it, or the server lost it"
            )
        return found

    # --- what is over -------------------------------------------------------------------------------------------------

    def over(self) -> list[Record]:
        """Records that end what is over by now, as far as this copy knows."""
        expired = self._expired(self.now())
        return [] if expired is None else [*(Requeue(0, one.delivery, one.instance, one.due) for one in expired), Tick(0)]

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _plan(self, position: int, size: int) -> None:
        self._newest = max(self._newest, position)
        share = max(self._replay_bytes, SNAPSHOT_SHARE * size)
        self._behind, self._behind_max = 0, round(share * random.uniform(1, 1 + SPREAD))

    def _look_at_length(self) -> None:
        """Begin a snapshot if much was folded since the last one."""
        if self._behind >= self._behind_max:
            self._begin_chore(self._snapshot, RETRY_SECONDS)

    def make_room(self) -> bool:
        """The log is full: have a snapshot take the place of all its entries; whether there were any. Without the lock."""
        try:
            with self._lock:
                self.catch_up()
                position = self.position
            return self._log.newest_snapshot()[0] < position and self._keep_now()
        except (RoqError, OSError) as error:
            logger.warning("%s is full, and takes no snapshot: %s", self._log.name, error)
            return False

    def _snapshot(self) -> None:
        """Thread: write a snapshot, unless another process has just done so."""
        try:
            newest, size = self._log.newest_snapshot()
            with self._lock:
                if newest > self._newest:  # of another, so what is behind it is unknown: at most what we folded since ours
                    self._plan(newest, size)
                    return
            self._keep_now()
        except (RoqError, OSError) as error:
            logger.warning("%s: no snapshot was taken, will be tried again: %s", self._log.name, error)

    def _keep_now(self) -> bool:
        """Write a snapshot; whether it could be."""
        with self._lock:
            if not self.consistent:
                return False
            position, data = self.position, self.state.dump()
        self._keep(position, data)
        return True

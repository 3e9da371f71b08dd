"""A process's copy of a work queue's state, folded from the folder's log, and writing to that log.

Positions of the log and of the state differ: the log counts bytes, the state counts records. Whoever calls holds the queue's
lock, so between writing an entry and folding it no other thread folds it away. A copy that fell behind the log's trim loads the
snapshot; what its Pops were given is found there. Snapshots are taken when the log has grown long, by whoever notices first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import RLock, Thread

from roq.errors import LogTrimmed, RoqError, TemporaryError
from roq.log.local import LocalLog
from roq.workqueue.effects import Delivered, Effect, Handed
from roq.workqueue.fold import APPLIED
from roq.workqueue.records import Record, decode, encode
from roq.workqueue.state import State

REPLAY_BYTES = 32 * 1024 * 1024  # of log behind a snapshot before the next is taken: about a second of replay
SNAPSHOT_SHARE = 2  # a snapshot is taken when the log behind it is this many times as long, at least REPLAY_BYTES
RETRY_SECONDS = 10.0  # after a snapshot that failed

Effects = Sequence[Effect]
logger = logging.getLogger(__name__)


class Replica:
    """State and position. instance: ours, whose deliveries are kept in `answers` by nonce, for the nonces in `asked`."""

    def __init__(self, log: LocalLog, instance: int, lock: RLock, replay_bytes: int) -> None:
        self.log, self._instance, self._lock = log, instance, lock
        self.state = State()
        self.position = 0
        self.asked: set[int] = set()
        self.answers: dict[int, Delivered] = {}
        self._replay_bytes = replay_bytes
        self._snapshot_due = replay_bytes  # position at which the next snapshot is taken
        self._snapshot_after = 0.0  # monotonic
        self.chore: Thread | None = None  # writes a snapshot
        self._epoch = time.time() - time.monotonic()  # a stepped clock ends no lease

    def now(self) -> int:
        """ms, never behind the log's time as far as it is known here: so all processes agree on when a lease ends."""
        now = int((self._epoch + time.monotonic()) * 1000)
        ahead = self.state.clock - now
        if ahead > 0:
            self._epoch += ahead / 1000
            return self.state.clock
        return now

    # --- folding ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Fold what was written until now."""
        while self.position < self.log.end:
            self._fold(None)
        if self.position >= self._snapshot_due:
            self._begin_snapshot()

    def write(self, records: Sequence[Record], keep_bytes: int = 0) -> list[Effects]:
        """Append records as one entry and fold up to it; what each of them did. Not durable yet."""
        entry = encode(records)
        before = self.position
        end = self.log.append([entry], keep_bytes=keep_bytes)
        if before == self.log.start_of(end, entry):  # nobody wrote in between
            self.position = end
            return [self._apply(record) for record in records]
        effects: list[Effects] | None = None
        while self.position < end:
            effects = self._fold(end) or effects
        if effects is None:
            raise TemporaryError("this process was away for so long that what this call did can't be told any more")
        if self.position >= self._snapshot_due:
            self._begin_snapshot()
        return effects

    def _fold(self, wanted: int | None) -> list[Effects] | None:
        """Fold some entries; the effects of the entry at position `wanted`, if it is among them."""
        found: list[Effects] | None = None
        try:
            entries = self.log.read(self.position)
        except LogTrimmed:
            self.load()
            return None
        apply, instance = self.state.apply, self._instance
        for position, entry in entries:
            if position == wanted:
                found = [self._apply(record) for record in decode(entry)]
            else:
                for record in decode(entry):
                    effects = apply(record)
                    if effects and effects is not APPLIED:
                        for effect in effects:
                            if type(effect) is Delivered and effect.instance == instance:
                                self._answer(effect)
            self.position = position
        return found

    def _apply(self, record: Record) -> Effects:
        effects = self.state.apply(record)
        for effect in effects:
            if type(effect) is Delivered and effect.instance == self._instance:
                self._answer(effect)
        return effects

    def _answer(self, delivered: Delivered) -> None:
        if delivered.nonce in self.asked:
            self.answers[delivered.nonce] = delivered

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Start from the newest snapshot."""
        found = self.log.load_snapshot()
        if found is None or found[0] <= self.position:
            self._snapshot_due = self.position + self._replay_bytes
            return
        self.position, data = found
        self.state = State.load(data)
        self._plan(self.position, len(data))
        me = self.state.instances.known.get(self._instance)
        for nonce in self.asked - self.answers.keys():
            if me is not None and nonce <= me.highest and (self._instance, nonce) not in self.state.waiters:
                mine = [task for task in self.state.leased.values() if (task.instance, task.nonce) == (self._instance, nonce)]
                handed = tuple(Handed(task.delivery, task.attempts, task.due, task) for task in mine)
                self.answers[nonce] = Delivered(self._instance, nonce, handed)

    def _plan(self, position: int, size: int) -> None:
        """When the next snapshot is due after one of this position and size."""
        self._snapshot_due = position + max(self._replay_bytes, SNAPSHOT_SHARE * size)

    def _begin_snapshot(self) -> None:
        if time.monotonic() >= self._snapshot_after:
            self._snapshot_after = time.monotonic() + RETRY_SECONDS
            self.chore = Thread(target=self._snapshot, name="roq-queue-snapshot", daemon=True)
            self.chore.start()

    def _snapshot(self) -> None:
        """Thread: write a snapshot, unless another process does or has just done so."""
        try:
            with self.log.upkeep() as mine:
                if not mine:
                    return
                with self._lock:
                    self._plan(*self.log.newest_snapshot())
                    if self._snapshot_due > self.position:
                        return
                    position, data = self.position, self.state.dump()
                    self._plan(position, len(data))
                self.log.snapshot(position, data)
        except (RoqError, OSError) as error:
            logger.warning("%s: no snapshot was taken, will be tried again: %s", self.log.folder, error)

"""A process's copy of a work queue's state, folded from the folder's log, and writing to that log.

Positions of the log and of the state differ: the log counts bytes, the state counts records. Whoever calls holds the queue's
lock, so between writing an entry and folding it no other thread folds it away. A copy that fell behind the log's trim loads the
snapshot; what its Pops were given is found there. Snapshots are taken when the log has grown long, by whoever notices first.

A signal handler that raises can break off a change of the state at any record. `whole` is False while there is one; who finds
it False throws the copy away and folds anew, and nobody makes a snapshot of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from threading import RLock, Thread

from roq.errors import LogTrimmed, RoqError, TemporaryError, UnknownFormat
from roq.log.local import LocalLog
from roq.workqueue.fold import APPLIED, Effects, TasksDelivered
from roq.workqueue.records import Pop, Record, Requeue, decode, encode
from roq.workqueue.state import State

REPLAY_BYTES = 32 * 1024 * 1024  # of log behind a snapshot before the next is taken: about a second of replay
SNAPSHOT_SHARE = 2  # a snapshot is taken when the log behind it is this many times as long, at least REPLAY_BYTES
SKIP_BYTES = 1024 * 1024  # of log; less is folded even where there is a snapshot
RETRY_SECONDS = 10.0  # after a snapshot that failed
TIGHT_SECONDS = 1.0  # the same on a full disk, where acknowledgements may soon make it small enough
RELIEF_SHARE = 10  # of the time, at most this part goes into looking for room
UPKEEP_SECONDS = 5.0  # to wait for a snapshot that another thread or process is writing

logger = logging.getLogger(__name__)


class Replica:
    """State and position. instance: ours, whose deliveries are kept in `answers` by nonce, for the nonces in `asked`.

    posted: nonce of a Pop of ours that another process may write, 0: none; outcome: the last nonce that was posted and found,
    maybe of an older request, and what the entry that ends with it did.
    """

    def __init__(self, log: LocalLog, instance: int, lock: RLock, replay_bytes: int) -> None:
        self.log, self._instance, self._lock = log, instance, lock
        self.state = State()
        self.position = 0
        self.asked: set[int] = set()
        self.answers: dict[int, TasksDelivered] = {}
        self.posted = 0
        self.outcome: tuple[int, list[Effects]] | None = None
        self.whole = True
        self._replay_bytes = replay_bytes
        self._snapshot_due = replay_bytes  # position at which the next snapshot is taken
        self._snapshot_after = 0.0  # monotonic
        self._relief_after = 0.0  # monotonic
        self.chore: Thread | None = None  # writes a snapshot

    def now(self) -> int:
        """ms of the log's clock: so all processes agree on when a lease ends, whatever their wall clocks say."""
        return self.log.now(self.state.fold.clock)

    # --- folding ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Fold what was written until now, or load a snapshot that spares the most of it."""
        if not self.whole:
            self.mend()
        if self.log.end - self.position > SKIP_BYTES and not self.posted:
            position, size = self.log.newest_snapshot()
            if position - self.position > max(SKIP_BYTES, SNAPSHOT_SHARE * size):
                self.load()
        while self.position < self.log.end:
            self._fold(0, 0)
        self._look_at_length()

    def write(self, records: Sequence[Record], keep_bytes: int = 0) -> list[Effects]:
        """Append records as one entry and fold up to it; what each of them did. Not durable yet."""
        return self.write_entries([(encode(records), records)], keep_bytes)[0]

    def write_entries(self, entries: Sequence[tuple[bytes, Sequence[Record]]], keep_bytes: int = 0) -> list[list[Effects]]:
        """The same for several entries in a row, encoded already."""
        if not self.whole:
            self.mend()
        texts = [text for text, _ in entries]
        before = self.position
        end = self.log.append(texts, keep_bytes=keep_bytes)
        start = self.log.start_of(end, texts)
        if before == start:  # nobody wrote in between
            self.whole = False
            self.position = end
            effects = [[self._apply(record) for record in records] for _, records in entries]
            self.whole = True
        else:
            effects = []
            while self.position < end:
                effects += self._fold(start, end)
            if len(effects) != len(entries):
                raise TemporaryError("this process was away for so long that what this call did can't be told any more")
        self._look_at_length()
        return effects

    def mend(self) -> None:
        """Fold anew: a call that broke off left the state half changed."""
        self.state, self.position, self.whole = State(), 0, True
        self.load()
        while self.position < self.log.end:
            self._fold(0, 0)

    def expired(self, now: int, count: int) -> list[Requeue]:
        """See Fold.expired: it takes leases out of line and puts them back."""
        self.whole = False
        found = self.state.fold.expired(now, count)
        self.whole = True
        return found

    def _fold(self, start: int, end: int) -> list[list[Effects]]:
        """Fold some entries; the effects of those between two positions."""
        found: list[list[Effects]] = []
        try:
            entries = self.log.read(self.position)
        except LogTrimmed:
            self.load()
            return found
        apply, instance = self.state.apply, self._instance
        self.whole = False
        for position, entry in entries:
            try:
                records = decode(entry)
            except UnknownFormat:
                self.whole = True  # up to here
                raise
            if start < position <= end:
                found.append([self._apply(record) for record in records])
            elif self.posted and (nonce := self._posted(records)):
                self.outcome = nonce, [self._apply(record) for record in records]
            else:
                for record in records:
                    effects = apply(record)
                    if effects and effects is not APPLIED:
                        for effect in effects:
                            if type(effect) is TasksDelivered and effect.instance == instance:
                                self._answer(effect)
            self.position = position
        self.whole = True
        return found

    def _posted(self, records: Sequence[Record]) -> int:
        """The nonce of these if they are what we posted, else 0. `posted` may be another one by the next line."""
        last = records[-1] if records else None
        return last.nonce if type(last) is Pop and last.nonce == self.posted and last.instance == self._instance else 0

    def _apply(self, record: Record) -> Effects:
        effects = self.state.apply(record)
        for effect in effects:
            if type(effect) is TasksDelivered and effect.instance == self._instance:
                self._answer(effect)
        return effects

    def _answer(self, delivered: TasksDelivered) -> None:
        if delivered.nonce in self.asked:
            self.answers[delivered.nonce] = delivered

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Start from the newest snapshot."""
        found = self.log.load_snapshot()
        if found is None or found[0] <= self.position:
            self._snapshot_due = self.position + self._replay_bytes
            return
        position, data = found
        state = State.load(data)
        self.whole = False
        self.position, self.state = position, state
        self._plan(self.position, len(data))
        me = state.fold.instances.known.get(self._instance)
        for nonce in self.asked - self.answers.keys():
            if me is not None and me.knows(nonce) and (self._instance, nonce) not in state.waiters:
                self.answers[nonce] = state.fold.held_by(self._instance, nonce)
        self.whole = True

    def _plan(self, position: int, size: int) -> None:
        """When the next snapshot is due after one of this position and size."""
        self._snapshot_due = position + max(self._replay_bytes, SNAPSHOT_SHARE * size)

    def _look_at_length(self) -> None:
        """Begin a snapshot if the log has grown long, or its disk is full."""
        if ((tight := self.log.is_tight) or self.position >= self._snapshot_due) and time.monotonic() >= self._snapshot_after:
            if self.chore is not None and self.chore.is_alive():
                return
            self._snapshot_after = time.monotonic() + (TIGHT_SECONDS if tight else RETRY_SECONDS)
            self.chore = Thread(target=self._relieve if tight else self._snapshot, name="roq-queue-snapshot", daemon=True)
            self.chore.start()

    def hand_over(self) -> None:
        """Leave a snapshot to who will write in our place, if folding would take longer than loading it."""
        try:
            with self.log.upkeep() as mine, self._lock:
                before = self.log.newest_snapshot()[0]
                if mine and self.whole and self.position - before > SKIP_BYTES:
                    data = self.state.dump()
                    if self.position - before > SNAPSHOT_SHARE * len(data):
                        self.log.snapshot(self.position, data)
        except (RoqError, OSError) as error:
            logger.warning("%s: left no snapshot: %s", self.log.folder, error)

    def _snapshot(self) -> None:
        """Thread: write a snapshot, unless another process does or has just done so."""
        try:
            with self.log.upkeep() as mine:
                if not mine:
                    return
                with self._lock:
                    self._plan(*self.log.newest_snapshot())
                    if self._snapshot_due > self.position or not self.whole:
                        return
                    position, data = self.position, self.state.dump()
                self.log.snapshot(position, data)
                with self._lock:
                    self._plan(position, len(data))
        except (RoqError, OSError) as error:
            logger.warning("%s: no snapshot was taken, will be tried again: %s", self.log.folder, error)

    # --- a full disk --------------------------------------------------------------------------------------------------

    def _relieve(self) -> None:
        """Thread."""
        try:
            self.relieve(0, wait_seconds=0)
        except (RoqError, OSError) as error:
            logger.warning("%s: no room was made on the full disk, will be tried again: %s", self.log.folder, error)

    def relieve(self, put: int, *, wait_seconds: float = UPKEEP_SECONDS) -> bool:
        """Make room on a full disk by a snapshot, which frees what is done; whether a put of so many bytes finds room now.

        Waits for another that is at it. Not while holding the queue's lock."""
        with self.log.upkeep(wait_seconds) as mine:
            if not mine:
                return False
            if self.log.find_room(put):
                return True
            began = time.monotonic()
            if began < self._relief_after:
                return False
            try:
                return self._make_room(put)
            finally:
                ended = time.monotonic()
                self._relief_after = ended + max((ended - began) * RELIEF_SHARE, TIGHT_SECONDS)

    def _make_room(self, put: int) -> bool:
        with self._lock:
            if not self.whole or self.position == 0:
                self.mend()
            self.catch_up()
            if not self.log.is_worth(sum(self.state.fold.inline_bytes()), put):
                return False  # too much of it waits to be done
            data = self.state.dump()
            if not self.log.is_worth(len(data), put):
                return False
            self.log.make_way()
            self.catch_up()
            position, data = self.position, self.state.dump()
        self.log.snapshot(position, data)
        with self._lock:
            self._plan(position, len(data))
        return self.log.find_room(put)

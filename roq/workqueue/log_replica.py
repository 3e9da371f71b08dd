"""A process's copy of a work queue's state, folded from a folder's log (folded_log.py), and writing to that log.

The log counts bytes. Whoever calls holds the queue's lock, so between writing an entry and folding it no other thread folds it
away. Snapshots are taken when the log has grown long, by whoever notices first.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from threading import RLock

import msgspec

from roq.errors import RoqError, TemporaryError
from roq.log.local import LocalLog
from roq.log.local.locks import Lives
from roq.log.local.publication import UNKNOWN
from roq.wire.decoding import UNDECODABLE
from roq.workqueue.fold import Effects
from roq.workqueue.folded_log import NOTHING, OUTCOME_UNKNOWN, CommandAnswer, FoldedLog, answer_of
from roq.workqueue.records import Cancel, InstanceDead, Pop, Record, Requeue, Tick, decode, encode
from roq.workqueue.state import State

REPLAY_BYTES = 32 * 1024 * 1024  # of log behind a snapshot before the next is taken: about a second of replay
SNAPSHOT_SHARE = 2  # a snapshot is taken when the log behind it is this many times as long, at least REPLAY_BYTES
SKIP_BYTES = 1024 * 1024  # of log; less is folded even where there is a snapshot
RETRY_SECONDS = 10.0  # after a snapshot that failed
TIGHT_SECONDS = 1.0  # the same on a full disk, where acknowledgements may soon make it small enough
RELIEF_SHARE = 10  # of the time, at most this part goes into looking for room
UPKEEP_SECONDS = 5.0  # to wait for a snapshot that another thread or process is writing

FOLD_SECONDS_PER_BYTE = 40e-9  # of log, about
PATIENCE_SECONDS = (50e-6, 100e-3)  # at least, at most
LIVES_SECONDS = 0.5  # between two looks for instances that died
INSTANCES_FEW = 16  # with this many, each looks half as often
Request = tuple[bytes, Sequence[Record]]  # as it is written, and what is in it: settlements and, last, a Pop

logger = logging.getLogger(__name__)


encode_answer = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(CommandAnswer).decode


def decode_answer(text: bytes) -> CommandAnswer | None:
    """None: see for yourself. So says the combiner, or one of a newer program that answers in another way."""
    try:
        return None if text == UNKNOWN else _decode_answer(text)
    except UNDECODABLE:
        return None


class Replica(FoldedLog[bytes]):
    """A FoldedLog that writes.

    sought: nonce of a Pop of ours that another process may write, 0: none; outcome: the last nonce that was sought and found,
    maybe of an older request, and what the entry that ends with it did.
    """

    def __init__(self, log: LocalLog, instance: int, lock: RLock, replay_bytes: int) -> None:
        super().__init__(log, instance, lock)
        self.log = log
        self.sought = 0
        self.outcome: tuple[int, list[Effects]] | None = None
        self._replay_bytes = replay_bytes
        self._snapshot_due = replay_bytes  # position at which the next snapshot is taken
        self._relief_after = 0.0  # monotonic
        self._loaded = self._living = False
        self._lives = Lives(log.folder / "instances")
        self.lives_at = 0.0  # monotonic; when to look for the dead again

    def now(self) -> int:
        """ms of the log's clock: so all processes agree on when a lease ends, whatever their wall clocks say."""
        return self.log.now(self.state.fold.clock)

    def ready(self) -> Replica:
        """This copy, read from the folder at first use, and folded anew if a change of it was broken off."""
        if not self._loaded:
            self.load()
            self.catch_up()
            self._loaded = True
        if not self.consistent:
            self.repair()
        return self

    def patience(self) -> float:
        """Seconds for which a round is left to another: as long as catching up would take. Any thread."""
        least, most = PATIENCE_SECONDS
        return min(max((self.log.end - self.position) * FOLD_SECONDS_PER_BYTE, least), most)

    # --- folding ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Fold what was written until now, or load a snapshot that spares the most of it."""
        if not self.consistent:
            self.repair()
        if self.log.end - self.position > SKIP_BYTES and not self.sought:
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
        if not self.consistent:
            self.repair()
        texts = [text for text, _ in entries]
        before = self.position
        end = self.log.append(texts, keep_bytes=keep_bytes)
        start = self.log.start_of(end, texts)
        if before == start:  # nobody wrote in between
            self.consistent = False
            self.position = end
            effects = [[self._apply(record) for record in records] for _, records in entries]
            self.consistent = True
        else:
            effects = []
            while self.position < end:
                effects += self._fold(start, end)
            if len(effects) != len(entries):
                raise TemporaryError(f"{OUTCOME_UNKNOWN}: the log was trimmed past its entry before this process read it")
        self._look_at_length()
        return effects

    def write_requests(self, requests: Sequence[Request]) -> list[CommandAnswer]:
        """Append these requests after what is over, and fold up to them."""
        now, due = self.now(), self.state.fold.next_due()
        if self.state.fold.ready.count < len(requests) or (due is not None and due <= now):
            self.catch_up()  # what seems over or missing here may have been settled or put by others since
        over = self.over(now)
        if self.state.fold.ready.count and not over:  # nearly always
            written = self.write_entries(requests)
            return [answer_of(one[1], effects) for one, effects in zip(requests, written, strict=True)]
        idle = [not over and _is_idle(records) for _, records in requests]  # what finds nothing need not be written
        entries = [one for one, nothing in zip(requests, idle, strict=True) if not nothing]
        if over:
            entries.insert(0, (encode(over), over))
        following = iter(self.write_entries(entries)[1 if over else 0 :] if entries else ())
        return [NOTHING if nothing else answer_of(one[1], next(following)) for one, nothing in zip(requests, idle, strict=True)]

    def repair(self) -> None:
        """Fold anew: a call that broke off left the state half changed."""
        self.state, self.position, self.consistent = State(), 0, True
        self.load()
        while self.position < self.log.end:
            self._fold(0, 0)

    def _read(self) -> Sequence[tuple[int, bytes]]:
        return self.log.read(self.position)

    _decoded = staticmethod(decode)

    def _seeks(self, nonce: int) -> bool:
        return nonce == self.sought  # which may be another one by the next line

    def _found(self, nonce: int, effects: list[Effects]) -> None:
        self.outcome = nonce, effects

    def find(self, records: Sequence[Record]) -> CommandAnswer | None:
        """The answer to a request that was sought, None: nobody wrote it until now. Raises TemporaryError (unknown)."""
        self.catch_up()
        pop = records[-1]
        assert type(pop) is Pop
        if self.outcome is not None and self.outcome[0] == pop.nonce:
            return answer_of(records, self.outcome[1])
        me = self.state.fold.instances.known.get(pop.instance)
        if len(records) > 1 and me is not None and me.knows(pop.nonce):
            raise TemporaryError(f"{OUTCOME_UNKNOWN}: a snapshot has taken the place of its entry in the log")
        return None

    def give_back(self, nonces: set[int]) -> None:
        """These Pops get nothing any more; what they were given meanwhile goes back."""
        if not nonces:
            return
        now, me = self.now(), self._instance
        try:
            self.write([Cancel(now, me, nonce) for nonce in sorted(nonces)])
            if given := self.given(nonces):
                self.write([Requeue(now, delivery, me) for delivery in given])
        except RoqError as error:
            logger.warning("%s: a lease() that ended early may still be given a task: %s", self.log.folder, error)

    # --- the dead and what is over --------------------------------------------------------------------------------------

    def over(self, now: int) -> list[Record]:
        """Records that end what is over at `now`, as far as this copy knows."""
        records: list[Record] = []
        if (expired := self._expired(now)) is not None:
            records += [*expired, Tick(now)]
        if time.monotonic() >= self.lives_at and (dead := self._find_dead()):
            self.write([InstanceDead(now, instance, "the process died") for instance in dead])
            for instance in dead:
                self._lives.forget(instance)
            records.append(Tick(now))
        return records

    def begin_life(self) -> None:
        """Tell others that we live, once; should this process die before, on a full disk, its leases end by time only."""
        if self._living:
            return
        with self._lock:
            try:
                self._lives.begin(self._instance)
                self._living = True
            except OSError as error:
                logger.warning(
                    "%s: this process is not registered as alive, its leases end by time only: %s", self.log.folder, error
                )

    def end_life(self) -> None:
        """We close in good order."""
        self._lives.end()

    def _find_dead(self) -> list[int]:
        alive, dead = self._lives.look()
        # The more instances look, the less often each has to.
        self.lives_at = time.monotonic() + LIVES_SECONDS * (1 + alive / INSTANCES_FEW) * random.uniform(0.8, 1.2)
        return dead

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _plan(self, position: int, size: int) -> None:
        """When the next snapshot is due after that one."""
        self._snapshot_due = position + max(self._replay_bytes, SNAPSHOT_SHARE * size)

    def _look_at_length(self) -> None:
        """Begin a snapshot if the log has grown long, or its disk is full."""
        if self.log.is_tight:
            self._begin_chore(self._relieve, TIGHT_SECONDS)
        elif self.position >= self._snapshot_due:
            self._begin_chore(self._snapshot, RETRY_SECONDS)

    def hand_over(self) -> None:
        """Leave a snapshot to who will write in our place, if folding would take longer than loading it."""
        try:
            with self.log.upkeep() as mine, self._lock:
                before = self.log.newest_snapshot()[0]
                if mine and self.consistent and self.position - before > SKIP_BYTES:
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
                    if self._snapshot_due > self.position or not self.consistent:
                        return
                    position, data = self.position, self.state.dump()
                self._keep(position, data)
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
            if not self.consistent or self.position == 0:
                self.repair()
            self.catch_up()
            if not self.log.is_worth(sum(self.state.fold.inline_bytes()), put):
                return False  # too much of it waits to be done
            data = self.state.dump()
            if not self.log.is_worth(len(data), put):
                return False
            self.log.make_way()
            self.catch_up()
            position, data = self.position, self.state.dump()
        self._keep(position, data)
        return self.log.find_room(put)


def _is_idle(records: Sequence[Record]) -> bool:
    """Whether these do nothing when no task is ready."""
    pop = records[-1]
    return len(records) == 1 and type(pop) is Pop and pop.wait_ms <= 0

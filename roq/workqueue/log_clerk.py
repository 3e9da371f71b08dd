"""How a request of a log: work queue gets into the log and its answer back: by ourselves, or by the process that is the clerk.

A request is what one call wants written: settlements and, last, a Pop, which tells it from all others. Whoever writes requests
folds the log up to them, and that costs as much as everybody else wrote. So processes that are busy at the same time leave it
to one of them, over the board (roq/log/local/board.py): the clerk of a round appends all requests, each as an entry of its own,
folds them, syncs once, and hands out the answers. The others fold nothing, until one of them becomes the clerk.

It changes nothing for the log, which can't tell who wrote an entry. Does a clerk die in a round, its requests are in the log
or not: their owners fold the log and look, and write them if they are not there. Who finds no place on the board does its own
work, and so does a second thread of one process. Not here: what the verbs mean, how a Pop waits in line (log_queue.py).

A signal handler that raises may break off any of this. No lock is left then (roq/log/local/locks.py), the copy mends itself
(log_replica.py), and a request left on the board is withdrawn, at the latest by the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from threading import RLock
from typing import cast

import msgspec

from roq.errors import Closed, RoqError, TemporaryError, UnknownFormat
from roq.log.local import LocalLog
from roq.log.local.board import REQUEST_MAX, UNKNOWN, Board, BoardRequest
from roq.wire.decoding import UNDECODABLE
from roq.workqueue.fold import Effects, Handed, RecordRefused, Settled, TasksDelivered
from roq.workqueue.log_lives import Lives
from roq.workqueue.log_replica import Replica
from roq.workqueue.records import InstanceDead, Pop, Record, Tick, decode, encode

LIVES_SECONDS = 0.5  # between two looks for instances that died
INSTANCES_FEW = 16  # with this many, each looks half as often
EXPIRED_AT_ONCE = 1000
FOLD_SECONDS_PER_BYTE = 40e-9  # of log, about; a round is left to another for as long as catching up would take
PATIENCE_SECONDS = (50e-6, 100e-3)  # at least, at most
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.001, 0.25  # between two looks at whether the clerk is still at it; twice as long each time
CLERK_SECONDS = 0.032  # from such a pause on its lock is tried: it may have died
GATHER_SECONDS = 200e-6  # at most, for those who were served in the last round
RHYTHM_SECONDS = 0.001  # after a round; later nobody is waited for
COMPANY_SECONDS = 1.0  # after a round for others, who may want to take over
BOARD_SECONDS = 10.0  # until who finds no place on the board tries again
CLOSED = "the work queue was closed"
logger = logging.getLogger(__name__)


class CommandAnswer(msgspec.Struct, array_like=True):
    """settled: of each settlement, whether it did anything. handed: to the Pop; None while it stands in line."""

    settled: list[bool]
    handed: tuple[Handed, ...] | None
    refused: bool = False


NOTHING = CommandAnswer([], ())
Asked = tuple[bytes, Sequence[Record]]  # a request as it is written, and what is in it
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CommandAnswer)


def _answer(records: Sequence[Record], effects: Sequence[Effects]) -> CommandAnswer:
    """What a request's records did to it."""
    pop = records[-1]
    assert type(pop) is Pop
    settled = [any(type(effect) is Settled and effect.applied for effect in one) for one in effects[:-1]]
    for effect in effects[-1]:
        if type(effect) is TasksDelivered and effect.nonce == pop.nonce and effect.instance == pop.instance:
            return CommandAnswer(settled, effect.handed)
        if type(effect) is RecordRefused:
            return CommandAnswer(settled, (), refused=True)
    return CommandAnswer(settled, None)


def _decode(text: bytes) -> CommandAnswer | None:
    """None: see for yourself. So says the clerk, or a newer program's that answers in another way."""
    try:
        return None if text == UNKNOWN else _decoder.decode(text)
    except UNDECODABLE:
        return None


class Clerk:
    """Writes the requests of `instance`, and those of others. Any thread. lock: the queue's, over the replica."""

    def __init__(self, log: LocalLog, instance: int, lock: RLock, replica: Replica) -> None:
        self._log, self._instance, self._lock, self._replica = log, instance, lock, replica
        self._lives = Lives(log.folder / "instances")
        self._living = False
        self.lives_at = 0.0  # monotonic; when to look for the dead again
        self._asking = threading.RLock()  # one thread at a time uses our place on the board; knows whose it is
        self._busy = False  # whether one does; also says so to a signal handler that asks within another request
        self._board: Board | None = None
        self._board_at = 0.0  # monotonic; when to try for a place again
        self._left = self._loaded = False  # whether a request of ours may be on the board
        self._served, self._company = 0, 0.0  # how many others our last round served; when one last did, monotonic
        self.closed = False

    # --- a request ----------------------------------------------------------------------------------------------------

    def ask(self, records: Sequence[Record]) -> CommandAnswer:
        """Have settlements and a Pop written; settlements are durable then."""
        if self.closed:
            raise Closed(CLOSED)
        if not self._living:
            self._begin_life()
        asked = encode(records), records
        try:
            if self._asking.acquire(blocking=False) and not self._busy:
                try:
                    self._busy = True
                    if self._board is not None or self._open_board():
                        return self._ask(cast(Board, self._board), asked)
                finally:
                    self._busy = False
        finally:
            try:  # noqa: SIM105 - nothing may come between a signal and this
                self._asking.release()
            except RuntimeError:  # another thread's
                pass
        return self._write_alone(asked)

    def _open_board(self) -> bool:
        """Whether there is a place for us. Asked for again now and then."""
        if time.monotonic() < self._board_at:
            return False
        self._board_at = time.monotonic() + BOARD_SECONDS
        try:
            self._board = self._log.open_board()
        except (RoqError, OSError) as error:  # a full disk
            logger.warning("%s: this process can't work together with others: %s", self._log.folder, error)
        return self._board is not None

    def _ask(self, board: Board, asked: Asked) -> CommandAnswer:
        if self._left:  # by a call that broke off
            board.withdraw()
            self._left = False
        if board.is_ours():
            self._gather(board)
        elif board.pause(self._patience()) > 0:
            return self._leave(board, asked)
        return self._round(board, asked) or self._leave(board, asked)

    def _gather(self, board: Board) -> None:
        """We have just been the clerk: let those we have served ask again, so that all get on at the same speed."""
        now = time.monotonic()
        if self._served and now - self._company < RHYTHM_SECONDS:
            while board.count() < self._served and time.monotonic() - now < GATHER_SECONDS:
                os.sched_yield()

    def _leave(self, board: Board, asked: Asked) -> CommandAnswer:
        """Leave our request to the clerk."""
        records = asked[1]
        if len(asked[0]) > REQUEST_MAX:
            return self._write_alone(asked)
        pop = records[-1]
        assert type(pop) is Pop
        try:
            self._replica.posted, self._left = pop.nonce, True
            board.post(asked[0])
            answer = self._wait(board, asked)
            self._left = False
            return answer
        except BaseException:  # a signal: nobody waits any more
            with contextlib.suppress(RoqError, OSError):
                board.withdraw()
                self._left = False
            raise
        finally:
            self._replica.posted = 0

    def _wait(self, board: Board, asked: Asked) -> CommandAnswer:
        """For the answer to what we posted, or for our turn to be the clerk."""
        pause = PAUSE_SECONDS
        while (text := board.answer()) is None:
            left = board.pause(self._patience())
            at_once = left <= 0 or pause >= CLERK_SECONDS
            if at_once and (answer := self._round(board, asked, posted=True)) is not None:
                return answer
            board.wait(min(left, pause) if left > 0 else pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        return _decode(text) or self._look_up(asked)

    def _patience(self) -> float:
        """Seconds to leave a round to another: as long as catching up would take."""
        least, most = PATIENCE_SECONDS
        return min(max((self._log.end - self._replica.position) * FOLD_SECONDS_PER_BYTE, least), most)

    def _look_up(self, asked: Asked) -> CommandAnswer:
        """The answer to a request that a clerk may have written; if none did, write it."""
        records = asked[1]
        pop = records[-1]
        assert type(pop) is Pop
        with self._lock:
            replica = self.replica()
            replica.catch_up()
            nonce, effects = replica.outcome or (0, [])
            outcome, position = effects if nonce == pop.nonce else None, replica.position
            me = replica.state.fold.instances.known.get(pop.instance)
            if outcome is None and len(records) > 1 and me is not None and me.knows(pop.nonce):
                raise TemporaryError("what became of this call is in a snapshot and can't be told any more")
        if outcome is None:
            return self._write_alone(asked)
        self._log.sync(position)
        return _answer(records, outcome)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write_alone(self, asked: Asked) -> CommandAnswer:
        with self._lock:
            [answer] = self._write([asked])
            position = self._replica.position
        if answer.settled:
            self._log.sync(position)
        return answer

    def _round(self, board: Board, asked: Asked, *, posted: bool = False) -> CommandAnswer | None:
        """One round as the clerk. None: another is, or has answered what we `posted`."""
        try:
            if not board.begin() or (posted and board.answer() is not None):
                return None
            return self._serve(board, asked)
        finally:
            try:
                board.end()
            except BaseException:  # a signal, before its first line
                board.end()
                raise

    def _serve(self, board: Board, asked: Asked) -> CommandAnswer:
        """Our own request and all that is on the board."""
        board.drop()  # before it is written: from now on nobody else may do it
        self._replica.posted = 0
        requests = board.take()
        self._served = len(requests)
        if not requests:
            return self._write_alone(asked)
        try:
            return self._serve_all(board, asked, requests)
        finally:
            self._company = time.monotonic()

    def _serve_all(self, board: Board, asked: Asked, taken: Sequence[BoardRequest]) -> CommandAnswer:
        requests, entries = list[BoardRequest](), [asked]
        for request in taken:  # one that can't be read is of a newer version: its owner is told to see for itself
            with contextlib.suppress(UnknownFormat):
                records = decode(request.text)
                if records and type(records[-1]) is Pop:
                    entries.append((request.text, records))
                    requests.append(request)
        with self._lock:
            answers = self._write(entries)
            position = self._replica.position
        late = list[tuple[BoardRequest, CommandAnswer]]()
        for request, answer in zip(requests, answers[1:], strict=True):
            if answer.settled:
                late.append((request, answer))
            else:
                board.reply(request, _encoder.encode(answer))
        if late or answers[0].settled:
            self._log.sync(position)
        for request, answer in late:
            board.reply(request, _encoder.encode(answer))
        return answers[0]

    def _write(self, requests: Sequence[Asked]) -> list[CommandAnswer]:
        """Append these requests after what is over, and fold up to them. Lock held."""
        replica = self.replica()
        now, due = replica.now(), replica.state.fold.next_due()
        if replica.state.fold.ready.count < len(requests) or (due is not None and due <= now):
            replica.catch_up()  # what seems over or missing here may have been settled or put by others since
        over = self.over(now)
        if replica.state.fold.ready.count and not over:  # nearly always
            written = replica.write_entries(requests)
            return [_answer(one[1], effects) for one, effects in zip(requests, written, strict=True)]
        idle = [not over and _is_idle(records) for _, records in requests]  # what finds nothing need not be written
        entries = [one for one, nothing in zip(requests, idle, strict=True) if not nothing]
        if over:
            entries.insert(0, (encode(over), over))
        following = iter(replica.write_entries(entries)[1 if over else 0 :] if entries else ())
        return [NOTHING if nothing else _answer(one[1], next(following)) for one, nothing in zip(requests, idle, strict=True)]

    # --- the dead and what is over --------------------------------------------------------------------------------------

    def replica(self) -> Replica:
        """The copy of the state, read from the folder at first use. Lock held."""
        if self.closed:
            raise Closed(CLOSED)
        if not self._loaded:
            self._replica.load()
            self._replica.catch_up()
            self._loaded = True
        if not self._replica.whole:
            self._replica.mend()
        return self._replica

    def over(self, now: int) -> list[Record]:
        """Records that end what is over at `now`, as far as this copy knows. Lock held."""
        records: list[Record] = []
        due = self._replica.state.fold.next_due()
        if due is not None and due <= now:
            records += self._replica.expired(now, EXPIRED_AT_ONCE)
            records.append(Tick(now))
        if time.monotonic() >= self.lives_at and (dead := self._find_dead()):
            self._replica.write([InstanceDead(now, instance, "the process died") for instance in dead])
            for instance in dead:
                self._lives.forget(instance)
            records.append(Tick(now))
        return records

    def _begin_life(self) -> None:
        with self._lock:
            try:
                self._lives.begin(self._instance)
                self._living = True
            except OSError as error:  # a full disk: should this process die now, its leases end by time only
                logger.warning("%s: can't tell others that this process lives: %s", self._log.folder, error)

    def _find_dead(self) -> list[int]:
        alive, dead = self._lives.look()
        # The more instances look, the less often each has to.
        self.lives_at = time.monotonic() + LIVES_SECONDS * (1 + alive / INSTANCES_FEW) * random.uniform(0.8, 1.2)
        return dead

    def close(self) -> None:
        """Write no more requests; returns when the one under way is answered."""
        self.closed = True
        with self._asking:
            board, self._board = self._board, None
            if board is not None and self._left:
                board.withdraw()
            if board is not None and self._company + COMPANY_SECONDS > time.monotonic():
                try:
                    if board.begin():
                        self._replica.hand_over()
                finally:
                    board.end()

    def end_life(self) -> None:
        """We close in good order."""
        self._lives.end()


def _is_idle(records: Sequence[Record]) -> bool:
    """Whether these do nothing when no task is ready."""
    pop = records[-1]
    return len(records) == 1 and type(pop) is Pop and pop.wait_ms <= 0

"""A board in shared memory on which processes of one folder ask one of them, the clerk of the moment, to do their work.

What many processes would each have to read of the log to answer their own request, the clerk reads once for all. Nobody is
appointed: who has a request and finds no clerk takes the clerk's lock, serves everybody's requests in one round, and goes its
way. Others leave it the next round for as long as it would cost them to catch up with it (`pause`).

    head      identity · CLERK, ENDED · per place: REQUEST, TAKEN, ANSWER (numbers that count requests)             (4 KiB)
    place     request: length u32 · crc32 u32 · bytes          (2 KiB), written by its owner, before REQUEST
              answer: the same                                (14 KiB), written by the clerk, before ANSWER

A place is open while ANSWER != REQUEST. All is hints, the log is the truth. Invariants:
    only the holder of the clerk's lock writes TAKEN, ANSWER and answers, or withdraws a request of its own;
    TAKEN = REQUEST before anything of that request is written to the log, so an open place with TAKEN != REQUEST was not;
    an open place with TAKEN = REQUEST that nobody serves belongs to a round that broke off: it may be in the log or not. The
    next clerk answers it UNKNOWN, and its owner looks for itself.
The crc covers the number, so a half-written or an older text is never taken for the one asked for. Not here: what requests
mean (roq/workqueue/log_clerk.py).
"""

from __future__ import annotations

import fcntl
import operator
import os
import struct
import time
from fcntl import LOCK_EX, LOCK_UN, flock
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from roq.errors import Closed
from roq.log.local import futex
from roq.log.local.locks import Locks, try_alone
from roq.log.local.mapped import Mapped

PLACES = 64  # processes that can ask at the same time; those without a place do their own work
HEAD_BYTES, PLACE_BYTES, REQUEST_BYTES = 4096, 16 * 1024, 2 * 1024
TEXT_HEAD = 8
REQUEST_MAX, ANSWER_MAX = REQUEST_BYTES - TEXT_HEAD, PLACE_BYTES - REQUEST_BYTES - TEXT_HEAD
UNKNOWN = b""  # the answer to a request of which the clerk can't say what became of it
BUSY_SECONDS = 3600.0  # a clerk is at work: no telling how long
LONG_ROUND_SECONDS = 0.03  # after such a one those who asked meanwhile are woken: by now they look seldom
NANO = 1_000_000_000
_CLERK, _ENDED = 8, 9  # place + 1 of who serves now, 0: nobody; CLOCK_MONOTONIC when a round ended last, with its place
_LAST = 10
_REQUEST, _TAKEN, _ANSWER = 64, 64 + PLACES, 64 + 2 * PLACES
_TEXT = struct.Struct("<II")
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class BoardRequest(NamedTuple):
    """A request on the board. number: of its place."""

    place: int
    number: int
    text: bytes


class Board:
    """Our place on the board, and the board as the clerk sees it. One thread at a time. Raises OSError, Closed."""

    def __init__(self, mapped: Mapped, cookie: int, locks: Locks, place: int) -> None:
        self._mapped, self._locks, self.place = mapped, locks, place
        self._mine: bool | None = False  # whether we have the clerk's lock; None: perhaps, a signal may have broken in
        words = self._words = self._mapped.words
        self._requests, self._answers = words[_REQUEST : _REQUEST + PLACES], words[_ANSWER : _ANSWER + PLACES]
        self._bells = [self._mapped.address(_ANSWER + one) for one in range(PLACES)]
        if not self._mapped.is_current(cookie):
            try:
                flock(locks.clerk, LOCK_EX)
                if not self._mapped.is_current(cookie):
                    self._mapped.bytes[:HEAD_BYTES] = bytes(HEAD_BYTES)
                    self._mapped.adopt(cookie)
            finally:
                flock(locks.clerk, LOCK_UN)
        self._began = 0  # CLOCK_MONOTONIC of our last round
        self._number = max(words[_REQUEST + place], words[_ANSWER + place])  # an owner before us may have left a request

    # --- asking -------------------------------------------------------------------------------------------------------

    def post(self, text: bytes) -> None:
        """Put a request on the board."""
        self._check_open()
        self._number += 1
        self._write(HEAD_BYTES + self.place * PLACE_BYTES, self._number, text)
        self._words[_REQUEST + self.place] = self._number

    def answer(self) -> bytes | None:
        """The answer to the last request; UNKNOWN: see for yourself; None: there is none yet."""
        if self._answers[self.place] != self._number:
            return None
        return self._read(HEAD_BYTES + self.place * PLACE_BYTES + REQUEST_BYTES, self._number, ANSWER_MAX)

    def wait(self, seconds: float) -> None:
        """Sleep until an answer may be there, or `seconds` are over."""
        before = self._answers[self.place]
        if before != self._number:
            futex.wait(self._bells[self.place], before & 0xFFFFFFFF, seconds)

    def is_ours(self) -> bool:
        """Whether the last round was ours, and nobody serves."""
        return self._words[_LAST] == self.place + 1 and not self._words[_CLERK]

    def pause(self, patience: float) -> float:
        """Seconds for which the next round is better left to another: `patience` from when a round of another one ended."""
        words = self._words
        if words[_CLERK]:
            return BUSY_SECONDS
        if words[_LAST] == self.place + 1:
            return 0.0
        return patience - (time.monotonic_ns() - words[_ENDED]) / NANO

    def _check_open(self) -> None:
        if not self._locks.is_open:  # its descriptors may be other files by now
            raise Closed("the log was closed")

    # --- serving ------------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Whether we are the clerk from now on. Answers first what a round that broke off has left. Whatever happens, `end`."""
        self._check_open()
        self._mine = None
        if not try_alone(self._locks.clerk):
            self._mine = False
            return False
        self._mine = True
        self._began = time.monotonic_ns()
        self._words[_CLERK] = self.place + 1
        self._give_up()
        return True

    def withdraw(self) -> None:
        """Our request is none any more. Waits until nobody is the clerk."""
        self._check_open()
        try:
            flock(self._locks.clerk, LOCK_EX)
            self.drop()
        finally:
            flock(self._locks.clerk, LOCK_UN)

    def take(self) -> list[BoardRequest]:
        """All open requests but our own, marked as taken. Those that can't be read are left."""
        if self._requests == self._answers:
            return []
        words, found = self._words, list[BoardRequest]()
        for place in range(PLACES):
            number = words[_REQUEST + place]
            if number != words[_ANSWER + place] and place != self.place:
                text = self._read(HEAD_BYTES + place * PLACE_BYTES, number, REQUEST_MAX)
                if text:
                    words[_TAKEN + place] = number
                    found.append(BoardRequest(place, number, text))
        return found

    def count(self) -> int:
        """How many requests are open."""
        return sum(map(operator.ne, self._requests, self._answers))

    def reply(self, request: BoardRequest, text: bytes) -> None:
        """Answer a request; UNKNOWN also stands for an answer that is too long."""
        self._write(
            HEAD_BYTES + request.place * PLACE_BYTES + REQUEST_BYTES,
            request.number,
            text if len(text) <= ANSWER_MAX else UNKNOWN,
        )
        self._words[_ANSWER + request.place] = request.number
        futex.wake(self._bells[request.place], 1)

    def drop(self) -> None:
        """Our own request, if we have one on the board, is for nobody else to serve. As the clerk."""
        words = self._words  # a call that broke off may have counted a request that it never put there
        words[_ANSWER + self.place] = words[_REQUEST + self.place]

    def end(self) -> None:
        """Be the clerk no longer, if we are. A signal that breaks off `begin` or this leaves what a clerk that dies leaves, and
        no lock."""
        if self._mine is False or not self._locks.is_open:  # a forked child is not the clerk
            return
        words, ended = self._words, time.monotonic_ns()
        try:
            if self._mine:
                self._give_up()
                words[_LAST], words[_ENDED] = self.place + 1, ended
                words[_CLERK] = 0
        finally:
            self._mine = False
            flock(self._locks.clerk, LOCK_UN)
        if ended - self._began > LONG_ROUND_SECONDS * NANO:
            for place in range(PLACES):
                if words[_REQUEST + place] != words[_ANSWER + place]:
                    futex.wake(self._bells[place], 1)

    def _give_up(self) -> None:
        """Answer UNKNOWN to all that was taken and not answered."""
        if self._requests == self._answers:
            return
        words = self._words
        for place in range(PLACES):
            number = words[_REQUEST + place]
            if number == words[_TAKEN + place] and number != words[_ANSWER + place]:
                self.reply(BoardRequest(place, number, b""), UNKNOWN)

    # --- texts --------------------------------------------------------------------------------------------------------

    def _write(self, at: int, number: int, text: bytes) -> None:
        data = _TEXT.pack(len(text), crc32(text, number & 0xFFFFFFFF)) + text
        self._mapped.bytes[at : at + len(data)] = data

    def _read(self, at: int, number: int, length_max: int) -> bytes | None:
        memory = self._mapped.bytes
        length, crc = _TEXT.unpack_from(memory, at)
        if length > length_max:
            return None
        at += TEXT_HEAD
        text = bytes(memory[at : at + length])
        return text if crc32(text, number & 0xFFFFFFFF) == crc else None


def open_board(path: Path, cookie: int, mode: int, locks: Locks) -> Board | None:
    """A place on the board of a log; None: all are taken, this machine's processes can't wake each other, or the folder is not
    at its place any more. Raises OSError."""
    if not futex.AVAILABLE:
        return None
    mapped = Mapped(path, mode, HEAD_BYTES + PLACES * PLACE_BYTES)
    if not locks.are_in_place():
        return None  # this is the board of another log
    for place in range(PLACES):
        try:
            fcntl.fcntl(locks.places, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
        except (BlockingIOError, PermissionError):
            continue
        return Board(mapped, cookie, locks, place)
    return None

"""Flat combining (Hendler, Incze, Shavit, Tzafrir 2010): a publication list in shared memory, on which processes of one folder
ask one of them, the combiner of the moment, to do their work.

What many processes would each have to read of the log to answer their own request, the combiner reads once for all. Nobody
is appointed: who has a request and finds no combiner takes its lock, serves everybody's requests in one round, and goes its
way. Others leave it the next round for as long as it would cost them to catch up with it (`pause`).

    head      identity · COMBINER, ENDED · per place: REQUEST, TAKEN, ANSWER (numbers that count requests)             (4 KiB)
    place     request: length u32 · crc32 u32 · bytes          (2 KiB), written by its owner, before REQUEST
              answer: the same                                (14 KiB), written by the combiner, before ANSWER

A place is open while ANSWER != REQUEST. All is hints, the log is the truth. Invariants:
    only the holder of the combiner's lock writes TAKEN, ANSWER and answers, or withdraws a request of its own;
    TAKEN = REQUEST before anything of that request is written to the log, so an open place with TAKEN != REQUEST was not;
    an open place with TAKEN = REQUEST that nobody serves belongs to a round that broke off: it may be in the log or not. The
    next combiner answers it UNKNOWN, and its owner looks for itself.
The crc covers the number, so a half-written or an older text is never taken for the one asked for. Not here: what requests
mean (roq/workqueue/log_queue.py).
"""

from __future__ import annotations

import fcntl
import operator
import os
import struct
import time
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_UN, flock
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

from roq.errors import Closed
from roq.log.local import shared
from roq.log.local.locks import Locks, try_alone

PLACES = 64  # processes that can ask at the same time; those without a place do their own work
HEAD_BYTES, PLACE_BYTES, REQUEST_BYTES = 4096, 16 * 1024, 2 * 1024
TEXT_HEAD = 8
REQUEST_MAX, ANSWER_MAX = REQUEST_BYTES - TEXT_HEAD, PLACE_BYTES - REQUEST_BYTES - TEXT_HEAD
UNKNOWN = b""  # the answer to a request of which the combiner can't say what became of it
BUSY_SECONDS = 3600.0  # a combiner is at work: no telling how long
LONG_ROUND_SECONDS = 0.03  # after such a one those who asked meanwhile are woken: by now they look seldom
PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.001, 0.25  # between two looks at whether the combiner is still at it; each twice as long
COMBINER_SECONDS = 0.032  # from such a pause on its lock is tried: it may have died
GATHER_SECONDS = 200e-6  # at most, for those who were served in the last round
RHYTHM_SECONDS = 0.001  # after a round; later nobody is waited for
COMPANY_SECONDS = 1.0  # after a round for others
NANO = 1_000_000_000
_COMBINER, _ENDED = 8, 9  # place + 1 of who serves now, 0: nobody; CLOCK_MONOTONIC when a round ended last, with its place
_LAST = 10
_REQUEST, _TAKEN, _ANSWER = 64, 64 + PLACES, 64 + 2 * PLACES
_TEXT = struct.Struct("<II")
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


Served = TypeVar("Served")


class PublishedRequest(NamedTuple):
    """A request on the list. number: of its place."""

    place: int
    number: int
    text: bytes


class PublicationList:
    """Our place on the list, and the list as the combiner sees it. One thread at a time. Raises OSError, Closed."""

    def __init__(self, mapped: shared.Mapped, cookie: int, locks: Locks, place: int) -> None:
        self._mapped, self._locks, self.place = mapped, locks, place
        self._mine: bool | None = False  # whether we have the combiner's lock; None: perhaps, a signal may have broken in
        words = self._words = self._mapped.words
        self._requests, self._answers = words[_REQUEST : _REQUEST + PLACES], words[_ANSWER : _ANSWER + PLACES]
        self._bells = [self._mapped.address(_ANSWER + one) for one in range(PLACES)]
        if not self._mapped.is_current(cookie):
            try:
                flock(locks.combiner, LOCK_EX)
                if not self._mapped.is_current(cookie):
                    self._mapped.bytes[:HEAD_BYTES] = bytes(HEAD_BYTES)
                    self._mapped.adopt(cookie)
            finally:
                flock(locks.combiner, LOCK_UN)
        self._began = 0  # CLOCK_MONOTONIC of our last round
        self._served, self._company = 0, 0.0  # how many others it served; when one last served others, monotonic
        self._number = max(words[_REQUEST + place], words[_ANSWER + place])  # an owner before us may have left a request

    # --- asking -------------------------------------------------------------------------------------------------------

    def publish(self, text: bytes) -> None:
        """Put a request on the list."""
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
            shared.futex_wait(self._bells[self.place], before & 0xFFFFFFFF, seconds)

    def is_ours(self) -> bool:
        """Whether the last round was ours, and nobody serves."""
        return self._words[_LAST] == self.place + 1 and not self._words[_COMBINER]

    def pause(self, patience: float) -> float:
        """Seconds for which the next round is better left to another: `patience` from when a round of another one ended."""
        words = self._words
        if words[_COMBINER]:
            return BUSY_SECONDS
        if words[_LAST] == self.place + 1:
            return 0.0
        return patience - (time.monotonic_ns() - words[_ENDED]) / NANO

    def _check_open(self) -> None:
        if not self._locks.is_open:  # its descriptors may be other files by now
            raise Closed("the log was closed")

    def await_answer(self, patience: Callable[[], float], serve: Callable[[], Served]) -> Served | bytes:
        """The answer to what was published, or what `serve` returns, which is called once it is our turn to be the combiner.
        patience: seconds to leave a round to another."""
        pause = PAUSE_SECONDS
        while (text := self.answer()) is None:
            left = self.pause(patience())
            at_once = left <= 0 or pause >= COMBINER_SECONDS
            if at_once and (served := self.combine(serve, published=True)) is not None:
                return served
            self.wait(min(left, pause) if left > 0 else pause)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        return text

    # --- serving ------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """We have just been the combiner: let those we have served ask again, so that all get on at the same speed."""
        now = time.monotonic()
        if self._served and now - self._company < RHYTHM_SECONDS:
            while self.count() < self._served and time.monotonic() - now < GATHER_SECONDS:
                os.sched_yield()

    def has_company(self) -> bool:
        """Whether there are others, who may want to take over."""
        return self._company + COMPANY_SECONDS > time.monotonic()

    def combine(self, serve: Callable[[], Served], *, published: bool = False) -> Served | None:
        """One round as the combiner: what `serve` returns. None: another is, or has answered what we `published`."""
        try:
            if not self.begin() or (published and self.answer() is not None):
                return None
            try:
                return serve()
            finally:
                if self._served:
                    self._company = time.monotonic()
        finally:
            try:
                self.end()
            except BaseException:  # a signal, before its first line
                self.end()
                raise

    def begin(self) -> bool:
        """Whether we are the combiner from now on. Answers first what a broken-off round has left. Whatever happens, `end`."""
        self._check_open()
        self._mine = None
        if not try_alone(self._locks.combiner):
            self._mine = False
            return False
        self._mine = True
        self._began = time.monotonic_ns()
        self._words[_COMBINER] = self.place + 1
        self._give_up()
        return True

    def withdraw(self) -> None:
        """Our request is none any more. Waits until nobody is the combiner."""
        self._check_open()
        try:
            flock(self._locks.combiner, LOCK_EX)
            self.drop()
        finally:
            flock(self._locks.combiner, LOCK_UN)

    def take(self) -> list[PublishedRequest]:
        """All open requests but our own, marked as taken. Those that can't be read are left."""
        self._served = 0
        if self._requests == self._answers:
            return []
        words, found = self._words, list[PublishedRequest]()
        for place in range(PLACES):
            number = words[_REQUEST + place]
            if number != words[_ANSWER + place] and place != self.place:
                text = self._read(HEAD_BYTES + place * PLACE_BYTES, number, REQUEST_MAX)
                if text:
                    words[_TAKEN + place] = number
                    found.append(PublishedRequest(place, number, text))
        self._served = len(found)
        return found

    def count(self) -> int:
        """How many requests are open."""
        return sum(map(operator.ne, self._requests, self._answers))

    def reply(self, request: PublishedRequest, text: bytes) -> None:
        """Answer a request; UNKNOWN also stands for an answer that is too long."""
        self._write(
            HEAD_BYTES + request.place * PLACE_BYTES + REQUEST_BYTES,
            request.number,
            text if len(text) <= ANSWER_MAX else UNKNOWN,
        )
        self._words[_ANSWER + request.place] = request.number
        shared.futex_wake(self._bells[request.place], 1)

    def drop(self) -> None:
        """Our own request, if we have one on the list, is for nobody else to serve. As the combiner."""
        words = self._words  # a call that broke off may have counted a request that it never put there
        words[_ANSWER + self.place] = words[_REQUEST + self.place]

    def end(self) -> None:
        """Be the combiner no longer, if we are. A signal that breaks off `begin` or this leaves what a dead combiner leaves,
        and no lock."""
        if self._mine is False or not self._locks.is_open:  # a forked child is not the combiner
            return
        words, ended = self._words, time.monotonic_ns()
        try:
            if self._mine:
                self._give_up()
                words[_LAST], words[_ENDED] = self.place + 1, ended
                words[_COMBINER] = 0
        finally:
            self._mine = False
            flock(self._locks.combiner, LOCK_UN)
        if ended - self._began > LONG_ROUND_SECONDS * NANO:
            for place in range(PLACES):
                if words[_REQUEST + place] != words[_ANSWER + place]:
                    shared.futex_wake(self._bells[place], 1)

    def _give_up(self) -> None:
        """Answer UNKNOWN to all that was taken and not answered."""
        if self._requests == self._answers:
            return
        words = self._words
        for place in range(PLACES):
            number = words[_REQUEST + place]
            if number == words[_TAKEN + place] and number != words[_ANSWER + place]:
                self.reply(PublishedRequest(place, number, b""), UNKNOWN)

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


def open_list(path: Path, cookie: int, mode: int, locks: Locks) -> PublicationList | None:
    """A place on the list of a log; None: all are taken, this machine's processes can't wake each other, or the folder is not
    at its place any more. Raises OSError."""
    if not shared.FUTEX_AVAILABLE:
        return None
    mapped = shared.Mapped(path, mode, HEAD_BYTES + PLACES * PLACE_BYTES)
    if not locks.are_in_place():
        return None  # this is the list of another log
    for place in range(PLACES):
        try:
            fcntl.fcntl(locks.places, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
        except (BlockingIOError, PermissionError):
            continue
        return PublicationList(mapped, cookie, locks, place)
    return None

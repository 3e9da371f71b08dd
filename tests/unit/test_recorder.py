"""What an Exchange writes to its tape: all of it, in order, once, and at the positions that it tells.

The log behind it is a list here, that takes and acknowledges as LogWriter does. Not covered: real stores, tests/integration.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import Closed, DataLost, LogFenced, LogTrimmed, LogUnavailable, ProcessFailed, RoqError
from roq.log.replicated.metadata import LogMeta
from roq.log.replicated.stores import StoreDirectory
from roq.log.replicated.writer import Done
from roq.pubsub.exchange import recorder as module
from roq.pubsub.exchange.recorder import ENTRIES_AT_ONCE, Recorder
from roq.pubsub.exchange.runs import FrameRun
from roq.runtime.observe import Counters
from roq.wire import zmtp
from roq.wire.frame import encode_data
from roq.wire.recording import Record, Recording, decode_entry, encode_entry, entry_time, messages_before, messages_in

ENTRY_BYTES, HELD_BYTES = 100, 400  # here
NOBODY: Any = None  # is asked by a log that is a list
OLD = [b"an older entry", b"and another one"]


class ListWriter:
    """Writer of a list. `window`: how many entries it takes that are not acknowledged. What is acknowledged, and when, is said
    by the test."""

    log: ClassVar[list[bytes]] = []
    failing: ClassVar[RoqError | None] = None

    def __init__(self) -> None:
        self.confirmed = len(self.log)
        self.error: RoqError | None = None
        self.pending: deque[tuple[bytes, Done]] = deque()
        self.window, self.sealed, self.meta = 3, False, LogMeta(ack_quorum=2)

    @classmethod
    async def take_over(cls, *about: object) -> ListWriter:
        if cls.failing is not None:
            raise cls.failing
        return cls()

    def write(self, entry: bytes, done: Done) -> None:
        if self.error is not None:
            raise self.error
        if len(self.pending) >= self.window:
            raise LogUnavailable("too many entries are not acknowledged yet")
        self.pending.append((entry, done))

    def acknowledge(self, count: int = 1) -> None:
        """The oldest ones."""
        for _ in range(min(count, len(self.pending))):
            entry, done = self.pending.popleft()
            self.log.append(entry)
            self.confirmed = len(self.log)
            done(self.confirmed)

    def stop(self, kept: int) -> None:
        """For good: of what was on its way the first ones are found by the next writer."""
        self.error = LogUnavailable("too few stores answer")
        self.log.extend(entry for entry, _ in list(self.pending)[:kept])
        for _, done in self.pending:
            done(self.error)
        self.pending.clear()

    async def close(self) -> None:
        """See LogWriter."""

    async def seal(self) -> bool:
        self.sealed, self.error = True, Closed("sealed")
        return True


class ListReader:
    """LogReader of the same list."""

    failing: ClassVar[RoqError | None] = None
    closed: ClassVar[int] = 0

    def __init__(self, *about: object) -> None: ...

    async def refresh(self) -> LogMeta:
        return LogMeta()

    async def read_from(self, meta: LogMeta, after: int) -> list[tuple[int, bytes]]:
        if self.failing is not None:
            raise self.failing
        return list(enumerate(ListWriter.log, 1))[after:]

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LogWriter", ListWriter)
        patch.setattr(module, "LogReader", ListReader)
        patch.setattr(ListReader, "failing", None)
        patch.setattr(module, "ENTRY_BYTES", ENTRY_BYTES)
        patch.setattr(module, "HELD_BYTES", HELD_BYTES)
        patch.setattr(ListWriter, "log", [])
        patch.setattr(ListWriter, "failing", None)
        yield


class Asked(NamedTuple):
    """Somebody asked when so many frames had been taken."""

    frames: int
    told: list[int]


class Tape:
    """A recorder with what it was given and what it said."""

    def __init__(self, *older: bytes) -> None:
        ListWriter.log[:] = older
        self.older = len(older)
        self.full: list[bool] = []
        self.stored: list[int] = []
        self.taken: list[bytes] = []
        self.where: list[Asked] = []
        self.waits: list[Asked] = []
        self.counters = Counters()
        recording = Recording(Record(), "t")
        self.recorder = Recorder("q", "e", recording, self.full.append, self.stored.append, self.counters)

    @property
    def writer(self) -> ListWriter:
        found: Any = self.recorder.writer
        assert isinstance(found, ListWriter)
        return found

    async def take_over(self) -> None:
        await self.recorder._take_over(NOBODY, StoreDirectory(NOBODY))

    def take(self, *sizes: int) -> None:
        """Frames with bodies of so many bytes, as one run."""
        bodies = [b"%d " % (len(self.taken) + at) * size for at, size in enumerate(sizes)]
        frames = [zmtp.frame(body) for body in bodies]
        self.taken += bodies
        self.recorder.take([FrameRun((), [b"".join(frames)], len(frames), sum(map(len, frames)))])

    def ask(self, question: Callable[[Callable[[int], None]], None], asked: list[Asked]) -> None:
        told: list[int] = []
        asked.append(Asked(len(self.taken), told))

        def answered(position: int) -> None:
            assert asked is self.where or position <= len(ListWriter.log), "it is not stored"
            told.append(position)

        question(answered)

    def ask_where(self) -> None:
        self.ask(self.recorder.where, self.where)

    def ask_when_stored(self) -> None:
        self.ask(self.recorder.when_stored, self.waits)

    def frames(self, upto: int | None = None) -> list[bytes]:
        """On the tape, in entries up to this position."""
        return [frame for entry in ListWriter.log[self.older : upto] for frame in decode_entry(entry).frames]

    async def finish(self) -> None:
        """A writer that takes and acknowledges everything."""
        if self.recorder.writer is None or self.writer.error is not None:
            await self.take_over()
        async with asyncio.timeout(5.0):
            while self.recorder._waiting:
                await asyncio.sleep(0)
                self.writer.acknowledge(1)

    def check(self) -> None:
        """At the end."""
        assert self.frames() == self.taken
        assert self.stored == sorted(self.stored)
        assert self.stored[-1] == len(ListWriter.log)
        for asked in (*self.where, *self.waits):
            assert len(asked.told) == 1, "each is answered once"
        for frames, (position,) in self.where:
            assert self.frames(position) == self.taken[:frames], "the entry ends with what was taken"
        for frames, (position,) in self.waits:
            assert len(self.frames(position)) >= frames
            assert not frames or len(self.frames(position - 1)) < frames, "it was stored earlier"
        assert self.full == [place % 2 == 0 for place in range(len(self.full))], "publishers wait, and then no longer"
        assert len(self.full) % 2 == 0


@pytest.mark.parametrize("known", [True, False])
async def test_times_on_a_tape_never_go_back(
    monkeypatch: pytest.MonkeyPatch, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Not while its clock is set back, nor behind what the life before wrote. known: before the first entry is made."""
    caplog.set_level("WARNING", module.__name__)
    times = iter((5_000, 20_000, 19_000, 21_000, 11_000, 22_000, 23_000))
    monkeypatch.setattr(module, "now_ms", lambda: next(times))
    tape = Tape(encode_entry(7_000, []))
    if known:
        await tape.take_over()
    for _ in range(7):
        tape.take(1)
        tape.recorder._cut()
    await tape.finish()
    assert [entry_time(entry) for entry in ListWriter.log] == [7_000, 7_000, 20_000, 20_000, 21_000, 21_000, 22_000, 23_000]
    assert len([one for one in caplog.records if "set back" in one.message]) == 1
    tape.check()


async def test_frames_of_one_turn_are_one_entry() -> None:
    tape = Tape()
    await tape.take_over()
    tape.take(1, 2)
    tape.take(3)
    assert not tape.writer.pending
    await asyncio.sleep(0)
    assert len(tape.writer.pending) == 1
    tape.take(4)
    await asyncio.sleep(0)
    assert len(tape.writer.pending) == ENTRIES_AT_ONCE
    tape.take(5)
    tape.take(6)
    await asyncio.sleep(0)
    assert len(tape.writer.pending) == ENTRIES_AT_ONCE, "it grows while enough are under way"
    tape.writer.acknowledge()
    assert [len(decode_entry(entry).frames) for entry, _ in tape.writer.pending] == [1, 2]
    tape.writer.acknowledge(2)
    tape.check()
    assert tape.stored == [0, 1, 2, 3]
    assert tape.counters["tape_bytes"] == sum(map(len, ListWriter.log))


async def test_a_full_entry_goes_at_once_and_no_frame_is_cut() -> None:
    tape = Tape()
    await tape.take_over()
    for size in (10, ENTRY_BYTES, 3 * ENTRY_BYTES, 1):
        tape.take(size)
    assert [len(decode_entry(entry).frames) for entry, _ in tape.writer.pending] == [2, 1]
    await tape.finish()
    tape.check()


async def test_publishers_are_held_no_longer_when_recording_ends() -> None:
    tape = Tape()
    await tape.take_over()
    while not tape.full:
        tape.take(ENTRY_BYTES)
    tape.writer.stop(0)
    await tape.recorder.seal()
    assert tape.full == [True, False]


async def test_where_cuts_so_that_what_follows_is_in_the_next_entry() -> None:
    tape = Tape(*OLD)
    await tape.take_over()
    tape.ask_where()
    tape.take(1)
    tape.ask_where()
    tape.ask_where()
    tape.take(2)
    tape.ask_where()
    assert [asked.told for asked in tape.where] == [[2], [3], [3], [4]], "none of it is stored"
    await tape.finish()
    tape.check()


async def test_before_the_log_is_taken_over_nobody_knows_where() -> None:
    tape = Tape(*OLD)
    tape.ask_where()
    tape.ask_when_stored()
    tape.take(1)
    tape.ask_where()
    tape.ask_when_stored()
    tape.take(2)
    tape.ask_when_stored()
    assert not any(asked.told for asked in (*tape.where, *tape.waits))
    await tape.take_over()
    assert [asked.told for asked in tape.where] == [[2], [3]]
    assert [asked.told for asked in tape.waits] == [[2], [], []]
    await tape.finish()
    tape.check()
    assert [asked.told for asked in tape.waits] == [[2], [3], [4]]


def published(count: int) -> FrameRun[tuple[()]]:
    """A frame of so many messages, and one that nobody can read."""
    frames = [zmtp.frame(encode_data(b"t", 1, 1, 1, 0, 0, [b"x"] * count, 0)), zmtp.frame(b"no frame")]
    return FrameRun((), [b"".join(frames)], 2, sum(map(len, frames)))


def counted() -> list[int | None]:
    return [messages_before(entry) for entry in ListWriter.log]


async def test_entries_say_how_many_messages_lie_before_them() -> None:
    tape = Tape()
    tape.recorder.take([published(3)])
    tape.recorder.where(lambda position: None)
    tape.recorder.take([published(4)])
    await tape.take_over()
    tape.recorder.take([published(1), published(1)])
    await tape.finish()
    tape.recorder.take([published(0)])
    await tape.finish()
    assert counted() == [0, 3, 7, 9]


async def test_the_count_goes_on_behind_what_is_there() -> None:
    tape = Tape(encode_entry(5, published(2).pieces, 100))
    tape.recorder.take([published(3)])
    tape.recorder.where(lambda position: None)
    ListReader.failing = LogUnavailable("no store answers")
    with pytest.raises(LogUnavailable):
        await tape.take_over()
    assert tape.recorder.writer is None
    ListReader.failing = None
    await tape.take_over()
    tape.recorder.take([published(1)])
    await tape.finish()
    tape.writer.stop(0)
    await tape.take_over()
    tape.recorder.take([published(1)])
    await tape.finish()
    assert counted() == [100, 102, 105, 106]
    assert [messages_in(entry) for entry in ListWriter.log] == [2, 3, 1, 1]


@pytest.mark.parametrize("gone", [LogTrimmed(), DataLost("nobody has it")])
async def test_behind_what_can_not_be_read_it_begins_anew(gone: RoqError) -> None:
    tape = Tape(b"\x01" + bytes(8))
    ListReader.failing = gone
    await tape.take_over()
    tape.recorder.take([published(3)])
    await tape.finish()
    tape.recorder.take([published(1)])
    await tape.finish()
    assert counted() == [None, 0, 3]


async def test_what_is_stored_already_is_told_at_once() -> None:
    tape = Tape()
    await tape.take_over()
    tape.ask_when_stored()
    tape.take(1)
    await tape.finish()
    tape.ask_when_stored()
    tape.check()
    assert [asked.told for asked in tape.waits] == [[0], [1]]


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_the_next_writer_goes_on_where_the_log_ends(kept: int) -> None:
    tape = Tape(*OLD)
    await tape.take_over()
    for size in (1, 2, 3):
        tape.take(size)
        tape.ask_where()
        tape.ask_when_stored()
    tape.writer.acknowledge()
    tape.writer.stop(kept)
    tape.take(4)
    tape.ask_where()
    tape.ask_when_stored()
    assert [asked.told for asked in tape.waits] == [[3], [], [], []], "whether the others are is not known"
    await tape.take_over()
    assert [asked.told for asked in tape.waits] == [[3], [4] * (kept > 0), [5] * (kept > 1), []]
    await tape.finish()
    tape.check()
    assert [asked.told for asked in tape.where] == [[3], [4], [5], [6]]


async def test_an_answer_of_a_former_writer_says_nothing() -> None:
    tape = Tape()
    await tape.take_over()
    tape.take(1)
    tape.ask_when_stored()
    await asyncio.sleep(0)
    _, done = tape.writer.pending[0]
    tape.writer.stop(0)
    await tape.take_over()
    done(1)
    assert not tape.waits[0].told
    await tape.finish()
    tape.check()


async def test_publishers_wait_while_too_much_is_not_stored() -> None:
    tape = Tape()
    tape.take(HELD_BYTES // 2)
    tape.take(HELD_BYTES // 4)
    assert tape.full == [True]
    tape.take(HELD_BYTES // 2)
    assert tape.full == [True]
    await tape.take_over()
    assert tape.full == [True]
    tape.writer.acknowledge(1)
    assert tape.full == [True]
    tape.writer.acknowledge(2)
    assert tape.full == [True, False]
    assert tape.counters["tape_full"] == 1
    tape.check()


async def test_a_writer_that_takes_no_more_gets_the_rest_later() -> None:
    tape = Tape()
    await tape.take_over()
    tape.writer.window = 1
    for _ in range(3):
        tape.take(ENTRY_BYTES)
    assert len(tape.writer.pending) == 1
    assert tape.counters["tape_waits"] == 2
    await tape.finish()
    tape.check()
    assert tape.stored == [0, 1, 2, 3]


async def test_the_end_is_written_and_the_log_is_closed() -> None:
    tape = Tape()
    await tape.take_over()
    tape.take(1)
    sealing = asyncio.ensure_future(tape.recorder.seal())
    await asyncio.sleep(0)
    assert not tape.writer.sealed
    tape.writer.acknowledge()
    await sealing
    assert tape.writer.sealed
    tape.check()


async def test_a_log_that_has_no_writer_at_the_end_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    tape.take(1)
    await tape.recorder.seal()
    await tape.take_over()
    monkeypatch.setattr(module, "SEAL_SECONDS", 0.01)
    await tape.recorder.seal()
    assert not tape.writer.sealed


async def test_whoever_takes_the_tape_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape()
    monkeypatch.setattr(ListWriter, "failing", LogFenced("a later epoch"))
    with pytest.raises(ProcessFailed, match=r"tape tape.t.e belongs to another Exchange by now: a later epoch"):
        await tape.recorder.run(NOBODY, StoreDirectory(NOBODY))


Step = tuple[str, list[int]]


def steps(*what: str, most: int = 3, length: int = 1) -> st.SearchStrategy[Step]:
    return st.tuples(st.sampled_from(what), st.lists(st.integers(1, most), min_size=1, max_size=length))


STEPS = st.one_of(
    steps("take", most=30, length=3),
    steps("ask_where", "ask_when_stored", "turn"),
    steps("acknowledge", "stop", "take_over", "window"),
)


@given(st.lists(STEPS, max_size=60), st.integers(0, 2))
def test_whatever_happens_all_of_it_is_there_once(history: list[Step], older: int) -> None:
    asyncio.run(play(history, older))


async def play(history: list[Step], older: int) -> None:
    tape = Tape(*OLD[:older])
    for what, numbers in history:
        there = tape.recorder.writer is not None and tape.writer.error is None
        match what:
            case "take":
                tape.take(*numbers)
            case "turn":
                await asyncio.sleep(0)
            case "take_over" if not there:
                await tape.take_over()
            case "acknowledge" | "stop" if there:
                getattr(tape.writer, what)(numbers[0])
            case "window" if there:
                tape.writer.window = numbers[0]
            case "ask_where" | "ask_when_stored":
                getattr(tape, what)()
        waiting = sum(len(entry.data) for entry in tape.recorder._under_way) + sum(map(len, tape.recorder._pieces))
        assert tape.recorder._waiting == waiting
    await tape.finish()
    tape.check()

"""The indexes of a tape: what is written, and what who wants some topics reads by them. Real frames; the stores are a list.

Not covered: reading from stores, and the order of what comes out of it, tests/integration/test_recorded_topics.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import DataLost, LogTrimmed, LogUnavailable
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.log.replicated.reader import Entry
from roq.log.replicated.stores import StaticDirectory, Stores
from roq.pubsub import tape_selection
from roq.pubsub.exchange.topic_index import TopicIndexBuilder
from roq.pubsub.subscription import TopicFilter
from roq.pubsub.tape import Tape
from roq.wire import gcm, tape_index, zmtp
from roq.wire.assignment import to_json
from roq.wire.frame import FrameKind, PathOpening, encode_bundle, encode_control, encode_data
from roq.wire.recording import ANY_TOPIC, encode_entry, messages_in
from roq.wire.store import ENTRY_BYTES_MAX
from roq.wire.tape_index import NAMES_BYTES_MAX, TOPICS_MAX, encode_index, index_of

EVERY = 16


def data(topic: str, number: int = 1) -> bytes:
    return encode_data(topic.encode(), 7, 1, number, 0, 0, [b"x"], 0)


def entry_of(*frames: bytes) -> bytes:
    return encode_entry(5, map(zmtp.frame, frames))


WATERMARK = encode_control(FrameKind.WATERMARK, 7, 1, 9, {"w": (9, 9)}, 0)
OPEN, FIN = encode_control(FrameKind.OPEN, 7, 1, 0, PathOpening("", False), 0), encode_control(FrameKind.FIN, 7, 1, 9, None, 0)
STORE = encode_control(FrameKind.STORE, 7, 1, 9, 1, 0)


@pytest.mark.parametrize(
    ("frames", "topics", "count"),
    [
        ([data("a"), data("b"), data("a")], {b"a", b"b"}, 3),
        ([data("x" * 255)], {b"x" * 255}, 1),
        ([data("x" * 256)], {ANY_TOPIC}, 1),
        ([encode_control(FrameKind.WATERMARK, 7, 1, 9, {"w": (9, 9), "x" * 256: (8, 1)}, 0)], {b"w", ANY_TOPIC}, 0),
        ([b"x" * 100_000], {ANY_TOPIC}, 0),
        ([WATERMARK, STORE], {b"w"}, 0),
        ([OPEN], {ANY_TOPIC}, 0),
        ([data("a"), FIN], {b"a", ANY_TOPIC}, 1),
        ([encode_bundle(7, 1, 2, [data("a"), data("b")], 0)], {ANY_TOPIC}, 2),
        ([b"\xff\x01\x63 of a kind to come"], {ANY_TOPIC}, 0),
        ([b"no header"], {ANY_TOPIC}, 0),
    ],
)
def test_what_an_entry_is_about(frames: Sequence[bytes], topics: set[bytes], count: int) -> None:
    found = set[bytes]()
    assert messages_in(entry_of(*frames), found) == count == messages_in(entry_of(*frames))
    assert found == topics


def test_an_index_says_what_was_written_since_the_one_before() -> None:
    builder = TopicIndexBuilder()
    assert builder.finish(0) is None, "nothing was written"
    for position in range(EVERY - 10, EVERY):
        builder.add(position, [b"a"] if position < EVERY - 5 else [b"b", ANY_TOPIC])
    frame = builder.finish(0)
    assert frame is not None
    builder.add(EVERY, [b"never"])
    builder.add(EVERY + 1, [b"c"])
    found = index_of(EVERY, entry_of(frame))
    assert found is not None
    assert (found.first, found.last, sorted(found.topics)) == (EVERY - 10, EVERY - 1, [b"a", b"b"])
    following = builder.finish(0)
    assert following is not None
    found = index_of(2 * EVERY, entry_of(following))
    assert found is not None
    assert (found.first, list(found.topics)) == (EVERY + 1, [b"c"])


def test_too_many_topics_are_no_index() -> None:
    builder = TopicIndexBuilder()
    builder.add(1, [b"%d" % number for number in range(TOPICS_MAX + 1)])
    builder.add(2, [b"one more"])
    assert builder.finish(0) is None
    builder.add(EVERY + 1, [b"%d" % number for number in range(TOPICS_MAX)])
    assert (frame := builder.finish(0)) is not None
    assert (found := index_of(2 * EVERY, entry_of(frame))) is not None
    assert len(found.topics) == TOPICS_MAX


def test_long_topics_are_no_index_that_no_log_would_take() -> None:
    """Of names that no compression makes smaller."""
    builder, random = TopicIndexBuilder(), Random(1)
    for position in range(1, EVERY):
        builder.add(position, [random.randbytes(255) for _ in range(TOPICS_MAX // EVERY)])
    assert builder.finish(0) is None
    count = NAMES_BYTES_MAX // 256
    for position in (EVERY + 1, EVERY + 2):
        builder.add(position, [b"%0255d" % number for number in range(count)])
    assert (frame := builder.finish(0)) is not None, "what is too much is forgotten, and each counts once"
    assert (found := index_of(2 * EVERY, entry_of(frame))) is not None
    assert len(found.topics) == count
    assert NAMES_BYTES_MAX + 16 * TOPICS_MAX < ENTRY_BYTES_MAX // 2


@pytest.mark.parametrize(
    ("position", "entry"),
    [
        (EVERY, entry_of(data("a"))),
        (EVERY, entry_of()),
        (EVERY, b"nothing"),
        (EVERY + 1, entry_of(encode_index(5, {b"a": 1}, 0))),
        (2 * EVERY, entry_of(encode_index(5, {b"a": 1}, 0))),
        (EVERY, entry_of(encode_index(5, {b"a": 1}, 0), data("a"))),
        (EVERY, entry_of(encode_index(5, {b"a": 1}, 0)[:-3])),
        (EVERY, entry_of(encode_control(FrameKind.INDEX, 0, 0, 5, "text", 0))),
        (EVERY, entry_of(encode_control(FrameKind.INDEX, 0, 0, 5, None, 0)[:-1] + b"\xc4\x01x")),
    ],
)
def test_what_is_no_index_says_nothing(position: int, entry: bytes) -> None:
    assert index_of(position, entry) is None


class ListedTape(Tape):
    """Its entries are a list, from number 1. asked: which were given."""

    def __init__(self, entries: list[bytes], closed: int, confirmed: int, away: frozenset[int] = frozenset()) -> None:
        """closed: its first segment has so many; 0: none is closed. away: those that no store has."""
        segments = [SegmentMetadata("s1", 1, SegmentState.CLOSED, (Fragment(1, ("h",)),), closed)] if closed else []
        segments.append(SegmentMetadata("s2", closed + 1, SegmentState.OPEN, (Fragment(closed + 1, ("h",)),)))
        view = gcm.TapeView("tape.t.A", "A", True, to_json(LogMeta(segments=tuple(segments))))
        super().__init__(view, Stores(StaticDirectory({})))
        self.entries, self.confirmed, self.away = entries, confirmed, away
        self.given: list[int] = []

    async def confirmed_end(self, meta: LogMeta) -> int:
        return self.confirmed

    async def read_from(
        self, meta: LogMeta, after: int, wait_seconds: float = 0.0, *, ask_all: bool = False, last: int = 0
    ) -> list[Entry]:
        if after + 1 in self.away:
            raise DataLost(f"entry {after + 1}")
        stop = min(after + 3, last or self.confirmed)  # three at once: 1 MiB here
        run = [(position, self.entries[position - 1]) for position in range(after + 1, stop + 1) if position not in self.away]
        self.given += [position for position, _ in run]
        return run

    async def everything(self) -> list[int]:
        """Numbers of the entries that are handed out; those that are lost are passed over."""
        out: list[int] = []
        while self.done < self.confirmed:
            try:
                assert not await self.fetch()
            except DataLost:
                self.done += 1
                continue
            assert self.ahead
            while self.ahead:
                position, _ = self.ahead.popleft()
                assert position > self.done
                out.append(position)
                self.done = position
        return out


def written(topics: Sequence[frozenset[bytes]], begun_at: int = 1, rests: frozenset[int] = frozenset()) -> list[bytes]:
    """As an Exchange writes it that was started at that entry. rests: where there is no index, as by an older program."""
    builder, entries = TopicIndexBuilder(), list[bytes]()
    for some in topics:
        position = len(entries) + 1
        frames = [OPEN if topic == ANY_TOPIC else data(topic.decode()) for topic in sorted(some)]
        if tape_index.is_index(position) and position not in rests and (index := builder.finish(0)) is not None:
            frames = [index]
        entries.append(entry_of(*frames))
        if position >= begun_at:
            builder.add(position, some)
    return entries


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """An index every 16 entries, groups of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape_index, "INDEX_EVERY", EVERY)
        patch.setattr(tape_index, "GROUP_ENTRIES", 2)
        yield


def read_selected(tape: ListedTape, *patterns: str) -> list[int]:
    tape.select(TopicFilter(patterns).wants)
    return asyncio.run(tape.everything())


def drawn(random: Random, count: int) -> list[frozenset[bytes]]:
    """Topics of so many entries."""
    names = [b"eu.a", b"eu.b", b"us.a", b"us.b", b"asia"]
    return [
        frozenset(random.sample(names, random.choice((0, 0, 1, 2))) + [ANY_TOPIC] * (random.random() < 0.03))
        for _ in range(count)
    ]


@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 70),
    pattern=st.sampled_from(["eu.>", "eu.a", "eu", "*.a", "asia", "nowhere"]),
    begun_at=st.integers(1, 40),
    closed=st.integers(0, 60),
    older=st.sampled_from([frozenset[int](), frozenset({16}), frozenset({32, 48})]),
    away=st.frozensets(st.integers(1, 70), max_size=3),
)
def test_all_that_is_wanted_comes_and_what_is_left_out_is_not_wanted(
    seed: int, count: int, pattern: str, begun_at: int, closed: int, older: frozenset[int], away: frozenset[int]
) -> None:
    topics = drawn(Random(seed), count)
    tape = ListedTape(written(topics, begun_at, older), min(closed, count - 1), count, away)
    out, wants = read_selected(tape, pattern), TopicFilter((pattern,)).wants
    assert out == sorted(set(out) - away)
    for position in set(range(1, count + 1)) - set(out) - away:
        assert position % EVERY, "the position moves up to an index"
        assert not any(topic == ANY_TOPIC or wants(topic) for topic in topics[position - 1])


def test_of_what_is_indexed_only_groups_with_the_topic_are_read() -> None:
    topics = [frozenset({b"rare"} if position == 37 else {b"often"}) for position in range(1, 70)]
    tape = ListedTape(written(topics), 20, 69)
    assert read_selected(tape, "rare") == [16, 32, 36, 37, 48, 64, 65, 66, 67, 68, 69]
    assert sorted(set(tape.given)) == [16, 32, 36, 37, 48, 64, 65, 66, 67, 68, 69]


def test_while_no_store_says_where_an_open_tape_ends_everything_is_read() -> None:
    class Silent(ListedTape):
        async def confirmed_end(self, meta: LogMeta) -> int:
            raise LogUnavailable

    topics = [frozenset({b"often"})] * 40
    assert read_selected(Silent(written(topics), 20, 40), "rare") == [16, *range(17, 41)]


class PartlyAway(ListedTape):
    """Stores of these entries do not answer."""

    silent = frozenset[int]()

    async def read_from(self, meta: LogMeta, after: int, *about: float, ask_all: bool = False, last: int = 0) -> list[Entry]:
        if after + 1 in self.silent:
            raise LogUnavailable
        before = next((position - 1 for position in sorted(self.silent) if position > after), 0)
        return await super().read_from(meta, after, ask_all=ask_all, last=min(last or before, before or last))


def test_an_index_that_can_not_be_read_now_keeps_nothing_back() -> None:
    topics = [frozenset({b"rare"} if position in (3, 20) else {b"often"}) for position in range(1, 40)]
    tape = PartlyAway(written(topics), 20, 39)
    tape.silent = frozenset(range(12, 18))
    tape.select(TopicFilter(("rare",)).wants)
    with pytest.raises(LogUnavailable):
        asyncio.run(tape.everything())
    assert sorted(set(tape.given)) == list(range(1, 12))


def test_nor_does_a_part_that_can_not_be_read_now() -> None:
    topics = [frozenset({b"rare"} if position in (3, 6, 13) else {b"often"}) for position in range(1, 40)]
    tape = PartlyAway(written(topics), 20, 39)
    tape.silent = frozenset({12, 13})
    tape.select(TopicFilter(("rare",)).wants)
    taken = list[int]()

    async def read() -> None:
        while True:
            assert not await tape.fetch()
            taken.extend(position for position, _ in tape.ahead)
            tape.done = tape.ahead[-1][0]
            tape.ahead.clear()

    with pytest.raises(LogUnavailable):
        asyncio.run(read())
    assert taken == [2, 3, 6, 7]


def test_of_large_entries_few_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = [frozenset({b"rare"} if position % 4 == 0 else {b"often"}) for position in range(1, 65)]
    entries = [entry + bytes(1000) if position % EVERY else entry for position, entry in enumerate(written(topics), 1)]
    monkeypatch.setattr(tape_selection, "ROUND_BYTES", 5_000)
    tape, most = ListedTape(entries, 20, 64), 0
    tape.select(TopicFilter(("rare",)).wants)

    async def read() -> int:
        most = 0
        while tape.done < 64:
            await tape.fetch()
            most = max(most, sum(len(entry) for _, entry in tape.ahead))
            tape.done = tape.ahead[-1][0]
            tape.ahead.clear()
        return most

    most = asyncio.run(read())
    assert 2_000 < most < 6_000, "two runs of two entries, and an index"


def test_a_range_reads_nothing_behind_it() -> None:
    topics = [frozenset({b"rare"} if position % 4 == 0 else {b"often"}) for position in range(1, 40)]
    tape = ListedTape(written(topics), 20, 39)
    tape.select(TopicFilter(("rare",)).wants)
    found = [asyncio.run(tape.read_on(tape.metadata, after, last=9)) for after in (0, 5, 8)]
    assert [[position for position, _ in run if position <= 9] for run in found] == [[4, 5], [8, 9], [9]]
    assert set(tape.given) <= {*range(1, 10), 16}


def test_what_has_expired_meanwhile_is_told_where_it_is() -> None:
    class Trimmed(ListedTape):
        async def read_from(self, meta: LogMeta, after: int, *about: float, **how: Any) -> list[Entry]:
            if after < 20:
                raise LogTrimmed
            return await super().read_from(meta, after, *about, **how)

    tape = Trimmed(written([frozenset({b"often"})] * 40), 30, 40)
    tape.metadata = msgspec.structs.replace(tape.metadata, trimmed=20)
    tape.select(TopicFilter(("rare",)).wants)
    assert asyncio.run(tape.fetch()) == 20
    assert tape.done == 20

"""How a stream over tapes advances, and which messages are repeats: against plain sets and sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException

from roq.errors import FrameError, InvalidPosition
from roq.spark.tape_offsets import RANGES_MAX, SeenNumbers, TapeRange, TapesDone, admitted, ranges
from roq.spark.tape_options import is_recorded, tape_options
from roq.spark.tape_reading import ARROW, FrameRows
from roq.wire.frame import FrameKind, encode_bundle, encode_control, encode_data, parse
from roq.wire.recording import TapePosition

NUMBERS = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 9))  # publisher, first, count
COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50))


@given(st.lists(NUMBERS, max_size=30))
def test_a_number_is_new_once(frames: list[tuple[int, int, int]]) -> None:
    seen, truth = SeenNumbers(), set[tuple[int, int]]()
    for publisher, first, count in frames:
        sent = [(publisher, number) for number in range(first, first + count)]
        assert [(publisher, number) for number in seen.new(publisher, first, count)] == [
            one for one in sent if one not in truth
        ]
        truth.update(sent)


@given(COUNTS, COUNTS, st.none() | st.integers(1, 60))
def test_what_is_admitted_is_shared_out(done: dict[str, int], ends: dict[str, int], most: int | None) -> None:
    reach = admitted(done, ends, most)
    waiting = {exchange: max(0, end - done.get(exchange, 0)) for exchange, end in ends.items()}
    taken = {exchange: entry - done.get(exchange, 0) for exchange, entry in reach.items()}
    assert taken.keys() == waiting.keys()
    assert all(0 <= taken[exchange] <= waiting[exchange] for exchange in taken)
    total, room = sum(waiting.values()), sum(waiting.values()) if most is None else most
    assert sum(taken.values()) == min(total, room), "no more than that, and all there is room for"
    short = [taken[exchange] for exchange in taken if taken[exchange] < waiting[exchange]]
    assert all(max(taken.values()) <= share + 1 for share in short), "who gets less than it has gets as much as any"


@given(COUNTS, COUNTS, st.integers(1, 7))
def test_ranges_are_what_lies_between(start: dict[str, int], end: dict[str, int], most: int) -> None:
    pieces = ranges(start, end, most)
    found = sorted((part.exchange, entry) for part in pieces for entry in range(part.after + 1, part.last + 1))
    wanted = sorted((name, entry) for name, last in end.items() for entry in range(start.get(name, 0) + 1, last + 1))
    assert found == wanted
    assert all(1 <= part.last - part.after <= most for part in pieces)


def test_there_are_not_too_many_pieces() -> None:
    pieces = ranges({}, {"a": 10_000_000, "b": 3}, 1)
    assert len(pieces) <= RANGES_MAX + 2
    assert pieces[-1] == TapeRange("b", 0, 3)


def test_an_offset_is_kept_as_json() -> None:
    place = TapesDone("0f", {"b": 2, "a": 1}, {"b": True})
    assert list(place.offsets()["done"]) == ["a", "b"], "one place has one text"
    assert TapesDone.of(place.offsets(), "0f") == place
    with pytest.raises(InvalidPosition, match="begin with a new one"):
        TapesDone.of(place.offsets(), "f0")
    with pytest.raises(InvalidPosition, match="names no place on tapes"):
        TapesDone.of({"stream": "x", "n": 3}, "0f")


def data(topic: bytes, first: int, payloads: list[bytes], publisher: int = 1 << 63) -> bytes:
    return encode_data(topic, publisher, 1, first, first - 1, 0, payloads, 1_000_000_007)


def test_frames_become_rows_once() -> None:
    taking = FrameRows(("eu.*",))
    taking.take(data(b"eu.a", 1, [b"1", b"2"]))
    taking.take(data(b"us.a", 3, [b"3"]))
    taking.take(encode_control(FrameKind.FIN, 1 << 63, 1, 3, None, 0))
    taking.take(data(b"eu.b", 4, [b"4", b"5"]))
    again = [data(b"eu.a", 1, [b"1", b"2"]), data(b"us.a", 3, [b"3"]), data(b"eu.b", 4, [b"4", b"5"]), data(b"eu.c", 6, [b"6"])]
    taking.take(encode_bundle(1 << 63, 2, 6, again, 0))
    taking.take(data(b"eu.b", 5, [b"5", b"6", b"7"]))
    batch = taking.batch()
    assert batch.schema.equals(ARROW)
    assert batch["payload"].to_pylist() == [b"1", b"2", b"4", b"5", b"6", b"7"]
    assert batch["topic"].to_pylist() == ["eu.a", "eu.a", "eu.b", "eu.b", "eu.c", "eu.b"]
    assert batch["publisher"].to_pylist() == [-(1 << 63)] * 6, "as Spark's long has it"
    assert batch["sequence"].to_pylist() == [1, 2, 4, 5, 6, 7]
    assert [stamp.isoformat() for stamp in batch["timestamp"].to_pylist()[:1]] == ["1970-01-01T00:00:01+00:00"]
    assert batch["headers"].to_pylist() == [[]] * 6
    assert len(taking.rows) == 0


def test_what_is_no_frame_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "roq.spark")
    good = data(b"t", 1, [b"1"])
    topic, header, body = parse(good)
    many = header._replace(count=1 << 31, sequence=2)
    with pytest.raises(FrameError):
        parse(b"t")
    taking = FrameRows((">",))
    taking.take(b"t")
    taking.take(encode_data(topic, many.publisher, 1, 2, 1, 0, [], 0))
    taking.take(good[: -len(body)] + b"\xc1")
    taking.take(good)
    assert taking.batch()["payload"].to_pylist() == [b"1"]
    assert sum("can't be read and is left out" in line for line in caplog.messages) == 3


def test_options() -> None:
    given_options = {"cluster": "zk1:2181,zk2:2181", "queue": "or/ders", "maxBytesPerTrigger": "5000000", "topics": " a.*, b "}
    with pytest.raises(PySparkException, match="is not allowed"):
        tape_options(given_options, "earliest")
    options = tape_options({**given_options, "queue": "orders"}, "earliest")
    assert (options.zookeeper, options.queue, options.topics) == ("zk1:2181,zk2:2181", "orders", ("a.*", "b"))
    assert (options.start, options.end, options.batch_entries, options.fail_on_loss) == ("earliest", "latest", 4, True)
    there = {"cluster": "zk", "queue": "orders"}
    for wrong, text in (
        ({"kind": "work-queue"}, "queue names a recorded queue; leave kind out"),
        ({"path": "orders"}, "names the queue already"),
        ({"queue": ""}, "is empty: name a recorded queue"),
        ({"startingPosition": "soon"}, "'soon' is none of earliest, latest, a time such as"),
        ({"endingPosition": "p1.?"}, "is none of earliest, latest"),
        ({"topics": "a.>.b"}, "filters with commas between"),
        ({"failOnDataLoss": "maybe"}, "neither true nor false"),
        ({"where": "price >"}, "where"),
        ({"maxEntriesPerTrigger": "0"}, "is not a whole number from 1"),
        ({"maxRowsPerBatch": "5"}, "is unknown; there are"),
    ):
        with pytest.raises(PySparkException, match=text):
            tape_options({**there, **wrong}, "earliest")
    position = TapePosition("0f", {"a": 1})
    options = tape_options({"address": "roq://zk/orders", "kind": "queue", "startingPosition": str(position)}, "latest")
    assert (options.zookeeper, options.queue, options.start, options.batch_entries) == ("zk", "orders", position, None)
    assert is_recorded({"queue": "x"})
    assert is_recorded({"kind": "QUEUE"})
    assert not is_recorded({"address": "log:///x"})

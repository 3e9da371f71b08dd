"""Recorded queues on the wire: how messages are kept, entries of tapes, positions, and what older and newer programs read."""

from __future__ import annotations

import base64
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.errors import FrameError, InvalidConfiguration, InvalidPosition
from roq.wire import gcm, zmtp
from roq.wire.assignment import ProcessKind, ProcessSpec, QueueRecord, QueueSettings, from_json, to_json
from roq.wire.frame import FrameKind, encode_bundle, encode_control, encode_data
from roq.wire.policy import Policy
from roq.wire.recording import (
    DAYS_MAX,
    Record,
    Recording,
    TapePosition,
    decode_entry,
    encode_entry,
    entry_time,
    messages_before,
    messages_in,
    tape_exchange,
    tape_log,
    tapes_of,
    tapes_prefix,
    with_before,
)

KEPT = Record(days=0.5, max_bytes=1 << 40, copies=3, ack=2)

# --- how messages are kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [Record(), Record(days=0), Record(days=DAYS_MAX), Record(copies=9, ack=9), Record(copies=1, ack=1), Record(ack=3), KEPT],
)
def test_records_that_are_possible(record: Record) -> None:
    assert record.check() is record


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Record(days=-1), "days are 0 .* got -1"),
        (Record(days=float("nan")), "got nan"),
        (Record(days=float("inf")), "got inf"),
        (Record(days=DAYS_MAX * 2), "to 100000, got 200000"),
        (Record(max_bytes=-1), "max_bytes is 0 .* got -1"),
        (Record(copies=-1), "copies are 0 to 9"),
        (Record(copies=10), "got 10, 0"),
        (Record(copies=2, ack=3), "ack not above them; got 2, 3"),
        (Record(ack=4), "got 0, 4"),
        (Record(ack=-1), "got 0, -1"),
    ],
)
def test_records_that_are_not(record: Record, reason: str) -> None:
    with pytest.raises(InvalidConfiguration, match=reason):
        record.check()


@pytest.mark.parametrize(
    ("record", "quorums"),
    [
        (Record(), [(1, 1), (1, 1), (2, 2), (3, 2), (3, 2)]),
        (Record(ack=1), [(1, 1), (1, 1), (2, 1), (3, 1), (3, 1)]),
        (Record(ack=3), [(3, 3)] * 5),
        (Record(copies=2), [(2, 2)] * 5),
        (Record(copies=5, ack=2), [(5, 2)] * 5),
        (Record(copies=9), [(9, 5)] * 5),
    ],
)
def test_copies_follow_the_stores_unless_they_are_chosen(record: Record, quorums: list[tuple[int, int]]) -> None:
    assert [record.quorums(stores) for stores in range(5)] == quorums


def test_tapes_are_named_after_one_creation_of_a_queue_and_their_exchange() -> None:
    tapes = tapes_of("orders", "t1")
    assert len({tapes, tapes_of("orders", "t2"), tapes_of("order", "st1"), tapes_of("bills", "t1")}) == 4
    log = tape_log(tapes, "0123456789abcdef")
    assert log == f"tape.{tapes}.0123456789abcdef"
    assert log.startswith(tapes_prefix(tapes))
    assert tape_exchange(log) == "0123456789abcdef"


# --- entries ----------------------------------------------------------------------------------------------------------

BODIES = st.lists(st.one_of(st.binary(max_size=20), st.integers(250, 260).map(bytes)), max_size=4)


@given(st.integers(0, (1 << 64) - 1), BODIES)
def test_an_entry_is_read_as_it_was_written_and_never_if_it_is_cut(time: int, bodies: list[bytes]) -> None:
    frames = [zmtp.frame(body) for body in bodies]
    entry = encode_entry(time, frames)
    assert encode_entry(time, [memoryview(b"".join(frames))]) == entry
    assert decode_entry(entry) == (time, bodies)
    assert entry_time(entry) == time
    whole = {17}
    for frame in frames:
        whole.add(max(whole) + len(frame))
    for end in range(len(entry)):
        if end in whole:
            assert decode_entry(entry[:end]).frames == bodies[: sorted(whole).index(end)]
            continue
        with pytest.raises(FrameError):
            decode_entry(entry[:end])


@given(st.binary(max_size=60))
def test_a_damaged_entry_is_a_frame_error_and_nothing_else(data: bytes) -> None:
    for entry in (data, b"\x01" + bytes(8) + data, b"\x02" + bytes(16) + data):
        try:
            assert 0 <= messages_in(entry) <= len(entry)
            time, frames = decode_entry(entry)
        except FrameError:
            continue
        assert time == entry_time(entry)
        assert sum(map(len, frames)) < len(entry)


def test_an_entry_of_a_newer_program_says_so() -> None:
    with pytest.raises(FrameError, match="version 3, known are 1 and 2: a newer program"):
        decode_entry(struct.pack("<BQ", 3, 7))
    with pytest.raises(FrameError, match="3 bytes"):
        entry_time(b"\x01\x00\x00")


def test_one_of_an_older_program_is_read_and_does_not_count() -> None:
    frame = zmtp.frame(encode_data(b"t", 1, 1, 1, 0, 0, [b"a", b"b"], 5))
    entry = struct.pack("<BQ", 1, 7) + frame
    assert decode_entry(entry) == (7, [frame[2:]])
    assert (entry_time(entry), messages_before(entry), messages_in(entry)) == (7, None, 2)
    assert with_before(entry, 9) == encode_entry(7, [frame], 9)


def test_messages_are_counted_by_what_their_frames_say() -> None:
    small, large = (encode_data(b"eu.paris", 1, 1, 1, 0, 0, [bytes(n)] * 3, 5) for n in (1, 1000))
    bundle = encode_bundle(1, 1, 9, [small, large], 5)
    control = encode_control(FrameKind.MARK, 1, 1, 9, 4, 5)
    liar = encode_data(b"t", 1, 1, 1, 0, 0, [b""], 5).replace(b"\x01\0\0\0", b"\xff\xff\xff\xff")
    entry = encode_entry(5, map(zmtp.frame, (small, control, large, bundle, b"", b"no frame", b"\xff", liar)), 40)
    assert messages_before(entry) == 40
    assert 12 < messages_in(entry) <= 12 + len(liar), "what a frame claims can't be more than its bytes"
    assert messages_in(encode_entry(5, map(zmtp.frame, (small, control, large, bundle, b"x")))) == 12


# --- positions --------------------------------------------------------------------------------------------------------


@given(
    st.text(max_size=20),
    st.dictionaries(st.text("0123456789abcdef"), st.integers(-1, 1 << 62)),
)
def test_a_position_is_kept_as_text(tapes: str, done: dict[str, int]) -> None:
    text = str(TapePosition(tapes, done))
    assert text.startswith("p1.")
    assert text.isascii()
    assert not {*text} & {*"=+/ \n"}
    assert TapePosition.parse(text) == TapePosition(tapes, done)


def packed(value: object) -> str:
    return "p1." + base64.urlsafe_b64encode(msgspec.msgpack.encode(value)).decode().rstrip("=")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "p1",
            "p1.",
            "p2." + str(TapePosition("t", {}))[3:],
            " " + str(TapePosition("t", {})),
            str(TapePosition("t", {})) + "\n",
        ),
        *(
            "p1.%%%",
            "p1.é",
            "p1.\ud800",
            "p1." + "A" * 1000,
            str(TapePosition("t", {"e": 1}))[:-1],
            packed(None),
            packed(["t"]),
        ),
        *(packed(["t", {"e": "1"}]), packed(["t", {"e": 1.5}]), packed(["t", {1: 1}]), packed([1, {}]), packed(["t", {}, 1])),
    ],
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidPosition, match="not a position of a recorded queue"):
        TapePosition.parse(text)


@given(st.text(max_size=40))
def test_any_other_text_is_refused_in_the_same_way(text: str) -> None:
    for one in (text, "p1." + text):
        with pytest.raises(InvalidPosition):
            TapePosition.parse(one)


# --- requests and records, of this program and of older ones ----------------------------------------------------------

TAPES = gcm.Tapes("t", KEPT, True, (gcm.TapeView("tape.t.e", "e", True, b'{"a":1}'),), {"h1": "tcp://10.0.0.1:7000"})
QUEUE = QueueRecord("q", QueueSettings(), True, "h1", 1, {"e": "h1"}, 7.0, "t", record=KEPT, recorded=True)


@pytest.mark.parametrize(
    "request_",
    [
        gcm.CreateQueue("q", "t", record=KEPT),
        gcm.CreateQueue("q", "t"),
        gcm.RecordQueue("q", KEPT, "t"),
        gcm.RecordQueue("q", None, "t"),
        gcm.DescribeTapes("q"),
    ],
)
def test_requests_come_as_they_were_sent(request_: gcm.Request) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=gcm.Request) == request_


@pytest.mark.parametrize("reply", [TAPES, gcm.QueueInfo(QUEUE, (), True, Policy())])
def test_replies_come_as_they_were_sent(reply: gcm.Reply) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=gcm.Reply) == reply


class OldCreateQueue(msgspec.Struct, frozen=True, tag="CreateQueue", array_like=True):
    """As it was before queues could be recorded."""

    name: str
    transaction: str
    settings: QueueSettings = QueueSettings()
    host: str = ""
    policy: Policy | None = None


def test_older_programs_and_newer_ones_understand_each_others_requests() -> None:
    old = OldCreateQueue("q", "t", QueueSettings(2), "h1")
    new = gcm.CreateQueue("q", "t", QueueSettings(2), "h1")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=gcm.Request) == new
    for record in (None, KEPT):
        data = msgspec.msgpack.encode(msgspec.structs.replace(new, record=record))
        assert msgspec.msgpack.decode(data, type=OldCreateQueue | gcm.RemoveQueue) == old
        newest = msgspec.msgpack.encode([*msgspec.msgpack.decode(data), {"of": "a later version"}])
        assert msgspec.msgpack.decode(newest, type=gcm.Request) == msgspec.structs.replace(new, record=record)


class OldQueueRecord(msgspec.Struct, frozen=True):
    """As it was before queues could be recorded."""

    name: str
    settings: QueueSettings
    running: bool
    monitor_host: str
    term: int
    exchanges: dict[str, str]
    created: float
    transaction: str = ""


def test_records_of_older_programs_are_of_queues_that_are_not_recorded() -> None:
    old = OldQueueRecord("q", QueueSettings(), True, "h1", 1, {"e": "h1"}, 7.0, "t")
    read = from_json(to_json(old), QueueRecord)
    assert (read.record, read.recorded, read.recording) == (None, False, None)
    assert msgspec.structs.replace(read, record=KEPT, recorded=True) == QUEUE
    assert from_json(to_json(QUEUE), OldQueueRecord) == old
    assert from_json(to_json(QUEUE), QueueRecord) == QUEUE


def test_an_exchange_is_told_how_its_queue_is_recorded() -> None:
    assert QUEUE.recording == Recording(KEPT, tapes_of("q", "t"), on=True)
    assert msgspec.structs.replace(QUEUE, recorded=False).recording == Recording(KEPT, tapes_of("q", "t"), on=False)
    spec = ProcessSpec(ProcessKind.EXCHANGE, "q", "e", recording=QUEUE.recording)
    assert from_json(to_json(spec), ProcessSpec) == spec
    assert b"recording" not in to_json(msgspec.structs.replace(spec, recording=None))


def test_a_position_is_of_one_queue() -> None:
    position = TapePosition("tapes", {"e": 1})
    position.check_queue("tapes")
    with pytest.raises(InvalidPosition, match=r"the position is of another queue, .*: take one of this queue"):
        position.check_queue("others")
    with pytest.raises(InvalidPosition, match=r"a checkpoint is of another queue, .*: begin with a new one"):
        position.check_queue("others", "a checkpoint", "begin with a new one")

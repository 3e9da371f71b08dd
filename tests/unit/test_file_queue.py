"""The pure parts of the file queue: names, histories, contents, and the choice of candidates."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roq.wire.headers import PRIORITIES
from roq.workqueue.file_queue import names
from roq.workqueue.file_queue.candidates import first
from roq.workqueue.file_queue.names import DATA, JSON, IdMaker, Name, Why

THEIRS = "6a1c5a3e-6a0e-4f57-9d2b-1f0a8f6b7c11"


def lines(*texts: str) -> list[Name]:
    """A history of one task, without the id."""
    return names.parse_history("".join(f"{text}--{THEIRS}.json\n" for text in texts).encode())


@given(st.sampled_from(Why), st.integers(1, 10**11), st.sampled_from([JSON, DATA]))
def test_a_name_is_read_as_it_was_written(why: Why, due: int, suffix: str) -> None:
    name = Name(why, due, THEIRS, suffix)
    assert names.parse(str(name)) == name
    assert int(str(name).split("--")[0]) == due, "python-task-queue reads it so"
    assert name.is_lease == (why is not Why.WAITING)


@pytest.mark.parametrize(
    "text",
    ["", "0", f"0--{THEIRS}", f"00--{THEIRS}.json", f"0001--{THEIRS}.json", f"-1--{THEIRS}.json", f"1--{THEIRS}.json\n",
     f"1--{THEIRS.upper()}.json", f"1--{THEIRS}.txt", f"1--../{THEIRS[3:]}.json", f"1--{THEIRS}--2.json",
     f"\u0661--{THEIRS}.json"],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    assert names.parse(text) is None


def test_attempts_are_leases_of_either_program() -> None:
    assert names.attempts(lines()) == 0
    assert names.attempts(lines("0")) == 0
    assert names.attempts(lines("0", "100")) == 1
    assert names.attempts(lines("0", "100", "0200", "0300")) == 1, "extensions are none"
    assert names.attempts(lines("0", "100", "0050", "150")) == 2, "nor is a release"
    assert names.attempts(lines("0", "100", "50", "150")) == 2, "nor python-task-queue's release"
    assert names.attempts(lines("0050", "100")) == 1, "put with a delay"


def test_history_passes_over_what_is_no_name() -> None:
    torn = f"\0\0junk\n0--{THEIRS}.json\n\xff\n100--{THEIRS}.js".encode("latin-1")
    assert names.parse_history(torn) == lines("0")


def test_an_unused_name_is_looked_for_in_the_given_direction() -> None:
    movement = f"0--{THEIRS}.json\n100--{THEIRS}.json\n101--{THEIRS}.json\n".encode()
    name = Name(Why.LEASED, 100, THEIRS, JSON)
    assert names.unused(name, movement, 1).due == 102
    assert names.unused(name, movement, -1).due == 99
    assert names.unused(name._replace(why=Why.EXTENDED), movement, 1).due == 100


@given(st.lists(st.integers(PRIORITIES.start, PRIORITIES.stop - 1), min_size=1, max_size=50), st.integers(0, 2**47))
def test_ids_carry_priority_and_time_and_sort(priorities: list[int], milliseconds: int) -> None:
    maker = IdMaker()
    ids = maker.make(milliseconds, priorities) + maker.make(milliseconds - 5, priorities)
    assert all(names.ID.fullmatch(id) for id in ids)
    assert [names.priority(id) for id in ids] == priorities * 2
    assert names.inserted_ms(ids[0]) == milliseconds
    by_name = sorted(ids, key=lambda id: names.order(f"0--{id}.json", ""))
    assert by_name == sorted(ids, key=lambda id: (-names.priority(id), ids.index(id)))


def test_more_ids_than_a_millisecond_has() -> None:
    ids = IdMaker().make(1000, [0] * 10_000)
    assert ids == sorted(set(ids))


def test_ids_of_others_have_no_priority_and_no_time() -> None:
    assert (names.priority(THEIRS), names.inserted_ms(THEIRS)) == (0, None)
    ours = IdMaker().make(2000, [1, 0, -1])
    texts = [f"0--{id}.json" for id in (*ours, THEIRS)]
    assert sorted(texts, key=lambda text: names.order(text, names.stamp(3000)))[2] == texts[3]


def test_listing_split_by_due_time() -> None:
    ready = [
        f"0--{THEIRS}.json",
        f"0--{THEIRS}.data",
        f"99--{THEIRS}.json",
        f"0000000100--{THEIRS}.json"[6:],
        f"100--{THEIRS}.json",
    ]
    later = [f"101--{THEIRS}.json", f"0101--{THEIRS}.json", f"00101--{THEIRS}.data", f"9999999999--{THEIRS}.json"]
    strange = ["", ".tmp", "0--x.json", f"x--{THEIRS}.json", f"5-{THEIRS}.json", f"5--{THEIRS}.text", f"²--{THEIRS}.json"]
    found = names.split_due(random.Random(1).sample([*ready, *later, *strange], 16), 100)
    assert (sorted(found[0]), sorted(found[1])) == (sorted(ready), sorted(later))


def test_the_first_of_many_are_all_of_the_smallest() -> None:
    chance = random.Random(2)
    texts = [f"{chance.random():.12f}" for _ in range(50_000)]
    found = first(texts, 5000, str)
    assert found == sorted(texts)[: len(found)]
    assert 4000 < len(found) < 6500
    assert first(texts, 50_000, str) == sorted(texts)
    assert len(first(["same"] * 50_000, 5000, str)) == 50_000


@pytest.mark.parametrize(
    ("payload", "suffix"),
    [
        (b'{"class": "A"}', JSON),
        (b'{ "x": [1, {"y": null}], "class":"A" }', JSON),
        (b'[["m", "f"], [1], {"k": 2}, -1]', JSON),
        (b'[["m", "f"], [], {}, null]', JSON),
        (b'{"class": ""}', DATA),
        (b'{"class": 1}', DATA),
        (b"{}", DATA),
        (b"[]", DATA),
        (b'[["m"], [], {}, 0]', DATA),
        (b'[["m", "f"], [], {}]', DATA),
        (b' {"class": "A"}', DATA),
        (b'{"class": "A"}\n', DATA),
        (b'{"class": "A", "x": NaN}', DATA),
        (b'{"class": "\xff"}', DATA),
        (b'{"class": "A"', DATA),
        (b"{" * 100_000 + b"}", DATA),
        (b'{"class": "A", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", DATA),
        (b"", DATA),
        (b"\x00", DATA),
    ],
)
def test_which_payloads_are_for_both_programs(payload: bytes, suffix: str) -> None:
    assert names.suffix(payload) == suffix
    data = names.encode(payload, suffix, THEIRS, "/queue \"'\n")
    assert names.decode(data, suffix) == payload
    if suffix == JSON:
        assert json.loads(data) == {"payload": json.loads(payload), "queueName": "/queue \"'\n", "id": THEIRS}


@given(st.binary(max_size=50))
def test_any_payload_comes_back_as_it_was(payload: bytes) -> None:
    suffix = names.suffix(payload)
    assert names.decode(names.encode(payload, suffix, THEIRS, "/q"), suffix) == payload


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b'{"payload": {"class": "A", "x": NaN}, "id": "i"}', b'{"class": "A", "x": NaN}'),
        (b'{"class": "A"}', b'{"class": "A"}'),
        (b'{"payload": ', None),
        (b"", None),
        (b"[1]", None),
        (b"\x00\x00\x00", None),
    ],
)
def test_contents_other_programs_leave(data: bytes, payload: bytes | None) -> None:
    assert names.decode(data, JSON) == payload


# --- checksums ----------------------------------------------------------------------------------------------------------

RUNNABLE = b'{"class": "A", "x": [1, 2, 3]}'
OURS = IdMaker().make(1_700_000_000_000, [3])[0]
OLD = names.unsealed(OURS)


@pytest.mark.parametrize("payload", [RUNNABLE, b"", b"\0" * 40, b"data"])
def test_whatever_happens_to_a_file_of_ours_it_is_not_taken_for_whole(payload: bytes) -> None:
    suffix = names.suffix(payload)
    data = names.encode(payload, suffix, OURS, "/q")
    assert names.decode(data, suffix, OURS) == payload
    flipped = [data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] for at in range(len(data)) for bit in (1, 0x20, 0x80)]
    cut = [data[:length] for length in range(len(data))]
    zeroed = [data[:at] + bytes(len(data) - at) for at in range(len(data)) if any(data[at:])]
    longer = [data + b"\0", data + data, data + b" "]
    for wrong in (*flipped, *cut, *zeroed, *longer):
        assert names.decode(wrong, suffix, OURS) is None


@pytest.mark.parametrize("payload", [RUNNABLE, b"data"])
def test_another_task_s_file_is_not_taken_for_this_one_s(payload: bytes) -> None:
    other = IdMaker().make(1_700_000_000_000, [3])[0]
    suffix = names.suffix(payload)
    assert names.decode(names.encode(payload, suffix, other, "/q"), suffix, OURS) is None


def test_files_of_0_1_have_no_checksum_and_are_read() -> None:
    assert names.is_sealed(OURS)
    assert not names.is_sealed(OLD)
    assert not names.is_sealed(THEIRS)
    old = b'{"payload": %s, "queueName": "/q", "id": "%s"}' % (RUNNABLE, OLD.encode())
    assert names.encode(RUNNABLE, JSON, OLD, "/q") == old
    assert names.decode(old, JSON, OLD) == RUNNABLE
    assert names.decode(b"data", DATA, OLD) == b"data"


def test_a_checksum_neither_moves_a_task_in_the_order_nor_changes_what_its_id_says() -> None:
    assert names.order(f"0--{OURS}.data", "") == names.order(f"0--{OLD}.data", "")
    assert (
        (names.priority(OURS), names.inserted_ms(OURS))
        == (names.priority(OLD), names.inserted_ms(OLD))
        == (3, 1_700_000_000_000)
    )


def test_python_task_queue_reads_a_file_with_a_checksum() -> None:
    found = json.loads(names.encode(RUNNABLE, JSON, OURS, "/q"))
    assert {key: found[key] for key in ("payload", "queueName", "id")} == {
        "payload": json.loads(RUNNABLE),
        "queueName": "/q",
        "id": OURS,
    }

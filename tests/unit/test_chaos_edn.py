"""The history as EDN: read back by a small reader of this test's own, and as Jepsen's tools expect it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roq.errors import InvalidConfiguration
from roq.tools.chaos.edn import EdnHistory, Keyword, OperationType, to_edn
from roq.tools.chaos.history import SubscriberHistory
from roq.tools.chaos.loads import write_event
from roq.tools.chaos.worker import WorkerEvent, WorkerEventKind
from tests.harness.documented import block
from tests.harness.edn import paired, read_edn, read_history

OK, FAIL, INFO = OperationType.OK, OperationType.FAIL, OperationType.INFO


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -17,
        2**80,
        0.5,
        "",
        'say "so"\\ \n\r\t\b\f\x00\x1f\x7f; {not} [a] #{form} é 漢',
        [1, [2, "x"], []],
        {"a": 1, 3: [4]},
        {},
        frozenset({1, 2}),
        {Keyword("type"): Keyword("ok")},
    ],
)
def test_what_is_written_is_read(value: object) -> None:
    text = to_edn(value)
    assert "\n" not in text
    assert read_edn(text) == value


def test_keywords_are_no_text() -> None:
    assert (to_edn(Keyword("ok")), to_edn("ok")) == (":ok", '"ok"')
    assert type(read_edn(":ok")) is Keyword
    assert to_edn({Keyword("f"): [1, None]}) == "{:f [1 nil]}"


def test_what_has_no_place_is_refused() -> None:
    for value in (b"bytes", object()):
        with pytest.raises(TypeError, match="no place"):
            to_edn(value)


def history(path: Path) -> list[dict[str, Any]]:
    written = EdnHistory(path)
    written.invoke("early", "enqueue", 0, 99.0)
    written.begin(100.0)
    written.complete("early", OK, 100.5)
    written.invoke("a", "enqueue", 1, 101.0)
    written.invoke("b", "lease", None, 100.9)  # heard of late: time does not go back
    written.complete("b", OK, 102.0, 1)
    written.complete("a", INFO, 102.5)
    written.invoke("a", "enqueue", 1, 103.0)
    written.fault("kill", ["host-1:store"], 103.5)
    written.complete("a", OK, 104.0)
    written.invoke("b", "dequeue", 1, 104.0)
    written.invoke("b", "lease", None, 105.0)  # it never came back from the ack
    written.complete("b", FAIL, 106.0)
    written.complete("b", FAIL, 106.0)  # of nothing
    written.invoke("c", "poll", None, 107.0)
    written.close()
    return read_history(path)


def test_a_history_is_one_that_jepsen_reads(tmp_path: Path) -> None:
    found = history(tmp_path / "history.edn")
    assert [one["index"] for one in found] == [*range(len(found))]
    times = [one["time"] for one in found]
    assert times == sorted(times)
    assert (times[0], times[1], times[2], times[3]) == (0, 500_000_000, 1_000_000_000, 1_000_000_000)
    assert all(set(one) == {"index", "time", "process", "type", "f", "value"} for one in found)
    pairs = paired(found)
    assert [(begun["f"], ended["type"], ended["value"]) for begun, ended in pairs] == [
        ("enqueue", "ok", 0),
        ("lease", "ok", 1),
        ("enqueue", "info", 1),
        ("enqueue", "ok", 1),
        ("dequeue", "info", 1),
        ("lease", "fail", None),
        ("poll", "info", None),
    ]
    faults = [one for one in found if one["process"] == "nemesis"]
    assert [(one["type"], one["f"], one["value"]) for one in faults] == [("info", "kill", ["host-1:store"])]


def test_who_does_not_know_goes_on_as_another_process(tmp_path: Path) -> None:
    processes = [begun["process"] for begun, _ in paired(history(tmp_path / "history.edn")) if begun["f"] == "enqueue"]
    assert len(set(processes)) == 3, "early, a, and a after its :info"


def test_a_worker_that_dies_leaves_what_it_did_unknown(tmp_path: Path) -> None:
    written = EdnHistory(tmp_path / "history.edn")
    written.begin(0.0)

    def events() -> Iterator[WorkerEvent]:
        about = ("", 0, 7, 1, 9.0, "", "id")
        yield WorkerEvent(WorkerEventKind.ASKS, "w.1", 1.0)
        yield WorkerEvent(WorkerEventKind.TOOK, "w.1", 1.5, *about)
        yield WorkerEvent(WorkerEventKind.SETTLES, "w.1", 2.0, "ack", *about[1:])
        yield WorkerEvent(WorkerEventKind.ENDED, "w.1", 3.0)
        yield WorkerEvent(WorkerEventKind.ASKS, "w.2", 4.0)
        yield WorkerEvent(WorkerEventKind.NOTHING, "w.2", 5.0)
        yield WorkerEvent(WorkerEventKind.ENDED, "w.2", 6.0)

    for event in events():
        write_event(written, event, messages=False)
    written.close()
    pairs = paired(read_history(tmp_path / "history.edn"))
    assert [(begun["f"], ended["type"], ended["value"]) for begun, ended in pairs] == [
        ("lease", "ok", 7),
        ("dequeue", "info", 7),
        ("lease", "fail", None),
    ]


def test_a_pairing_that_is_none_is_found() -> None:
    begun = {"index": 0, "time": 0, "process": 1, "type": "invoke", "f": "x", "value": None}
    for wrong in (
        [begun],
        [begun, {**begun, "index": 1}],
        [{**begun, "type": "ok"}],
        [begun, {**begun, "type": "ok", "f": "y"}],
        [begun, {**begun, "type": "info"}, {**begun, "index": 2}, {**begun, "type": "ok"}],
    ):
        with pytest.raises(AssertionError):
            paired(wrong)


def test_the_document_s_lines_are_such_a_history(tmp_path: Path) -> None:
    file = tmp_path / "shown.edn"
    file.write_text(block("docs/failure-kit.md", "The history, for other checkers"), encoding="utf-8")
    shown = read_history(file)
    assert [(begun["value"], ended["type"]) for begun, ended in paired(shown)] == [(12, "ok")]
    for one in shown:
        assert [*one] == ["index", "time", "process", "type", "f", "value"]


def test_without_a_file_nothing_is_written() -> None:
    nothing = EdnHistory(None)
    assert not nothing.written
    nothing.invoke("a", "x", object(), 1.0)
    nothing.complete("a", OK, 2.0)
    nothing.close()


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="--history-file"):
        EdnHistory(tmp_path / "missing" / "history.edn")


@pytest.mark.parametrize("lines", [1, 10_000], ids=["found when it is closed", "found on the way"])
def test_a_full_disk_ends_the_history_and_not_the_run(lines: int) -> None:
    written = EdnHistory(Path("/dev/full"))
    written.begin(0.0)
    for number in range(lines):
        written.invoke("a", "enqueue", number, 1.0)
    assert written.written is (lines == 1)
    written.close()
    assert "No space left on device" in written.failure
    assert "--history-file" in written.failure


def test_what_came_since_is_told_once() -> None:
    heard = SubscriberHistory(2)
    for publisher, number in ((0, 1), (0, 2), (1, 5)):
        heard.arrived(publisher, number)
    assert heard.news() == {0: [(1, 2)], 1: [(5, 5)]}
    assert heard.news() == {}
    for number in (3, 4, 9, 2):
        heard.arrived(0, number)
    assert heard.news() == {0: [(3, 4), (9, 9), (2, 2)]}
    heard.arrived(0, 9)
    heard.arrived(1, 6)
    assert heard.news() == {0: [(9, 9)], 1: [(6, 6)]}
    assert heard.news() == {}

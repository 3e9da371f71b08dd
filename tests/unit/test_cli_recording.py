"""Recorded queues from the shell: times and sizes as people write them, and what the cluster is asked for.

Not covered: a cluster that does it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from roq.cli import queue, recording
from roq.cli.main import app
from roq.cli.output import console
from roq.cli.quantities import byte_count, duration_seconds
from roq.cli.recording import days_of, kept_as, recorded_how
from roq.client.overview import QueueDetail, QueueRow, policy_tables, read_queue
from roq.wire.assignment import QueueRecord, QueueSettings
from roq.wire.gcm import QueueInfo
from roq.wire.policy import Policy
from roq.wire.recording import Record

FULL = Record(days=3, max_bytes=10_000_000_000, copies=2, ack=1)


def roq(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --- times and sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("30s", 30),
        ("90m", 5400),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1.5h", 5400),
        (" 7 d ", 604_800),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "7", "d", "7D", "7days", "-7d", "7d12h", "1e3d", "\u0667d", "off", "1,5h", ".5d", "7. d", "7d\n8d"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 90m or 7d"):
        duration_seconds(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(
            ("0", 0),
            ("500", 500),
            ("500B", 500),
            ("10KB", 10_000),
            ("10k", 10_000),
            ("10GB", 10_000_000_000),
            ("1.1 MB", 1_100_000),
        ),
        *(("1KiB", 1024), ("1 GiB", 1 << 30), ("2tib", 2 << 40), ("3T", 3_000_000_000_000), ("1mb", 1_000_000)),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "10Gb/s", "10 G B", "1e9", "10PB", "1KBi", "1_000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 10GB"):
        byte_count(text)


@pytest.mark.parametrize(("text", "days"), [("7d", 7), ("12h", 0.5), ("90m", 0.0625), ("forever", 0)])
def test_how_long_messages_are_kept(text: str, days: float) -> None:
    assert days_of(text) == days


def test_to_keep_nothing_is_not_to_record() -> None:
    with pytest.raises(typer.BadParameter, match=r"keeps nothing: `off` .* `forever`"):
        days_of("0d")
    assert kept_as(None, None, None, None) is None
    for options in (("1GB", None, None), (None, 2, None), (None, None, 0)):
        with pytest.raises(typer.BadParameter, match="need --record"):
            kept_as(None, *options)


@pytest.mark.parametrize(
    ("record", "recorded", "text"),
    [
        (Record(), True, "recorded: kept for 7 d, 3 copies as far as there are hosts"),
        (FULL, True, "recorded: kept for 3 d, at most 9.3 GiB, 2 copies, 1 of them before it counts"),
        (Record(days=0.5, copies=1), True, "recorded: kept for 12 h 0 min, 1 copy"),
        (Record(days=0), False, "recorded no longer, what was: kept for ever, 3 copies as far as there are hosts"),
    ],
)
def test_how_a_queue_is_recorded_in_words(record: Record, recorded: bool, text: str) -> None:
    assert recorded_how(record, recorded) == text


# --- what the cluster is asked for ------------------------------------------------------------------------------------


def info_of(record: Record | None, recorded: bool) -> QueueInfo:
    of = QueueRecord("q", QueueSettings(), True, "h1", 1, {"e": "h1"}, 7.0, "t", record=record, recorded=recorded)
    return QueueInfo(of, (), True, Policy())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The cluster that commands are connected to. It has a queue that is recorded as FULL says."""
    made = Mock(
        queue=AsyncMock(return_value=info_of(FULL, True)),
        queue_exists=AsyncMock(return_value=True),
        record_queue=AsyncMock(),
        create_queue=AsyncMock(return_value=info_of(FULL, False)),
    )

    def with_cluster(flag: str | None, work: Callable[[Any], Awaitable[object]]) -> object:
        body = work(made).__await__()  # nothing here waits
        try:
            next(body)
        except StopIteration as end:
            return end.value
        raise AssertionError("it waits")

    monkeypatch.setattr(recording, "with_cluster", with_cluster)
    monkeypatch.setattr(queue, "with_cluster", with_cluster)
    return made


@pytest.mark.parametrize(
    ("options", "record"),
    [
        ((), None),
        (("--record", "7d"), Record()),
        (("--record", "forever", "--copies", "2"), Record(days=0, copies=2)),
        (("--record", "12h", "--record-bytes", "10GB", "--copies", "3", "--ack", "1"), Record(0.5, 10_000_000_000, 3, 1)),
    ],
)
def test_a_queue_is_created_recorded(cluster: Mock, options: tuple[str, ...], record: Record | None) -> None:
    result = roq("queue", "create", "q", *options)
    assert result.exit_code == 0, result.stderr
    assert cluster.create_queue.await_args.kwargs["record"] == record
    assert ("q is recorded no longer: `roq queue record` changes it" in result.stderr) is (record is not None)


def test_a_created_queue_tells_programs_how_it_is_recorded(cluster: Mock) -> None:
    shown = json.loads(roq("queue", "create", "q", "--json").stdout)
    assert (shown["record"], shown["recorded"]) == ({"days": 3.0, "max_bytes": 10_000_000_000, "copies": 2, "ack": 1}, False)


@pytest.mark.parametrize(
    ("arguments", "former", "record", "said"),
    [
        (("7d",), None, Record(), "q is recorded: kept for 7 d, 3 copies as far as there are hosts\n"),
        (("7d",), FULL, Record(7, FULL.max_bytes, 2, 1), "q is recorded: kept for 7 d, at most 9.3 GiB, 2 copies, 1 of them"),
        (("12h", "--record-bytes", "0", "--copies", "0", "--ack", "0"), FULL, Record(0.5), "kept for 12 h 0 min, 3 copies"),
        (("off",), FULL, None, "q is recorded no longer\n"),
    ],
)
def test_recording_is_switched_on_and_off(
    cluster: Mock, arguments: tuple[str, ...], former: Record | None, record: Record | None, said: str
) -> None:
    cluster.queue.return_value = info_of(former, False)
    result = roq("queue", "record", "q", *arguments)
    assert result.exit_code == 0, result.stderr
    assert said in result.stderr
    assert result.stdout == ""
    cluster.record_queue.assert_awaited_once_with("q", record)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("record", "q"),
            ("record", "q", "0d"),
            ("record", "q", "sometimes"),
            ("record", "q", "7d", "--record-bytes", "much"),
        ),
        *(("record", "q", "off", "--copies", "2"), ("record", "q", "7d", "--copies", "-1"), ("create", "q", "--record", "7")),
        *(("create", "q", "--ack", "1"), ("create", "q", "--record-bytes", "1GB"), ("create", "q", "--record", "off")),
    ],
)
def test_a_wrong_call_asks_the_cluster_for_nothing(cluster: Mock, arguments: tuple[str, ...]) -> None:
    assert roq("queue", *arguments).exit_code == 2
    assert not cluster.mock_calls


# --- shown ------------------------------------------------------------------------------------------------------------


def shown(record: Record | None, recorded: bool) -> str:
    row = QueueRow("q", True, True, 1, "drop", "h1", 1)
    detail = QueueDetail(row, 1024, 7.0, 1, (), (), (), (), policy_tables(Policy()), {}, record, recorded)
    out: Console = console()
    with out.capture() as said:
        out.print(queue.detail_tables(detail))
    return said.get()


def test_a_queue_shows_how_it_is_recorded_if_it_ever_was() -> None:
    assert "\nrecorded: kept for 3 d, at most 9.3 GiB, 2 copies, 1 of them before it counts\n" in shown(FULL, True)
    assert "\nrecorded no longer, what was: kept for 3 d" in shown(FULL, False)
    assert "recorded" not in shown(None, False)


async def test_a_queues_detail_has_it_for_programs() -> None:
    for record, recorded in ((FULL, True), (FULL, False), (None, False)):
        detail = await read_queue(Mock(queue=AsyncMock(return_value=info_of(record, recorded))), "q")
        assert (detail.record, detail.recorded) == (record, recorded)

"""What was recorded, from the shell: where to begin, what is told of losses and tapes.

Not covered: a cluster that has it, see tests/integration/test_cli_recording.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from unittest.mock import Mock

import msgspec
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from roq.cli.main import app
from roq.cli.output import console
from roq.cli.pub_sub import MessageTally
from roq.cli.quantities import group_start, start_of
from roq.cli.tapes import TapeRow, tape_row, tape_table
from roq.errors import InvalidPosition, MessagesLost
from roq.log.replicated.metadata import Fragment, LogMeta, SegmentMetadata, SegmentState
from roq.wire.gcm import TapeView
from roq.wire.recording import TapePosition

POSITION = TapePosition("abc", {"e1": 7})
NOWHERE = "127.0.0.1:1"  # nothing listens there


@pytest.fixture
def calcutta(monkeypatch: pytest.MonkeyPatch) -> Iterator[timezone]:
    """Local time is that of India."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield timezone(timedelta(hours=5, minutes=30))
    time.tzset()


# --- where to begin ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", "earliest"),
        ("last", "last"),
        ("2h", timedelta(hours=2)),
        ("1.5d", timedelta(hours=36)),
        ("0s", timedelta()),
        ("2026-11-26T10:00Z", datetime(2026, 11, 26, 10, tzinfo=UTC)),
        ("2026-11-26 10:00:30.5+02:00", datetime(2026, 11, 26, 8, 0, 30, 500_000, tzinfo=UTC)),
        (str(POSITION), POSITION),
    ],
)
def test_where_to_begin(text: str, start: object) -> None:
    assert start_of(text) == start


def test_a_group_begins_with_all_that_follows() -> None:
    assert group_start("now") == "now"
    assert group_start("earliest") == "earliest"
    with pytest.raises(typer.BadParameter, match="a group gets everything"):
        group_start("last")


def test_a_time_is_local_unless_it_says_otherwise(calcutta: timezone) -> None:
    assert start_of("2026-11-26T10:00") == datetime(2026, 11, 26, 10, tzinfo=calcutta)
    assert start_of("2026-11-26") == datetime(2026, 11, 26, tzinfo=calcutta)
    assert start_of("2026-11-26T10:00+00:00") == datetime(2026, 11, 26, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "live",
        "sometime",
        "2",
        "2H",
        "-2h",
        "10:00",
        "2026",
        "2026-13-01",
        "26.11.2026",
        "9999999999d",
        "0001-01-01",
        "1e9w",
        "P1.x",
    ],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"earliest, .* 2h or 7d, .* 2026-11-26T10:00, or a position \(p1\.…\); got"):
        start_of(text)


def test_a_damaged_position_is_told_as_one() -> None:
    for text in ("p1.", "p1.xx", str(POSITION)[:-3], str(POSITION) + "!"):
        with pytest.raises(InvalidPosition, match="not a position"):
            start_of(text)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("sub", "q", "--start", "sometime"), 2),
        (("sub", "q", "--start", "p1.xx"), 1),
        (("queue", "read", "q", "--since", "live"), 2),
        (("queue", "read", "q", "--since", "p1.xx"), 1),
        (("pub", "q", "t", "--confirm", "written"), 2),
    ],
)
def test_a_wrong_call_does_not_look_for_the_cluster(arguments: tuple[str, ...], code: int) -> None:
    result = CliRunner().invoke(app, [*arguments, "-c", NOWHERE])
    assert result.exit_code == code
    assert "ZooKeeper" not in result.stderr


# --- what is told at the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "position", "said"),
    [
        ((), None, ["roq sub: received 5 messages, lost 0"]),
        (
            (MessagesLost(1, "t", 3, 4, 2),),
            POSITION,
            [
                "roq sub: MessagesLost: lost 2 messages within 3..4 of publisher 0000000000000001 on topic 't'",
                "roq sub: received 5 messages, lost 2",
                f"roq sub: go on with --start {POSITION}",
            ],
        ),
        (
            (MessagesLost(0, "", 1, 8, 0), MessagesLost(0, "", 3, 3, 0)),
            None,
            [
                "roq sub: MessagesLost: entries 1..8 of a tape had expired",
                "roq sub: MessagesLost: entries 3..3 of a tape had expired",
                "roq sub: received 5 messages, lost 0, entries that had expired 9",
            ],
        ),
    ],
)
def test_losses_and_where_to_go_on(
    losses: tuple[MessagesLost, ...], position: TapePosition | None, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tally = MessageTally("roq sub")
    for loss in losses:
        tally.lost(loss)
    tally.received = 5
    tally.tell("received", Mock(position=position), "--start")
    assert capsys.readouterr().err.splitlines() == said


# --- tapes ------------------------------------------------------------------------------------------------------------

CLOSED, OPEN = SegmentState.CLOSED, SegmentState.OPEN
OLD = SegmentMetadata("t~1", 11, CLOSED, (Fragment(11, ("a", "b")), Fragment(15, ("a", "c"))), 20, 1_700_000_000_500)
NEW = SegmentMetadata("t~2", 21, OPEN, (Fragment(21, ("a", "b")), Fragment(30, ("b", "c"))))


def row_of(*segments: SegmentMetadata, live: bool = True, trimmed: int = 10) -> TapeRow:
    meta = LogMeta(write_quorum=2, ack_quorum=1, trimmed=trimmed, segments=segments)
    return tape_row(TapeView("tape.abc.e1", "e1", live, msgspec.json.encode(meta)))


def test_a_tape_as_its_metadata_says() -> None:
    assert row_of(OLD, NEW) == TapeRow(
        *("e1", "tape.abc.e1", "live", 2, 11, None, 2, 1), hosts=("b", "c"), oldest_closed=1_700_000_000.5
    )
    ended = row_of(OLD, live=False)
    assert (ended.state, ended.first, ended.last, ended.hosts) == ("ended", 11, 20, ("a", "c"))
    unfinished = row_of(NEW, live=False)
    assert (unfinished.state, unfinished.first, unfinished.last, unfinished.oldest_closed) == ("ending", 21, None, None)
    empty = row_of()
    assert (empty.segments, empty.first, empty.last, empty.hosts, empty.oldest_closed) == (0, 11, 10, (), None)
    unknown = row_of(msgspec.structs.replace(OLD, closed_at=0), live=False)
    assert unknown.oldest_closed is None, "version 0.1 does not note it"


def test_tapes_for_people(calcutta: timezone) -> None:
    out: Console = console()
    with out.capture() as said:
        out.print(tape_table([row_of(OLD, NEW), row_of(OLD, live=False), row_of(NEW, live=False), row_of(trimmed=0)]))
    title, head, *rows = (" ".join(line.split()) for line in said.get().splitlines())
    assert (title, head) == ("Tapes", "EXCHANGE STATE SEGMENTS ENTRIES COPIES HOSTS OLDEST CLOSED")
    assert rows == [
        "e1 live 2 11.. 2 b, c 2023-11-15 03:43:20",
        "e1 ended 1 11..20 2 a, c 2023-11-15 03:43:20",
        "e1 ending 1 21.. 2 b, c -",
        "e1 live 0 - 2 -",
    ]

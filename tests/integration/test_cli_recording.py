"""A recorded queue from the shell: written, read, read on, recorded no longer. Real commands, a real cluster.

Not covered: how texts are read (tests/unit/test_cli_tapes.py), and what becomes of tapes when hosts fail.
"""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.integration.running import RunningCluster
from tests.integration.test_cli import COMMAND_SECONDS, Cli, end, hears, line_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def cli(cluster: RunningCluster) -> Cli:
    return Cli(cluster.zookeeper)


@pytest.fixture
def recorded(cli: Cli) -> Iterator[str]:
    """A queue with three messages on topic a.b and two on c."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    cli.run("queue", "create", name, "--record", "1d", "--copies", "2")
    assert stored(cli, name, "a.b", b"one\ntwo\nthree\n") == {"published": 3, "dropped": 0, "copies": 2}
    assert stored(cli, name, "c", b"four\n\xff\n")["published"] == 2
    yield name
    cli.run("queue", "rm", name)


def stored(cli: Cli, queue: str, topic: str, lines: bytes) -> dict[str, int]:
    """What `roq pub` tells programs."""
    done = cli.run("pub", queue, topic, "--confirm", "stored", "--json", stdin=lines)
    assert done.stderr == b"roq pub: published %d messages, all stored on 2 stores\n" % lines.count(b"\n")
    return dict(json.loads(done.stdout))


def read(cli: Cli, queue: str, *arguments: str) -> tuple[bytes, str]:
    """What `roq queue read` prints, and the position with which it says to go on."""
    done = cli.run("queue", "read", queue, *arguments)
    summary, further = done.stderr.decode().splitlines()
    count = len(done.stdout.splitlines())
    assert summary == f"roq queue read: read {count} messages, lost 0"
    assert further.startswith("roq queue read: go on with --since p1.")
    return done.stdout, further.rpartition(" ")[2]


@pytest.mark.quick
def test_what_was_stored_is_read_and_read_on(cli: Cli, recorded: str) -> None:
    found, position = read(cli, recorded)
    assert found == b"one\ntwo\nthree\nfour\n\xff\n"
    assert read(cli, recorded, "--since", position)[0] == b""
    stored(cli, recorded, "c", b"six\n")
    assert read(cli, recorded, "--since", position)[0] == b"six\n"
    assert read(cli, recorded, "c", "--count", "2")[0] == b"four\n\xff\n"
    messages = [json.loads(line) for line in read(cli, recorded, "a.*", "c", "--json", "--since", "1h")[0].splitlines()]
    assert [message["topic"] for message in messages] == ["a.b"] * 3 + ["c"] * 3
    assert [message.get("payload") for message in messages] == ["one", "two", "three", "four", None, "six"]
    assert messages[4]["payload_base64"] == "/w=="
    assert read(cli, recorded, "--since", "0s")[0] == b""
    refused = cli.run("queue", "read", recorded, "--since", position[:-2], code=1).stderr
    assert refused.startswith(b"roq: InvalidPosition: ")


def test_what_was_stored_becomes_an_arrow_file_and_an_arrow_stream(cli: Cli, recorded: str, tmp_path: Path) -> None:
    place = tmp_path / "kept.arrow"
    done = cli.run("queue", "read", recorded, "--arrow", str(place), "--where", "topic != 'c' or size == 1")
    with pa.ipc.open_file(str(place)) as file:
        found = file.read_all()
    assert found.column("payload").to_pylist() == [b"one", b"two", b"three", b"\xff"]
    assert found.column("topic").to_pylist() == ["a.b"] * 3 + ["c"]
    told = done.stderr.decode().splitlines()
    assert told[0].startswith(f"roq queue read: wrote 4 messages into {place} (")
    position = told[1].removeprefix("roq queue read: go on with --since ")
    stored(cli, recorded, "c", b"six\n")
    streamed = cli.run("queue", "read", recorded, "c", "--since", position, "--arrow", "-")
    assert pa.ipc.open_stream(streamed.stdout).read_all().column("payload").to_pylist() == [b"six"]
    refused = cli.run("queue", "read", recorded, "--arrow", str(tmp_path / "nowhere" / "x"), code=1).stderr
    assert b"can't write" in refused
    assert list(tmp_path.iterdir()) == [place]


def test_sub_begins_in_the_past_and_goes_on_into_the_present(cli: Cli, recorded: str) -> None:
    with cli.started("sub", recorded, "--start", "earliest", "--count", "6") as sub:
        hears(sub.stdout, b"one\ntwo\nthree\nfour\n\xff\n")
        assert line_of(sub.stderr) == b"roq sub: ready\n"
        cli.run("pub", recorded, "c", stdin=b"six\n")
        received, said = end(sub)
    assert sub.returncode == 0
    assert received == b"six\n"
    summary, further = said.decode().splitlines()
    assert summary == "roq sub: received 6 messages, lost 0"
    assert further.startswith("roq sub: go on with --start p1.")
    again = cli.run("sub", recorded, "--start", further.rpartition(" ")[2], "--until-idle", "1").stdout
    assert again in (b"", b"six\n"), "what came last may come again, nothing before it"


def test_sub_begins_with_the_last_of_each_topic_and_goes_on_with_what_is_stored(cli: Cli, recorded: str) -> None:
    assert read(cli, recorded, "--since", "last")[0] == b"three\n\xff\n"
    with cli.started("sub", recorded, "--start", "last", "--stored", "--count", "3") as sub:
        hears(sub.stdout, b"three\n\xff\n")
        assert line_of(sub.stderr) == b"roq sub: ready\n"
        cli.run("pub", recorded, "c", stdin=b"six\n")
        received, said = end(sub)
    assert (sub.returncode, received) == (0, b"six\n")
    assert said.decode().splitlines()[0] == "roq sub: received 3 messages, lost 0"


def test_ctrl_c_ends_it_and_it_tells_where_to_go_on(cli: Cli, recorded: str) -> None:
    block = b"x" * 1000
    stored(cli, recorded, "c", (block + b"\n") * 10_000)
    with cli.started("queue", "read", recorded) as reading:  # what it prints is not read to the end, and a pipe takes a tenth
        hears(reading.stdout, block)
        reading.send_signal(signal.SIGINT)
        assert reading.wait(COMMAND_SECONDS) == 130
        assert reading.stderr is not None
        summary, further = reading.stderr.read().decode().splitlines()
    assert summary.startswith("roq queue read: read ")
    position = further.rpartition(" ")[2]
    assert read(cli, recorded, "--since", position)[0].endswith(block + b"\n")


def test_a_queue_that_is_recorded_no_longer_keeps_its_tapes(cli: Cli, recorded: str) -> None:
    (tape,) = cli.json("queue", "tapes", recorded)
    assert (tape["state"], tape["segments"], tape["first"], tape["last"]) == ("live", 1, 1, None)
    assert (tape["copies"], sorted(tape["hosts"]), tape["oldest_closed"]) == (2, ["host-1", "host-2"], None)
    cli.run("queue", "record", recorded, "off")
    refused = cli.run("pub", recorded, "t", "--confirm", "stored", stdin=b"x\n", code=1)
    assert refused.stderr.splitlines()[-1].startswith(b"roq: NotRecorded: ")
    assert cli.run("pub", recorded, "t", stdin=b"x\n").stderr == b"roq pub: published 1 messages\n"
    assert read(cli, recorded, "a", "c")[0] == b"one\ntwo\nthree\nfour\n\xff\n"
    shown = cli.run("queue", "tapes", recorded).stdout.decode().splitlines()
    assert shown[1].split() == ["EXCHANGE", "STATE", "SEGMENTS", "ENTRIES", "COPIES", "HOSTS", "OLDEST", "CLOSED"]
    assert shown[2].split()[:2] == [tape["exchange"][:8], "live"]


def test_a_queue_that_never_was_recorded_has_none(cli: Cli, queue: str) -> None:
    for arguments in (("queue", "read", queue), ("queue", "tapes", queue), ("sub", queue, "--start", "earliest")):
        said = cli.run(*arguments, code=1).stderr
        assert said.startswith(b"roq: NotRecorded: ")
        assert said.count(b"\n") == 1


def test_a_producer_goes_on_where_it_was(cli: Cli, recorded: str) -> None:
    """Line n of the input is message n: what was stored is skipped."""
    name = ("--producer", "loader")
    first = cli.run("pub", recorded, "d", *name, stdin=b"1\n2\n3\n")
    assert first.stderr == b"roq pub: published 3 messages, all stored on 2 stores\n"
    again = cli.run("pub", recorded, "d", *name, "--json", stdin=b"1\n2\n3\n4\n5\n")
    assert again.stderr.splitlines()[0] == b"roq pub: 3 lines of loader are stored, going on behind them"
    assert json.loads(again.stdout)["published"] == 2
    assert cli.run("queue", "read", recorded, "--topic", "none", "--topic", "d").stdout == b"1\n2\n3\n4\n5\n"
    (row,) = cli.json("queue", "producers", recorded)
    assert (row["name"], row["number"], row["closed"]) == ("loader", 5, True)
    cli.run("queue", "forget-producer", recorded, "loader")
    assert cli.json("queue", "producers", recorded) == []
    missing = cli.run("queue", "forget-producer", recorded, "loader", code=1)
    assert b"`roq queue producers` lists those there are" in missing.stderr

"""Groups of a recorded queue from the shell: made, taken from by `roq sub`, listed, looked into by `roq task`, removed.

Not covered: what members of programs do (test_groups.py).
"""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.workqueue.address import queue_address
from tests.harness.documented import block, run
from tests.integration.running import RunningCluster
from tests.integration.test_cli import Cli, end, hears, line_of
from tests.integration.test_documented import printed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def cli(cluster: RunningCluster) -> Cli:
    return Cli(cluster.zookeeper)


@pytest.fixture
def recorded(cli: Cli) -> Iterator[str]:
    """A queue with three messages on topic a.b and two on c."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    cli.run("queue", "create", name, "--record", "1d")
    for topic, lines in (("a.b", b"one\ntwo\nthree\n"), ("c", b"four\n\xff\n")):
        cli.run("pub", name, topic, "--confirm", "stored", stdin=lines)
    yield name
    cli.run("queue", "rm", name)


@pytest.mark.quick
def test_a_group_is_made_taken_from_listed_and_removed(cli: Cli, recorded: str) -> None:
    address = queue_address(cli.cluster, f"{recorded}@billing")
    made = cli.run("queue", "group", "create", recorded, "billing", "a.>", "--max-attempts", "3")
    assert made.stderr.decode() == f"created {recorded}@billing\nits address for `roq task`: {address}\n"
    again = cli.run("queue", "group", "create", recorded, "billing", "a.>", "--max-attempts", "3")
    assert again.stderr.startswith(f"{recorded}@billing exists already\n".encode())
    refused = cli.run("queue", "group", "create", recorded, "billing", "--order", "none", code=1).stderr.decode()
    assert refused.startswith("roq: WorkQueueConflict: group ")
    assert "order topic, not none, topics a.>, not >" in refused

    done = cli.run("sub", recorded, "--group", "billing", "-n", "2")
    assert (done.stdout, done.stderr) == (b"one\ntwo\n", b"roq sub: ready\nroq sub: acked 2 messages\n")
    done = cli.run("sub", recorded, "--group", "billing", "--until-idle", "1", "--json")
    (message,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (message["topic"], message["payload"], message["sequence"], message["attempt"]) == ("a.b", "three", 3, 1)
    assert len(message["publisher"]) == 16

    (row,) = cli.json("queue", "group", "ls", recorded)
    wanted: dict[str, Any] = {
        "queue": recorded,
        "group": "billing",
        "name": f"{recorded}@billing",
        "topics": ["a.>"],
        "order": "topic",
    }
    wanted |= {"start": "earliest", "where": "", "ready": True, "problem": "", "completed": 3, "oldest_seconds": None}
    wanted |= dict.fromkeys(("waiting", "delayed", "leased", "dead", "missed", "lag"), 0)
    assert {key: row[key] for key in wanted} == wanted
    assert cli.json("queue", "show", recorded)["groups"][0]["name"] == row["name"]
    shown = cli.run("queue", "show", recorded).stdout.decode()
    assert [line.split()[:4] for line in shown.splitlines() if line.startswith("billing")] == [
        ["billing", "a.>", "topic", "yes"]
    ]
    assert cli.json("task", "status", address)["status"]["completed"] == 3
    for everything in (cli.json("status"), cli.json("top", "-n", "1")):
        (found,) = [one for one in everything["work_queues"] if one["name"] == row["name"]]
        assert (found["queue"], found["ready"], found["completed"], found["lag"]) == (recorded, True, 3, 0)
    assert cli.json("task", "ls")[0]["address"] == address

    assert cli.run("queue", "group", "rm", recorded, "billing").stderr.decode() == f"removed {recorded}@billing\n"
    assert cli.json("queue", "group", "ls", recorded) == []
    gone = cli.run("task", "status", address, code=1).stderr.decode()
    assert (
        gone
        == f"roq: GroupNotFound: no group is named '{recorded}@billing' (`roq queue group ls` lists the groups of a queue)\n"
    )


def test_how_far_a_group_is_is_listed(cli: Cli, recorded: str) -> None:
    cli.run("queue", "group", "create", recorded, "slow")
    address = queue_address(cli.cluster, f"{recorded}@slow")
    with roq.blocking.open_queue(address) as queue:
        (one, *_) = queue.lease(60, count=5, wait_seconds=20)
        one.release(delay_seconds=60)
        listed = cli.json("queue", "group", "ls", recorded)
        (row,) = listed
        assert (row["waiting"], row["delayed"], row["oldest_seconds"] > 0) == (row["waiting"], 1, True)
        assert row["waiting"] + row["leased"] == 5
        head, line = cli.run("queue", "group", "ls", recorded).stdout.decode().splitlines()[1:]
        cells = dict(zip(head.split(), line.split(), strict=False))
        assert (cells["WAITING"], cells["DELAYED"], cells["MISSED"]) == (str(row["waiting"]), "1", "0")
        (line,) = [text for text in cli.run("status").stdout.decode().splitlines() if text.startswith(f"{recorded}@slow")]
        assert line.split()[2:4] == [str(row["waiting"]), str(row["leased"])]


def test_sub_makes_the_group_and_a_signal_gives_back_what_was_not_acked(cli: Cli, recorded: str) -> None:
    with cli.started("sub", recorded, "c", "--group", "late", "--start", "earliest") as process:
        assert line_of(process.stderr) == b"roq sub: ready\n"
        hears(process.stdout, b"four\n\xff\n")
        cli.run("pub", recorded, "c", "--confirm", "stored", stdin=b"six\n")
        hears(process.stdout, b"six\n")
        process.send_signal(signal.SIGINT)
        _, said = end(process)
    assert process.returncode == 130
    assert said == b"roq sub: acked 3 messages\n"
    (row,) = cli.json("queue", "group", "ls", recorded)
    assert (row["topics"], row["completed"], row["leased"], row["waiting"]) == (["c"], 3, 0, 0)


def test_sub_ends_quietly_when_its_reader_has_gone(cli: Cli, recorded: str) -> None:
    with cli.started("sub", recorded, "--group", "g") as process:
        assert line_of(process.stdout)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert b"roq sub: acked" in process.stderr.read()


def test_what_the_document_shows(cluster: RunningCluster, tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    commands = block("docs/groups.md", "Groups").replace("127.0.0.1:2181", cluster.zookeeper).splitlines()
    record, create, publish, follow, listed, status, letters, remove = commands
    try:
        printed(record, tmp_path, **here)
        assert "created orders@billing" in printed(f"{create} 2>&1", tmp_path, **here)
        assert "stored" in printed(f"{publish} 2>&1", tmp_path, **here)
        assert printed(follow, tmp_path, **here) == '{"price": 120}\n'
        assert "billing" in printed(listed, tmp_path, **here)
        assert "dead after 5 attempts" in printed(status, tmp_path, **here)
        assert "ERROR" in printed(letters, tmp_path, **here)
        assert "removed orders@billing" in printed(f"{remove} 2>&1", tmp_path, **here)
        source = block("docs/groups.md", "Groups", 2).replace("127.0.0.1:2181", cluster.zookeeper)
        assert run(source, tmp_path).splitlines() == [f"customer.{number % 3} {number} attempt 1" for number in range(10)]
    finally:
        printed("roq queue rm orders payments", tmp_path, **here)


def test_mistakes_are_told_in_one_line(cli: Cli, recorded: str) -> None:
    for arguments, told in (
        (("queue", "group", "create", recorded, "a@b"), "roq: InvalidName: 'a@b' can't name a group"),
        (("queue", "group", "create", "no-such-queue", "g"), "roq: QueueNotFound: "),
        (("queue", "group", "create", recorded, "g", "--where", "n >"), "roq: InvalidFilter: "),
        (("queue", "group", "ls", "no-such-queue"), "roq: QueueNotFound: "),
        (("queue", "group", "rm", recorded, "g"), "roq: GroupNotFound: "),
        (("task", "put", queue_address(cli.cluster, f"{recorded}@g"), "x"), "roq: GroupNotFound: "),
    ):
        said = cli.run(*arguments, code=1).stderr.decode()
        assert said.startswith(told), said
    assert b"where to begin is" in cli.run("queue", "group", "create", recorded, "g", "--start", "soon", code=2).stderr

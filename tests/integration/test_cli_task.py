"""Every `roq task` command as a real process, on folders; and a move while workers run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roq import blocking
from tests.harness import commands
from tests.integration.running import RunningCluster
from tests.integration.test_cli import COMMAND_SECONDS, ROOT, hears_ctrl_c, line_of
from tests.integration.workqueue_rig import new_address, removed_at_the_end

pytestmark = pytest.mark.timeout(90)


def task(*arguments: str, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
    done = commands.run("task", *arguments, stdin=stdin, timeout=COMMAND_SECONDS)
    assert done.returncode == code, (arguments, done.stdout[-2000:], done.stderr[-2000:])
    return done


def told(*arguments: str, code: int = 0) -> Any:
    return json.loads(task(*arguments, "--json", code=code).stdout)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "roq.cli", "task", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=hears_ctrl_c,  # noqa: PLW1509
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(params=["folder", "log"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A plain folder path, which means file:, and a log:."""
    return str(tmp_path / "tasks") if request.param == "folder" else f"log://{tmp_path}/tasks"


def test_tasks_go_through_the_shell(address: str) -> None:
    ids = task("put", address, stdin=b"one\ntwo\n\xff\xfe\nlast").stdout.decode().split()
    assert len(ids) == 4
    assert task("put", address, "--priority", "9", "urgent").stdout
    first = told("lease", address, "--seconds", "60")
    assert [(row["payload"], row["attempt"], row["priority"]) for row in first] == [({"text": "urgent"}, 1, 9)]
    task("ack", address, first[0]["token"])
    assert b"LeaseLost" in task("ack", address, first[0]["token"], code=1).stderr
    rows = told("lease", address, "--count", "10")
    assert [row["payload"] for row in rows] == [{"text": "one"}, {"text": "two"}, {"base64": "//4="}, {"text": "last"}]
    assert told("lease", address, code=1) == []
    new = task("extend", address, rows[0]["token"], "--seconds", "300").stdout.decode().strip()
    task("release", address, rows[1]["token"], "--error", "no disk", "--delay", "600")
    task("reject", address, rows[2]["token"], "--error", "bad bytes")
    status = told("status", address)["status"]
    assert [status[name] for name in ("ready", "delayed", "leased", "dead", "completed", "inserted")] == [0, 1, 2, 1, 1, 5]
    assert b"inserted" in task("status", address).stdout
    [delayed] = told("peek", address, "--state", "delayed")
    assert (delayed["error"], delayed["payload"]) == ("no disk", {"text": "two"})
    assert b"no disk" in task("peek", address, "--state", "delayed").stdout
    task("release-all", address)
    assert told("status", address)["status"]["ready"] == 3
    assert b"LeaseLost" in task("ack", address, new, code=1).stderr
    assert b"purge: 3" in task("purge", address).stderr


def test_headers_go_through_the_shell_and_move_along(address: str, tmp_path: Path) -> None:
    headers = {"content-type": "text/plain", "eq": "a=b"}
    task("put", address, "one", "two", "-H", "content-type=text/plain", "--header", "eq=a=b")
    assert [row["headers"] for row in told("peek", address)] == [headers] * 2
    [leased] = told("lease", address)
    assert leased["headers"] == headers
    task("reject", address, leased["token"], "--error", "bad")
    assert [row["headers"] for row in told("dead", "ls", address)] == [headers]
    other = f"file://{tmp_path / 'other'}"
    task("move", address, other)
    assert [(row["payload"], row["headers"]) for row in told("peek", other)] == [({"text": "two"}, headers)]
    assert b"NAME=TEXT" in task("put", address, "three", "-H", "wrong", code=1).stderr


@pytest.mark.quick
@pytest.mark.parametrize("work_address", ["roq"], indirect=True)
def test_a_cluster_s_queue_works_from_the_shell(work_address: str) -> None:
    assert b"WorkQueueNotFound" in task("status", work_address, code=1).stderr
    assert task("create", work_address, "--max-attempts", "7").stderr.startswith(b"created roq://")
    refused = task("create", work_address, "--max-attempts", "8", code=1).stderr.decode()
    assert "exists with max_attempts 7, not 8" in refused
    assert task("create", work_address, "--max-attempts", "7").stderr.startswith(b"exists already roq://")
    task("put", work_address, stdin=b"one\ntwo")
    [row] = told("lease", work_address)
    task("ack", work_address, row["token"])
    found = told("status", work_address)
    assert (found["status"]["ready"], found["status"]["completed"], found["settings"]["max_attempts"]) == (1, 1, 7)


def test_a_cluster_s_queues_are_listed_and_removed(cluster: RunningCluster) -> None:
    with removed_at_the_end(cluster, new_address("roq", cluster.zookeeper)) as address:
        name = address.rpartition("/")[2]
        task("create", address, "--max-attempts", "7")
        [row] = [row for row in told("ls", cluster.zookeeper) if row["name"] == name]
        assert (row["address"], row["ready"], row["copies"], row["settings"]["max_attempts"]) == (address, True, 2, 7)
        assert {row["master"], *row["standbys"]} == {"host-1", "host-2"}
        assert name.encode() in task("ls", cluster.zookeeper).stdout
        task("put", row["address"], "one")
        task("rm", address)
        assert name not in {row["name"] for row in told("ls", cluster.zookeeper)}
        assert b"WorkQueueNotFound" in task("rm", address, code=1).stderr


def test_a_folder_s_queue_is_removed_with_its_folder(address: str) -> None:
    task("put", address, "one")
    assert b"goes with its folder" in task("rm", address, code=1).stderr
    assert told("status", address)["status"]["ready"] == 1


def test_dead_letters_are_listed_requeued_and_removed(address: str) -> None:
    assert task("create", address, "--max-attempts", "1").stderr.startswith(b"created ")
    assert task("create", address, "--max-attempts", "1").stderr.startswith(b"exists already ")
    assert told("status", address)["settings"]["max_attempts"] == 1
    refused = task("create", address, "--max-attempts", "2", code=1).stderr
    assert b"WorkQueueConflict" in refused
    assert b"max_attempts 1, not 2" in refused
    ids = task("put", address, "a", "b").stdout.decode().split()
    for row in told("lease", address, "--count", "2"):
        task("release", address, row["token"], "--error", f"failed on {row['payload']['text']}\nTraceback")
    letters = told("dead", "ls", address)
    assert {letter["error"].split("\n")[0] for letter in letters} == {"failed on a", "failed on b"}
    assert b"failed on a" in task("dead", "ls", address).stdout
    task("dead", "requeue", address, ids[0])
    assert b"TaskNotFound" in task("dead", "requeue", address, ids[0], code=1).stderr
    task("dead", "rm", address, "--all")
    assert told("dead", "ls", address) == []
    assert told("status", address)["status"]["ready"] == 1
    task("dead", "rm", address, code=1)


@pytest.mark.quick
def test_wrong_calls_are_told_in_one_line(tmp_path: Path) -> None:
    for arguments, name in (
        (("status", str(tmp_path / "missing")), b"WorkQueueNotFound"),
        (("purge", str(tmp_path)), b"WorkQueueNotFound"),
        (("status", "redis://x"), b"InvalidAddress"),
        (("status", "file://relative"), b"InvalidAddress"),
        (("put", "memory:", "x"), b"InvalidAddress"),
        (("put", str(tmp_path / "q"), "--priority", "900", "x"), b"InvalidConfiguration"),
        (("put", str(tmp_path / "q"), "--delay", "-1", "x"), b"InvalidConfiguration"),
        (("move", str(tmp_path / "q"), f"file://{tmp_path}/q"), b"CallError"),
    ):
        said = task(*arguments, code=1).stderr
        assert name in said
        assert said.count(b"\n") == 1
    task("status", code=2)
    assert not (tmp_path / "missing").exists()


def test_watch_tells_progress_and_keeps_a_picture(address: str, tmp_path: Path) -> None:
    task("put", address, stdin=b"".join(b"%d\n" % number for number in range(40)))
    picture = tmp_path / "progress.svg"
    where = f"file://{address}" if address.startswith("/") else address
    with started("watch", address, "--json", "--every", "0.2", "--until-empty", "--svg", str(picture)) as watching:
        first = line_of(watching.stdout)  # it has begun
        with blocking.open_queue(where) as queue:
            for one in queue.leases(60, wait_seconds=0):
                time.sleep(0.02)
                one.ack()
            assert queue.status().completed == 40
        out, _ = watching.communicate(timeout=COMMAND_SECONDS)
        assert watching.returncode == 0
    lines = [json.loads(line) for line in (first, *out.splitlines())]
    assert lines[0]["status"]["inserted"] == 40
    assert lines[-1]["status"]["completed"] >= 39  # in a folder the last task is gone a moment before it is counted
    assert lines[-1]["pace"]["left"] == 0
    assert lines[-1]["pace"]["eta_seconds"] == 0
    assert max(line["pace"]["completed_per_second"] for line in lines) > 1
    drawn = ET.parse(picture).getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 5


def test_watch_tells_that_no_worker_takes_tasks(tmp_path: Path) -> None:
    folder = str(tmp_path / "tasks")
    task("put", folder, "one", "two")
    looks = ("watch", folder, "--every", "0.5", "--count", "6")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "roq.cli", "task", *looks]
    shown = subprocess.Popen(command, stdout=theirs, env=environment)
    os.close(theirs)
    lines = [json.loads(line) for line in task(*looks, "--json").stdout.splitlines()]
    picture = b""
    with contextlib.suppress(OSError):  # EIO: it has ended
        while part := os.read(ours, 65536):
            picture += part
    os.close(ours)
    assert shown.wait(COMMAND_SECONDS) == 0
    assert (lines[0]["pace"]["progress"], lines[0]["pace"]["eta_seconds"]) == ("measuring", None)
    assert (lines[-1]["pace"]["progress"], lines[-1]["pace"]["eta_seconds"]) == ("no worker", None)
    assert b"no worker takes tasks" in picture
    assert b"ends in" not in picture


@pytest.mark.parametrize("work_address", ["log", "file", "roq"], indirect=True)
def test_a_move_carries_all_tasks_while_workers_run(tmp_path: Path, work_address: str) -> None:
    source, target = f"file://{tmp_path}/from", work_address
    done: list[bytes] = []
    with blocking.open_queue(source) as giver, blocking.open_queue(target) as taker:
        payloads = [b"%d" % number for number in range(300)]
        giver.put_many(payloads[:280])
        giver.put(b"soon", delay_seconds=2.0, priority=7)
        [poison] = giver.lease(60, 1)
        poison.reject("poison")

        arrived = threading.Event()  # the first task, at the target

        def worker(queue: blocking.WorkQueue, wait_seconds: float) -> None:
            for number, one in enumerate(queue.leases(60, wait_seconds=wait_seconds)):
                if queue is giver and number == 50:  # else it may have done them all before the command has begun
                    assert arrived.wait(COMMAND_SECONDS)
                done.append(one.payload)
                time.sleep(0.005)
                one.ack()

        threads = [threading.Thread(target=worker, args=(queue, 6.0)) for queue in (giver, taker)]
        with started("move", source, target, "--json") as moving:
            threads[0].start()
            until = time.monotonic() + COMMAND_SECONDS
            while not taker.status().ready:
                assert time.monotonic() < until
                time.sleep(0.01)
            arrived.set()
            threads[1].start()
            giver.put_many(payloads[280:])  # while it is under way
            out, said = moving.communicate(timeout=COMMAND_SECONDS)
        for thread in threads:
            thread.join()
        assert moving.returncode == 0, said
        moved = json.loads(out)
        assert (moved["again"], moved["dead_left"]) == (0, 1)
        assert moved["moved"] > 0
        assert sorted(done) == sorted([*(payload for payload in payloads if payload != poison.payload), b"soon"])
        assert (giver.status().ready, giver.status().leased) == (0, 0)


@pytest.mark.parametrize("work_address", ["log", "file", "roq"], indirect=True)
def test_a_move_takes_the_settings_along_and_says_when_it_can_t(tmp_path: Path, work_address: str) -> None:
    source, target = str(tmp_path / "from"), work_address
    chosen = ("--max-attempts", "3", "--dedup-seconds", "7200", "--payload-bytes-max", "4096")
    task("create", source, *chosen)
    task("put", source, "one")
    assert task("move", source, target).stderr == b"roq task move: 1 task\n"
    kept = {"max_attempts": 3, "dedup_seconds": 7200.0, "payload_bytes_max": 4096}.items()
    assert told("status", target)["settings"].items() >= kept
    other = str(tmp_path / "other")
    task("put", other, "two")
    said = task("move", other, target).stderr.decode().splitlines()
    assert said[0].startswith("roq task move: TO keeps its settings: dead after 3 attempts, dedup keys kept 2 h 0 min")
    assert "; FROM has: tried for ever, dedup keys kept 5 min 0 s" in said[0]
    assert said[1:] == ["roq task move: 1 task"]
    assert told("status", target)["settings"].items() >= kept


def test_a_move_says_what_it_waits_for(tmp_path: Path) -> None:
    source, target = f"file://{tmp_path}/from", f"file://{tmp_path}/to"
    with blocking.open_queue(source) as giver:
        giver.put_many([b"one", b"two"])
        [held] = giver.lease(60, 1)
        with started("move", source, target) as moving:
            assert line_of(moving.stderr) == (
                b"roq task move: 1 task so far; waiting for 1 leased and 0 delayed ones "
                b"(if no worker holds them any more: `roq task release-all`)\n"
            )
            held.ack()
            assert moving.communicate(timeout=COMMAND_SECONDS) == (b"", b"roq task move: 1 task\n")


def test_a_queue_is_not_moved_to_itself_however_it_is_written(tmp_path: Path) -> None:
    task("put", f"{tmp_path}/one", "x")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for other in (f"file://{tmp_path}/one/", f"{tmp_path}/link", f"file://{tmp_path}/one?max_attempts=3"):
        assert b"are the same queue" in task("move", f"{tmp_path}/one", other, code=1).stderr


def test_a_killed_move_loses_nothing_and_the_next_one_repeats_nothing(tmp_path: Path) -> None:
    source, target = f"file://{tmp_path}/from", f"log://{tmp_path}/to"
    with blocking.open_queue(source) as giver, blocking.open_queue(target) as taker:
        ids = giver.put_many(b"%d" % number for number in range(2500))
        with started("move", source, target):
            deadline = time.monotonic() + COMMAND_SECONDS
            while taker.status().inserted < 10:
                assert time.monotonic() < deadline
        giver.release_all()  # rather than wait for its lease to end
        assert re.search(rb"move: \d+ tasks", task("move", source, target).stderr)
        assert taker.status().inserted == len(ids)
        assert giver.status().ready == 0


def test_a_following_move_goes_on_until_it_is_told_to_stop(tmp_path: Path) -> None:
    source, target = f"file://{tmp_path}/from", f"file://{tmp_path}/to"
    with blocking.open_queue(source) as giver, blocking.open_queue(target) as taker:
        with started("move", source, target, "--follow", "--json") as moving:
            for payload in (b"first", b"second"):
                giver.put(payload, priority=3)
                [carried] = taker.lease(60, 1, 15.0)
                assert (carried.payload, carried.priority) == (payload, 3)
                carried.ack()
            moving.send_signal(signal.SIGINT)
            out, _ = moving.communicate(timeout=COMMAND_SECONDS)
            assert moving.returncode == 0
        assert json.loads(out) == {"moved": 2, "again": 0, "dead_left": 0, "stopped": True}

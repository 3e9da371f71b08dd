"""`roq up` that is killed leaves nothing; `roq down` ends a cluster, also one that even its keeper could not end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roq.runtime.liveness import start_time
from roq.tools.local import leftovers, starter
from tests.harness.lives import outlive, running

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
NOBODY = 65534
pytestmark = pytest.mark.timeout(180)


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ROQ_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


def roq(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roq.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS, check=False)


@contextlib.contextmanager
def up(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any], str]]:
    """`roq up` in a directory: the process, what it tells to programs, and the mark of its cluster."""
    command = [sys.executable, "-m", "roq.cli", "up", "--dir", str(directory), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], SECONDS)[0]
        told = json.loads(process.stdout.readline())
        record = starter.read(directory)
        assert record is not None
        assert record.zookeeper == told["cluster"]
        assert leftovers.origins()[record.token, os.geteuid()][:2] == (str(directory), process.pid)
        yield process, told, record.token
    finally:
        process.kill()
        process.communicate()


def keeper(token: str) -> int:
    (pid,) = running(token)
    return pid


def test_a_killed_cluster_ends_with_its_grandchildren(tmp_path: Path) -> None:
    with up(tmp_path) as (process, told, token):
        assert roq("queue", "create", "-c", told["cluster"], "q").returncode == 0
        pids = {one.pid for one in leftovers.find(token)} | {keeper(token)}
        owners = {one.owner for one in leftovers.find(token)}
        assert owners == {"gcm-1", "host-1", "zookeeper"}
        assert len(pids) >= 1 + 1 + 1 + 2 + 3  # keeper, ZooKeeper, GCM, HCM and template, the queue's processes
        process.kill()
        assert outlive(pids, SECONDS) == set()
    assert f"pid {process.pid}, died: ended" in (tmp_path / "keeper.log").read_text()


@pytest.mark.quick
def test_down_stops_a_cluster_in_order_and_ends_an_orphan(tmp_path: Path) -> None:
    with up(tmp_path) as (process, told, token):
        pids = {one.pid for one in leftovers.find(token)} | {keeper(token)}
        done = roq("down", "--dir", str(tmp_path))
        assert done.stderr == f"stopped the cluster in {tmp_path}, no process left\n"
        assert done.returncode == 0
        assert process.wait(SECONDS) == 0
        assert outlive(pids, 0.0) == set()
    with up(tmp_path) as (process, told, token):
        os.kill(keeper(token), signal.SIGKILL)
        process.kill()
        process.wait()
        pids = {one.pid for one in leftovers.find(token)}
        assert {told["zookeeper_pid"], *told["pids"].values()} <= pids
        (found,) = [one for one in starter.clusters() if one.token == token]
        assert (found.orphan, found.address) == (True, told["cluster"])
        done = roq("down", "--dir", str(tmp_path), "--json")
        ended = json.loads(done.stdout)
        assert {"gcm-1", "host-1"} <= ended.pop("killed").keys()
        assert ended == {"stopped": True, "directory": str(tmp_path), "cluster": told["cluster"], "orphan": True}
        assert outlive(pids, 0.0) == set()
    done = roq("down", "--dir", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, f"no cluster runs in {tmp_path}\n")


def test_another_process_with_the_pid_of_the_starter_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        origin = leftovers.Origin(str(tmp_path), stranger.pid, 1, "roq up")
        assert starter.stop(starter.FoundCluster(origin, "0" * 16, "", orphan=False, user=os.geteuid())) == []
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    assert stranger.returncode == 0


@contextlib.contextmanager
def marked(token: str, origin: str, user: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A program that says to belong to a local cluster."""
    marks = {leftovers.MARK: f"{token}/gcm-1", leftovers.ORIGIN: origin}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=marks, user=user) as process:
        try:
            until = time.monotonic() + SECONDS  # exec lets us go on a moment before the new environment can be seen
            while leftovers.MARK.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes():
                assert time.monotonic() < until
                time.sleep(0.001)
            yield process
        finally:
            process.kill()


def seen(token: str) -> list[starter.FoundCluster]:
    return [one for one in starter.clusters() if one.token == token]


def test_marks_that_name_a_stranger_or_nothing_at_all_make_no_cluster(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        named = leftovers.Origin(str(tmp_path), other.pid, start_time(other.pid) or 0, "roq up")
        with marked(token, json.dumps(named)):
            assert seen(token) == []
        with marked(token, json.dumps(named._replace(pid=os.getpid(), started=start_time(os.getpid()) or 0))):
            assert [one.orphan for one in seen(token)] == [False]  # its own parent
        with marked(token, json.dumps(named._replace(started=1))):
            assert [one.orphan for one in seen(token)] == [True]
        for bad in ("", "{", "[1]", "{}", "7", "[" * 100_000, '["/", 1.5, 2, ""]', f'["/", {1 << 80}, 2, ""]'):
            with marked(token, bad):
                assert seen(token) == []
        with marked(token, json.dumps(["/\0\ud800", named.pid, 1, "roq up"])):
            assert [one.address for one in seen(token)] == [""]
        other.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the marks of others")
def test_root_does_to_another_users_processes_what_they_say_and_to_nobody_elses(tmp_path: Path) -> None:
    token, here = secrets.token_hex(8), os.getpid()
    mine = json.dumps(leftovers.Origin(str(tmp_path), here, start_time(here) or 0, "roq up"))
    with marked(token, mine, user=NOBODY):
        assert seen(token) == []  # the parent that it names is another user's
    orphan = json.dumps(leftovers.Origin(str(tmp_path), here, 1, "roq up"))
    with marked(token, orphan, user=NOBODY) as theirs, marked(token, mine) as ours:
        found = {one.user: one for one in seen(token)}
        assert {user: one.orphan for user, one in found.items()} == {0: False, NOBODY: True}
        assert theirs.poll() is None
        assert [one.pid for one in starter.stop(found[NOBODY])] == [theirs.pid]
        assert ours.poll() is None


def port_2181() -> socket.socket:
    """As soon as no other test's cluster has it."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_server(("127.0.0.1", 2181))
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_second_cluster_says_that_the_port_is_taken(tmp_path: Path) -> None:
    one, decoy = tmp_path / "one", tmp_path / "decoy" / "zoo.cfg"
    decoy.parent.mkdir()
    decoy.write_text("clientPort=2181\n")
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(
            subprocess.Popen(["sh", "-c", "read line", "sh", one / "zookeeper" / "zoo.cfg", decoy], stdin=subprocess.PIPE)
        )
        stack.callback(reader.kill)
        stack.enter_context(port_2181())
        process, _, _ = stack.enter_context(up(one))
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        assert line.startswith("port 2181 is taken by ")
        assert str(tmp_path) not in line
        assert reader.poll() is None  # it reads what ZooKeeper does, and is none

"""The local log between processes: order and group sync, kill -9 at any moment, wake-ups, forks, a really full disk, rights.

One process, damage and crashes of the machine: tests/unit/test_local_log.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roq.errors import Closed, InvalidAddress, StorageFull
from roq.log.local import LocalLog
from roq.testing.freezing import freeze
from tests.harness.other_users import let_others_in

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
SMALL = 64 * 1024

WRITER = """
import sys, threading
from pathlib import Path
from roq.log.local import LocalLog
folder, name, count, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
log = LocalLog(Path(folder))
def work(thread):
    for number in range(count):
        log.sync(log.append([f"{name} {thread} {number}".encode().ljust(60 + number % 90)]))
        sys.stdout.write(f"{name} {thread} {number}\\n")
        sys.stdout.flush()
workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
"""

WAITER = """
import sys
from pathlib import Path
from roq.log.local import LocalLog
log = LocalLog(Path(sys.argv[1]))
print("waits", flush=True)
after = log.end
while not log.wait(after, 30): pass
print(log.read(after)[0][1].decode(), flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def contents(log: LocalLog) -> list[str]:
    found: list[str] = []
    after = 0
    while entries := log.read(after):
        found += [entry.decode().rstrip() for _, entry in entries]
        after = entries[-1][0]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    LocalLog(folder, segment_bytes=SMALL).close()
    return folder


@pytest.mark.quick
def test_processes_and_threads_append_each_in_its_own_order(folder: Path) -> None:
    count, threads = 150, 3
    writers = [start(WRITER, folder, name, count, threads) for name in "abcd"]
    said = {line for writer in writers for line in writer.communicate(timeout=50)[0].splitlines()}
    log = LocalLog(folder)
    found = contents(log)
    assert len(found) == len(set(found)) == 4 * threads * count
    assert said == set(found)
    assert log.durable == log.end
    for name in "abcd":
        for thread in range(threads):
            numbers = [int(entry.split()[2]) for entry in found if entry.startswith(f"{name} {thread} ")]
            assert numbers == list(range(count))
    log.close()


def test_processes_killed_at_any_moment_lose_nothing_and_hold_up_nobody(folder: Path) -> None:
    dice = random.Random(7)
    began, number = time.monotonic(), 0
    running: dict[int, subprocess.Popen[str]] = {}
    acknowledged: set[str] = set()
    steady = start(WRITER, folder, "steady", 1500, 1)
    while time.monotonic() - began < 12:
        while len(running) < 3:
            number += 1
            running[number] = start(WRITER, folder, number, 100_000, 2)
        time.sleep(dice.uniform(0.1, 0.8))
        victim = running.pop(dice.choice(list(running)))
        victim.kill()
        lines = victim.communicate()[0].splitlines(keepends=True)  # the last may be cut
        acknowledged |= {line.strip() for line in lines if line.endswith("\n")}
    for victim in running.values():
        victim.kill()
        victim.communicate()
    said = steady.communicate(timeout=30)[0].splitlines()
    assert len(said) == 1500, "a process beside the killed ones was held up or failed"
    log = LocalLog(folder)
    found = contents(log)
    assert len(found) == len(set(found))
    assert len(acknowledged) > 100
    assert not {*said, *acknowledged} - set(found), "something acknowledged is gone"
    log.close()


def test_a_waiter_in_another_process_wakes_at_once_also_beside_a_killed_one(folder: Path) -> None:
    waiters = [start(WAITER, folder) for _ in range(3)]
    for waiter in waiters:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waits\n"
    time.sleep(0.3)
    waiters[0].kill()
    waiters[0].communicate()
    log = LocalLog(folder)
    began = time.monotonic()
    log.append([b"news"])
    assert [waiter.communicate(timeout=10)[0] for waiter in waiters[1:]] == ["news\n"] * 2
    assert time.monotonic() - began < 2, "they wake at once; ending a process takes most of this"
    log.close()


def test_a_forked_child_keeps_no_lock_of_its_parent(folder: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from roq.errors import Closed
from roq.log.local import LocalLog
from fcntl import flock, LOCK_EX
log = LocalLog(Path(sys.argv[1]))
flock(log._locks.append, LOCK_EX)
if os.fork() == 0:
    try:
        log.append([b"x"])
    except Closed:
        print("closed", flush=True)
    time.sleep(30)
time.sleep(30)
"""
    parent = start(script, folder)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "closed\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    log = LocalLog(folder)
    began = time.monotonic()
    log.append([b"free"])
    assert time.monotonic() - began < 1
    log.close()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    parent.stdout.close()


def test_a_stopped_process_between_its_calls_holds_up_nobody(folder: Path) -> None:
    stopped = start(WAITER, folder)
    assert stopped.stdout is not None
    stopped.stdout.readline()
    freeze(stopped.pid)
    assert len(start(WRITER, folder, "free", 50, 1).communicate(timeout=20)[0].splitlines()) == 50
    stopped.kill()
    stopped.communicate()


def test_a_really_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=False, capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        with pytest.raises(StorageFull):
            LocalLog(mount / "large")
        log = LocalLog(mount / "log", segment_bytes=SMALL)
        written = 0
        with contextlib.suppress(StorageFull):
            while written < 20_000:
                log.append([b"%d" % written * 20], keep_bytes=SMALL // 4)
                written += 1
        assert 15_000 > written > 2500, "at most two thirds are kept for a snapshot"
        log.sync(log.end)
        assert len(contents(log)) == written
        log.append([b"an acknowledgement"])
        other = LocalLog(mount / "log")
        other.snapshot(log.end, b"state")
        for number in range(1000):
            log.append([b"%d" % number * 20], keep_bytes=SMALL // 4)
        log.close()
        other.close()
        with pytest.raises(Closed):
            log.sync(log.end + 1)
    finally:
        subprocess.run(["umount", "--lazy", mount], check=False)


def test_a_folder_without_rights(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from roq.errors import InvalidAddress
from roq.log.local import LocalLog
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    LocalLog(Path(sys.argv[1]))
except InvalidAddress as error:
    print(error)
"""
    (tmp_path / "closed").mkdir(0o500)
    let_others_in(tmp_path)
    answer = start(script, tmp_path / "closed" / "log").communicate(timeout=20)[0]
    assert "Permission denied" in answer
    with pytest.raises(InvalidAddress):
        LocalLog(Path("/proc/version/log"))

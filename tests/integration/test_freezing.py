"""A frozen process does nothing any more, from when `freeze` returns on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq.testing.freezing import freeze

BUSY = """
import hashlib, threading
data = bytes(1 << 16)

def work():
    while True:
        hashlib.sha256(data).digest()  # without the GIL

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
work()
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ticks(pid: int) -> list[int]:
    """Processor time that each thread of a process has had, user and system."""
    found = [path.read_text().rpartition(")")[2].split() for path in sorted(Path(f"/proc/{pid}/task").glob("*/stat"))]
    return [int(fields[11]) + int(fields[12]) for fields in found]


def states(pid: int) -> set[str]:
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}


@pytest.mark.quick
def test_no_thread_runs_when_it_returns(busy: subprocess.Popen[str]) -> None:
    for _ in range(20):
        freeze(busy.pid)
        assert states(busy.pid) == {"T"}
        before = ticks(busy.pid)
        assert len(before) == 5
        os.sched_yield()
        assert ticks(busy.pid) == before
        os.kill(busy.pid, signal.SIGCONT)


def test_what_has_ended_stands_still_and_what_is_gone_is_told(busy: subprocess.Popen[str]) -> None:
    busy.kill()
    freeze(busy.pid)  # a zombie, until it is waited for
    busy.wait()
    with pytest.raises(ProcessLookupError):
        freeze(busy.pid)


def test_a_process_that_goes_on_is_told(busy: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roq.testing.freezing._stands_still", lambda pid: False)
    with pytest.raises(TimeoutError, match=f"process {busy.pid} is not stopped 0.05 s after SIGSTOP"):
        freeze(busy.pid, seconds=0.05)

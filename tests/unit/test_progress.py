"""A progress bar is for people: on a terminal, on standard error, and nowhere else."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import IO

import msgspec

from roq.wire.kpi import QueueKpi

PROGRAM = """
from roq.cli.progress import progressing
with progressing("saving") as told:
    for done in range(0, 101, 20):
        told("[red]orders", done, 100)
    told("unknown", 3, 0)
print("out")
"""
WAIT_SECONDS = 20.0


def on_a_terminal(*arguments: str, stdin: IO[bytes] | None = None) -> tuple[str, str]:
    """What a Python program prints, and what its terminal shows: standard error."""
    master, slave = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=slave, env=variables, check=True, timeout=WAIT_SECONDS
    )
    os.close(slave)
    shown = b""
    while select.select([master], [], [], 0.0)[0]:
        try:
            shown += os.read(master, 65536)
        except OSError:  # all is read
            break
    os.close(master)
    return done.stdout.decode(), shown.decode()


def test_on_a_terminal_it_is_shown_and_names_are_no_markup() -> None:
    printed, shown = on_a_terminal("-c", PROGRAM)
    assert printed == "out\n"
    assert "saving [red]orders" in shown
    assert "100/100" in shown


def test_elsewhere_nothing_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, timeout=WAIT_SECONDS)
    assert (done.stdout, done.stderr) == (b"out\n", b"")


def test_a_long_replay_says_how_far_it_is(tmp_path: Path) -> None:
    record, policy = tmp_path / "kpis.jsonl", tmp_path / "p.toml"
    kpi = QueueKpi("q", 1000.0, 1, 0.0, 0.0, 0.0, 0, (), (), (), ())
    record.write_bytes(b"\n".join(msgspec.json.encode(msgspec.structs.replace(kpi, time=1000.0 + n)) for n in range(4000)))
    policy.write_text("")
    printed, shown = on_a_terminal("-m", "roq.cli", "policy", "replay", str(record), "--policy", str(policy), "--json")
    assert "reading kpis.jsonl" in shown
    assert "\x1b" not in printed


def test_how_far_a_file_is_put_is_shown_beside_what_is_printed(tmp_path: Path) -> None:
    source, folder = tmp_path / "lines", f"file://{tmp_path}/tasks"
    source.write_bytes(b"".join(b"%060d\n" % number for number in range(2000)))
    with source.open("rb") as lines:
        printed, shown = on_a_terminal("-m", "roq.cli", "task", "put", folder, stdin=lines)
    assert len(printed.split()) == 2000, "the ids go where they always do"
    assert "\x1b" not in printed
    assert "putting the input (KiB)" in shown
    assert "119/119" in shown
    _, shown = on_a_terminal("-m", "roq.cli", "task", "put", folder, "one")
    assert "putting" not in shown


def test_nothing_runs_through_lines_that_are_printed_on_the_same_terminal() -> None:
    asked = "import sys; sys.stdout.isatty = lambda: True; from roq.cli.progress import *"
    _, shown = on_a_terminal("-c", f"{asked}\nwith progressing_beside('reading') as told: told('messages', 1, 2)")
    assert shown == ""

"""`python -m benchmarks.shuffle [speed|memory]`: both without an argument. Progress on stderr, Markdown tables on stdout."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.report import markdown
from benchmarks.shuffle.run import (
    MEMORY_COLUMNS,
    QUICK_ROWS,
    ROWS,
    SPEED_COLUMNS,
    memory,
    memory_rows,
    speed,
    speed_rows,
)


def tell(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Do what was asked, in a folder that is removed (below TMPDIR: it should be on a disk)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shuffle", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("speed", "memory", "all"), default="all")
    parser.add_argument("--runs", type=int, default=3, help="of each system, in turn (3)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"to sort ({ROWS:,})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows once; the numbers mean little")
    arguments = parser.parse_args()
    rows, runs = (QUICK_ROWS, 1) if arguments.quick else (arguments.rows, arguments.runs)
    where = Path(tempfile.mkdtemp(prefix="roq-shuffle-bench-"))
    try:
        if arguments.what in ("speed", "all"):
            before = os.getloadavg()[0]
            found = speed(where, rows, runs, tell)
            print(f"The machine's load average: {before:.1f} before, {os.getloadavg()[0]:.1f} after\n")
            print(markdown(SPEED_COLUMNS, speed_rows(found)))
        if arguments.what in ("memory", "all"):
            print(markdown(MEMORY_COLUMNS, memory_rows(memory(where, tell))))
    finally:
        shutil.rmtree(where, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Processes that write and read a shuffle keep within their memory, on data ten times as large, whatever the ranges' size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shuffle.data import KEY_BYTES, VALUE_BYTES
from benchmarks.shuffle.run import PROCESSES, sort

MIB = 1 << 20
BUDGET = 16 * MIB
ROWS = 10 * BUDGET // (KEY_BYTES + VALUE_BYTES)
SLACK = 12 * MIB  # whatever the budget: indices of files, code that is first used now, freed memory that is not given back


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranges", [64, 4], ids=["small ranges", "ranges five times the memory"])
def test_memory_is_bounded(tmp_path: Path, ranges: int) -> None:
    found = sort(tmp_path, [f"uniform:{ROWS}"] * PROCESSES, BUDGET, ROWS * PROCESSES, "-measured", ranges)
    grown = [peak - before for peak, before in zip(found.write_peaks + found.read_peaks, found.before, strict=True)]
    assert max(grown) <= BUDGET + SLACK, [f"{each / MIB:.0f} MiB" for each in grown]
    assert found.imbalance <= 1.15

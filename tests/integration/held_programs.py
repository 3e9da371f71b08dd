"""The trivial programs, of a template that gets ready only once the file named by HELD_UNTIL is there.

For the HCM's tests: `--process-module held_programs`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.integration.trivial_programs import PROGRAMS

__all__ = ["PROGRAMS"]

HELD_SECONDS = 60.0  # if the test that holds it is gone

_deadline = time.monotonic() + HELD_SECONDS
while not Path(os.environ["HELD_UNTIL"]).exists() and time.monotonic() < _deadline:
    time.sleep(0.01)

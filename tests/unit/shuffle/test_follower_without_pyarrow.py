"""Hosts without pyarrow: nothing that a store or the GCM loads needs it, and a follower says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WITHOUT = "import sys; sys.modules['pyarrow'] = sys.modules['numpy'] = None\n"


def run(program: str) -> str:
    """What it prints."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_a_host_and_the_gcm_load_is_free_of_it() -> None:
    found = run("import sys, hcm.programs, gcm.process; print([m for m in ('pyarrow', 'numpy') if m in sys.modules])")
    assert found == "[]"


def test_such_a_host_has_no_port_for_shuffles() -> None:
    program = "from hcm.machine import ROLES; from roq.wire.assignment import ProcessKind; print(ROLES[ProcessKind.STORE])"
    assert run(WITHOUT + program) == "('clients', 'control')"
    assert run(program) == "('clients', 'control', 'shuffle')"


def test_a_follower_says_what_to_install() -> None:
    program = """
from roq.errors import InvalidConfiguration
from roq.shuffle.node.splitter import splitter
try:
    splitter()
except InvalidConfiguration as error:
    print(error)
"""
    assert 'pip install "roq-messaging[shuffle]"' in run(WITHOUT + program)
    assert run(program) == ""

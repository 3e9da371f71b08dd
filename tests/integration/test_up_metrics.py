"""`roq up --with-metrics`: each host of a local cluster serves metrics, where the ready line says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
STOP_SECONDS = 30.0


def test_each_host_serves_where_the_ready_line_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "roq.cli", "up", "--hosts", "2", "--dir", str(tmp_path), "--with-metrics", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as up:
        try:
            assert up.stdout is not None
            ready = json.loads(up.stdout.readline())
            assert ready["metrics"].keys() == {"host-1", "host-2"}
            for host, place in ready["metrics"].items():
                with urllib.request.urlopen(f"http://{place}/metrics", timeout=10) as answer:
                    assert f'roq_hcm_info{{host="{host}"' in answer.read().decode()
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=STOP_SECONDS)
    assert up.returncode == 0

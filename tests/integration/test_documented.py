"""The commands and fragments of README.md and docs/work-queues.md run as they stand there, against a cluster of the tests'.

Not covered: whole programs (tests/interop) and Spark (tests/spark).
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import roq
from roq.cli import demo
from roq.tools.local import leftovers
from roq.tools.local.loopback import LoopbackSubnet
from tests.harness.cards import as_holder
from tests.harness.documented import ROOT, block, run
from tests.integration.running import RunningCluster
from tests.integration.workqueue_rig import new_address, removed_at_the_end

pytestmark = pytest.mark.timeout(120)
COMMAND_SECONDS = 60.0


def shell(line: str, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """One command of a document, started by a shell in which the environment is activated."""
    assert ";" not in line.partition("  #")[0], "the shell becomes the first command: nobody would run the second"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROQ_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pipe = subprocess.PIPE
    variables = {**kept, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=folder, env=variables, stdout=pipe, stderr=pipe)


def printed(line: str, folder: Path, **variables: str) -> str:
    """What it printed, when it has ended."""
    with shell(line, folder, variables) as process:
        try:
            output, errors = process.communicate(timeout=COMMAND_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, (line, errors.decode())
    return output.decode()


@contextmanager
def running(line: str, folder: Path, number: signal.Signals, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Started, and ended by this signal."""
    with shell(line, folder, variables) as process:
        try:
            yield process
            process.send_signal(number)
            process.communicate(timeout=COMMAND_SECONDS)
        finally:
            process.kill()


@pytest.mark.quick
def test_the_demo_is_as_told() -> None:
    assert f"a file of {demo.LINES:,} lines to {('no', 'one', 'two')[demo.SUBSCRIBERS]} subscribers" in block(
        "README.md", "Try it"
    )


async def test_a_cluster_is_started_by_hand(chroot: str, tmp_path: Path) -> None:
    subnet = LoopbackSubnet()
    text = block("docs/operations.md", "Start a cluster").replace("zk1:2181,zk2:2181,zk3:2181", chroot)
    replaced = {"10.0.0.1": subnet.address(1), "10.0.0.7": subnet.address(7), "/var/lib/roq": f"{tmp_path}"}
    for name, ours in replaced.items():
        assert name in text
        text = text.replace(name, ours)
    *first, manager, host = text.splitlines()
    settings = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    for line in first:
        printed(line, tmp_path, **settings)
    token = secrets.token_hex(8)
    ends_with_it = {**leftovers.mark(token, "host"), "ROQ_KEEP_CHILDREN": "false"}
    try:
        with running(manager, tmp_path, signal.SIGTERM), as_holder(tmp_path / "admin.card"):
            async with roq.connect(chroot, connect_seconds=COMMAND_SECONDS) as cluster:
                with running(host, tmp_path, signal.SIGTERM, **ends_with_it):
                    async with asyncio.timeout(COMMAND_SECONDS):
                        while [host.host for host in (await cluster.view()).hosts if host.alive] != ["host-7"]:
                            await asyncio.sleep(0.05)
    finally:
        subnet.close()
    assert leftovers.find(token) == []


@pytest.mark.quick
def test_a_host_would_be_installed(tmp_path: Path) -> None:
    (line,) = block("docs/operations.md", "Start a cluster", 2).splitlines()
    told = printed(f"{line.replace('--enable', '--dry-run')} --address 127.0.0.1", tmp_path)
    for text in (
        "roq-gcm.service",
        "roq-hcm.service",
        "/etc/roq/hcm.toml",
        'card = "/etc/roq/gcm.card"',
        'zookeeper = "zk1:2181,zk2:2181,zk3:2181',
    ):
        assert text in told


def test_a_worker_with_a_handler(tmp_path: Path) -> None:
    fragment = block("docs/work-queues.md", "Workers")
    program = f"""\
import asyncio, os, signal, roq

async def stop_when_done(queue):
    while (await queue.status()).completed < 3:
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

async def main():
    async with roq.open_queue("file:///tmp/tasks") as queue:
        await queue.put_many([b"1", b"2", b"3"])
        stopper = asyncio.create_task(stop_when_done(queue))
{textwrap.indent(fragment, " " * 8)}
        await stopper
        print((await queue.status()).completed)

asyncio.run(main())
"""
    assert run(program, tmp_path) == "3\n"


def test_tasks_from_the_shell(cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n")
    with removed_at_the_end(cluster, new_address("roq", cluster.zookeeper)) as other:
        text = block("docs/work-queues.md", "From the shell")
        for name, ours in {"/data/tasks": f"{tmp_path}/tasks", "roq://zk1:2181/tasks": other}.items():
            assert name in text
            text = text.replace(name, ours)
        put, watch, peek, dead, release, move = text.splitlines()
        assert len(printed(put, tmp_path).split()) == 3
        with running(watch, tmp_path, signal.SIGINT) as watching:
            assert watching.stdout is not None
            assert b'"ready":3' in watching.stdout.readline()
            assert (tmp_path / "progress.svg").read_text().startswith("<svg")
        with roq.blocking.open_queue(f"file://{tmp_path}/tasks") as queue:
            (lost, bad) = queue.lease(600, 2)
            bad.reject("ValueError: no")
        assert lost.id in printed(peek, tmp_path)
        assert "ValueError" in printed(dead, tmp_path)
        printed(release, tmp_path)
        printed(move, tmp_path)
        with roq.blocking.open_queue(other) as queue:
            assert queue.status().ready == 2


def test_policies_from_the_shell(cluster: RunningCluster, tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    init, create, change, show, default = block("docs/policies.md", "Scaling policies").splitlines()
    printed(init, tmp_path, **here)
    printed(create, tmp_path, **here)
    try:
        assert "policy" not in printed(change, tmp_path, **here)
        assert (tmp_path / "policy.toml").read_text() == block("docs/policies.md", "The file")
        assert "max_cpu_fraction = 0.8" in printed(show, tmp_path, **here)
        record, replay = block("docs/policies.md", "Trying one out").splitlines()
        recorded = tmp_path / "kpis.jsonl"
        with running(record, tmp_path, signal.SIGINT, **here):
            deadline = time.monotonic() + COMMAND_SECONDS
            while not (recorded.exists() and recorded.read_bytes().endswith(b"\n")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        (tmp_path / "stricter.toml").write_text("[bounds]\nmin_exchanges = 2\n")
        assert " decisions in " in printed(f"{replay} 2>&1", tmp_path, **here)
        printed(default, tmp_path, **here)
        assert "max_cpu_fraction = 0.8" not in printed(show, tmp_path, **here)
    finally:
        printed("roq queue rm orders", tmp_path, **here)


def test_requests_are_answered(cluster: RunningCluster, tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    create, serve, ask = block("docs/request-reply.md", "Requests").splitlines()
    printed(create, tmp_path, **here)
    try:
        with running(serve, tmp_path, signal.SIGTERM, **here) as serving:
            assert serving.stderr is not None
            assert serving.stderr.readline() == b"roq serve: ready\n"
            assert printed(ask, tmp_path, **here) == "120 for eu.paris\n\n"
        source = block("docs/request-reply.md", "Requests", 2).replace("127.0.0.1:2181", cluster.zookeeper)
        assert run(source, tmp_path).splitlines() == [
            "120 {'content-type': 'text/plain'}",
            "RequestFailed: no price for eu.rome",
            "NoResponder: nobody serves 'us.nyc' of queue 'prices'",
        ]
    finally:
        printed("roq queue rm prices", tmp_path, **here)


def test_a_queue_is_recorded(cluster: RunningCluster, tmp_path: Path) -> None:
    here = {"ROQ_CLUSTER": cluster.zookeeper}
    create, publish, follow, read, off = block("docs/recorded-queues.md", "Recorded queues").splitlines()
    printed(create, tmp_path, **here)
    try:
        assert "stored" in printed(f"{publish} 2>&1", tmp_path, **here)
        assert '{"price": 120}' in printed(f"{follow} --count 1", tmp_path, **here)
        (line,) = printed(read, tmp_path, **here).splitlines()
        assert json.loads(line)["topic"] == "eu.paris"
        assert "no longer" in printed(f"{off} 2>&1", tmp_path, **here)
        source = block("docs/recorded-queues.md", "Recorded queues", 2).replace("127.0.0.1:2181", cluster.zookeeper)
        assert run(source, tmp_path).splitlines() == ["stored on 2 stores at least", "1000 messages of the last two hours"]
    finally:
        printed("roq queue rm orders invoices", tmp_path, **here)

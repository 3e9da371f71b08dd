"""The harness itself: every operation demonstrably does what it says, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import roq
from roq.errors import CallError, DeadlineExceeded, HostNotFound, ProcessFailed, RoqError
from roq.testing import DockerCluster, NotPossible
from roq.testing.cluster import CLIENT, Cut
from roq.testing.docker_cluster import USER_ID
from roq.testing.engine import CLUSTER_LABEL, Engine
from tests.harness.hearing import all_pairs, hearing

CLUSTER = {"gcms": 2, "hcms": 2, "state_megabytes": 4, "session_seconds": 6.0}
HOUR = 3600.0
CONNECT = """python3 -c '
import socket
try:
    socket.create_connection(("{address}", {port}), 2)
    print("connected")
except OSError as error:
    print(type(error).__name__)
'"""
WRITE = "dd if=/dev/zero of=/var/lib/roq/more bs=1k count=1 && rm /var/lib/roq/more"


async def test_it_starts_whole_and_tells_what_runs(machines: DockerCluster, client: roq.Cluster) -> None:
    assert machines.machines() == ("zookeeper-1", "gcm-1", "gcm-2", "host-1", "host-2")
    assert await machines.leader() in machines.gcms
    await client.create_queue("told", host="host-1")
    info = await machines.wait_queue_ready("told")
    assert info.monitors[0].address == machines.address("host-1")
    names = {process.name.partition("/")[0] for process in await machines.processes("host-1")}
    assert names == {"roq-hcm", "roq-fork-server", "monitor", "scaling", "exchange"}
    assert await hearing(machines, machines.machines()) == all_pairs(machines.machines())


@pytest.mark.quick
async def test_kill_and_start_a_host(machines: DockerCluster) -> None:
    await machines.kill("host-2")
    view = await machines.wait_hosts(1)
    assert [host.host for host in view.hosts if host.alive] == ["host-1"]
    with pytest.raises(ProcessFailed):
        await machines.processes("host-2")
    await machines.start("host-2")
    await machines.wait_hosts(2)


async def test_stop_is_clean(machines: DockerCluster) -> None:
    begun = time.monotonic()
    await machines.stop("host-2")
    assert time.monotonic() - begun < 8, "TERM was not obeyed"
    assert "error" not in await machines.log("host-2", 5)
    await machines.start("host-2")
    await machines.wait_hosts(2)


async def test_killed_daemons_and_children_come_back(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("kept", host="host-1")
    before = {process.name: process.pid for process in await machines.processes("host-1")}
    assert await machines.kill_process("host-1", "roq-hcm") == before["roq-hcm"]
    assert (await machines.wait_process("host-1", "monitor/kept")).pid == before["monitor/kept"], "adopted"
    killed = await machines.kill_process("host-1", "monitor/kept")
    assert (await machines.wait_process("host-1", "monitor/kept", not_pid=killed)).restarts == 1
    with pytest.raises(ProcessFailed, match="no process nobody"):
        await machines.kill_process("host-1", "nobody")


async def test_pause_freezes_and_unpause_thaws(machines: DockerCluster) -> None:
    await machines.pause("host-1")
    with pytest.raises(RoqError):
        await machines.reported("host-1")
    await machines.unpause("host-1")
    assert await machines.wait_for(lambda: _answers(machines, "host-1"), "host-1 answers")


async def _answers(machines: DockerCluster, host: str) -> bool:
    await machines.reported(host)
    return True


@pytest.mark.long
async def test_partitions_cut_exactly_these_ways(machines: DockerCluster) -> None:
    everyone = machines.machines()
    await machines.partition_one_way("host-1", "host-2")
    assert await hearing(machines, everyone) == all_pairs(everyone) - {("host-1", "host-2")}
    await machines.partition("gcm-1", "host-1")
    cut = {("host-1", "host-2"), ("gcm-1", "host-1"), ("host-1", "gcm-1")}
    assert await hearing(machines, everyone) == all_pairs(everyone) - cut
    await machines.heal()
    half = {"gcm-2", "host-2"}
    await machines.partition_halves(half)
    others = set(everyone) - half
    assert await hearing(machines, everyone) == all_pairs(half) | all_pairs(others)
    await machines.heal()
    assert await hearing(machines, everyone) == all_pairs(everyone)


async def test_a_rejecting_partition_tells_both_sides_at_once(machines: DockerCluster) -> None:
    async def connecting(source: str) -> str:
        script = CONNECT.format(address=machines.address("host-2"), port=machines.hcm_port("host-2"))
        return (await machines.run(source, script)).strip()

    everyone = ("gcm-1", "host-1", "host-2")
    await machines.partition("host-1", "host-2")
    assert await connecting("host-1") == "TimeoutError"
    await machines.partition("host-1", "host-2", how=Cut.REJECT)
    left = all_pairs(everyone) - {("host-1", "host-2"), ("host-2", "host-1")}

    async def exactly() -> bool:  # a busy machine may not run all listeners at the same time
        return await hearing(machines, everyone) == left

    await machines.wait_for(exactly, "exactly this way is cut")
    assert (await connecting("host-1"), await connecting("gcm-1")) == ("ConnectionRefusedError", "connected")
    await machines.partition(CLIENT, "host-2", how=Cut.REJECT)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(machines.address("host-2"), machines.hcm_port("host-2"))
    await machines.heal()
    assert await connecting("host-1") == "connected"


async def test_a_rejecting_partition_breaks_what_is_connected(machines: DockerCluster) -> None:
    reader, writer = await asyncio.open_connection(machines.address("host-2"), machines.hcm_port("host-2"))
    await reader.read(1)  # the greeting has begun
    await machines.partition(CLIENT, "host-2", how=Cut.REJECT)
    writer.write(bytes(64))  # answered with a reset
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_what_a_script_prints_comes_whole_to_a_busy_program(machines: DockerCluster) -> None:
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            pass

    busy = [threading.Thread(target=compute) for _ in range(4)]
    for thread in busy:
        thread.start()
    try:
        told = await asyncio.gather(*(machines.run("host-1", "echo out; echo error >&2") for _ in range(40)))
    finally:
        over.set()
        for thread in busy:
            thread.join()
    assert [sorted(one.split()) for one in told] == [["error", "out"]] * 40
    with pytest.raises(ProcessFailed, match="exit code 3: told"):
        await machines.run("host-1", "echo told; exit 3")


async def test_a_daemon_gets_its_environment_once(machines: DockerCluster) -> None:
    async def variables() -> str:
        read = f"setpriv --reuid {USER_ID} --regid {USER_ID} --clear-groups cat /proc/$(pgrep -x roq-gcm)/environ"
        return (await machines.run("gcm-2", f"{read} | tr '\\0' '\\n' | grep ROQ_X || echo none")).strip()

    await machines.restart_daemon("gcm-2", ROQ_X_TEST="1")
    assert await variables() == "ROQ_X_TEST=1"
    await machines.kill_process("gcm-2", "roq-gcm")
    await machines.wait_for(lambda: _runs(machines, "gcm-2", "roq-gcm"), "gcm-2 runs again")
    assert await variables() == "none"


async def _runs(machines: DockerCluster, name: str, program: str) -> bool:
    return program in {process.name for process in await machines.processes(name)}


async def test_a_host_cut_off_from_zookeeper_only(machines: DockerCluster) -> None:
    await machines.partition_from_zookeeper("host-2")
    view = await machines.wait_hosts(1)
    assert [host.host for host in view.hosts if host.alive] == ["host-1"]
    assert ("host-2", "host-1") in await hearing(machines, ("host-1", "host-2"))
    assert await _answers(machines, "host-2")
    await machines.heal()
    await machines.wait_hosts(2)


async def test_partitions_hold_across_a_restart(machines: DockerCluster) -> None:
    await machines.partition("host-2", ("gcm-1", "gcm-2"))
    await machines.kill("host-2")
    await machines.start("host-2")
    assert not {("gcm-1", "host-2"), ("host-2", "gcm-1")} & await hearing(machines, ("gcm-1", "host-2"))


async def test_the_test_itself_can_be_cut_off(machines: DockerCluster) -> None:
    await machines.partition_one_way("host-1", CLIENT)
    with pytest.raises(RoqError):
        await machines.reported("host-1")
    await machines.heal()
    assert await machines.wait_for(lambda: _answers(machines, "host-1"), "host-1 answers")


async def test_delay(machines: DockerCluster) -> None:
    async def connected_seconds() -> float:
        begun = time.monotonic()
        _, writer = await asyncio.open_connection(machines.address("host-1"), machines.hcm_port("host-1"))
        writer.close()
        return time.monotonic() - begun

    await machines.delay("host-1", 150, 20)
    delayed = [await connected_seconds() for _ in range(5)]
    await machines.heal()
    assert 0.12 < min(delayed) < 0.5
    assert min([await connected_seconds() for _ in range(5)]) < 0.1


@pytest.mark.parametrize("offset", [HOUR, -HOUR])
async def test_a_moved_clock_moves_the_wall_time_only(machines: DockerCluster, client: roq.Cluster, offset: float) -> None:
    async def told() -> bool:
        lines = [line for line in (await machines.log("host-2", 5)).splitlines() if '"t"' in line]
        return bool(lines) and abs(json.loads(lines[-1])["t"] - time.time() - offset) < 60

    await machines.clock("host-2", offset)
    try:
        await machines.wait_for(told, "the log tells another time")
        await machines.wait_hosts(2)
        await client.create_queue("elsewhen", host="host-2")
        async with client.subscriber("elsewhen") as sub, client.publisher("elsewhen") as pub:
            await pub.publish("t", b"now")
            async with asyncio.timeout(10):
                assert (await anext(aiter(sub))).payload == b"now"
    finally:
        await machines.clock("host-2", 0)
    await machines.wait_queue_ready("elsewhen")


async def test_a_full_disk_lets_the_host_go_on(machines: DockerCluster, client: roq.Cluster) -> None:
    await client.create_queue("full", host="host-1")
    await machines.disk_full("host-1")
    with pytest.raises(ProcessFailed, match="No space left"):
        await machines.run("host-1", WRITE)
    async with client.subscriber("full") as sub, client.publisher("full") as pub:
        await pub.publish("t", b"still")
        async with asyncio.timeout(10):
            assert (await anext(aiter(sub))).payload == b"still"
    await machines.disk_free("host-1")
    await machines.run("host-1", WRITE)


async def test_a_host_may_have_a_part_of_a_processor(image: str) -> None:
    spin = "import time; began = time.process_time(); end = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    cluster = DockerCluster(image=image, gcms=1, hcms=1, host_cpus=0.2)
    async with cluster:
        told = await cluster.run("host-1", f"python3 -c '{spin}\nprint(time.process_time() - began)'")
        assert float(told) < 1.0, "2 s of a fifth of a processor, and a spare"
        told = await cluster.run("gcm-1", f"python3 -c '{spin}\nprint(time.process_time() - began)'")
        assert float(told) > 0.6, "only hosts are held"


async def test_a_full_disk_needs_a_small_one(image: str) -> None:
    cluster = DockerCluster(image=image)
    with pytest.raises(NotPossible, match="state_megabytes"):
        await cluster.disk_full("host-1")


async def test_mistakes_are_told(machines: DockerCluster) -> None:
    with pytest.raises(HostNotFound, match="not host-9"):
        await machines.kill("host-9")
    with pytest.raises(CallError):
        await machines.kill(CLIENT)
    with pytest.raises(NotPossible, match="no image"):
        await DockerCluster(image="roq:never-built").open()
    with pytest.raises(CallError):
        DockerCluster(zookeepers=2)
    with pytest.raises(DeadlineExceeded, match=r"5 hosts are alive; at last: no"):
        await machines.wait_hosts(5, timeout_seconds=3.0)


async def test_what_a_crashed_run_left_is_swept(image: str) -> None:
    code = (
        "import asyncio, sys\n"
        "from roq.testing import DockerCluster\n"
        "async def main():\n"
        "    cluster = DockerCluster(image=sys.argv[1], gcms=1, hcms=0)\n"
        "    await cluster.open()\n"
        "    print(cluster.token, cluster.address('gcm-1').rpartition('.')[0] + '.0', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", code, image, stdout=asyncio.subprocess.PIPE, env=here)
    assert run.stdout is not None
    async with asyncio.timeout(60):
        token, subnet = (await run.stdout.readline()).decode().split()
    engine = Engine()
    try:
        assert not [name for name in await engine.sweep() if token in name], "its owner lives"
        run.send_signal(signal.SIGKILL)
        await run.wait()
        await engine.sweep()
        async with asyncio.timeout(60):  # a neighbour's cluster sweeps when it starts, too: what it has begun is left to it
            while await engine.count(f"{CLUSTER_LABEL}={token}"):
                await asyncio.sleep(0.1)
            while subnet in await asyncio.to_thread(_routed):
                if f"{subnet}/24" in await engine.call(engine._subnets):
                    break  # the neighbour's by now
                await asyncio.sleep(0.1)
    finally:
        engine.close()


def _routed() -> set[str]:
    """What this machine has routes to. Not fib_trie: beside 198.18.1.0 and 198.18.2.0 that names 198.18.0.0, nobody's route."""
    table = Path("/proc/net/route").read_text().splitlines()[1:]
    return {socket.inet_ntoa(int(line.split()[1], 16).to_bytes(4, sys.byteorder)) for line in table}


async def test_three_zookeepers_bear_the_loss_of_any_one(image: str) -> None:
    cluster = DockerCluster(image=image, zookeepers=3, gcms=1, hcms=1, session_seconds=5.0)
    async with cluster, cluster.connect() as client:
        for lost in cluster.zookeepers:
            await cluster.kill(lost)
            await cluster.wait_leader()
            await client.create_queue(f"without-{lost}")
            await cluster.start(lost)
            await cluster.wait_for(partial(_serves, cluster, lost), f"{lost} serves again")
    engine = Engine()
    try:
        assert await engine.count(f"{CLUSTER_LABEL}={cluster.token}") == 0, "nothing is left"
    finally:
        engine.close()


async def _serves(cluster: DockerCluster, name: str) -> bool:
    try:
        reader, writer = await asyncio.open_connection(cluster.address(name), 2181)
        writer.write(b"srvr")
        answer = await reader.read()
        writer.close()
    except OSError:
        return False
    return b"Mode: leader" in answer or b"Mode: follower" in answer

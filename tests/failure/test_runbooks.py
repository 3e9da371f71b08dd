"""What docs/runbooks.md tells operators to do, done in containers under load: hosts and disks replaced one after the other,
hosts restarted as in an upgrade, an ensemble of ZooKeepers that grows. Nothing stored or put is lost.

Not covered: systemd (test_systemd.py), Compose (test_compose.py).
"""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import roq
from roq.errors import NotReady
from roq.log.replicated.metadata import LogMeta
from roq.testing import DockerCluster
from roq.tools.local.zookeeper import server_status
from roq.wire.assignment import from_json
from tests.failure.conftest import SESSION_SECONDS
from tests.failure.test_recorded import recorded
from tests.harness import commands
from tests.harness.task_scene import under_load
from tests.harness.traffic import Traffic

NO_QUICK_TEST = "each walks through minutes of an operator's work"
COPIES = 3
REPAIRED_SECONDS = 180.0  # a host is given up after 30 s, then what it had is copied
STATE_MEGABYTES = 800
PATIENT_SECONDS = 12.0  # an election of ZooKeepers on two busy cores, twice
POD_BYTE = 71  # last byte of its first address
MEMBERS = "/var/lib/zookeeper/members"  # docker/test/scripts/zookeeper

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]


def command(*arguments: str, code: int = 0) -> str:
    """What `roq …` says."""
    done = commands.run(*arguments, timeout=60.0)
    assert done.returncode == code, (done.stdout + done.stderr).decode()
    return (done.stdout + done.stderr).decode()


async def healthy(machines: DockerCluster, *subjects: str) -> bool:
    """`roq doctor` finds everything good about these."""
    done = await asyncio.to_thread(commands.run, "doctor", "--json", "-c", machines.zookeeper, timeout=90.0)
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    about = [each for each in found if each["subject"].startswith(subjects)]
    if about and all(each["verdict"] == "good" for each in about):
        return True
    raise NotReady("; ".join(each["found"] for each in about if each["verdict"] != "good"))


async def missed(client: roq.Cluster, host: str) -> bool:
    """Its session has ended: until then everybody, doctor too, takes it for alive."""
    return host not in {one.host for one in await client.hosts() if one.alive}


async def made_up_for(machines: DockerCluster, client: roq.Cluster, queue: str) -> None:
    """Living hosts have all copies of what is on a queue's tapes: what doctor says is so."""
    metas = {view.exchange: from_json(view.meta, LogMeta) for view in (await client.tapes(queue)).views}
    parts = {name: [part for segment in meta.segments for part in segment.fragments] for name, meta in metas.items()}
    assert all(len(part.nodes) == COPIES and set(part.nodes) <= set(machines.hosts) for each in parts.values() for part in each)


async def test_hosts_are_replaced_one_after_the_other(image: str, tmp_path: Path) -> None:
    """Two of three, with their disks: had the first not been made up for, the second would have taken the last copies."""
    machines = DockerCluster(image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, logs=tmp_path)
    async with machines, machines.connect() as client, recorded(client) as load:
        for gone in machines.hosts[:2]:
            await machines.remove_host(gone)
            await machines.wait_for(functools.partial(missed, client, gone), f"{gone} is missed", SESSION_SECONDS + 10.0)
            await machines.add_host()
            await machines.wait_hosts(3)
            await load.flowing()
            await machines.wait_for(
                lambda: healthy(machines, "Copies"), f"all copies of {gone} are elsewhere", REPAIRED_SECONDS
            )
            await made_up_for(machines, client, load.queue)
        await load.flowing()


async def test_disks_are_replaced_one_after_the_other(image: str, tmp_path: Path) -> None:
    """All three, under the same names: nothing is left that was not copied."""
    machines = DockerCluster(
        image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, state_megabytes=STATE_MEGABYTES, logs=tmp_path
    )
    async with machines, machines.connect() as client, under_load(machines, client) as scene:
        for host in machines.hosts:
            await machines.wait_for(lambda: healthy(machines, "Copies"), "all copies are there", REPAIRED_SECONDS)
            arguments = ("host", "new-disk", host, "-c", machines.zookeeper)
            assert f"host {host} is up" in await asyncio.to_thread(command, *arguments, code=1)
            await machines.stop(host)
            await scene.flowing()
            assert "may start with an empty disk" in await asyncio.to_thread(command, *arguments)
            await machines.start(host)  # with what is in memory gone
            await machines.wait_hosts(3)
            await machines.wait_process(host, "store")
        await machines.wait_for(lambda: healthy(machines, "Copies"), "all copies are there", REPAIRED_SECONDS)
        await scene.judge("all disks replaced")


async def test_a_store_refuses_an_empty_disk_that_nobody_announced(image: str, tmp_path: Path) -> None:
    """A disk that is not mounted looks like that. The host says so, the others go on."""
    machines = DockerCluster(
        image=image, gcms=1, hcms=3, session_seconds=SESSION_SECONDS, state_megabytes=STATE_MEGABYTES, logs=tmp_path
    )
    async with machines, machines.connect() as client, under_load(machines, client) as scene:
        host = machines.hosts[-1]
        await machines.stop(host)
        await machines.start(host)

        async def refused() -> bool:
            return f"roq host new-disk {host}" in await machines.log(host, lines=200)

        await machines.wait_for(refused, "the store says what to do")
        await scene.flowing()
        await machines.stop(host)
        await asyncio.to_thread(command, "host", "new-disk", host, "-c", machines.zookeeper)
        await machines.start(host)
        await machines.wait_hosts(3)
        await machines.wait_process(host, "store")
        await scene.judge("an empty disk")


async def test_hosts_are_restarted_one_after_the_other(image: str, tmp_path: Path) -> None:
    """As for an upgrade. Each is stopped in order, comes back, and all is well before the next."""
    machines = DockerCluster(image=image, gcms=2, hcms=3, session_seconds=SESSION_SECONDS, logs=tmp_path)
    async with machines, machines.connect() as client, recorded(client) as load:
        await client.create_queue("live", overflow="block", replication=2)
        async with Traffic(client, "live") as traffic:
            for host in machines.hosts:
                await machines.wait_for(lambda: healthy(machines, "Hosts", "Queues"), "all is well", REPAIRED_SECONDS)
                await machines.stop(host)
                await traffic.flowing()
                await machines.start(host)
                await machines.wait_hosts(3)
                await load.flowing()
            leader = await machines.leader()
            for gcm in sorted(machines.gcms, key=lambda name: name == leader):
                await machines.stop(gcm)
                await machines.start(gcm)
                await machines.wait_leader()
            await traffic.flowing()
        assert traffic.received == list(range(1, len(traffic.received) + 1)), "lost, repeated or reordered"
        assert not traffic.lost


async def test_a_host_comes_back_at_another_address(image: str, tmp_path: Path) -> None:
    """As a pod does: the same name and volume, RoQ's own image, another address; whether it was stopped or killed."""
    machines = DockerCluster(image=image, gcms=1, hcms=2, session_seconds=SESSION_SECONDS, logs=tmp_path)
    async with machines, machines.connect() as client:
        engine, volume = machines._docker, f"roq-{machines.token}-pod"
        prefix = machines.address("host-1").rpartition(".")[0]

        async def pod(number: int) -> Any:
            made = await engine.container(
                machines.token,
                f"pod-{number}",
                "roq:latest",
                ["roq-hcm", "--host", "pod", "--security", "none", "--session-seconds", f"{SESSION_SECONDS:g}"],
                network=machines._network,
                address=f"{prefix}.{POD_BYTE + number}",
                environment={"ROQ_ZOOKEEPER": machines.zookeeper},
                tmpfs={"/tmp": ""},
                options={"read_only": True, "init": False, "cap_add": [], "cap_drop": ["ALL"], "volumes": [f"{volume}:/data"]},
            )
            await engine.call(made.start)
            return made

        here = await pod(0)
        try:
            await machines.wait_hosts(3)
            async with recorded(client) as load:
                for number, end in enumerate(("stop", "kill"), 1):
                    await engine.call(getattr(here, end))
                    await engine.call(here.remove)
                    here = await pod(number)
                    wanted = f"{prefix}.{POD_BYTE + number}"

                    async def back(wanted: str = wanted) -> bool:
                        hosts = {host.host: host for host in (await client.view()).hosts}
                        return hosts["pod"].alive and hosts["pod"].address == wanted

                    await machines.wait_for(back, f"the host is at {wanted}")
                    await load.flowing()
                    await machines.wait_for(lambda: healthy(machines, "Hosts", "Copies"), "all is well", REPAIRED_SECONDS)
        finally:
            await engine.call(here.remove, force=True)
            await engine.call(engine._client.volumes.get(volume).remove)


async def test_an_ensemble_of_zookeepers_grows_from_three_to_five(image: str, tmp_path: Path) -> None:
    """New members first, then the old ones are told of them, the leader last. Nobody's session ends."""
    machines = DockerCluster(
        image=image, zookeepers=3, gcms=1, hcms=2, session_seconds=PATIENT_SECONDS, logs=tmp_path, start_seconds=90.0
    )
    async with machines, machines.connect() as client:
        await client.create_queue("live", overflow="block")
        first = machines.address("zookeeper-1").rpartition(".")[0]
        old = [machines.address(name) for name in machines.zookeepers]
        every = [*old, f"{first}.14", f"{first}.15"]
        members = "".join(f"server.{number}={address}:2888:3888\\n" for number, address in enumerate(every, 1))
        async with Traffic(client, "live") as traffic:
            for number, address in list(enumerate(every, 1))[3:]:
                container = await machines._docker.container(
                    machines.token,
                    f"zookeeper-{number}",
                    image,
                    ["zookeeper", str(number), *every],
                    network=machines._network,
                    address=address,
                    environment={},
                    tmpfs={},
                )
                await machines._docker.call(container.start)
                await mode(address, "follower")
            leader = [address for address in old if "Mode: leader" in await server_status(address, 2181)]
            for address in [*(each for each in old if each not in leader), *leader]:
                name = machines.zookeepers[old.index(address)]
                await machines.run(name, f"printf '{members}' >{MEMBERS}")
                await machines.stop(name)
                await machines.start(name)
                await mode(address, "follower", "leader")
            await traffic.flowing()
        assert traffic.received == list(range(1, len(traffic.received) + 1)), "lost, repeated or reordered"
        async with roq.connect(",".join(f"{address}:2181" for address in every[3:])) as later:
            await later.create_queue("more")
            assert sum(host.alive for host in (await later.view()).hosts) == 2


async def mode(address: str, *wanted: str) -> None:
    """Until a ZooKeeper serves as one of these."""

    async def serves() -> bool:
        try:
            status = await server_status(address, 2181)
            return any(f"Mode: {each}" in status for each in wanted)
        except OSError:
            return False

    await DockerCluster.wait_for(serves, f"{address} is {' or '.join(wanted)}", REPAIRED_SECONDS)

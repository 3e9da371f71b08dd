"""A whole cluster with cards: what works with the right ones, and what nobody else can do (docs/security.md has the list).

Not covered: CURVE itself (test_curve_links.py), rules of single requests (tests/unit/test_rights.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import roq
from roq.coordination import paths
from roq.coordination.session import Session
from roq.errors import AccessDenied, CallError, CardRevoked, DeadlineExceeded, NoResponder, RoqError
from roq.runtime.rpc import RpcClient
from roq.runtime.security import load_card, write_secret
from roq.runtime.shutdown import ask
from roq.tools.authority import Authority
from roq.tools.local.cluster import LocalCluster
from roq.wire import access, hcm, master, monitor, process, store, zmtp
from roq.wire.assignment import ProcessSpec
from roq.wire.card import CardRole, Grant, Quota, Right
from roq.wire.kpi import Decision
from tests.harness.cards import as_holder
from tests.harness.commands import ROOT
from tests.harness.documented import block
from tests.integration.secured_rig import (
    ENVIRONMENT,
    WAIT_SECONDS,
    Cluster,
    look_around,
    refused,
    started,
    use,
)

NAMES = "*"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("secured"), "--hosts", "2") as made:
        with as_holder(made.owner):
            asyncio.run(prepare(made))
        yield made


async def prepare(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_queue("orders", replication=2)
        await connected.create_queue("other")
    async with roq.open_queue(cluster.tasks("jobs")) as tasks:
        await tasks.put(b"first")


def run(folder: Path, module: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command, settings = [sys.executable, "-m", module, *words], {**ENVIRONMENT, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, env=settings, timeout=60)


def listening(pids: object) -> dict[int, tuple[str, str]]:
    """Ports of the cluster's daemons and their children: by port, address and process."""
    assert isinstance(pids, dict)
    daemons = [psutil.Process(pid) for pid in pids.values()]
    found = {}
    for one in [child for daemon in daemons for child in (daemon, *daemon.children(recursive=True))]:
        for connection in one.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = (connection.laddr.ip, " ".join(one.cmdline()[-3:]))
    return found


def everything(cluster: Cluster) -> list[tuple[str, int, str]]:
    found = listening(cluster.pids)
    host_processes = [
        one for one in psutil.process_iter(["name"]) if (one.info["name"] or "").startswith("roq-") and one.pid not in found
    ]
    for one in host_processes:  # children of the fork server that an earlier HCM left count too
        with contextlib.suppress(psutil.Error):
            for connection in one.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in {ip for ip, _ in found.values()}:
                    found[connection.laddr.port] = (connection.laddr.ip, one.info["name"])
    return [(ip, port, name) for port, (ip, name) in found.items()]


def test_no_port_takes_who_has_no_card(cluster: Cluster) -> None:
    ports = everything(cluster)
    assert len(ports) > 20, ports
    for ip, port, name in ports:
        with socket.create_connection((ip, port), WAIT_SECONDS) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.sendall(zmtp.hello(b"DEALER") + zmtp.frame(b"\x01") + zmtp.frame(b"anything"))
            came = b""
            with contextlib.suppress(ConnectionError):
                while data := connection.recv(4096):
                    came += data
            assert came[:64] in (b"", zmtp.greeting(b"CURVE", as_server=True)), name
            assert len(came) <= 64, f"{name} said more than its greeting"


@pytest.mark.quick
async def test_with_the_rights_it_works_and_without_it_says_which_one_is_missing(cluster: Cluster) -> None:
    publisher = cluster.card("publisher", Grant(Right.PUBLISH, "ord*"))
    reader = cluster.card("reader", Grant(Right.SUBSCRIBE, "orders"))
    with as_holder(reader):
        async with roq.connect(cluster.zookeeper) as connected, connected.subscriber("orders") as subscriber:
            with as_holder(publisher):
                async with roq.connect(cluster.zookeeper) as other, other.publisher("orders") as sends:
                    for number in range(100):
                        await sends.publish("t", b"%d" % number)
                    await sends.flush(WAIT_SECONDS)
            got = list[bytes]()
            async with asyncio.timeout(WAIT_SECONDS):
                async for batch in subscriber.batches():
                    got += [message.payload for message in batch]
                    if len(got) == 100:
                        break
            assert got == [b"%d" % number for number in range(100)]
            with pytest.raises(AccessDenied, match="reader needs the right `publish` to 'orders'"):
                async with connected.publisher("orders"):
                    pass
            with pytest.raises(AccessDenied, match="reader needs any right to 'other'"):
                async with connected.subscriber("other"):
                    pass
            for denied in (connected.remove_queue("orders"), connected.create_queue("mine"), connected.drain_host("host-1")):
                with pytest.raises(AccessDenied, match="reader needs the right `admin`"):
                    await denied


async def test_requests_with_and_without_rights(cluster: Cluster) -> None:
    both = cluster.card("both", Grant(Right.PUBLISH, "orders"), Grant(Right.SUBSCRIBE, "orders"))
    with as_holder(both):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(NoResponder):
                await connected.request("orders", "t")
            async with connected.serve("orders") as responder:
                asked = asyncio.create_task(connected.request("orders", "t", b"x"))
                await (await anext(responder)).reply(b"y")
                assert (await asked).payload == b"y"
    for right in (Right.PUBLISH, Right.SUBSCRIBE):
        missing = Right.SUBSCRIBE if right is Right.PUBLISH else Right.PUBLISH
        with as_holder(cluster.card(f"only-{right}", Grant(right, "orders"))):
            async with roq.connect(cluster.zookeeper) as connected:
                for denied in (connected.request("orders", "t"), connected.serve("orders").open()):
                    with pytest.raises(AccessDenied, match=f"needs the right `{missing}` to 'orders'"):
                        await denied


async def test_a_recorded_queue_with_and_without_rights(cluster: Cluster) -> None:
    """Who may subscribe reads its tapes from the stores, and of nothing else what is kept there."""
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as connected:
            await connected.create_queue("kept", record=roq.Record())
            jobs = await connected.work_queue("jobs")
    publisher = cluster.card("keeps", Grant(Right.PUBLISH, "kept"))
    reader, stranger = (
        cluster.card("looks-back", Grant(Right.SUBSCRIBE, "kept")),
        cluster.card("stranger", Grant(Right.SUBSCRIBE, "other")),
    )
    with as_holder(publisher):
        async with roq.connect(cluster.zookeeper) as connected, connected.publisher("kept", confirm="stored") as sends:
            receipt = await sends.publish("t", b"x", confirm="stored")
            assert receipt is not None
            assert receipt.copies == 2
            with pytest.raises(AccessDenied, match="keeps needs the right `admin`"):
                await connected.record_queue("kept", None)
    with as_holder(reader):
        async with roq.connect(cluster.zookeeper) as connected:
            async with connected.subscriber("kept", start="earliest", follow=False) as past:
                assert [message.payload async for message in past] == [b"x"]
            tapes = await connected.tapes("kept")
        log = store.Read(f"{jobs.record.spec.log}~1.1", 1, 0)
        for endpoint in tapes.stores.values():
            assert "no host" in await refused(endpoint, store.Reply, log), "a work queue's log is none of its business"
    with as_holder(stranger):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(AccessDenied, match="stranger needs the right `subscribe` or `read` or `describe` to 'kept'"):
                await connected.subscriber("kept", start="earliest").open()


async def test_tasks_with_and_without_rights(cluster: Cluster) -> None:
    producer, worker = cluster.card("producer", Grant(Right.PUT, "jobs")), cluster.card("worker", Grant(Right.LEASE, "jobs"))
    with as_holder(producer):
        async with roq.open_queue(cluster.tasks("jobs")) as tasks:
            await tasks.put(b"x" * 200_000)
            with pytest.raises(AccessDenied, match="producer needs the right `lease` to 'jobs'"):
                await tasks.lease(seconds=5)
            with pytest.raises(AccessDenied, match="producer needs the right `admin`"):
                await tasks.purge()
    with as_holder(worker):
        async with roq.open_queue(cluster.tasks("jobs")) as tasks:
            sizes = set()
            async with asyncio.timeout(WAIT_SECONDS):
                while 200_000 not in sizes:
                    for task in await tasks.lease(seconds=5, wait_seconds=5):
                        sizes.add(len(task.payload))
                        await task.ack()
            with pytest.raises(AccessDenied, match="worker needs the right `put` to 'jobs'"):
                await tasks.put(b"no")


async def test_what_a_card_with_every_right_to_queues_still_cannot_do(cluster: Cluster) -> None:
    """Between processes only hosts speak: a program's card stops, fences, copies and reports nothing."""
    card = cluster.card("almost", *(Grant(right, NAMES) for right in Right if right is not Right.ADMIN))
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as connected:
            view, queue = await connected.view(), await connected.queue("orders")
            before = await connected.inspect("orders")
            jobs = await connected.work_queue("jobs")
    controls = [one for host in view.hosts if host.report is not None for one in host.report.processes]
    assert {str(one.kind) for one in controls} == {"monitor", "exchange", "scaling", "store", "master"}
    with as_holder(card):
        for host in view.hosts:
            assert host.report is not None
            for one in host.report.processes:
                spec = ProcessSpec(one.kind, "orders", one.exchange)
                for order in (
                    process.Shutdown("attack"),
                    process.FenceProcess(one.name, 1 << 60),
                    process.Ping(),
                    process.ConfigureProcess(spec),
                    process.TakeAccess(b"forged"),
                ):
                    with pytest.raises(AccessDenied, match="no host of this cluster"):
                        await ask(host.report.address, one.ports["control"], order)
                if str(one.kind) == "store":
                    endpoint = f"tcp://{host.report.address}:{one.ports['clients']}"
                    for request in (store.FenceLog("jobs", 1 << 60), store.ListSegments(""), store.DeleteBlob("b")):
                        assert "no host" in await refused(endpoint, store.Reply, request)
            assert "`admin`" in await refused(f"tcp://{host.address}:{host.port}", hcm.Reply, hcm.ShutdownHost("attack"))
        endpoint = queue.monitors[0].clients_endpoint()
        forger = RpcClient(endpoint, monitor.Reply)
        where = monitor.ExchangeAddress("f" * 16, "127.0.0.1", 1, 2, 3)
        forger.notify(monitor.ExchangeReport(where, "host-1", 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0))
        assert "no host" in await refused(endpoint, monitor.Reply, monitor.RecordDecision(Decision(0.0, "hold", "attack")))
        forger.close()
        assert "`admin`" in await refused(jobs.masters[0].endpoint(), master.Reply, master.PurgeQueue())
        async with roq.connect(cluster.zookeeper) as connected:
            after = await connected.inspect("orders")
            assert [one.exchange for one in after.exchanges] == [one.exchange for one in before.exchanges]
            with pytest.raises(AccessDenied, match="`admin`"):
                await connected.set_access(cluster.authority.access_list())


async def test_a_card_uses_no_more_than_its_quota(cluster: Cluster) -> None:
    """So many connections to an Exchange, and so many bytes a second through it; others are not slowed, nothing is lost."""
    rate, size, count = 200_000, 10_000, 100
    grants = (Grant(Right.PUBLISH, "other"),)
    limited = cluster.card("limited", *grants, quota=Quota(connections=2, publish_bytes_per_second=rate))
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as owner, owner.subscriber("other") as subscriber:
            with as_holder(limited):
                async with roq.connect(cluster.zookeeper) as connected, connected.publisher("other") as one:
                    async with connected.publisher("other"):
                        with pytest.raises(AccessDenied, match="limited has 2 connections here, as many as the quota"):
                            await connected.publisher("other").open(WAIT_SECONDS)
                    began = time.monotonic()
                    for number in range(count):
                        await one.publish("t", number.to_bytes(2, "big") + bytes(size))
                    await one.flush(WAIT_SECONDS)
                    seconds = time.monotonic() - began
            assert seconds > 2.0, "a second's worth and one read at once, the rest at its rate: 5 s less these"
            async with owner.publisher("other") as free, asyncio.timeout(WAIT_SECONDS):
                await free.publish("t", b"free")
                got = list[bytes]()
                async for message in subscriber:
                    got.append(message.payload[:4])
                    if message.payload == b"free":
                        break
            assert len(got) == count + 1
            assert subscriber.lost == 0


async def test_a_forged_access_list_and_a_hosts_card_of_another_name(cluster: Cluster, tmp_path: Path) -> None:
    other = Authority.init(tmp_path / "other.json")
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as connected:
            with pytest.raises(AccessDenied, match="another authority"):
                await connected.set_access(other.access_list())
            queue = await connected.queue("orders")
            before = await connected.inspect("orders")
            stranger = tmp_path / "host-9.card"
            write_secret(stranger, cluster.authority.issue("host-9", CardRole.HOST))
            with as_holder(stranger):
                forger = RpcClient(queue.monitors[0].clients_endpoint(), monitor.Reply)
                where = monitor.ExchangeAddress("f" * 16, "127.0.0.1", 1, 2, 3)
                forger.notify(monitor.ExchangeReport(where, "host-1", 0, 0, 0, 0, 0.0, 0, 0.0, 0.0, 0, 0))
                await ask(queue.monitors[0].address, await control_of(connected, "monitor"), process.Ping())
                forger.close()
            after = await connected.inspect("orders")
            assert [one.exchange for one in after.exchanges] == [one.exchange for one in before.exchanges]
    for role, command in ((CardRole.CLIENT, "roq-hcm"), (CardRole.GCM, "roq-hcm"), (CardRole.HOST, "roq-gcm")):
        wrong = tmp_path / f"{role}.card"
        write_secret(wrong, cluster.authority.issue("somebody", role))
        module = "hcm" if command == "roq-hcm" else "gcm"
        done = await asyncio.to_thread(run, tmp_path, module, "--card", str(wrong))
        assert done.returncode == 2
        assert "needs its own" in done.stderr


async def control_of(connected: roq.Cluster, kind: str) -> int:
    for host in (await connected.view()).hosts:
        for one in host.report.processes if host.report is not None else ():
            if str(one.kind) == kind:
                return one.ports["control"]
    raise AssertionError(kind)


async def test_a_revoked_card_is_out_within_a_second_and_stays_out(cluster: Cluster) -> None:
    card = cluster.card("leaver", Grant(Right.SUBSCRIBE, "orders"), Grant(Right.PUBLISH, "orders"))
    with as_holder(card):
        async with roq.connect(cluster.zookeeper) as connected, contextlib.AsyncExitStack() as stack:
            leaver = await stack.enter_async_context(connected.publisher("orders"))
            await leaver.publish("t", b"before")
            await leaver.flush(WAIT_SECONDS)
            cluster.authority = Authority.load(cluster.authority.path)
            cluster.authority.revoke("leaver")
            with as_holder(cluster.owner):
                async with roq.connect(cluster.zookeeper) as owner, owner.subscriber("orders") as stays:
                    await owner.set_access(cluster.authority.access_list())
                    deadline = time.monotonic() + 1.0
                    await asyncio.sleep(max(0.0, deadline - time.monotonic()))  # all that is promised: out after a second
                    await leaver.publish("t", b"after")
                    with pytest.raises(RoqError):
                        await leaver.flush(2.0)
                    async with owner.publisher("orders") as good:
                        await good.publish("t", b"still here")
                        await good.flush(WAIT_SECONDS)
                    async with asyncio.timeout(WAIT_SECONDS):
                        assert await anext(aiter(stays)) is not None
                    members = (await owner.inspect("orders")).members
            with pytest.raises(AccessDenied, match="revoked"):
                async with roq.connect(cluster.zookeeper) as again, again.publisher("orders"):
                    pass
            assert [one.role for one in members if one.silent_seconds < 1.0] == ["subscriber"]
            with pytest.raises((CardRevoked, DeadlineExceeded)):  # whichever it knows first
                await stack.aclose()
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as owner:
            with pytest.raises(CallError):
                cluster.authority.revoke("leaver")
            info = await owner._gcm.request(access.GetAccess(), access.AccessInfo, WAIT_SECONDS)
            assert info.signed


async def test_members_whose_card_is_revoked_end(cluster: Cluster) -> None:
    """Rather than to try to rejoin for ever."""
    card = cluster.card("gone", Grant(Right.SUBSCRIBE, "orders"), Grant(Right.PUBLISH, "orders"))
    with as_holder(card):
        async with roq.connect(cluster.zookeeper) as connected, connected.subscriber("orders") as hears:
            async with asyncio.timeout(WAIT_SECONDS):
                publisher = await connected.publisher("orders").open()
                await publisher.publish("t", b"before")
                await publisher.flush()
                assert (await anext(aiter(hears))).payload == b"before"
                cluster.authority = Authority.load(cluster.authority.path)
                cluster.authority.revoke("gone")
                with as_holder(cluster.owner):
                    async with roq.connect(cluster.zookeeper) as owner:
                        await owner.set_access(cluster.authority.access_list())
                with pytest.raises(CardRevoked, match="gone was revoked"):
                    await anext(aiter(hears))
                while "revoked" not in str(publisher.health()):
                    await asyncio.sleep(0.01)
                with pytest.raises(CardRevoked, match="gone was revoked"):
                    await publisher.publish("t", b"after")
                with pytest.raises(CardRevoked, match="gone was revoked"):
                    await publisher.close()


def test_what_is_on_disk_is_its_owners_alone(cluster: Cluster) -> None:
    secret = [cluster.folder / "authority.json", *(cluster.folder / "cards").iterdir()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)
    for host in ("host-1", "host-2"):
        assert (cluster.folder / host).stat().st_mode & 0o077 == 0


def test_programs_find_the_card_of_roq_up(tmp_path: Path) -> None:
    """As the user who started it; nobody else's, and not when it is gone."""
    with started(tmp_path) as made:
        (kept,) = (Path(ENVIRONMENT["XDG_CONFIG_HOME"]) / "roq" / "cards").glob(f"*{made.zookeeper.partition(':')[2][:4]}*")
        assert kept.stat().st_mode & 0o077 == 0
        assert kept.parent.stat().st_mode & 0o077 == 0
        status = run(tmp_path, "roq.cli", "status", "-c", made.zookeeper)
        assert status.returncode == 0, status.stderr
        stranger = run(tmp_path, "roq.cli", "status", "-c", made.zookeeper, XDG_CONFIG_HOME=str(tmp_path))
        assert stranger.returncode == 1
        assert "only who shows a card" in stranger.stderr
    assert not kept.exists()


def test_daemons_without_a_card_say_what_to_do(tmp_path: Path) -> None:
    for module in ("gcm", "hcm"):
        done = run(tmp_path, module)
        assert done.returncode == 2
        assert "--card" in done.stderr
        assert "--security none" in done.stderr
        both = run(tmp_path, module, "--security", "none", "--card", "x.card")
        assert both.returncode == 2
        assert "leave out one of them" in both.stderr


def test_commands_from_nothing_to_a_card(cluster: Cluster, tmp_path: Path) -> None:
    def roq_command(*words: str, code: int = 0) -> str:
        done = run(tmp_path, "roq.cli", *words, XDG_CONFIG_HOME=str(tmp_path))  # without the card that `roq up` has kept
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    authority = ("--authority", str(tmp_path / "a.json"))
    roq_command("ca", "init", *authority)
    assert "exists" in roq_command("ca", "init", *authority, code=1)
    roq_command("ca", "sign", "host", "host-1", str(tmp_path / "h.card"), *authority)
    assert load_card(tmp_path / "h.card").serves
    roq_command("access", "grant", "alice", "publish", "orders.*", "all", "test", *authority)
    assert load_card(tmp_path / "alice.card").card.allows(Right.PUBLISH, "orders.eu")
    assert "is no right" in roq_command("access", "grant", "bob", "write", "orders", *authority, code=1)
    listed = json.loads(roq_command("access", "ls", "--json", *authority))
    assert [one["name"] for one in listed] == ["host-1", "alice"]
    real = ("--authority", str(cluster.folder / "authority.json"), "-c", cluster.zookeeper)
    assert "card" in roq_command("access", "push", *real, code=1)
    assert '"pushed":true' in roq_command("--card", str(cluster.owner), "access", "push", *real, "--json")
    assert "another" in roq_command("--card", str(tmp_path / "alice.card"), "status", "-c", cluster.zookeeper, code=1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [(), ("--zookeeper", "java")], ids=["coordinator", "zookeeper"])
async def test_of_the_clusters_tree_only_who_leads_can_be_read(tmp_path: Path, words: tuple[str, ...]) -> None:
    with contextlib.ExitStack() as stack:
        real = await asyncio.to_thread(stack.enter_context, started(tmp_path, *words))
        with as_holder(real.owner):  # a program: its card has no password for ZooKeeper
            await prepare_one(real)
            await look_around(real.zookeeper)
        with as_holder(None):
            await look_around(real.zookeeper)
        with as_holder(real.folder / "cards" / "host-1.card"):
            session = await Session.connect(real.zookeeper)
            assert await session.children(paths.QUEUES) == ["orders"]
            assert await session.get(paths.assignment("host-1")) is not None
            await session.close()


@pytest.mark.timeout(120)
async def test_a_tree_that_was_made_without_cards_is_closed(tmp_path: Path) -> None:
    with as_holder(None):
        async with LocalCluster(tmp_path) as local, roq.connect(local.zookeeper) as connected:
            await connected.create_queue("orders")
        async with LocalCluster(tmp_path, secured=True) as local:
            await use(local.zookeeper)
            with as_holder(None):
                await look_around(local.zookeeper)


async def prepare_one(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_queue("orders")
    async with roq.open_queue(cluster.tasks("jobs")) as tasks:
        await tasks.put(b"x" * 200_000)


def test_what_the_document_shows(tmp_path: Path) -> None:
    """From nothing to a secured cluster, without starting it."""
    script = block("docs/security.md", "From nothing to a secured cluster")
    search = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    settings = {**ENVIRONMENT, "XDG_CONFIG_HOME": str(tmp_path), "PATH": search, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", script], check=False, cwd=tmp_path, capture_output=True, text=True, env=settings, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert load_card(tmp_path / "host-1.card").card.role is CardRole.HOST
    assert load_card(tmp_path / "shop.card").card.allows(Right.PUT, "jobs")
    assert load_card(tmp_path / "admin.card").card.allows(Right.ADMIN, "*")

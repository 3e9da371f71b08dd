"""Members of a queue in a secured cluster: nobody speaks for another's publisher or subscriber, at the Monitor or at Exchanges.

Not covered: every forged frame at an Exchange (test_curve_links.py), rules without a cluster (tests/unit/test_member_id.py).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import roq
from roq.errors import AccessDenied, ProducerFenced, RoqError
from roq.pubsub.publisher import Publisher
from roq.pubsub.subscriber import Subscriber
from roq.runtime.rpc import RpcClient
from roq.tools.authority import Authority
from roq.wire import frame as frames
from roq.wire import monitor
from roq.wire.assignment import ProcessKind
from roq.wire.card import Grant, Right
from roq.wire.frame import FrameKind, PathOpening
from roq.wire.member_id import SEAL_BYTES, MemberId
from roq.wire.producers import OpenProducer
from tests.harness.cards import as_holder
from tests.integration.secured_rig import WAIT_SECONDS, Cluster, Retirer, refused, started

PLAIN = Path(__file__).parents[2] / "examples" / "plain_zmq.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("members"), "--hosts", "2") as made:
        with as_holder(made.owner):
            asyncio.run(prepare(made))
        yield made


async def prepare(cluster: Cluster) -> None:
    async with roq.connect(cluster.zookeeper) as connected:
        await connected.create_queue("orders")
        await connected.create_queue("kept", overflow="block", record=roq.Record(days=1))


async def one_of(subscriber: roq.Subscriber) -> roq.Message:
    async with asyncio.timeout(WAIT_SECONDS):
        return await anext(aiter(subscriber))


async def publish_and_flush(publisher: roq.Publisher, payload: bytes) -> None:
    await publisher.publish("t", payload)
    await publisher.flush(WAIT_SECONDS)


async def cut_off(endpoint: str, *sent: bytes) -> None:
    """Sends this to an Exchange, which ends the connection."""
    link = Retirer(endpoint)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await link.greeted_event.wait()
            for frame in sent:
                link.send(frame)
            await link.lost_event.wait()
    finally:
        link.close()


async def test_who_may_publish_neither_ends_an_exchange_nor_speaks_for_others(cluster: Cluster) -> None:
    """It is cut off as it tries to retire the Exchange, and may not leave, report or join for another. Messages go on."""
    attacker = cluster.card("attacker", Grant(Right.PUBLISH, "orders"), Grant(Right.SUBSCRIBE, "orders"))
    with as_holder(cluster.owner):
        async with (
            roq.connect(cluster.zookeeper) as connected,
            connected.subscriber("orders") as subscriber,
            connected.publisher("orders") as publisher,
        ):
            await publisher.publish("t", b"before")
            assert (await one_of(subscriber)).payload == b"before"
            (there,) = (await connected.inspect("orders")).exchanges
            endpoint = (await connected.queue("orders")).monitors[0].clients_endpoint()
            with as_holder(attacker):
                retire = frames.encode_control(FrameKind.RETIRE, 1, 0, 0, there.exchange.token, time.time_ns())
                await cut_off(there.exchange.front_endpoint(), retire)
                for id in (publisher.id, subscriber.id):
                    assert "attacker did not prove" in await refused(endpoint, monitor.Reply, monitor.Leave(id))
                    for join in (monitor.JoinPublisher(id), monitor.JoinSubscriber(id, ())):
                        assert "attacker did not prove" in await refused(endpoint, monitor.Reply, join)
                forger = RpcClient(endpoint, monitor.Reply)
                forger.notify(monitor.SubscriberReport(subscriber.id, 1 << 40, (), 0, 0, 0, 0, 0.0, 0.0, 0.0))
                assert "`describe`" in await refused(endpoint, monitor.Reply, monitor.Describe())  # behind the notice
                forger.close()
            await publisher.publish("t", b"after")
            assert (await one_of(subscriber)).payload == b"after"
            await publisher.flush(WAIT_SECONDS)
            assert [one.exchange for one in (await connected.inspect("orders")).exchanges] == [there.exchange]
            assert subscriber.lost == 0


async def kill(connected: roq.Cluster, queue: str, kind: ProcessKind) -> None:
    """And wait until another one serves."""
    (pid,) = (
        one.pid
        for host in (await connected.view()).hosts
        for one in (() if host.report is None else host.report.processes)
        if one.kind is kind and one.queue == queue
    )
    killed = psutil.Process(pid)
    killed.kill()
    await asyncio.to_thread(psutil.wait_procs, [killed], WAIT_SECONDS)
    assert not killed.is_running()
    async with asyncio.timeout(3 * WAIT_SECONDS):
        while True:
            try:
                await connected.inspect(queue)
            except RoqError:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_monitor_that_began_anew_takes_nobody_for_another(cluster: Cluster) -> None:
    """The first one that asks under an id which it does not know yet may be anybody."""
    attacker = cluster.card("attacker", Grant(Right.PUBLISH, "orders"), Grant(Right.SUBSCRIBE, "orders"))
    with as_holder(cluster.owner):
        async with (
            roq.connect(cluster.zookeeper) as connected,
            connected.subscriber("orders") as subscriber,
            connected.publisher("orders") as publisher,
        ):
            await kill(connected, "orders", ProcessKind.MONITOR)
            with as_holder(attacker):
                async with roq.connect(cluster.zookeeper) as other:
                    endpoint = (await other.queue("orders")).monitors[0].clients_endpoint()
                joins = monitor.JoinPublisher(publisher.id), monitor.JoinSubscriber(subscriber.id, ())
                for said in (*joins, monitor.Leave(subscriber.id)):
                    assert "attacker did not prove" in await refused(endpoint, monitor.Reply, said)
            await publisher.publish("t", b"on")
            assert (await one_of(subscriber)).payload == b"on"
            await publisher.flush(WAIT_SECONDS)
            assert subscriber.lost == 0


async def test_a_producer_goes_on_with_another_card_and_nobody_else_has_its_id(cluster: Cluster) -> None:
    first, second = (
        cluster.card(name, Grant(Right.PUBLISH, "kept"), Grant(Right.READ, "kept")) for name in ("first", "second")
    )
    attacker = cluster.card("forger", Grant(Right.PUBLISH, "kept"))
    with as_holder(first):
        async with roq.connect(cluster.zookeeper) as one:
            publisher = await one.publisher("kept", producer="shop").open()
            await publish_and_flush(publisher, b"1")
            with as_holder(cluster.owner):
                async with roq.connect(cluster.zookeeper) as owner:
                    (there,) = (await owner.inspect("kept")).exchanges
            with as_holder(attacker):
                opening = frames.encode_control(FrameKind.OPEN, publisher.id, 1 << 20, 1, PathOpening("", finished=False), 0)
                forged = frames.encode_data(b"t", publisher.id, 1 << 20, 2, 1, 1, [b"x"], 0)
                await cut_off(there.exchange.front_endpoint(), opening, forged)
            with as_holder(second):
                async with roq.connect(cluster.zookeeper) as two, two.publisher("kept", producer="shop") as following:
                    assert (following.id, following.number) == (publisher.id, 1)
                    await publish_and_flush(following, b"2")
            with pytest.raises(ProducerFenced):
                await publish_and_flush(publisher, b"late")
            with pytest.raises(ProducerFenced):
                await publisher.close()
            with as_holder(cluster.owner):
                async with (
                    roq.connect(cluster.zookeeper) as owner,
                    owner.subscriber("kept", start="earliest", follow=False) as past,
                ):
                    assert [message.payload async for message in past] == [b"1", b"2"]


def spoil(member: Publisher | Subscriber) -> None:
    """Its proof is as good as one whose key has gone with a rotation."""
    member._membership.identity = MemberId(member.id, bytes(SEAL_BYTES))
    if isinstance(member, Publisher):
        member._sender.proof = bytes(SEAL_BYTES)


async def test_a_producer_whose_seal_is_no_good_any_more_gets_another_one(cluster: Cluster) -> None:
    """From the GCM: as soon as a Monitor refuses the one it has, or a path broke, as when an Exchange refuses it."""
    with as_holder(cluster.owner):
        async with (
            roq.connect(cluster.zookeeper) as connected,
            connected.publisher("kept", producer="sealed") as publisher,
        ):
            await publish_and_flush(publisher, b"1")
            proof = publisher._sender.proof
            for kind in (ProcessKind.MONITOR, ProcessKind.EXCHANGE):
                spoil(publisher)
                if kind is ProcessKind.EXCHANGE:
                    publisher._membership.identity = MemberId(publisher.id, proof)
                await kill(connected, "kept", kind)
                await publisher.publish("t", b"on")
                await publisher.flush(3 * WAIT_SECONDS)
                async with asyncio.timeout(3 * WAIT_SECONDS):  # no message waits for a Monitor
                    while (publisher._sender.proof, publisher._membership.identity.proof) != (proof, proof):
                        await asyncio.sleep(0.05)
            assert publisher.number == 3


async def test_a_producer_that_gets_no_good_seal_fails(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as connected:
            publisher = await connected.publisher("kept", producer="unsealed").open()
            await publish_and_flush(publisher, b"1")
            spoil(publisher)
            request = connected._gcm.request

            async def unsealed(body: Any, expect: Any, timeout_seconds: float = WAIT_SECONDS) -> Any:
                reply = await request(body, expect, timeout_seconds)
                return msgspec.structs.replace(reply, proof=bytes(SEAL_BYTES)) if isinstance(body, OpenProducer) else reply

            monkeypatch.setattr(connected._gcm, "request", unsealed)
            await kill(connected, "kept", ProcessKind.MONITOR)
            await fails(publisher)


async def fails(publisher: Publisher) -> None:
    """All that it is asked for, and soon."""
    async with asyncio.timeout(3 * WAIT_SECONDS):
        while not publisher.health().problems or "did not prove" not in publisher.health().problems[0]:
            await asyncio.sleep(0.05)
    for ask in (partial(publisher.publish, "t", b"late"), publisher.flush, publisher.close):
        with pytest.raises(AccessDenied, match="open it again"):
            await ask()


async def test_a_member_whose_proof_is_refused_fails(cluster: Cluster) -> None:
    """One that has none from anybody else, as when its process was given another card since."""
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as connected, connected.subscriber("orders") as subscriber:
            publisher = await connected.publisher("orders").open()
            await publish_and_flush(publisher, b"before")
            assert (await one_of(subscriber)).payload == b"before"
            for member in (publisher, subscriber):
                spoil(member)
            await kill(connected, "orders", ProcessKind.MONITOR)
            await fails(publisher)
            async with asyncio.timeout(3 * WAIT_SECONDS):
                with pytest.raises(AccessDenied, match="open it again"):
                    async for _ in subscriber:
                        pass


async def test_a_program_without_roq_proves_its_id_too(cluster: Cluster, tmp_path: Path) -> None:
    """The one of the document, with the key under which it was admitted; and not with another one's name."""

    async def plain(*words: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(sys.executable, str(PLAIN), *words, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(3 * WAIT_SECONDS):
            told, _ = await process.communicate()
        return process.returncode, told.decode()

    secret = tmp_path / "plain.secret"
    _, key = await plain("keys", str(secret))
    assert secret.stat().st_mode & 0o077 == 0
    authority = Authority.load(cluster.authority.path)
    authority.admit("plain", bytes.fromhex(key), [Grant(Right.PUBLISH, "orders")])
    with as_holder(cluster.owner):
        async with roq.connect(cluster.zookeeper) as connected, connected.subscriber("orders") as subscriber:
            await connected.set_access(authority.access_list())
            (there,) = (await connected.inspect("orders")).exchanges
            front = f"{there.exchange.address}:{there.exchange.front}"
            secured = ("--secret", str(secret), "--servers", authority.server_key().hex())
            words = ("publish", front, "one", "two", "--topic", "t", *secured)
            code, told = await plain(*words, "--name", "plain")
            assert (code, told) == (0, "2 forwarded\n")
            assert [(await one_of(subscriber)).payload for _ in range(2)] == [b"one", b"two"]
            code, _ = await plain(*words, "--name", "owner")
            assert code != 0, "it is cut off, and hears of nothing forwarded"
            async with connected.publisher("orders") as publisher:
                await publisher.publish("t", b"last")
            assert (await one_of(subscriber)).payload == b"last"

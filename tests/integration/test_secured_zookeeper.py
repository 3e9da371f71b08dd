"""A cluster whose connections to ZooKeeper are TLS: a real one with nothing but a secure port, certificates of the test's own.

Not covered: who may do what there (test_secured_cluster.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

import roq
from roq.errors import InvalidConfiguration, ZooKeeperUnavailable
from roq.runtime.backoff import delays
from roq.runtime.security import Security, load_card, tls, write_secret
from roq.tools.authority import Authority
from roq.tools.local.cluster import LocalCluster
from roq.tools.local.zookeeper import JVM_OPTIONS, find_jars, find_java, server_status
from roq.wire.card import CardRole
from tests.harness.cards import as_holder
from tests.harness.ports import free_port
from tests.integration.secured_rig import look_around, use

pytestmark = pytest.mark.timeout(120)
LOCAL, START_SECONDS = "127.0.0.1", 60.0
MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"
CONFIGURATION = """\
dataDir={folder}/data
secureClientPort={port}
secureClientPortAddress=127.0.0.1
serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory
ssl.keyStore.location={folder}/server.pem
ssl.keyStore.type=PEM
ssl.trustStore.location={folder}/ca.pem
ssl.trustStore.type=PEM
ssl.clientAuth=none
tickTime=500
maxSessionTimeout=60000
4lw.commands.whitelist=srvr
admin.enableServer=false
"""


def started(folder: Path, ca: trustme.CA, port: int) -> subprocess.Popen[bytes]:
    """A ZooKeeper that may not serve yet."""
    folder.mkdir()
    certificate = ca.issue_cert(LOCAL)
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)  # ZooKeeper reads no other format than this
    told = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.pem").write_bytes(told + b"".join(one.bytes() for one in certificate.cert_chain_pems))
    ca.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "zoo.cfg").write_text(CONFIGURATION.format(folder=folder, port=port))
    class_path = os.pathsep.join(map(str, find_jars()))
    command = [find_java(), *JVM_OPTIONS, "-cp", class_path, MAIN, str(folder / "zoo.cfg")]
    with (folder / "out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


@asynccontextmanager
async def secure_zookeeper(folder: Path, ca: trustme.CA) -> AsyncIterator[str]:
    """Its address, when it serves."""
    port = free_port(LOCAL)
    server = await asyncio.to_thread(started, folder, ca, port)
    try:
        began, problem = asyncio.get_running_loop().time(), "it never answered"
        for delay in delays(0.1, 0.5):
            assert server.poll() is None, "it ended"
            try:
                if "Mode:" in await server_status(LOCAL, port):
                    break
            except (OSError, TimeoutError) as error:
                problem = f"{error!r}"
            await asyncio.sleep(delay)
            assert asyncio.get_running_loop().time() < began + START_SECONDS, problem
        yield f"{LOCAL}:{port}"
    finally:
        server.kill()
        server.wait()


def card_for(authority: Authority, path: Path) -> Path:
    write_secret(path, authority.issue(path.stem, CardRole.CLIENT))
    return path


async def test_a_cluster_speaks_tls_with_its_zookeeper(tmp_path: Path) -> None:
    ca = trustme.CA()
    pem = ca.cert_pem.bytes().decode()
    authority = Authority.init(tmp_path / "cluster" / "authority.json")
    authority.trust_zookeeper(pem)
    with as_holder(card_for(authority, tmp_path / "any.card")):
        async with secure_zookeeper(tmp_path / "zookeeper", ca) as zookeeper:
            with as_holder(None):
                async with LocalCluster(tmp_path / "cluster", zookeeper=zookeeper, secured=True) as local:
                    async with roq.connect(local.zookeeper) as connected:
                        await connected.create_queue("orders")
                    await use(local.zookeeper)
                    assert doctor(local)["verdict"] == "good"
                    with as_holder(tmp_path / "any.card"):
                        await look_around(local.zookeeper)  # the same rights as without TLS
                    with as_holder(None), pytest.raises(ZooKeeperUnavailable):
                        await read(local.zookeeper)


def doctor(local: LocalCluster) -> dict[str, str]:
    """What it finds of ZooKeeper."""
    command = [sys.executable, "-m", "roq.cli", "--card", str(local.card), "doctor", "-c", local.zookeeper, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_SECONDS)
    server = local.zookeeper.partition("/")[0]
    (found,) = (one for one in json.loads(done.stdout)["findings"] if one["subject"] == f"ZooKeeper {server}")
    assert isinstance(found, dict)
    return found


async def read(zookeeper: str) -> None:
    async with roq.connect(zookeeper, connect_seconds=3.0, zookeeper_seconds=3.0):
        pass


async def test_a_zookeeper_of_another_ca_gets_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca, other = trustme.CA(), trustme.CA()
    authority = Authority.init(tmp_path / "authority.json")
    authority.trust_zookeeper(ca.cert_pem.bytes().decode())
    right = card_for(authority, tmp_path / "right.card")
    authority.trust_zookeeper(other.cert_pem.bytes().decode())
    wrong = card_for(authority, tmp_path / "wrong.card")
    with as_holder(right):
        async with secure_zookeeper(tmp_path / "zookeeper", ca) as zookeeper:
            with as_holder(wrong), pytest.raises(ZooKeeperUnavailable):
                await read(zookeeper)
            assert "no TLS with ZooKeeper at 127.0.0.1" in caplog.text
            assert "certificate verify failed" in caplog.text


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "authority.json")
    with pytest.raises(InvalidConfiguration, match="PEM"):
        authority.trust_zookeeper("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n")
    assert load_card(card_for(authority, tmp_path / "plain.card")).zookeeper_tls is None
    ca = trustme.CA().cert_pem.bytes().decode()
    assert tls(ca).check_hostname
    authority.trust_zookeeper(ca)
    assert isinstance(Security(authority.issue("host-1", CardRole.HOST)).zookeeper_tls, type(tls(ca)))

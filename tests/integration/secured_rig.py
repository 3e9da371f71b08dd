"""What tests of secured clusters do with one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import roq
from roq.coordination import paths
from roq.coordination.link import ANY_VERSION
from roq.coordination.locate import read_leader
from roq.coordination.session import Session
from roq.errors import AccessDenied, RoqError
from roq.runtime.links import PublisherLink
from roq.runtime.rpc import RpcClient
from roq.runtime.security import write_secret
from roq.tools.authority import Authority
from roq.wire.card import NO_QUOTA, CardRole, Grant, Quota
from tests.harness.commands import ROOT

START_SECONDS, WAIT_SECONDS = 60.0, 10.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ROQ_")}


async def look_around(zookeeper: str) -> None:
    leader = await read_leader(zookeeper)
    assert leader.port
    session = await Session.connect(zookeeper)
    try:
        for denied in (
            lambda: session.get(paths.assignment("host-1")),
            lambda: session.children(paths.QUEUES),
            lambda: session.set(paths.assignment("host-1"), b"{}", ANY_VERSION),
            lambda: session.set(paths.LEADER, b"{}", ANY_VERSION),
            lambda: session.create(paths.ACCESS, b"forged"),
            lambda: session.delete(paths.LEADER),
        ):
            with pytest.raises(AccessDenied, match="ZooKeeper"):
                await denied()
    finally:
        await session.close()


async def use(zookeeper: str) -> None:
    """Until what is restarted serves."""
    while True:
        try:
            async with (
                roq.connect(zookeeper) as connected,
                connected.subscriber("orders") as reads,
                connected.publisher("orders") as writes,
            ):
                await writes.publish("t", b"x")
                await writes.flush(WAIT_SECONDS)
                assert (await anext(aiter(reads))).payload == b"x"
                return
        except RoqError:
            await asyncio.sleep(0.2)


class Cluster:
    """`roq up` in a process of its own."""

    def __init__(self, folder: Path, told: dict[str, object]) -> None:
        self.zookeeper, self.folder = str(told["cluster"]), folder
        self.authority = Authority.load(folder / "authority.json")
        self.pids = told["pids"]

    def card(self, name: str, *grants: Grant, quota: Quota = NO_QUOTA) -> Path:
        path = self.folder / f"{name}.card"
        write_secret(path, self.authority.issue(name, CardRole.CLIENT, grants, quota=quota))
        return path

    @property
    def owner(self) -> Path:
        return self.folder / "cards" / "owner.card"

    def tasks(self, name: str) -> str:
        return f"roq://{self.zookeeper.partition('/')[0]}/{name}"


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[Cluster]:
    command = [sys.executable, "-m", "roq.cli", "up", "--json", "--dir", str(folder), *words]
    with open(folder / "up.log", "wb") as log:
        up = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, env=ENVIRONMENT)
    assert up.stdout is not None
    try:
        line = up.stdout.readline()
        assert line, (folder / "up.log").read_text()
        yield Cluster(folder, json.loads(line))
    finally:
        up.terminate()
        up.wait(START_SECONDS)
        up.stdout.close()


async def refused(endpoint: str, replies: object, request: msgspec.Struct) -> str:
    client = RpcClient(endpoint, replies)
    try:
        with pytest.raises(AccessDenied) as caught:
            await client.request(request, msgspec.Struct, WAIT_SECONDS)
        return str(caught.value)
    finally:
        client.close()


class Retirer(PublisherLink):
    """Frames as they are; what became of the connection."""

    def __init__(self, endpoint: str) -> None:
        self.greeted_event, self.lost_event = asyncio.Event(), asyncio.Event()
        super().__init__(endpoint)

    def greeted(self) -> None:
        super().greeted()
        self.greeted_event.set()

    def ended(self) -> None:
        super().ended()
        self.lost_event.set()

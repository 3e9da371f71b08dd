"""`file:` and `log:` work queues in a container whose folder outlives it: its workers and all of it are killed.

What the processes saw is in files beside the queue, written before and after each call, and judged at the end. Not covered
here: crashes of the machine itself (tests/unit, with a disk that forgets what was not synced).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roq.testing.engine import Engine

PRODUCERS, WORKERS = ("producer-1", "producer-2"), ("worker-1", "worker-2", "worker-3")
WORK = "/work"
FLOWING_SECONDS = 20.0
DRAINED_SECONDS = 45.0
HANDS = """
import os, secrets, sys, time
from pathlib import Path
from roq import blocking
from roq.errors import TemporaryError
role, address = sys.argv[1:]
Path(f"/work/{role}.pid").write_text(str(os.getpid()))
seen = os.open(f"/work/{role}.seen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def say(what, payload, when=0.0):
    os.write(seen, f"{what} {payload} {when}\\n".encode())
def produce(queue):
    life = secrets.token_hex(4)
    for number in range(10**9):
        if os.path.exists("/work/stop"):
            return
        payload = f"{life}.{number}"
        say("tried", payload)
        queue.put(payload.encode())
        say("put", payload)
        time.sleep(0.005)
def work(queue):
    while True:
        began = time.monotonic()
        tasks = queue.lease(2.0, count=3, wait_seconds=0.5)
        for task in tasks:
            say("leased", task.payload.decode(), began)
        for task in tasks:
            say("acking", task.payload.decode())
            done = not queue.ack_many([task])
            say("acked" if done else "late", task.payload.decode(), time.monotonic())
        if not tasks and os.path.exists("/work/stop"):
            status = queue.status()
            if status.ready == status.leased == status.delayed == 0:
                return
with blocking.open_queue(address) as queue:
    produce(queue) if role.startswith("producer") else work(queue)
"""
SUPERVISE = """for role in {roles}; do
    (until python3 /work/hands.py $role {address} 2>>/work/$role.err; do sleep 0.1; done) &
done
wait"""


class Box:
    """The container and the folder that outlives it."""

    def __init__(self, engine: Engine, container: Any, folder: Path) -> None:
        self.engine, self.container, self.folder = engine, container, folder

    def seen(self) -> list[list[str]]:
        """What all processes told: what, payload, when (seconds, monotonic)."""
        lines: list[list[str]] = []
        for path in self.folder.glob("*.seen"):
            lines += [line.split() for line in path.read_text().splitlines()]
        return lines

    async def flowing(self) -> None:
        """Until tasks are done that were not done before."""
        before = self.count("acked")
        async with asyncio.timeout(FLOWING_SECONDS):
            while self.count("acked") < before + 50:
                await asyncio.sleep(0.1)

    def count(self, what: str) -> int:
        return sum(line[0] == what for line in self.seen())

    async def kill(self, role: str) -> None:
        """One process; it is started again."""
        await self.engine.run(self.container, f"kill -9 $(cat {WORK}/{role}.pid)")

    async def power_cut(self) -> None:
        """Everything in the container at once, then it is started again."""
        await self.engine.call(self.container.kill)
        await self.engine.call(self.container.start)


@pytest.fixture(params=["file", "log"])
async def box(image: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    token, folder = secrets.token_hex(4), tmp_path / "work"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "hands.py").write_text(HANDS)
    engine = await asyncio.to_thread(Engine)
    try:
        await engine.sweep()
        network, subnet = await engine.network(token)
        command = SUPERVISE.format(roles=" ".join((*PRODUCERS, *WORKERS)), address=f"{request.param}://{WORK}/queue")
        container = await engine.container(
            token,
            "box",
            image,
            ["sh", "-c", command],
            network=network,
            address=str(subnet[11]),
            environment={},
            tmpfs={},
            options={"volumes": {str(folder): {"bind": WORK, "mode": "rw"}}},
        )
        await engine.call(container.start)
        yield Box(engine, container, folder)
    finally:
        await asyncio.shield(engine.remove(token))
        await asyncio.to_thread(engine.close)


def judge(seen: list[list[str]], **told: object) -> None:
    """Print the verdict, then check it."""
    of: dict[str, Counter[str]] = {what: Counter() for what in ("tried", "put", "leased", "acking", "acked", "late")}
    done: dict[str, float] = {}
    for what, payload, when in seen:
        of[what][payload] += 1
        if what == "acked":
            done[payload] = min(float(when), done.get(payload, float(when)))
    leased = ((payload, float(when)) for what, payload, when in seen if what == "leased")
    unsure = of["acking"] - of["acked"] - of["late"]  # killed in the middle of an ack
    unknown = of["tried"].keys() - of["put"].keys()
    verdict = {
        "acked": len(of["put"]),
        "lost": len(of["put"].keys() - done.keys() - unsure.keys()),
        "unexpected": len(of["leased"].keys() - of["tried"].keys()),
        "returned": sum(payload in done and done[payload] < when for payload, when in leased),
        "duplicated": sum(of["leased"].values()) - len(of["leased"]),
        "unknown": len(unknown),
        "recovered": len(unknown & of["leased"].keys()),
    }
    sys.stdout.write(f"\nverdict {json.dumps(told | verdict)}\n")
    assert verdict["acked"] > 0
    assert (verdict["lost"], verdict["unexpected"], verdict["returned"]) == (0, 0, 0)


async def test_workers_and_their_machine_are_killed(box: Box, request: pytest.FixtureRequest) -> None:
    await box.flowing()
    async with asyncio.timeout(FLOWING_SECONDS):
        while sum(path.stat().st_size > 0 for path in box.folder.glob("*.pid")) < len((*WORKERS, *PRODUCERS)):
            await asyncio.sleep(0.1)
    for role in (*WORKERS, *PRODUCERS):
        await box.kill(role)
        await box.flowing()
    for _ in range(3):
        await box.power_cut()
        await box.flowing()
    (box.folder / "stop").touch()
    ended = await box.engine.call(box.container.wait, timeout=DRAINED_SECONDS)
    assert ended["StatusCode"] == 0
    errors = "".join(path.read_text() for path in box.folder.glob("*.err"))
    judge(box.seen(), address=request.node.callspec.params["box"], kills="each process once, the container three times")
    assert "Error" not in errors, errors

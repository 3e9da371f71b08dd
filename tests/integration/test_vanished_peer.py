"""A machine that vanishes: its packets stop, and no FIN or RST ever comes. Both ends of our own ZMTP sockets notice in time.

The test's programs run in a network namespace of their own whose loopback is cut. Not covered: peers that stand still while
their kernel answers, which the conversations' own deadlines notice (test_master.py, test_stores.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.harness.tiers import quick_first
from tests.integration.workqueue_rig import ROOT

DEAD_SECONDS = 4
PROGRAM = """
import asyncio, json, subprocess, sys, time
from roq.runtime import sockets
from roq.runtime.router import Dealer, Router

sockets.DEAD_SECONDS = int(sys.argv[1])
busy = sys.argv[2] == "busy"


async def story():
    def answer(parts):
        server.send(parts[0], b"answer")

    ended = asyncio.Event()
    answers = []
    server = Router("127.0.0.1", 0, answer)
    dealer = Dealer(f"tcp://127.0.0.1:{server.port}", answers.append, ended.set)
    dealer.send(b"hello")
    async with asyncio.timeout(5):
        while not answers:
            await asyncio.sleep(0.01)
    await asyncio.sleep(sockets.DEAD_SECONDS + 1.0)
    assert server.peers and not ended.is_set(), "a silent peer is no dead one"
    [peer] = server.peers
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    began, seconds = time.monotonic(), {}
    if busy:
        dealer.send(b"is anybody there?")
        server.send(peer, b"anybody?")
    async with asyncio.timeout(60):
        while len(seconds) < 2:
            if not server.peers:
                seconds.setdefault("server", time.monotonic() - began)
            if ended.is_set():
                seconds.setdefault("client", time.monotonic() - began)
            await asyncio.sleep(0.05)
    print(json.dumps(seconds))
    server.close()
    dealer.close()


subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
asyncio.run(story())
"""
APART = ["unshare", "--map-root-user", "--net"]


def possible() -> bool:
    tools = all(map(shutil.which, ("unshare", "ip")))
    return tools and subprocess.run([*APART, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not possible(), reason="no network namespaces here")
@pytest.mark.parametrize("kind", quick_first(["busy", "idle"]))
def test_a_peer_whose_machine_vanished_is_noticed_by_both_ends(kind: str) -> None:
    """Whether something was on its way or not."""
    done = subprocess.run(
        [*APART, sys.executable, "-c", PROGRAM, str(DEAD_SECONDS), kind],
        capture_output=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:].decode()
    seconds = json.loads(done.stdout)
    assert seconds.keys() == {"server", "client"}
    assert max(seconds.values()) < 2 * DEAD_SECONDS, seconds

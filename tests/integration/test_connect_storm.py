"""All members of a large queue connect at once, while the process they connect to has no time: none is turned away.

A connection that the kernel drops is tried again after 1, 3, 7, 15 and 31 s.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from roq.testing.freezing import freeze

MEMBERS = 600
WAIT_SECONDS = 20.0
SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())
SERVER = """
import asyncio, sys
from roq.runtime.router import Router
from roq.runtime.links import Broadcaster

async def main():
    broadcaster = Broadcaster("127.0.0.1", 0)
    router = Router("127.0.0.1", 0, lambda parts: None, lambda: None)
    print(broadcaster.port, router.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def established(port: int) -> int:
    """How many of MEMBERS connections to a process that accepts none are established by the kernel at the first try."""
    members = [socket.socket() for _ in range(MEMBERS)]
    good = 0
    with selectors.DefaultSelector() as selector:
        for member in members:
            member.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, 1)
            member.setblocking(False)
            assert member.connect_ex(("127.0.0.1", port)) != 0
            selector.register(member, selectors.EVENT_WRITE)
        while selector.get_map() and (found := selector.select(WAIT_SECONDS)):
            for key, _ in found:
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                good += key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    for member in members:
        member.close()
    return good


@pytest.mark.quick
@pytest.mark.skipif(SOMAXCONN < MEMBERS, reason=f"this kernel lets {SOMAXCONN} connections wait at most")
@pytest.mark.parametrize("place", [0, 1], ids=["broadcaster", "router"])
def test_nobody_is_turned_away(place: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            ports = [int(word) for word in server.stdout.readline().split()]
            freeze(server.pid)
            assert established(ports[place]) == MEMBERS
        finally:
            server.kill()

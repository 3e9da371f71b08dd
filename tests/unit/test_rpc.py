"""Requests over a connection that ends: told at once, or at their deadline. Deadlines and hostile input: tests/integration."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time

import pytest

from roq.errors import Closed, DeadlineExceeded, Unavailable
from roq.runtime.rpc import OnDisconnect, RpcClient
from roq.wire import gcm

SILENT_SERVER = """
import time, zmq
router = zmq.Context().socket(zmq.ROUTER)
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
router.recv_multipart()
print("asked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("policy", OnDisconnect)
async def test_the_server_dies_with_a_request_under_way(policy: OnDisconnect) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SILENT_SERVER, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    client = RpcClient(f"tcp://127.0.0.1:{port}", gcm.Reply, on_disconnect=policy)
    asked = asyncio.create_task(client.request(gcm.ListQueues(), gcm.Queues, 4.0))
    assert await server.stdout.readline() == b"asked\n"
    begun = time.monotonic()
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(Unavailable if policy is OnDisconnect.FAIL else DeadlineExceeded):
        await asked
    assert (time.monotonic() - begun < 1.0) is (policy is OnDisconnect.FAIL)
    await server.wait()
    client.close()


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = RpcClient(f"tcp://127.0.0.1:{taken.getsockname()[1]}", gcm.Reply, on_disconnect=OnDisconnect.FAIL)
        with pytest.raises(Unavailable):
            await client.request(gcm.ListQueues(), gcm.Queues, 2.0)
        client.close()
    with pytest.raises(Closed):
        await client.request(gcm.ListQueues(), gcm.Queues, 2.0)

"""Requests over a connection that ends: told at once, or at their deadline. Deadlines and hostile input: tests/integration."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from typing import Any

import msgspec
import pytest

from roq.errors import CallError, Closed, DeadlineExceeded, Unavailable
from roq.runtime import rpc
from roq.runtime.rpc import OnDisconnect, RpcClient, RpcPool, RpcServer
from roq.wire import gcm
from roq.wire.recording import Record

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


async def test_a_pool_closes_who_was_not_used_for_a_while_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made, answer = 0.0, [], asyncio.Event()

    class Client:
        def __init__(self, endpoint: str, replies: Any, on_disconnect: OnDisconnect) -> None:
            made.append(endpoint)
            self.endpoint, self.closed = endpoint, False

        async def request(self, body: Any, expect: Any, seconds: float) -> tuple[str, float, bool]:
            if self.endpoint == "slow":
                await answer.wait()
            return self.endpoint, seconds, self.closed

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(rpc, "RpcClient", Client)
    pool: Any = RpcPool(gcm.Reply, 7.0, lambda: now)
    slow = asyncio.create_task(pool.request("slow", gcm.ListQueues(), gcm.Queues))
    await asyncio.sleep(0)
    assert await pool.request("a", gcm.ListQueues(), gcm.Queues) == ("a", 7.0, False)
    now = rpc.IDLE_SECONDS
    await pool.request("b", gcm.ListQueues(), gcm.Queues)
    await pool.request("a", gcm.ListQueues(), gcm.Queues)
    assert made == ["slow", "a", "b"], "used again in time"
    now = 3 * rpc.IDLE_SECONDS
    await pool.request("b", gcm.ListQueues(), gcm.Queues)
    await pool.request("a", gcm.ListQueues(), gcm.Queues)
    assert made == ["slow", "a", "b", "b", "a"]
    answer.set()
    assert await slow == ("slow", 7.0, False), "it was under way"
    pool.close()


async def test_an_answer_that_is_too_large_is_an_error_and_the_connection_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the client would end the connection with all that is under way on it, and ask again."""

    async def handle(peer: bytes, request: Any) -> msgspec.Struct:
        return gcm.Exists(True) if isinstance(request, gcm.QueueExists) else gcm.Tapes("t" * 2_000, Record(), True, (), {})

    monkeypatch.setattr(rpc, "CONTROL_BYTES_MAX", 1_000)
    server = RpcServer("127.0.0.1", 0, gcm.Request, handle)
    client = RpcClient(f"tcp://127.0.0.1:{server.port}", gcm.Reply, on_disconnect=OnDisconnect.FAIL)
    try:
        with pytest.raises(CallError, match=r"the answer to DescribeTapes has 2,0\d\d bytes, a message at most 1,000"):
            await client.request(gcm.DescribeTapes("q"), gcm.Tapes)
        assert (await client.request(gcm.QueueExists("q"), gcm.Exists)).exists
    finally:
        client.close()
        server.close()

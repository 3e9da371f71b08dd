"""How many requests a server works on at a time: of all, and of one client, so that nobody keeps the others out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from roq.errors import TemporaryError
from roq.runtime.rpc import RpcClient, RpcServer
from roq.wire import monitor as wire
from roq.wire.limits import REQUESTS_IN_FLIGHT, REQUESTS_OF_ONE

WAIT_SECONDS = 20.0


class Patient:
    """A server whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0
        self.full = asyncio.Event()
        self.expected = 0
        self.server = RpcServer("127.0.0.1", 0, wire.Request, self._answer)
        self.endpoint = f"tcp://127.0.0.1:{self.server.port}"

    async def _answer(self, peer: bytes, request: msgspec.Struct) -> msgspec.Struct:
        self.asked += 1
        if self.asked == self.expected:
            self.full.set()
        await self.go.wait()
        return wire.Left()

    async def has(self, count: int) -> None:
        self.expected = count
        if self.asked < count:
            self.full.clear()
            async with asyncio.timeout(WAIT_SECONDS):
                await self.full.wait()


@pytest.fixture
async def patient() -> AsyncIterator[Patient]:
    made = Patient()
    yield made
    made.server.close()


def ask(client: RpcClient, count: int) -> list[asyncio.Task[wire.Left]]:
    return [asyncio.create_task(client.request(wire.Leave(number), wire.Left, WAIT_SECONDS)) for number in range(count)]


@pytest.mark.quick
async def test_one_client_leaves_room_for_others(patient: Patient) -> None:
    greedy, other = RpcClient(patient.endpoint, wire.Reply), RpcClient(patient.endpoint, wire.Reply)
    many = ask(greedy, REQUESTS_OF_ONE + 10)
    await patient.has(REQUESTS_OF_ONE)
    few = ask(other, 5)
    await patient.has(REQUESTS_OF_ONE + 5)
    patient.go.set()
    outcomes = await asyncio.gather(*many, return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, TemporaryError)]
    assert len(refused) == 10
    assert "try again" in str(refused[0])
    assert await asyncio.gather(*few) == [wire.Left()] * 5
    assert await asyncio.gather(*ask(greedy, REQUESTS_OF_ONE)) == [wire.Left()] * REQUESTS_OF_ONE, "what was answered has gone"
    greedy.close()
    other.close()


async def test_all_together_are_bounded(patient: Patient) -> None:
    clients = [RpcClient(patient.endpoint, wire.Reply) for _ in range(4)]
    asked = [task for client in clients for task in ask(client, REQUESTS_IN_FLIGHT // 3)]
    await patient.has(REQUESTS_IN_FLIGHT)
    patient.go.set()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, wire.Left) for one in outcomes) == REQUESTS_IN_FLIGHT
    assert {type(one) for one in outcomes} == {wire.Left, TemporaryError}
    for client in clients:
        client.close()

"""The command of `roq serve --exec`: whatever it reads of the payload, its output is the answer."""

from __future__ import annotations

import asyncio

import uvloop

from roq.cli.requests import _run
from roq.client.responder import Request
from roq.wire.headers import Headers
from roq.wire.requests import RequestHead, RequestOutcome, reply_topic

COMMANDS = 24  # at a time: on busy processors some are over before they could be given anything


async def answered(command: str, payload: bytes) -> tuple[RequestOutcome, bytes]:
    """What its caller is told."""
    told = []

    async def send(_: Request, head: RequestHead, outcome: RequestOutcome, payload: bytes, headers: Headers | None) -> None:
        told.append((outcome, payload))

    await _run(Request(send, RequestHead(1, reply_topic(1), "eu.paris", 60.0, {}), payload), command)
    (one,) = told
    return one


def test_a_command_that_reads_nothing_answers_on_the_loop_that_is_used() -> None:
    async def many() -> set[tuple[RequestOutcome, bytes]]:
        return set(
            await asyncio.gather(*(answered("echo $ROQ_TOPIC", b"" if one % 2 else bytes(1 << 20)) for one in range(COMMANDS)))
        )

    assert uvloop.run(many()) == {(RequestOutcome.DONE, b"eu.paris\n")}


def test_a_command_reads_the_whole_payload() -> None:
    payload = bytes(range(256)) * 1000
    assert asyncio.run(answered("cat", payload)) == (RequestOutcome.DONE, payload)
    assert asyncio.run(answered("wc -c", b"")) == (RequestOutcome.DONE, b"0\n")

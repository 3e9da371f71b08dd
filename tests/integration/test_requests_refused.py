"""Requests that a server on a real cluster does not take: what is none, what it does not serve, what is beyond its bounds."""

from __future__ import annotations

import asyncio
import itertools

import pytest

import roq
from roq.client.responder import HELD_BYTES_MAX
from roq.errors import Overloaded, ResponderLost, SlowSubscriber
from roq.wire import monitor as wire
from roq.wire.headers import OwnHeaders
from roq.wire.requests import RequestHead, reply_topic, request_headers, serve_topic
from tests.integration.test_requests import BOUND_SECONDS, serving


@pytest.mark.quick
async def test_a_server_outlives_what_others_write_to_its_topic(client: roq.Cluster, queue: str) -> None:
    """Whoever may publish can, with the headers of a request or without."""
    whole = request_headers(RequestHead(1, reply_topic(1), "eu.paris", 60.0, {}))
    async with client.publisher(queue) as publisher, client.subscriber(queue, reply_topic(1)) as told:
        async with client.serve(queue, "eu.*") as responder:
            for wrong in (
                {},
                {**whole, "roq-reply": "_reply." + "x" * 300},
                {**whole, "roq-reply": "orders"},
                {**whole, "roq-topic": "eu.pa\x00ris"},
                {**whole, "roq-topic": "eu." + "x" * 200_000},
                {**whole, "roq-topic": "us.nyc"},
                whole,
            ):
                await publisher.publish(serve_topic(responder.id), b"x", OwnHeaders(wrong))
            async with asyncio.timeout(BOUND_SECONDS):
                assert (await anext(responder)).topic == "eu.paris"
                asked = asyncio.create_task(client.request(queue, "eu.rome", b"y", timeout_seconds=BOUND_SECONDS))
                assert (await anext(responder)).topic == "eu.rome"
            assert responder.counters["refused_no_request"] == 5
        with pytest.raises(ResponderLost, match="left without an answer"):
            await asked
        async with asyncio.timeout(BOUND_SECONDS):
            outcomes = [(await anext(told)).headers["roq-outcome"] for _ in range(2)]
        assert outcomes == ["refused", "lost"]


async def test_a_server_is_full_with_bytes(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as responder:
        large = bytes(HELD_BYTES_MAX // 100 + 1)
        asked = [asyncio.create_task(client.request(queue, "t", large, timeout_seconds=60.0)) for _ in range(104)]
        for refused in itertools.islice(asyncio.as_completed(asked), 4):
            with pytest.raises(Overloaded):
                await refused
        assert (responder.counters["requests"], responder.counters["refused"]) == (104, 4)
        await (await anext(responder)).reply(b"room")
        asked.append(asyncio.create_task(client.request(queue, "t", b"x", timeout_seconds=60.0)))
        async with asyncio.timeout(BOUND_SECONDS):
            while responder.counters["requests"] < 105:
                await asyncio.sleep(0.01)
        assert responder.counters["refused"] == 4
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [one.payload for one in outcomes if isinstance(one, roq.Reply)] == [b"room"]


async def test_a_server_that_was_cut_off_gets_no_more_requests(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as responder, serving(client, queue) as other:
        responder._subscriber.fail(SlowSubscriber("the loop stood still"))
        async with asyncio.timeout(BOUND_SECONDS):
            with pytest.raises(SlowSubscriber, match="stood still"):
                await anext(responder)
            listed = await responder._subscriber._membership.ask(wire.ListResponders(), wire.Responders, BOUND_SECONDS)
        assert {one.subscriber for one in listed.responders} == {other.id}
        assert (await client.request(queue, "t", b"x")).responder == other.id

"""Requests over a queue on a real cluster: who gets them, what becomes of them when servers leave, die or are full.

Not covered: the choice and the Monitor's list by themselves (tests/unit/test_requests.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import roq
from roq import blocking
from roq.client.responder import LEAVING_SECONDS
from roq.errors import (
    CallError,
    Closed,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidHeaders,
    InvalidName,
    InvalidTopic,
    NoResponder,
    Overloaded,
    PayloadTooLarge,
    QueueNotFound,
    RequestFailed,
    ResponderLost,
    SlowSubscriber,
)
from roq.wire.assignment import ProcessKind
from roq.wire.headers import HEADERS_BYTES_MAX
from tests.integration.running import RunningCluster
from tests.integration.test_recorded import kill

BOUND_SECONDS = 20


async def echo(responder: roq.Responder) -> None:
    async for request in responder:
        await request.reply(request.payload, {"topic": request.topic})


@contextlib.asynccontextmanager
async def serving(client: roq.Cluster, queue: str, *topics: str, group: str = "") -> AsyncIterator[roq.Responder]:
    """An echo, on a task of its own."""
    async with client.serve(queue, *topics, group=group) as responder:
        task = asyncio.create_task(echo(responder))
        yield responder
    await task


@pytest.mark.quick
async def test_a_request_is_answered_and_each_goes_to_one_server(client: roq.Cluster, queue: str) -> None:
    with pytest.raises(NoResponder, match=r"nobody serves 'eu\.paris'"):
        await client.request(queue, "eu.paris", b"x")
    async with (
        serving(client, queue, "eu.*", group="quotes") as first,
        serving(client, queue, "eu.>", group="quotes") as second,
    ):
        reply = await client.request(queue, "eu.paris", b"?", {"n": "1", "traceparent": "00-1"})
        assert (reply.payload, reply.headers) == (b"?", {"topic": "eu.paris"})
        replies = await asyncio.gather(*(client.request(queue, "eu.paris", b"%d" % number) for number in range(500)))
        assert [int(one.payload) for one in replies] == list(range(500))
        shares = [sum(one.responder == server.id for one in replies) for server in (first, second)]
        assert min(shares) > 100
        assert (await client.request(queue, "eu.paris.left")).responder == second.id
        with pytest.raises(NoResponder, match=r"'us' .* in group 'quotes'"):
            await client.request(queue, "us", group="quotes")
        with pytest.raises(NoResponder, match="in group 'bills'"):
            await client.request(queue, "eu.paris", group="bills")
        async with serving(client, queue, group="bills") as third:
            assert (await client.request(queue, "eu.paris", group="bills")).responder == third.id
            assert (await client.request(queue, "us")).responder == third.id
    with pytest.raises(NoResponder):
        await client.request(queue, "eu.paris")


async def test_what_a_server_says_of_a_request(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as responder:
        asked = asyncio.create_task(client.request(queue, "t", b"big", timeout_seconds=BOUND_SECONDS))
        request = await anext(responder)
        assert (request.topic, request.payload, request.headers, request.answered) == ("t", b"big", {}, False)
        assert 0 < request.seconds_left < BOUND_SECONDS
        with pytest.raises(PayloadTooLarge):
            await request.reply(bytes(2_000_000))
        with pytest.raises(InvalidHeaders):
            await request.reply(b"", {"n": "x" * (HEADERS_BYTES_MAX + 1)})
        with pytest.raises(TypeError):
            await request.reply("text")  # type: ignore[arg-type]
        await request.fail("too big: \udcff")
        with pytest.raises(RequestFailed, match=r"^too big: \?$"):
            await asked
        with pytest.raises(CallError, match="answered before"):
            await request.reply(b"again")
        asked = asyncio.create_task(client.request(queue, "t", b"", {"n": "x" * (HEADERS_BYTES_MAX - 1)}))
        await (await anext(responder)).reply(b"", {"a": "x" * (HEADERS_BYTES_MAX - 1)})
        assert (await asked).headers == {"a": "x" * (HEADERS_BYTES_MAX - 1)}


async def test_calls_that_are_wrong_are_refused(client: roq.Cluster, queue: str) -> None:
    with pytest.raises(InvalidTopic):
        await client.request(queue, "")
    with pytest.raises(InvalidHeaders):
        await client.request(queue, "t", b"", {"roq-request": "1"})
    with pytest.raises(InvalidTopic):
        client.serve(queue, "a.>.b")
    with pytest.raises(InvalidName):
        client.serve(queue, group="a/b")
    with pytest.raises(InvalidConfiguration, match="capacity"):
        client.serve(queue, capacity=0)
    with pytest.raises(Closed, match="open this responder first"):
        await anext(client.serve(queue))
    with pytest.raises(QueueNotFound):
        await client.request("nowhere", "t")
    with pytest.raises(QueueNotFound):
        await client.serve("nowhere").open()
    async with serving(client, queue):
        with pytest.raises(PayloadTooLarge):
            await client.request(queue, "t", bytes(2_000_000))
        assert (await client.request(queue, "t", b"x")).payload == b"x", "the next one is not hurt"


async def test_a_queue_that_comes_later_is_found(client: roq.Cluster) -> None:
    with pytest.raises(QueueNotFound):
        await client.request("later", "t")
    await client.create_queue("later")
    try:
        async with serving(client, "later"):
            assert (await client.request("later", "t", b"x")).payload == b"x"
    finally:
        await client.remove_queue("later")


async def test_who_does_not_answer_is_left_for_others(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as silent, serving(client, queue) as good:
        kept = list[roq.Request]()

        async def keep() -> None:
            async for request in silent:
                kept.append(request)

        keeping = asyncio.create_task(keep())
        outcomes = await asyncio.gather(
            *(client.request(queue, "t", timeout_seconds=1.5) for _ in range(2)), return_exceptions=True
        )
        (late,) = [one for one in outcomes if isinstance(one, DeadlineExceeded)]
        assert f"server {silent.id:016x} has it" in str(late)
        answered = [(await client.request(queue, "t")).responder for _ in range(20)]
        assert set(answered) == {good.id}, "it still has one under way"
        assert len(kept) == 1
        assert kept[0].seconds_left <= 0
        await kept[0].reply(b"late")
        caller = client._callers.of(queue)
        async with asyncio.timeout(BOUND_SECONDS):
            while not caller.counters["late_answers"]:
                await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):
            await asyncio.gather(*(client.request(queue, "t", timeout_seconds=0.2) for _ in range(2)))
    await keeping


async def test_who_is_full_sends_its_requests_elsewhere(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue, capacity=1) as small:
        first = asyncio.create_task(client.request(queue, "t", b"1"))
        request = await anext(small)
        with pytest.raises(Overloaded, match="1 servers of 't'"):
            await client.request(queue, "t", b"2")
        async with serving(client, queue) as other:
            replies = await asyncio.gather(*(client.request(queue, "t", b"%d" % number) for number in range(100)))
            assert {one.responder for one in replies} == {other.id}
        await request.reply(b"done")
        assert (await first).payload == b"done"


async def test_what_a_server_has_not_looked_at_goes_elsewhere_when_it_leaves(client: roq.Cluster, queue: str) -> None:
    """And what its application had is lost at once, to be asked again or not by whoever knows."""
    async with contextlib.AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(client.serve(queue))
        asked = [asyncio.create_task(client.request(queue, "t", b"%d" % number)) for number in range(10)]
        taken = await anext(leaving)
        other = await stack.enter_async_context(serving(client, queue))
        begun = time.monotonic()
        await leaving.close()
        with pytest.raises(Closed, match="caller gets ResponderLost"):
            await taken.reply(b"too late")
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert time.monotonic() - begun < LEAVING_SECONDS + 2.0
        (lost,) = [one for one in answers if isinstance(one, BaseException)]
        assert isinstance(lost, ResponderLost)
        assert answers.index(lost) == int(taken.payload)
        assert {one.responder for one in answers if isinstance(one, roq.Reply)} == {other.id}


async def test_a_server_finishes_what_it_has_and_takes_no_more(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as stopping:
        asked = [asyncio.create_task(client.request(queue, "t", b"%d" % number)) for number in range(5)]
        mine = [await anext(stopping), await anext(stopping)]
        async with serving(client, queue) as other:
            waiting = asyncio.create_task(anext(stopping, None))
            stopping.stop()
            assert await anext(stopping, None) is None
            for request in mine:
                await request.reply(b"mine")
            last = await waiting
            if last is not None:
                await last.reply(b"mine, too")
            answers = [(await one).responder for one in asked]
            assert answers.count(stopping.id) == 2 + (last is not None)
            assert answers.count(other.id) == 3 - (last is not None)


async def test_servers_come_and_go_under_load(client: roq.Cluster, queue: str) -> None:
    """A server that leaves properly costs no request."""
    done, failed = 0, list[BaseException]()
    stop = asyncio.Event()

    async def ask() -> None:
        nonlocal done
        while not stop.is_set():
            try:
                await client.request(queue, "t", b"x", timeout_seconds=BOUND_SECONDS)
                done += 1
            except roq.RoqError as error:
                failed.append(error)

    async with contextlib.AsyncExitStack() as stack:
        old = [await stack.enter_async_context(serving(client, queue)) for _ in range(3)]
        asking = [asyncio.create_task(ask()) for _ in range(20)]
        for server in old:
            await stack.enter_async_context(serving(client, queue))
            await server.close()
        before = done
        async with asyncio.timeout(BOUND_SECONDS):
            while done < before + 200:
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*asking)
    assert failed == []


SERVER = """
    import asyncio, sys, roq

    async def main():
        done = open(sys.argv[3], "ab", buffering=0)
        async with roq.connect(sys.argv[1]) as cluster, cluster.serve(sys.argv[2], "t") as responder:
            print(responder.id, flush=True)
            async for request in responder:
                done.write(request.payload + b"\\n")
                if request.payload == b"keep":
                    print("kept", flush=True)
                else:
                    await request.reply(request.payload)

    asyncio.run(main())
"""


@contextlib.contextmanager
def server_process(cluster: RunningCluster, queue: str, done: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its id. It keeps requests with the payload `keep`, and writes all it gets to `done`."""
    command = [sys.executable, "-c", textwrap.dedent(SERVER), cluster.zookeeper, queue, str(done)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


async def test_a_server_that_is_killed_loses_its_requests_once(
    cluster: RunningCluster, client: roq.Cluster, queue: str, tmp_path: Path
) -> None:
    with server_process(cluster, queue, tmp_path / "done") as (process, dead):
        assert (await client.request(queue, "t", b"x")).responder == dead
        asked = asyncio.create_task(client.request(queue, "t", b"keep", timeout_seconds=60))
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "kept\n"
        async with serving(client, queue) as other:
            begun = time.monotonic()
            process.send_signal(signal.SIGKILL)
            with pytest.raises(ResponderLost, match=f"{dead:016x}"):
                await asked
            assert time.monotonic() - begun < 8.0
            replies = await asyncio.gather(*(client.request(queue, "t") for _ in range(50)))
            assert {one.responder for one in replies} == {other.id}
            assert other.counters["requests"] == 50, "the lost one was not repeated"


def carried_out(folder: Path) -> Counter[int]:
    """How often each number was, by what servers wrote there."""
    return Counter(int(line) for path in folder.iterdir() for line in path.read_text().split())


async def test_no_request_is_carried_out_twice(
    cluster: RunningCluster, client: roq.Cluster, queue: str, tmp_path: Path
) -> None:
    """While servers, an Exchange and the Monitor are killed; what was answered was carried out."""
    outcomes, stop, numbers = dict[int, str](), asyncio.Event(), itertools.count()

    async def ask() -> None:
        while not stop.is_set():
            number = next(numbers)
            try:
                reply = await client.request(queue, "t", b"%d" % number, timeout_seconds=2 * BOUND_SECONDS)
                outcomes[number] = "done" if reply.payload == b"%d" % number else "mixed up"
            except roq.RoqError as error:
                outcomes[number] = type(error).__name__

    with contextlib.ExitStack() as servers:
        first, _ = servers.enter_context(server_process(cluster, queue, tmp_path / "0"))
        asking = [asyncio.create_task(ask()) for _ in range(20)]
        for life, kind in enumerate((ProcessKind.EXCHANGE, ProcessKind.MONITOR), 1):
            made = server_process(cluster, queue, tmp_path / str(life))
            process, _ = await asyncio.to_thread(servers.enter_context, made)
            await kill(client, queue, kind)
            first.kill()
            first = process
        before = len(outcomes)
        async with asyncio.timeout(BOUND_SECONDS):
            while len(outcomes) < before + 200:
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*asking)
    executed = carried_out(tmp_path)
    assert set(outcomes.values()) <= {"done", "ResponderLost"}
    assert set(executed.values()) == {1}
    assert {number for number, outcome in outcomes.items() if outcome == "done"} <= executed.keys()


@pytest.mark.parametrize("kind", [ProcessKind.MONITOR, ProcessKind.EXCHANGE])
async def test_requests_outlive_the_queues_processes(client: roq.Cluster, queue: str, kind: ProcessKind) -> None:
    async with serving(client, queue, group="a"), serving(client, queue, group="b"):
        stop, done, failed = asyncio.Event(), 0, list[BaseException]()

        async def ask(group: str) -> None:
            nonlocal done
            while not stop.is_set():
                try:
                    await client.request(queue, "t", b"x", group=group, timeout_seconds=BOUND_SECONDS)
                    done += 1
                except roq.RoqError as error:
                    failed.append(error)

        asking = [asyncio.create_task(ask(group)) for group in "abab"]
        await kill(client, queue, kind)
        await asyncio.sleep(3.0)  # the list of the next one is complete by then
        before = done
        async with asyncio.timeout(BOUND_SECONDS):
            while done < before + 100:
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*asking)
    assert failed == []


async def test_requests_outlive_a_planned_move(client: roq.Cluster, queue: str) -> None:
    async with serving(client, queue):
        assert (await client.request(queue, "t", b"x")).payload == b"x"
        created = await client.create_exchange(queue)
        await client.exchange_active(queue, created.exchange)
        view = await client.inspect(queue)
        moving = [(one.id, created.exchange) for one in view.members if one.role == "publisher"]
        asked = [asyncio.create_task(client.request(queue, "t", b"%d" % number)) for number in range(200)]
        assert (await client.move(queue, moving)).moved == 2
        assert [int((await one).payload) for one in asked] == list(range(200))


async def test_nobody_serves_is_said_at_once_and_not_while_the_monitor_is_away(client: roq.Cluster, queue: str) -> None:
    async with serving(client, queue):
        await client.request(queue, "t")
    begun = time.monotonic()
    with pytest.raises(NoResponder, match="nobody serves 't'"):
        await client.request(queue, "t")
    assert time.monotonic() - begun < 2.0
    outcomes = await asyncio.gather(*(client.request(queue, "t") for _ in range(3000)), return_exceptions=True)
    assert {type(one) for one in outcomes} == {NoResponder}, "they ask the Monitor together"


async def test_requests_are_not_seen_by_those_who_subscribe_to_everything(client: roq.Cluster, queue: str) -> None:
    async with (
        serving(client, queue) as responder,
        client.subscriber(queue) as everything,
        client.subscriber(queue, "_serve.>") as inside,
        client.publisher(queue) as publisher,
    ):
        await client.request(queue, "t", b"x", {"n": "1"})
        async with asyncio.timeout(BOUND_SECONDS):
            message = await anext(inside)
            assert (message.topic, message.payload) == (f"_serve.{responder.id:016x}", b"x")
            assert (message.headers["roq-topic"], message.headers["n"]) == ("t", "1")
            await publisher.publish("seen", b"")
            assert (await anext(everything)).topic == "seen"


async def test_an_application_that_takes_nothing_holds_nobody_back(client: roq.Cluster, queue: str) -> None:
    """The queue has overflow "block": a server that did not read would stop all publishers."""
    async with (
        client.serve(queue, capacity=10),
        client.subscriber(queue, "other") as other,
        client.publisher(queue) as publisher,
    ):
        outcomes = await asyncio.gather(
            *(client.request(queue, "t", bytes(100_000), timeout_seconds=5.0) for _ in range(200)), return_exceptions=True
        )
        kinds = [type(one) for one in outcomes]
        assert set(kinds) == {DeadlineExceeded, Overloaded}
        assert 10 <= kinds.count(DeadlineExceeded) < 100
        await publisher.publish("other", b"x")
        async with asyncio.timeout(BOUND_SECONDS):
            assert (await anext(other)).payload == b"x"


async def test_closing_ends_what_is_under_way(cluster: RunningCluster, client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as responder:
        async with roq.connect(cluster.zookeeper) as mine:
            asked = asyncio.create_task(mine.request(queue, "t", timeout_seconds=BOUND_SECONDS))
            await anext(responder)
        with pytest.raises(Closed):
            await asked
    async with roq.connect(cluster.zookeeper) as mine:
        iterating = mine.serve(queue)
        await iterating.open()
        taking = asyncio.create_task(anext(iterating))
        await asyncio.sleep(0)
    with pytest.raises(StopAsyncIteration):
        await taking


async def test_after_the_end_nothing_is_asked(cluster: RunningCluster, queue: str) -> None:
    async with roq.connect(cluster.zookeeper) as mine:
        pass
    with pytest.raises(Closed):
        await mine.request(queue, "t")


async def test_a_caller_that_was_cut_off_is_made_anew(client: roq.Cluster, queue: str) -> None:
    async with client.serve(queue) as responder:
        asked = asyncio.create_task(client.request(queue, "t"))
        await anext(responder)
        client._callers.of(queue)._subscriber.fail(SlowSubscriber("the loop stood still"))
        with pytest.raises(SlowSubscriber, match="stood still"):
            await asked
        again = asyncio.create_task(client.request(queue, "t"))
        await (await anext(responder)).reply(b"x")
        assert (await again).payload == b"x"


async def test_a_recorded_queue_keeps_requests_and_readers_do_not_see_them(client: roq.Cluster) -> None:
    await client.create_queue("asked", record=roq.Record(days=1))
    try:
        async with serving(client, "asked"), client.publisher("asked", confirm="stored") as publisher:
            await client.request("asked", "t", b"x")
            await publisher.publish("t", b"seen")
        async with client.subscriber("asked", start="earliest", follow=False) as past:
            assert [message.payload async for message in past] == [b"seen"]
        async with client.subscriber("asked", "_serve.>", start="earliest", follow=False) as past:
            assert [message.payload async for message in past] == [b"x"]
    finally:
        await client.remove_queue("asked")


def test_plain_code_asks_and_answers(cluster: RunningCluster) -> None:
    with blocking.connect(cluster.zookeeper) as connected:
        connected.create_queue("plain-requests")
        with connected.serve("plain-requests", "add", group="sums") as responder:

            def answer() -> None:
                for request in responder:
                    numbers = request.payload.split()
                    if all(number.isdigit() for number in numbers):
                        request.reply(b"%d" % sum(map(int, numbers)), {"topic": request.topic})
                    else:
                        request.fail("these are no numbers")

            thread = threading.Thread(target=answer)
            thread.start()
            reply = connected.request("plain-requests", "add", b"1 2 3", group="sums")
            assert (reply.payload, reply.headers, reply.responder) == (b"6", {"topic": "add"}, responder.id)
            with pytest.raises(RequestFailed, match="these are no numbers"):
                connected.request("plain-requests", "add", b"one")
        thread.join(BOUND_SECONDS)
        assert not thread.is_alive()
        with pytest.raises(NoResponder):
            connected.request("plain-requests", "add")
        connected.remove_queue("plain-requests")

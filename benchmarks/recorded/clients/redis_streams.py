"""Redis Streams through redis-py and hiredis: XADD, XREAD, XREADGROUP and XACK. It has no iteration message by message."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast

import redis

from benchmarks.recorded.clients.client import POLL_SECONDS, WAIT_SECONDS, Clients, Run
from benchmarks.recorded.workload import WINDOW

FIELD = b"d"
Entries = list[tuple[bytes, dict[bytes, bytes]]]


def _connect(address: str) -> redis.Redis:
    host, port = address.rsplit(":", 1)
    connection = redis.Redis(host, int(port), protocol=2, socket_timeout=2 * WAIT_SECONDS)
    connection.ping()
    return connection


def prepare(address: str, queue: str) -> None:
    """Nothing: a stream comes into being by itself."""


def publish(run: Run) -> int:
    """Pipelines of 1,000."""
    connection, confirmed = _connect(run.address), 0
    run.begin()
    for window in run.timed():
        pipeline = connection.pipeline(transaction=False)
        for payload in window:
            pipeline.xadd(run.queue, {FIELD: payload})
        confirmed += len(pipeline.execute())
    run.end()
    return confirmed


def one_by_one(run: Run) -> list[int]:
    """Each waits for the answer to the one before."""
    connection, latencies, clock = _connect(run.address), [], time.monotonic_ns
    run.begin()
    for window in run.timed():
        for payload in window:
            before = clock()
            connection.xadd(run.queue, {FIELD: payload})
            latencies.append(clock() - before)
    run.end()
    return latencies


class StreamReader:
    """See client.Reader."""

    def __init__(self, address: str, queue: str, position: object) -> None:
        self._redis, self._queue = _connect(address), queue
        self._last = cast(bytes, position) or b"0"

    def next(self) -> list[bytes]:
        """See client.Reader."""
        wait_ms = int(WAIT_SECONDS * 1000)
        answer = cast(Any, self._redis.xread({self._queue: self._last}, count=WINDOW, block=wait_ms))
        if not answer:
            return []
        entries: Entries = answer[0][1]
        self._last = entries[-1][0]
        return [fields[FIELD] for _, fields in entries]

    def position(self) -> object:
        """The last id."""
        return self._last

    def close(self) -> None:
        """See client.Reader."""
        self._redis.close()


def replay(run: Run) -> list[bytes]:
    """XREAD of 1,000."""
    taken: list[bytes] = []
    run.begin()
    reader = StreamReader(run.address, run.queue, None)
    while len(taken) < run.count and (some := reader.next()):
        taken += some
    run.end()
    reader.close()
    return taken


class StreamWriter:
    """See client.Writer: what is due goes in one pipeline, whose answers are awaited."""

    def __init__(self, address: str, queue: str) -> None:
        self._redis, self._queue = _connect(address), queue

    def send(self, payloads: list[bytes]) -> None:
        """See client.Writer."""
        pipeline = self._redis.pipeline(transaction=False)
        for payload in payloads:
            pipeline.xadd(self._queue, {FIELD: payload})
        pipeline.execute()

    def rest(self, seconds: float) -> None:
        """See client.Writer."""
        time.sleep(seconds)

    def finish(self) -> None:
        """See client.Writer."""
        self._redis.close()


def _make_group(connection: redis.Redis, run: Run) -> None:
    try:
        connection.xgroup_create(run.queue, run.group, id="0")
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):  # another member was first
            raise


def unsettled(address: str, queue: str, group: str) -> int:
    """What members have and have not acknowledged, and what none has had."""
    groups = _connect(address).xinfo_groups(queue)
    (found,) = [one for one in groups if one["name"] == group.encode()]
    return int(found["pending"]) + int(found["lag"] or 0)


def member(run: Run, count: int) -> list[bytes]:
    """XREADGROUP of up to `count`, one XACK for all of them."""
    connection, taken = _connect(run.address), []
    name = f"member-{connection.client_id()}"
    run.begin()
    _make_group(connection, run)
    done = False
    while not done:
        wait_ms = int(POLL_SECONDS * 1000)
        answer = cast(Any, connection.xreadgroup(run.group, name, {run.queue: ">"}, count=count, block=wait_ms))
        entries: Entries = answer[0][1] if answer else []
        if entries:
            taken += [fields[FIELD] for _, fields in entries]
            connection.xack(run.queue, run.group, *[identity for identity, _ in entries])
        done = run.took(len(entries))
    return taken


CLIENTS = Clients(
    prepare=prepare,
    publish={"XADD, pipelines of 1,000": publish},
    one_by_one={"XADD": one_by_one},
    replay={"XREAD COUNT 1000": replay},
    member={"XREADGROUP COUNT 1000, XACK of all": partial(member, count=WINDOW)},
    member_singly={"XREADGROUP COUNT 1, XACK": partial(member, count=1)},
    unsettled=unsettled,
    reader=StreamReader,
    writer=StreamWriter,
)

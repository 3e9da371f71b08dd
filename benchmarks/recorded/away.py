"""A subscriber leaves, comes back after a minute with the position it kept, and catches up while publishing goes on.

It has caught up when it takes a message that was published less than PRESENT_SECONDS before. Until the publisher ends, and with
what it read before it left, it must have everything once, in order; the messages around its position may come twice.
"""

from __future__ import annotations

import time
from array import array
from typing import NamedTuple

from benchmarks.crew import Crew, Parent
from benchmarks.machine import disk_flushes
from benchmarks.recorded.clients.client import WAIT_SECONDS, Reader
from benchmarks.recorded.systems import SYSTEMS
from benchmarks.recorded.workload import Found, Size, Wrong, check_sequence, numbers, payloads, published_ns, without_repeats
from roq.tools.bench.cpu import MachineMeter
from roq.tools.bench.load import TICK_SECONDS, Pace

PRESENT_SECONDS = 0.1
HERE_SECONDS = 1.0  # it reads before it leaves, and once it has caught up
CATCH_UP_SECONDS = 300.0
LAST_NS = (1 << 64) - 1  # in place of the time: the publisher has ended
LATE_SECONDS = 2.0  # of the publisher: then the system can't take this rate


class Back(NamedTuple):
    """What the subscriber found: seconds until it had caught up, messages that took."""

    seconds: float
    messages: int
    cpu_seconds: float


def _publish(parent: Parent, system: str, address: str, queue: str, rate: int) -> None:
    """Body of the publisher: at this rate until it hears that it is over; tells how many there were."""
    open_writer = SYSTEMS[system].clients.writer
    assert open_writer is not None
    writer = open_writer(address, queue)
    parent.ready()
    pace = Pace(rate, 0, time.monotonic_ns())
    while not parent.heard():
        now, first = time.monotonic_ns(), pace.sent
        due = pace.due(now)
        if due > rate * LATE_SECONDS:
            raise Wrong(f"it does not take {rate:,} messages/s: the publisher is {due / rate:.1f} s late after {first:,}")
        if due:
            writer.send(payloads(first, due, now))
        writer.rest(TICK_SECONDS)
    writer.send(payloads(pace.sent, 1, LAST_NS))
    writer.finish()
    parent.tell(pace.sent + 1)


def _next(reader: Reader) -> list[bytes]:
    if some := reader.next():
        return some
    raise Wrong(f"nothing came for {WAIT_SECONDS:g} s")


def _subscribe(parent: Parent, system: str, address: str, queue: str) -> None:
    """Body of the subscriber: reads for a while, leaves, says so; comes back when it hears, tells that it has caught up; reads
    on to the last message and tells what it had, before and after."""
    open_reader = SYSTEMS[system].clients.reader
    assert open_reader is not None
    parent.ready()
    reader, before = open_reader(address, queue, None), list[bytes]()
    until = time.monotonic() + HERE_SECONDS
    while time.monotonic() < until:
        before += _next(reader)
    position = reader.position()
    reader.close()
    parent.tell("away")
    parent.hear()
    cpu, began = time.process_time(), time.monotonic_ns()
    reader, after = open_reader(address, queue, position), list[bytes]()
    now = began
    while not after or now - published_ns(after[-1]) > PRESENT_SECONDS * 1e9:
        after += _next(reader)
        now = time.monotonic_ns()
    parent.tell(Back((now - began) / 1e9, len(after), time.process_time() - cpu))
    while published_ns(after[-1]) != LAST_NS:
        after += _next(reader)
    parent.tell((numbers(before).tobytes(), numbers(after).tobytes()))
    reader.close()


def away_and_back(system: str, address: str, queue: str, size: Size) -> Found:
    """One absence. Raises RuntimeError if a client fails, Wrong if a message is missing."""
    SYSTEMS[system].clients.prepare(address, queue)
    with Crew() as crew:
        publisher = crew.start(_publish, system, address, queue, size.rate)
        subscriber = crew.start(_subscribe, system, address, queue)
        for worker in (publisher, subscriber):
            worker.until_ready()
        for worker in (publisher, subscriber):
            worker.say()
        subscriber.told(WAIT_SECONDS)
        time.sleep(size.away_seconds)
        publisher.check()
        flushes, meter, began = disk_flushes(), MachineMeter(), time.monotonic()
        subscriber.say()
        back: Back = subscriber.told(CATCH_UP_SECONDS)
        wall, other = time.monotonic() - began, meter.foreign_cores(back.cpu_seconds)
        flushed = (disk_flushes() - flushes) / back.messages
        time.sleep(HERE_SECONDS)
        publisher.say()
        published = publisher.told(WAIT_SECONDS)
        before, after = (array("Q", part) for part in subscriber.told(WAIT_SECONDS))
    check_sequence(without_repeats(before, after), 0, published)
    way = f"away for {size.away_seconds:g} s at {size.rate:,}/s"
    return Found(way, back.messages, back.seconds, None, None, flushed, back.cpu_seconds / wall, other)

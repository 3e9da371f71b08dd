"""A full subscriber outlives its Exchange: libzmq 4.3.5 aborts the process if a PING or PONG is written then.

Each end is a process of its own with the very sockets of an Exchange and of a subscriber. Not covered: a `block` queue whose
Exchange's PING lies in the last 8 KiB that were read before its death (decision 0024).
"""

from __future__ import annotations

import select
import subprocess
import sys

import pytest

EXCHANGE = """
import sys
import zmq
from roq.runtime.sockets import bind, exchange_back
from roq.wire.assignment import Overflow

back = exchange_back(1024 * 1024, Overflow(sys.argv[1]))
print(bind(back, "127.0.0.1", 0), flush=True)
back.recv()
sent = 0
while True:  # until its reader is full, and on: it drops, or waits
    try:
        back.send(bytes(10_000), zmq.NOBLOCK)
        sent += 1
    except zmq.Again:
        pass
    if sent == 200:
        print("much", flush=True)
    back.poll(1)
"""
SUBSCRIBER = """
import sys
import zmq
from roq.runtime.sockets import subscriber_socket

socket = subscriber_socket(1024 * 1024)
socket.subscribe(b"")
socket.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
sys.stdin.readline()
taken = 0
while socket.poll(500):
    socket.recv()
    taken += 1
print(taken, flush=True)
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 20)
    assert ready, "nothing was printed"
    return process.stdout.readline()


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_full_subscriber_outlives_the_death_of_its_exchange() -> None:
    exchange = start(EXCHANGE, "drop")
    subscriber = start(SUBSCRIBER, line(exchange).strip())
    try:
        assert line(exchange) == "much\n"
        exchange.kill()
        exchange.wait(20)
        with pytest.raises(subprocess.TimeoutExpired):
            subscriber.wait(3)  # heartbeats were every second, and the second one after the death was the end
        assert subscriber.stdin is not None
        subscriber.stdin.write("\n")
        subscriber.stdin.flush()
        assert int(line(subscriber)) > 8
        assert subscriber.wait(20) == 0
    finally:
        for process in (exchange, subscriber):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

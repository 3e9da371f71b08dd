"""One member of a cluster, in whatever version of RoQ its Python has:  member.py VERB CLUSTER QUEUE [NUMBERS | WORK QUEUE]

publish    numbers from standard input, one a line; "flush" and "close" wait for the Exchange. Says what was done.
subscribe  says "ready", then a line per message: its number and its headers as JSON
work       puts the numbers given, leases and acks them, says them in order
put        tasks from standard input, one a line; says each that is kept
take       leases and acks until it is interrupted; says each task that is acked

What the library logs is in a file of the folder in which it runs, VERB-PID.log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time

import roq
from roq.errors import TemporaryError

LOG_FORMAT = "%(created).3f %(name)s %(message)s"
LONG_SECONDS = 0.5  # of a flush: worth a line of the log
OPEN_SECONDS = 5.0  # 0.1 does not know the error, and tries again for so long


def say(*words: object) -> None:
    """A line, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def publish(cluster: roq.Cluster, queue: str) -> None:
    loop = asyncio.get_running_loop()
    async with cluster.publisher(queue) as publisher:
        say("ready")
        last = ""
        while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            if command == "flush":
                began = time.monotonic()
                await publisher.flush()
                if (seconds := time.monotonic() - began) > LONG_SECONDS:
                    logging.getLogger().info("flush after %s took %.3f s", last, seconds)
            elif command.startswith("headers "):
                try:
                    await publisher.publish("t", command.split()[1].encode(), {"n": command.split()[1]})
                    await publisher.flush()
                except (roq.RoqError, TypeError) as error:
                    say(type(error).__name__)
                    continue
            else:
                last = command
                await publisher.publish("t", command.encode())
            say(command)
    say("closed")


async def subscribe(cluster: roq.Cluster, queue: str) -> None:
    def lost(event: Exception) -> None:
        logging.getLogger().warning("%s", event)
        say("lost", event)

    subscriber = cluster.subscriber(queue, "t", on_lost=lost)
    await subscriber.open(OPEN_SECONDS)
    try:
        say("ready")
        async for message in subscriber:
            say(message.payload.decode(), json.dumps(getattr(message, "headers", {})))
    finally:
        await subscriber.close()


async def work(address: str, numbers: list[str]) -> None:
    async with roq.open_queue(address) as queue:
        await queue.put_many([number.encode() for number in numbers])
        done: list[str] = []
        while len(done) < len(numbers):
            for task in await queue.lease(count=10, wait_seconds=10):
                done.append(task.payload.decode())
                await task.ack()
        say(*done)


async def put(address: str) -> None:
    loop = asyncio.get_running_loop()
    async with roq.open_queue(address) as queue:
        say("ready")
        while payload := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            while True:
                try:
                    await queue.put(payload.encode())
                    break
                except TemporaryError:
                    continue  # it may be there twice
            say(payload)
    say("closed")


async def take(address: str) -> None:
    async with roq.open_queue(address) as queue:
        say("ready")
        while True:
            try:
                for task in await queue.lease(count=10, wait_seconds=10):
                    await task.ack()
                    say(task.payload.decode())
            except roq.RoqError:
                continue  # what was not acked comes again


async def main() -> None:
    verb, address, queue, *more = sys.argv[1:]
    logging.basicConfig(filename=f"{verb}-{os.getpid()}.log", level=logging.INFO, format=LOG_FORMAT)
    logging.getLogger("kazoo").setLevel(logging.ERROR)
    try:
        if verb in ("work", "put", "take"):
            tasks = f"roq://{address}/{queue}"
            await (work(tasks, more) if verb == "work" else {"put": put, "take": take}[verb](tasks))
            return
        async with roq.connect(address) as cluster:
            await {"publish": publish, "subscribe": subscribe}[verb](cluster, queue)
    except roq.RoqError as error:
        say(type(error).__name__, error)


asyncio.run(main())

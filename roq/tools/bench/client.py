"""One client process of the load generator: `python -m roq.tools.bench.client`, driven by its parent (protocol.py).

Covers the RoQ side: connect, be ready, publish or read, report. The loops are in publish.py and subscribe.py.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from roq.client.cluster import connect
from roq.errors import RoqError
from roq.pubsub.publisher import Publisher
from roq.tools.bench import subscribe
from roq.tools.bench.accounting import Account, stream_ends, thin
from roq.tools.bench.load import Load
from roq.tools.bench.protocol import (
    SAMPLES_SENT,
    ClientFailed,
    ClientReady,
    ParentLink,
    PublisherFinished,
    PublishersFinished,
    PublishOrder,
    StartPublishing,
    SubscribeOrder,
    SubscriberFinished,
)
from roq.tools.bench.publish import flat_out, flat_out_many, paced

READY_SECONDS = 30.0  # a subscriber is attached to every Exchange within this
FLUSH_SECONDS = 60.0  # everything published has passed its Exchange within this


async def publish(link: ParentLink, order: PublishOrder) -> None:
    """Be a publisher."""
    async with connect(order.address) as cluster:
        async with cluster.publisher(order.queue) as publisher:
            link.report(ClientReady(publisher.id))
            await link.command(StartPublishing)
            cpu, first_ns = time.process_time(), time.monotonic_ns()
            published = await _send(publisher, order.load, order.index)
            await publisher.flush(FLUSH_SECONDS)
            last_ns = time.monotonic_ns()
        link.report(PublisherFinished(published, first_ns, last_ns, time.process_time() - cpu))


async def _send(publisher: Publisher, load: Load, index: int) -> int:
    if load.rate:
        return await paced(load, index, publisher.publish, publisher.publish_many)
    if load.batch:
        return await flat_out_many(load, index, publisher.publish_many)
    return await flat_out(load, index, publisher.publish)


async def subscribe_and_count(link: ParentLink, order: SubscribeOrder) -> None:
    """Be a subscriber."""
    load = order.load
    async with (
        connect(order.address) as cluster,
        cluster.subscriber(order.queue, *load.patterns_of(order.index)) as subscriber,
    ):
        await subscriber.ready(READY_SECONDS)
        link.report(ClientReady())
        publishers = (await link.command(StartPublishing)).publishers
        known = {index: load.messages for index in publishers if load.messages and not load.duration}
        account = Account(stream_ends(load, publishers, known))
        cpu = time.process_time()
        reading = asyncio.get_running_loop().create_task(subscribe.read(subscriber, account, load))

        async def ends() -> dict[int, int]:
            return stream_ends(load, publishers, (await link.command(PublishersFinished)).published)

        await subscribe.finish(reading, account, ends(), order.idle_seconds)
        cpu = time.process_time() - cpu
        delivered, duplicated, reordered = account.totals()
        latencies = thin(account.samples.settled(), SAMPLES_SENT)
        lost = subscriber.lost
        link.report(
            SubscriberFinished(delivered, duplicated, reordered, account.foreign, lost, account.last_ns, cpu, latencies)
        )


async def serve() -> int:
    """Do what the parent orders; 1 if it could not be done."""
    link = await ParentLink.open()
    try:
        order = await link.order()
        if isinstance(order, PublishOrder):
            await publish(link, order)
        else:
            await subscribe_and_count(link, order)
    except EOFError:
        return 1  # the parent is gone: nobody wants a report
    except (RoqError, OSError) as error:
        link.report(ClientFailed(type(error).__name__, str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(uvloop.run(serve()))

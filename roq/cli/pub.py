"""`roq pub`: a message per line of standard input, raw bytes without the newline."""

from __future__ import annotations

from typing import Annotated

import typer

from roq.cli.address import ClusterOption, JsonOption, with_cluster
from roq.cli.output import print_json, say
from roq.cli.streams import read_lines
from roq.client.cluster import Cluster
from roq.ids import topic_bytes
from roq.wire.limits import FRAME_BYTES_CEILING

STANDARD_INPUT = 0


def pub(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic of all messages.", show_default=False)],
    cluster: ClusterOption = None,
    json: JsonOption = False,
) -> None:
    """Publish a message per line of standard input; tell how many on standard error."""
    topic_bytes(topic)  # a wrong topic is told before anything is connected

    async def work(connected: Cluster) -> None:
        async with connected.publisher(queue) as publisher:
            try:
                async for lines in read_lines(STANDARD_INPUT, FRAME_BYTES_CEILING):
                    await publisher.publish_many(topic, lines)
                await publisher.flush()
            finally:
                dropped = f", dropped {publisher.dropped}" if publisher.dropped else ""
                say(f"roq pub: published {publisher.messages} messages{dropped}")
                if json:
                    print_json({"published": publisher.messages, "dropped": publisher.dropped})

    with_cluster(cluster, work)

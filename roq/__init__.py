"""RoQ: an elastic, highly available message system.

async with roq.connect("127.0.0.1:2181") as cluster:
    await cluster.create_queue("orders")
    async with cluster.publisher("orders") as publisher:
        await publisher.publish("eu.paris", b"...")
"""

from __future__ import annotations

from roq import blocking as blocking
from roq.client.cluster import Cluster, connect
from roq.client.message import Message, log_lost, raise_lost
from roq.client.publisher import Publisher
from roq.client.subscriber import Subscriber
from roq.errors import MessagesLost, RoqError, SlowSubscriber
from roq.wire.policy import Bounds, ExchangeRule, HostRule, Policy, QueueRule, policy_from_toml

__version__ = "0.1.0"
__all__ = [
    "Bounds",
    "Cluster",
    "ExchangeRule",
    "HostRule",
    "Message",
    "MessagesLost",
    "Policy",
    "Publisher",
    "QueueRule",
    "RoqError",
    "SlowSubscriber",
    "Subscriber",
    "blocking",
    "connect",
    "log_lost",
    "policy_from_toml",
    "raise_lost",
]

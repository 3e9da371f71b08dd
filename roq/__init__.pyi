from roq import blocking as blocking
from roq.client.cluster import Cluster, connect
from roq.client.topology import Change, TopologyEvent
from roq.errors import LeaseLost, MessagesLost, RoqError, SlowSubscriber
from roq.pubsub.message import Message, log_lost, raise_lost
from roq.pubsub.publisher import Publisher
from roq.pubsub.subscriber import Subscriber
from roq.wire.policy import Bounds, ExchangeRule, HostRule, Policy, QueueRule, policy_from_toml
from roq.workqueue.contract import NewTask, Status, TaskState, TaskView
from roq.workqueue.handling import Work
from roq.workqueue.leasing import Task
from roq.workqueue.queue import WorkQueue, open_queue

__version__: str
__all__ = [
    "Bounds",
    "Change",
    "Cluster",
    "ExchangeRule",
    "HostRule",
    "LeaseLost",
    "Message",
    "MessagesLost",
    "NewTask",
    "Policy",
    "Publisher",
    "QueueRule",
    "RoqError",
    "SlowSubscriber",
    "Status",
    "Subscriber",
    "Task",
    "TaskState",
    "TaskView",
    "TopologyEvent",
    "Work",
    "WorkQueue",
    "blocking",
    "connect",
    "log_lost",
    "open_queue",
    "policy_from_toml",
    "raise_lost",
]

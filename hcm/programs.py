"""Which program a process kind is. The fork server imports this module, so everything the children need is loaded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import roq.log.store.process
import roq.pubsub.exchange.process
import roq.pubsub.monitor.process
import roq.pubsub.scaling.process
import roq.workqueue.master.process
from roq.groups.feed import feed
from roq.groups.outbox import forward
from roq.shuffle.node.server import beside_store
from roq.wire.assignment import ProcessKind
from roq.wire.process import ChildSpec
from roq.workqueue.master.process import BesidePrograms

BESIDE_MASTER = BesidePrograms(feed, forward)
PROGRAMS: Mapping[ProcessKind, Callable[[ChildSpec], int]] = {
    ProcessKind.MONITOR: roq.pubsub.monitor.process.main,
    ProcessKind.EXCHANGE: roq.pubsub.exchange.process.main,
    ProcessKind.SCALING: roq.pubsub.scaling.process.main,
    ProcessKind.STORE: partial(roq.log.store.process.main, beside=beside_store),
    ProcessKind.MASTER: partial(roq.workqueue.master.process.main, programs=BESIDE_MASTER),
}

"""Which program a process kind is. The template imports this module, so everything the children need is loaded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import roq.exchange.process
import roq.master.process
import roq.monitor.process
import roq.scaling.process
import roq.store.process
from roq.wire.assignment import ProcessKind
from roq.wire.child import ChildSpec

PROGRAMS: Mapping[ProcessKind, Callable[[ChildSpec], int]] = {
    ProcessKind.MONITOR: roq.monitor.process.main,
    ProcessKind.EXCHANGE: roq.exchange.process.main,
    ProcessKind.SCALING: roq.scaling.process.main,
    ProcessKind.STORE: roq.store.process.main,
    ProcessKind.MASTER: roq.master.process.main,
}

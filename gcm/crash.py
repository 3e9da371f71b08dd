"""Crash points, for tests: the environment variable ROQ_CRASH_POINT names the step at which this GCM kills itself.

Each point stands right after one step of a request or a recovery has taken effect, so that tests can end a leader between
any two of them. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

VARIABLE = "ROQ_CRASH_POINT"
REQUEST_STEPS = ("received", "recorded", "settled", "forgotten")  # forgotten: after the answer
RECOVERY_STEPS = ("seen", "recorded", "activated", "repaired", "forgotten")
SHUFFLE_STAGES = ("none", "checking", "cutting", "moving", "keeping", "removed")  # roq.shuffle.record.Stage
FLEET_STEPS = ("creating", "created", "booting", "serving", "returning", "destroying", "destroyed", "gone")
POINTS = (
    *(f"create_queue.{step}" for step in REQUEST_STEPS),
    *(f"create_exchange.{step}" for step in REQUEST_STEPS),
    *(f"create_work_queue.{step}" for step in REQUEST_STEPS),
    *(f"set_shards.{step}" for step in REQUEST_STEPS[:3]),
    *(f"remove_shard.{step}" for step in ("emptied", "recorded")),
    *(f"recover_host.{step}" for step in RECOVERY_STEPS),
    *(f"create_shuffle.{step}" for step in REQUEST_STEPS[:3]),
    *(f"fleet.{step}" for step in FLEET_STEPS),
    *(f"shuffle.{stage}.{step}" for stage in SHUFFLE_STAGES for step in ("decided", "written")),
)

_armed: set[str] = set()


def arm(environment: Mapping[str, str]) -> None:
    """Die at the point named in the environment, if one is."""
    _armed.clear()
    if name := environment.get(VARIABLE):
        _armed.add(name)


def crash_point(name: str) -> None:
    """End this process as `kill -9` does, if this is the point."""
    if name in _armed:
        os.kill(os.getpid(), signal.SIGKILL)

"""What `run` does with a handler's outcome, for the asynchronous and the plain worker alike."""

from __future__ import annotations

import math
import random
import traceback

import msgspec

from roq.errors import InvalidConfiguration
from roq.runtime import observe
from roq.wire.task import ERROR_BYTES_MAX
from roq.workqueue.contract import check_lease

logger = observe.logger(__name__)
RETRY_SECONDS_MAX = 300.0  # longest back-off of a task that fails again and again
GRACE_SECONDS = 10.0  # default time a handler has to finish once the worker was told to stop
CONCURRENCY_MAX = 10_000
PART_CHARACTERS = 512  # of one frame or message of a traceback: a huge message must not push out the place


class Work(msgspec.Struct):
    """What a `run` did. failed: handlers that raised; their tasks were given back. lost: leases that ended before their
    handler did. returned: tasks given back untried or unfinished because the worker stopped. stopped: by a signal."""

    done: int = 0
    failed: int = 0
    lost: int = 0
    returned: int = 0
    stopped: bool = False

    def count(self, outcome: str) -> None:
        """One more that is `done`, `failed` or `lost`."""
        setattr(self, outcome, getattr(self, outcome) + 1)


class Rules(msgspec.Struct, frozen=True):
    """How a worker works. wait_seconds: end when there was nothing to do for so long; None: never. handle_signals: SIGTERM and
    SIGINT stop it."""

    concurrency: int = 1
    seconds: float = 60.0
    wait_seconds: float | None = None
    grace_seconds: float = GRACE_SECONDS
    retry_seconds: float = 1.0
    handle_signals: bool = True

    def check(self) -> Rules:
        """Itself. Raises InvalidConfiguration."""
        check_lease(self.seconds, 1, self.wait_seconds)
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise InvalidConfiguration(f"concurrency is 1 to {CONCURRENCY_MAX}, got {self.concurrency}")
        if not (self.grace_seconds >= 0 and self.retry_seconds >= 0):
            raise InvalidConfiguration("grace_seconds and retry_seconds are at least 0")
        return self

    def retry_delay(self, attempt: int) -> float:
        """Seconds until a task is tried again whose attempt number `attempt` failed: doubling, with jitter."""
        if not self.retry_seconds:
            return 0.0
        doublings = min(attempt - 1, max(0, math.ceil(math.log2(RETRY_SECONDS_MAX / self.retry_seconds))))
        return min(RETRY_SECONDS_MAX, self.retry_seconds * 2.0**doublings) * random.uniform(0.75, 1.25)


def reason(error: BaseException) -> str:
    """The text kept with a failed task: one line that tells what, then where."""
    what = f"{type(error).__name__}: {error}".split("\n", 1)[0][: ERROR_BYTES_MAX // 4]
    parts = traceback.format_exception(error)
    where = "".join(part if len(part) <= PART_CHARACTERS else f"{part[:PART_CHARACTERS]}…\n" for part in parts)
    return f"{what}\n\n{where[-ERROR_BYTES_MAX // 2 :]}"


def log_failure(queue: str, task: str, attempt: int, error: Exception) -> str:
    """One log line with the traceback, cut to ERROR_BYTES_MAX characters; the text to keep with the task."""
    text = reason(error)
    fields = {"queue": queue, "task": task, "attempt": attempt, "error": text}
    logger.warning("handler failed", extra={"fields": fields})
    return text

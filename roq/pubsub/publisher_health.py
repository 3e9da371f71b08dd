"""What an application is told of its publisher's state."""

from __future__ import annotations

from typing import NamedTuple

from roq.pubsub.links import BACKLOG_BYTES

SILENT_SECONDS = 3.0  # of the Monitor: worth a word


class PublisherHealth(NamedTuple):
    """What is well with a publisher and what is not. Seconds; backlog in bytes."""

    ready: bool
    exchange: str
    path: int
    monitor_silent_seconds: float
    backlog_bytes: int
    dropped: int
    problems: tuple[str, ...]

    @classmethod
    def of(
        cls, ended: str, exchange: str, path: int, silent: float, backlog: int, dropped: int, *, joined: bool
    ) -> PublisherHealth:
        """With what these say themselves among the problems. ended: why it publishes nothing more, "" if it does."""
        problems = []
        if ended:
            problems.append(ended)
        elif not exchange:
            problems.append("not attached to an Exchange")
        if not joined or silent > SILENT_SECONDS:
            problems.append(f"the Monitor has been silent for {silent:.1f} s")
        if backlog > BACKLOG_BYTES:
            problems.append(f"{backlog} bytes wait for the Exchange")
        if dropped:
            problems.append(f"{dropped} messages were dropped")
        return cls(not ended and exchange != "", exchange, path, silent, backlog, dropped, tuple(problems))

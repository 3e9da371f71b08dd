"""What `health()` of a publisher and of a subscriber tells."""

from __future__ import annotations

from typing import NamedTuple


class PublisherHealth(NamedTuple):
    """What is well with a publisher and what is not. Seconds; backlog in bytes."""

    ready: bool
    exchange: str
    path: int
    monitor_silent_seconds: float
    backlog_bytes: int
    dropped: int
    problems: tuple[str, ...]


class SubscriberHealth(NamedTuple):
    """What is well with a subscriber and what is not."""

    ready: bool
    attached: tuple[str, ...]
    missing: tuple[str, ...]  # Exchanges that have not proved our subscriptions yet
    monitor_silent_seconds: float
    buffered_bytes: int
    lost: int
    problems: tuple[str, ...]

"""What is done: RDSQ's Figure 2 (messages of 100 bytes, one at a time, durable; then read one at a time with ack), and the same
in windows. Pure.

Source: H. Yu, "RDSQ: Reliable Queue Protocol over Shared Logs", SIGMOD 2018, section 4.2.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """One message at a time, or a window of unacknowledged ones."""

    ONE_BY_ONE = "one by one"
    WINDOW = "window"


class Phase(StrEnum):
    """First everything is written, then everything is read."""

    WRITE = "write"
    READ = "read"


class Workload(msgspec.Struct, frozen=True):
    """messages: per client. size: bytes. window: messages, in Mode.WINDOW."""

    mode: Mode
    clients: int
    messages: int
    size: int = 100
    window: int = 1000


class Rate(msgspec.Struct, frozen=True):
    """One phase of one run. flushes: of the whole disk, per message. cores: busy, by the clients and by everything else."""

    phase: Phase
    operations_per_second: float
    p50_us: float
    p99_us: float
    flushes: float
    client_cores: float
    other_cores: float


CLIENTS = (1, 2, 4, 8, 16)
FULL_MESSAGES = 10_000  # per client, as in the paper

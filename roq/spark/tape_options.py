"""The options of format("roq") for recorded queues, checked: which queue and topics, from where to where, how much at once.

Not covered: those for work queues (queue_options.py), which `queue` or `kind` tell from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

from roq.client.read import queue_at
from roq.errors import InvalidAddress, InvalidConfiguration, InvalidFilter, InvalidName, InvalidPosition, InvalidTopic
from roq.pubsub.subscription import check_filter
from roq.spark.errors import address_of, name_of, option_error, refuse_unknown, whole_number
from roq.wire.recording import ENTRY_BYTES, TapePosition
from roq.wire.where import Where

EXAMPLE = '.option("cluster", "zk1:2181").option("queue", "orders")'
EARLIEST, LATEST = "earliest", "latest"
ENTRIES_MAX = 1_000_000_000
PARTITION_ENTRIES = 1_000  # of one task, at most about 1 GiB
BYTES_MAX = ENTRIES_MAX * ENTRY_BYTES
KNOWN = (
    "address", "cluster", "kind", "queue", "topics", "startingPosition", "endingPosition", "maxEntriesPerTrigger",
    "maxBytesPerTrigger", "entriesPerPartition", "failOnDataLoss", "where", "checkpointLocation", "queryName",
)  # fmt: skip
Place = str | datetime | TapePosition  # "earliest", "latest", a time or a position


@dataclass(frozen=True)
class TapeOptions:
    """Options as they were given, and their defaults. topics: filters. batch_entries: of one micro-batch at most; None: all.
    where: a condition that messages must meet, "" for none."""

    zookeeper: str
    queue: str
    topics: tuple[str, ...]
    start: Place
    end: Place
    batch_entries: int | None
    partition_entries: int
    fail_on_loss: bool
    where: str = ""


def is_recorded(options: Mapping[str, str]) -> bool:
    """Whether what is read is a recorded queue, and no work queue."""
    return "queue" in options or options.get("kind", "").strip().lower() == "queue"


def tape_options(options: Mapping[str, str], default_start: str) -> TapeOptions:
    """Raises errors in Spark's style, naming the option."""
    refuse_unknown(options, KNOWN)
    if options.get("kind", "queue").strip().lower() != "queue":
        raise option_error("kind", "queue names a recorded queue; leave kind out")
    zookeeper, queue = _place(options)
    return TapeOptions(
        zookeeper=zookeeper,
        queue=queue,
        topics=_topics(options.get("topics", ">")),
        start=_position(options, "startingPosition", default_start),
        end=_position(options, "endingPosition", LATEST),
        batch_entries=_batch_entries(options),
        partition_entries=whole_number(options, "entriesPerPartition", PARTITION_ENTRIES, 1, ENTRIES_MAX),
        fail_on_loss=_flag(options, "failOnDataLoss"),
        where=_condition(options.get("where", "").strip()),
    )


def _place(options: Mapping[str, str]) -> tuple[str, str]:
    address, named = address_of(options, EXAMPLE), options.get("queue", "").strip()
    if named and options.get("path"):
        raise option_error("queue", "names the queue already; leave the path out")
    if "queue" in options and not named:
        raise option_error("queue", "is empty: name a recorded queue")
    if named or options.get("path") or "cluster" in options:
        address = f"{address}/{quote(named or name_of(options, 'queue'), safe='')}"
    try:
        return queue_at(address)
    except (InvalidAddress, InvalidConfiguration, InvalidName) as error:
        raise option_error("cluster" if "cluster" in options else "address", str(error)) from None


def _batch_entries(options: Mapping[str, str]) -> int | None:
    """The lower one of both limits. An entry is taken for as large as one gets, unless a single frame is larger."""
    limits = []
    if "maxEntriesPerTrigger" in options:
        limits.append(whole_number(options, "maxEntriesPerTrigger", 0, 1, ENTRIES_MAX))
    if "maxBytesPerTrigger" in options:
        limits.append(max(1, whole_number(options, "maxBytesPerTrigger", 0, 1, BYTES_MAX) // ENTRY_BYTES))
    return min(limits, default=None)


def _condition(text: str) -> str:
    try:
        return Where(text).text if text else ""
    except InvalidFilter as error:
        raise option_error("where", str(error)) from None


def _topics(text: str) -> tuple[str, ...]:
    try:
        return tuple(check_filter(one.strip()) for one in text.split(",") if one.strip()) or (">",)
    except InvalidTopic as error:
        raise option_error("topics", f"filters with commas between: {error}") from None


def _position(options: Mapping[str, str], option: str, default: str) -> Place:
    text = options.get(option, default).strip()
    if text in (EARLIEST, LATEST):
        return text
    try:
        if text.startswith("p1."):
            return TapePosition.parse(text)
        return datetime.fromisoformat(text).astimezone()
    except (InvalidPosition, ValueError, OverflowError) as error:
        raise option_error(
            option,
            f"{text[:80]!r} is none of {EARLIEST}, {LATEST}, a time such as 2026-11-26T10:00+01:00, a position (p1.…): {error}",
        ) from None


def _flag(options: Mapping[str, str], option: str) -> bool:
    text = options.get(option, "true").strip().lower()
    if text not in ("true", "false"):
        raise option_error(option, f"{text!r} is neither true nor false")
    return text == "true"

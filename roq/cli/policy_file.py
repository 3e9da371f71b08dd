"""Scaling policies as TOML files: reading, writing, what each field means, and the sample that `roq policy init` writes.

docs/policies.md is checked against what stands here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from roq.client.overview import policy_tables
from roq.errors import CallError, InvalidPolicy
from roq.wire.policy import Policy, policy_from_toml


class Field(NamedTuple):
    """A field for people. sample: what `roq policy init` writes; active: else it is written as a comment."""

    unit: str
    meaning: str
    sample: float
    active: bool = True


# The samples: an Exchange carries 3.7 million messages of 100 bytes a second on two cores (README, Measured), and a network of
# 1 Gbit/s 125 MB/s. Memory is off because another Exchange does not free what other programs take.
FIELDS = {
    "exchange.max_messages_per_second": Field("messages/s", "coming in to one Exchange", 1_000_000),
    "exchange.max_bytes_per_second": Field("bytes/s", "coming in to one Exchange", 100_000_000),
    "host.max_cpu_fraction": Field("0 to 1", "of all cores of a host that runs an Exchange of the queue", 0.8),
    "host.max_memory_fraction": Field("0 to 1", "of the memory of such a host, whoever uses it", 0.9, active=False),
    "queue.max_messages_per_second_per_exchange": Field(
        "messages/s", "average over the queue's Exchanges", 500_000, active=False
    ),
    "queue.max_publishers_per_exchange": Field("publishers", "average over the queue's Exchanges", 100, active=False),
    "bounds.min_exchanges": Field("Exchanges", "never fewer", 1),
    "bounds.max_exchanges": Field("Exchanges", "never more", 4),
    "bounds.cooldown_seconds": Field("seconds", "of rest after a change has taken effect", 5.0),
    "bounds.hysteresis": Field(
        "0 to 1", "scale in only when every limit would keep so much to spare with one Exchange less", 0.3
    ),
}
TABLES = {
    "exchange": "What one Exchange carries at most. Above it: another Exchange, or publishers move to an emptier one.",
    "host": "What a host may be used. Above it: publishers move to an Exchange on another host.",
    "queue": "Averages over all Exchanges of the queue. Above them: another Exchange.",
    "bounds": "Limits of the scaling itself.",
}


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file; raises InvalidPolicy with the reason."""
    try:
        return policy_from_toml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPolicy(f"can't read policy file {path}: {error}") from None


def policy_toml(policy: Policy) -> str:
    """The policy as `roq policy set` reads it: only what is set, then the bounds in full."""
    parts = []
    for name, fields in policy_tables(policy).items():
        lines = [f"{field} = {value}" for field, value in fields.items() if value is not None]
        if lines:
            parts.append("\n".join((f"[{name}]", *lines)))
    return "\n\n".join(parts) + "\n"


def sample_toml() -> str:
    """A policy with every field and what it means, as `roq policy set` and `replay` read it."""
    parts = ["# A scaling policy for `roq policy set QUEUE FILE`. A rule that is left out, or a comment, is off."]
    for table, fields in policy_tables(Policy()).items():
        lines = [f"# {TABLES[table]}", f"[{table}]"]
        for name in fields:
            one = FIELDS[f"{table}.{name}"]
            lines.append(f"{'' if one.active else '# '}{name} = {one.sample:_}  # {one.unit}: {one.meaning}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write_sample(path: Path) -> None:
    """Raises CallError if the file exists or can't be written."""
    try:
        with path.open("x") as file:
            file.write(sample_toml())
    except OSError as error:
        raise CallError(f"can't write {path}: {error.strerror}") from None

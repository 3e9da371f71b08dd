"""Scaling policy of one queue: what people write in TOML, what ZooKeeper keeps, what the ScalingProcess applies.

Rules after EQS / thesis §6.2.3, §6.4.9; a rule left out (None) is off. Rates are per second, fractions are 0..1. Limits say
what machines carry, targets what members shall see.

Programs of version 0.1 refuse a policy with a field they don't know, and with it the answer or the assignment it is part of. So
wherever they read it, a policy goes in two parts, see `split`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

import msgspec

from roq.errors import InvalidPolicy

Rules = tuple[tuple[str, float], ...]  # (name as in Policy.rules or "bounds.…", value)


class ExchangeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One Exchange carries at most this much (messages or bytes coming in)."""

    max_messages_per_second: float | None = None
    max_bytes_per_second: float | None = None


class HostRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host that runs an Exchange of the queue stays below these fractions of its CPU and memory."""

    max_cpu_fraction: float | None = None
    max_memory_fraction: float | None = None


class QueueRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Averages over the queue's Exchanges. Every subscriber reads from every Exchange; what one Exchange sends is its messages
    times the subscribers, so that the more there are of these, the more Exchanges share the work."""

    max_messages_per_second_per_exchange: float | None = None
    max_publishers_per_exchange: float | None = None
    max_subscribers_per_exchange: float | None = None


class TargetRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What members of the queue shall see. Least throughputs count only while publishers are held up: who has nothing to
    publish misses nothing."""

    max_latency_p99_seconds: float | None = None
    min_messages_per_second: float | None = None
    min_messages_per_second_per_publisher: float | None = None


class GroupRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What each group of a recorded queue shall keep to. Exchanges don't make a group faster: a rule that is not kept is
    reported, nothing else. max_behind_seconds: age of the message that comes into the group next; max_ready_seconds: of the
    oldest one that waits for a worker."""

    max_lag_messages: float | None = None
    max_behind_seconds: float | None = None
    max_ready_seconds: float | None = None


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits on the scaling itself.

    hysteresis: scale in only when what remains would stay below (1 - hysteresis) of every limit. credit: and when the lower
    load has held so many times as long as the removal and the return of an Exchange take; 0: this need not be earned.
    """

    min_exchanges: int = 1
    max_exchanges: int = 4
    cooldown_seconds: float = 5.0
    hysteresis: float = 0.3
    credit: float = 2.0


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole policy. The default one never scales by itself."""

    exchange: ExchangeRule = ExchangeRule()
    host: HostRule = HostRule()
    queue: QueueRule = QueueRule()
    target: TargetRule = TargetRule()
    group: GroupRule = GroupRule()
    bounds: Bounds = Bounds()

    def rules(self) -> dict[str, float | None]:
        """Every rule's number by its name, e.g. `host.max_cpu_fraction`; None: it is off."""
        parts = {"exchange": self.exchange, "host": self.host, "queue": self.queue, "target": self.target, "group": self.group}
        return {f"{table}.{name}": getattr(part, name) for table, part in parts.items() for name in part.__struct_fields__}

    def scales(self) -> bool:
        """False for the default policy, which only keeps min_exchanges, and for one that only watches groups."""
        return any(value is not None for name, value in self.rules().items() if not name.startswith("group."))

    def watches_groups(self) -> bool:
        """Whether there is a rule for groups."""
        return self.group != GroupRule()

    def check(self) -> Policy:
        """The policy itself if its numbers make sense; raises InvalidPolicy."""
        for name, value in self.rules().items():
            if value is not None and not 0 < value < float("inf"):
                raise InvalidPolicy(f"{name} must be a positive number, got {value}")
            if value is not None and name.endswith("fraction") and value > 1:
                raise InvalidPolicy(f"{name} is a fraction from 0 to 1, got {value}")
        bounds = self.bounds
        if not 1 <= bounds.min_exchanges <= bounds.max_exchanges:
            raise InvalidPolicy(
                f"bounds: 1 <= min_exchanges <= max_exchanges, got {bounds.min_exchanges} and {bounds.max_exchanges}"
            )
        if not 0 <= bounds.hysteresis < 1:
            raise InvalidPolicy(f"bounds.hysteresis is a fraction below 1, got {bounds.hysteresis}")
        if not 0 <= bounds.cooldown_seconds < float("inf"):
            raise InvalidPolicy(f"bounds.cooldown_seconds is not negative, got {bounds.cooldown_seconds}")
        if not 0 <= bounds.credit < float("inf"):
            raise InvalidPolicy(f"bounds.credit is not negative, got {bounds.credit}")
        return self


NEWER = (  # than version 0.1
    "queue.max_subscribers_per_exchange",
    *(f"target.{name}" for name in TargetRule.__struct_fields__),
    *(f"group.{name}" for name in GroupRule.__struct_fields__),
    "bounds.credit",
)


def split(policy: Policy) -> tuple[Policy, Rules]:
    """What every version reads of it, and the rest by name."""
    tables: dict[str, dict[str, Any]] = msgspec.to_builtins(policy)  # without what is off or has its default
    newer = [(name, *name.split(".")) for name in NEWER]
    rest = tuple((name, float(tables[table].pop(field))) for name, table, field in newer if field in tables.get(table, {}))
    return (msgspec.convert({table: fields for table, fields in tables.items() if fields}, Policy) if rest else policy), rest


def joined(policy: Policy, rest: Iterable[tuple[str, float]]) -> Policy:
    """What was split. A rule that only a later version knows is left out."""
    tables: dict[str, dict[str, Any]] = msgspec.to_builtins(policy)
    known = [(name, value) for name, value in rest if name in NEWER]
    for name, value in known:
        table, _, field = name.partition(".")
        tables.setdefault(table, {})[field] = value
    return msgspec.convert(tables, Policy) if known else policy


def policy_from_toml(text: str) -> Policy:
    """The policy written in `text` (tables exchange, host, queue, target, group, bounds); raises InvalidPolicy."""
    try:
        return msgspec.convert(tomllib.loads(text), Policy).check()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidPolicy(f"not a scaling policy: {error}") from error

"""Scaling policy of one queue: what people write in TOML, what ZooKeeper keeps, what the ScalingProcess applies.

Rules after EQS / thesis §6.4.9; a rule left out (None) is off. Rates are per second, fractions are 0..1.
"""

from __future__ import annotations

import tomllib

import msgspec

from roq.errors import InvalidPolicy


class ExchangeRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One Exchange carries at most this much (messages or bytes coming in)."""

    max_messages_per_second: float | None = None
    max_bytes_per_second: float | None = None


class HostRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A host that runs an Exchange of the queue stays below these fractions of its CPU and memory."""

    max_cpu_fraction: float | None = None
    max_memory_fraction: float | None = None


class QueueRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Averages over the queue's Exchanges."""

    max_messages_per_second_per_exchange: float | None = None
    max_publishers_per_exchange: float | None = None


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits on the scaling itself.

    hysteresis: scale in only when what remains would stay below (1 - hysteresis) of every limit.
    """

    min_exchanges: int = 1
    max_exchanges: int = 4
    cooldown_seconds: float = 5.0
    hysteresis: float = 0.3


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole policy. The default one never scales by itself."""

    exchange: ExchangeRule = ExchangeRule()
    host: HostRule = HostRule()
    queue: QueueRule = QueueRule()
    bounds: Bounds = Bounds()

    def limits(self) -> dict[str, float | None]:
        """Every limit of a rule by its name; those that are off are None."""
        return {
            "exchange.max_messages_per_second": self.exchange.max_messages_per_second,
            "exchange.max_bytes_per_second": self.exchange.max_bytes_per_second,
            "host.max_cpu_fraction": self.host.max_cpu_fraction,
            "host.max_memory_fraction": self.host.max_memory_fraction,
            "queue.max_messages_per_second_per_exchange": self.queue.max_messages_per_second_per_exchange,
            "queue.max_publishers_per_exchange": self.queue.max_publishers_per_exchange,
        }

    def check(self) -> Policy:
        """The policy itself if its numbers make sense; raises InvalidPolicy."""
        for name, value in self.limits().items():
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
        return self


def policy_from_toml(text: str) -> Policy:
    """The policy written in `text` (tables exchange, host, queue, bounds); raises InvalidPolicy."""
    try:
        return msgspec.convert(tomllib.loads(text), Policy).check()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidPolicy(f"not a scaling policy: {error}") from error

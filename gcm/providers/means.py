"""What one GCM can do about machines: its provider, and what a new host is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gcm.providers.calls import ProviderCalls
from gcm.providers.provider import HostSpec, ProviderFailed
from gcm.providers.settings import load_fleet, provider_of
from roq.config import GcmConfig
from roq.errors import InvalidConfiguration
from roq.tools.authority import Authority
from roq.wire.card import CardRole

GIVEN_UP_SECONDS = 15.0  # behind the provider's own bound


@dataclass(frozen=True)
class FleetMeans:
    """Of one process, for all its terms. provider: its name. slots: Exchanges that a host takes. environment: of each host.
    cards, authority: where their cards come from; neither: they have none."""

    provider: str
    calls: ProviderCalls
    slots: int
    environment: Mapping[str, str]
    cards: Path | None = None
    authority: Path | None = None

    def spec(self, name: str, fleet: str) -> HostSpec:
        """Of a new machine. It reads and writes files. Raises ProviderFailed: there is no card for it."""
        return HostSpec(name, fleet, {**self.environment, "ROQ_HOST": name}, self._card(name))

    def _card(self, name: str) -> bytes:
        if self.authority is not None:
            try:
                return msgspec.json.encode(Authority.load(self.authority).issue(name, CardRole.HOST))
            except OSError as error:
                advice = f"the GCM must be able to write {self.authority} and its folder"
                raise ProviderFailed(f"no card for {name}: {error.strerror or error}: {advice}") from error
        if self.cards is None:
            return b""
        path = self.cards / f"{name}.card"
        try:
            return path.read_bytes()
        except OSError as error:
            raise ProviderFailed(f"no card for {name}: `roq ca sign host {name} {path}` makes it ({error.strerror})") from error


def fleet_means(config: GcmConfig) -> FleetMeans | None:
    """By the fleet's file; None if there is none. Raises InvalidConfiguration, ProviderFailed."""
    if config.fleet is None:
        return None
    fleet = load_fleet(config.fleet, os.environ)
    if config.security == "cards" and fleet.cards is None and fleet.authority is None:
        raise InvalidConfiguration(f"{config.fleet}: hosts of a secured cluster need cards: set `cards` or `authority`")
    environment = {
        "ROQ_ZOOKEEPER": fleet.zookeeper or config.zookeeper,
        "ROQ_EXCHANGES_MAX": str(fleet.exchanges_max),
        "ROQ_SESSION_SECONDS": f"{config.session_seconds:g}",
        **({"ROQ_SECURITY": config.security} if config.security != "cards" else {}),
        **fleet.environment,
    }
    calls = ProviderCalls(provider_of(fleet, config.address), fleet.call_seconds + GIVEN_UP_SECONDS)
    return FleetMeans(fleet.provider, calls, fleet.exchanges_max, environment, fleet.cards, fleet.authority)

"""Configuration of the daemons: one frozen model per process, and one loader: TOML file, then ROQ_* environment, then flags.

Defaults stand here and nowhere else; units are in the names. Not covered: settings of queues (roq/wire) and limits of the
protocol (roq/wire/limits.py), which are not a matter of one process.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from roq.errors import InvalidConfiguration

ENVIRONMENT_PREFIX = "ROQ_"
PORT_MAX = 65535
DRAIN_SECONDS_MAX = 3600.0


class Config(BaseModel):
    """What all models share: values never change, unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M", bound=Config)


class GcmConfig(Config):
    """One Global Configuration Manager."""

    zookeeper: str = "127.0.0.1:2181"  # "h1:p,h2:p[/chroot]"; chroot /RoQ if none is given
    name: str = ""  # in logs and in the election; empty: address and port
    address: str = "127.0.0.1"  # to bind, and given to clients
    port: int = Field(default=0, ge=0, le=PORT_MAX)  # requests; 0: any free one
    broadcast_port: int = Field(default=0, ge=0, le=PORT_MAX)  # topology broadcast
    control_port: int = Field(default=0, ge=0, le=PORT_MAX)  # Shutdown Monitor
    session_seconds: float = Field(default=6.0, ge=1.0, le=120.0)  # ZooKeeper session: how soon a dead leader is noticed
    wait_seconds: float = Field(default=30.0, gt=0)  # longest wait for hosts to do what a request needs
    broadcast_seconds: float = Field(default=2.0, gt=0, le=2.0)  # between topology broadcasts; silence for 2.5 s is asked about
    shuffle_abandoned_seconds: float = Field(default=7 * 86400.0, gt=0)  # a shuffle nobody goes on filling is removed
    rebalance_after_seconds: float = Field(default=30.0, ge=0)  # hosts stayed the same for so long: their load is levelled
    shard_kept_seconds: float = Field(default=60.0, ge=0)  # from a shard's closing to its removal; clients look every 30 s
    fleet: Path | None = None  # where it has new hosts made: gcm/providers/settings.py
    card: Path | None = None  # of this GCM
    security: Literal["cards", "none", "mixed"] = "cards"  # of roq.wire.card.SecurityMode
    log_path: Path | None = None  # standard error if not given
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else one JSON object a line
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR|CRITICAL)$")


class HcmConfig(Config):
    """One Host Configuration Manager. It keeps pids, ports and logs of its processes in `state_dir`."""

    zookeeper: str = "127.0.0.1:2181"  # "h1:p,h2:p[/chroot]"; chroot /RoQ if none is given
    host: str = Field(default_factory=platform.node)  # this host's name in the cluster
    address: str = "127.0.0.1"  # to bind, and given to everybody
    state_dir: Path = Path("/var/lib/roq")
    port: int = Field(default=0, ge=0, le=PORT_MAX)  # the HCM's own interface; 0: any free one
    control_port: int = Field(default=0, ge=0, le=PORT_MAX)  # Shutdown Monitor
    port_base: int = Field(default=7000, ge=1, le=PORT_MAX)  # first port given to processes
    port_count: int = Field(default=10_000, ge=16)  # ports given to processes: three per Monitor and Exchange
    exchanges_max: int = Field(default=8, ge=0)  # Exchanges placed here at most
    session_seconds: float = Field(default=6.0, ge=1.0, le=120.0)  # ZooKeeper session: how soon a lost host is noticed
    keep_children: bool = True  # when only the HCM is stopped: its processes run on and the next HCM adopts them
    drain_seconds: float = Field(default=0.0, ge=0, le=DRAIN_SECONDS_MAX)  # a signal that ends them, too, lets others take over
    process_module: str = "hcm.programs"  # module with PROGRAMS, the main function by process kind
    card: Path | None = None  # of this host
    security: Literal["cards", "none", "mixed"] = "cards"  # of roq.wire.card.SecurityMode
    metrics: str | None = None  # "[HOST]:PORT" to serve metrics for Prometheus at; nowhere if not given
    log_path: Path | None = None  # standard error if not given
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else one JSON object a line
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR|CRITICAL)$")

    @model_validator(mode="after")
    def _ports_exist(self) -> HcmConfig:
        if self.port_base + self.port_count - 1 > PORT_MAX:
            raise ValueError(f"port_base + port_count - 1 is above {PORT_MAX}")
        if self.metrics is not None:
            try:
                listen_place(self.metrics, "metrics")
            except InvalidConfiguration as error:
                raise ValueError(str(error)) from None
        return self


class CoordinatorConfig(Config):
    """The coordinator of one machine: what clients take for a ZooKeeper. Its journal is in `data_dir`."""

    data_dir: Path = Path("/var/lib/roq-coordinator")
    address: str = "127.0.0.1"  # to bind
    port: int = Field(default=2181, ge=0, le=PORT_MAX)  # 0: any free one
    tick_seconds: float = Field(default=0.5, ge=0.01, le=60.0)  # how often it is looked which sessions are over
    force_sync: bool = True  # False: what was answered outlives kill -9, but a power cut may cost the last of it
    session_seconds_min: float | None = Field(default=None, gt=0)  # a client gets no shorter session; None: 2 ticks
    session_seconds_max: float | None = Field(default=None, gt=0)  # nor a longer one; None: 20 ticks
    log_path: Path | None = None  # standard error if not given
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else one JSON object a line
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR|CRITICAL)$")

    @model_validator(mode="after")
    def _sessions_have_a_range(self) -> CoordinatorConfig:
        least, most = self.session_range
        if least > most:
            raise ValueError(f"sessions of at least {least:g} s and at most {most:g} s")
        return self

    @property
    def session_range(self) -> tuple[float, float]:
        """The shortest and the longest time-out of a session, in seconds."""
        return self.session_seconds_min or 2 * self.tick_seconds, self.session_seconds_max or 20 * self.tick_seconds


class FollowerConfig(Config):
    """A store's part in shuffles. It is read from the environment of the HCM that started the store."""

    shuffle_memory_bytes: int = Field(default=256 * 1024 * 1024, ge=32 * 1024 * 1024)  # of rows, in both roles together


def listen_place(text: str, what: str) -> tuple[str, int]:
    """Host and port of `[HOST]:PORT`, without a host all of this machine. what: is set to it. Raises InvalidConfiguration."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
        raise InvalidConfiguration(f"{what} is [HOST]:PORT, got {text!r}")
    return host.strip("[]") or "0.0.0.0", int(port)


def load(model: type[M], path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> M:
    """The configuration: `path` (TOML, keys are field names), then ROQ_<FIELD> variables, then `flags` that are not None.

    Raises InvalidConfiguration for an unreadable file, an unknown key in file or flags, or a value out of range. Other
    ROQ_* variables are left alone: one environment serves several programs.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_file_values(path))
    for field in model.model_fields:
        text = environment.get(ENVIRONMENT_PREFIX + field.upper())
        if text is not None:
            values[field] = text
    values.update((key, value) for key, value in flags.items() if value is not None)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
        raise InvalidConfiguration(f"configuration: {reasons}") from None


def _file_values(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfiguration(f"can't read configuration file {path}: {error}") from error

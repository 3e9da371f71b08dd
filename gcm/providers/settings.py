"""The file that says where a GCM gets hosts from: TOML, readable for its user alone, as it may have credentials.

A text in `cloud.arguments` and `command.environment` that begins with `$` is the environment variable of that name.
"""

from __future__ import annotations

import stat
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from gcm.providers.command import CommandProvider
from gcm.providers.provider import HostProvider
from roq.config import Config
from roq.errors import InvalidConfiguration

START = "set -a; . /etc/roq/hcm.env; set +a; exec roq-hcm --address $(hostname -I | cut -d' ' -f1)"
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class DockerSettings(Config):
    """[docker]"""

    image: str = "roq:latest"
    network: str
    engine: str | None = None  # its address; else as DOCKER_HOST says


class CloudSettings(Config):
    """[cloud]"""

    driver: str  # as libcloud names it
    size: str
    image: str
    start: str = START  # shell, on the new machine
    user_data: str = "ex_userdata"  # the argument of the driver's create_node that takes cloud-init's
    arguments: dict[str, Any] = Field(default_factory=dict)  # of the driver: key, secret, region
    options: dict[str, Any] = Field(default_factory=dict)  # of its create_node


class CommandSettings(Config):
    """[command]"""

    program: list[str] = Field(min_length=1)
    environment: dict[str, str] = Field(default_factory=dict)


class ProcessSettings(Config):
    """[process]"""

    directory: Path


class FleetConfig(Config):
    """The file. cards: a folder with NAME.card for each host that may come, from `roq ca sign host`; or authority: the file
    that signs them, if this machine shall be able to."""

    provider: Literal["docker", "cloud", "command", "process"]
    exchanges_max: int = Field(default=8, ge=1)  # of each host
    zookeeper: str | None = None  # as new hosts reach it; else the GCM's own
    cards: Path | None = None
    authority: Path | None = None
    call_seconds: float = Field(default=120.0, gt=0, le=600)  # bound of one call
    environment: dict[str, str] = Field(default_factory=dict)  # further settings of roq-hcm: ROQ_…
    docker: DockerSettings | None = None
    cloud: CloudSettings | None = None
    command: CommandSettings | None = None
    process: ProcessSettings | None = None


def load_fleet(path: Path, environment: Mapping[str, str]) -> FleetConfig:
    """The file's. Raises InvalidConfiguration."""
    try:
        if path.stat().st_mode & OTHERS:
            raise InvalidConfiguration(f"{path} may have credentials and others may read it: chmod 600 {path}")
        values = tomllib.loads(path.read_text())
        config = FleetConfig.model_validate(values)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfiguration(f"can't read the fleet's file {path}: {error}") from error
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors())
        raise InvalidConfiguration(f"{path}: {reasons}") from None
    if getattr(config, config.provider) is None:
        raise InvalidConfiguration(f"{path}: provider {config.provider!r} needs a table [{config.provider}]")
    if config.cards is not None and config.authority is not None:
        raise InvalidConfiguration(f"{path}: cards are in a folder or made by an authority, not both")
    if strange := [key for key in config.environment if not key.startswith("ROQ_")]:
        raise InvalidConfiguration(f"{path}: environment has settings of roq-hcm alone (ROQ_…), not {strange[0]}")
    return config.model_copy(update=_looked_up(config, environment))


def _looked_up(config: FleetConfig, environment: Mapping[str, str]) -> dict[str, Any]:
    def value(text: Any) -> Any:
        if not isinstance(text, str) or not text.startswith("$"):
            return text
        if text[1:] not in environment:
            raise InvalidConfiguration(f"the fleet's file names the environment variable {text}, which is not set")
        return environment[text[1:]].strip()  # a line's end would be refused with the whole header, key and all, in the reason

    found: dict[str, Any] = {}
    if config.cloud is not None:
        arguments = {key: value(text) for key, text in config.cloud.arguments.items()}
        found["cloud"] = config.cloud.model_copy(update={"arguments": arguments})
    if config.command is not None:
        variables = {key: value(text) for key, text in config.command.environment.items()}
        found["command"] = config.command.model_copy(update={"environment": variables})
    return found


def provider_of(config: FleetConfig, address: str) -> HostProvider:
    """What makes its hosts. address: of the GCM. Raises InvalidConfiguration, ProviderFailed: a library is not installed."""
    seconds = config.call_seconds
    if config.provider == "command" and (command := config.command):
        return CommandProvider(command.program, seconds, command.environment)
    module: Any = import_module(f"gcm.providers.{config.provider}")
    made: HostProvider
    if config.provider == "docker" and (docker := config.docker):
        made = module.DockerProvider(docker.image, docker.network, seconds, docker.engine)
    elif config.provider == "cloud" and (cloud := config.cloud):
        driver = module.cloud_driver(cloud.driver, cloud.arguments, seconds)
        made = module.CloudProvider(driver, cloud.size, cloud.image, cloud.start, cloud.user_data, cloud.options)
    elif config.provider == "process" and (process := config.process):
        made = module.ProcessProvider(process.directory, address)
    else:
        raise InvalidConfiguration(f"provider {config.provider!r} needs a table [{config.provider}]")
    return made

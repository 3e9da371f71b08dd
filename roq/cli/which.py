"""Which cluster a command means, and why that one: the first of these that says something.

    --cluster              addresses, or the name of a context
    ROQ_CLUSTER            the same
    ROQ_CONFIG             a file with `cluster = "zk1:2181"`
    the context in use     `roq context use NAME`
    client.toml            the same as ROQ_CONFIG's, in ~/.config/roq, else in /etc/roq
    127.0.0.1:2181         where `roq up` starts one

Contexts are in ~/.config/roq/contexts.json, for its owner alone. Programs are told their cluster by whoever wrote them: what a
shell has in use must not decide where a program writes, so nothing of this is for `roq.connect`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from roq.errors import InvalidConfiguration
from roq.runtime.places import configuration_home
from roq.runtime.security import process_security, use_card, write_secret

DEFAULT_ADDRESS = "127.0.0.1:2181"
FILES = (configuration_home() / "client.toml", Path("/etc/roq/client.toml"))


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the command line can be configured with. No pydantic here: it would cost every command 50 ms."""

    cluster: str | None = None


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster under a name. address: of its ZooKeeper servers; card: path of the card for it, "" for none of its own."""

    address: str
    card: str = ""


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON of contexts.json. current: the one in use, "" if none is."""

    current: str = ""
    contexts: dict[str, Context] = {}


class Choice(NamedTuple):
    """The cluster that was named. card: of its context; why: in words; context: its name, "" if it is no context."""

    address: str
    why: str
    context: str = ""
    card: str = ""


def contexts_file() -> Path:
    """Where the contexts are."""
    return configuration_home() / "contexts.json"


def read_contexts(path: Path) -> Contexts:
    """None there: no contexts. Raises InvalidConfiguration for a file that can't be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Contexts)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except (OSError, msgspec.MsgspecError) as error:
        told = f"contexts in {path}: {error}; repair or remove the file, then `roq context add`"
        raise InvalidConfiguration(told) from None


def write_contexts(path: Path, contexts: Contexts) -> None:
    """For its owner alone. Raises InvalidConfiguration."""
    try:
        write_secret(path, contexts)
    except OSError as error:
        raise InvalidConfiguration(f"can't write {path}: {error.strerror}; XDG_CONFIG_HOME names another place") from None


def choose(
    flag: str | None,
    environment: Mapping[str, str] = os.environ,
    files: tuple[Path, ...] = FILES,
    contexts: Path | None = None,
) -> Choice | None:
    """The cluster that was named, None if none was. contexts: their file. Raises InvalidConfiguration for a file that can't be
    read or is wrong."""
    named, option = flag or environment.get("ROQ_CLUSTER"), "--cluster" if flag else "ROQ_CLUSTER"
    config = environment.get("ROQ_CONFIG")
    if not named and config:
        return _configured(Path(config), f"ROQ_CONFIG: {config}")
    known = read_contexts(contexts or contexts_file())
    if named:
        if (found := known.contexts.get(named)) is None:
            return Choice(named, option)
        return Choice(found.address, f"{option}: context {named}", named, found.card)
    if known.current in known.contexts:
        found = known.contexts[known.current]
        return Choice(found.address, f"context {known.current} is in use", known.current, found.card)
    file = next((path for path in files if path.exists()), None)
    return _configured(file, str(file)) if file is not None else None


def _configured(path: Path, why: str) -> Choice | None:
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), ClientConfig)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidConfiguration(f"configuration file {path}: {error}") from None
    return Choice(found.cluster, why) if found.cluster else None


def take_card(choice: Choice) -> None:
    """The card of its context is this process's from now on, unless it was given one by --card or ROQ_CARD. Raises
    InvalidConfiguration, AccessDenied: it can't be used."""
    if choice.card and process_security() is None:
        use_card(Path(choice.card))

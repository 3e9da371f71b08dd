"""What the users of a proxy may do, by the names that its header has. Pure, but for reading the file.

    alice = ["admin *", "describe *"]       TOML: rights as `roq access grant` takes them
    "*"   = ["describe *"]                  whoever else the proxy vouches for; nobody else without it

Without a file each of them may look at everything, and change nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from roq.cli.access import grants_of
from roq.console.errors import NotSignedIn
from roq.console.identity import Person, proxied
from roq.errors import CallError, InvalidConfiguration
from roq.wire.card import Grant, Right
from roq.wire.kpi import HISTORY_DECISIONS, HISTORY_KPIS

EVERYBODY = "*"
NAME_CHARACTERS_MAX = 200
Users = Mapping[str, tuple[Grant, ...]]
HISTORY = tuple(Grant(Right.READ, name) for name in (HISTORY_KPIS, HISTORY_DECISIONS))
LOOKERS: Users = {EVERYBODY: (Grant(Right.DESCRIBE, "*"), *HISTORY)}


def read_users(path: Path) -> Users:
    """Raises InvalidConfiguration."""
    try:
        told = msgspec.convert(tomllib.loads(path.read_text()), dict[str, list[str]])
        return {name: tuple(grant for words in rights for grant in grants_of(words.split())) for name, rights in told.items()}
    except OSError as error:
        raise InvalidConfiguration(f"can't read the users {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError, CallError) as error:
        raise InvalidConfiguration(f'users {path}: {error}; a line is: alice = ["describe *", "admin orders.*"]') from None


def user(name: str, users: Users) -> Person:
    """Raises NotSignedIn: the proxy vouches for nobody, or for somebody who may nothing."""
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise NotSignedIn("the proxy in front of the console says nobody's name")
    grants = users.get(name, users.get(EVERYBODY))
    if grants is None or name == EVERYBODY:
        raise NotSignedIn(f"{name} is none of the console's users")
    return proxied(name, grants)

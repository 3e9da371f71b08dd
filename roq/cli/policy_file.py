"""Reading and writing scaling policies as TOML files."""

from __future__ import annotations

from pathlib import Path

from roq.client.overview import policy_tables
from roq.errors import InvalidPolicy
from roq.wire.policy import Policy, policy_from_toml


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

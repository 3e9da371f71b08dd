"""Where RoQ's files of a user are."""

from __future__ import annotations

import os
from pathlib import Path


def configuration_home() -> Path:
    """Folder of settings, cards and the authority; where nothing can be if this user has no home."""
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "roq"
    except RuntimeError:
        return Path(os.devnull) / "roq"

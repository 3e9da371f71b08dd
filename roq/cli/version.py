"""`roq version`."""

from __future__ import annotations

import platform
from importlib import metadata

from roq.cli.address import JsonOption
from roq.cli.output import print_json
from roq.runtime.sockets import zeromq_versions

DISTRIBUTION = "roq-messaging"


def installed_version() -> str:
    """The installed distribution's version, `source` when run from a source tree."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "source"


def version(json: JsonOption = False) -> None:
    """Print the versions of RoQ and of what it stands on."""
    found = {
        "roq": installed_version(),
        "python": platform.python_version(),
        **zeromq_versions(),
    }
    if json:
        print_json(found)
    else:
        print(", ".join(f"{name} {number}" for name, number in found.items()))

"""Which RoQ this is."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "roq-messaging"
SOURCE = "source"


def installed_version() -> str:
    """The installed distribution's version, SOURCE when run from a source tree."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return SOURCE

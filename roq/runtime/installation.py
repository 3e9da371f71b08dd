"""What is installed here: which RoQ, and what only an extra of roq-messaging brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec

DISTRIBUTION = "roq-messaging"
SOURCE = "source"
# What is imported of an extra's packages; pyproject.toml says which versions.
BRINGS = {
    "arrow": ("pyarrow",),
    "shuffle": ("numpy", "pyarrow"),
    "spark": ("pyspark", "py4j", "pyarrow", "pandas", "numpy"),
    "testing": ("pytest", "docker"),
    "metrics": ("prometheus_client",),
    "fleet": ("docker",),
    "cloud": ("libcloud",),
    "postgresql": ("psycopg",),
    "jetstream": ("nats",),
    "console": ("fastapi", "starlette", "uvicorn", "websockets"),
}


def installed_version() -> str:
    """The installed distribution's version, SOURCE when run from a source tree."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return SOURCE


def install(extra: str) -> str:
    """The command, quoted for every shell."""
    return f'pip install "roq-messaging[{extra}]"'


def missing(extra: str) -> list[str]:
    """What of an extra is not installed here."""
    return [each for each in BRINGS[extra] if find_spec(each) is None]


@contextmanager
def brought_by(extra: str, what: str) -> Iterator[None]:
    """For imports: a package of this extra that is missing is told by an ImportError that names the extra. what: needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) not in BRINGS[extra]:
            raise
        raise ModuleNotFoundError(f"{what} needs {package}: {install(extra)}", name=package) from error

"""Where a job's data lies: paths of this machine and URLs, which of them lie in each other, and a folder replaced as a whole.

A place is written as for Spark: a path, file:/path, file:///path, or a URL of what Hadoop has a file system for (s3a://…, hdfs://…).
Nothing in it is percent-encoded, which is how Spark reads it too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from roq.errors import CallError

SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<rest>.*)", re.DOTALL)
NAMES_MAX = 1000  # of a folder's files that are looked at
PATTERN = re.compile(r"[*?\[{]")  # Hadoop's patterns of names begin so


def is_local(place: str) -> bool:
    """Is it a path of this machine, however it is written?"""
    found = SCHEME.fullmatch(place)
    return found is None or found["scheme"].lower() == "file"


def local_path(place: str, what: str) -> Path:
    """The path. what: the argument, for the error. Raises CallError: it is somewhere else."""
    found = SCHEME.fullmatch(place)
    if found is None:
        return Path(place)
    rest = found["rest"]
    if found["scheme"].lower() != "file" or (rest.startswith("//") and not rest.startswith("///")):
        raise CallError(f"{what} has to be a folder of this machine (a path or file:///path), not {place}")
    return Path("/" + rest.lstrip("/")) if rest.startswith("/") else Path(rest)


def overlapping(out: str, places: Iterable[str]) -> str | None:
    """The first place that is `out`, lies in it, or has it inside; links and patterns of this machine are followed."""
    target = _parts(out)
    for place in places:
        for each in _spread_out(place):
            parts = _parts(each)
            shorter = min(len(parts), len(target))
            if parts[:shorter] == target[:shorter]:
                return each
    return None


def _spread_out(place: str) -> Iterator[str]:
    """Files that a pattern stands for; elsewhere, where the lookup is Spark's, the folder that it begins in."""
    pattern = PATTERN.search(place)
    if pattern is None:
        yield place
    elif is_local(place) and "{" not in place:
        yield from glob(str(local_path(place, "data")))
    else:
        yield place[: place.rfind("/", 0, pattern.start()) + 1]


def _parts(place: str) -> tuple[str, ...]:
    """From the root downwards, so that a folder's are the beginning of what is in it."""
    if is_local(place):
        return "file:", *local_path(place, "data").resolve().parts
    scheme, _, rest = place.partition(":")
    return f"{scheme.lower()}:", *(part for part in rest.split("/") if part not in ("", "."))


@contextmanager
def written_whole(spark: SparkSession, out: str) -> Iterator[str]:
    """A folder beside `out` to write into; it becomes `out` when the block ends well, in place of what was there. When it
    fails, what was there stays as it was. Only between two renames there is no `out`: then OUT.old-… has the former rows."""
    token = secrets.token_hex(4)
    files, paths = _file_system(spark, out)
    final, new, old = (paths(f"{out.rstrip('/')}{end}") for end in ("", f".new-{token}", f".old-{token}"))
    try:
        yield str(new)
        former = files.exists(final)
        if former and not files.rename(final, old):
            raise CallError(f"{out} could not be replaced; it is as before")
        if not files.rename(new, final):
            back = former and files.rename(old, final)
            where = "it is as before" if back or not former else f"what it was is in {old}"
            raise CallError(f"{out} could not be written; {where}")
        if former:
            files.delete(old, True)
    finally:
        with suppress(Py4JError):  # why it failed is more to the point
            files.delete(new, True)


def is_there(spark: SparkSession, place: str) -> bool:
    """Is there a file or folder? Asks the file system that Spark would write to."""
    files, paths = _file_system(spark, place)
    return bool(files.exists(paths(place)))


def file_names(spark: SparkSession, place: str) -> list[str]:
    """Of a file, of a folder's files at any depth, of what a pattern stands for: NAMES_MAX at most that Spark would read."""
    files, paths = _file_system(spark, place)
    found: list[str] = []
    for status in files.globStatus(paths(place)) or []:
        each = files.listFiles(status.getPath(), True)
        while each.hasNext() and len(found) < NAMES_MAX:
            path = str(each.next().getPath())
            if not any(part.startswith(("_", ".")) for part in path.removeprefix(str(status.getPath())).split("/")):
                found.append(path)
    return found


def _file_system(spark: SparkSession, place: str) -> tuple[Any, Any]:
    """Hadoop's file system of a place, and its class of paths."""
    paths = spark._jvm.org.apache.hadoop.fs.Path
    return paths(place).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), paths

"""`roq pipeline ls|run`: ready Spark jobs (roq/spark/pipeline). PySpark is looked for, never imported.

A job takes this process over, so that signals, standard streams and exit code are its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from roq.cli.address import JsonOption
from roq.cli.output import console, print_json, table
from roq.errors import CallError
from roq.runtime.installation import install, missing

app = typer.Typer(help="Ready Spark jobs: list, run.", no_args_is_help=True)
JOBS = {
    "archive": "Work queues and recorded queues into Parquet, every task and message once.",
    "dead_letters": "What went wrong in a work queue: its dead letters by error, attempts, age and size.",
    "kpi": "KPI history of publish/subscribe queues in Parquet, and a capacity report made of it.",
    "sort": "Sort a large data set and drop what is in it twice, through a shuffle.",
}


class JobRow(msgspec.Struct):
    """A job for JSON."""

    name: str
    about: str


@app.command("ls")
def list_jobs(json: JsonOption = False) -> None:
    """List the jobs there are."""
    if json:
        print_json([JobRow(name, about) for name, about in JOBS.items()])
        return
    console().print(table("", ("JOB", "WHAT IT DOES"), list(JOBS.items())))


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="JOB", help="See `roq pipeline ls`.", show_default=False)],
) -> None:
    """Run a job with its own arguments; `roq pipeline run JOB --help` shows them."""
    if name in {"-h", "--help"}:
        print(context.get_help())
        return
    job = name.replace("-", "_")
    if job not in JOBS:
        raise CallError(f"there is no job {name!r}; there are {', '.join(JOBS)}")
    if lacking := missing("spark"):
        raise CallError(f"{name} needs {', '.join(lacking)}: {install('spark')}")
    if not has_java(os.environ):
        told = "Spark needs Java 17 or newer, and there is neither JAVA_HOME nor a `java` here"
        raise CallError(f"{told}: on Debian, apt-get install default-jre-headless (the extra 'local' has too little of it)")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"roq.spark.pipeline.{job}", *context.args])


def has_java(environment: Mapping[str, str]) -> bool:
    """Whether PySpark will find one: it takes JAVA_HOME, else `java`."""
    return bool(environment.get("JAVA_HOME") or shutil.which("java", path=environment.get("PATH")))

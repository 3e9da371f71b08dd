"""The command tree, and the one place where errors become exit codes: 0 done, 1 refused, 2 usage, 130 interrupted."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from roq.cli import (
    bench,
    chaos,
    demo,
    doctor,
    down,
    host,
    pipeline,
    policy,
    pub,
    queue,
    shuffle,
    status,
    sub,
    task,
    top,
    up,
    version,
)
from roq.cli.output import print_error
from roq.errors import RoqError
from roq.runtime.observe import set_up_logging

INTERRUPTED = 128 + signal.SIGINT


class RoqGroup(TyperGroup):
    """A RoqError becomes one line on stderr and exit code 1, Ctrl-C 130, a reader that left a quiet end."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        set_up_logging("roq", os.environ.get("ROQ_LOG_LEVEL", "ERROR"))
        try:
            return super().invoke(ctx)
        except RoqError as error:
            print_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _silence_stdout()
            raise typer.Exit(0) from None
        except OSError as error:  # a full disk, a standard stream that is closed
            print(f"roq: {type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


def _silence_stdout() -> None:
    """The reader has gone; what the interpreter still flushes at exit goes nowhere instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


app = typer.Typer(
    name="roq",
    cls=RoqGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def roq(
    version_asked: Annotated[
        bool, typer.Option("--version", callback=version.print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """RoQ: an elastic message system. Start with `roq up`, or see it work: `roq demo`."""


app.command("up")(up.up)
app.command("down")(down.down)
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("pub")(pub.pub)
app.command("sub")(sub.sub)
app.command("chaos")(chaos.chaos)
app.command("doctor")(doctor.doctor)
app.command("version")(version.version)
app.add_typer(queue.app, name="queue")
app.add_typer(host.app, name="host")
app.add_typer(policy.app, name="policy")
app.add_typer(task.app, name="task")
app.add_typer(shuffle.app, name="shuffle")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(bench.app, name="bench")


def _open_standard_streams() -> None:
    """A closed standard stream (`roq … <&-`) becomes /dev/null; else the event loop would get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode)  # noqa: SIM115  it stays open as long as the process lives
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )


def main() -> None:
    """Console script `roq`."""
    _open_standard_streams()
    app()
